/** Whether queue pairs can be had here, and what they offer. */
import { type Capabilities, EpError, isEpError, type Need, type Probe } from '@ep/core';
import { type NativeIbgdaNic, type NativeIbgdaOptions, native } from '@ep/native';
import { type HardwareIbgdaConfig, type ResolvedIbgdaConfig, resolveConfig, type SoftIbgdaConfig } from './config.js';

/** A queue pair carries requests out in order: a visible signal means that all earlier puts to that peer have landed. */
export type IbgdaNeeds = 'bundled' | 'prior' | 'inc' | 'add' | 'set' | 'get';

const NEEDS: readonly IbgdaNeeds[] = ['bundled', 'prior', 'inc', 'add', 'set', 'get'];

export type IbgdaBacking = 'soft' | 'hardware';

export function ibgdaCapabilities(maxMessageBytes: number): Capabilities {
  return {
    needs: new Set<Need>(NEEDS),
    maxMessageBytes,
    maxSignalSlots: 2 ** 32,
    initiators: new Set(['host', 'device'] as const),
  };
}

export function nicOptions(backing: IbgdaBacking, config: ResolvedIbgdaConfig): NativeIbgdaOptions {
  return {
    qpsPerPeer: config.qpsPerPeer,
    depth: config.depth,
    collapsed: config.completions === 'collapsed',
    ackTimeout: config.ackTimeout,
    hardware: backing === 'hardware',
    devices: backing === 'hardware' ? config.devices : '',
    ethernet: config.link === 'ethernet',
    seed: config.seed,
    traceEvents: config.traceEvents,
    ...(config.gidIndex === undefined ? {} : { gidIndex: config.gidIndex }),
  };
}

/** Makes a rank of one and queue pairs to itself, as `open()` would: it fails here where that would fail later. Never throws. */
export async function probeNic(
  backing: IbgdaBacking,
  config: (SoftIbgdaConfig & HardwareIbgdaConfig) | undefined,
): Promise<Probe> {
  if (process.platform !== 'linux') {
    const reason = `queue pairs are driven through Linux; this is ${process.platform}`;
    return { available: false, code: 'EP_UNAVAILABLE', reason, remedy: 'run on Linux, or in a Linux container' };
  }
  try {
    const { binding } = native();
    const rank = new binding.RankContext(0, 1, 1);
    let nic: NativeIbgdaNic | undefined;
    try {
      nic = new binding.IbgdaNic(rank, nicOptions(backing, resolveConfig(`ibgda:${backing}`, config, 1)));
      const { device, port, link, gid, maxMessageBytes, placement, fallbacks } = nic.port();
      const detail = { port, link, gid, placement, fallbacks: fallbacks.join('; ') };
      return {
        available: true,
        capabilities: ibgdaCapabilities(maxMessageBytes),
        devices: [{ name: device, detail }],
      };
    } finally {
      nic?.close();
      rank.close();
    }
  } catch (error) {
    const known = isEpError(error) ? error : new EpError('EP_SYSTEM', String(error), { cause: error });
    const code = known.code === 'EP_SYSTEM' && backing === 'hardware' ? 'EP_UNAVAILABLE' : known.code;
    const remedy =
      backing === 'hardware'
        ? 'ConnectX with rdma-core, a port that is up and the right to use DevX are needed; ibgda:soft runs anywhere'
        : '`ep doctor` shows the limits of this machine';
    return { available: false, code, reason: known.message, remedy, cause: error };
  }
}
