import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import {
  attendedPairs,
  type BalancedShards,
  balance,
  type DocumentShards,
  explain,
  explanationText,
  type KvSharing,
  maxOverAverage,
  PlanError,
  packDocuments,
  planAttention,
  shardsOfDocuments,
  validate,
} from '../../src/index.js';
import { placements } from '../arbitraries.js';
import { expectPlanError } from '../expect-error.js';

const rows = { qRowBytes: 8, kvRowBytes: 4 };

function packed(
  lengths: readonly number[],
  budgets: readonly number[],
  split: 'sequential' | 'head-tail' = 'sequential',
): DocumentShards {
  return shardsOfDocuments(packDocuments(Int32Array.from(lengths), Int32Array.from(budgets), split)).shards;
}

/** Token runs of each document as "home:length", in document order. */
function homes(shards: DocumentShards): string[][] {
  const home = (g: number) => shards.shardOffsets.findLastIndex((o) => o <= g);
  return Array.from({ length: shards.documents }, (_, d) =>
    [...shards.document.keys()]
      .filter((g) => shards.document[g] === d)
      .sort((a, b) => shards.position[a]! - shards.position[b]!)
      .map((g) => `${home(g)}:${shards.lengths[g]}`),
  );
}

describe('attended pairs', () => {
  it('is the number of keys that rows see', () => {
    for (const [from, to] of [
      [0, 0],
      [0, 1],
      [0, 7],
      [3, 7],
      [6, 7],
    ] as const) {
      let pairs = 0;
      for (let row = from; row < to; row++) pairs += row + 1;
      expect(attendedPairs(from, to)).toBe(pairs);
    }
    expect(maxOverAverage([])).toBe(1);
    expect(maxOverAverage([0, 0])).toBe(1);
    expect(maxOverAverage([3, 1])).toBe(1.5);
  });
});

describe('packing', () => {
  it('fills ranks in order and splits where a budget ends', () => {
    expect(homes(packed([5, 3, 9, 0, 1], [8, 4, 0, 6]))).toEqual([['0:5'], ['0:3'], ['1:4', '3:5'], ['3:0'], ['3:1']]);
  });

  it('head-tail: as many rows from the tail as from the head, the middle on the last rank', () => {
    expect(homes(packed([12, 4], [5, 4, 7], 'head-tail'))).toEqual([['0:2', '1:2', '2:3', '1:2', '0:3'], ['2:4']]);
    expect(homes(packed([3], [1, 1, 1], 'head-tail'))).toEqual([['2:1', '1:1', '0:1']]);
  });

  it('keeps every row once, in both splits', () => {
    fc.assert(
      fc.property(
        fc.array(fc.nat(40), { maxLength: 12 }),
        fc.integer({ min: 1, max: 7 }),
        fc.constantFrom('sequential' as const, 'head-tail' as const),
        (lengths, ranks, split) => {
          const total = lengths.reduce((a, b) => a + b, 0);
          const budget = Math.ceil(total / ranks);
          const list = packDocuments(Int32Array.from(lengths), new Int32Array(ranks).fill(budget), split);
          lengths.forEach((length, d) => {
            expect(
              list.lengths.subarray(list.documentOffsets[d], list.documentOffsets[d + 1]).reduce((a, b) => a + b, 0),
            ).toBe(length);
          });
          const used = new Array<number>(ranks).fill(0);
          list.homeRank.forEach((r, i) => {
            used[r]! += list.lengths[i]!;
          });
          for (const tokens of used) expect(tokens).toBeLessThanOrEqual(budget);
        },
      ),
    );
  });
});

describe('balance', () => {
  it('leaves balanced work where it is', () => {
    const shards = packed([64, 64], [64, 64]);
    const balanced = balance(shards, rows);
    expect([...balanced.serverRank]).toEqual([0, 1]);
    expect(balanced.movedBytes).toBe(0);
    expect([...balanced.shards.lengths]).toEqual([64, 64]);
  });

  it('takes a run out of the middle: the donor keeps head and tail, and rows stay where they are', () => {
    const shards = packed([1001], [1001, 0]);
    const balanced = balance(shards, rows);
    expect(homes(balanced.shards)[0]!.length).toBe(3);
    expect([...balanced.serverRank]).toEqual([0, 1, 0]);
    expect(balanced.imbalanceBefore).toBe(2);
    expect(balanced.imbalanceAfter).toBeLessThan(1.001);
    // Rows at b / a = 1 + 4 / 8 move least; half of the work of 1001 rows.
    const [a, middle] = balanced.shards.lengths;
    expect((a! + middle!) / a!).toBeCloseTo(1.5, 1);
  });

  it('puts borders at multiples of the block, and still evens out what blocks allow', () => {
    const shards = packed([4000, 300], [2200, 2100, 0, 0]);
    const balanced = balance(shards, { ...rows, block: 128 });
    const end = new Map<number, number>();
    const borders: number[] = [];
    const byPosition = [...balanced.shards.lengths.keys()].sort(
      (x, y) => balanced.shards.position[x]! - balanced.shards.position[y]!,
    );
    for (const g of byPosition) {
      const d = balanced.shards.document[g]!;
      end.set(d, (end.get(d) ?? 0) + balanced.shards.lengths[g]!);
      borders.push(end.get(d)!);
    }
    for (const border of borders) expect([0, 2200 % 128, 4000 % 128, 300 % 128]).toContain(border % 128);
    expect(balanced.imbalanceAfter).toBeLessThan(1.05);
  });

  it('never exceeds the memory cap, even where that leaves work uneven', () => {
    const shards = packed([1000], [1000, 0, 0]);
    const free = balance(shards, rows);
    expect(free.imbalanceAfter).toBeLessThan(1.01);
    const cap = [12000, 4000, 2000];
    const capped = balance(shards, { ...rows, memoryBytes: cap });
    capped.memoryBytes.forEach((bytes, t) => {
      expect(bytes).toBeLessThanOrEqual(cap[t]!);
    });
    expect(capped.imbalanceAfter).toBeGreaterThan(1.01);
    expect(capped.imbalanceAfter).toBeLessThan(capped.imbalanceBefore);
  });

  it('a higher tolerance moves fewer bytes', () => {
    const shards = packed([5000, 700, 300, 200, 100, 100], [5000, 700, 500, 200]);
    const bytes = [0, 0.1, 0.3, 1, 4].map((tolerance) => {
      const balanced = balance(shards, { ...rows, tolerance });
      expect(balanced.imbalanceAfter).toBeLessThanOrEqual(1 + Math.max(tolerance, 0.001));
      return balanced.movedBytes;
    });
    // Greedy, so not strictly: a looser limit may start with another move.
    for (let i = 1; i < bytes.length; i++) expect(bytes[i]!).toBeLessThanOrEqual(bytes[i - 1]! * 1.05);
    expect(bytes[2]!).toBeLessThan(bytes[0]!);
    expect(bytes[4]).toBe(0);
  });

  it('any placement: rows stay, figures are those of the plan, nothing gets worse, same result twice', () => {
    fc.assert(
      fc.property(
        placements({ maxDocuments: 5, maxParts: 5, maxLength: 200 }),
        fc.constantFrom('each-query' as const, 'each-server' as const),
        fc.constantFrom(1, 16),
        fc.constantFrom(0, 0.2),
        ({ shards }, sharing, block, tolerance) => {
          const options = { ...rows, sharing, block, tolerance };
          const balanced = balance(shards, options);
          const plan = planAttention(balanced.shards, balanced.serverRank, { sharing });
          validate(plan);
          const explained = explain(plan);
          expect([balanced.movedQueryTokens, balanced.movedKvTokens]).toEqual([
            explained.movedQueryTokens,
            explained.movedKvTokens,
          ]);
          expect([...balanced.memoryBytes]).toEqual(
            explained.ranks.map((r) => r.queryTokens * rows.qRowBytes + r.kvTokens * rows.kvRowBytes),
          );
          expect([...balanced.loadAfter]).toEqual(explained.ranks.map((r) => r.pairsAfter));
          expect([...balanced.loadBefore]).toEqual(explained.ranks.map((r) => r.pairsBefore));
          expect(balanced.imbalanceAfter).toBeLessThanOrEqual(balanced.imbalanceBefore + 1e-12);
          const joined = (s: DocumentShards) =>
            homes(s).map((parts) =>
              parts
                .filter((p) => !p.endsWith(':0'))
                .reduce<string[]>((all, part) => {
                  const [home, length] = part.split(':');
                  const [lastHome, lastLength] = all[all.length - 1]?.split(':') ?? [];
                  if (home === lastHome) all[all.length - 1] = `${home}:${Number(length) + Number(lastLength)}`;
                  else all.push(part);
                  return all;
                }, []),
            );
          expect(joined(balanced.shards)).toEqual(joined(shards));
          expect(balance(shards, options)).toEqual(balanced);
        },
      ),
      { numRuns: 60 },
    );
  });

  it('more ranks than are searched exhaustively', () => {
    const shards = packed(
      [20000, 300, 50],
      [...new Array<number>(10).fill(2100), ...new Array<number>(118).fill(0)],
      'head-tail',
    );
    const balanced = balance(shards, rows);
    expect(balanced.imbalanceBefore).toBeGreaterThan(5);
    expect(balanced.imbalanceAfter).toBeLessThan(1.01);
  });
});

describe('balance within memory caps that home shards exceed', () => {
  const { POSITIVE_INFINITY } = Number;

  it('moves the fewest bytes that free enough: a head costs fewer keys than a tail', () => {
    const shards = packed([1000], [1000, 0, 0]);
    const options = { ...rows, tolerance: 9, memoryBytes: [10000, POSITIVE_INFINITY, POSITIVE_INFINITY] };
    const balanced = balance(shards, options);
    // 12000 bytes at home. A tail of 167 rows would free 2004 and move the prefix of 1000 keys; a head of 250 rows frees 2000.
    expect([...balanced.shards.lengths]).toEqual([250, 750]);
    expect(balanced.memoryBytes[0]).toBe(10000);
    expect(balanced.movedBytes).toBe(250 * 12);
  });

  it('rounds borders to blocks there, too', () => {
    const shards = packed([1000], [1000, 0]);
    const balanced = balance(shards, { ...rows, tolerance: 9, block: 128, memoryBytes: [10000, POSITIVE_INFINITY] });
    expect([...balanced.shards.lengths]).toEqual([256, 744]);
  });

  it('moves nothing more than without a cap that does not bind', () => {
    const shards = packed([5000, 700, 300], [5000, 700, 300]);
    const free = balance(shards, rows);
    expect(balance(shards, { ...rows, memoryBytes: 1e9 })).toEqual(free);
  });

  it('caps the donor, too: with a copy per query a run out of its middle leaves it two prefixes', () => {
    const shards = packed([1000], [1000, 0]);
    for (const kvRowBytes of [4, 256]) {
      const options = { qRowBytes: 1, kvRowBytes, sharing: 'each-query' as const };
      const home = 1000 * (1 + kvRowBytes);
      expect(balance(shards, options).memoryBytes[0]).toBeGreaterThan(home);
      const capped = balance(shards, { ...options, memoryBytes: [home, POSITIVE_INFINITY] });
      expect(capped.memoryBytes[0]).toBeLessThanOrEqual(home);
      expect(capped.imbalanceAfter).toBeLessThan(1.01);
    }
  });

  it('packs anew where single moves get stuck: two servers have to swap documents', () => {
    // Server 0 holds 700 rows in 600, server 1 holds 500 in 700; neither has room for what the other has until it has given it away.
    const shards = packed([700, 500], [700, 500]);
    const cap = [500 * 12, 700 * 12];
    const balanced = balance(shards, { ...rows, tolerance: 9, block: 1024, memoryBytes: cap });
    expect([...balanced.serverRank]).toEqual([1, 0]);
    expect([...balanced.memoryBytes]).toEqual(cap);
  });

  it('refuses a document that fits no server, naming it', () => {
    const error = expectPlanError(
      () => balance(packed([10, 1000], [10, 1000]), { ...rows, memoryBytes: [3000, 4007] }),
      'EP_CAPACITY',
      'server 1',
      'document 1',
      '4007',
      '4008',
    );
    expect(error.context).toMatchObject({ rank: 1, needed: 4008, available: 4007, document: 1 });
  });

  it('refuses what is too much for all servers together, naming the server, what it needs and its cap', () => {
    const error = expectPlanError(
      () => balance(packed([100, 100, 100], [200, 100]), { ...rows, memoryBytes: 1400 }),
      'EP_CAPACITY',
      'server 0',
      '1400',
    );
    expect(error.context).toMatchObject({ available: 1400, atHome: 2400 });
    expect(error.context?.needed).toBeGreaterThan(1400);
  });

  const cases = fc.record({
    placement: placements({ maxDocuments: 5, maxParts: 5, maxLength: 200 }),
    sharing: fc.constantFrom('each-query' as const, 'each-server' as const),
    block: fc.constantFrom(1, 16),
    tolerance: fc.constantFrom(0, 0.5, 1000),
    fractions: fc.array(fc.double({ min: 0, max: 1.5, noNaN: true }), { minLength: 1, maxLength: 7 }),
  });
  const memoryOf = (balanced: Pick<BalancedShards, 'shards' | 'serverRank'>, sharing: KvSharing) =>
    explain(planAttention(balanced.shards, balanced.serverRank, { sharing })).ranks.map(
      (r) => r.queryTokens * rows.qRowBytes + r.kvTokens * rows.kvRowBytes,
    );

  it('always succeeds where one server has room for everything, and honours every cap', () => {
    let infeasibleAtHome = 0;
    fc.assert(
      fc.property(cases, ({ placement: { shards }, sharing, block, tolerance, fractions }) => {
        const home = balance(shards, { ...rows, sharing, tolerance: 1e9 }).memoryBytes;
        const cap = home.map((bytes, t) => bytes * fractions[t % fractions.length]!);
        cap[shards.worldSize >> 1] = POSITIVE_INFINITY;
        if (home.some((bytes, t) => bytes > cap[t]!)) infeasibleAtHome++;
        const options = { ...rows, sharing, block, tolerance, memoryBytes: cap };
        const balanced = balance(shards, options);
        memoryOf(balanced, sharing).forEach((bytes, t) => {
          expect(bytes).toBeLessThanOrEqual(cap[t]!);
          expect(bytes).toBe(balanced.memoryBytes[t]);
        });
        expect(balance(shards, options)).toEqual(balanced);
      }),
      { numRuns: 60, seed: 2 },
    );
    expect(infeasibleAtHome).toBeGreaterThan(20);
  });

  it('finds most assignments that exist with a quarter of slack, and never returns one beyond a cap', () => {
    let found = 0;
    let tried = 0;
    fc.assert(
      fc.property(cases, ({ placement: { shards, serverRank }, sharing, block, tolerance }) => {
        const cap = memoryOf({ shards, serverRank }, sharing).map((bytes) => bytes * 1.25);
        tried++;
        try {
          const balanced = balance(shards, { ...rows, sharing, block, tolerance, memoryBytes: cap });
          memoryOf(balanced, sharing).forEach((bytes, t) => {
            expect(bytes).toBeLessThanOrEqual(cap[t]!);
          });
          found++;
        } catch (error) {
          if (!(error instanceof PlanError)) throw error;
          expect(error.code).toBe('EP_CAPACITY');
          const { rank, needed, available } = error.context as Readonly<Record<string, number>>;
          expect(available).toBe(cap[rank!]);
          expect(needed).toBeGreaterThan(available!);
        }
      }),
      { numRuns: 50, seed: 3 },
    );
    expect(found / tried).toBeGreaterThan(0.9);
  });
});

describe('explain', () => {
  const shards = packed([8, 4], [8, 4]);
  const balanced = balance(shards, { ...rows, tolerance: 0.2 });
  const explained = explain(planAttention(balanced.shards, balanced.serverRank, { sharing: 'each-server' }));

  it('accounts for every row and pair', () => {
    expect(explained).toMatchObject({
      worldSize: 2,
      documents: 2,
      tokens: 12,
      longestDocument: 8,
      sharing: 'each-server',
    });
    expect(explained.ranks.map((r) => r.pairsBefore)).toEqual([36, 10]);
    expect(explained.ranks.reduce((n, r) => n + r.pairsAfter, 0)).toBe(46);
    expect(explained.traffic.reduce((n, t) => n + t.queryTokens, 0)).toBe(12);
    expect(explained.neededKvTokens).toBe(explained.movedKvTokens);
    expect(JSON.parse(JSON.stringify(explained))).toEqual(explained);
  });

  it('says it in text: who sends how much to whom, load before and after', () => {
    const text = explanationText(explained);
    expect(text).toContain('2 documents, 12 tokens');
    expect(text).toContain(`${explained.imbalanceBefore.toFixed(3)} at home`);
    const remote = explained.traffic.find((t) => t.from === 0 && t.to === 1)!;
    expect(text).toMatch(new RegExp(`^ *0 +1 +${remote.queryTokens} +${remote.kvTokens}$`, 'm'));
  });

  it('counts rows that are sent more than once', () => {
    const plan = planAttention(packed([6], [2, 2, 2]), Int32Array.of(0, 0, 0));
    const e = explain(plan);
    expect([e.movedKvTokens, e.neededKvTokens, e.movedQueryTokens]).toEqual([6, 4, 4]);
  });
});
