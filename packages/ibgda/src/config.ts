/** What can be chosen when a NIC is opened. */
import { checkInteger, defaultTimeoutMs, invalid, type Rank } from '@ep/core';
import type { ControlMemory } from '@ep/native';
import { type NicNetwork, type NicNetworkConfig, resolveActiveRanks, resolveNetwork } from '@ep/native/ranks';

export interface IbgdaConfig {
  /** Ends every collective call and wait that gives no timeout of its own, in milliseconds, more than 0 (of EP_TIMEOUT_MS 0 is no limit). EP_TIMEOUT_MS unless given; Infinity: none. */
  readonly timeoutMs?: number;
  /** Ranks on this host, for the choice between spinning and sleeping. The world size unless given. */
  readonly ranksOnHost?: number;
  /**
   * Who opens the world, the same on all of them; all ranks unless given. Nobody is in the other places, until those that are here let ranks in (`IbgdaTransport.readmit`), which come by `rejoin` of the same
   * backing; that does not look at it. Absent over a network, for kernels on a GPU and beside `exchange`.
   */
  readonly activeRanks?: readonly Rank[];
  /** Queue pairs to each peer that kernels use: a kernel's block takes one by its number. 4 unless given. */
  readonly qpsPerPeer?: number;
  /** Work requests of each send queue: a power of two, 2 to 32768. 1024 unless given. */
  readonly depth?: number;
  /** `collapsed` (unless given): every completion overwrites one entry. `ring`: none is lost, for a ring of memory and a consumer index. */
  readonly completions?: 'collapsed' | 'ring';
  /** A try to reach a peer waits 4.096 us times 2 to this power, 1 to 31, and there are seven more; 18 (about 8 s in all) unless given. */
  readonly ackTimeout?: number;
  /** Ordinal of the GPU whose kernels post; NICs are named in `devices` (of `hardware` and `verbs`). Then `allocate({ space: 'device' })` has memory for them; those of the host, which post unless it is given, take none of this transport's. */
  readonly device?: number;
  /**
   * With `device`: where its kernels' queues and memory may lie, the first place that can be had: GPU memory exported as DMA-BUF, GPU memory by its address (nvidia-peermem), or
   * page-locked host memory. In this order unless given; `IbgdaTransport.port` tells which it became, and why not those before. `soft` and `verbs`, whose rings a processor
   * reads, can have `host` only.
   */
  readonly controlMemory?: readonly ControlMemory[];
  /** With `device`: name for the loader's search, or path, of CUDA's driver, `cuda`; `libcuda.so.1` unless given. */
  readonly libraries?: { readonly cuda?: string };
}

/** Of the software NIC besides. */
export interface SoftIbgdaConfig extends IbgdaConfig {
  /** `infiniband` unless given. */
  readonly link?: 'infiniband' | 'ethernet';
  /** Of what the NIC chooses by chance. */
  readonly seed?: number;
  /** How many events `IbgdaTransport.trace()` may give. None are kept unless given. */
  readonly traceEvents?: number;
  /** Faults that the NIC acts out from the beginning on: the rules of `native/nic/mlx5/faults.hpp`. */
  readonly faults?: string;
  /** Ranks on any hosts: the NICs reach each other by TCP, at the addresses that the ranks give here. Ranks of one host, through its memory, unless given. */
  readonly network?: NicNetworkConfig;
}

/** Of `hardware` and `verbs` besides. */
export interface DeviceIbgdaConfig extends IbgdaConfig {
  /** Which NICs may be taken, by names, prefixes or exclusions: `mlx5_0,mlx5_3:2`, `mlx5_*`, `^mlx5_bond_0`. Any unless given. */
  readonly devices?: string;
  /** Entry of the port's GID table, instead of the one that the rule picks. */
  readonly gidIndex?: number;
  /**
   * PCI address of a GPU, as `cudaDeviceGetPCIBusId` tells it in lower case: the nearest device is taken. Unless given, that of `device`; without it, one near the memory node
   * that this process is bound to, if it is bound to one.
   */
  readonly gpu?: string;
  /** Besides, of libibverbs and, for `hardware`, libmlx5; as rdma-core installs them unless given. */
  readonly libraries?: { readonly cuda?: string; readonly ibverbs?: string; readonly mlx5?: string };
}

/** What any backing may be given; each looks at its own. */
export type AnyIbgdaConfig = SoftIbgdaConfig & DeviceIbgdaConfig;

export interface ResolvedIbgdaConfig {
  readonly timeoutMs: number;
  readonly ranksOnHost: number;
  /** Ascending. Undefined: all. */
  readonly activeRanks: readonly Rank[] | undefined;
  readonly qpsPerPeer: number;
  readonly depth: number;
  readonly completions: 'collapsed' | 'ring';
  readonly ackTimeout: number;
  readonly link: 'infiniband' | 'ethernet';
  readonly seed: number;
  readonly traceEvents: number;
  readonly faults: string | undefined;
  readonly network: NicNetwork | undefined;
  readonly devices: string;
  readonly gidIndex: number | undefined;
  readonly gpu: string;
  readonly device: number | undefined;
  readonly controlMemory: readonly ControlMemory[];
  readonly libraries: { readonly cuda?: string; readonly ibverbs?: string; readonly mlx5?: string };
}

const PLACES: readonly ControlMemory[] = ['dma-buf', 'gpu', 'host'];

function resolvePlaces(config: IbgdaConfig | undefined, where: string): readonly ControlMemory[] {
  const asked = config?.controlMemory;
  if (asked === undefined) return PLACES;
  const known = Array.isArray(asked) && asked.length > 0 && asked.every((place) => PLACES.includes(place));
  if (!known || new Set(asked).size !== asked.length || config?.device === undefined) {
    const expected = `some of ${PLACES.join(', ')}, each once, beside a device`;
    throw invalid('controlMemory', { where, expected, found: asked });
  }
  return asked;
}

function oneOf<T extends string>(value: T, values: readonly T[], name: string, where: string): T {
  if (values.includes(value)) return value;
  throw invalid(name, { where, expected: values.join(' or '), found: value });
}

/** Throws `EP_INVALID_ARGUMENT`. */
export function resolveConfig(
  name: string,
  config: AnyIbgdaConfig | undefined,
  worldSize: number,
): ResolvedIbgdaConfig {
  const where = `${name} configuration`;
  const timeoutMs = config?.timeoutMs ?? defaultTimeoutMs();
  if (!(timeoutMs > 0)) throw invalid('timeoutMs', { where, expected: 'a positive number', found: timeoutMs });
  const depth = checkInteger(config?.depth ?? 1024, 'depth', where, 2, 32768);
  if ((depth & (depth - 1)) !== 0) throw invalid('depth', { where, expected: 'a power of two', found: depth });
  const { gidIndex, faults, device } = config ?? {};
  if (config?.activeRanks !== undefined && (config.network ?? device) !== undefined) {
    const expected = 'absent: all ranks that a network joins, or whose kernels run on a GPU, open the world';
    throw invalid('activeRanks', { where, expected, found: config.activeRanks });
  }
  return {
    timeoutMs,
    ranksOnHost: checkInteger(config?.ranksOnHost ?? worldSize, 'ranksOnHost', where, 1),
    activeRanks: resolveActiveRanks(config?.activeRanks, worldSize, where),
    qpsPerPeer: checkInteger(config?.qpsPerPeer ?? 4, 'qpsPerPeer', where, 1, 256),
    depth,
    completions: oneOf(config?.completions ?? 'collapsed', ['collapsed', 'ring'], 'completions', where),
    ackTimeout: checkInteger(config?.ackTimeout ?? 18, 'ackTimeout', where, 1, 31),
    link: oneOf(config?.link ?? 'infiniband', ['infiniband', 'ethernet'], 'link', where),
    seed: checkInteger(config?.seed ?? 1, 'seed', where),
    traceEvents: checkInteger(config?.traceEvents ?? 0, 'traceEvents', where, 0, 2 ** 24),
    faults,
    network: resolveNetwork(where, config?.network),
    devices: config?.devices ?? '',
    gidIndex: gidIndex === undefined ? undefined : checkInteger(gidIndex, 'gidIndex', where, 0, 2 ** 16),
    gpu: config?.gpu ?? '',
    device: device === undefined ? undefined : checkInteger(device, 'device', where),
    controlMemory: resolvePlaces(config, where),
    libraries: config?.libraries ?? {},
  };
}
