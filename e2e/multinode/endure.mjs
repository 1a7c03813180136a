/** Takes steps of a workload while the test lets hosts and links fail, and says what became of it. */
import { readdirSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';
import { workloads } from './workloads.mjs';

/** Steps that must go well after the last loss. */
const STEPS_AFTER = 5;
const PAUSE_MS = 10;
/** After so many, all that is made once has been made. */
const STEPS_UNTIL_WARM = 50;

/** Longer than any fault that ends, and than the patience of calls. */
const HUNG_MS = 75_000;

/** Rejects where it takes so long that nothing can come of it any more, and says what was awaited. */
async function within(promise, describe) {
  const overdue = new AbortController();
  const watch = delay(HUNG_MS, undefined, { signal: overdue.signal }).then(
    () => {
      throw new Error(`nothing came of ${describe()} in ${HUNG_MS} ms`);
    },
    () => promise,
  );
  try {
    return await Promise.race([promise, watch]);
  } finally {
    overdue.abort();
  }
}

const isLoss = (error) => error?.code === 'EP_PEER_LOST';

/**
 * After each step the ranks that are left tell each other whether they may stop; all do so after the same step. A vote is a word in each other's memory, and a signal that
 * counts votes. Who is lost meanwhile votes no more.
 */
class Votes {
  #memory;
  #endpoints;
  #rank;
  #votes = 0;

  static async open({ transport, rank, worldSize }) {
    const votes = new Votes();
    votes.#rank = rank;
    // Two words for each rank and one's own: nobody is ahead by more than one vote.
    votes.#memory = await transport.allocate({ byteLength: 16 * (worldSize + 1), signalSlots: worldSize });
    votes.#endpoints = await Promise.all(Array.from({ length: worldSize }, (_, peer) => transport.connect(peer)));
    return votes;
  }

  /** `left`: a set, from which who turns out to be lost is taken. Returns whether all of them say so. */
  async all(mayStop, left) {
    const memory = this.#memory;
    const parity = this.#votes++ % 2;
    const place = (rank) => 8 * (2 * rank + parity);
    const own = place(this.#endpoints.length);
    memory.view('u8', own, 8)[0] = mayStop ? 1 : 0;
    const said = await Promise.all(
      [...left].map(async (peer) => {
        try {
          await this.#endpoints[peer].put(memory.local(own, 8), memory.remote(peer, place(this.#rank), 8), {
            signal: { slot: this.#rank, op: 'inc' },
          });
          await memory.signals.until(peer, { cmp: 'ge', value: BigInt(this.#votes) }, { peers: [peer] });
          return memory.view('u8', place(peer), 8)[0] === 1;
        } catch (error) {
          if (!isLoss(error)) throw error;
          left.delete(peer);
          return true;
        }
      }),
    );
    return said.every(Boolean);
  }
}

/** What this process holds. */
const footprint = () => ({
  megabytes: Math.round(process.memoryUsage().rss / 2 ** 20),
  descriptors: readdirSync('/proc/self/fd').length,
});

/** `data.gone`: by rank, whom it is to lose; it then stops by itself. Where nobody is to be lost, the test says when. */
export async function endure({ transport, store, rank, worldSize, data, ready, told }) {
  const workload = await workloads[data.workload]({ transport, store, rank, worldSize, data });
  const votes = await Votes.open({ transport, rank, worldSize });
  const left = new Set(Array.from({ length: worldSize }, (_, other) => other));
  const toLose = data.gone?.[rank] ?? [];
  let enough = false;
  told.then(() => {
    enough = true;
  });
  let [steps, since, longestMs, ended] = [0, 0, 0, false];
  let early = footprint();
  const losses = [];
  const knows = () => `rank ${rank} with ${[...left]} left, gone ${workload.gone()}, losses ${JSON.stringify(losses)}`;
  for (let done = false; !done; ) {
    const began = performance.now();
    try {
      if (!ended) await within(workload.step(steps), () => `step ${steps}, ${knows()}`);
      steps++;
      since++;
    } catch (error) {
      if (!isLoss(error)) throw error;
      ended = workload.endsWithLoss;
      const { lost, rank: named } = error.context;
      losses.push({ step: steps, lost: lost ?? (named === undefined ? [] : [named]), ms: performance.now() - began });
      since = 0;
    }
    if (steps === 1 && since === 1) await ready();
    for (const gone of workload.gone()) left.delete(gone);
    const before = left.size;
    const isWhole = toLose.length === 0;
    const settled = toLose.every((gone) => !left.has(gone)) && since >= STEPS_AFTER;
    done = await within(votes.all(isWhole ? enough : settled, left), () => `the vote after ${steps} steps, ${knows()}`);
    // A loss that only the vote has met is still to come to the workload.
    if (left.size < before) since = 0;
    if (steps <= STEPS_UNTIL_WARM) early = footprint();
    longestMs = Math.max(longestMs, performance.now() - began);
    await delay(PAUSE_MS);
  }
  const value = { steps, longestMs, losses, left: [...left], result: workload.result(), early, late: footprint() };
  await within(workload.close(), () => `the end, ${knows()}`);
  return value;
}
