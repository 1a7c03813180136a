/** Work requests to bytes. */
import { checkInteger, EpError, invalid } from '@ep/core';
import {
  EP_MLX5_CE_ALWAYS,
  EP_MLX5_CE_ON_ERROR,
  EP_MLX5_CE_ON_FIRST_ERROR,
  EP_MLX5_DS_BYTES,
  EP_MLX5_INLINE,
  EP_MLX5_OPCODE_ATOMIC_CS,
  EP_MLX5_OPCODE_ATOMIC_FA,
  EP_MLX5_OPCODE_ATOMIC_MASKED_CS,
  EP_MLX5_OPCODE_ATOMIC_MASKED_FA,
  EP_MLX5_OPCODE_NOP,
  EP_MLX5_OPCODE_RDMA_READ,
  EP_MLX5_OPCODE_RDMA_WRITE,
  EP_MLX5_OPCODE_RDMA_WRITE_IMM,
  EP_MLX5_OPCODE_SEND,
  EP_MLX5_OPMOD_ATOMIC_4,
  EP_MLX5_OPMOD_ATOMIC_8,
  mlx5CtrlBits,
  writeMlx5AtomicSeg,
  writeMlx5DataSeg,
  writeMlx5InlineSeg,
  writeMlx5MaskedCas4Seg,
  writeMlx5MaskedCas8Seg,
  writeMlx5MaskedFa4Seg,
  writeMlx5MaskedFa8Seg,
  writeMlx5RaddrSeg,
} from '@ep/native/abi';
import { writeBits } from '@ep/native/wire';
import type { CompletionMode, DataSegment, Payload, RemoteAddress, Wqe } from './wqe.js';

/** The control segment's size field has six bits. */
const MAX_SEGMENTS = 63;

const completionBits: Readonly<Record<CompletionMode, number>> = {
  'on-error': EP_MLX5_CE_ON_ERROR,
  'on-first-error': EP_MLX5_CE_ON_FIRST_ERROR,
  always: EP_MLX5_CE_ALWAYS,
};

const opcodeOf: Readonly<Record<Wqe['op'], number>> = {
  nop: EP_MLX5_OPCODE_NOP,
  send: EP_MLX5_OPCODE_SEND,
  write: EP_MLX5_OPCODE_RDMA_WRITE,
  'write-imm': EP_MLX5_OPCODE_RDMA_WRITE_IMM,
  read: EP_MLX5_OPCODE_RDMA_READ,
  'fetch-add': EP_MLX5_OPCODE_ATOMIC_FA,
  'compare-swap': EP_MLX5_OPCODE_ATOMIC_CS,
  'masked-fetch-add': EP_MLX5_OPCODE_ATOMIC_MASKED_FA,
  'masked-compare-swap': EP_MLX5_OPCODE_ATOMIC_MASKED_CS,
};

/** Some segments of 16 bytes. */
type Part = DataView<ArrayBuffer>;

function part(byteLength: number, write: (view: Part) => void): Part {
  const view = new DataView(new ArrayBuffer(Math.ceil(byteLength / EP_MLX5_DS_BYTES) * EP_MLX5_DS_BYTES));
  write(view);
  return view;
}

function word(value: bigint, width: 4 | 8, field: string): bigint {
  if (typeof value === 'bigint' && BigInt.asUintN(8 * width, value) === value) return value;
  throw invalid(field, { where: 'encodeWqe', expected: `an unsigned bigint of ${width} bytes`, found: value });
}

const key = (value: number, field: string): number => checkInteger(value, field, 'encodeWqe', 0, 0xffff_ffff);

const remotePart = ({ address, rkey }: RemoteAddress): Part =>
  part(16, (view) => writeMlx5RaddrSeg(view, 0, { raddr: word(address, 8, 'address'), rkey: key(rkey, 'rkey') }));

const dataPart = ({ address, lkey, byteLength }: DataSegment): Part =>
  part(16, (view) =>
    writeMlx5DataSeg(view, 0, {
      byteCount: checkInteger(byteLength, 'byteLength', 'encodeWqe', 1, 0x7fff_ffff),
      lkey: key(lkey, 'lkey'),
      addr: word(address, 8, 'address'),
    }),
  );

function payloadParts(payload: Payload): Part[] {
  if (!('inline' in payload)) return payload.segments.map(dataPart);
  const { inline } = payload;
  return [
    part(4 + inline.byteLength, (view) => {
      writeMlx5InlineSeg(view, 0, { byteCount: EP_MLX5_INLINE + inline.byteLength });
      new Uint8Array(view.buffer).set(inline, 4);
    }),
  ];
}

function resultPart(result: DataSegment, width: 4 | 8): Part {
  checkInteger(result.byteLength, 'result.byteLength', 'encodeWqe', width, width);
  return dataPart(result);
}

function atomicParts(wqe: Extract<Wqe, { readonly result: DataSegment }>): Part[] {
  const width = 'width' in wqe ? wqe.width : 8;
  if (wqe.remote.address % BigInt(width) !== 0n) {
    throw invalid('address', { where: wqe.op, expected: `a multiple of ${width}`, found: wqe.remote.address });
  }
  const operands = part(wqe.op === 'masked-compare-swap' && width === 8 ? 32 : 16, (view) => {
    if (wqe.op === 'fetch-add') {
      writeMlx5AtomicSeg(view, 0, { swapAdd: word(wqe.add, 8, 'add'), compare: 0n });
    } else if (wqe.op === 'compare-swap') {
      const { swap, compare } = wqe;
      writeMlx5AtomicSeg(view, 0, { swapAdd: word(swap, 8, 'swap'), compare: word(compare, 8, 'compare') });
    } else if (wqe.op === 'masked-fetch-add') {
      const [add, boundary] = [word(wqe.add, width, 'add'), word(wqe.boundary, width, 'boundary')];
      if (width === 8) writeMlx5MaskedFa8Seg(view, 0, { add, boundary });
      else writeMlx5MaskedFa4Seg(view, 0, { add: Number(add), boundary: Number(boundary) });
    } else {
      const swap = word(wqe.swap, width, 'swap');
      const compare = word(wqe.compare, width, 'compare');
      const swapMask = word(wqe.swapMask, width, 'swapMask');
      const compareMask = word(wqe.compareMask, width, 'compareMask');
      if (width === 8) {
        writeMlx5MaskedCas8Seg(view, 0, { swap, compare, swapMask, compareMask });
      } else {
        writeMlx5MaskedCas4Seg(view, 0, {
          swap: Number(swap),
          compare: Number(compare),
          swapMask: Number(swapMask),
          compareMask: Number(compareMask),
        });
      }
    }
  });
  return [remotePart(wqe.remote), operands, resultPart(wqe.result, width)];
}

function bodyParts(wqe: Wqe): Part[] {
  switch (wqe.op) {
    case 'nop':
      return [];
    case 'send':
      return payloadParts(wqe.payload);
    case 'write':
    case 'write-imm':
      return [remotePart(wqe.remote), ...payloadParts(wqe.payload)];
    case 'read':
      return [remotePart(wqe.remote), ...wqe.into.map(dataPart)];
    default:
      return atomicParts(wqe);
  }
}

/** The bytes of a work request, a multiple of 16. Throws `EP_INVALID_ARGUMENT` for what the format cannot say, `EP_CAPACITY` beyond 63 segments. */
export function encodeWqe(wqe: Wqe): Uint8Array<ArrayBuffer> {
  const masked = wqe.op === 'masked-fetch-add' || wqe.op === 'masked-compare-swap';
  if (masked && wqe.width !== 4 && wqe.width !== 8) {
    throw invalid('width', { where: 'encodeWqe', expected: '4 or 8', found: (wqe as { width: unknown }).width });
  }
  const body = bodyParts(wqe);
  const ds = 1 + body.reduce((sum, { byteLength }) => sum + byteLength, 0) / EP_MLX5_DS_BYTES;
  if (ds > MAX_SEGMENTS)
    throw new EpError('EP_CAPACITY', `a work request has at most ${MAX_SEGMENTS} segments of 16 bytes, found ${ds}`);
  const bytes = new Uint8Array(ds * EP_MLX5_DS_BYTES);
  writeBits(mlx5CtrlBits, new DataView(bytes.buffer), 0, {
    opmod: masked ? (wqe.width === 8 ? EP_MLX5_OPMOD_ATOMIC_8 : EP_MLX5_OPMOD_ATOMIC_4) : 0,
    index: wqe.index,
    opcode: opcodeOf[wqe.op],
    qpn: wqe.qpn,
    ds,
    signature: wqe.signature ?? 0,
    fence: wqe.fence ?? 0,
    ce: completionBits[wqe.completion],
    solicited: wqe.solicited === true ? 1 : 0,
    imm: wqe.op === 'write-imm' ? wqe.imm : 0,
  });
  let at = EP_MLX5_DS_BYTES;
  for (const view of body) {
    bytes.set(new Uint8Array(view.buffer), at);
    at += view.byteLength;
  }
  return bytes;
}
