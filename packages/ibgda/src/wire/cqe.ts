/** Completions as values. */
import { EpError, invalid } from '@ep/core';
import {
  EP_MLX5_CQE_INVALID,
  EP_MLX5_CQE_REQ,
  EP_MLX5_CQE_REQ_ERR,
  EP_MLX5_CQE_RESP_ERR,
  EP_MLX5_CQE_RESP_WR_IMM,
  EP_MLX5_CQE_SIZE,
  mlx5CqeTailBits,
  readMlx5Cqe,
  readMlx5ErrCqe,
  writeMlx5Cqe,
  writeMlx5ErrCqe,
} from '@ep/native/abi';
import { readBits, writeBits } from '@ep/native/wire';
import { cqeOpcodeName } from './names.js';

interface CqeHead {
  readonly qpn: number;
  /** Index of the request's first block. */
  readonly wqeCounter: number;
  /** Opcode of the request; as completed at a responder, 0. */
  readonly wqeOpcode: number;
  readonly userIndex: number;
  readonly owner: 0 | 1;
  readonly solicited?: boolean;
  readonly signature?: number;
}

export type Cqe =
  /** An entry that nobody has written yet. */
  | { readonly kind: 'empty' }
  | (CqeHead & { readonly kind: 'done'; readonly byteCount: number; readonly timestamp: bigint })
  | (CqeHead & {
      /** A write with immediate data has arrived. */
      readonly kind: 'write-imm';
      readonly byteCount: number;
      readonly timestamp: bigint;
      readonly imm: number;
    })
  | (CqeHead & {
      readonly kind: 'error';
      /** Of a request of this side, or of one that was to be received. */
      readonly side: 'requester' | 'responder';
      readonly syndrome: number;
      readonly vendorSyndrome: number;
    });

/** Throws `EP_INVALID_ARGUMENT` for bytes that are no completion of a queue pair. */
export function decodeCqe(bytes: Uint8Array): Cqe {
  if (bytes.byteLength !== EP_MLX5_CQE_SIZE) {
    throw new EpError('EP_INVALID_ARGUMENT', `a completion has ${EP_MLX5_CQE_SIZE} bytes, found ${bytes.byteLength}`);
  }
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const tail = readBits(mlx5CqeTailBits, view);
  if (tail.opcode === EP_MLX5_CQE_INVALID) return { kind: 'empty' };
  const { srqnUidx, immInvalPkey, byteCnt, timestamp } = readMlx5Cqe(view);
  const head: CqeHead = {
    qpn: tail.qpn,
    wqeCounter: tail.wqeCounter,
    wqeOpcode: tail.wqeOpcode,
    userIndex: srqnUidx,
    owner: tail.owner === 0 ? 0 : 1,
    ...(tail.solicited === 0 ? {} : { solicited: true }),
    ...(tail.signature === 0 ? {} : { signature: tail.signature }),
  };
  if (tail.format !== 0)
    throw invalid('format', { where: 'decodeCqe', expected: '0: neither inline nor compressed', found: tail.format });
  switch (tail.opcode) {
    case EP_MLX5_CQE_REQ:
      return { kind: 'done', ...head, byteCount: byteCnt, timestamp };
    case EP_MLX5_CQE_RESP_WR_IMM:
      return { kind: 'write-imm', ...head, byteCount: byteCnt, timestamp, imm: immInvalPkey };
    case EP_MLX5_CQE_REQ_ERR:
    case EP_MLX5_CQE_RESP_ERR: {
      const { syndrome, vendorSyndrome } = readMlx5ErrCqe(view);
      const side = tail.opcode === EP_MLX5_CQE_REQ_ERR ? 'requester' : 'responder';
      return { kind: 'error', side, ...head, syndrome, vendorSyndrome };
    }
    default: {
      const found = cqeOpcodeName(tail.opcode);
      throw invalid('opcode', {
        where: 'decodeCqe',
        expected: 'REQ, RESP_WR_IMM, REQ_ERR, RESP_ERR or INVALID',
        found,
      });
    }
  }
}

/** 64 bytes. Throws `EP_INVALID_ARGUMENT` for values that their fields cannot hold. */
export function encodeCqe(cqe: Cqe): Uint8Array<ArrayBuffer> {
  const bytes = new Uint8Array(EP_MLX5_CQE_SIZE);
  if (cqe.kind === 'empty') return bytes.fill(0xff);
  const view = new DataView(bytes.buffer);
  const common = { sopDropQpn: 0, wqeCounter: 0, signature: 0, opOwn: 0, srqnUidx: cqe.userIndex };
  if (cqe.kind === 'error') {
    writeMlx5ErrCqe(view, 0, { ...common, vendorSyndrome: cqe.vendorSyndrome, syndrome: cqe.syndrome });
  } else {
    const imm = cqe.kind === 'write-imm' ? cqe.imm : 0;
    const { byteCount, timestamp } = cqe;
    writeMlx5Cqe(view, 0, { ...common, wqeId: 0, immInvalPkey: imm, byteCnt: byteCount, timestamp });
  }
  const errorOpcode = cqe.kind === 'error' && cqe.side === 'responder' ? EP_MLX5_CQE_RESP_ERR : EP_MLX5_CQE_REQ_ERR;
  const doneOpcode = cqe.kind === 'write-imm' ? EP_MLX5_CQE_RESP_WR_IMM : EP_MLX5_CQE_REQ;
  writeBits(mlx5CqeTailBits, view, 0, {
    wqeOpcode: cqe.wqeOpcode,
    qpn: cqe.qpn,
    wqeCounter: cqe.wqeCounter,
    signature: cqe.signature ?? 0,
    opcode: cqe.kind === 'error' ? errorOpcode : doneOpcode,
    solicited: cqe.solicited === true ? 1 : 0,
    owner: cqe.owner,
  });
  return bytes;
}
