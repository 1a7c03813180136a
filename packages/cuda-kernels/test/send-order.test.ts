import { planAttention, rankDispatch, shardsOfDocuments } from '@ep/plan';
import { describe, expect, it } from 'vitest';
import { inTurns, type Sends } from '../src/send-order.js';

/** Every rank has documents of so many rows for each rank, in ascending order of these: all of them begin with the same one. */
function toAll(worldSize: number, rowsFor: (from: number, to: number) => number, documents = 1) {
  const pairs = Array.from({ length: documents * worldSize ** 2 }, (_, i) => {
    const pair = i % worldSize ** 2;
    return [Math.floor(pair / worldSize), pair % worldSize] as const;
  });
  const { shards } = shardsOfDocuments({
    worldSize,
    lengths: Int32Array.from(pairs, ([from, to]) => rowsFor(from, to)),
    homeRank: Int32Array.from(pairs, ([from]) => from),
    documentOffsets: Int32Array.from({ length: pairs.length + 1 }, (_, i) => i),
  });
  return planAttention(
    shards,
    Int32Array.from(pairs, ([, to]) => to),
  ).fwdQ;
}

const chunksOf = ({ length, dstRank }: Sends, worldSize: number, chunkRows: number): number[] => {
  const chunks = Array<number>(worldSize).fill(0);
  for (const [i, rows] of length.entries()) chunks[dstRank[i]!]! += Math.ceil(rows / chunkRows);
  return chunks;
};

/** By row of the source: where it goes. */
function landings({ srcOffset, dstOffset, length, dstRank }: Sends): string[] {
  const found: string[] = [];
  for (const [i, rows] of length.entries()) {
    for (let row = 0; row < rows; row++) found.push(`${srcOffset[i]! + row} to ${dstRank[i]}:${dstOffset[i]! + row}`);
  }
  return found.sort();
}

describe('the order in which a rank sends', () => {
  it('has no two ranks write to one receiver at a time, where all have as much for all', () => {
    const plan = toAll(4, (from, to) => (from === to ? 0 : 320));
    const orders = [0, 1, 2, 3].map((rank) => inTurns(rankDispatch(plan, rank), rank, 4, 2));
    const sent = orders.map(({ length, dstRank }) => [...length].flatMap((rows, i) => Array(rows).fill(dstRank[i])));
    expect(sent[0]).toHaveLength(960);
    for (let row = 0; row < 960; row++) expect(new Set(sent.map((to) => to[row])).size).toBe(4);
  });

  it('moves what the plan says, in as many chunks', () => {
    let seed = 7;
    const random = (below: number): number => {
      seed = (Math.imul(seed, 1103515245) + 12345) >>> 0;
      return (seed >>> 8) % below;
    };
    for (let round = 0; round < 40; round++) {
      const worldSize = 1 + random(6);
      const plan = toAll(worldSize, () => random(4) * random(90), 1 + random(5));
      const chunkRows = 1 + random(20);
      for (let rank = 0; rank < worldSize; rank++) {
        const mine = rankDispatch(plan, rank);
        const order = inTurns(mine, rank, worldSize, chunkRows);
        expect(landings(order)).toEqual(landings(mine));
        expect(chunksOf(order, worldSize, chunkRows)).toEqual(chunksOf(mine, worldSize, chunkRows));
      }
    }
  });

  it('has sent as large a part to each destination whenever a turn is over, however much that is', () => {
    const plan = toAll(3, (_, to) => [160, 1600, 4800][to]!);
    const { length, dstRank } = inTurns(rankDispatch(plan, 1), 1, 3, 10);
    const sent = [0, 0, 0];
    for (const [i, rows] of length.entries()) {
      sent[dstRank[i]!]! += rows;
      // This rank comes last.
      if (dstRank[i] === 1) expect([sent[2]! / 4800, sent[0]! / 160]).toEqual([sent[1]! / 1600, sent[1]! / 1600]);
    }
    expect(sent).toEqual([160, 1600, 4800]);
    expect(dstRank.subarray(0, 3)).toEqual(Int32Array.of(2, 0, 1));
  });

  it('leaves alone what goes to one rank', () => {
    const mine = rankDispatch(
      toAll(2, (from, to) => (from === to ? 0 : 100)),
      0,
    );
    expect(inTurns(mine, 0, 2, 3)).toBe(mine);
  });
});
