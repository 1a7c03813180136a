/** Whether anything else runs here: a benchmark on a busy machine measures the others. */
import { type CpuInfo, cpus } from 'node:os';
import { setTimeout as sleep } from 'node:timers/promises';

export interface MachineLoad {
  /** Busy fraction of each core over the time watched. */
  readonly cores: readonly number[];
  readonly busy: boolean;
}

/** A core that is busier than this does somebody's work; an idle system stays well below. */
export const busyFraction = 0.2;

/** From two readings of the kernel's counters. A core that went away, or was not counted, is idle. */
export function loadBetween(before: readonly CpuInfo[], after: readonly CpuInfo[]): MachineLoad {
  const cores = after.map((core, i) => {
    const earlier = before[i]?.times ?? core.times;
    const sum = (times: CpuInfo['times']): number => times.user + times.nice + times.sys + times.idle + times.irq;
    const total = sum(core.times) - sum(earlier);
    return total > 0 ? 1 - (core.times.idle - earlier.idle) / total : 0;
  });
  return { cores, busy: cores.some((fraction) => fraction > busyFraction) };
}

export async function watchLoad(milliseconds: number, signal: AbortSignal): Promise<MachineLoad> {
  const before = cpus();
  await sleep(milliseconds, undefined, { signal });
  return loadBetween(before, cpus());
}
