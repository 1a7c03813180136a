/** Whether a group works, over some of its ranks. */
import { expect } from 'vitest';
import { MANY_CHUNKS, reduceOf, type World } from '../portable/world.js';

/** Calls of many chunks, and messages of many between all pairs, at the same time. */
export async function worksOver(world: World, ranks: readonly number[]): Promise<void> {
  const pairs = ranks.flatMap((from) => ranks.map((to) => ({ from, to, data: new Float32Array(MANY_CHUNKS) })));
  const messages = pairs.flatMap(({ from, to, data }) => [
    world.engines[from]!.send({ peer: to, tag: 0, data: new Float32Array(MANY_CHUNKS).fill(from), timeoutMs: 20_000 }),
    world.engines[to]!.recv({ peer: from, tag: 0, data, timeoutMs: 20_000 }),
  ]);
  const outputs = new Map(ranks.map((rank) => [rank, new Float32Array(MANY_CHUNKS)]));
  const ends = await world.all((rank) => reduceOf(rank, outputs.get(rank)), ranks);
  for (const end of ends) expect(end.contributors).toEqual(ranks);
  const sum = ranks.reduce((total, rank) => total + 2 ** rank, 0);
  for (const output of outputs.values()) expect(output).toEqual(new Float32Array(MANY_CHUNKS).fill(sum));
  await Promise.all(messages);
  for (const { from, data } of pairs) expect(data).toEqual(new Float32Array(MANY_CHUNKS).fill(from));
  for (const rank of ranks) expect(world.engines[rank]!.view()).toEqual(world.engines[ranks[0]!]!.view());
  expect(world.engines[ranks[0]!]!.view().active).toEqual(ranks);
}
