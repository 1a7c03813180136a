/** Ranks of one thread, over whatever transport: kernels run on threads of their own, so nobody blocks anybody. */

import { hostile } from '@ep/conformance/hostile';
import { type Member, memoryStore, type OpenOptions, type Rank } from '@ep/core';
import type { DispatchTransport } from '../../src/index.js';
import { openers as ways } from './programs/openers.mjs';

const limits = { signal: new AbortController().signal, timeoutMs: 60_000 };

const openers = {
  ...ways,
  hostile: (member: Member, options: OpenOptions): Promise<DispatchTransport> =>
    hostile.open(member, { ...options, config: { seed: 5, maxDelayUs: 100 } }),
} as const;

export type WorldTransport = keyof typeof openers;

/** Runs `body` on every rank and closes what it opened. The first failure of a rank is thrown when all have ended. `configOf`: for ways of one transport. */
export async function onRanks<T>(
  worldSize: number,
  name: WorldTransport,
  body: (transport: DispatchTransport) => Promise<T>,
  configOf: (rank: Rank) => object | undefined = () => undefined,
): Promise<T[]> {
  const store = memoryStore();
  const run = async (rank: Rank): Promise<T> => {
    const config = configOf(rank);
    const options = { ...limits, ...(config && { config }) };
    const transport = await openers[name]({ rank, worldSize, store: store.handle() }, options);
    try {
      return await body(transport);
    } finally {
      await transport.close();
    }
  };
  const ended = await Promise.allSettled(Array.from({ length: worldSize }, (_, rank) => run(rank)));
  for (const end of ended) if (end.status === 'rejected') throw end.reason;
  return ended.map((end) => (end as PromiseFulfilledResult<T>).value);
}
