/**
 * One rank of a data-parallel training that goes on when a rank dies, and takes in who comes in its place. Started by main.mjs.
 *
 * The weights at the end have the same bits whoever computed what, and however many died: a step's samples belong to shards, of which there are always
 * SHARDS, each shard's gradient is computed by one rank, and the shards are added in their own order, not in that of the ranks. That costs an all-reduce of
 * SHARDS gradients. A training that can do without takes `group.allReduce(gradient, { op: 'avg' })`: it adds in the order of the ranks, also with the same
 * bits everywhere, but with other bits when there are fewer ranks.
 *
 * The group stays, with its memory, whoever comes and goes: survivors take a newcomer in with `recoverRanks` while it waits in `joinGroup`, and all of them then
 * learn from whoever has done most steps. A death at any moment, also in the middle of that, ends the call it hits alike on all who are left.
 */
import { createHash } from 'node:crypto';
import { writeSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';
import { initProcessGroup } from '@ep/collectives';
import { isEpError, openTcpStore } from '@ep/core';
import { Fault } from './fault.mjs';
import { Model, Samples } from './model.mjs';

const SHARDS = 4;
const SEED = 1;
/** Survivors train this many steps before they take in replacements. */
const STEPS_SHORT_HANDED = 4;
/** Between two questions whether they have come. */
const PAUSE_MS = 5;
const TIMEOUT_MS = 30_000;

const { rank, worldSize, port, isReplacement, steps, hidden, batch, death } = JSON.parse(process.argv[2]);

/** Behind each shard's gradient: the sum of its losses, and how many samples that is. */
const LOSS = Model.lengthOf(hidden);
const COUNT = LOSS + 1;
const SLOT = LOSS + 2;

const fault = new Fault(death);
const samples = new Samples(SEED);
const model = new Model(hidden, SEED);
/** Of all steps that are done. What outlives a group, this and the weights, lies in ordinary memory. */
let losses = [];

const now = () => Number(process.hrtime.bigint()) / 1e6;
const tell = (event) => writeSync(1, `${JSON.stringify({ rank, at: now(), ...event })}\n`);

/** Computes this rank's shards, adds all, descends. Throws without having changed anything if a rank is lost. */
async function takeStep(group, slots) {
  const step = losses.length;
  const active = group.activeRanks;
  const mine = slots.filter((_, shard) => active[shard % active.length] === rank);
  for (const slot of slots) {
    // Added to -0 every number stays what it is, 0 and -0 too: the sum of a slot is what its one owner has computed.
    if (!mine.includes(slot)) slot.fill(-0);
    else {
      const shard = samples.of(step, slots.indexOf(slot), { shards: SHARDS, batch });
      slot[LOSS] = model.gradientOf(shard, slot.subarray(0, LOSS));
      slot[COUNT] = shard.length;
    }
  }
  fault.beforeReduction(step);
  const reductions = slots.map((slot) => group.allReduce(slot));
  await fault.insideReduction(step, slots, mine, reductions);
  // HAZARD: behind a call that lost a rank the others are still carried out, without that rank, and write to their slots until they have ended.
  const ends = await Promise.allSettled(reductions);
  for (const { reason } of ends) if (reason !== undefined) throw reason;

  const [sum, ...more] = slots;
  for (const slot of more) for (let i = 0; i < SLOT; i++) sum[i] += slot[i];
  if (sum[COUNT] !== SHARDS * batch)
    throw new Error(`step ${step}: ${sum[COUNT]} samples instead of ${SHARDS * batch}`);
  for (let i = 0; i < LOSS; i++) sum[i] /= sum[COUNT];
  model.descend(sum);
  losses.push(sum[LOSS] / sum[COUNT]);
  tell({ event: 'step', step, loss: losses.at(-1), active });
}

const isLoss = (error) => isEpError(error) && error.code === 'EP_PEER_LOST';

/** Gives everybody what the one knows who has done most steps. */
async function catchUp(group) {
  for (;;) {
    try {
      const done = new Int32Array(worldSize).fill(-1);
      await group.allGatherIntoTensor(done, Int32Array.of(losses.length));
      const root = done.indexOf(Math.max(...done));
      losses = await group.broadcastObject(rank === root ? losses : undefined, { root });
      await group.broadcast(model.weights, { root });
      await group.broadcast(model.velocity, { root });
      return;
    } catch (error) {
      if (!isLoss(error)) throw error;
    }
  }
}

const lostOf = (group) => group.ranks.filter((other) => !group.activeRanks.includes(other));

/** On the survivors: waits until all who were lost have come back, and takes them in. */
async function refill(group) {
  for (;;) {
    const lost = lostOf(group);
    const states = await group.peerState(lost);
    if (states.every((state) => state === 'joining')) return group.recoverRanks(lost);
    await delay(PAUSE_MS);
  }
}

const store = await openTcpStore({ host: '127.0.0.1', port, timeoutMs: TIMEOUT_MS });
const group = await initProcessGroup({ store, rank, worldSize, timeoutMs: TIMEOUT_MS, isExtension: isReplacement });
if (isReplacement) {
  await group.joinGroup();
  await catchUp(group);
  tell({ event: 'joined', step: losses.length });
} else {
  // From here on the death of a rank is noticed. One that never came would be awaited until the timeout.
  await group.barrier();
}
// A gradient of each shard, in group memory: peers read and write it in place.
const slots = Array.from({ length: SHARDS }, () => group.allocate('f32', SLOT).data);
let refillAt = Infinity;
for (;;) {
  if (losses.length === refillAt) {
    await refill(group);
    await catchUp(group);
    refillAt = Infinity;
  }
  if (losses.length === steps) break;
  try {
    await takeStep(group, slots);
  } catch (error) {
    if (!isLoss(error)) throw error;
    tell({ event: 'lost', step: losses.length, lost: lostOf(group), active: group.activeRanks });
    refillAt = Math.min(refillAt, losses.length + STEPS_SHORT_HANDED, steps);
  }
}

const digestOf = (elements) => createHash('sha256').update(elements).digest('hex');
tell({ event: 'done', losses, weights: digestOf(model.weights), velocity: digestOf(model.velocity) });
await group.destroy();
await store.close();
