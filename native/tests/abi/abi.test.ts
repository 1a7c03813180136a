// What abi.gen.ts writes, it reads; and nothing outside the struct changes. That its offsets are the compilers' is checked in C
// (offsets.gen.c, compiled by tests/compile/run.mjs).
import { expect, test } from 'vitest';
import {
  dispatchArgsLayout,
  EP_MAGIC_DISPATCH,
  EP_NO_SLOT,
  EP_STATUS_TIMEOUT,
  lifeWordLayout,
  readDispatchArgs,
  readLifeWord,
  readProxyRequest,
  statusNames,
  writeDispatchArgs,
  writeLifeWord,
  writeProxyRequest,
} from '../../js/abi.gen.js';

const fresh = (bytes: number): DataView => new DataView(new Uint8Array(bytes + 16).fill(0xaa).buffer);

const untouched = (view: DataView, bytes: number): boolean =>
  Array.from({ length: 8 }, (_, i) => view.getUint8(i) === 0xaa && view.getUint8(8 + bytes + i) === 0xaa).every(
    Boolean,
  );

test('nested structs, signed and 64-bit fields survive', () => {
  const header = { magic: EP_MAGIC_DISPATCH, abiMajor: 1, abiMinor: 0, kind: 7, byteLength: 136 };
  const value = {
    header,
    memory: {
      header: { ...header, kind: 0xffff_ffff },
      rank: -1,
      worldSize: 128,
      byteLength: 1n << 40n,
      signalSlots: 3n,
      peers: 0xffff_ffff_ffff_fff8n,
      proxy: 0n,
      memoryId: 9n,
    },
    parts: 1n,
    partCount: 2,
    flags: 1,
    arrivalSlot: 3n,
    creditSlot: 4n,
    arrivals: 5n,
    credits: 6n,
    status: 7n,
  };
  const view = fresh(dispatchArgsLayout.byteLength);
  writeDispatchArgs(view, 8, value);
  expect(readDispatchArgs(view, 8)).toEqual(value);
  expect(view.getInt32(8 + dispatchArgsLayout.offset.memory + 16, true)).toBe(-1);
  expect(untouched(view, dispatchArgsLayout.byteLength)).toBe(true);
});

test('reserved space is written as zero', () => {
  const view = fresh(128);
  const value = {
    turn: 1n,
    op: 1,
    peer: 2,
    memoryId: 3n,
    src: 4n,
    srcStride: 5n,
    rowBytes: 6n,
    rows: 7n,
    dstOffset: 8n,
    slot: EP_NO_SLOT,
    add: 9n,
  };
  writeProxyRequest(view, 8, value);
  expect(readProxyRequest(view, 8)).toEqual(value);
  expect(Array.from({ length: 48 }, (_, i) => view.getUint8(8 + 80 + i)).every((byte) => byte === 0)).toBe(true);
  expect(untouched(view, 128)).toBe(true);
});

test('arrays have their length', () => {
  const view = fresh(lifeWordLayout.byteLength);
  const value = { state: 1, pid: 2, mutex: [1n, 2n, 3n, 4n, 5n, 6n, 7n] };
  writeLifeWord(view, 8, value);
  expect(readLifeWord(view, 8)).toEqual(value);
  expect(() => writeLifeWord(view, 8, { ...value, mutex: [1n] })).toThrow(
    'lifeWord.mutex: expected 7 elements, found 1',
  );
});

test('a status has its name', () => {
  expect(statusNames[EP_STATUS_TIMEOUT]).toBe('timeout');
});
