/** Words for the numbers on the wire. */
import {
  EP_EFA_OPCODE_RDMA_READ,
  EP_EFA_OPCODE_RDMA_WRITE,
  EP_EFA_OPCODE_SEND,
  EP_EFA_STATUS_FEATURE_MISMATCH,
  EP_EFA_STATUS_FLUSHED,
  EP_EFA_STATUS_LOCAL_BAD_LENGTH,
  EP_EFA_STATUS_LOCAL_INVALID_AH,
  EP_EFA_STATUS_LOCAL_INVALID_LKEY,
  EP_EFA_STATUS_LOCAL_QP_INTERNAL,
  EP_EFA_STATUS_LOCAL_UNSUPPORTED_OP,
  EP_EFA_STATUS_OK,
  EP_EFA_STATUS_REMOTE_ABORT,
  EP_EFA_STATUS_REMOTE_BAD_ADDRESS,
  EP_EFA_STATUS_REMOTE_BAD_DEST_QPN,
  EP_EFA_STATUS_REMOTE_BAD_LENGTH,
  EP_EFA_STATUS_REMOTE_BAD_STATUS,
  EP_EFA_STATUS_REMOTE_RNR,
  EP_EFA_STATUS_UNKNOWN_PEER,
  EP_EFA_STATUS_UNREACHABLE,
  EP_EFA_STATUS_UNRESPONSIVE,
} from '@ep/native/abi';
import { named } from '@ep/native/wire';

const opcodes = new Map([
  [EP_EFA_OPCODE_SEND, 'SEND'],
  [EP_EFA_OPCODE_RDMA_READ, 'RDMA_READ'],
  [EP_EFA_OPCODE_RDMA_WRITE, 'RDMA_WRITE'],
]);

const statuses = new Map([
  [EP_EFA_STATUS_OK, 'ok'],
  [EP_EFA_STATUS_FLUSHED, 'flushed with its queue pair'],
  [EP_EFA_STATUS_LOCAL_QP_INTERNAL, 'local: internal error of the queue pair'],
  [EP_EFA_STATUS_LOCAL_UNSUPPORTED_OP, 'local: unsupported operation'],
  [EP_EFA_STATUS_LOCAL_INVALID_AH, 'local: invalid address handle'],
  [EP_EFA_STATUS_LOCAL_INVALID_LKEY, 'local: invalid key'],
  [EP_EFA_STATUS_LOCAL_BAD_LENGTH, 'local: bad length'],
  [EP_EFA_STATUS_REMOTE_BAD_ADDRESS, 'remote: bad address or key'],
  [EP_EFA_STATUS_REMOTE_ABORT, 'remote: aborted'],
  [EP_EFA_STATUS_REMOTE_BAD_DEST_QPN, 'remote: no such queue pair'],
  [EP_EFA_STATUS_REMOTE_RNR, 'remote: no receive buffer'],
  [EP_EFA_STATUS_REMOTE_BAD_LENGTH, 'remote: bad length'],
  [EP_EFA_STATUS_REMOTE_BAD_STATUS, 'remote: bad status'],
  [EP_EFA_STATUS_UNRESPONSIVE, 'the peer does not answer'],
  [EP_EFA_STATUS_UNKNOWN_PEER, 'the peer has no address handle for this side'],
  [EP_EFA_STATUS_UNREACHABLE, 'the peer cannot be reached'],
  [EP_EFA_STATUS_FEATURE_MISMATCH, 'feature mismatch'],
]);

export const opcodeName = named(opcodes, 'opcode');
export const statusName = named(statuses, 'status');
