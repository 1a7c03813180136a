/** What can be chosen when the shared-memory backing is opened. */
import { checkInteger, defaultTimeoutMs, invalid } from '@ep/core';

export interface ShmConfig {
  /** Ends every collective call and wait that gives no timeout of its own, in milliseconds. EP_TIMEOUT_MS unless given; Infinity: none. */
  readonly timeoutMs?: number;
  /** Ranks on this host, for the choice between spinning and sleeping. The world size unless given. */
  readonly ranksOnHost?: number;
}

export interface ResolvedShmConfig {
  readonly timeoutMs: number;
  readonly ranksOnHost: number;
}

/** Throws `EP_INVALID_ARGUMENT`. */
export function resolveConfig(config: ShmConfig | undefined, worldSize: number): ResolvedShmConfig {
  const where = 'nvshmem:shm configuration';
  const timeoutMs = config?.timeoutMs ?? defaultTimeoutMs();
  if (!(timeoutMs > 0)) throw invalid('timeoutMs', { where, expected: 'a positive number', found: timeoutMs });
  const ranksOnHost = config?.ranksOnHost ?? worldSize;
  checkInteger(ranksOnHost, 'ranksOnHost', where, 1);
  return { timeoutMs, ranksOnHost };
}
