import fc from 'fast-check';
import {
  type ExpertMap,
  type MoeForm,
  type MoeOptions,
  mapExperts,
  routingOfRanks,
  spreadExperts,
  type TokenRouting,
} from '../../src/moe/index.js';

export const worldSizes = fc.oneof(
  { weight: 20, arbitrary: fc.integer({ min: 1, max: 7 }) },
  { weight: 1, arbitrary: fc.constantFrom(65, 128) },
);

/** Experts that need not divide, with replicas anywhere, also twice on a rank, and ranks without any. */
export function maps(worldSize: number): fc.Arbitrary<ExpertMap> {
  const spread = fc.integer({ min: 1, max: 20 }).map((experts) => spreadExperts(experts, worldSize));
  const replicated = fc
    .integer({ min: 1, max: 12 })
    .chain((experts) =>
      fc.tuple(
        fc.constant(experts),
        fc.array(fc.integer({ min: 0, max: worldSize - 1 }), { minLength: experts, maxLength: experts + 12 }),
      ),
    )
    .map(([experts, ranks]) => {
      // Replica i is of expert i modulo experts, so each has one.
      const held = ranks.map((rank, i) => ({ rank, expert: i % experts })).sort((a, b) => a.rank - b.rank);
      return mapExperts({
        worldSize,
        experts,
        rankOffsets: Int32Array.from({ length: worldSize + 1 }, (_, r) => held.filter((x) => x.rank < r).length),
        expert: Int32Array.from(held, (x) => x.expert),
      });
    });
  return fc.oneof(spread, replicated);
}

/** Uneven tokens, ranks without any, empty choices. */
export function routings(worldSize: number, experts: number, maxTokens: number): fc.Arbitrary<TokenRouting> {
  return fc.integer({ min: 1, max: Math.min(experts, 5) }).chain((topK) => {
    const token = fc
      .tuple(
        fc.shuffledSubarray(
          Array.from({ length: experts }, (_, e) => e),
          { minLength: topK, maxLength: topK },
        ),
        fc.array(fc.boolean(), { minLength: topK, maxLength: topK }),
      )
      .map(([chosen, empty]) => chosen.map((e, k) => (empty[k]! && k % 2 === 1 ? -1 : e)));
    return fc
      .array(fc.array(token, { maxLength: worldSize > 8 ? 1 : maxTokens }), {
        minLength: worldSize,
        maxLength: worldSize,
      })
      .map((ranks) =>
        routingOfRanks(
          experts,
          topK,
          ranks.map((tokens) => Int32Array.from(tokens.flat())),
        ),
      );
  });
}

export interface MoeCase {
  readonly map: ExpertMap;
  readonly routing: TokenRouting;
  readonly form: MoeForm;
  readonly options: MoeOptions;
}

const maxTokens = 6;

export const forms: fc.Arbitrary<MoeForm> = fc.oneof(
  fc.integer({ min: maxTokens, max: maxTokens + 3 }).map((most) => ({ mode: 'low-latency' as const, maxTokens: most })),
  fc.constantFrom(1, 4, 128).map((alignment) => ({ mode: 'high-throughput' as const, alignment })),
);

/** Mostly nobody is missing; else about one in four ranks is. */
function masks(worldSize: number, usual: 0 | 1): fc.Arbitrary<readonly (0 | 1)[]> {
  const other = usual === 0 ? 1 : 0;
  const some = fc.array(fc.constantFrom(usual, usual, usual, other), { minLength: worldSize, maxLength: worldSize });
  return fc.oneof(fc.constant(new Array<0 | 1>(worldSize).fill(usual)), some);
}

export const moeCases: fc.Arbitrary<MoeCase> = worldSizes.chain((worldSize) =>
  maps(worldSize).chain((map) =>
    fc.record({
      map: fc.constant(map),
      routing: routings(worldSize, map.experts, maxTokens),
      form: forms,
      options: fc.record({
        policy: fc.constantFrom('spread' as const, 'nearest' as const),
        ranksPerNode: fc.integer({ min: 1, max: worldSize + 1 }),
        activeRanks: masks(worldSize, 1),
        lostRanks: masks(worldSize, 0),
      }),
    }),
  ),
);

/** Small integers, so that sums and products are exact in any order. */
export function integerTensors(lengths: readonly number[], seed: number): Float64Array[] {
  let x = seed | 1;
  return lengths.map((length) =>
    Float64Array.from({ length }, () => {
      x = (Math.imul(x, 1664525) + 1013904223) | 0;
      return x >> 26;
    }),
  );
}
