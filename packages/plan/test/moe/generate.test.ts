import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { choose } from '../../src/moe/generate.js';
import {
  expectedChoices,
  expertLoad,
  type GenerateOptions,
  generateRouting,
  generateWeights,
  gini,
  type Popularity,
} from '../../src/moe/index.js';
import { expectPlanError } from '../expect-error.js';

const base = { worldSize: 2, tokens: 4000, experts: 64, topK: 6, seed: 3 } satisfies Omit<
  GenerateOptions,
  'popularity'
>;
const sum = (values: ArrayLike<number>) => Array.from(values).reduce((a, b) => a + b, 0);

const popularities: fc.Arbitrary<Popularity> = fc.oneof(
  fc.constant({ kind: 'uniform' as const }),
  fc.record({ kind: fc.constant('zipf' as const), exponent: fc.double({ min: 0, max: 20, noNaN: true }) }),
  fc.record({ kind: fc.constant('gini' as const), target: fc.double({ min: 0, max: 0.3, noNaN: true }) }),
);

describe('gini', () => {
  it('is half the mean difference over the mean', () => {
    fc.assert(
      fc.property(fc.array(fc.nat(50), { minLength: 1, maxLength: 12 }), (load) => {
        let differences = 0;
        for (const a of load) for (const b of load) differences += Math.abs(a - b);
        const mean = sum(load) / load.length;
        const expected = mean === 0 ? 0 : differences / (2 * load.length ** 2 * mean);
        expect(gini(load)).toBeCloseTo(expected, 12);
      }),
    );
  });

  it('is 0 for all alike, 1 - 1/n for one that has everything, and refuses what is no load', () => {
    expect(gini([3, 3, 3])).toBe(0);
    expect(gini([0, 0, 0, 8])).toBe(0.75);
    expect(gini([])).toBe(0);
    expectPlanError(() => gini([1, Number.NaN]), 'EP_INVALID_ARGUMENT', 'NaN');
  });
});

describe('expectedChoices', () => {
  it('are at most 1, fall, and are topK together', () => {
    fc.assert(
      fc.property(
        popularities,
        fc.integer({ min: 20, max: 300 }),
        fc.integer({ min: 1, max: 12 }),
        (popularity, experts, topK) => {
          const expected = expectedChoices(popularity, experts, topK);
          expect(sum(expected)).toBeCloseTo(topK, 9);
          expected.forEach((p, i) => {
            expect(p).toBeLessThanOrEqual(1 + 1e-12);
            if (i > 0) expect(p).toBeLessThanOrEqual(expected[i - 1]! + 1e-12);
          });
          if (popularity.kind === 'gini') expect(gini(expected)).toBeCloseTo(popularity.target, 6);
        },
      ),
    );
  });

  it('a steep zipf gives the first of them to every token', () => {
    const expected = expectedChoices({ kind: 'zipf', exponent: 100 }, 256, 8);
    expect([...expected.subarray(0, 8)]).toEqual(Array.from({ length: 8 }, () => expect.closeTo(1, 2)));
  });
});

describe('generateRouting', () => {
  it.each([0, 0.1, 0.25, 0.38, 0.8])('meets a Gini coefficient of %d', (target) => {
    const routing = generateRouting({ ...base, tokens: 20_000, popularity: { kind: 'gini', target } });
    expect(Math.abs(gini(expertLoad(routing)) - target)).toBeLessThan(0.02);
  });

  it('k-hot: the hot ones get their share, evenly', () => {
    const routing = generateRouting({ ...base, popularity: { kind: 'k-hot', hot: 4, share: 0.5 } });
    const load = [...expertLoad(routing)].sort((a, b) => b - a);
    const all = 2 * base.tokens * base.topK;
    expect(sum(load)).toBe(all);
    expect(sum(load.slice(0, 4)) / all).toBeCloseTo(0.5, 2);
    expect(load[3]! / load[0]!).toBeGreaterThan(0.95);
  });

  it('hot experts that have all choices leave none to the others', () => {
    const routing = generateRouting({ ...base, popularity: { kind: 'k-hot', hot: 6, share: 1 } });
    expect([...expertLoad(routing)].filter((n) => n > 0)).toEqual(new Array(6).fill(2 * base.tokens));
  });

  it('finds a last choice where probabilities add up to a hair less, and never one of probability 0', () => {
    const chosen = new Int32Array(2);
    // Points 0.95 and 1.95; the line ends at 1.9.
    choose(Float64Array.of(0, 0.9, 0.5, 0.5, 0), Int32Array.of(0, 1, 2, 3, 4), () => 0.95, chosen);
    expect([...chosen]).toEqual([2, 3]);
    choose(Float64Array.of(0, 1, 0.9, 0), Int32Array.of(0, 1, 2, 3), () => 0.95, chosen);
    expect([...chosen]).toEqual([1, 2]);
  });

  it('draws which experts are popular, and who goes with whom, from the seed', () => {
    const popularity = { kind: 'zipf', exponent: 1 } as const;
    const one = generateRouting({ ...base, tokens: 50, popularity });
    expect(generateRouting({ ...base, tokens: 50, popularity })).toEqual(one);
    const other = generateRouting({ ...base, tokens: 50, popularity, seed: 4 });
    expect(other.topkIdx).not.toEqual(one.topkIdx);
    // Neighbours in the order of experts must not exclude each other, as they would without shuffling for each token.
    const uniform = generateRouting({ ...base, popularity: { kind: 'uniform' } });
    let together = 0;
    for (let t = 0; t < 2 * base.tokens; t++) {
      const chosen = uniform.topkIdx.subarray(t * base.topK, (t + 1) * base.topK);
      if (chosen.includes(0) && chosen.includes(1)) together++;
    }
    const independent = (2 * base.tokens * base.topK * (base.topK - 1)) / (base.experts * (base.experts - 1));
    expect(together / independent).toBeGreaterThan(0.5);
    expect(together / independent).toBeLessThan(1.5);
  });

  it('is the same on every machine', () => {
    const { topkIdx } = generateRouting({
      worldSize: 1,
      tokens: 2,
      experts: 16,
      topK: 4,
      popularity: { kind: 'uniform' },
      seed: 1,
    });
    expect([...topkIdx]).toMatchInlineSnapshot(`
      [
        2,
        4,
        10,
        11,
        1,
        11,
        6,
        10,
      ]
    `);
  });

  it('leaves out choices, and ranks have their own numbers of tokens', () => {
    const routing = generateRouting({ ...base, tokens: [0, 3000], popularity: { kind: 'uniform' }, emptyShare: 0.25 });
    expect([...routing.tokenOffsets]).toEqual([0, 0, 3000]);
    const empty = routing.topkIdx.filter((e) => e < 0).length / routing.topkIdx.length;
    expect(empty).toBeCloseTo(0.25, 1);
    const weights = generateWeights(routing, 1);
    for (let t = 0; t < 3000; t++) {
      const chosen = routing.topkIdx.subarray(t * 6, (t + 1) * 6);
      const mine = weights.subarray(t * 6, (t + 1) * 6);
      expect(sum(mine)).toBeCloseTo(chosen.some((e) => e >= 0) ? 1 : 0, 5);
      chosen.forEach((e, k) => {
        expect(mine[k]! > 0).toBe(e >= 0);
      });
    }
  });

  it.each([
    [{ popularity: { kind: 'gini', target: 0.95 } }, ['target must be in [0, 0.9', '0.95']],
    [{ popularity: { kind: 'gini', target: Number.NaN } }, ['target']],
    [{ popularity: { kind: 'zipf', exponent: -1 } }, ['exponent']],
    [{ popularity: { kind: 'k-hot', hot: 3, share: 0.9 } }, ['3 of 64 experts', 'share of 0 to 0.5', '0.9']],
    [{ popularity: { kind: 'k-hot', hot: 64, share: 0.5 } }, ['share of 1 to 1']],
    [{ popularity: { kind: 'k-hot', hot: 3, share: 2 } }, ['share must be in [0, 1]']],
    [{ popularity: { kind: 'zipfian' } }, ["'zipf'", 'zipfian']],
    [{ tokens: [1] }, ['tokens must be a number or have 2 elements, found 1']],
    [{ tokens: [1, -1] }, ['tokens of rank 1', '-1']],
    [{ topK: 65 }, ['topK', '65']],
    [{ seed: -1 }, ['seed']],
    [{ emptyShare: 1.5 }, ['emptyShare']],
  ])('refuses %j', (change, parts) => {
    expectPlanError(
      () => generateRouting({ ...base, popularity: { kind: 'uniform' }, ...change } as never),
      'EP_INVALID_ARGUMENT',
      ...parts,
    );
  });

  it('refuses more choices than int32 addresses before it makes them', () => {
    expectPlanError(
      () => generateRouting({ ...base, tokens: 2 ** 31 - 1, popularity: { kind: 'uniform' } }),
      'EP_CAPACITY',
      'the routing',
    );
  });
});
