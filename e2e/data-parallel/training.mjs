/**
 * The training itself, whoever the ranks are and however they meet. The weights have the same bits whoever computed what, and however many died: a step's samples
 * belong to shards, of which there are always SHARDS, each shard's gradient is computed by one rank, and the shards are added in their own order, not in that of
 * the ranks. That costs an all-reduce of SHARDS gradients. A training that can do without takes `group.allReduce(gradient, { op: 'avg' })`: it adds in the order of
 * the ranks, also with the same bits everywhere, but with other bits when there are fewer ranks.
 */
import { createHash } from 'node:crypto';
import { Model, Samples } from './model.mjs';

const SHARDS = 4;
const SEED = 1;

const digestOf = (elements) => createHash('sha256').update(elements).digest('hex');

export class Training {
  /** Of all steps that are done. What outlives a group, this and the weights, lies in ordinary memory. */
  losses = [];
  #rank;
  #batch;
  #fault;
  #samples = new Samples(SEED);

  /** `fault`: looks on while a step is reduced. */
  constructor({ rank, hidden, batch, fault }) {
    this.#rank = rank;
    this.#batch = batch;
    this.#fault = fault;
    this.model = new Model(hidden, SEED);
    /** Behind each shard's gradient: the sum of its losses, and how many samples that is. */
    this.gradient = Model.lengthOf(hidden);
  }

  /** A gradient of each shard, in group memory: peers read and write it in place. */
  slotsOf(group) {
    return Array.from({ length: SHARDS }, () => group.allocate('f32', this.gradient + 2).data);
  }

  /** Computes this rank's shards, adds all, descends. Throws without having changed anything if a rank is lost. Returns who took part. */
  async takeStep(group, slots) {
    const step = this.losses.length;
    const [LOSS, COUNT] = [this.gradient, this.gradient + 1];
    const active = group.activeRanks;
    const mine = slots.filter((_, shard) => active[shard % active.length] === this.#rank);
    for (const slot of slots) {
      // Added to -0 every number stays what it is, 0 and -0 too: the sum of a slot is what its one owner has computed.
      if (!mine.includes(slot)) slot.fill(-0);
      else {
        const shard = this.#samples.of(step, slots.indexOf(slot), { shards: SHARDS, batch: this.#batch });
        slot[LOSS] = this.model.gradientOf(shard, slot.subarray(0, LOSS));
        slot[COUNT] = shard.length;
      }
    }
    this.#fault?.beforeReduction(step);
    const reductions = slots.map((slot) => group.allReduce(slot));
    await this.#fault?.insideReduction(step, slots, mine, reductions);
    // HAZARD: behind a call that lost a rank the others are still carried out, without that rank, and write to their slots until they have ended.
    const ends = await Promise.allSettled(reductions);
    for (const { reason } of ends) if (reason !== undefined) throw reason;

    const [sum, ...more] = slots;
    for (const slot of more) for (let i = 0; i < slot.length; i++) sum[i] += slot[i];
    const expected = SHARDS * this.#batch;
    if (sum[COUNT] !== expected) throw new Error(`step ${step}: ${sum[COUNT]} samples instead of ${expected}`);
    for (let i = 0; i < LOSS; i++) sum[i] /= sum[COUNT];
    this.model.descend(sum);
    this.losses.push(sum[LOSS] / sum[COUNT]);
    return active;
  }

  digests() {
    return { weights: digestOf(this.model.weights), velocity: digestOf(this.model.velocity) };
  }
}
