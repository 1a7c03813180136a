/** What NCCL is asked to do for a call, and what is refused before it is asked; its work itself is under test in e2e/gpu. */
import type { Device } from '@ep/core';
import { MemoryStore } from '@ep/core';
import { expect, test } from 'vitest';
import { EqualParts } from '../../src/checks.js';
import { DeviceElements } from '../../src/device/elements.js';
import type { DeviceCall, OpKind } from '../../src/engine.js';
import { type InitOptions, initProcessGroup } from '../../src/index.js';
import { checkReduction, stepsOf } from '../../src/nccl/steps.js';

const at = (address: number, length: number): DeviceElements =>
  new DeviceElements('f32', 0, BigInt(address), length, { operand: BigInt(address), byteOffset: 0 });

const callOf = (kind: OpKind, given: Partial<DeviceCall>): DeviceCall => ({
  ...{ kind, sequence: 1, dtype: 'f32', root: -1, inputs: [], outputs: [], timeoutMs: 1000 },
  ...given,
});

const said = (call: DeviceCall, rank: number, size: number): string[] =>
  stepsOf(call, rank, size).map(
    ({ verb, rank: other, from, to }) => `${verb} ${other}: ${from?.byteOffset ?? '-'} > ${to?.byteOffset ?? '-'}`,
  );

test('lists of tensors and whole tensors are different functions, wherever the tensors lie', () => {
  const parts = new EqualParts();
  const whole = at(4096, 8);
  const halves = parts.of(whole, 2) as readonly DeviceElements[];
  const one = at(64, 4);
  expect(said(callOf('all-gather', { inputs: [one], outputs: halves }), 1, 2)).toEqual(['all-gather -1: 64 > 4096']);
  const beside = [at(4096, 4), at(4112, 4)];
  expect(said(callOf('all-gather', { inputs: [one], outputs: beside }), 1, 2)).toEqual([
    'broadcast 0: - > 4096',
    'broadcast 1: 64 > 4112',
  ]);
  expect(said(callOf('reduce-scatter', { inputs: halves, outputs: [one] }), 0, 2)).toEqual([
    'reduce-scatter -1: 4096 > 64',
  ]);
  expect(said(callOf('reduce-scatter', { inputs: beside, outputs: [one] }), 0, 2)).toEqual([
    'reduce 0: 4096 > 64',
    'reduce 1: 4112 > -',
  ]);
});

test('what NCCL has not goes as messages', () => {
  const [a, b, c] = [at(0, 4), at(16, 4), at(32, 4)];
  expect(said(callOf('gather', { root: 1, inputs: [a] }), 0, 2)).toEqual(['send 1: 0 > -']);
  expect(said(callOf('gather', { root: 1, inputs: [a], outputs: [b, c] }), 1, 2)).toEqual([
    'send 1: 0 > -',
    'recv 0: - > 16',
    'recv 1: - > 32',
  ]);
  expect(said(callOf('scatter', { root: 0, outputs: [a] }), 1, 2)).toEqual(['recv 0: - > 0']);
  expect(said(callOf('all-to-all', { inputs: [a], outputs: [b] }), 0, 1)).toEqual(['send 0: 0 > -', 'recv 0: - > 16']);
  expect(said(callOf('reduce', { root: 1, inputs: [a] }), 0, 2)).toEqual(['reduce 1: 0 > -']);
  expect(said(callOf('broadcast', { root: 1, outputs: [a] }), 0, 2)).toEqual(['broadcast 1: - > 0']);
});

test('reductions that NCCL has not are refused by name', () => {
  const refusal = (given: Partial<DeviceCall>) => () => checkReduction(callOf('all-reduce', given));
  expect(refusal({ dtype: 'i32', reduceOp: 'band' })).toThrow(/EP_UNSUPPORTED|the reduction band/);
  expect(refusal({ dtype: 'u16', reduceOp: 'sum' })).toThrow(/reductions of u16/);
  expect(refusal({ dtype: 'bf16', reduceOp: { op: 'premul-sum', factor: 2 } })).not.toThrow();
  expect(() => checkReduction(callOf('broadcast', { dtype: 'u16', root: 0 }))).not.toThrow();
});

test('options that mean nothing to NCCL are refused, and a library that is not there is named on all ranks', async () => {
  const store = new MemoryStore();
  const device: Device = { kind: 'cuda', index: 0 };
  const stream = { device } as NonNullable<InitOptions['device']>['stream'];
  const open = (options: InitOptions) =>
    initProcessGroup({ backend: 'nccl', store, rank: 0, worldSize: 1, timeoutMs: 5000, ...options });
  await expect(open({})).rejects.toThrow(/device must be a stream of a GPU/);
  await expect(open({ device: { stream, lanes: 32 } })).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
  await expect(open({ device: { stream, nccl: '' } })).rejects.toThrow(/device.nccl/);
  await expect(open({ device: { stream }, onTimeout: 'evict' })).rejects.toMatchObject({ code: 'EP_UNSUPPORTED' });
  const missing = open({ device: { stream, nccl: '/nowhere/libnccl.so.2' } });
  await expect(missing).rejects.toMatchObject({ code: 'EP_UNAVAILABLE', context: { ranks: [0] } });
  await expect(missing).rejects.toThrow(/rank 0: .*\/nowhere\/libnccl\.so\.2.*EP_NCCL_PATH/);
  await store.close();
});
