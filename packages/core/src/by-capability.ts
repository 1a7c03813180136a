/** The routes of a composed transport by what its members can do, where the caller names none. */
import { checkInteger, invalid } from './errors.js';
import type { Need, Rank, Transport } from './transport.js';

const WHERE = 'byCapability';

/**
 * A policy for `compose`, and its own where it is given none. Each peer is reached by the first of the transports, in their order, that can do most for it:
 *
 * 1. it stores to the peer's memory ('load-store'), and both ranks are of one host;
 * 2. it keeps what is sent in order ('prior');
 * 3. any other. A transport that stores to peers is never asked to reach another host.
 *
 * `hosts`: for each rank a number that the ranks of its host have, and no other, the same on all ranks; as each transport knows it unless given (one that knows nothing has all ranks on
 * its own host). So both ends of a pair choose alike if their transports come in one order. Throws `EP_INVALID_ARGUMENT` where nothing reaches a peer.
 *
 * To choose otherwise for some peers, ask it for the rest: `(peer, all) => (peer === 3 ? nic : usual(peer, all))`.
 */
export function byCapability(
  hosts?: readonly number[],
): <C extends Need>(peer: Rank, transports: readonly Transport<C>[]) => Transport<C> {
  if (hosts !== undefined) {
    if (!Array.isArray(hosts)) throw invalid('hosts', { where: WHERE, expected: 'a list of numbers', found: hosts });
    for (const [rank, host] of hosts.entries()) checkInteger(host, `hosts[${rank}]`, WHERE, 0);
  }
  return (peer, transports) => {
    const has = (transport: Transport<never>, need: Need): boolean => transport.capabilities.needs.has(need);
    const sharesHost = ({ rank, worldSize, hosts: known }: Transport<never>): boolean => {
      const placed = hosts ?? known;
      if (placed === undefined) return true;
      if (placed.length === worldSize) return placed[peer] === placed[rank];
      throw invalid('hosts', { where: WHERE, expected: `a list of ${worldSize} numbers`, found: placed });
    };
    const far = transports.filter((transport) => !has(transport, 'load-store'));
    const chosen =
      transports.find((transport) => has(transport, 'load-store') && sharesHost(transport)) ??
      far.find((transport) => has(transport, 'prior')) ??
      far[0];
    if (chosen !== undefined) return chosen;
    const found = transports.map(({ name }) => name).join(', ');
    throw invalid('transports', { where: WHERE, expected: `one that reaches rank ${peer}, on another host`, found });
  };
}
