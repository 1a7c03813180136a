/** The network that a software NIC is on, as its user names it. */
import { isIPv4 } from 'node:net';
import { checkInteger, invalid, type JobSecret, type ResolvedSecret, resolveJobSecret } from '@ep/core';

export interface NicNetworkConfig {
  /** IPv4 address of the interface that this rank's NIC listens at and is reached at; never all of them. */
  readonly address: string;
  /** What all ranks of the job share (docs/fabric.md): EP_JOB_SECRET unless given; `none` on a network on which everybody is trusted. */
  readonly secret?: JobSecret;
  /** Peers hear from this rank at least so often, in milliseconds; 250 unless given. All ranks alike. */
  readonly heartbeatMs?: number;
  /** A peer that was not heard for so long is dead, in milliseconds; 5000 unless given, and at least four heartbeats. All ranks alike. */
  readonly silenceMs?: number;
}

export interface NicNetwork {
  readonly address: string;
  /** Undefined: there is none. */
  readonly secret: ResolvedSecret | undefined;
  readonly heartbeatMs: number;
  readonly silenceMs: number;
}

const DAY_MS = 86_400_000;

/** Undefined where no network was asked for. Throws `EP_INVALID_ARGUMENT`. */
export function resolveNetwork(where: string, config: NicNetworkConfig | undefined): NicNetwork | undefined {
  if (config === undefined) return undefined;
  const { address } = config;
  if (!isIPv4(address) || address === '0.0.0.0') {
    throw invalid('network.address', { where, expected: 'the IPv4 address of one interface', found: address });
  }
  const heartbeatMs = checkInteger(config.heartbeatMs ?? 250, 'network.heartbeatMs', where, 1, DAY_MS);
  return {
    address,
    secret: resolveJobSecret(config.secret),
    heartbeatMs,
    silenceMs: checkInteger(config.silenceMs ?? 5000, 'network.silenceMs', where, 4 * heartbeatMs, DAY_MS),
  };
}
