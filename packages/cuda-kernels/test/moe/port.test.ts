/** A rank whose own port goes down in the middle of a call: it says so of itself, the others miss it, and nobody hangs. */
import type { IbgdaTransport } from '@ep/ibgda';
import { expect, it } from 'vitest';
import type { DispatchTransport, MoeBuffer } from '../../src/index.js';
import { check, inputsOf, type MoeCase, openFor, planWithout, type RankResult, rowsOfCall, runCall } from './case.js';
import { onRanks } from './world.js';

const worldSize = 3;
const odd = 1;
/** Of a half in which the others wait for it; also for each other, who are threads of this process. */
const LIMIT_MS = 4000;

const caseOf = (mode: MoeCase['mode']): MoeCase => ({
  worldSize,
  mode,
  seed: 5,
  experts: 6,
  topK: 3,
  hidden: 64,
  // Every rank sends rows to every other.
  tokens: [12, 9, 11],
});

async function opened<T>(
  one: MoeCase,
  body: (buffer: MoeBuffer, transport: DispatchTransport) => Promise<T>,
  faults?: string,
): Promise<T[]> {
  const inputs = inputsOf(one);
  return onRanks(
    worldSize,
    'ibgda',
    async (transport) => {
      const buffer = await openFor(transport, one, inputs);
      try {
        return await body(buffer, transport);
      } finally {
        await buffer.close().catch(() => {});
      }
    },
    (rank) => (rank === odd && faults !== undefined ? { faults } : undefined),
  );
}

/** Requests that the NIC of `odd` has tried when its second call begins, when that is dispatched, and at its end. */
async function requestsOf(one: MoeCase): Promise<readonly [number, number, number]> {
  const inputs = inputsOf(one);
  const counted = await opened(one, async (buffer, transport) => {
    const requests = () => Number((transport as unknown as IbgdaTransport).counts().requests);
    await runCall(buffer, one, inputs);
    const begin = requests();
    let dispatched = 0;
    await runCall(buffer, one, inputs, {
      between: () => {
        dispatched = requests();
      },
    });
    return [begin, dispatched, requests()] as const;
  });
  return counted[odd]!;
}

const middle = (from: number, to: number): number => {
  expect(to, 'requests of a half').toBeGreaterThan(from + 4);
  return Math.floor((from + to) / 2);
};

it.each([
  ['low-latency', 'dispatch'],
  ['low-latency', 'combine'],
  ['high-throughput', 'dispatch'],
  ['high-throughput', 'combine'],
] as const)('%s: in the middle of a %s', { timeout: 60_000 }, async (mode, half) => {
  const one = caseOf(mode);
  const inputs = inputsOf(one);
  const [begin, dispatched, end] = await requestsOf(one);
  const skip = half === 'dispatch' ? middle(begin, dispatched) : middle(dispatched, end);
  const results = await opened(
    one,
    async (buffer) => {
      const all: RankResult[] = [await runCall(buffer, one, inputs)];
      const next = () => runCall(buffer, one, rowsOfCall(inputs, all.length), { timeoutMs: LIMIT_MS });
      if (buffer.rank === odd) {
        await expect(next()).rejects.toMatchObject({
          code: 'EP_SYSTEM',
          message: expect.stringMatching(/this rank's own NIC reaches nobody/),
        });
        expect(buffer.losses.size).toBe(0);
        await expect(next()).rejects.toMatchObject({ code: 'EP_POISONED' });
        return all;
      }
      // Whoever had all of its rows when its port went down misses it a call later.
      while (all.length < 4) all.push(await next());
      expect([...buffer.losses.keys()]).toEqual([odd]);
      return all;
    },
    `link-down skip=${skip}`,
  );
  const call = (number: number) => results.map((all) => all[number]);
  check(one, inputs, call(0));
  check(one, rowsOfCall(inputs, 3), call(3), planWithout(inputs, { leftOut: [odd] }));
});
