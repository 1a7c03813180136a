/** What keeps strangers out where ranks meet over a network: keys for each direction between two ranks, made of the job secret and of what the ranks said when they met. */
import { randomBytes } from 'node:crypto';
import { readFileSync, readlinkSync } from 'node:fs';
import { hostname } from 'node:os';
import { jobKey, type PeerFacts, type Rank, type ResolvedSecret, secretMissing } from '@ep/core';

/** Of each opening and rank: no keys serve twice. */
export const NONCE_BYTES = 32;
const TAG_KEY_BYTES = 16;
/** Of the keys of both directions. */
export const LINK_KEYS_BYTES = 2 * TAG_KEY_BYTES;

export const newNonce = (): Buffer => randomBytes(NONCE_BYTES);

/** Shows whether two ranks have the same secret, and nothing of it. */
export function fingerprint(secret: ResolvedSecret | undefined): string {
  if (secret === undefined) return 'absent';
  return secret === 'none' ? 'none' : jobKey(secret, 'fabric fingerprint').toString('hex').slice(0, 16);
}

function read(how: () => string): string {
  try {
    return how().trim();
  } catch {
    return 'unknown';
  }
}

/** The same for processes that share their network interfaces, also when they are in containers with host names of their own. */
export function networkOfProcess(): string {
  const boot = read(() => readFileSync('/proc/sys/kernel/random/boot_id', 'utf8'));
  const space = read(() => readlinkSync('/proc/self/ns/net'));
  return boot === 'unknown' ? hostname() : `${boot} ${space}`;
}

/** The same for processes that can share memory besides: each finds the other's under its process id, and may open it. */
export function hostOfProcess(): string {
  return `${networkOfProcess()} ${read(() => readlinkSync('/proc/self/ns/pid'))} ${process.getuid?.()}`;
}

/** For each rank the lowest one of its host. */
export function hostsOf(peers: readonly PeerFacts[]): readonly Rank[] {
  const names = peers.map(({ host }) => host.place);
  return names.map((name) => names.indexOf(name));
}

/** Throws `EP_SECRET` where ranks are in several networks and nobody has said anything of a secret. */
export function checkSecret(transport: string, peers: readonly PeerFacts[], secret: ResolvedSecret | undefined): void {
  const networks = new Set(peers.map(({ host }) => host.network)).size;
  if (secret === undefined && networks > 1)
    throw secretMissing(`${transport}: ${peers.length} ranks are on ${networks} hosts, which a network joins`);
}

/** By rank: 16 bytes for what `rank` says to it, 16 for what it says to `rank`. HAZARD: without a secret, whoever reads the store can make them. */
export function linkKeys(rank: Rank, nonces: readonly Uint8Array[], secret: ResolvedSecret | undefined): Uint8Array[] {
  const own = secret === undefined || secret === 'none' ? new Uint8Array(0) : secret;
  const world = jobKey(own, 'fabric', Buffer.concat(nonces));
  const key = (from: Rank, to: Rank) => jobKey(world, `fabric ${from} to ${to}`).subarray(0, TAG_KEY_BYTES);
  return nonces.map((_, peer) => Buffer.concat([key(rank, peer), key(peer, rank)]));
}
