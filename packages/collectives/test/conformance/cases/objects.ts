/** Collectives of objects: what structured clone keeps, arrives. */
import assert from 'node:assert/strict';
import type { GroupCase } from './case.js';
import { failsWith } from './expect.js';
import { ranksOf } from './oracle.js';

const objectOf = (rank: number) => ({
  rank,
  text: 'ä'.repeat(rank * 1_000),
  when: new Date(rank * 1_000),
  map: new Map([[`key ${rank}`, new Set([rank, 1n << 70n])]]),
  bytes: new Uint8Array([rank, 1, 2]),
  nothing: undefined,
});

export const objectCases: readonly GroupCase[] = [
  {
    id: 'objects/broadcast',
    sentence: 'broadcastObject hands an object of the root, maps, dates and typed arrays in it, to everybody',
    async body(rank) {
      const group = await rank.open();
      for (const root of ranksOf(rank.worldSize)) {
        const found = await group.broadcastObject(rank.rank === root ? objectOf(root) : undefined, { root });
        assert.deepEqual(found, objectOf(root));
      }
    },
  },
  {
    id: 'objects/all-gather',
    sentence: 'allGatherObject hands the objects of all ranks, of different sizes, to everybody, in rank order',
    async body(rank) {
      const group = await rank.open();
      const found = await group.allGatherObject(objectOf(rank.rank));
      assert.deepEqual(found, ranksOf(rank.worldSize).map(objectOf));
    },
  },
  {
    id: 'objects/gather',
    sentence: 'gatherObject hands them to the root only',
    async body(rank) {
      const group = await rank.open();
      const root = rank.worldSize - 1;
      const found = await group.gatherObject(objectOf(rank.rank), { root });
      assert.deepEqual(found, rank.rank === root ? ranksOf(rank.worldSize).map(objectOf) : undefined);
    },
  },
  {
    id: 'objects/unclonable',
    sentence: 'an object that cannot be cloned is refused where it was given, before anything is sent',
    async body(rank) {
      const group = await rank.open();
      await failsWith('EP_INVALID_ARGUMENT', () => group.allGatherObject({ call: () => {} }));
      assert.deepEqual(await group.allGatherObject(rank.rank), [...ranksOf(rank.worldSize)]);
    },
  },
];
