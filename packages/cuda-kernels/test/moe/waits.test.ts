/** For whom a call has waited, and how long. */
import { setTimeout as sleep } from 'node:timers/promises';
import { rankTopk } from '@ep/plan/moe';
import { expect, it } from 'vitest';
import { inputsOf, type MoeCase, openFor, tensorOf } from './case.js';
import { onRanks, type WorldTransport } from './world.js';

const full = process.env.EP_TEST_FULL === '1';
const transports: readonly WorldTransport[] = full ? ['shm', 'ibgda', 'efa', 'shm+ibgda'] : ['shm'];
const modes = ['low-latency', 'high-throughput'] as const;
const worldSize = 3;
/** Who is late. */
const LATE = 1;
const LATE_MS = 300;

it.each(transports.flatMap((transport) => modes.map((mode) => [mode, transport] as const)))(
  '%s over %s: both halves tell how long each rank was waited for',
  async (mode, transport) => {
    // Everybody sends something to everybody.
    const one: MoeCase = { worldSize, mode, seed: 3, experts: 3, topK: 3, hidden: 32, tokens: [2, 2, 2], dtype: 'f32' };
    const inputs = inputsOf(one);
    const waits = await onRanks(worldSize, transport, async (of) => {
      await using buffer = await openFor(of, one, inputs);
      const { rank } = buffer;
      const x = () => tensorOf('f32', 2, one.hidden, inputs.x[rank]!);
      const come = async (): Promise<void> => {
        await of.allocate({ byteLength: 64, signalSlots: 0 }).then((memory) => memory.close());
        if (rank === LATE) await sleep(LATE_MS);
      };
      await come();
      const { x: rows, handle, waitNs } = await buffer.dispatch(x(), rankTopk(inputs.routing, rank));
      await come();
      const combined = await buffer.combine(rows, handle);
      return [waitNs, combined.waitNs].map((all) => Array.from(all, (ns) => Number(ns) / 1e6));
    });
    for (const [rank, halves] of waits.entries()) {
      for (const [half, ms] of halves.entries()) {
        const who = `rank ${rank}, ${half === 0 ? 'dispatch' : 'combine'}: ${ms.map((one) => one.toFixed(1)).join(', ')} ms`;
        expect(ms.length, who).toBe(worldSize);
        expect(ms[rank], who).toBe(0);
        if (rank === LATE) {
          expect(Math.max(...ms), who).toBeLessThan(LATE_MS / 2);
          continue;
        }
        expect(ms[LATE], who).toBeGreaterThan(LATE_MS / 2);
        expect(ms[worldSize - rank - LATE], who).toBeLessThan(LATE_MS / 2);
      }
    }
  },
);
