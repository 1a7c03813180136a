/** What can be chosen when an EFA NIC is opened. */
import { checkInteger, defaultTimeoutMs, invalid, type Rank } from '@ep/core';
import { type NicNetwork, type NicNetworkConfig, resolveActiveRanks, resolveNetwork } from '@ep/native/ranks';

export interface EfaConfig {
  /** Ends every collective call and wait that gives no timeout of its own, in milliseconds, more than 0 (of EP_TIMEOUT_MS 0 is no limit). EP_TIMEOUT_MS unless given; Infinity: none. */
  readonly timeoutMs?: number;
  /** Ranks on this host, for the choice between spinning and sleeping. The world size unless given. */
  readonly ranksOnHost?: number;
  /**
   * Who opens the world, the same on all of them; all ranks unless given. Nobody is in the other places, until those that are here let ranks in (`EfaTransport.readmit`), which come by `rejoin` of the same
   * backing; that does not look at it. Absent over a network.
   */
  readonly activeRanks?: readonly Rank[];
  /** Queue pairs that kernels use, for all peers: a kernel's block takes one by its number. 4 unless given. */
  readonly queuePairs?: number;
  /** Work requests of each send queue: a power of two, 2 to 32768. 256 unless given. */
  readonly depth?: number;
  /** Values of up to 8 bytes travel within a request where the NIC can (unless given), which makes requests of 128 bytes; `staged`: from a slot of memory. */
  readonly values?: 'inline' | 'staged';
}

/** Of the software NIC besides. */
export interface SoftEfaConfig extends EfaConfig {
  /** Of what the NIC chooses by chance: the order in which everything lands. */
  readonly seed?: number;
  /** How many events `EfaTransport.trace()` may give. None are kept unless given. */
  readonly traceEvents?: number;
  /** Faults that the NIC acts out from the beginning on: the rules of `native/nic/efa/faults.hpp`. */
  readonly faults?: string;
  /** Completion counters that the NIC has: one for each signal slot. 1024 unless given. */
  readonly maxCounters?: number;
  /** Bytes in which a message lands, a multiple of 8. 4096 unless given. */
  readonly fragmentBytes?: number;
  /** Ranks on any hosts: the NICs reach each other by TCP, at the addresses that the ranks give here. Ranks of one host, through its memory, unless given. */
  readonly network?: NicNetworkConfig;
}

/** Of EFA itself besides. */
export interface HardwareEfaConfig extends EfaConfig {
  /** Name of the NIC, `rdmap85s0` for example, where `device` of the other transports is the ordinal of a GPU. Any unless given. */
  readonly device?: string;
  /** libfabric, by its path or a name for the loader; `libfabric.so.1` unless given. */
  readonly library?: string;
}

export interface ResolvedEfaConfig {
  readonly timeoutMs: number;
  readonly ranksOnHost: number;
  /** Ascending. Undefined: all. */
  readonly activeRanks: readonly Rank[] | undefined;
  readonly queuePairs: number;
  readonly depth: number;
  readonly values: 'inline' | 'staged';
  readonly seed: number;
  readonly traceEvents: number;
  readonly faults: string | undefined;
  readonly maxCounters: number;
  readonly fragmentBytes: number;
  readonly network: NicNetwork | undefined;
  readonly device: string;
  readonly library: string;
}

/** Throws `EP_INVALID_ARGUMENT`. */
export function resolveConfig(
  name: string,
  config: (SoftEfaConfig & HardwareEfaConfig) | undefined,
  worldSize: number,
): ResolvedEfaConfig {
  const where = `${name} configuration`;
  const timeoutMs = config?.timeoutMs ?? defaultTimeoutMs();
  if (!(timeoutMs > 0)) throw invalid('timeoutMs', { where, expected: 'a positive number', found: timeoutMs });
  const depth = checkInteger(config?.depth ?? 256, 'depth', where, 2, 32768);
  if ((depth & (depth - 1)) !== 0) throw invalid('depth', { where, expected: 'a power of two', found: depth });
  const values = config?.values ?? 'inline';
  if (values !== 'inline' && values !== 'staged') {
    throw invalid('values', { where, expected: 'inline or staged', found: values });
  }
  const fragmentBytes = checkInteger(config?.fragmentBytes ?? 4096, 'fragmentBytes', where, 8, 2 ** 30);
  if (fragmentBytes % 8 !== 0) {
    throw invalid('fragmentBytes', { where, expected: 'a multiple of 8', found: fragmentBytes });
  }
  if (config?.activeRanks !== undefined && config.network !== undefined) {
    const expected = 'absent: all ranks that a network joins open the world';
    throw invalid('activeRanks', { where, expected, found: config.activeRanks });
  }
  const library = config?.library ?? 'libfabric.so.1';
  if (typeof library !== 'string' || library === '') {
    throw invalid('library', { where, expected: 'a path or a name', found: library });
  }
  return {
    timeoutMs,
    ranksOnHost: checkInteger(config?.ranksOnHost ?? worldSize, 'ranksOnHost', where, 1),
    activeRanks: resolveActiveRanks(config?.activeRanks, worldSize, where),
    queuePairs: checkInteger(config?.queuePairs ?? 4, 'queuePairs', where, 1, 256),
    depth,
    values,
    seed: checkInteger(config?.seed ?? 1, 'seed', where),
    traceEvents: checkInteger(config?.traceEvents ?? 0, 'traceEvents', where, 0, 2 ** 24),
    faults: config?.faults,
    maxCounters: checkInteger(config?.maxCounters ?? 1024, 'maxCounters', where, 0, 4096),
    fragmentBytes,
    network: resolveNetwork(where, config?.network),
    device: config?.device ?? '',
    library,
  };
}
