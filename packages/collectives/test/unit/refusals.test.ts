/** What is wrong with arguments is said by the call itself, in words of its own, before anything moves. */
import { memoryStore, tensor } from '@ep/core';
import { expect, test } from 'vitest';
import { initProcessGroup, type Operand, type ProcessGroup, type ReduceOp } from '../../src/index.js';
import { openWorld } from './world.js';

const SIZE = 2;
const f = (length = 2): Float32Array => new Float32Array(length);
const pair = (length = 2): Float32Array[] => [f(length), f(length)];
const sheared = tensor('f32', [2, 2], f(8), [4, 1]);
const shared = new ArrayBuffer(64);
const view = (from: number, length = 2): Float32Array => new Float32Array(shared, 4 * from, length);
/** A list of two, of which the first is not there. */
const holed = <T>(second: T): T[] => {
  const list = new Array<T>(2);
  list[1] = second;
  return list;
};
const op = (value: unknown): { op: ReduceOp } => ({ op: value as ReduceOp });

/** On rank 0 of 2. */
const REFUSED: readonly (readonly [message: string, call: (group: ProcessGroup) => unknown])[] = [
  ['broadcast: root must be an integer from 0 to 1, found 2', (g) => g.broadcast(f(), { root: 2 })],
  ['broadcast: root must be an integer from 0 to 1, found -1', (g) => g.broadcast(f(), { root: -1 })],
  ['broadcast: root must be an integer from 0 to 1, found 0.5', (g) => g.broadcast(f(), { root: 0.5 })],
  ['broadcast: root must be an integer from 0 to 1, found undefined', (g) => g.broadcast(f(), {} as { root: number })],
  [
    'broadcast: root must be an integer from 0 to 1, found undefined',
    (g) => g.broadcast(f(), undefined as unknown as { root: number }),
  ],
  ['reduce: root must be an integer from 0 to 1, found 2', (g) => g.reduce(f(), { root: 2 })],
  ['gather: root must be an integer from 0 to 1, found 2', (g) => g.gather(f(), { root: 2, outputs: pair() })],
  ['scatter: root must be an integer from 0 to 1, found 2', (g) => g.scatter(f(), { root: 2, inputs: pair() })],
  ['broadcastObject: root must be an integer from 0 to 1, found 2', (g) => g.broadcastObject(1, { root: 2 })],
  ['gatherObject: root must be an integer from 0 to 1, found 2', (g) => g.gatherObject(1, { root: 2 })],

  [
    'allReduce: tensor must be contiguous: copy it with toContiguous, found "strides 4,1 for shape 2,2"',
    (g) => g.allReduce(sheared),
  ],
  ['allReduce: tensor must be a tensor or a typed array, found null', (g) => g.allReduce(null as unknown as Operand)],
  [
    'allReduce: array must be one whose dtype is plain; Uint8Array may hold u8, f8e4m3, f8e5m2 or ue8m0 and Uint16Array u16, f16 or bf16: say which with tensor(dtype, shape, data), found Uint8Array of 4 bytes',
    (g) => g.allReduce(new Uint8Array(4) as unknown as Operand),
  ],
  [
    'allReduce: op must be one of sum, avg, product, min, max, band, bor, bxor or { op: \'premul-sum\', factor }, found "mean"',
    (g) => g.allReduce(f(), op('mean')),
  ],
  [
    'allReduce: op must be one of sum, avg, product, min, max, band, bor, bxor or { op: \'premul-sum\', factor }, found "premul-sum"',
    (g) => g.allReduce(f(), op('premul-sum')),
  ],
  ['allReduce: op.factor must be a number, found undefined', (g) => g.allReduce(f(), op({ op: 'premul-sum' }))],
  ['allReduce: band takes integers, not f32', (g) => g.allReduce(f(), { op: 'band' })],
  [
    'allReduce: avg of i32 would have to round: sum, then divide as you need',
    (g) => g.allReduce(new Int32Array(1), { op: 'avg' }),
  ],
  [
    'allReduce: premul-sum takes f64, f32, f16 and bf16, not i64',
    (g) => g.allReduce(new BigInt64Array(1), op({ op: 'premul-sum', factor: 2 })),
  ],
  ['reduce: f8e4m3 can be moved but not reduced', (g) => g.reduce(tensor('f8e4m3', [1]), { root: 0 })],
  [
    'reduceScatter: ue8m0 can be moved but not reduced',
    (g) => g.reduceScatter(tensor('ue8m0', [1]), [tensor('ue8m0', [1]), tensor('ue8m0', [1])]),
  ],
  [
    'reduceScatterTensor: f8e5m2 can be moved but not reduced',
    (g) => g.reduceScatterTensor(tensor('f8e5m2', [1]), tensor('f8e5m2', [2])),
  ],

  ['allReduceCoalesced: tensors must be a list of at least one tensor, found []', (g) => g.allReduceCoalesced([])],
  [
    'allReduceCoalesced: band takes integers, not f32',
    (g) => g.allReduceCoalesced([new Int32Array(1), f()], { op: 'band' }),
  ],
  ['allReduceCoalesced: tensors[0] and tensors[1] overlap in memory', (g) => g.allReduceCoalesced([view(0), view(1)])],

  [
    'allGather: outputs must be a list of 2 tensors, one for each rank, found undefined',
    (g) => g.allGather(undefined as unknown as Operand[], f()),
  ],
  ['allGather: length of outputs must be 2, one tensor for each rank, found 1', (g) => g.allGather([f()], f())],
  ['allGather: length of outputs[1] must be 2 elements as of input, found 3', (g) => g.allGather([f(), f(3)], f())],
  [
    'allGather: dtype of outputs[0] must be f32 as of input, found "f64"',
    (g) => g.allGather([new Float64Array(2), f()], f()),
  ],
  ['allGather: outputs[0] and outputs[1] overlap in memory', (g) => g.allGather([view(0), view(1)], f())],
  ['allGather: input and outputs[0] overlap in memory', (g) => g.allGather([view(0), view(2)], view(0))],
  [
    'allGatherIntoTensor: length of output must be 4 elements, 2 times those of input, found 3',
    (g) => g.allGatherIntoTensor(f(3), f()),
  ],
  [
    'allGatherIntoTensor: dtype of output must be f32 as of input, found "i32"',
    (g) => g.allGatherIntoTensor(new Int32Array(4), f()),
  ],
  ['allGatherIntoTensor: output and input overlap in memory', (g) => g.allGatherIntoTensor(view(0, 4), view(3))],

  [
    'gather: outputs must be a list of 2 tensors, one for each rank, found undefined',
    (g) => g.gather(f(), { root: 0 }),
  ],
  [
    'gather: outputs must be absent but on the root, rank 1, found […, …]',
    (g) => g.gather(f(), { root: 1, outputs: pair() }),
  ],
  [
    'gather: length of outputs[0] must be 2 elements as of input, found 1',
    (g) => g.gather(f(), { root: 0, outputs: pair(1) }),
  ],
  [
    'scatter: inputs must be a list of 2 tensors, one for each rank, found undefined',
    (g) => g.scatter(f(), { root: 0 }),
  ],
  [
    'scatter: inputs must be absent but on the root, rank 1, found […, …]',
    (g) => g.scatter(f(), { root: 1, inputs: pair() }),
  ],
  [
    'scatter: length of inputs must be 2, one tensor for each rank, found 3',
    (g) => g.scatter(f(), { root: 0, inputs: [f(), f(), f()] }),
  ],
  [
    'scatter: dtype of inputs[1] must be f32 as of output, found "f16"',
    (g) => g.scatter(f(), { root: 0, inputs: [f(), tensor('f16', [2])] }),
  ],
  ['scatter: output and inputs[1] overlap in memory', (g) => g.scatter(view(1), { root: 0, inputs: [f(), view(2)] })],

  [
    'reduceScatter: length of inputs[0] must be 2 elements as of output, found 3',
    (g) => g.reduceScatter(f(), [f(3), f()]),
  ],
  ['reduceScatter: inputs[0] and output overlap in memory', (g) => g.reduceScatter(view(1), [view(0), f()])],
  [
    'reduceScatterTensor: length of input must be 4 elements, 2 times those of output, found 5',
    (g) => g.reduceScatterTensor(f(), f(5)),
  ],
  [
    'reduceScatterTensor: dtype of input must be f32 as of output, found "f64"',
    (g) => g.reduceScatterTensor(f(), new Float64Array(4)),
  ],
  ['reduceScatterTensor: input and output overlap in memory', (g) => g.reduceScatterTensor(view(1), view(0, 4))],

  ['allToAll: length of inputs must be 2, one tensor for each rank, found 1', (g) => g.allToAll(pair(), [f()])],
  [
    'allToAll: dtype of outputs[1] must be f32 as of outputs[0], found "i8"',
    (g) => g.allToAll([f(), new Int8Array(2)], pair()),
  ],
  [
    'allToAll: dtype of inputs[0] must be f32 as of outputs[0], found "i8"',
    (g) => g.allToAll(pair(), [new Int8Array(2), f()]),
  ],
  [
    'allToAll: part of rank 0 for itself must be as long in the output as in the input, 3 elements, found 2',
    (g) => g.allToAll(pair(), [f(3), f()]),
  ],
  ['allToAll: inputs[1] and outputs[0] overlap in memory', (g) => g.allToAll([view(1), f()], [f(), view(0)])],
  [
    'allToAllSingle: rows of input must be a multiple of 2 without inputSplits, found 3',
    (g) => g.allToAllSingle(f(4), f(3)),
  ],
  [
    'allToAllSingle: rows of output must be a multiple of 2 without outputSplits, found 1',
    (g) => g.allToAllSingle(tensor('f32', [1, 4]), tensor('f32', [2, 2])),
  ],
  [
    'allToAllSingle: inputSplits must be a list of 2 numbers of rows, one for each rank, found 3',
    (g) => g.allToAllSingle(f(3), f(3), { inputSplits: [1, 1, 1], outputSplits: [1, 2] }),
  ],
  [
    'allToAllSingle: inputSplits[1] must be a safe integer of at least 0, found -1',
    (g) => g.allToAllSingle(f(3), f(3), { inputSplits: [4, -1], outputSplits: [1, 2] }),
  ],
  [
    'allToAllSingle: sum of inputSplits must be 3, the rows of input, found 4',
    (g) => g.allToAllSingle(f(3), f(3), { inputSplits: [1, 3], outputSplits: [1, 2] }),
  ],
  [
    'allToAllSingle: sum of outputSplits must be 3, the rows of output, found 2',
    (g) => g.allToAllSingle(f(3), f(3), { inputSplits: [1, 2], outputSplits: [1, 1] }),
  ],
  [
    'allToAllSingle: part of rank 0 for itself must be as long in the output as in the input, 1 elements, found 2',
    (g) => g.allToAllSingle(f(3), f(3), { inputSplits: [1, 2], outputSplits: [2, 1] }),
  ],
  [
    'allToAllSingle: dtype of output must be f32 as of input, found "f64"',
    (g) => g.allToAllSingle(new Float64Array(2), f()),
  ],

  ['send: peer must be an integer from 0 to 1, found 2', (g) => g.send(f(), 2)],
  ['recv: peer must be an integer from 0 to 1, found -1', (g) => g.recv(f(), -1)],
  ['send: tag must be an integer from 0 to 2147483647, found -1', (g) => g.send(f(), 1, { tag: -1 })],
  ['recv: tag must be an integer from 0 to 2147483647, found 0.5', (g) => g.recv(f(), 1, { tag: 0.5 })],
  [
    'recvAnySource: tag must be an integer from 0 to 2147483647, found 2147483648',
    (g) => g.recvAnySource(f(), { tag: 2 ** 31 }),
  ],
  [
    'recv: tensor must be contiguous: copy it with toContiguous, found "strides 4,1 for shape 2,2"',
    (g) => g.recv(sheared, 1),
  ],
  [
    "batchIsendIrecv: ops[1]: op must be 'send' or 'recv', found \"put\"",
    (g) =>
      g.batchIsendIrecv([
        { op: 'send', tensor: f(), peer: 1 },
        { op: 'put' as 'send', tensor: f(), peer: 1 },
      ]),
  ],
  [
    'batchIsendIrecv: ops[1]: peer must be an integer from 0 to 1, found 9',
    (g) =>
      g.batchIsendIrecv([
        { op: 'send', tensor: f(), peer: 1 },
        { op: 'recv', tensor: f(), peer: 9 },
      ]),
  ],
  [
    'batchIsendIrecv: ops must be a list of messages, found undefined',
    (g) => g.batchIsendIrecv(undefined as unknown as []),
  ],

  [
    'barrier: timeoutMs must be a number of milliseconds of at least 0, or Infinity, found -1',
    (g) => g.barrier({ timeoutMs: -1 }),
  ],
  [
    'send: timeoutMs must be a number of milliseconds of at least 0, or Infinity, found NaN',
    (g) => g.send(f(), 1, { timeoutMs: Number.NaN }),
  ],
  [
    'broadcastObject: value must be undefined but on the root, rank 1, found 5',
    (g) => g.broadcastObject(5, { root: 1 }),
  ],
  ['allGatherObject: the value cannot be cloned: () => 1 could not be cloned.', (g) => g.allGatherObject(() => 1)],
  ['newGroup: ranks must be a list of at least one rank, found []', (g) => g.newGroup([])],
  ['newGroup: ranks[1] must be named once, found 1', (g) => g.newGroup([1, 1])],
  ['newGroup: ranks[0] must be an integer from 0 to 1, found 2', (g) => g.newGroup([2, 0])],
  ['split: color must be an integer from 0 to 2147483647, found -1', (g) => g.split(-1)],
  ['split: key must be an integer from -2147483647 to 2147483647, found 0.5', (g) => g.split(0, 0.5)],
  ['allocate: length must be a safe integer of at least 0, found -1', (g) => g.allocate('f32', -1)],

  ['allReduce: options must be an object, found "sum"', (g) => g.allReduce(f(), 'sum' as never)],
  ['barrier: options must be an object, found null', (g) => g.barrier(null as never)],
  ['barrier: signal must be an AbortSignal, found an object of Object', (g) => g.barrier({ signal: {} as never })],
  ['barrier: signal must be an AbortSignal, found null', (g) => g.barrier({ signal: null as never })],
  ['send: signal must be an AbortSignal, found 5', (g) => g.send(f(), 1, { signal: 5 as never })],
  ['recv: options must be an object, found null', (g) => g.recv(f(), 1, null as never)],
  ['allGather: tensor must be a tensor or a typed array, found undefined', (g) => g.allGather(holed(f()), f())],
  [
    'scatter: tensor must be a tensor or a typed array, found undefined',
    (g) => g.scatter(f(), { root: 0, inputs: holed(f()) }),
  ],
  [
    'allReduceCoalesced: tensor must be a tensor or a typed array, found undefined',
    (g) => g.allReduceCoalesced(holed(f())),
  ],
  [
    'allToAllSingle: inputSplits[0] must be a safe integer of at least 0, found undefined',
    (g) => g.allToAllSingle(f(), f(), { inputSplits: holed(2) }),
  ],
  ['batchIsendIrecv: ops[0] must be a message, found null', (g) => g.batchIsendIrecv([null as never])],
  ['batchIsendIrecv: ops[0] must be a message, found undefined', (g) => g.batchIsendIrecv(holed(null as never))],
  ['batchIsendIrecv: options must be an object, found null', (g) => g.batchIsendIrecv([], null as never)],
  ['close: options must be an object, found null', (g) => g.destroy(null as never)],
  ['close: signal must be an AbortSignal, found an object of Object', (g) => g.close({ signal: {} as never })],
];

test.each(REFUSED)('%s', async (message, call) => {
  const { groups } = await openWorld(SIZE);
  const [first] = groups;
  let error: unknown;
  try {
    await call(first!);
  } catch (thrown) {
    error = thrown;
  }
  const found = (error as Error | undefined)?.message;
  expect(found?.replace(/^createStorage/, 'allocate')).toBe(message);
  expect(error).toMatchObject({ code: 'EP_INVALID_ARGUMENT', scope: 'call' });
  // Nothing was posted: the next call has the next number, and meets that of the other rank.
  const works = groups.map((group) => group.barrier());
  await Promise.all(works);
  expect(works.map(({ sequence }) => sequence)).toEqual([1, 1]);
  expect(first!.trace()).toEqual({ barrier: { calls: 1, bytes: 0, writes: 0, signals: 1 } });
  expect(first!.failed.aborted).toBe(false);
});

test('calls throw at once, and do not return a Work that fails', async () => {
  const { groups } = await openWorld(SIZE);
  expect(() => groups[0]!.allReduce(f(), { op: 'band' })).toThrow('band takes integers');
  expect(() => groups[0]!.broadcast(f(), { root: 7 })).toThrow('root must be');
});

test('a detached buffer, and one that can be resized, are EP_DETACHED', async () => {
  const { groups } = await openWorld(SIZE);
  const data = f();
  structuredClone(data.buffer, { transfer: [data.buffer as ArrayBuffer] });
  expect(() => groups[0]!.allReduce(data)).toThrow(
    'allReduce: the buffer of the Float32Array was detached or transferred',
  );
  const Resizable = ArrayBuffer as unknown as new (length: number, options: { maxByteLength: number }) => ArrayBuffer;
  const growing = new Float32Array(new Resizable(8, { maxByteLength: 16 }));
  expect(() => groups[0]!.allReduce(growing)).toThrow('can be resized while it is in use');
  const tensorOf = tensor('f32', [2], f());
  const work = groups[0]!.broadcast(tensorOf, { root: 1 });
  await groups[1]!.broadcast(tensorOf.data, { root: 1 });
  await work;
  structuredClone(tensorOf.data.buffer, { transfer: [tensorOf.data.buffer as ArrayBuffer] });
  expect(() => groups[0]!.broadcast(tensorOf, { root: 1 })).toThrow('was detached or transferred');
});

test('a buffer that is taken away while a call uses it fails the call', async () => {
  const { groups } = await openWorld(SIZE);
  const data = f();
  const work = groups[0]!.broadcast(data, { root: 1 });
  structuredClone(data.buffer, { transfer: [data.buffer as ArrayBuffer] });
  await groups[1]!.broadcast(f(), { root: 1 });
  await expect(work).rejects.toMatchObject({ code: 'EP_DETACHED' });
});

test('a reduction that was just accepted for one dtype is refused for another', async () => {
  const { groups } = await openWorld(1);
  await groups[0]!.allReduce(new Int32Array(1), { op: 'bor' });
  expect(() => groups[0]!.allReduce(f(), { op: 'bor' })).toThrow('bor takes integers, not f32');
});

test('what is wrong with options of groups that are made rejects', async () => {
  const { groups } = await openWorld(SIZE);
  const [group] = groups as [ProcessGroup];
  const invalid = (message: string) => ({ code: 'EP_INVALID_ARGUMENT', message });
  await expect(group.newGroup([0], null as never)).rejects.toMatchObject(
    invalid('newGroup: options must be an object, found null'),
  );
  await expect(group.split(0, 0, null as never)).rejects.toMatchObject(
    invalid('split: options must be an object, found null'),
  );
  await expect(initProcessGroup(null as never)).rejects.toMatchObject(
    invalid('initProcessGroup: options must be an object, found null'),
  );
  const at = { rank: 0, worldSize: 1 };
  await expect(initProcessGroup({ ...at, store: {} as never })).rejects.toMatchObject(
    invalid('initProcessGroup: store must be a store, with a function get(), found an object of Object'),
  );
  await expect(initProcessGroup({ ...at, store: null as never })).rejects.toMatchObject(
    invalid('initProcessGroup: store must be a store, with a function get(), found null'),
  );
  const store = memoryStore();
  await expect(initProcessGroup({ ...at, store, signal: {} as never })).rejects.toMatchObject(
    invalid('initProcessGroup: signal must be an AbortSignal, found an object of Object'),
  );
});
