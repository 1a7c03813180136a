import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { type GroupLimit, topkExperts } from '../../src/moe/index.js';
import { expectPlanError } from '../expect-error.js';

/** Sorting everything: what topkExperts must equal. */
function sorted(scores: readonly number[], topK: number, limit: GroupLimit | undefined): number[] {
  const order = (values: readonly number[]) => [...values.keys()].sort((a, b) => values[b]! - values[a]! || a - b);
  let allowed = scores.map(() => true);
  if (limit !== undefined) {
    const size = scores.length / limit.groups;
    const groups = Array.from({ length: limit.groups }, (_, g) => {
      const best = scores.slice(g * size, (g + 1) * size).sort((a, b) => b - a);
      return limit.groupScore === 'max' ? best[0]! : best[0]! + best[1]!;
    });
    const kept = order(groups).slice(0, limit.topGroups);
    allowed = scores.map((_, e) => kept.includes(Math.floor(e / size)));
  }
  return order(scores)
    .filter((e) => allowed[e])
    .slice(0, topK);
}

const limits = fc.record({
  groups: fc.constantFrom(2, 3, 4),
  topGroups: fc.constantFrom(1, 2),
  groupScore: fc.constantFrom('max' as const, 'top2-sum' as const),
});

describe('topkExperts', () => {
  it('is the head of a sorted list, within the best groups, lower index first among equals', () => {
    const rows = fc.array(fc.array(fc.integer({ min: -4, max: 4 }), { minLength: 12, maxLength: 12 }), {
      maxLength: 5,
    });
    fc.assert(
      fc.property(
        rows,
        fc.integer({ min: 1, max: 3 }),
        fc.option(limits, { nil: undefined }),
        (tokens, topK, limit) => {
          const scores = Float64Array.from(tokens.flat());
          const { topkIdx, topkWeights } = topkExperts(scores, { experts: 12, topK, ...(limit && { limit }) });
          tokens.forEach((row, t) => {
            const expected = sorted(row, topK, limit);
            expect([...topkIdx.subarray(t * topK, (t + 1) * topK)]).toEqual(expected);
            expect([...topkWeights.subarray(t * topK, (t + 1) * topK)]).toEqual(expected.map((e) => row[e]));
          });
        },
      ),
    );
  });

  it('bias chooses but does not weigh; normalise and scale weigh', () => {
    const scores = Float32Array.of(0.5, 0.25, 0.125, 0.125);
    const bias = [-1, 0, 0.0625, 0];
    const plain = topkExperts(scores, { experts: 4, topK: 2, bias });
    expect([...plain.topkIdx]).toEqual([1, 2]);
    expect([...topkExperts(scores, { experts: 4, topK: 2, bias: [0, 0, 0, 1] }).topkWeights]).toEqual([0.125, 0.5]);
    expect([...plain.topkWeights]).toEqual([0.25, 0.125]);
    const scaled = topkExperts(scores, { experts: 4, topK: 2, bias, normalise: true, scale: 3 });
    expect([...scaled.topkWeights]).toEqual([2, 1]);
  });

  it('a group with one strong expert beats one with two fair ones by max, and loses by the sum of two', () => {
    const scores = Float32Array.of(0.9, 0, 0.6, 0.5);
    const top = (groupScore: GroupLimit['groupScore']) => [
      ...topkExperts(scores, { experts: 4, topK: 2, limit: { groups: 2, topGroups: 1, groupScore } }).topkIdx,
    ];
    expect(top('max')).toEqual([0, 1]);
    expect(top('top2-sum')).toEqual([2, 3]);
  });

  it('weights of a sum of 0 are left alone', () => {
    const { topkWeights } = topkExperts(Float32Array.of(0, 0), { experts: 2, topK: 2, normalise: true });
    expect([...topkWeights]).toEqual([0, 0]);
  });

  it.each([
    ['NaN', Float32Array.of(1, Number.NaN), {}, ['scores[1] (token 0, expert 1)', 'NaN']],
    ['infinity', Float32Array.of(1, Number.POSITIVE_INFINITY), {}, ['must be finite']],
    ['a part of a token', Float32Array.of(1, 2, 3), {}, ['multiple of experts = 2']],
    ['topK', Float32Array.of(1, 2), { topK: 3 }, ['topK', '[1, 2]', '3']],
    [
      'groups',
      Float32Array.of(1, 2, 3),
      { experts: 3, limit: { groups: 2, topGroups: 1, groupScore: 'max' } },
      ['groups must divide'],
    ],
    [
      'too few experts in the groups',
      new Float32Array(4),
      { experts: 4, topK: 3, limit: { groups: 2, topGroups: 1, groupScore: 'max' } },
      ['topK = 3 exceeds the 2 experts'],
    ],
    [
      'a group of one',
      new Float32Array(4),
      { experts: 4, limit: { groups: 4, topGroups: 2, groupScore: 'top2-sum' } },
      ['groups of at least 2'],
    ],
    [
      'the group score',
      new Float32Array(4),
      { experts: 4, limit: { groups: 2, topGroups: 1, groupScore: 'sum' } },
      ['groupScore'],
    ],
    ['bias', new Float32Array(2), { bias: [1] }, ['bias must have 2 elements, found 1']],
    ['a bias of NaN', new Float32Array(2), { bias: [0, Number.NaN] }, ['bias[1] must be finite']],
    ['scale', new Float32Array(2), { scale: Number.NaN }, ['scale must be finite']],
  ])('refuses %s', (_, scores, options, parts) => {
    expectPlanError(
      () => topkExperts(scores, { experts: 2, topK: 1, ...options } as never),
      'EP_INVALID_ARGUMENT',
      ...parts,
    );
  });
});
