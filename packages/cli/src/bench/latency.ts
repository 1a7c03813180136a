/** Latencies are told by percentile: the slowest of thousands says more about the system than about us. */
import type { BenchCase, BenchRatio } from './bench.js';

type At = 'p50' | 'p99' | 'slowest';

/** Microseconds. */
type Latency = Readonly<Record<At, number>>;

interface LatencyGoal {
  readonly at: At;
  readonly microseconds: number;
}

/** The part of a case that follows from its percentiles. */
export function latencyCase(
  latency: Latency,
  goals: readonly LatencyGoal[] = [],
): Pick<BenchCase, 'unit' | 'median' | 'spread'> & { readonly ratios: readonly BenchRatio[] } {
  return {
    unit: 'us',
    median: latency.p50,
    spread: latency.p50 === 0 ? 0 : (latency.p99 - latency.p50) / latency.p50,
    ratios: (['p50', 'p99', 'slowest'] as const).map((at) => {
      const wanted = goals.find((goal) => goal.at === at);
      return {
        name: at === 'slowest' ? 'us, the slowest' : `us at ${at}`,
        value: latency[at],
        ...(wanted === undefined ? {} : { goal: { at: 'most' as const, value: wanted.microseconds } }),
      };
    }),
  };
}
