/** Whether endpoints of EFA can be had here, and what they offer. */
import { type Capabilities, EpError, isEpError, type Need, type Probe } from '@ep/core';
import { type NativeEfaNic, type NativeEfaOptions, native, unavailableHere } from '@ep/native';
import { type HardwareEfaConfig, type ResolvedEfaConfig, resolveConfig, type SoftEfaConfig } from './config.js';
import { driverParameters, peerMapping } from './peer-mapping.js';

/** EFA delivers in no order: a visible signal speaks of its own put, and of nothing else. */
export type EfaNeeds = 'bundled' | 'inc' | 'add' | 'get';

const NEEDS: readonly EfaNeeds[] = ['bundled', 'inc', 'add', 'get'];

export type EfaBacking = 'soft' | 'hardware';

/** `counters` of the device: each signal slot takes one, and an endpoint, of which there may be fewer left. */
export function efaCapabilities(maxMessageBytes: number, counters: number): Capabilities {
  return {
    needs: new Set<Need>(NEEDS),
    maxMessageBytes,
    maxSignalSlots: counters,
    initiators: new Set(['host', 'device'] as const),
  };
}

export function nicOptions(backing: EfaBacking, config: ResolvedEfaConfig): NativeEfaOptions {
  return {
    queuePairs: config.queuePairs,
    depth: config.depth,
    inlineValues: config.values === 'inline',
    hardware: backing === 'hardware',
    library: config.library,
    device: backing === 'hardware' ? config.device : '',
    seed: config.seed,
    traceEvents: config.traceEvents,
    maxCounters: config.maxCounters,
    fragmentBytes: config.fragmentBytes,
    ...(backing === 'soft' && config.network !== undefined ? { network: config.network } : {}),
  };
}

/** What to do about what is missing, by the errno that native/dl/efa.hpp documents. */
const REMEDIES: Readonly<Record<string, string>> = {
  ELIBACC: "install libfabric with its EFA provider: Amazon's EFA installer has both",
  ELIBBAD: "update libfabric to 2.5 or newer: Amazon's EFA installer 1.50 has one; distributions are behind it",
  ENODEV:
    'run on an instance with EFA (P5en, P6-B200, P6-B300), with the interface attached and /dev/infiniband shared with the container',
  EOPNOTSUPP: 'update the driver (efa 3.3 or newer) and rdma-core; older generations of EFA have no counters in memory',
  EPERM: 'give the process /dev/infiniband/uverbs* and enough locked memory (ulimit -l)',
};

const errnoName: ReadonlyMap<number, string> = new Map([
  [79, 'ELIBACC'],
  [80, 'ELIBBAD'],
  [19, 'ENODEV'],
  [95, 'EOPNOTSUPP'],
  [1, 'EPERM'],
  [13, 'EPERM'],
]);

/** Makes a rank of one and endpoints of its own, as `open()` would: it fails here where that would fail later. Never throws. */
export async function probeNic(
  backing: EfaBacking,
  config: (SoftEfaConfig & HardwareEfaConfig) | undefined,
): Promise<Probe> {
  if (process.platform !== 'linux') {
    const reason = `EFA is driven through Linux; this is ${process.platform}`;
    return { available: false, code: 'EP_UNAVAILABLE', reason, remedy: 'run on Linux, or in a Linux container' };
  }
  try {
    const { binding } = native();
    const rank = new binding.RankContext(0, 1, 1);
    let nic: NativeEfaNic | undefined;
    try {
      nic = new binding.EfaNic(rank, nicOptions(backing, resolveConfig(`efa-gda:${backing}`, config, 1)));
      const { name, maxMessageBytes, ...found } = nic.device();
      const detail = { ...found, maxMessageBytes };
      return {
        available: true,
        capabilities: efaCapabilities(maxMessageBytes, found.counters),
        devices: [
          {
            name,
            detail: backing === 'hardware' ? { ...detail, peerMapping: peerMapping(driverParameters()) } : detail,
          },
        ],
      };
    } finally {
      nic?.close();
      rank.close();
    }
  } catch (error) {
    const known = failureOf(backing, error);
    const missing = errnoName.get(Number(known.context.errno ?? 0));
    const remedy =
      backing === 'hardware'
        ? `${(missing && REMEDIES[missing]) ?? 'see the reason'}; efa-gda:soft runs anywhere`
        : '`ep doctor` shows the limits of this machine';
    return { available: false, code: known.code, reason: known.message, remedy, cause: error };
  }
}

/** A software NIC is there on any machine: what fails with it is no lack of a device. */
const failureOf = (backing: EfaBacking, error: unknown): EpError =>
  backing === 'hardware'
    ? unavailableHere(error)
    : isEpError(error)
      ? error
      : new EpError('EP_SYSTEM', String(error), { cause: error });
