/** What can be chosen when the shared-memory backing is opened. */
import { checkInteger, defaultTimeoutMs, invalid, type Rank } from '@ep/core';
import { resolveActiveRanks } from '@ep/native/ranks';

export interface ShmConfig {
  /** Ends every collective call and wait that gives no timeout of its own, in milliseconds, more than 0 (of EP_TIMEOUT_MS 0 is no limit). EP_TIMEOUT_MS unless given; Infinity: none. */
  readonly timeoutMs?: number;
  /** Ranks on this host, for the choice between spinning and sleeping. As many as it reaches unless given. */
  readonly ranksOnHost?: number;
  /**
   * For ranks on several hosts: for each rank the lowest one of its host, as `FabricTransport.hosts` says, or `found`: as the ranks find when they meet. All ranks open the transport, which then reaches those of
   * its own host: one for `compose`, whose other transports reach the rest. Absent: all ranks are on one host, or `open` fails.
   */
  readonly hosts?: readonly Rank[] | 'found';
  /**
   * Who opens the world, the same on all of them; all ranks unless given. Nobody is in the other places, until those that are here let ranks in (`ShmTransport.readmit`), which come by
   * `nvshmem.shm.rejoin`; that does not look at it.
   */
  readonly activeRanks?: readonly Rank[];
}

export interface ResolvedShmConfig {
  readonly timeoutMs: number;
  /** Undefined: as many as are there. */
  readonly ranksOnHost: number | undefined;
  /** Undefined: all on one. */
  readonly hosts: readonly Rank[] | 'found' | undefined;
  /** Ascending. Undefined: all. */
  readonly activeRanks: readonly Rank[] | undefined;
}

/** Throws `EP_INVALID_ARGUMENT`. */
export function resolveConfig(config: ShmConfig | undefined, worldSize: number): ResolvedShmConfig {
  const where = 'nvshmem:shm configuration';
  const timeoutMs = config?.timeoutMs ?? defaultTimeoutMs();
  if (!(timeoutMs > 0)) throw invalid('timeoutMs', { where, expected: 'a positive number', found: timeoutMs });
  const hosts = hostsOf(config?.hosts, worldSize, where);
  if (hosts !== undefined && config?.activeRanks !== undefined) {
    throw invalid('activeRanks', { where, expected: 'absent beside hosts', found: config.activeRanks });
  }
  const ranksOnHost = config?.ranksOnHost ?? (hosts === undefined ? worldSize : undefined);
  if (ranksOnHost !== undefined) checkInteger(ranksOnHost, 'ranksOnHost', where, 1);
  return { timeoutMs, ranksOnHost, hosts, activeRanks: resolveActiveRanks(config?.activeRanks, worldSize, where) };
}

function hostsOf(hosts: unknown, worldSize: number, where: string): readonly Rank[] | 'found' | undefined {
  if (hosts === undefined || hosts === 'found') return hosts;
  if (!Array.isArray(hosts) || hosts.length !== worldSize) {
    throw invalid('hosts', { where, expected: `'found', or a list of ${worldSize} ranks`, found: hosts });
  }
  return hosts.map((lowest, rank) => {
    checkInteger(lowest, `hosts[${rank}]`, where, 0, worldSize - 1);
    if (hosts.indexOf(lowest) === lowest) return lowest;
    throw invalid(`hosts[${rank}]`, { where, expected: 'the lowest rank of its host', found: lowest });
  });
}
