/** The dispatch's own benchmark in the form that `ep bench` prints. */
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';
import type { benchAttention } from '@ep/cuda-kernels/bench';
import type { Bench, BenchCase, BenchOptions, BenchRatio, BenchResult } from './bench.js';
import { latencyCase } from './latency.js';

/** Kernels import no transport: who measures them brings one. */
const transport = {
  url: pathToFileURL(createRequire(import.meta.url).resolve('@ep/nvshmem')).href,
  path: ['nvshmem', 'shm'],
} as const;

/** Too small to say anything about bandwidth: a few chunks. */
const quickSize = { payloadBytes: 4 << 20, rowBytes: [2048], repeats: 3 } as const;

export function attentionBench(module: { readonly benchAttention: typeof benchAttention }): Bench {
  return { name: 'attention', run: (options, tell) => attentionResult(module.benchAttention, options, tell) };
}

async function attentionResult(
  measure: typeof benchAttention,
  { quick, repeats }: BenchOptions,
  tell: (text: string) => void,
): Promise<BenchResult> {
  const size = { ...(quick ? quickSize : {}), ...(repeats === undefined ? {} : { repeats }) };
  const report = await measure({ transport, ...size, tell });
  const cases = report.results.map(
    ({ rowBytes, bytesPerRank, direct, staged, compat, alltoallv, copy, ratios }): BenchCase => {
      const overAlltoallv: BenchRatio[] =
        ratios.overAlltoallv === undefined
          ? []
          : [{ name: 'times MPI_Alltoallv', value: ratios.overAlltoallv, goal: { at: 'least', value: 1.5 } }];
      return {
        name: `dispatch of ${bytesPerRank / 2 ** 20} MiB per rank in rows of ${rowBytes} bytes, ${report.ranks} ranks`,
        unit: 'ms',
        median: direct.milliseconds,
        spread: direct.spread,
        samples: report.repeats,
        ratios: [
          {
            name: 'of the copy bandwidth of the same threads',
            value: ratios.ofCopy,
            goal: { at: 'least', value: 0.85 },
          },
          { name: 'times the staged dispatch', value: ratios.overStaged, goal: { at: 'least', value: 2 } },
          { name: 'times the per-token dispatch (compat)', value: ratios.overCompat },
          ...overAlltoallv,
          { name: 'of its three copies is what the staged dispatch reaches', value: ratios.stagedOfBound },
        ],
        detail: {
          'direct GB/s': direct.gigabytesPerSecond,
          'memcpy GB/s': copy.memcpy.gigabytesPerSecond,
          'non-temporal copy GB/s': copy.nonTemporal.gigabytesPerSecond,
          'staged GB/s': staged.gigabytesPerSecond,
          'compat GB/s': compat.gigabytesPerSecond,
          ...(alltoallv === undefined ? {} : { 'MPI_Alltoallv GB/s': alltoallv.gigabytesPerSecond }),
        },
      };
    },
  );
  const { stalls } = report;
  cases.push({
    name: `stalls of ${stalls.shortest} us and more in a second of reading the clock, on each of ${stalls.cores} cores`,
    ...latencyCase(stalls),
    samples: stalls.count,
    detail: {},
  });
  for (const step of report.steps) {
    const how = step.from === 'native' ? 'in a native loop' : `called from ${step.from}`;
    cases.push({
      name: `dispatch of ${step.bytesPerRank} bytes per rank ${how}, ${step.ranks} ranks`,
      ...latencyCase(step, step.goals),
      samples: step.count,
      detail: {},
    });
  }
  return { name: 'attention', cases, skipped: report.skipped };
}
