/** The planner's own benchmark in the form that `ep bench` prints. */
import type { benchPlan } from '@ep/plan/bench';
import type { Bench, BenchCase, BenchOptions, BenchResult } from './bench.js';

/** Promised per dispatch: time of planning, and bytes of its outputs. */
const goalNs = 100;
const goalBytes = 200;
/** Planning is linear, but for what larger arrays cost a cache; were it quadratic, this would be 4. */
const goalGrowth = 1.5;

export function planBench(module: { readonly benchPlan: typeof benchPlan }): Bench {
  return { name: 'plan', run: async (options, tell) => planResult(module.benchPlan, options, tell) };
}

function planResult(
  measure: typeof benchPlan,
  { quick, repeats }: BenchOptions,
  tell: (text: string) => void,
): BenchResult {
  const size = quick ? { ranks: 64, shardsPerRank: 16, repeats: 3 } : {};
  const report = measure({ ...size, ...(repeats === undefined ? {} : { repeats }), tell });
  const cases = report.results.map(
    (result): BenchCase => ({
      name: `${result.case}, ${report.ranks} ranks x ${report.shardsPerRank} shards`,
      unit: 'ms',
      median: result.milliseconds,
      spread: result.spread,
      samples: report.repeats,
      ratios: [
        { name: 'ns per dispatch', value: result.nsPerDispatch, goal: { at: 'most', value: goalNs } },
        { name: 'bytes per dispatch', value: result.bytesPerDispatch, goal: { at: 'most', value: goalBytes } },
        { name: 'times what it takes to make and write arrays of its sizes', value: result.overWriting },
        {
          name: 'times the ns per dispatch of a quarter of the size',
          value: result.growth,
          goal: { at: 'most', value: goalGrowth },
        },
      ],
      detail: {
        dispatches: result.dispatches,
        replicas: report.replicas,
        validateNsPerDispatch: result.validateNsPerDispatch,
      },
    }),
  );
  return { name: 'plan', cases };
}
