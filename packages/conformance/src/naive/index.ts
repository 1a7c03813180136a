/**
 * Protocols that are wrong on purpose, kept because each is one that somebody wrote: they work where puts arrive in order and nobody is fast, and
 * must fail over the hostile transport. If one of them passes there, that transport has lost its teeth.
 */
import assert from 'node:assert/strict';
import type { CaseRank, TransportCase } from '../cases/case.js';
import { checkPattern, fillPattern, sleep } from '../cases/expect.js';

const CHUNKS = 16;
const LENGTH = 512;
const ROUNDS = 20;
const WAIT_MS = 1_000;

async function start(rank: CaseRank) {
  const transport = await rank.open();
  const memory = await transport.allocate({ byteLength: 2 * CHUNKS * LENGTH * 2, signalSlots: 2 });
  const [endpoint, self] = [await transport.connect(rank.next), await transport.connect(rank.rank)];
  const target = 2 * CHUNKS * LENGTH;
  /** One of two halves, so that two rounds may be under way. */
  const send = (round: number, chunk: number, signal: boolean): void => {
    const at = ((round % 2) * CHUNKS + chunk) * LENGTH;
    fillPattern(memory, at, LENGTH, rank.rank, round * CHUNKS + chunk);
    const options = signal ? { signal: { slot: 0, op: 'inc' as const } } : undefined;
    endpoint.put(memory.local(at, LENGTH), memory.remote(rank.next, target + at, LENGTH), options);
  };
  const check = (round: number, what: string): void => {
    for (let chunk = 0; chunk < CHUNKS; chunk++) {
      const at = target + ((round % 2) * CHUNKS + chunk) * LENGTH;
      checkPattern(memory, at, LENGTH, rank.previous, round * CHUNKS + chunk, what);
    }
  };
  /** The receiver is busy until the bytes are there, and looks at its counter only then: extra arrivals have overtaken some of them by now. */
  const arrived = async (round: number): Promise<void> => {
    for (const end = Date.now() + WAIT_MS; Date.now() < end; await sleep(0)) {
      try {
        check(round, `round ${round}`);
        return;
      } catch {
        // Not yet.
      }
    }
  };
  return { memory, endpoint, self, send, check, arrived };
}

export const naiveCases: readonly TransportCase[] = [
  {
    id: 'naive/last-signal',
    sentence: 'only the last chunk carries a signal, as if it could not arrive before the others',
    async body(rank) {
      const { memory, endpoint, send, check } = await start(rank);
      for (let round = 0; round < ROUNDS; round++) {
        for (let chunk = 0; chunk < CHUNKS; chunk++) send(round, chunk, chunk === CHUNKS - 1);
        await memory.signals.until(0, { cmp: 'ge', value: BigInt(round + 1) }, { timeoutMs: WAIT_MS });
        check(round, `round ${round}`);
        await endpoint.flush();
        await rank.meet();
      }
    },
  },
  {
    id: 'naive/equality',
    sentence: 'the receiver waits until the counter equals what it expects, while the sender is a round ahead',
    async body(rank) {
      const { memory, endpoint, send, arrived } = await start(rank);
      for (let round = 0; round < ROUNDS; round += 2) {
        const base = BigInt(round * CHUNKS);
        for (const ahead of [0, 1]) for (let chunk = 0; chunk < CHUNKS; chunk++) send(round + ahead, chunk, true);
        await arrived(round);
        await memory.signals.until(0, { cmp: 'eq', value: base + BigInt(CHUNKS) }, { timeoutMs: WAIT_MS });
        await memory.signals.until(0, { cmp: 'eq', value: base + 2n * BigInt(CHUNKS) }, { timeoutMs: WAIT_MS });
        await endpoint.flush();
        await rank.meet();
      }
    },
  },
  {
    id: 'naive/reset-and-reuse',
    sentence: 'the receiver sets its counter back to zero after each round and waits for the same value again',
    async body(rank) {
      const { memory, endpoint, self, send, arrived } = await start(rank);
      const expected = BigInt(CHUNKS);
      for (let round = 0; round < ROUNDS; round += 2) {
        for (const ahead of [0, 1]) for (let chunk = 0; chunk < CHUNKS; chunk++) send(round + ahead, chunk, true);
        for (const ahead of [0, 1]) {
          await arrived(round + ahead);
          await memory.signals.until(0, { cmp: 'ge', value: expected }, { timeoutMs: WAIT_MS });
          // Whatever has arrived of the next round goes with it.
          const seen = memory.signals.peek(0);
          await self.signal(memory, { slot: 0, op: 'add', value: 2n ** 64n - seen });
          await self.flush();
          assert.ok(seen >= expected, `round ${round + ahead}`);
        }
        await endpoint.flush();
        await rank.meet();
      }
    },
  },
];
