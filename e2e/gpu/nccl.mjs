// Process groups over NCCL: against the same calls of the same group in host memory, in the order of a stream, what NCCL has not, and when ranks do not come.
import assert from 'node:assert/strict';
import { setTimeout as delay } from 'node:timers/promises';
import { initProcessGroup } from '@ep/collectives';
import { readTensor, writeTensor } from '@ep/cuda-kernels';
import { everyOperation } from './collectives.mjs';

const open = (stream, { store, rank, worldSize, timeoutMs = 60_000, name = 'world' }) =>
  initProcessGroup({ backend: 'nccl', store, rank, worldSize, timeoutMs, name, device: { stream } });

/** Its code and what it says of ranks, or 'no error'. */
const failureOf = async (body) => {
  try {
    await body();
    return ['no error'];
  } catch ({ code, context }) {
    return [code, context?.awaited ?? context?.lost ?? context?.ranks];
  }
};

async function ncclCollectives({ device, store, rank, worldSize, data }) {
  const stream = device.stream();
  const group = await open(stream, { store, rank, worldSize });
  assert.equal(group.backend, 'nccl');
  for (const dtype of data.dtypes) {
    for (const count of data.counts) await everyOperation(group, device, dtype, count);
  }
  await group.barrier();
  await group.monitoredBarrier();
  const buffer = device.allocate(4096);
  const x = buffer.tensor('i32', [16]);
  const small = buffer.tensor('i16', [16], 1024);
  const codes = [];
  const attempt = async (body) => codes.push((await failureOf(body))[0]);
  await attempt(() => group.allReduce(x, { op: 'bxor' }));
  await attempt(() => group.reduce(small, { root: 0 }));
  await attempt(() => group.send(x, (rank + 1) % worldSize, { tag: 3 }));
  await attempt(() => group.recvAnySource(x));
  await attempt(() => group.send(x, rank));
  await attempt(() => group.allReduce({ ...x, address: 4096n }));
  await attempt(() => group.allGatherIntoTensor(buffer.tensor('i32', [16 * worldSize], 0), new Int32Array(16)));
  // None of these was a call of the group. Groups of some ranks have communicators of their own; objects are for hosts.
  const even = await group.split(rank % 2, -rank);
  await everyOperation(even, device, 'f32', 100);
  const reversed = await group.newGroup(Array.from({ length: worldSize }, (_, i) => worldSize - 1 - i));
  await everyOperation(reversed, device, 'i32', 3);
  await everyOperation(group, device, 'i32', 7);
  assert.deepEqual(
    await group.allGatherObject({ rank }),
    Array.from({ length: worldSize }, (_, i) => ({ rank: i })),
  );
  // In place, where the parts of a tensor are what is given and taken.
  await writeTensor(new Int32Array(16).fill(rank + 1), x);
  await group.allReduce(x, { op: 'sum' });
  const found = new Int32Array((await readTensor(x)).buffer);
  assert.deepEqual([...found], Array(16).fill((worldSize * (worldSize + 1)) / 2));
  await group.destroy();
  await buffer.close();
  await stream.close();
  return codes;
}

/** Copies and calls one behind the other; nobody waits in between, and ranks come at different times. */
async function ncclOrder({ device, store, rank, worldSize, data }) {
  const stream = device.stream();
  const group = await open(stream, { store, rank, worldSize });
  const count = 1000;
  const buffer = device.allocate(count * 8);
  const x = buffer.tensor('i64', [count]);
  const pinned = device.pinned(count * 8 * (data.rounds + 1));
  const rows = new BigInt64Array(pinned.buffer, pinned.byteOffset, count * (data.rounds + 1));
  const row = (i) => rows.subarray(i * count, (i + 1) * count);
  row(0).fill(BigInt(rank + 1));
  await delay(rank * 300);
  const began = performance.now();
  const works = [];
  stream.copy(row(0), x);
  for (let round = 1; round <= data.rounds; round++) {
    works.push(group.allReduce(x));
    stream.copy(x, row(round));
  }
  // Whoever came first has not waited for the others: NCCL connects at the first call.
  const posted = performance.now() - began;
  await stream.synchronize();
  const first = BigInt((worldSize * (worldSize + 1)) / 2);
  for (let round = 1; round <= data.rounds; round++) {
    assert.equal(row(round)[count - 1], first * BigInt(worldSize) ** BigInt(round - 1), `round ${round}`);
  }
  await Promise.all(works);
  await group.destroy();
  await buffer.close();
  await stream.close();
  return posted;
}

/** Everybody to everybody, itself too, in one batch; then pairs one after the other. */
async function ncclMessages({ device, store, rank, worldSize, data }) {
  const stream = device.stream();
  const group = await open(stream, { store, rank, worldSize });
  const buffers = [];
  const place = async (values) => {
    const buffer = device.allocate(Math.max(16, values.byteLength));
    buffers.push(buffer);
    const tensor = buffer.tensor('f64', [values.length]);
    if (values.length > 0) await writeTensor(values, tensor);
    return tensor;
  };
  for (const length of data.lengths) {
    const batch = [];
    const taken = [];
    for (let peer = 0; peer < worldSize; peer++) {
      const given = Float64Array.from({ length }, (_, i) => rank * 1000 + peer * 10 + (i % 7));
      batch.push({ op: 'send', tensor: await place(given), peer });
      taken.push(await place(new Float64Array(length)));
      batch.push({ op: 'recv', tensor: taken[peer], peer });
    }
    const ends = await Promise.all(group.batchIsendIrecv(batch));
    for (let peer = 0; peer < worldSize; peer++) {
      assert.deepEqual(ends[2 * peer + 1], { source: peer, byteLength: 8 * length });
      if (length === 0) continue;
      const found = new Float64Array((await readTensor(taken[peer])).buffer);
      for (let i = 0; i < length; i++) assert.equal(found[i], peer * 1000 + rank * 10 + (i % 7));
    }
  }
  const x = await place(Float64Array.of(rank, rank));
  // Round a ring, one after the other: whoever sends first is received from first.
  const [next, before] = [(rank + 1) % worldSize, (rank + worldSize - 1) % worldSize];
  const y = await place(new Float64Array(2));
  if (rank === 0) {
    await group.send(x, next);
    await group.recv(y, before);
  } else {
    await group.recv(y, before);
    await group.send(x, next);
  }
  assert.equal(new Float64Array((await readTensor(y)).buffer)[1], before);
  const refused = await Promise.allSettled(
    group.batchIsendIrecv([
      { op: 'send', tensor: x, peer: next },
      { op: 'recv', tensor: y, peer: before, tag: 1 },
    ]),
  );
  await group.destroy();
  await Promise.all(buffers.map((buffer) => buffer.close()));
  await stream.close();
  return refused.map(({ reason }) => reason?.code);
}

/** One rank does not come; then a new group works, and the old one is of no use. */
async function ncclAbsent({ device, store, rank, worldSize, data }) {
  const stream = device.stream();
  const group = await open(stream, { store, rank, worldSize });
  const buffer = device.allocate(1 << 16);
  const x = buffer.tensor('f32', [1 << 14]);
  if (!data.cold) await group.allReduce(x);
  const said = [];
  if (rank !== data.absent) {
    said.push(await failureOf(() => group.allReduce(x, { timeoutMs: 500 })));
    said.push(await failureOf(() => group.allReduce(x)));
    await stream.synchronize();
  } else {
    await delay(data.late);
    said.push(await failureOf(() => group.allReduce(x, { timeoutMs: 5000 })));
  }
  // Those of hosts go on, and a group of all ranks begins anew.
  await group.allReduce(new Float32Array(4));
  const again = await group.newGroup(Array.from({ length: worldSize }, (_, i) => i));
  await again.allReduce(x);
  await group.destroy().catch(() => {});
  await buffer.close();
  await stream.close();
  return said;
}

/** A signal that fires, with another call queued behind. */
async function ncclCut({ device, store, rank, worldSize }) {
  const stream = device.stream();
  const group = await open(stream, { store, rank, worldSize });
  const buffer = device.allocate(64);
  const x = buffer.tensor('f32', [16]);
  await group.allReduce(x);
  const said = [];
  if (rank === 0) {
    const cut = new AbortController();
    const work = group.allReduce(x, { signal: cut.signal });
    const behind = group.allReduce(x);
    setTimeout(() => cut.abort(new Error('enough')), 100);
    said.push(
      await work.then(
        () => 'done',
        ({ message }) => message,
      ),
    );
    said.push((await failureOf(() => behind))[0]);
  } else {
    await delay(400);
    const [code, ranks] = await failureOf(() => group.allReduce(x));
    said.push(code, ranks);
  }
  await group.destroy().catch(() => {});
  await buffer.close();
  await stream.close();
  return said;
}

/** Ranks make different calls. */
async function ncclMismatch({ device, store, rank, worldSize }) {
  const stream = device.stream();
  const group = await open(stream, { store, rank, worldSize });
  const buffer = device.allocate(4096);
  const x = buffer.tensor('f32', [16]);
  await group.allReduce(x);
  const timeoutMs = 1000;
  const said = await failureOf(() =>
    rank === 1 ? group.allReduce(buffer.tensor('f32', [8]), { timeoutMs }) : group.allReduce(x, { timeoutMs }),
  );
  await group.destroy().catch(() => {});
  await buffer.close();
  await stream.close();
  return said;
}

/** One rank is killed in the middle of calls; those who are left open a group of their own. */
async function ncclLost({ device, store, rank, worldSize, data, ready }) {
  const stream = device.stream();
  const group = await open(stream, { store, rank, worldSize });
  const buffer = device.allocate(1 << 16);
  const x = buffer.tensor('f32', [1 << 14]);
  await group.allReduce(x);
  if (rank === data.victim) {
    await ready();
    await new Promise(() => {});
  }
  const began = performance.now();
  const said = await failureOf(() => group.allReduce(x));
  const ms = performance.now() - began;
  const behind = await failureOf(() => group.allReduce(x));
  await group.destroy().catch(() => {});
  await buffer.close();
  await stream.close();
  return { said, behind: behind[0], ms };
}

/** Milliseconds of one all-reduce by events of the device, the median of five runs of many, for each size; checked. */
async function ncclTimes({ device, store, rank, worldSize, data }) {
  const stream = device.stream();
  const group = await open(stream, { store, rank, worldSize });
  const times = [];
  for (const bytes of data.sizes) {
    const buffer = device.allocate(bytes);
    const x = buffer.tensor('f32', [bytes / 4]);
    await writeTensor(new Float32Array(bytes / 4).fill(1), x);
    await group.allReduce(x);
    const runs = [];
    for (let run = 0; run < 5; run++) {
      await group.barrier();
      const begin = stream.record({ timed: true });
      const works = Array.from({ length: data.calls }, () => group.allReduce(x, { op: 'max' }));
      const end = stream.record({ timed: true });
      await Promise.all(works);
      await stream.synchronize();
      runs.push(end.elapsedMs(begin) / data.calls);
      await Promise.all([begin.close(), end.close()]);
    }
    times.push(runs.sort((a, b) => a - b)[2]);
    const found = new Float32Array((await readTensor(x)).buffer);
    assert.ok(found.every((value) => value === worldSize));
    await buffer.close();
  }
  await group.destroy();
  await stream.close();
  return times;
}

export const ncclScenarios = {
  ncclCollectives,
  ncclOrder,
  ncclMessages,
  ncclAbsent,
  ncclCut,
  ncclMismatch,
  ncclLost,
  ncclTimes,
};
