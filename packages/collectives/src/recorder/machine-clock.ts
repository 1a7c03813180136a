/** Clocks and names by which the dumps of several processes are put beside each other. */
import { readFileSync } from 'node:fs';
import { threadId } from 'node:worker_threads';

export const threadOfProcess = threadId;

// `performance.now()` counts from the start of its thread, CLOCK_MONOTONIC from the boot: the same for all processes.
const originUs = Number(process.hrtime.bigint() / 1000n) - performance.now() * 1000;

/** CLOCK_MONOTONIC in microseconds, of a moment of `performance.now()`. */
export const monotonicUs = (now: number): number => originUs + now * 1000;

/** Microseconds since 1970 by the clock of the machine, as it is set now; whole milliseconds. */
export const wallUs = (): number => Date.now() * 1000;

/** Names this start of this machine, also for containers; '' where the kernel does not say. */
export function bootId(): string {
  try {
    return readFileSync('/proc/sys/kernel/random/boot_id', 'utf8').trim();
  } catch {
    return '';
  }
}
