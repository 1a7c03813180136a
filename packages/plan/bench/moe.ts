import {
  balanceExperts,
  expertLoad,
  generateRouting,
  type MoeForm,
  planMoe,
  rankReceives,
  rankSends,
  rankTopk,
  routingLayout,
  type TokenRouting,
} from '../src/moe/index.js';

export interface MoeBenchOptions {
  readonly ranks?: number;
  readonly tokensPerRank?: number;
  readonly experts?: number;
  readonly topK?: number;
  readonly repeats?: number;
}

/** Times are medians. A plan covers the tokens of all ranks; the layout step is what one rank does with its own. */
export interface MoeBenchResult {
  readonly case: MoeForm['mode'] | 'layout';
  readonly tokens: number;
  readonly milliseconds: number;
  readonly nsPerToken: number;
  readonly nsPerChoice: number;
  /** ns per token at full size over a quarter of the tokens: 1 where time is linear. */
  readonly growth: number;
}

export interface MoeBenchReport {
  readonly bench: 'moe-plan';
  readonly ranks: number;
  readonly tokensPerRank: number;
  readonly experts: number;
  readonly topK: number;
  readonly repeats: number;
  /** `balanceExperts` by itself: one call for one layer, with an eighth more places than experts. */
  readonly balanceMilliseconds: number;
  readonly imbalanceBefore: number;
  readonly imbalanceAfter: number;
  readonly results: readonly MoeBenchResult[];
}

/** Plans the tokens of all ranks over balanced experts and verifies every row it timed. */
export function benchMoe(options: MoeBenchOptions = {}): MoeBenchReport {
  const { ranks = 8, tokensPerRank = 16_384, experts = 256, topK = 8, repeats = 7 } = options;
  const make = (tokens: number) =>
    generateRouting({
      worldSize: ranks,
      tokens,
      experts,
      topK,
      popularity: { kind: 'gini', target: 0.38 },
      seed: 20261120,
    });
  const full = make(tokensPerRank);
  const quarter = make(Math.max(1, tokensPerRank >> 2));
  const load = expertLoad(full);
  const balance = () => balanceExperts(load, { worldSize: ranks, places: Math.ceil((experts * 9) / 8 / ranks) });
  const balanceMilliseconds = medianMs(repeats, balance);
  const { map, imbalanceBefore, imbalanceAfter } = balance();
  const plan = (routing: TokenRouting, mode: MoeForm['mode']) =>
    planMoe(
      routing,
      map,
      mode === 'low-latency' ? { mode, maxTokens: routing.tokenOffsets[1]! } : { mode, alignment: 128 },
    );
  const cases = {
    layout: (routing: TokenRouting) => routingLayout({ map, rank: 0, topK, topkIdx: rankTopk(routing, 0) }),
    'low-latency': (routing: TokenRouting) => plan(routing, 'low-latency'),
    'high-throughput': (routing: TokenRouting) => plan(routing, 'high-throughput'),
  } as const;
  for (const mode of ['low-latency', 'high-throughput'] as const) verifyRows(plan(full, mode));
  const results = (Object.keys(cases) as (keyof typeof cases)[]).map((name) => {
    const tokens = (routing: TokenRouting) => routing.tokenOffsets[name === 'layout' ? 1 : ranks]!;
    const perToken = (routing: TokenRouting) => (medianMs(repeats, () => cases[name](routing)) * 1e6) / tokens(routing);
    const small = perToken(quarter);
    const nsPerToken = perToken(full);
    return {
      case: name,
      tokens: tokens(full),
      milliseconds: (nsPerToken * tokens(full)) / 1e6,
      nsPerToken,
      nsPerChoice: nsPerToken / topK,
      growth: nsPerToken / small,
    };
  });
  return {
    bench: 'moe-plan',
    ranks,
    tokensPerRank,
    experts,
    topK,
    repeats,
    balanceMilliseconds,
    imbalanceBefore,
    imbalanceAfter,
    results,
  };
}

/** Every choice must be where its receiver says that this token's choice is. */
function verifyRows(plan: ReturnType<typeof planMoe>): void {
  const { topK } = plan.routing;
  const received = Array.from({ length: plan.map.worldSize }, (_, r) => rankReceives(plan, r));
  for (let s = 0; s < plan.map.worldSize; s++) {
    const { row, replica } = rankSends(plan, s);
    row.forEach((at, i) => {
      const there = received[plan.map.rank[replica[i]!]!]!;
      const found = [there.sourceRank[at], there.sourceToken[at], there.sourceChoice[at]];
      const expected = [s, Math.floor(i / topK), i % topK];
      if (found.some((x, k) => x !== expected[k])) {
        throw new Error(`row ${at} must hold (rank, token, choice) ${expected}, holds ${found}`);
      }
    });
  }
}

function medianMs(repeats: number, run: () => unknown): number {
  const times = Array.from({ length: repeats + 1 }, () => {
    const start = performance.now();
    run();
    return performance.now() - start;
  }).slice(1);
  return times.sort((a, b) => a - b)[times.length >> 1]!;
}

/** One line per case. */
export function moeBenchText(report: MoeBenchReport): string {
  const { ranks, tokensPerRank, topK, experts, repeats } = report;
  const lines = report.results.map(
    (r) =>
      `  ${r.case.padEnd(15)} ${r.tokens} tokens  ${r.milliseconds.toFixed(2)} ms  ${r.nsPerToken.toFixed(1)} ns/token  ${r.nsPerChoice.toFixed(1)} ns/choice  growth ${r.growth.toFixed(2)}`,
  );
  return [
    `moe plan: ${ranks} ranks x ${tokensPerRank} tokens, top-${topK} of ${experts} experts, median of ${repeats}`,
    `  balanceExperts  ${report.balanceMilliseconds.toFixed(2)} ms, busiest rank over average ${report.imbalanceBefore.toFixed(3)} before, ${report.imbalanceAfter.toFixed(3)} after`,
    ...lines,
    '',
  ].join('\n');
}
