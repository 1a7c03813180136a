/** How hostile the hostile transport is. */
import { checkInteger, defaultTimeoutMs, invalid } from '@ep/core';

export interface HostileConfig {
  /** Of the schedule; each rank mixes its own number in. The same seed gives the same decisions, not the same timing. */
  readonly seed?: number;
  /** A request begins at a random moment within this, or at a flush. In microseconds. */
  readonly maxDelayUs?: number;
  /** Entries of the ring through which kernels post; a power of two. */
  readonly ringCapacity?: number;
  /** Ends waits that give no timeout of their own, in milliseconds. EP_TIMEOUT_MS unless given. */
  readonly timeoutMs?: number;
}

export interface ResolvedHostileConfig {
  readonly seed: number;
  readonly maxDelayUs: number;
  readonly ringCapacity: number;
  readonly timeoutMs: number;
}

/** Throws `EP_INVALID_ARGUMENT`. */
export function resolveConfig(config: HostileConfig = {}): ResolvedHostileConfig {
  const where = 'hostile configuration';
  const timeoutMs = config.timeoutMs ?? defaultTimeoutMs();
  if (!(timeoutMs > 0)) throw invalid('timeoutMs', { where, expected: 'a positive number', found: timeoutMs });
  const ringCapacity = checkInteger(config.ringCapacity ?? 64, 'ringCapacity', where, 1, 65536);
  if ((ringCapacity & (ringCapacity - 1)) !== 0) {
    throw invalid('ringCapacity', { where, expected: 'a power of two', found: ringCapacity });
  }
  return {
    seed: checkInteger(config.seed ?? 1, 'seed', where),
    maxDelayUs: checkInteger(config.maxDelayUs ?? 500, 'maxDelayUs', where, 0, 60_000_000),
    ringCapacity,
    timeoutMs,
  };
}
