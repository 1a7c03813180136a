/** Whether queue pairs can be had here, and what they offer. */
import { type Capabilities, EpError, isEpError, type Need, type Probe } from '@ep/core';
import {
  type NativeGpuLibrary,
  type NativeIbgdaNic,
  type NativeIbgdaOptions,
  type NativeIbgdaPort,
  type NativeNicProbe,
  native,
  openGpus,
  unavailableHere,
} from '@ep/native';
import { LINK_KEYS_BYTES } from '@ep/native/ranks';
import { type AnyIbgdaConfig, type ResolvedIbgdaConfig, resolveConfig } from './config.js';

/** A queue pair carries requests out in order: a visible signal means that all earlier puts to that peer have landed. */
export type IbgdaNeeds = 'bundled' | 'prior' | 'inc' | 'add' | 'set' | 'get';

const NEEDS: readonly IbgdaNeeds[] = ['bundled', 'prior', 'inc', 'add', 'set', 'get'];

export type IbgdaBacking = 'soft' | 'hardware' | 'verbs';

/** `atomics` depend on the NIC: `IbgdaEndpoint.fetchAdd` and `compareSwap`. */
export function ibgdaCapabilities({
  maxMessageBytes,
  atomics,
  kernels,
}: Pick<NativeIbgdaPort, 'maxMessageBytes' | 'atomics' | 'kernels'>): Capabilities {
  return {
    needs: new Set<Need>(atomics ? [...NEEDS, 'atomics'] : NEEDS),
    maxMessageBytes,
    maxSignalSlots: 2 ** 32,
    initiators: new Set(['host', 'device'] as const),
    ...(kernels === 'host' ? {} : { spaces: new Set(['host', 'device'] as const) }),
  };
}

/** Throws `EP_UNAVAILABLE` where the device cannot be used. */
export function nicOptions(backing: IbgdaBacking, config: ResolvedIbgdaConfig): NativeIbgdaOptions {
  const soft = backing === 'soft';
  const { device, controlMemory, libraries } = config;
  return {
    backing,
    libraries: config.libraries,
    qpsPerPeer: config.qpsPerPeer,
    depth: config.depth,
    collapsed: config.completions === 'collapsed',
    ackTimeout: config.ackTimeout,
    devices: soft ? '' : config.devices,
    gpu: soft ? '' : config.gpu,
    ethernet: config.link === 'ethernet',
    seed: config.seed,
    traceEvents: config.traceEvents,
    ...(device === undefined
      ? {}
      : { kernels: { library: gpuLibrary(device), device, controlMemory, driver: libraries.cuda ?? 'libcuda.so.1' } }),
    ...(soft && config.network !== undefined ? { network: config.network } : {}),
    ...(config.gidIndex === undefined || soft ? {} : { gidIndex: config.gidIndex }),
  };
}

function gpuLibrary(device: number): NativeGpuLibrary {
  const { library, devices } = openGpus();
  const unusable = devices[device]?.unusable;
  if (unusable !== undefined)
    throw new EpError('EP_UNAVAILABLE', `GPU ${device}: ${unusable}`, { context: { device } });
  return library;
}

/**
 * Finds what is missing first, then makes a rank of one and connects queue pairs to themselves, as `open()` would: it fails here where that would fail later. Never throws.
 */
export async function probeNic(backing: IbgdaBacking, config: AnyIbgdaConfig | undefined): Promise<Probe> {
  if (process.platform !== 'linux') {
    const reason = `queue pairs are driven through Linux; this is ${process.platform}`;
    return { available: false, code: 'EP_UNAVAILABLE', reason, remedy: 'run on Linux, or in a Linux container' };
  }
  try {
    const { binding } = native();
    const options = nicOptions(backing, resolveConfig(`ibgda:${backing}`, config, 1));
    const found = binding.probeNic(options);
    // Queues then lie in host memory, as `placement` and `fallbacks` say: slower, but a way.
    const far = found.missing === 'gpudirect' ? { gpudirect: `${found.reason}; ${found.remedy}` } : {};
    if (found.missing !== 'nothing' && found.missing !== 'gpudirect') return unavailable(found);
    const rank = new binding.RankContext(0, 1, 1);
    let nic: NativeIbgdaNic | undefined;
    try {
      nic = new binding.IbgdaNic(rank, options);
      connectToItself(nic, options.network !== undefined);
      const opened = nic.port();
      const { device, port, link, gid, distance, kernels, placement, fallbacks } = opened;
      const passedOver = found.passedOver.join('; ');
      const told = [...fallbacks, ...(kernels === 'host' ? notTried(found.placements, placement) : [])].join('; ');
      const detail = { port, link, gid, distance, kernels, placement, fallbacks: told, passedOver, ...far };
      return {
        available: true,
        capabilities: ibgdaCapabilities(opened),
        devices: [{ name: device, detail }],
      };
    } finally {
      nic?.close();
      rank.close();
    }
  } catch (error) {
    const thrown = isEpError(error) ? error : new EpError('EP_SYSTEM', String(error), { cause: error });
    const known = backing === 'soft' ? thrown : unavailableHere(error);
    const device = known !== thrown;
    const lost = known.context.missing === 'gid';
    return {
      available: false,
      code: known.code,
      reason: known.message,
      ...(known.scope === 'call'
        ? {}
        : {
            remedy: device
              ? lost
                ? `${WAY}; ${elsewhere}`
                : elsewhere
              : '`ep doctor` shows the limits of this machine',
          }),
      cause: thrown,
    };
  }
}

/** Places that kernels would rather have their queues in than `placement`, and why they are not there. */
export function notTried(places: NativeNicProbe['placements'], placement: string): string[] {
  const taken = places.findIndex(({ where }) => where === placement);
  return places.slice(0, Math.max(taken, 0)).map(({ where, possible, why }) => {
    const reason = possible ? "not tried: kernels of the host post, as no 'device' is given" : why;
    return `${where}: ${reason}`;
  });
}

/** The first step that needs the way of the port's GID through the network: without it that would show in `open()` only. */
function connectToItself(nic: NativeIbgdaNic, network: boolean): void {
  try {
    nic.connect([nic.connection()], network ? [new Uint8Array(LINK_KEYS_BYTES)] : []);
  } catch (error) {
    const known = isEpError(error) ? error : new EpError('EP_SYSTEM', String(error), { cause: error });
    const { device, port, gid } = nic.port();
    throw new EpError(
      known.code,
      `a queue pair of ${device} port ${port} cannot be connected to itself by GID ${gid}: ${known.message}`,
      { context: { ...known.context, missing: 'gid' }, cause: error },
    );
  }
}

const WAY = 'give the network interface of the port an address that can be reached, or name another GID with gidIndex';

const elsewhere = 'ibgda:soft runs anywhere';

function unavailable({ missing, reason, remedy }: NativeNicProbe): Probe {
  const code = 'EP_UNAVAILABLE';
  return {
    available: false,
    code,
    reason,
    remedy: remedy === '' ? elsewhere : `${remedy}; ${elsewhere}`,
    cause: new EpError(code, reason, { context: { missing } }),
  };
}
