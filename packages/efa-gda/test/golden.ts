/**
 * Bytes that did not come from this code: compiled from the definitions in rdma-core's EFA provider. native/tests/abi/efa_check.c writes the same ones
 * with our C structs.
 */
import type { Cqe, Wqe, WqeBytes } from '../src/index.js';

export const hexBytes = (text: string): Uint8Array => Uint8Array.from(Buffer.from(text.replace(/\s+/g, ''), 'hex'));

export const hexText = (bytes: Uint8Array): string => Buffer.from(bytes).toString('hex');

interface GoldenWqe {
  readonly name: string;
  readonly byteLength: WqeBytes;
  readonly wqe: Extract<Wqe, { readonly op: 'write' }>;
  readonly bytes: Uint8Array;
}

export const fromMemory: GoldenWqe = {
  name: 'a write from memory',
  byteLength: 64,
  wqe: {
    requestId: 0x0102n,
    phase: 0,
    qpn: 0x0304,
    ah: 0x0506,
    qkey: 0x0708090a,
    completion: true,
    op: 'write',
    remote: { address: 0x7f9955667788n, rkey: 0x11223344 },
    payload: { segments: [{ address: 0x7e12ddeeff00n, lkey: 0xaabbcc, byteLength: 0x1000 }] },
  },
  bytes: hexBytes(`
    02 01 82 1c 04 03 01 00 00 00 00 00 06 05 00 00
    0a 09 08 07 00 00 00 00 00 00 00 00 00 00 00 00
    00 10 00 00 44 33 22 11 88 77 66 55 99 7f 00 00
    00 10 00 00 cc bb aa 00 00 ff ee dd 12 7e 00 00`),
};

export const inlineWrite: GoldenWqe = {
  name: 'an inline write',
  byteLength: 128,
  wqe: {
    requestId: 7n,
    phase: 1,
    qpn: 0x22,
    ah: 3,
    qkey: 0x12345678,
    completion: true,
    op: 'write',
    remote: { address: 0x1000n, rkey: 0x99 },
    payload: { inline: hexBytes('00004444') },
  },
  bytes: hexBytes(
    `07 00 a2 1d 22 00 04 00 00 00 00 00 03 00 00 00
     78 56 34 12 00 00 00 00 00 00 00 00 00 00 00 00
     04 00 00 00 99 00 00 00 00 10 00 00 00 00 00 00
     00 00 44 44 00 00 00 00 00 00 00 00 00 00 00 00 ${'00'.repeat(64)}`,
  ),
};

export const goldenWqes = [fromMemory, inlineWrite];

export const goldenCqe: { readonly cqe: Cqe; readonly bytes: Uint8Array } = {
  cqe: { kind: 'sent', requestId: 0x0102n, status: 0, phase: 1, qpn: 0x0304, opcode: 2 },
  bytes: hexBytes('02 01 00 23 04 03 00 00 00 00 00 00 00 00 00 00'),
};
