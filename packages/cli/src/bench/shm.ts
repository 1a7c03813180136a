/** The shared-memory transport's own benchmark in the form that `ep bench` prints. */
import type { benchShm } from '@ep/nvshmem/bench';
import type { Bench, BenchCase, BenchResult } from './bench.js';

const quickRounds = 500;

export function shmBench(module: { readonly benchShm: typeof benchShm }): Bench {
  return {
    name: 'shm',
    async run({ quick }, tell): Promise<BenchResult> {
      const { results } = await module.benchShm({ ...(quick ? { rounds: quickRounds } : {}), tell });
      const cases = results.map(
        ({ name, ranks, latency, goals, timesBare }): BenchCase => ({
          name: `${name}, ${ranks} ranks`,
          unit: 'us',
          median: latency.p50,
          // Latencies are told by percentile: the slowest of thousands says more about the system than about us.
          spread: (latency.p99 - latency.p50) / latency.p50,
          samples: latency.samples,
          ratios: [
            ...(['p50', 'p99', 'slowest'] as const).map((at) => {
              const wanted = goals.find((goal) => goal.at === at);
              return {
                name: at === 'slowest' ? 'us, the slowest' : `us at ${at}`,
                value: latency[at],
                ...(wanted === undefined ? {} : { goal: { at: 'most' as const, value: wanted.microseconds } }),
              };
            }),
            ...(timesBare === undefined
              ? []
              : [{ name: 'times two stores and a spin between the same cores', value: timesBare }]),
          ],
          detail: { mean: latency.mean },
        }),
      );
      return { name: 'shm', cases };
    },
  };
}
