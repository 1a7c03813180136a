/**
 * How fast host threads put over the GIN facade, by the pull request's lock and by the lock-free protocol, where nobody executes what they post; and what a put does to the device. Every
 * run checks what the queue pair holds in the end; wrong counts throw.
 */
import { type NativePutCounts, native } from '@ep/native';

export interface EfaBenchOptions {
  /** Measured runs of each series, after one that warms up; 9 unless given. */
  readonly repeats?: number;
  /** Puts of each run; 400 000 unless given. */
  readonly puts?: number;
  readonly tell?: (text: string) => void;
}

/** Puts each second, one sample a run. */
export interface PutSeries {
  /** `lock`: the pull request's. `lock-free`: ours. */
  readonly way: string;
  /** Who shares the queue pair: `device`, `block`, `thread` (each poster has its own). */
  readonly sharing: string;
  readonly posters: number;
  /** Puts of which all but the last are aggregated. */
  readonly run: number;
  readonly samples: readonly number[];
}

/** What one poster does, all puts together. */
export interface PutCost extends NativePutCounts {
  readonly way: string;
  readonly sharing: string;
  readonly run: number;
}

export interface EfaBenchReport {
  readonly bench: 'efa';
  readonly puts: readonly PutSeries[];
  readonly costs: readonly PutCost[];
}

const runs = [1, 8, 16] as const;
const countedPuts = 16_000;

export async function benchEfa(options: EfaBenchOptions = {}): Promise<EfaBenchReport> {
  const { repeats = 9, puts = 400_000, tell = () => {} } = options;
  const { binding } = native();
  const ways = binding.efaPutWays();
  const series: PutSeries[] = [];
  for (const posters of [1, 2]) {
    for (const run of runs) {
      tell(`${posters} posters, runs of ${run}`);
      const samples = ways.map((): number[] => []);
      // The ways take turns: a machine's speed changes from one moment to the next.
      for (let time = 0; time <= repeats; time++) {
        for (const [way, of] of samples.entries()) {
          const rate = binding.efaPutsPerSecond(way, posters, run, puts);
          if (time > 0) of.push(rate);
        }
        await new Promise((resolve) => setImmediate(resolve));
      }
      for (const [way, { name, sharing }] of ways.entries()) {
        series.push({ way: name, sharing, posters, run, samples: samples[way]! });
      }
    }
  }
  const costs = ways.flatMap(({ name, sharing }, way) =>
    runs.map((run) => ({ way: name, sharing, run, ...binding.efaPutCounts(way, run, countedPuts) })),
  );
  return { bench: 'efa', puts: series, costs };
}
