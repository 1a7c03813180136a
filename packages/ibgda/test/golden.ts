/**
 * Bytes that did not come from this code: work requests were written with the structs of the system's mlx5dv.h, commands with offsets of the public
 * mlx5_ifc.h.
 */
import type { CommandName, CommandParts, Wqe } from '../src/index.js';

export const hexBytes = (text: string): Uint8Array => Uint8Array.from(Buffer.from(text.replace(/\s+/g, ''), 'hex'));

const head = { qpn: 0x1234, completion: 'always' } as const;
const result = (address: bigint, byteLength: number) => ({ address, lkey: 0x5678, byteLength });

export const goldenWqes: readonly { readonly name: string; readonly wqe: Wqe; readonly hex: string }[] = [
  {
    name: 'write',
    wqe: {
      ...head,
      index: 5,
      op: 'write',
      remote: { address: 0x7f0011223344n, rkey: 0xabcd },
      payload: { segments: [result(0x7f00aabb0010n, 7184)] },
    },
    hex: '00000508 00123403 00000008 00000000 00007f00 11223344 0000abcd 00000000 00001c10 00005678 00007f00 aabb0010',
  },
  {
    name: 'masked fetch-add of 4 bytes',
    wqe: {
      ...head,
      index: 6,
      op: 'masked-fetch-add',
      width: 4,
      remote: { address: 0x7f0011220004n, rkey: 0xabcd },
      add: 0xffff_fff8n,
      boundary: 0n,
      result: result(0x7f00aabb0004n, 4),
    },
    hex: `08000615 00123404 00000008 00000000 00007f00 11220004 0000abcd 00000000
          fffffff8 00000000 00000000 00000000 00000004 00005678 00007f00 aabb0004`,
  },
  {
    name: 'masked fetch-add of 8 bytes',
    wqe: {
      ...head,
      index: 7,
      op: 'masked-fetch-add',
      width: 8,
      remote: { address: 0x7f0011220008n, rkey: 0xabcd },
      add: 1n,
      boundary: 0n,
      result: result(0x7f00aabb0008n, 8),
    },
    hex: `09000715 00123404 00000008 00000000 00007f00 11220008 0000abcd 00000000
          00000000 00000001 00000000 00000000 00000008 00005678 00007f00 aabb0008`,
  },
  {
    // As native/tests/device/ibgda_post_test.cpp has it.
    name: 'masked compare-and-swap of 8 bytes',
    wqe: {
      ...head,
      index: 8,
      completion: 'on-error',
      op: 'masked-compare-swap',
      width: 8,
      remote: { address: 0x7f0011220008n, rkey: 0xabcd },
      swap: 4n,
      compare: 3n,
      swapMask: 0xffn,
      compareMask: 0xff00n,
      result: result(0x7f00aabb0008n, 8),
    },
    hex: `09000814 00123405 00000000 00000000 00007f00 11220008 0000abcd 00000000
          00000000 00000004 00000000 00000003 00000000 000000ff 00000000 0000ff00
          00000008 00005678 00007f00 aabb0008`,
  },
];

interface GoldenCommand<N extends CommandName = CommandName> {
  readonly name: N;
  readonly parts: CommandParts<N>;
  /** Without the zeros at the end, which fill up `byteLength`. */
  readonly hex: string;
  readonly byteLength: number;
}

const golden = <N extends CommandName>(command: GoldenCommand<N>): GoldenCommand<N> => command;

export const goldenCommands = [
  golden({
    name: 'create-cq',
    parts: {
      command: { uid: 0x21 },
      memory: { umemOffset: 0x4000n, umemId: 0x5566_7788, umemValid: 1 },
      context: {
        dbrUmemValid: 1,
        collapsed: 1,
        overrunIgnore: 1,
        dbrUmemId: 0x1122_3344,
        logCqSize: 14,
        uarPage: 0xabcde,
        eqn: 9,
        dbrAddr: 0x1_2345_6780n,
      },
    },
    byteLength: 272,
    hex: `04000021 00000000 00000000 00000000 02120000 11223344 00000000 0e0abcde
          00000000 00000009 00000000 00000000 00000000 00000000 00000000 00000000
          00000000 00000000 00000001 23456780 00000000 00004000 55667788 80000000`,
  }),
  golden({
    name: 'create-qp',
    parts: {
      memory: { wqUmemOffset: 0x2_0000_0000n, wqUmemId: 8, wqUmemValid: 1 },
      context: {
        pmState: 3,
        pd: 0x789abc,
        logSqSize: 14,
        uarPage: 0x1234,
        userIndex: 0xfffff,
        cqnSnd: 0x42,
        cqnRcv: 0x42,
        dbrAddr: 0x1_0000_0040n,
        rqType: 3,
        dbrUmemValid: 1,
        dbrUmemId: 7,
      },
    },
    byteLength: 272,
    hex: `05000000 00000000 00000000 00000000 00000000 00000000 00001800 00789abc
          00007000 00001234 000fffff 00000000 00000000 00000000 00000000 00000000
          00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
          00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
          00000000 00000000 00000000 00000000 00000000 00000042 00000000 00000000
          00000000 00000000 00000000 00000000 00000000 00000042 00000001 00000040
          00000000 03000000 00000000 00000000 00000000 00000000 00000000 00000000
          00000000 00000000 10000000 00000000 00000000 00000000 00000000 00000007
          00000002 00000000 00000008 80000000`,
  }),
  golden({
    name: 'rst2init-qp',
    parts: {
      command: { object: 0x123456 },
      context: { pmState: 3, atomicMode: 3, rre: 1, rwe: 1, rae: 1 },
      path: { vhcaPort: 1 },
    },
    byteLength: 272,
    hex: `05020000 00000000 00123456 00000000 00000000 00000000 00001800 00000000
          00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
          00000000 00000000 00000000 00000000 00000000 00010000 00000000 00000000
          00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
          00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
          00000000 00000000 0003e000`,
  }),
  golden({
    name: 'init2rtr-qp',
    parts: {
      command: { object: 0x123456 },
      context: {
        mtu: 5,
        logMsgMax: 30,
        remoteQpn: 0x654321,
        minRnrNak: 7,
        nextRcvPsn: 0xabcdef,
        logRraMax: 1,
      },
      path: {
        srcAddrIndex: 3,
        hopLimit: 255,
        rgidHigh: 0n,
        rgidLow: 0xffff_0a00_0001n,
        udpSport: 0xc001,
        rmacHigh: 0x0c42,
        rmacLow: 0xa1b2c3d4,
      },
    },
    byteLength: 272,
    hex: `05030000 00000000 00123456 00000000 00000000 00000000 00000000 00000000
          be000000 00000000 00000000 00654321 00000000 00000000 000300ff 00000000
          00000000 00000000 0000ffff 0a000001 0000c001 00000c42 a1b2c3d4 00000000
          00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
          00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
          00000000 00000000 00200000 07abcdef`,
  }),
  golden({
    name: 'rtr2rts-qp',
    parts: {
      command: { object: 0x123456 },
      context: { logAckReqFreq: 0, logSraMax: 1, nextSendPsn: 0x13579b, retryCount: 7, rnrRetry: 7 },
      path: { ackTimeout: 20 },
    },
    byteLength: 272,
    hex: `05040000 00000000 00123456 00000000 00000000 00000000 00000000 00000000
          00000000 00000000 00000000 00000000 00000000 00000000 a0000000 00000000
          00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
          00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
          00000000 00000000 0027e000 00000000 0013579b`,
  }),
] as const;
