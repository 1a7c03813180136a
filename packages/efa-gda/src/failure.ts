/** What a broken queue pair means, as an `EpError` that says what the NIC said. */
import { EpError, type ErrorContext, type Rank } from '@ep/core';
import { codeOfStatus, EP_LIFE_ALIVE, type NativeEfaFailure } from '@ep/native';
import {
  EP_EFA_STATUS_FLUSHED,
  EP_EFA_STATUS_REMOTE_ABORT,
  EP_EFA_STATUS_REMOTE_BAD_ADDRESS,
  EP_EFA_STATUS_REMOTE_BAD_DEST_QPN,
  EP_EFA_STATUS_REMOTE_BAD_LENGTH,
  EP_EFA_STATUS_UNKNOWN_PEER,
  EP_EFA_STATUS_UNREACHABLE,
  EP_EFA_STATUS_UNRESPONSIVE,
} from '@ep/native/abi';
import { hex } from '@ep/native/wire';
import { statusName } from './wire/names.js';

const refusedByPeer: readonly number[] = [
  EP_EFA_STATUS_REMOTE_BAD_ADDRESS,
  EP_EFA_STATUS_REMOTE_ABORT,
  EP_EFA_STATUS_REMOTE_BAD_DEST_QPN,
  EP_EFA_STATUS_REMOTE_BAD_LENGTH,
  EP_EFA_STATUS_UNKNOWN_PEER,
];

const unanswered: readonly number[] = [EP_EFA_STATUS_UNRESPONSIVE, EP_EFA_STATUS_UNREACHABLE];

/** `life` of the peer: `EP_LIFE_*`. */
export function pairError(where: string, peer: Rank, failure: NativeEfaFailure | undefined, life: number): EpError {
  const gone = life !== EP_LIFE_ALIVE;
  const whom = peer < 0 ? '' : ` to rank ${peer}`;
  if (failure === undefined) return new EpError('EP_TRANSPORT_FAILED', `${where}: the queue pair${whom} is broken`);
  const { status, efaStatus, qpn, wqe, remoteAddress } = failure;
  const context: ErrorContext = { peer, efaStatus, qpn, wqe, remoteAddress };
  const why =
    efaStatus === 0
      ? 'whoever posted gave up'
      : `request ${wqe} to ${hex(remoteAddress)} ended with status ${efaStatus} (${statusName(efaStatus)})`;
  const pair = `queue pair ${hex(qpn)}${whom}`;
  const silent = codeOfStatus(status) === 'EP_PEER_LOST' || unanswered.includes(efaStatus);
  const refused = refusedByPeer.includes(efaStatus);
  if (silent || (gone && (refused || efaStatus === EP_EFA_STATUS_FLUSHED))) {
    return new EpError('EP_PEER_LOST', `${where}: rank ${peer} does not answer: ${pair}: ${why}`, {
      context: { ...context, lost: [peer] },
    });
  }
  return new EpError(refused ? 'EP_REMOTE_ACCESS' : 'EP_TRANSPORT_FAILED', `${where}: ${pair}: ${why}`, { context });
}
