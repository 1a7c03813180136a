import { tensor } from '@ep/core';
import { native as addon, allocateHost, type NativeHostStream } from '@ep/native';
import { planAttention, serverLayout } from '@ep/plan';
import { afterAll, describe, expect, it } from 'vitest';
import * as api from '../src/index.js';
import { type Call, detached, odd, otherErrorOf, shrunk, spoiled } from './odd.js';

const isClass = (value: object): boolean => Function.prototype.toString.call(value).startsWith('class');
const functions = Object.entries<unknown>(api).filter(
  (entry): entry is [string, Call] => typeof entry[1] === 'function' && !isClass(entry[1]),
);
/** The one class that callers make themselves; functions of the package make the others. */
const makeStream: Call = (options) => new api.HostStream(options as api.HostStreamOptions);

const shards = {
  worldSize: 2,
  shardOffsets: Int32Array.of(0, 1, 2),
  lengths: Int32Array.of(4, 2),
  documents: 1,
  document: new Int32Array(2),
  position: Int32Array.of(0, 1),
};
const plan = planAttention(shards, Int32Array.of(1, 0));
const shape = { queryHeads: 2, kvHeads: 1, headDim: 8, dtype: 'f32' };
const part = { name: 'q', plan: plan.fwdQ, dtype: 'f32', rowShape: [2, 8] };
const layout = serverLayout(plan.layout, 0);
const groups = api.groupsOfServer(layout);
const q = tensor('f32', [2, 2, 8]);
const k = tensor('f32', [6, 1, 8]);
const lse = tensor('f32', [2, 2]);
const tensors = { q, k, v: k, o: q, lse, dO: q, dQ: q, dK: k, dV: k };
const stream = new api.HostStream();
afterAll(() => stream.close());

const memory = new Uint8Array(allocateHost(16));

/** The methods of the one class that callers make themselves; `methods-misuse.test.ts` has those that need a transport. */
const methods: readonly (readonly [string, Call])[] = ['copy', 'launch', 'wait'].map((name) => [
  `HostStream.${name}`,
  (...args) => (stream as unknown as Readonly<Record<string, Call>>)[name]!.apply(stream, args as unknown[]),
]);

/** Arguments that are right but for the memory of the tensors, which no native code may read: one after the other is replaced, and each of its fields. */
const right: Readonly<Record<string, readonly unknown[]>> = {
  attentionForward: [stream, groups, tensors, {}],
  attentionBackward: [stream, groups, tensors, {}],
  attentionLeaseBytes: [plan, shape],
  compatBytesFor: [[part, part]],
  groupsOfServer: [layout],
  leaseBytesFor: [[part, { ...part, plan: plan.revKvCompact, reduce: plan.reduction }]],
  lossesText: [new Map([[1, 'EP_TIMEOUT']])],
  rowBytesOf: [part],
  'HostStream.copy': [memory, memory.subarray(0), {}],
  'HostStream.launch': [(native: NativeHostStream) => native.record(new (addon().binding.StreamEvent)()), undefined],
  'HostStream.wait': [stream.record()],
};

describe('wrong kinds of arguments', () => {
  it.each([...functions, ['HostStream', makeStream] as const, ...methods])(
    '%s throws an EpError or nothing',
    async (name, call) => {
      const wrong: string[] = [];
      const same = odd.flatMap(([label, value]) =>
        [1, 2, 3, 4].map((count) => [`${count} of ${label}`, Array<unknown>(count).fill(value)] as const),
      );
      for (const [what, args] of [...same, ...spoiled(right[name] ?? [])]) {
        const other = await otherErrorOf(call, args);
        if (other !== undefined) wrong.push(`${what}: ${other}`);
      }
      expect(wrong).toEqual([]);
    },
  );

  const gone = Int32Array.of(1);
  structuredClone(gone.buffer, { transfer: [gone.buffer] });
  const none = { qRow: gone, qLength: gone, kvRow: gone, kvLength: gone };
  it.each<readonly [string, () => unknown]>([
    ['all lists of groups', () => api.attentionForward(stream, none, tensors as never)],
    ['a list of a layout', () => api.groupsOfServer({ ...layout, kvStart: gone })],
    ['what is copied', () => stream.copy(detached, memory)],
    ['where it is copied', () => stream.copy(memory.subarray(0, 0), shrunk)],
  ])('%s: a buffer that is gone is not an empty one', async (_, call) => {
    await expect((async () => call())()).rejects.toMatchObject({ code: 'EP_DETACHED' });
  });

  it.each([
    'openDispatcher',
    'openCompatDispatcher',
    'openMoeBuffer',
    'attentionForward',
    'attentionBackward',
    'leaseBytesFor',
    'compatBytesFor',
    'rowBytesOf',
    'groupsOfServer',
  ])('%s says where, what, expected and found', async (name) => {
    const [, call] = functions.find(([of]) => of === name)!;
    const refusal = (async () => call(null, null, null, null))();
    const message = expect.stringMatching(/^\w+: .+ must be .+, found null$/);
    await expect(refusal).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT', message });
  });
});
