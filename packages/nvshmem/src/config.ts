/** What can be chosen when the shared-memory backing is opened. */
import { checkInteger, defaultTimeoutMs, invalid, type Rank } from '@ep/core';

export interface ShmConfig {
  /** Ends every collective call and wait that gives no timeout of its own, in milliseconds. EP_TIMEOUT_MS unless given; Infinity: none. */
  readonly timeoutMs?: number;
  /** Ranks on this host, for the choice between spinning and sleeping. The world size unless given. */
  readonly ranksOnHost?: number;
  /**
   * Who opens the world, the same on all of them; all ranks unless given. Nobody is in the other places, until those that are here let ranks in (`ShmTransport.readmit`), which come by
   * `nvshmem.shm.rejoin`; that does not look at it.
   */
  readonly activeRanks?: readonly Rank[];
}

export interface ResolvedShmConfig {
  readonly timeoutMs: number;
  readonly ranksOnHost: number;
  /** Ascending. Undefined: all. */
  readonly activeRanks: readonly Rank[] | undefined;
}

/** Throws `EP_INVALID_ARGUMENT`. */
export function resolveConfig(config: ShmConfig | undefined, worldSize: number): ResolvedShmConfig {
  const where = 'nvshmem:shm configuration';
  const timeoutMs = config?.timeoutMs ?? defaultTimeoutMs();
  if (!(timeoutMs > 0)) throw invalid('timeoutMs', { where, expected: 'a positive number', found: timeoutMs });
  const ranksOnHost = config?.ranksOnHost ?? worldSize;
  checkInteger(ranksOnHost, 'ranksOnHost', where, 1);
  return { timeoutMs, ranksOnHost, activeRanks: activeOf(config?.activeRanks, worldSize, where) };
}

function activeOf(ranks: unknown, worldSize: number, where: string): readonly Rank[] | undefined {
  if (ranks === undefined) return undefined;
  if (!Array.isArray(ranks) || ranks.length === 0 || new Set(ranks).size !== ranks.length) {
    throw invalid('activeRanks', { where, expected: 'a list of at least one rank, each named once', found: ranks });
  }
  const active = ranks.map((rank, i) => checkInteger(rank, `activeRanks[${i}]`, where, 0, worldSize - 1));
  return active.length === worldSize ? undefined : active.sort((a, b) => a - b);
}
