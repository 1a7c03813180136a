/** The shared-memory transport's own benchmark in the form that `ep bench` prints. */
import type { benchShm } from '@ep/nvshmem/bench';
import type { Bench, BenchCase, BenchResult } from './bench.js';
import { latencyCase } from './latency.js';

const quickRounds = 500;

export function shmBench(module: { readonly benchShm: typeof benchShm }): Bench {
  return {
    name: 'shm',
    async run({ quick }, tell): Promise<BenchResult> {
      const { results } = await module.benchShm({ ...(quick ? { rounds: quickRounds } : {}), tell });
      const cases = results.map(({ name, ranks, latency, goals, timesBare }): BenchCase => {
        const { ratios, ...told } = latencyCase(latency, goals);
        const bare = { name: 'times two stores and a spin between the same cores', value: timesBare ?? 0 };
        return {
          name: `${name}, ${ranks} ranks`,
          ...told,
          samples: latency.samples,
          ratios: timesBare === undefined ? ratios : [...ratios, bare],
          detail: { mean: latency.mean },
        };
      });
      return { name: 'shm', cases };
    },
  };
}
