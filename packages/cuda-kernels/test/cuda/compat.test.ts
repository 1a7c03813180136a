/** The per-token dispatch of device tensors, over the stand-in for GPUs, of which there are two: against the host's and the plan's oracle, and what it refuses. */
import { type DeviceTensor, type DType, memoryStore, tensor } from '@ep/core';
import { ibgda } from '@ep/ibgda';
import { native, openGpus } from '@ep/native';
import { movePlan } from '@ep/plan/reference';
import { beforeAll, describe, expect, it, vi } from 'vitest';
import { readTensor, symmetricTensor, writeTensor } from '../../src/cuda/buffer.js';
import { openDeviceCompatDispatcher } from '../../src/cuda/compat.js';
import { CudaDevice } from '../../src/cuda/device.js';
import { openCompatDispatcher, type PartSpec } from '../../src/index.js';
import { type Call, odd, otherErrorOf } from '../odd.js';
import {
  built,
  bytesFor,
  bytesOf,
  documents,
  errorOf,
  limits,
  onRanks,
  type Place,
  planOf,
  rowsOf,
  specsOf,
} from './compat-world.js';

beforeAll(() => {
  process.env.EP_CUDA_PATH = built('libep_cuda_host.so');
  process.env.EP_CUDA_HOST_DEVICES = '2';
});

// First of all: what other tests leave is freed at any time.
it('frees what it made for a call when told to, and the rest with the dispatcher', async () => {
  const held = () => openGpus().library.held();
  const specs = specsOf(planOf(1, documents), 'f32', 4);
  const [q] = specs.queries;
  await onRanks(1, async ({ open, place }) => {
    const source = await place('f32', [q!.plan.sendTokens[0]!, 8]);
    const before = held();
    const dispatcher = await open(bytesFor(specs));
    const { queries } = await dispatcher.bind({ queries: [q!] });
    const opened = held();
    const { tensors, release } = await queries.run({ q: source });
    expect(held()).toBe(opened + 1);
    release();
    release();
    await vi.waitFor(() => expect(held()).toBe(opened));
    expect(await errorOf(() => readTensor(tensors.q!))).toMatchObject({ code: 'EP_CLOSED' });
    // Refused, it keeps nothing either.
    const wrong = { ...source, address: 4096n };
    expect(await errorOf(() => queries.run({ q: wrong }))).toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
    await vi.waitFor(() => expect(held()).toBe(opened));
    await dispatcher.close();
    // But for the lists of the dispatch, which goes when JS lets go of it.
    await vi.waitFor(() => expect(held()).toBe(before + 1));
    expect(await errorOf(() => queries.run({ q: source }))).toMatchObject({ code: 'EP_CLOSED' });
  });
  expect(native().binding.leaks().pending).toBe(0);
});

describe('moves the bytes of the host and of the oracle', () => {
  it.each<readonly [number, DType, number]>([
    [1, 'f32', 4],
    [2, 'f32', 4],
    [3, 'u8', 48],
    [4, 'bf16', 8],
  ])('%i ranks, %s', { timeout: 60_000 }, async (worldSize, dtype, rowElements) => {
    const specs = specsOf(planOf(worldSize, documents), dtype, rowElements);
    const compared = await onRanks(worldSize, async ({ transport, rank, open, place }) => {
      const host = await openCompatDispatcher(transport, { ...bytesFor(specs), ...limits });
      const dispatcher = await open(bytesFor(specs));
      const [there, here] = [await dispatcher.bind(specs), await host.bind(specs)];
      let calls = 0;
      for (const [name, parts] of Object.entries<readonly PartSpec[]>(specs)) {
        for (let call = 0; call < 3; call++) {
          const all = parts.map((part) => rowsOf(part, call));
          const shape = (part: PartSpec) => [part.plan.sendTokens[rank]!, ...part.rowShape];
          const named = async <V>(make: (part: PartSpec, i: number) => V | Promise<V>) =>
            Object.fromEntries(await Promise.all(parts.map(async (part, i) => [part.name, await make(part, i)])));
          const sources = await named((part, i) => place(dtype, shape(part), all[i]![rank]!));
          const found = await there[name as keyof typeof specs].run(sources);
          const expected = await here[name as keyof typeof specs].run(
            await named((part, i) => tensor(dtype, shape(part), all[i]![rank]!)),
          );
          for (const [i, part] of parts.entries()) {
            const bytes = await readTensor(found.tensors[part.name]!);
            const { data } = expected.tensors[part.name]!;
            expect(found.tensors[part.name]).toMatchObject({
              dtype,
              shape: [part.plan.recvTokens[rank], ...part.rowShape],
            });
            expect(bytes).toEqual(bytesOf(data));
            expect(bytes).toEqual(bytesOf(movePlan(part.plan, all[i]!, part.rowShape[0]!)[rank]!));
          }
          found.release();
          calls++;
        }
      }
      await dispatcher.close();
      await host.close();
      return calls;
    });
    expect(compared).toEqual(Array(worldSize).fill(12));
  });
});

it('copies results to where the caller says, and leaves rows of replicas that do not exist', async () => {
  const specs = specsOf(planOf(2, documents), 'f32', 4);
  const [part] = specs.gradient;
  const kept = await onRanks(2, async ({ rank, open, place, transport }) => {
    const dispatcher = await open(bytesFor(specs));
    const { back } = await dispatcher.bind({ back: [part!] });
    const all = rowsOf(part!, 5);
    const source = await place('f32', [part!.plan.sendTokens[rank]!, 4], all[rank]!);
    const rows = part!.plan.recvTokens[rank]!;
    const longest = Math.max(...part!.plan.recvTokens);
    // Memory of a transport, from its second row on.
    const memory = await transport.allocate({
      byteLength: 16 * (longest + 1),
      space: 'device',
      signalSlots: 0,
      ...limits,
    });
    const target = symmetricTensor(memory, 'f32', [rows, 4], 16);
    await writeTensor(new Float32Array(rows * 4).fill(-7), target);
    const { tensors, release } = await back.run({ dKv: source }, { into: { dKv: target } });
    expect(tensors.dKv).toBe(target);
    release();
    const moved = movePlan(part!.plan, all, 4)[rank]!;
    const expected = Float32Array.from(moved as Float32Array, (value) => (value === 0 ? -7 : value));
    expect(new Float32Array((await readTensor(target)).buffer)).toEqual(expected);
    await dispatcher.close();
    return expected.includes(-7);
  });
  expect(kept).toContain(true);
});

it('begins when all ranks have come, behind what lies on the stream by then', async () => {
  const specs = specsOf(planOf(2, documents), 'f32', 4);
  const [q] = specs.queries;
  await onRanks(2, async ({ rank, open, place, device, stream }) => {
    const dispatcher = await open(bytesFor(specs));
    const { queries } = await dispatcher.bind({ queries: [q!] });
    const [before, all] = [rowsOf(q!, 1), rowsOf(q!, 2)];
    const source = await place('f32', [q!.plan.sendTokens[rank]!, 8], before[rank]!);
    const pinned = device.pinned(all[rank]!.byteLength);
    pinned.set(bytesOf(all[rank]!));
    const running = queries.run({ q: source });
    // The barrier is still ahead.
    stream.copy(pinned, source);
    const { tensors, release } = await running;
    expect(await readTensor(tensors.q!)).toEqual(bytesOf(movePlan(q!.plan, all, 8)[rank]!));
    release();
    expect(await errorOf(() => readTensor(tensors.q!))).toMatchObject({ code: 'EP_CLOSED' });
    await dispatcher.close();
  });
});

it('refuses alike on all ranks what the original would hang or crash on', async () => {
  const plan = planOf(2, documents);
  const specs = specsOf(plan, 'f32', 4);
  const [q, kv] = specs.forward;
  const wrong: Readonly<Record<string, readonly [readonly PartSpec[], string, RegExp]>> = {
    width: [[{ ...q!, rowShape: [5] }], 'EP_UNSUPPORTED', /whole 16-byte vectors, found 20 bytes/],
    idle: [
      [{ ...q!, plan: planOf(2, [[3], [0]]).fwdQ }],
      'EP_UNSUPPORTED',
      /rows to send on every rank, found none on rank 1/,
    ],
    replicas: [
      [...specsOf(planOf(2, [Array<number>(12).fill(2)], 'each-query'), 'f32', 4).forward],
      'EP_UNSUPPORTED',
      /at most 9 replicas, found 12/,
    ],
    shard: [
      [
        ...specsOf(
          planOf(2, [
            [0, 2],
            [3, 2],
            [4, 4],
          ]),
          'f32',
          4,
        ).gradient,
      ],
      'EP_UNSUPPORTED',
      /first home shard with rows/,
    ],
    reduce: [[{ ...specs.gradient[0]!, reduce: plan.reduction }], 'EP_UNSUPPORTED', /does not sum replicas/],
    kinds: [[kv!], 'EP_UNSUPPORTED', /found fwd-kv/],
    capacity: [[{ ...q!, rowShape: [1 << 12] }], 'EP_CAPACITY', /needs buffers of \d+ bytes.*\(queryBytes\)/],
  };
  await onRanks(2, async ({ rank, open }) => {
    const dispatcher = await open(bytesFor(specs));
    for (const [parts, code, message] of Object.values(wrong)) {
      const error = await errorOf(() => dispatcher.bind({ call: parts }));
      expect(error).toMatchObject({ code, message: expect.stringMatching(message) });
    }
    const other = await errorOf(() => dispatcher.bind({ call: [{ ...q!, rowShape: [rank === 0 ? 4 : 8] }] }));
    expect(other).toMatchObject({ code: 'EP_MISMATCH' });
    await dispatcher.close();
  });
});

it('refuses tensors that its kernel cannot use before the others count on the call', async () => {
  const specs = specsOf(planOf(2, documents), 'f32', 4);
  const [q] = specs.queries;
  await onRanks(2, async ({ rank, open, place, stream, device }) => {
    const dispatcher = await open(bytesFor(specs));
    const { queries } = await dispatcher.bind({ queries: [q!] });
    const [rows, received] = [q!.plan.sendTokens[rank]!, q!.plan.recvTokens[rank]!];
    const good = await place('f32', [rows, 8]);
    const target = await place('f32', [received, 8]);
    const run = (source: unknown, into?: unknown) =>
      errorOf(() =>
        queries.run({ q: source as DeviceTensor }, into === undefined ? {} : { into: { q: into as DeviceTensor } }),
      );
    const invalid = (message: RegExp) => ({
      code: 'EP_INVALID_ARGUMENT',
      message: expect.stringMatching(message) as unknown,
    });
    const wide = { ...good, strides: [16, 1] };
    expect(await run(undefined)).toMatchObject(invalid(/queries, source q: source must be a tensor of a device/));
    const host = tensor('f32', [rows, 8]);
    expect(await run(host)).toMatchObject(invalid(/queries, source q: source must be a tensor of a device/));
    expect(await run({ ...good, device: { kind: 'cuda', index: 1 } })).toMatchObject(invalid(/device must be GPU 0/));
    expect(await run({ ...good, dtype: 'i32' })).toMatchObject(invalid(/dtype must be f32/));
    expect(await run({ ...good, shape: [rows + 1, 8] })).toMatchObject(invalid(/shape must be/));
    expect(await run({ ...good, address: 4096n })).toMatchObject(invalid(/source is no address of GPU 0/));
    // Of which the driver knows how far it goes.
    const { address } = good;
    expect(await run({ ...good, address: address + 8n * 32n * BigInt(rows) })).toMatchObject(
      invalid(/source is no address|exceed the tensor/),
    );
    const closed = device.allocate(rows * 32);
    const gone = closed.tensor('f32', [rows, 8]);
    await closed.close();
    expect(await run(gone)).toMatchObject({ code: 'EP_CLOSED' });
    expect(await run(wide)).toMatchObject({
      code: 'EP_UNSUPPORTED',
      message: expect.stringMatching(/packed rows of 32 bytes, found rows 64 bytes apart/),
    });
    expect(await run(good, host)).toMatchObject(invalid(/queries, into q: source must be a tensor of a device/));
    expect(await run(good, { ...target, strides: [16, 1] })).toMatchObject(invalid(/packed rows/));
    expect(await run(good, await place('f32', [received + 1, 8]))).toMatchObject(invalid(/shape must be/));
    await using second = new CudaDevice(1);
    await using far = second.allocate(rows * 32);
    expect(await run(far.tensor('f32', [rows, 8]))).toMatchObject(invalid(/device must be GPU 0, found/));

    let captured: Promise<unknown> | undefined;
    const graph = stream.capture(() => {
      captured = run(good);
    });
    expect(await captured).toMatchObject(invalid(/the stream is being captured, and no graph holds the barrier/));
    await graph.close();

    // None of these was a call.
    const running = queries.run({ q: good }, { into: { q: target } });
    expect(await run(good)).toMatchObject({ code: 'EP_BUSY' });
    await running;
    for (const [label, value] of odd) {
      expect(await otherErrorOf(queries.run as Call, [value]), label).toBeUndefined();
      expect(await otherErrorOf(queries.run as Call, [{ q: value }]), label).toBeUndefined();
      expect(await otherErrorOf(queries.run as Call, [{ q: wide }, value]), label).toBeUndefined();
      expect(await otherErrorOf(queries.run as Call, [{ q: good }, { into: { q: value } }]), label).toBeUndefined();
    }
    await dispatcher.close();
    expect(await run(good)).toMatchObject({ code: 'EP_CLOSED' });
  });
});

it('refuses memory that only a NIC reaches', async () => {
  await using store = memoryStore();
  const libraries = { cuda: built('libep_cuda_driver.so') };
  await using transport = await ibgda.soft.open(
    { rank: 0, worldSize: 1, store: store.handle() },
    { ...limits, config: { device: 0, depth: 128, libraries } },
  );
  await using device = new CudaDevice(0);
  const options = { stream: device.stream(), queryBytes: 4096, ...limits };
  expect(await errorOf(() => openDeviceCompatDispatcher(transport, options))).toMatchObject({
    code: 'EP_INVALID_ARGUMENT',
    message: expect.stringMatching(/reach by loads and stores, found some behind a NIC/),
  });
});

it('says how many blocks fit on the GPU at once', async () => {
  await onRanks(1, async ({ open, place }) => {
    const specs = specsOf(planOf(1, documents), 'f32', 4);
    const first = await open({ ...bytesFor(specs), blocks: 20 });
    expect(first.shape).toEqual({ blocks: 20, lanes: 320, resident: 32 });
    expect(await errorOf(() => open({ ...bytesFor(specs), blocks: 13 }))).toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      message: expect.stringMatching(/13 blocks of 320 lanes do not fit on GPU 0.* 12 are sure/),
    });
    await first.close();
    const half = await open({ ...bytesFor(specs), blocks: undefined as never });
    expect(half.shape.blocks).toBe(16);
    const one = planOf(1, [[1]]);
    const { call } = await half.bind({ call: [{ name: 'q', plan: one.fwdQ, dtype: 'f32', rowShape: [4] }] });
    const { tensors } = await call.run({ q: await place('f32', [1, 4], Float32Array.of(1, 2, 3, 4)) });
    expect(new Float32Array((await readTensor(tensors.q!)).buffer)).toEqual(Float32Array.of(1, 2, 3, 4));
    await half.close();
  });
});

describe('has no way back', () => {
  const specs = specsOf(planOf(2, documents), 'f32', 4);
  const [q] = specs.queries;
  const opened = async ({ open, place, rank }: Place) => {
    const dispatcher = await open(bytesFor(specs));
    const { queries } = await dispatcher.bind({ queries: [q!] });
    const source = await place('f32', [q!.plan.sendTokens[rank]!, 8]);
    await queries.run({ q: source });
    return { dispatcher, run: (options = {}) => errorOf(() => queries.run({ q: source }, options)) };
  };

  it('from a rank that does not come', { timeout: 60_000 }, async () => {
    await onRanks(2, async (at) => {
      const { dispatcher, run } = await opened(at);
      if (at.rank === 0) {
        expect(await run({ timeoutMs: 200 })).toMatchObject({
          code: 'EP_TIMEOUT',
          message: expect.stringMatching(/rank 1 did not take part/),
        });
        expect(await run()).toMatchObject({
          code: 'EP_POISONED',
          message: expect.stringMatching(/cannot resync, close it and open another on all ranks/),
        });
      } else {
        await new Promise((resolve) => setTimeout(resolve, 1000));
      }
      await dispatcher.close();
    });
  });

  it('from one whose kernel does not come behind the barrier', { timeout: 60_000 }, async () => {
    const owed = q!.plan.received;
    await onRanks(2, async (at) => {
      const { dispatcher, run } = await opened(at);
      if (at.rank === 0) {
        const [begin, end] = [owed.offsets[0]!, owed.offsets[1]!];
        const expected = owed.tokens[begin + [...owed.peer.slice(begin, end)].indexOf(1)]!;
        expect(await run({ timeoutMs: 300 })).toMatchObject({
          code: 'EP_TIMEOUT',
          message: `queries: compat waited for rank 1: expected exactly ${expected} rows, found 0`,
          context: { rank: 1, expected: BigInt(expected), found: 0n },
        });
        expect(await run()).toMatchObject({ code: 'EP_POISONED' });
      } else {
        const running = run();
        await at.stream.close();
        expect(await running).toMatchObject({ code: 'EP_CLOSED' });
        expect(await run()).toMatchObject({ code: 'EP_POISONED' });
        await new Promise((resolve) => setTimeout(resolve, 1000));
      }
      await dispatcher.close();
    });
  });

  it('from an abort before the others come, or a close while its kernel waits', { timeout: 60_000 }, async () => {
    await onRanks(2, async (at) => {
      const { dispatcher, run } = await opened(at);
      if (at.rank === 0) {
        expect(await run({ signal: AbortSignal.timeout(100) })).toMatchObject({ name: 'TimeoutError' });
        expect(await run()).toMatchObject({ code: 'EP_POISONED' });
        await new Promise((resolve) => setTimeout(resolve, 1500));
        await dispatcher.close();
      } else {
        // The other one has said that it is here, but launches nothing any more.
        await new Promise((resolve) => setTimeout(resolve, 500));
        const running = run();
        await new Promise((resolve) => setTimeout(resolve, 300));
        await dispatcher.close();
        expect(await running).toMatchObject({ code: 'EP_ABORTED', message: 'compat dispatcher of a GPU was closed' });
      }
    });
  });
});
