/**
 * How fast host threads post work requests, and what the software NIC costs. Every series checks what was posted, executed and moved; wrong counts throw. Figures of
 * the NIC are an emulator's, never a network's.
 */
import { native } from '@ep/native';

export interface IbgdaBenchOptions {
  /** Measured runs of each series, after one that warms up; 9 unless given. */
  readonly repeats?: number;
  /** Posts of each run of a drained series; 400 000 unless given. With a NIC a tenth of it. */
  readonly posts?: number;
  readonly tell?: (text: string) => void;
}

/** Posts each second, one sample a run. */
export interface PostSeries {
  readonly way: string;
  /** Who shares the queue pair: `device`, `block`, `thread` (each poster has its own). */
  readonly sharing: string;
  readonly posters: number;
  readonly batch: number;
  /** By the software NIC; otherwise nobody executes what is posted, and the ring is only drained. */
  readonly executed: boolean;
  readonly samples: readonly number[];
}

/** Of the software NIC, in time of its thread; one sample a run. */
export interface NicSeries {
  /** 8-byte inline writes each second, by requests a doorbell. */
  readonly requests: readonly { readonly batch: number; readonly samples: readonly number[] }[];
  /** Bytes each second of 64 KiB writes, and of copies by one thread between the same memories. */
  readonly written: readonly number[];
  readonly copied: readonly number[];
}

export interface IbgdaBenchReport {
  readonly bench: 'ibgda';
  readonly posts: readonly PostSeries[];
  readonly nic: NicSeries;
}

const batches = [1, 4, 16] as const;
const nicBatches = [1, 8, 512] as const;
const nicRegion = 32 * 2 ** 20;

export async function benchIbgda(options: IbgdaBenchOptions = {}): Promise<IbgdaBenchReport> {
  const { repeats = 9, posts = 400_000, tell = () => {} } = options;
  const { binding } = native();
  const ways = binding.postWays();
  const series: PostSeries[] = [];
  for (const executed of [false, true]) {
    const count = executed ? posts / 10 : posts;
    for (const posters of [1, 2]) {
      for (const batch of batches) {
        tell(`${posters} posters, batch ${batch}${executed ? ', executed' : ''}`);
        const samples = ways.map((): number[] => []);
        // The ways take turns: a machine's speed changes from one moment to the next.
        for (let run = 0; run <= repeats; run++) {
          for (const [way, of] of samples.entries()) {
            const rate = binding.postsPerSecond(way, posters, batch, count, executed);
            if (run > 0) of.push(rate);
          }
          await new Promise((resolve) => setImmediate(resolve));
        }
        series.push(
          ...ways.map(({ name, sharing }, way) => ({
            way: name,
            sharing,
            posters,
            batch,
            executed,
            samples: samples[way]!,
          })),
        );
      }
    }
  }
  return { bench: 'ibgda', posts: series, nic: await nicSeries(repeats, posts, tell) };
}

async function nicSeries(repeats: number, posts: number, tell: (text: string) => void): Promise<NicSeries> {
  const { binding } = native();
  const requests = nicBatches.map((batch) => ({ batch, samples: [] as number[] }));
  const written: number[] = [];
  const copied: number[] = [];
  for (let run = 0; run <= repeats; run++) {
    tell(`software NIC, run ${run} of ${repeats}`);
    for (const { batch, samples } of requests) {
      const speed = binding.softwareNicSpeed(batch, posts, nicRegion);
      if (run === 0) continue;
      samples.push(speed.requestsPerSecond);
      written.push(speed.bytesPerSecond);
      copied.push(speed.copyPerSecond);
    }
    await new Promise((resolve) => setImmediate(resolve));
  }
  return { requests, written, copied };
}
