/** Words for the numbers on the wire. */
import {
  EP_MLX5_CMD_STATUS_BAD_INDEX,
  EP_MLX5_CMD_STATUS_BAD_INPUT_LENGTH,
  EP_MLX5_CMD_STATUS_BAD_OP,
  EP_MLX5_CMD_STATUS_BAD_OUTPUT_LENGTH,
  EP_MLX5_CMD_STATUS_BAD_PARAM,
  EP_MLX5_CMD_STATUS_BAD_QP_STATE,
  EP_MLX5_CMD_STATUS_BAD_RESOURCE,
  EP_MLX5_CMD_STATUS_BAD_RESOURCE_STATE,
  EP_MLX5_CMD_STATUS_BAD_SIZE,
  EP_MLX5_CMD_STATUS_BAD_SYS_STATE,
  EP_MLX5_CMD_STATUS_EXCEEDS_LIMIT,
  EP_MLX5_CMD_STATUS_INTERNAL,
  EP_MLX5_CMD_STATUS_NO_RESOURCES,
  EP_MLX5_CMD_STATUS_OK,
  EP_MLX5_CMD_STATUS_RESOURCE_BUSY,
  EP_MLX5_CQE_INVALID,
  EP_MLX5_CQE_REQ,
  EP_MLX5_CQE_REQ_ERR,
  EP_MLX5_CQE_RESP_ERR,
  EP_MLX5_CQE_RESP_SEND,
  EP_MLX5_CQE_RESP_SEND_IMM,
  EP_MLX5_CQE_RESP_SEND_INV,
  EP_MLX5_CQE_RESP_WR_IMM,
  EP_MLX5_OPCODE_ATOMIC_CS,
  EP_MLX5_OPCODE_ATOMIC_FA,
  EP_MLX5_OPCODE_ATOMIC_MASKED_CS,
  EP_MLX5_OPCODE_ATOMIC_MASKED_FA,
  EP_MLX5_OPCODE_DUMP,
  EP_MLX5_OPCODE_NOP,
  EP_MLX5_OPCODE_RDMA_READ,
  EP_MLX5_OPCODE_RDMA_WRITE,
  EP_MLX5_OPCODE_RDMA_WRITE_IMM,
  EP_MLX5_OPCODE_SEND,
  EP_MLX5_SYNDROME_BAD_RESPONSE,
  EP_MLX5_SYNDROME_FLUSHED,
  EP_MLX5_SYNDROME_LOCAL_ACCESS,
  EP_MLX5_SYNDROME_LOCAL_LENGTH,
  EP_MLX5_SYNDROME_LOCAL_PROTECTION,
  EP_MLX5_SYNDROME_LOCAL_QP_OPERATION,
  EP_MLX5_SYNDROME_MEMORY_WINDOW_BIND,
  EP_MLX5_SYNDROME_REMOTE_ABORTED,
  EP_MLX5_SYNDROME_REMOTE_ACCESS,
  EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST,
  EP_MLX5_SYNDROME_REMOTE_OPERATION,
  EP_MLX5_SYNDROME_RETRY_EXCEEDED,
  EP_MLX5_SYNDROME_RNR_RETRY_EXCEEDED,
} from '@ep/native/abi';

const opcodes = new Map([
  [EP_MLX5_OPCODE_NOP, 'NOP'],
  [EP_MLX5_OPCODE_RDMA_WRITE, 'RDMA_WRITE'],
  [EP_MLX5_OPCODE_RDMA_WRITE_IMM, 'RDMA_WRITE_IMM'],
  [EP_MLX5_OPCODE_SEND, 'SEND'],
  [EP_MLX5_OPCODE_RDMA_READ, 'RDMA_READ'],
  [EP_MLX5_OPCODE_ATOMIC_CS, 'ATOMIC_CS'],
  [EP_MLX5_OPCODE_ATOMIC_FA, 'ATOMIC_FA'],
  [EP_MLX5_OPCODE_ATOMIC_MASKED_CS, 'ATOMIC_MASKED_CS'],
  [EP_MLX5_OPCODE_ATOMIC_MASKED_FA, 'ATOMIC_MASKED_FA'],
  [EP_MLX5_OPCODE_DUMP, 'DUMP'],
]);

const cqeOpcodes = new Map([
  [EP_MLX5_CQE_REQ, 'REQ'],
  [EP_MLX5_CQE_RESP_WR_IMM, 'RESP_WR_IMM'],
  [EP_MLX5_CQE_RESP_SEND, 'RESP_SEND'],
  [EP_MLX5_CQE_RESP_SEND_IMM, 'RESP_SEND_IMM'],
  [EP_MLX5_CQE_RESP_SEND_INV, 'RESP_SEND_INV'],
  [EP_MLX5_CQE_REQ_ERR, 'REQ_ERR'],
  [EP_MLX5_CQE_RESP_ERR, 'RESP_ERR'],
  [EP_MLX5_CQE_INVALID, 'INVALID'],
]);

const syndromes = new Map([
  [EP_MLX5_SYNDROME_LOCAL_LENGTH, 'local length'],
  [EP_MLX5_SYNDROME_LOCAL_QP_OPERATION, 'local queue pair operation'],
  [EP_MLX5_SYNDROME_LOCAL_PROTECTION, 'local protection'],
  [EP_MLX5_SYNDROME_FLUSHED, 'flushed: an earlier request of the queue pair failed'],
  [EP_MLX5_SYNDROME_MEMORY_WINDOW_BIND, 'memory window bind'],
  [EP_MLX5_SYNDROME_BAD_RESPONSE, 'bad response'],
  [EP_MLX5_SYNDROME_LOCAL_ACCESS, 'local access'],
  [EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST, 'remote invalid request'],
  [EP_MLX5_SYNDROME_REMOTE_ACCESS, 'remote access: key, range or permission'],
  [EP_MLX5_SYNDROME_REMOTE_OPERATION, 'remote operation'],
  [EP_MLX5_SYNDROME_RETRY_EXCEEDED, 'transport retries exceeded: the peer does not answer'],
  [EP_MLX5_SYNDROME_RNR_RETRY_EXCEEDED, 'receiver-not-ready retries exceeded'],
  [EP_MLX5_SYNDROME_REMOTE_ABORTED, 'remote aborted'],
]);

const statuses = new Map([
  [EP_MLX5_CMD_STATUS_OK, 'OK'],
  [EP_MLX5_CMD_STATUS_INTERNAL, 'INTERNAL'],
  [EP_MLX5_CMD_STATUS_BAD_OP, 'BAD_OP'],
  [EP_MLX5_CMD_STATUS_BAD_PARAM, 'BAD_PARAM'],
  [EP_MLX5_CMD_STATUS_BAD_SYS_STATE, 'BAD_SYS_STATE'],
  [EP_MLX5_CMD_STATUS_BAD_RESOURCE, 'BAD_RESOURCE'],
  [EP_MLX5_CMD_STATUS_RESOURCE_BUSY, 'RESOURCE_BUSY'],
  [EP_MLX5_CMD_STATUS_EXCEEDS_LIMIT, 'EXCEEDS_LIMIT'],
  [EP_MLX5_CMD_STATUS_BAD_RESOURCE_STATE, 'BAD_RESOURCE_STATE'],
  [EP_MLX5_CMD_STATUS_BAD_INDEX, 'BAD_INDEX'],
  [EP_MLX5_CMD_STATUS_NO_RESOURCES, 'NO_RESOURCES'],
  [EP_MLX5_CMD_STATUS_BAD_QP_STATE, 'BAD_QP_STATE'],
  [EP_MLX5_CMD_STATUS_BAD_SIZE, 'BAD_SIZE'],
  [EP_MLX5_CMD_STATUS_BAD_INPUT_LENGTH, 'BAD_INPUT_LENGTH'],
  [EP_MLX5_CMD_STATUS_BAD_OUTPUT_LENGTH, 'BAD_OUTPUT_LENGTH'],
]);

export const hex = (value: number | bigint, digits = 1): string => `0x${value.toString(16).padStart(digits, '0')}`;

const named = (names: ReadonlyMap<number, string>, what: string) => (value: number) =>
  names.get(value) ?? `${what} ${hex(value)}`;

export const opcodeName = named(opcodes, 'opcode');
export const cqeOpcodeName = named(cqeOpcodes, 'completion');
export const syndromeName = named(syndromes, 'syndrome');
export const commandStatusName = named(statuses, 'status');

/** What makes bytes no valid instance of their format. */
export interface Violation {
  /** Byte of the format, of the dword or the field. */
  readonly offset: number;
  readonly field: string;
  readonly expected: string;
  readonly found: string;
}

export const violationText = ({ offset, field, expected, found }: Violation): string =>
  `byte ${hex(offset)}: ${field}: expected ${expected}, found ${found}`;
