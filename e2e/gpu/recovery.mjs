// What a rank does in the cases of getting over failures: epochs, replays that fail, streams that end while others wait.
import assert from 'node:assert/strict';
import { setTimeout as sleep } from 'node:timers/promises';
import { leaseBytesFor, openDeviceDispatcher, readTensor, writeTensor } from '@ep/cuda-kernels';
import { native, openGpus } from '@ep/native';
import { movePlan } from '@ep/plan/reference';
import { fullPlan, randomPlan } from '../attention/plans.mjs';
import { allRows, expectSame, place } from './tensors.mjs';

const ROW = 8;

/** A dispatcher of one lease and one part, and what a call of it should move. */
async function simpleWorld({ transport, device, rank, worldSize }, stream, options = {}) {
  const plan = fullPlan(worldSize, 20).fwdQ;
  const specs = { forward: [{ name: 'q', plan, dtype: 'f32', rowShape: [ROW] }] };
  const dispatcher = await openDeviceDispatcher(transport, {
    stream,
    leaseBytes: leaseBytesFor(specs.forward),
    leases: 1,
    blocks: 2,
    lanes: 64,
    timeoutMs: 20_000,
    ...options,
  });
  const { forward } = await dispatcher.bind(specs);
  const rowsOf = (salt) => allRows(plan.sendTokens, ROW, 'f32', salt);
  const source = await place(device, 'f32', plan.sendTokens[rank], ROW, rowsOf(0)[rank]);
  return {
    dispatcher,
    forward,
    source,
    rows: plan.sendTokens[rank],
    received: plan.recvTokens[rank],
    own: (salt) => rowsOf(salt)[rank],
    expected: (salt) => movePlan(plan, rowsOf(salt), ROW)[rank],
  };
}

const failure = (promise) =>
  promise.then(
    () => ({ code: 'no error', context: {} }),
    (error) => error,
  );

/** Rank 0 releases a lease behind an event that comes late. A resync waits for that release: afterwards it would be a grant for a lease that is held. */
async function lateRelease(start) {
  const { transport, device, rank } = start;
  const [stream, other] = [device.stream(), device.stream()];
  const world = await simpleWorld(start, stream);
  const gate = await simpleWorld(start, other);
  const lease = await world.forward.run({ q: world.source.tensor });
  let late;
  if (rank === 0) {
    late = gate.forward.run({ q: gate.source.tensor });
    stream.wait(other.record());
    lease.release();
    const early = await failure(world.dispatcher.resync({ timeoutMs: 150 }));
    assert.equal(early.code, 'EP_TIMEOUT');
    assert.match(early.message, /releases/);
  } else {
    lease.release();
  }
  await transport.barrier();
  const resync = world.dispatcher.resync();
  if (rank !== 0) {
    await Promise.race([resync, sleep(500)]);
    late = gate.forward.run({ q: gate.source.tensor });
  }
  await resync;
  (await late).release();
  const held = await world.forward.run({ q: world.source.tensor });
  await expectSame(held.tensors.q, world.expected(0), 'after the resync');
  let second = 'none';
  if (rank !== 0) {
    // Rank 0 holds its lease: nobody may write there again.
    held.release();
    await writeTensor(new Float32Array(world.rows * ROW).fill(-1), world.source.tensor);
    second = (await failure(world.forward.run({ q: world.source.tensor }, { timeoutMs: 500 }))).code;
  }
  await transport.barrier();
  if (rank === 0) await expectSame(held.tensors.q, world.expected(0), 'held by rank 0 while the others call again');
  await Promise.all([world.dispatcher.close(), gate.dispatcher.close()]);
  await Promise.all([stream.close(), other.close()]);
  return second;
}

/** A replay that fails poisons its dispatcher; after a resync the same graph gives right results, on every rank. */
async function failedReplay(start) {
  const { transport, device, rank, worldSize } = start;
  const stream = device.stream();
  const world = await simpleWorld(start, stream);
  const { dispatcher, forward, source } = world;
  const [from, into] = [device.pinned(world.rows * ROW * 4), device.pinned(world.received * ROW * 4)];
  const graph = stream.capture(() => {
    stream.copy(from, source.tensor);
    const { lease } = forward.enqueue({ q: source.tensor });
    stream.copy(lease.tensors.q, into);
    lease.release();
  });
  const replays = async (what) => {
    for (let call = 0; call < 3; call++) {
      new Float32Array(from.buffer).set(world.own(call));
      await stream.launch(graph);
      assert.deepEqual(new Float32Array(into.buffer), world.expected(call), `${what}, replay ${call}`);
    }
  };
  await replays('at first');
  const outcomes = [];
  const attempt = async (launch) => {
    const { code, context } = await failure(launch);
    outcomes.push(`${code} ${context.rank ?? ''}`, dispatcher.poisoned);
    outcomes.push((await failure(stream.launch(graph))).code);
  };
  // The last rank comes to neither of these.
  if (rank !== worldSize - 1) {
    await attempt(stream.launch(graph, { timeoutMs: 300 }));
  }
  await dispatcher.resync();
  await replays('after a timeout');
  if (rank !== worldSize - 1) {
    const cut = new AbortController();
    setTimeout(() => cut.abort(new Error('enough')), 200);
    const { message } = await failure(stream.launch(graph, { signal: cut.signal }));
    outcomes.push(message, dispatcher.poisoned);
  }
  await dispatcher.resync();
  await replays('after an abort');
  // A replay that others never come to ends with the resync, whoever waits for it.
  const waits = rank === worldSize - 1 ? undefined : failure(stream.launch(graph));
  await dispatcher.resync();
  if (waits !== undefined) outcomes.push((await waits).code);
  await replays('after a replay that a resync has ended');
  await transport.barrier();
  await dispatcher.close();
  outcomes.push((await failure(stream.launch(graph))).code);
  await graph.close();
  await stream.close();
  return outcomes;
}

/** Rank 1 closes its memory while rank 0 still reads it; it is free only when rank 0 has closed, too. */
async function closedFirst({ transport, device, rank }) {
  const bytes = 1 << 20;
  const pattern = Uint8Array.from({ length: bytes }, (_, i) => (i * 13) ^ (i >> 9));
  const { library } = openGpus();
  const stream = device.stream();
  const { binding } = native();
  const into = new binding.GpuPinned(library, device.index, bytes);
  const cover = device.allocate(bytes);
  const before = library.held();
  const memory = await transport.allocate({ byteLength: bytes, signalSlots: 1, space: 'device' });
  await memory.write(pattern, memory.local(0, bytes));
  const during = library.held();
  await transport.barrier();
  const others = [];
  if (rank === 1) {
    await memory.close();
    await sleep(200);
    // What the driver might put in its place.
    for (let i = 0; i < 4; i++) {
      const other = device.allocate(bytes);
      others.push(other);
      await writeTensor(new Uint8Array(bytes).fill(0xee), other.tensor('u8', [bytes]));
    }
  }
  await transport.barrier();
  if (rank === 0) {
    stream.nativeStream('read').copy(into, 0, memory.address(1), 0, bytes);
    await stream.synchronize();
    assert.deepEqual(new Uint8Array(into.window()), pattern);
  }
  const kept = library.held() - others.length;
  await transport.barrier();
  if (rank === 0) await memory.close();
  await Promise.all(others.map((other) => other.close()));
  const deadline = performance.now() + 10_000;
  while (library.held() > before && performance.now() < deadline) await sleep(10);
  const left = library.held() - before;
  await cover.close();
  await stream.close();
  await transport.barrier();
  return { kept: kept > before, mapped: during - before, left };
}

/** Rank 1 has closed when rank 0 calls, and nothing is awaited of it: only the blocks of rank 0 wait for each other. */
async function alone({ transport, device, rank, worldSize }) {
  const stream = device.stream();
  const row = 4096;
  const plan = randomPlan(6, worldSize).fwdQ;
  assert.deepEqual([plan.sendTokens[1], plan.recvTokens[1]], [0, 0]);
  const specs = { forward: [{ name: 'q', plan, dtype: 'f32', rowShape: [row] }] };
  const dispatcher = await openDeviceDispatcher(transport, {
    stream,
    leaseBytes: leaseBytesFor(specs.forward),
    chunkBytes: 2 ** 24,
    blocks: 2,
    lanes: 128,
  });
  const { forward } = await dispatcher.bind(specs);
  if (rank === 0) {
    const all = allRows(plan.sendTokens, row, 'f32', 3);
    const { tensor } = await place(device, 'f32', plan.sendTokens[0], row, all[0]);
    await transport.barrier();
    await sleep(300);
    const lease = await forward.run({ q: tensor });
    await expectSame(lease.tensors.q, movePlan(plan, all, row)[0], 'without the other');
    lease.release();
  } else {
    await transport.barrier();
  }
  await dispatcher.close();
  await stream.close();
  return 'done';
}

/** Rank 0 closes a stream that waits for another's event, behind a call that the others come to only later: its timers go on. */
async function closeBehind(start) {
  const { transport, device, rank } = start;
  const older = device.stream();
  const world = await simpleWorld(start, older, { timeoutMs: 5_000 });
  const bytes = new Uint8Array(device.pinned(64).buffer);
  const scratch = device.allocate(64);
  let closing;
  let call;
  if (rank === 0) {
    call = world.forward.run({ q: world.source.tensor });
    const newer = device.stream();
    newer.wait(older.record());
    newer.copy(bytes, scratch.tensor('u8', [64]));
    closing = newer.close();
    await sleep(50);
  }
  await transport.barrier();
  call ??= world.forward.run({ q: world.source.tensor });
  (await call).release();
  await closing;
  await world.dispatcher.close();
  await older.close();
  return 'done';
}

/** A rank is terminated with a stream that waits for another's event, behind a call that no other comes to and that has no time limit. */
async function endedBehind(start) {
  const { transport, device, rank, data, ready } = start;
  const older = device.stream();
  const world = await simpleWorld(start, older);
  const bytes = new Uint8Array(device.pinned(64).buffer);
  if (rank === data.victim) {
    const call = world.forward.run({ q: world.source.tensor }, { timeoutMs: Number.POSITIVE_INFINITY });
    const newer = device.stream();
    newer.wait(older.record());
    newer.copy(bytes, device.allocate(64).tensor('u8', [64]));
    await ready();
    await Promise.race([call, new Promise(() => setInterval(() => {}, 1000))]);
  }
  const { code } = await failure(transport.barrier({ timeoutMs: 15_000 }));
  await world.dispatcher.close();
  await older.close();
  return code;
}

/** The second launch of a dispatch fails on every rank, after the device has counted the call. */
async function refusedLaunch(start) {
  const stream = start.device.stream();
  const world = await simpleWorld(start, stream);
  const { dispatcher, forward, source } = world;
  const outcomes = [];
  for (let call = 0; call < 3; call++) {
    let failed;
    const lease = await forward.run({ q: source.tensor }).then(undefined, (error) => {
      failed = error;
    });
    if (failed === undefined) {
      await expectSame(lease.tensors.q, world.expected(0), `call ${call}`);
      lease.release();
    } else {
      outcomes.push(`${call} ${failed.code} ${dispatcher.poisoned}`, failed.message);
      await dispatcher.resync();
    }
  }
  await start.transport.barrier();
  await dispatcher.close();
  await stream.close();
  return outcomes;
}

/** Memory of others is adopted, read and written, and refused where the GPU has none. */
async function adopted({ transport, device }) {
  const theirs = device.allocate(4096);
  const { address } = theirs;
  const memory = await transport.allocate({ byteLength: 256, signalSlots: 0, space: 'device' });
  const adoption = await transport.adopt({ address, byteLength: 1024 });
  const values = Uint8Array.from({ length: 100 }, (_, i) => i * 3);
  await memory.write(values, adoption.region(900, 100));
  const found = new Uint8Array(100);
  await memory.read(adoption.region(900, 100), found);
  assert.deepEqual(found, values);
  // Through what owns it, too.
  assert.deepEqual((await readTensor(theirs.tensor('u8', [4096]))).subarray(900, 1000), values);
  const codes = [];
  const refused = (promise) =>
    promise.then(
      () => codes.push('no error'),
      (error) => codes.push(error.code),
    );
  await refused(transport.adopt({ address: address + 1024n, byteLength: 1 << 30 }));
  await refused(transport.adopt({ address: 4096n, byteLength: 64 }));
  await refused(memory.read({ memory: adoption, byteOffset: 1000, byteLength: 100 }, found));
  const region = adoption.region(0, 100);
  await adoption.close();
  await refused(memory.read(region, found));
  await memory.close();
  await theirs.close();
  return codes;
}

export const recovery = {
  adopted,
  refusedLaunch,
  lateRelease,
  failedReplay,
  closedFirst,
  alone,
  closeBehind,
  endedBehind,
};
