/** Buffers of a receive queue as values. */
import { invalid } from '@ep/core';
import { EP_EFA_RECEIVE_BYTES, efaReceiveBits } from '@ep/native/abi';
import { hex, readBits, strayBits, type Violation, writeBits } from '@ep/native/wire';

export interface Receive {
  readonly address: bigint;
  /** 24 bits. */
  readonly lkey: number;
  /** At most 65 535. */
  readonly byteLength: number;
  /** 16 bits; comes back in the completion. */
  readonly requestId: number;
  /** A buffer in several parts has as many entries: the first and the last of them are marked. */
  readonly first: boolean;
  readonly last: boolean;
}

export interface DecodedReceive {
  readonly receive: Receive;
  readonly violations: readonly Violation[];
}

/** Throws `EP_INVALID_ARGUMENT` for another number of bytes than 16. */
export function decodeReceive(bytes: Uint8Array): DecodedReceive {
  if (bytes.byteLength !== EP_EFA_RECEIVE_BYTES) {
    const expected = `${EP_EFA_RECEIVE_BYTES} of them`;
    throw invalid('bytes', { where: 'decodeReceive', expected, found: bytes.byteLength });
  }
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const { addr, lkey, length, reqId, first, last } = readBits(efaReceiveBits, view);
  const violations = strayBits(view, [[efaReceiveBits, 0]]).map(({ offset, bits }) => ({
    offset,
    field: 'reserved bits',
    expected: '0',
    found: hex(bits, 8),
  }));
  const marks = { first: first === 1, last: last === 1 };
  return { receive: { address: addr, lkey, byteLength: length, requestId: reqId, ...marks }, violations };
}

/** 16 bytes. Throws `EP_INVALID_ARGUMENT` for values that their fields cannot hold. */
export function encodeReceive(receive: Receive): Uint8Array<ArrayBuffer> {
  const bytes = new Uint8Array(EP_EFA_RECEIVE_BYTES);
  writeBits(efaReceiveBits, new DataView(bytes.buffer), 0, {
    addr: receive.address,
    lkey: receive.lkey,
    length: receive.byteLength,
    reqId: receive.requestId,
    first: receive.first ? 1 : 0,
    last: receive.last ? 1 : 0,
  });
  return bytes;
}
