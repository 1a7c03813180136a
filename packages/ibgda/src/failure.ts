/** What a broken queue pair means, as an `EpError` that says what the NIC said. */
import { EpError, type ErrorContext, type Rank } from '@ep/core';
import { codeOfStatus, EP_LIFE_ALIVE, type NativePairFailure } from '@ep/native';
import {
  EP_MLX5_SYNDROME_FLUSHED,
  EP_MLX5_SYNDROME_REMOTE_ACCESS,
  EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST,
  EP_MLX5_SYNDROME_REMOTE_OPERATION,
  EP_MLX5_SYNDROME_RETRY_EXCEEDED,
  EP_MLX5_SYNDROME_RNR_RETRY_EXCEEDED,
} from '@ep/native/abi';
import { hex } from '@ep/native/wire';
import { opcodeName, syndromeName } from './wire/names.js';

const refusedByPeer: readonly number[] = [
  EP_MLX5_SYNDROME_REMOTE_ACCESS,
  EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST,
  EP_MLX5_SYNDROME_REMOTE_OPERATION,
];

const unanswered: readonly number[] = [EP_MLX5_SYNDROME_RETRY_EXCEEDED, EP_MLX5_SYNDROME_RNR_RETRY_EXCEEDED];

/** `life` of the peer: `EP_LIFE_*`. */
export function pairError(where: string, peer: Rank, failure: NativePairFailure | undefined, life: number): EpError {
  const gone = life !== EP_LIFE_ALIVE;
  if (failure === undefined) {
    return new EpError('EP_TRANSPORT_FAILED', `${where}: the queue pair to rank ${peer} is broken`);
  }
  const { status, syndrome, firstSyndrome, vendorSyndrome, qpn, opcode, index, rkey, remoteAddress } = failure;
  const context: ErrorContext = {
    peer,
    syndrome,
    firstSyndrome,
    vendorSyndrome,
    qpn,
    index,
    opcode,
    rkey,
    remoteAddress,
  };
  const cause = firstSyndrome === 0 ? syndrome : firstSyndrome;
  const before =
    firstSyndrome === 0
      ? ''
      : `; the request that failed first: ${hex(firstSyndrome, 2)} (${syndromeName(firstSyndrome)})`;
  const why =
    syndrome === 0
      ? 'whoever posted gave up'
      : `${opcodeName(opcode)} with index ${index} to ${hex(remoteAddress)} (rkey ${hex(rkey)}) failed with syndrome ${hex(syndrome, 2)} (${syndromeName(syndrome)})${before}`;
  const pair = `queue pair ${hex(qpn)} to rank ${peer}`;
  // Completions of flushed requests overwrite that of the one that failed: then the peer's life tells more than the NIC does.
  const silent = codeOfStatus(status) === 'EP_PEER_LOST' || unanswered.includes(cause);
  if (silent || (gone && syndrome === EP_MLX5_SYNDROME_FLUSHED)) {
    return new EpError('EP_PEER_LOST', `${where}: rank ${peer} does not answer: ${pair}: ${why}`, {
      context: { ...context, lost: [peer] },
    });
  }
  const code = refusedByPeer.includes(cause) ? (gone ? 'EP_PEER_LOST' : 'EP_REMOTE_ACCESS') : 'EP_TRANSPORT_FAILED';
  return new EpError(code, `${where}: ${pair}: ${why}`, {
    context: code === 'EP_PEER_LOST' ? { ...context, lost: [peer] } : context,
  });
}
