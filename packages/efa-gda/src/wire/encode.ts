/** Work requests to bytes. */
import { checkInteger, invalid } from '@ep/core';
import {
  EP_EFA_LKEY_MASK,
  EP_EFA_MAX_INLINE_SEND,
  EP_EFA_MAX_INLINE_WRITE,
  EP_EFA_MAX_RDMA_SEGMENTS,
  EP_EFA_MAX_SEND_SEGMENTS,
  EP_EFA_MAX_WIDE_INLINE_SEND,
  EP_EFA_OPCODE_RDMA_READ,
  EP_EFA_OPCODE_RDMA_WRITE,
  EP_EFA_OPCODE_SEND,
  EP_EFA_WIDE_WQE_BYTES,
  efaMetaBits,
  efaRdmaWqeLayout,
  efaSendWqeLayout,
  efaSgeLayout,
  writeEfaRemoteSeg,
  writeEfaSge,
} from '@ep/native/abi';
import { writeBits } from '@ep/native/wire';
import type { DataSegment, Payload, RemoteAddress, Wqe, WqeBytes } from './wqe.js';

const where = 'encodeWqe';
const U32 = 0xffff_ffff;

const opcodeOf: Readonly<Record<Wqe['op'], number>> = {
  send: EP_EFA_OPCODE_SEND,
  read: EP_EFA_OPCODE_RDMA_READ,
  write: EP_EFA_OPCODE_RDMA_WRITE,
};

/** Bytes that fit into a request itself. An entry of 64 bytes has no room for those of a write. */
export function maxInline(opcode: number, entryBytes: WqeBytes): number {
  const wide = entryBytes === EP_EFA_WIDE_WQE_BYTES;
  if (opcode === EP_EFA_OPCODE_SEND) return wide ? EP_EFA_MAX_WIDE_INLINE_SEND : EP_EFA_MAX_INLINE_SEND;
  return opcode === EP_EFA_OPCODE_RDMA_WRITE && wide ? EP_EFA_MAX_INLINE_WRITE : 0;
}

export const maxSegments = (opcode: number): number =>
  opcode === EP_EFA_OPCODE_SEND ? EP_EFA_MAX_SEND_SEGMENTS : EP_EFA_MAX_RDMA_SEGMENTS;

/** Where the data segments, or the inline bytes, begin. */
export const payloadAt = (opcode: number): number =>
  opcode === EP_EFA_OPCODE_SEND ? efaSendWqeLayout.offset.segments : efaRdmaWqeLayout.offset.local;

export function unsigned64(value: bigint, what: string, caller: string): bigint {
  if (typeof value === 'bigint' && BigInt.asUintN(64, value) === value) return value;
  throw invalid(what, { where: caller, expected: 'an unsigned bigint of 8 bytes', found: value });
}

export const segmentBytes = (segments: readonly DataSegment[]): number =>
  segments.reduce((sum, { byteLength }) => sum + byteLength, 0);

const payloadOf = (wqe: Wqe): Payload => (wqe.op === 'read' ? { segments: wqe.into } : wqe.payload);

function writeSegments(view: DataView, opcode: number, segments: readonly DataSegment[]): void {
  checkInteger(segments.length, 'number of data segments', where, 0, maxSegments(opcode));
  segments.forEach(({ address, lkey, byteLength }, i) => {
    writeEfaSge(view, payloadAt(opcode) + i * efaSgeLayout.byteLength, {
      length: checkInteger(byteLength, 'byteLength', where, 0, U32),
      lkey: checkInteger(lkey, 'lkey', where, 0, EP_EFA_LKEY_MASK),
      addr: unsigned64(address, 'address', where),
    });
  });
}

function writeInline(bytes: Uint8Array, opcode: number, inline: Uint8Array, entryBytes: WqeBytes): void {
  const most = maxInline(opcode, entryBytes);
  if (inline.byteLength > most || most === 0) {
    const expected = most === 0 ? `none: an entry of ${entryBytes} bytes has no room for them` : `at most ${most}`;
    throw invalid('number of inline bytes', { where, expected, found: inline.byteLength });
  }
  bytes.set(inline, payloadAt(opcode));
}

function writeRemote(view: DataView, { address, rkey }: RemoteAddress, length: number): void {
  writeEfaRemoteSeg(view, efaRdmaWqeLayout.offset.remote, {
    length,
    rkey: checkInteger(rkey, 'rkey', where, 0, U32),
    addr: unsigned64(address, 'remote address', where),
  });
}

/** One entry of a send queue, 64 bytes unless told otherwise. Throws `EP_INVALID_ARGUMENT` for what the format cannot say. */
export function encodeWqe(wqe: Wqe, entryBytes: WqeBytes = 64): Uint8Array<ArrayBuffer> {
  if (entryBytes !== 64 && entryBytes !== 128) {
    throw invalid('entryBytes', { where, expected: '64 or 128', found: entryBytes });
  }
  const opcode = opcodeOf[wqe.op];
  const payload = payloadOf(wqe);
  const bytes = new Uint8Array(entryBytes);
  const view = new DataView(bytes.buffer);
  const inlined = 'inline' in payload;
  if (inlined) writeInline(bytes, opcode, payload.inline, entryBytes);
  else writeSegments(view, opcode, payload.segments);
  if (wqe.op !== 'send')
    writeRemote(view, wqe.remote, inlined ? payload.inline.byteLength : segmentBytes(payload.segments));
  const imm = wqe.op === 'read' ? undefined : wqe.imm;
  const id = unsigned64(wqe.requestId, 'requestId', where);
  writeBits(efaMetaBits, view, 0, {
    reqId: Number(id & 0xffffn),
    reqIdEx: Number(id >> 16n),
    opcode,
    hasImm: imm === undefined ? 0 : 1,
    inlined: inlined ? 1 : 0,
    metaDesc: 1,
    phase: wqe.phase,
    first: 1,
    last: 1,
    compReq: wqe.completion ? 1 : 0,
    qpn: wqe.qpn,
    length: inlined ? payload.inline.byteLength : payload.segments.length,
    imm: imm ?? 0,
    ah: wqe.ah,
    hints: wqe.hints ?? 0,
    qkey: wqe.qkey,
  });
  return bytes;
}
