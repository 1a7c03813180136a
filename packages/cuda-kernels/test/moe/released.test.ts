/** Calls of which nothing is combined, beside ranks that were refused them. */
import { setTimeout as sleep } from 'node:timers/promises';
import { expect, it } from 'vitest';
import { inputsOf, type MoeCase, openFor, tensorOf } from './case.js';
import { onRanks, type WorldTransport } from './world.js';

const full = process.env.EP_TEST_FULL === '1';
/** Where puts are counted, what says that a call is refused has no name; where they are stores it has. */
const transports: readonly WorldTransport[] = full ? ['ibgda', 'hostile', 'shm', 'shm+ibgda'] : ['ibgda'];

function event(): { readonly reached: Promise<void>; readonly reach: () => void } {
  let reach = (): void => {};
  const reached = new Promise<void>((resolve) => {
    reach = resolve;
  });
  return { reached, reach };
}

it.each(transports)(
  'low latency: one that releases a call which it does not know to be refused takes and owes what it should in the next, over %s',
  {
    timeout: 60_000,
  },
  async (transport) => {
    // Two experts each. Ranks 3 and 4 are late with what they owe rank 0; rank 2 does without rank 0, so only rank 1 tells it, and that where it would await results.
    const early = [
      [6, 8, 0, 2],
      [2, 3, 3, 2],
      [4, 2, 3, 5],
      [6, 7, 7, 6],
      [8, 9, 9, 8],
    ].map((choices) => Int32Array.from(choices));
    const later = [Int32Array.of(0, 2, 3, 1), Int32Array.of(0, 4, 5, 1), Int32Array.of(4, 2, 3, 5)];
    const one: MoeCase = {
      worldSize: 5,
      mode: 'low-latency',
      seed: 21,
      experts: 10,
      topK: 2,
      hidden: 64,
      tokens: early.map(() => 2),
      options: { calls: 1 },
    };
    const inputs = inputsOf(one);
    const rows = (rank: number, factor: number) =>
      tensorOf(
        inputs.dtype,
        2,
        one.hidden,
        inputs.x[rank]!.map((value) => factor * value),
      );
    const [gone, written, waits] = [event(), event(), event()];
    let refusing = 3;
    let owing = 2;
    await onRanks(5, transport, async (of) => {
      const { rank } = of;
      const buffer = await openFor(of, one, inputs);
      try {
        for (const late of [3, 4]) {
          const { x: y, handle } = await buffer.dispatch(rows(rank, 1), early[rank]!);
          if (rank === late) {
            await gone.reached;
            const hook = await buffer.combineSend(y, handle);
            if (--owing === 0) written.reach();
            await hook.receive({ timeoutMs: 100 });
            return;
          }
          const { lostRanks } = await buffer.combine(y, handle, { timeoutMs: 700 });
          expect(lostRanks[late]).toBe(1);
        }
        if (rank !== 1) buffer.leaveOut([2 - rank]);
        const dispatch = buffer.dispatch(rows(rank, 1), early[rank]!, { timeoutMs: 1400 });
        if (rank === 2) await (await dispatch).handle.release();
        else await expect(dispatch).rejects.toMatchObject({ code: 'EP_BUSY' });
        if (--refusing === 0) gone.reach();
        await written.reached;
        const { x: y, handle } = await buffer.dispatch(rows(rank, 2), later[rank]!);
        // Nothing of rank 1's is there yet but what it said of the refused call.
        if (rank === 1) await waits.reached;
        const combined = buffer.combine(y, handle);
        if (rank === 2) {
          const seen = combined.then(() => 'ended');
          expect(await Promise.race([seen, sleep(200, 'waiting')])).toBe('waiting');
          waits.reach();
        }
        expect((await combined).y.data).toEqual(rows(rank, 4).data);
        expect([...buffer.losses.keys()].sort()).toEqual(rank === 1 ? [3, 4] : [2 - rank, 3, 4]);
      } catch (error) {
        for (const { reach } of [gone, written, waits]) reach();
        throw error;
      } finally {
        await buffer.close();
      }
    });
  },
);
