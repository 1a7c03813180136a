/** Why ranks do not reach each other, in words for whoever has to mend the network. */
import { networkInterfaces } from 'node:os';
import { EpError, isEpError, type Rank } from '@ep/core';
import type { NativeFabricNic } from '@ep/native';

const [AF_INET, SOCKADDR_IN_BYTES] = [2, 16];
const EADDRNOTAVAIL = 99;

/** An endpoint's address as people write it; undefined where the provider's is none of IPv4. */
export function addressText(endpoint: Uint8Array): string | undefined {
  const view = new DataView(endpoint.buffer, endpoint.byteOffset, endpoint.byteLength);
  if (endpoint.byteLength < SOCKADDR_IN_BYTES || view.getUint16(0, true) !== AF_INET) return undefined;
  return `${endpoint.subarray(4, 8).join('.')} port ${view.getUint16(2)}`;
}

const ownAddresses = (): readonly (readonly [name: string, address: string])[] =>
  Object.entries(networkInterfaces()).flatMap(([name, all]) =>
    (all ?? []).map(({ address }) => [name, address] as const),
  );

/** Of an error of opening: the interfaces that there are, where `address` is of none of them. */
export function ofMissingAddress(error: unknown, address: string): unknown {
  if (!isEpError(error) || error.native?.errno !== EADDRNOTAVAIL || address === '') return error;
  const own = ownAddresses();
  if (own.some(([, one]) => one === address)) return error;
  const there = own.map(([name, one]) => `${one} (${name})`).join(', ') || 'none';
  const text = `no interface of this host has the address ${address}; there are ${there}: ${error.message}`;
  return new EpError(error.code, text, { context: error.context, native: error.native, cause: error });
}

export interface Reach {
  readonly rank: Rank;
  readonly nic: NativeFabricNic;
  /** By rank, as the provider names them, and where their mailboxes are. */
  readonly endpoints: readonly Uint8Array[];
}

/** From where this rank speaks. */
function placeOf(endpoint: Uint8Array | undefined): string {
  const own = endpoint && addressText(endpoint)?.split(' ')[0];
  if (own === undefined) return '';
  const name = ownAddresses().find(([, address]) => address === own)?.[0];
  return ` from ${own} (${name ?? 'of no interface that is up'})`;
}

/** Of an error of ranks that meet: what the network said of those that were lost, or awaited in vain. */
export function ofMissingRanks(error: unknown, { rank, nic, endpoints }: Reach): unknown {
  if (!isEpError(error) || (error.code !== 'EP_PEER_LOST' && error.code !== 'EP_TIMEOUT')) return error;
  const awaited = error.context.awaited;
  const from = placeOf(endpoints[rank]);
  const reasons = endpoints.flatMap((endpoint, peer) => {
    const failure = peer === rank ? undefined : nic.failure(peer)?.text;
    if (failure === undefined && !(Array.isArray(awaited) && awaited.includes(peer))) return [];
    const said = failure?.replace(`rank ${peer}: `, '') ?? 'nothing was refused, and nothing was heard from there';
    const address = addressText(endpoint);
    return [`rank ${peer}${from}${address === undefined ? '' : ` to ${address}`}: ${said}`];
  });
  if (reasons.length === 0) return error;
  const text = `${error.message}; ${reasons.join('; ')}`;
  return new EpError(error.code, text, { context: error.context, cause: error });
}
