/** Bytes to work requests, with everything that is wrong with them. */
import { invalid } from '@ep/core';
import {
  EP_EFA_LKEY_MASK,
  EP_EFA_META_BYTES,
  EP_EFA_OPCODE_RDMA_READ,
  EP_EFA_OPCODE_RDMA_WRITE,
  EP_EFA_OPCODE_SEND,
  EP_EFA_WIDE_WQE_BYTES,
  EP_EFA_WQE_BYTES,
  efaMetaBits,
  efaRdmaWqeLayout,
  efaSgeLayout,
  readEfaRemoteSeg,
  readEfaSge,
} from '@ep/native/abi';
import { type BitValues, hex, readBits, strayBits, type Violation } from '@ep/native/wire';
import { maxInline, maxSegments, payloadAt, segmentBytes } from './encode.js';
import type { DataSegment, DecodedWqe, Payload, WqeBody, WqeBytes, WqeHead } from './wqe.js';

type Meta = BitValues<typeof efaMetaBits>;

const knownOpcodes: readonly number[] = [EP_EFA_OPCODE_SEND, EP_EFA_OPCODE_RDMA_READ, EP_EFA_OPCODE_RDMA_WRITE];

const remoteAt = efaRdmaWqeLayout.offset.remote;

/** Reads one entry, noting what is wrong. */
class Reader {
  readonly violations: Violation[] = [];

  constructor(readonly view: DataView) {}

  expect(holds: boolean, offset: number, field: string, expected: string, found: string): void {
    if (!holds) this.violations.push({ offset, field, expected, found });
  }

  /** One violation for each dword that has a bit set. */
  unused(from: number): void {
    const { view } = this;
    const lead = Math.ceil(from / 4) * 4;
    for (let at = from; at < lead; at++) {
      const byte = view.getUint8(at);
      this.expect(byte === 0, at, 'bytes behind the payload', '0', hex(byte));
    }
    for (let at = lead; at < view.byteLength; at += 4) {
      const word = view.getUint32(at, true);
      this.expect(word === 0, at, 'bytes behind the payload', '0', hex(word, 8));
    }
  }

  segments({ opcode, length }: Meta): DataSegment[] | undefined {
    const most = maxSegments(opcode);
    this.expect(length <= most, 6, 'meta.length', `at most ${most} data segments`, `${length}`);
    if (length > most) return undefined;
    const segments = Array.from({ length }, (_, i) => {
      const at = payloadAt(opcode) + i * efaSgeLayout.byteLength;
      const { length: byteLength, lkey, addr } = readEfaSge(this.view, at);
      this.expect(lkey <= EP_EFA_LKEY_MASK, at + efaSgeLayout.offset.lkey, 'data.lkey', '24 bits', hex(lkey));
      return { address: addr, lkey: lkey & EP_EFA_LKEY_MASK, byteLength };
    });
    this.unused(payloadAt(opcode) + length * efaSgeLayout.byteLength);
    return segments;
  }

  payload(meta: Meta): Payload | undefined {
    const { view } = this;
    if (meta.inlined === 0) {
      const segments = this.segments(meta);
      return segments && { segments };
    }
    const most = maxInline(meta.opcode, view.byteLength as WqeBytes);
    if (most === 0) {
      const room = `0: inline bytes of a write need entries of ${EP_EFA_WIDE_WQE_BYTES} bytes, not of ${view.byteLength}`;
      this.expect(false, 2, 'meta.inline', room, '1');
      return undefined;
    }
    this.expect(meta.length <= most, 6, 'meta.length', `at most ${most} inline bytes`, `${meta.length}`);
    if (meta.length > most) return undefined;
    const at = payloadAt(meta.opcode);
    this.unused(at + meta.length);
    return { inline: new Uint8Array(view.buffer, view.byteOffset + at, meta.length).slice() };
  }

  body(meta: Meta): WqeBody | undefined {
    const imm = meta.hasImm === 0 ? {} : { imm: meta.imm };
    if (meta.opcode === EP_EFA_OPCODE_SEND) {
      const payload = this.payload(meta);
      return payload && { op: 'send', payload, ...imm };
    }
    const { length, rkey, addr } = readEfaRemoteSeg(this.view, remoteAt);
    const remote = { address: addr, rkey };
    if (meta.opcode === EP_EFA_OPCODE_RDMA_READ) {
      this.expect(meta.inlined === 0, 2, 'meta.inline', '0 for a read', '1');
      this.expect(meta.hasImm === 0, 2, 'meta.has_imm', '0 for a read', '1');
      const into = this.segments(meta);
      if (into !== undefined) this.remoteLength(length, segmentBytes(into));
      return into && { op: 'read', remote, into };
    }
    const payload = this.payload(meta);
    if (payload === undefined) return undefined;
    this.remoteLength(length, 'inline' in payload ? payload.inline.byteLength : segmentBytes(payload.segments));
    return { op: 'write', remote, payload, ...imm };
  }

  remoteLength(length: number, travel: number): void {
    this.expect(length === travel, remoteAt, 'remote.length', `${travel}: as many as travel`, `${length}`);
  }
}

/** Constant and reserved bits of the head. */
function checkMeta(reader: Reader, meta: Meta): void {
  const head = new DataView(reader.view.buffer, reader.view.byteOffset, EP_EFA_META_BYTES);
  for (const { offset, bits } of strayBits(head, [[efaMetaBits, 0]])) {
    reader.expect(false, offset, 'meta reserved bits', '0', hex(bits, 8));
  }
  reader.expect(
    knownOpcodes.includes(meta.opcode),
    2,
    'meta.opcode',
    'SEND, RDMA_READ or RDMA_WRITE',
    hex(meta.opcode),
  );
  reader.expect(meta.metaDesc === 1, 2, 'meta.meta_desc', '1', '0');
  reader.expect(meta.first === 1, 3, 'meta.first', '1', '0');
  reader.expect(meta.last === 1, 3, 'meta.last', '1', '0');
  reader.expect(meta.hasImm === 1 || meta.imm === 0, 8, 'meta.imm', '0 without immediate data', hex(meta.imm, 8));
}

/**
 * One entry of a send queue: 64 or 128 bytes, which its queue pair says and the bytes do not. Bytes that break the format are told in `violations`, also
 * such as hardware may not look at. Throws `EP_INVALID_ARGUMENT` for another number of bytes.
 */
export function decodeWqe(bytes: Uint8Array): DecodedWqe {
  const { byteLength } = bytes;
  if (byteLength !== EP_EFA_WQE_BYTES && byteLength !== EP_EFA_WIDE_WQE_BYTES) {
    throw invalid('bytes', { where: 'decodeWqe', expected: '64 or 128 of them', found: byteLength });
  }
  const reader = new Reader(new DataView(bytes.buffer, bytes.byteOffset, byteLength));
  const meta = readBits(efaMetaBits, reader.view);
  checkMeta(reader, meta);
  const body = knownOpcodes.includes(meta.opcode) ? reader.body(meta) : undefined;
  const head: WqeHead = {
    requestId: (BigInt(meta.reqIdEx) << 16n) | BigInt(meta.reqId),
    phase: meta.phase === 0 ? 0 : 1,
    qpn: meta.qpn,
    ah: meta.ah,
    qkey: meta.qkey,
    completion: meta.compReq === 1,
    ...(meta.hints === 0 ? {} : { hints: meta.hints }),
  };
  return { wqe: body && { ...head, ...body }, opcode: meta.opcode, byteLength, violations: reader.violations };
}
