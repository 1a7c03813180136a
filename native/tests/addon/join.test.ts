// What ranks of one host compare before they map each other: the odd one is named to all, and nobody waits for it.
import { type EpError, isEpError, memoryStore } from '@ep/core';
import { expect, it } from 'vitest';
import { native } from '../../js/native.js';
import { type JoinOptions, joinRanks, throughStore } from '../../js/ranks/index.js';

const worldSize = 3;

/** Joins three ranks, the last of them with `odd`; each must be refused. */
async function refusals(odd: Partial<JoinOptions>): Promise<readonly EpError[]> {
  await using store = memoryStore();
  const join = (rank: number): Promise<unknown> =>
    joinRanks(
      {
        rank,
        worldSize,
        transport: 'test:join',
        version: '1.2.3',
        ranksOnHost: worldSize,
        timeoutMs: 20_000,
        ...(rank === worldSize - 1 ? odd : {}),
      },
      throughStore({ rank, worldSize, store: store.handle() }, 'test:join'),
      { timeoutMs: 20_000 },
    );
  const ends = await Promise.allSettled([join(0), join(1), join(2)]);
  return ends.map((end) => {
    if (end.status === 'rejected' && isEpError(end.reason)) return end.reason;
    throw new Error(`expected an EpError, found ${end.status}`, { cause: end });
  });
}

it.each([
  ['version', { version: '1.2.4' }, '"1.2.4" on rank 2, "1.2.3" on the other 2'],
  ['ranksOnHost', { ranksOnHost: 2 }, '2 on rank 2, 3 on the other 2'],
  ['qpsPerPeer', { agree: { qpsPerPeer: 2 } }, '2 on rank 2, nothing on the other 2'],
] as const)('names a rank of another %s to every rank', async (field, odd, difference) => {
  const before = native().binding.leaks().segments;
  for (const error of await refusals(odd)) {
    expect(error.code).toBe('EP_RENDEZVOUS');
    expect(error.message).toBe(`rendezvous: rank 2 of 3 differ: ${field} is ${difference}`);
    expect(error.context.ranks).toEqual([2]);
    expect(Object.keys(error.context.fields as object)).toEqual([field]);
  }
  expect(native().binding.leaks().segments).toBe(before);
});
