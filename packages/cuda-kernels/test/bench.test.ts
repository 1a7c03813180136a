/** What `ep bench attention` times has to be what it moves. */
import { SHORTEST_STALL_US, stallsIn } from '@ep/native/ranks';
import { planAttention, shardsOfDocuments } from '@ep/plan';
import { movePlan } from '@ep/plan/reference';
import { describe, expect, it } from 'vitest';
import { type Contender, race } from '../bench/race.js';
import { checkRows, fillRows } from '../bench/rows.js';

const WORDS = 6;
const plan = planAttention(
  shardsOfDocuments({
    worldSize: 2,
    lengths: Int32Array.of(3, 5, 2, 4),
    homeRank: Int32Array.of(0, 0, 1, 1),
    documentOffsets: Int32Array.of(0, 1, 2, 3, 4),
  }).shards,
  Int32Array.of(0, 1, 0, 1),
).fwdQ;

/** What each rank has after a round. */
function moved(round: number): Uint32Array[] {
  const sources = Array.from(plan.sendTokens, (rows, rank) => {
    const data = new Uint32Array(rows * WORDS);
    fillRows(data, rank, round);
    return data;
  });
  return movePlan(plan, sources, WORDS);
}

describe('rows', () => {
  it('are right where the oracle put them', () => {
    for (const round of [0, 1, 16]) {
      for (const [rank, received] of moved(round).entries()) checkRows(received, plan, rank, WORDS, round);
    }
  });

  it('are wrong in any word that is not the one of this round', () => {
    const [received] = moved(16);
    const before = moved(15)[0]!;
    for (const [at, right] of received!.entries()) {
      for (const wrong of [before[at]!, right + 1, 0]) {
        received![at] = wrong;
        expect(() => checkRows(received!, plan, 0, WORDS, 16)).toThrow(
          `rank 0 row ${Math.floor(at / WORDS)} word ${at % WORDS}, from rank`,
        );
      }
      received![at] = right;
    }
    expect(() => checkRows(moved(16)[1]!, plan, 0, WORDS, 16)).toThrow('of round 16');
  });
});

/** Moves in every round but those of `lazyFrom` and later. */
function mover(source: { value: number }, lazyFrom = Number.POSITIVE_INFINITY) {
  let [target, runs] = [-1, 0];
  const calls: string[] = [];
  const contender: Contender = {
    async run() {
      calls.push('run');
      if (runs++ < lazyFrom) target = source.value;
    },
    check(round) {
      calls.push(`check ${round}`);
      if (target !== round) throw new Error(`found ${target} in round ${round}`);
    },
    release: () => void calls.push('release'),
    close: async () => void calls.push('close'),
  };
  return { contender, calls };
}

describe('a race', () => {
  const source = { value: -1 };
  const options = {
    repeats: 3,
    barrier: async () => {},
    fill: (round: number) => {
      source.value = round;
    },
  };

  it('counts the repeats and compares the last one of every contender', async () => {
    const [one, other] = [mover(source), mover(source)];
    const times = await race({ one: one.contender, other: other.contender }, options);
    expect([times.one.length, times.other.length]).toEqual([3, 3]);
    const turn = ['run', 'release'];
    const expected = [...turn, 'run', 'check 1', 'release', ...turn, ...turn, 'run', 'check 4', 'release', 'close'];
    expect([one.calls, other.calls]).toEqual([expected, expected]);
  });

  it.each([
    ['the last repeat', 4, 'found 1 in round 4'],
    ['anything after the first call', 1, 'found 0 in round 1'],
  ])('fails where a contender does not move %s', async (_, lazyFrom, message) => {
    const contenders = { good: mover(source).contender, lazy: mover(source, lazyFrom).contender };
    await expect(race(contenders, options)).rejects.toThrow(message);
  });
});

it('stalls are the gaps between looks at the clock that no look explains', () => {
  // Milliseconds between looks; what comes after a second is not looked at.
  const gaps = [0.001, 0.06, 0.04, 3, 0.002, 900, 100, 5];
  let at = 17;
  let looks = 0;
  const now = () => {
    if (looks > 0) at += gaps[looks - 1]!;
    looks++;
    return at;
  };
  const microseconds = Array.from(stallsIn(1000, now), (nanoseconds) => Math.round(nanoseconds / 1000));
  expect(microseconds).toEqual([60, 3000, 900_000, 100_000]);
  expect(SHORTEST_STALL_US).toBe(50);
});
