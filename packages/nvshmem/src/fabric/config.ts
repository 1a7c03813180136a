/** What can be chosen when the backing `fabric` is opened. */
import { isIPv6 } from 'node:net';
import {
  checkInteger,
  defaultTimeoutMs,
  invalid,
  type JobSecret,
  type ResolvedSecret,
  resolveJobSecret,
} from '@ep/core';
import type { FabricQuery, NativeFabricOptions } from '@ep/native';

export interface FabricConfig {
  /** Ends every collective call and wait that gives no timeout of its own, in milliseconds, more than 0 (of EP_TIMEOUT_MS 0 is no limit). EP_TIMEOUT_MS unless given; Infinity: none. */
  readonly timeoutMs?: number;
  /** Ranks on this host, for the choice between spinning and sleeping and for what fits its memory. The world size unless given. */
  readonly ranksOnHost?: number;
  /** What all ranks of the job share (docs/fabric.md): EP_JOB_SECRET unless given; `none` on a network on which everybody is trusted. */
  readonly secret?: JobSecret;
  /** libfabric's name of a provider: `tcp;ofi_rxm`, `verbs;ofi_rxm`, `efa`, `net`, `shm`. The first of the policy (docs/fabric.md) that is there unless given. */
  readonly provider?: string;
  /** Address of the interface that this rank binds to and is reached at. The provider's choice unless given. */
  readonly address?: string;
  /** Ordinal of a GPU, not the name of a NIC (which `provider` and `address` choose), whose memory this rank allocates (`space: 'device'`) and adopts, where the provider can register it (docs/fabric.md). None unless given. */
  readonly device?: number;
  /** With `device`: name for the loader's search, or path, of CUDA's driver, `cuda`; `libcuda.so.1` unless given. libfabric's is `library`. */
  readonly libraries?: { readonly cuda?: string };
  /** Name for the loader's search, or path, of libfabric; `libfabric.so.1` unless given. */
  readonly library?: string;
  /** Peers hear from this rank at least so often, in milliseconds; 250 unless given. All ranks alike. */
  readonly heartbeatMs?: number;
  /** A peer that was not heard for so long is dead, in milliseconds; 5000 unless given, and at least four heartbeats. All ranks alike. */
  readonly silenceMs?: number;
  /** Requests that kernels may have posted and the progress thread not taken: a power of two; 1024 unless given. */
  readonly ringCapacity?: number;
}

export interface ResolvedFabricConfig extends NativeFabricOptions {
  readonly timeoutMs: number;
  readonly ranksOnHost: number;
  /** Undefined: there is none. */
  readonly secret: ResolvedSecret | undefined;
}

const where = 'nvshmem:fabric configuration';
const DAY_MS = 86_400_000;

function text(name: string, value: string | undefined, fallback: string): string {
  if (value === undefined) return fallback;
  if (typeof value === 'string' && value !== '') return value;
  throw invalid(name, { where, expected: 'a string that is not empty', found: value });
}

/** HAZARD: peers are told this address, and reach nothing at the one that stands for all interfaces. */
function addressOf(value: string | undefined): string {
  const address = text('address', value, '');
  if (address !== '0.0.0.0' && !(isIPv6(address) && /^[0:]+$/.test(address))) return address;
  throw invalid('address', { where, expected: 'the address of one interface, not of all', found: address });
}

/** Throws `EP_INVALID_ARGUMENT`. */
export function resolveQuery(config: FabricConfig | undefined): FabricQuery {
  return {
    library: text('library', config?.library, 'libfabric.so.1'),
    provider: text('provider', config?.provider, ''),
    address: addressOf(config?.address),
    gpu: config?.device === undefined ? -1 : checkInteger(config.device, 'device', where, 0, 1023),
  };
}

/** Throws `EP_INVALID_ARGUMENT`. */
export function resolveConfig(config: FabricConfig | undefined, worldSize: number): ResolvedFabricConfig {
  const timeoutMs = config?.timeoutMs ?? defaultTimeoutMs();
  if (!(timeoutMs > 0)) throw invalid('timeoutMs', { where, expected: 'a positive number', found: timeoutMs });
  const heartbeatMs = checkInteger(config?.heartbeatMs ?? 250, 'heartbeatMs', where, 1, DAY_MS);
  const ringCapacity = checkInteger(config?.ringCapacity ?? 1024, 'ringCapacity', where, 1, 65_536);
  if ((ringCapacity & (ringCapacity - 1)) !== 0) {
    throw invalid('ringCapacity', { where, expected: 'a power of two', found: ringCapacity });
  }
  return {
    ...resolveQuery(config),
    cuda: text('libraries.cuda', config?.libraries?.cuda, 'libcuda.so.1'),
    secret: resolveJobSecret(config?.secret),
    timeoutMs,
    ranksOnHost: checkInteger(config?.ranksOnHost ?? worldSize, 'ranksOnHost', where, 1),
    heartbeatMs,
    silenceMs: checkInteger(config?.silenceMs ?? 5000, 'silenceMs', where, 4 * heartbeatMs, DAY_MS),
    ringCapacity,
  };
}
