/** Completions as values. */
import { checkInteger, invalid } from '@ep/core';
import {
  EP_EFA_OPCODE_RDMA_WRITE,
  EP_EFA_QUEUE_RECEIVE,
  EP_EFA_QUEUE_SEND,
  EP_EFA_UNKNOWN_AH,
  efaCqeBits,
  efaRxCqeLayout,
  efaTxCqeLayout,
  efaWideRxCqeLayout,
} from '@ep/native/abi';
import { readBits, writeBits } from '@ep/native/wire';
import { unsigned64 } from './encode.js';

/** Size of every entry of a completion queue. Those of 8 bytes are an older device's, and of sends only. */
export type CqeBytes = 8 | 16 | 32;

interface CqeHead {
  /** 16 bits of a receive, or in an entry of 8 bytes; else 64. */
  readonly requestId: bigint;
  /** 0 if it went well. */
  readonly status: number;
  readonly phase: 0 | 1;
  /** Queue pair of this side. */
  readonly qpn: number;
  readonly opcode: number;
  readonly unsolicited?: boolean;
}

export type Cqe =
  /** An entry that nobody has written yet: queues begin as zeros. */
  | { readonly kind: 'empty' }
  /** Of a send, a read or a write of this side. */
  | (CqeHead & { readonly kind: 'sent' })
  /** Something has arrived: a send, or a write with immediate data. */
  | (CqeHead & {
      readonly kind: 'received';
      readonly byteCount: number;
      readonly sourceQpn: number;
      /** Of this side's address vector; not given where the sender is not in it. */
      readonly ah?: number;
      readonly imm?: number;
      /** 16 bytes; only in entries of 32. */
      readonly sourceAddress?: Uint8Array;
    });

type Received = Extract<Cqe, { readonly kind: 'received' }>;

const { reqIdEx } = efaTxCqeLayout.offset;
const receivedAt = efaRxCqeLayout.offset;
const tailAt = efaWideRxCqeLayout.offset.tail;

function isEntrySize(bytes: number): bytes is CqeBytes {
  return bytes === 8 || bytes === 16 || bytes === 32;
}

function decodeReceived(view: DataView, head: CqeHead, hasImm: boolean): Received {
  const ah = view.getUint16(receivedAt.ah, true);
  const wide = view.byteLength === 32;
  const isWrite = head.opcode === EP_EFA_OPCODE_RDMA_WRITE;
  const low = view.getUint16(receivedAt.length, true);
  const address = new Uint8Array(view.buffer, view.byteOffset + tailAt, wide ? 16 : 0);
  return {
    kind: 'received',
    ...head,
    byteCount: wide && isWrite ? low + view.getUint16(tailAt, true) * 0x1_0000 : low,
    sourceQpn: view.getUint16(receivedAt.srcQpn, true),
    ...(ah === EP_EFA_UNKNOWN_AH ? {} : { ah }),
    ...(hasImm ? { imm: view.getUint32(receivedAt.imm, true) } : {}),
    ...(!isWrite && address.some((byte) => byte !== 0) ? { sourceAddress: address.slice() } : {}),
  };
}

/** One entry, as many bytes as its queue's entries have. Throws `EP_INVALID_ARGUMENT` for bytes that are no completion. */
export function decodeCqe(bytes: Uint8Array): Cqe {
  const where = 'decodeCqe';
  if (!isEntrySize(bytes.byteLength))
    throw invalid('bytes', { where, expected: '8, 16 or 32 of them', found: bytes.byteLength });
  if (bytes.every((byte) => byte === 0)) return { kind: 'empty' };
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const bits = readBits(efaCqeBits, view);
  const head: CqeHead = {
    requestId: BigInt(bits.reqId),
    status: bits.status,
    phase: bits.phase === 0 ? 0 : 1,
    qpn: bits.qpn,
    opcode: bits.opcode,
    ...(bits.unsolicited === 0 ? {} : { unsolicited: true }),
  };
  if (bits.queue === EP_EFA_QUEUE_RECEIVE && bytes.byteLength > 8) return decodeReceived(view, head, bits.hasImm === 1);
  if (bits.queue !== EP_EFA_QUEUE_SEND) {
    const expected = bytes.byteLength === 8 ? '1 (send) in an entry of 8 bytes' : '1 (send) or 2 (receive)';
    throw invalid('queue', { where, expected, found: bits.queue });
  }
  if (bits.hasImm !== 0) throw invalid('has_imm', { where, expected: '0 in the completion of a send', found: 1 });
  if (bytes.byteLength === 8) return { kind: 'sent', ...head };
  const high = [2, 1, 0].reduce((id, i) => (id << 16n) | BigInt(view.getUint16(reqIdEx + 2 * i, true)), 0n);
  return { kind: 'sent', ...head, requestId: (high << 16n) | head.requestId };
}

function writeReceived(view: DataView, cqe: Received): void {
  const where = 'encodeCqe';
  const wide = view.byteLength === 32;
  const isWrite = cqe.opcode === EP_EFA_OPCODE_RDMA_WRITE;
  const most = wide && isWrite ? 0xffff_ffff : 0xffff;
  const byteCount = checkInteger(cqe.byteCount, 'byteCount', where, 0, most);
  view.setUint16(receivedAt.length, byteCount % 0x1_0000, true);
  view.setUint16(receivedAt.ah, checkInteger(cqe.ah ?? EP_EFA_UNKNOWN_AH, 'ah', where, 0, EP_EFA_UNKNOWN_AH), true);
  view.setUint16(receivedAt.srcQpn, checkInteger(cqe.sourceQpn, 'sourceQpn', where, 0, 0xffff), true);
  view.setUint32(receivedAt.imm, checkInteger(cqe.imm ?? 0, 'imm', where, 0, 0xffff_ffff), true);
  if (wide && isWrite) view.setUint16(tailAt, Math.floor(byteCount / 0x1_0000), true);
  if (cqe.sourceAddress === undefined) return;
  if (!wide || isWrite || cqe.sourceAddress.byteLength !== 16) {
    const expected = '16 bytes, of a send, in an entry of 32';
    throw invalid('sourceAddress', { where, expected, found: `${cqe.sourceAddress.byteLength} bytes` });
  }
  new Uint8Array(view.buffer).set(cqe.sourceAddress, tailAt);
}

/** One entry, 16 bytes unless told otherwise. Throws `EP_INVALID_ARGUMENT` for what an entry of that size cannot say. */
export function encodeCqe(cqe: Cqe, entryBytes: CqeBytes = 16): Uint8Array<ArrayBuffer> {
  const where = 'encodeCqe';
  if (!isEntrySize(entryBytes)) throw invalid('entryBytes', { where, expected: '8, 16 or 32', found: entryBytes });
  const bytes = new Uint8Array(entryBytes);
  if (cqe.kind === 'empty') return bytes;
  const view = new DataView(bytes.buffer);
  const received = cqe.kind === 'received';
  if (received && entryBytes === 8) throw invalid('entryBytes', { where, expected: '16 or 32 of a receive', found: 8 });
  const id = unsigned64(cqe.requestId, 'requestId', where);
  if (id > 0xffffn && (received || entryBytes === 8))
    throw invalid('requestId', { where, expected: 'of 16 bits in this entry', found: id });
  if (received) writeReceived(view, cqe);
  else if (entryBytes > 8) {
    for (let i = 0; i < 3; i++) {
      view.setUint16(reqIdEx + 2 * i, Number((id >> BigInt(16 * (i + 1))) & 0xffffn), true);
    }
  }
  writeBits(efaCqeBits, view, 0, {
    reqId: Number(id & 0xffffn),
    status: cqe.status,
    phase: cqe.phase,
    queue: received ? EP_EFA_QUEUE_RECEIVE : EP_EFA_QUEUE_SEND,
    hasImm: received && cqe.imm !== undefined ? 1 : 0,
    opcode: cqe.opcode,
    unsolicited: cqe.unsolicited === true ? 1 : 0,
    qpn: cqe.qpn,
  });
  return bytes;
}
