// Process groups on tensors of a device: against the same calls of the same group in host memory, in the order of a stream, and when ranks do not come.
import assert from 'node:assert/strict';
import { initProcessGroup } from '@ep/collectives';
import { createStorage, elementBytes, viewStorage } from '@ep/core';
import { readTensor, writeTensor } from '@ep/cuda-kernels';
import { storageOf } from './tensors.mjs';

/** Small whole numbers: exact in every dtype, whatever the order. */
const valuesOf = (count, rank, salt) => Array.from({ length: count }, (_, i) => ((i * 7 + rank * 13 + salt) % 9) - 4);

const hostTensor = (dtype, data, shape = [data.length]) => ({ dtype, shape, data });

/** A group on tensors of a device, which meets in the store of the rank's context. */
export const openGroup = ({ transport, store, rank, worldSize }, stream, stagingBytes = 2 ** 22, shape = {}) =>
  initProcessGroup({ backend: transport, store, rank, worldSize, device: { stream, stagingBytes, ...shape } });

/** One call in host memory and on the device. `lists`: names of inputs and outputs, with values for the former and lengths for the latter. */
async function compare(device, dtype, sources, run) {
  const wide = dtype === 'i64' || dtype === 'u64';
  const host = sources.map((values) => storageOf(dtype, wide ? values.map(BigInt) : values));
  const buffers = host.map(({ byteLength }) => device.allocate(Math.max(byteLength, 16)));
  const tensors = buffers.map((buffer, i) => buffer.tensor(dtype, [host[i].length]));
  for (const [i, tensor] of tensors.entries()) await writeTensor(host[i].slice(), tensor);
  await run(host.map((data) => hostTensor(dtype, data)));
  await run(tensors);
  for (const [i, tensor] of tensors.entries()) {
    const bytes = await readTensor(tensor);
    const found = viewStorage(dtype, bytes.buffer, 0, host[i].length);
    assert.deepEqual(found, host[i], `tensor ${i}`);
  }
  await Promise.all(buffers.map((buffer) => buffer.close()));
}

/** Of a group, against the same calls in host memory. */
export async function everyOperation(group, device, dtype, count) {
  const { rank, size } = group;
  const values = (salt, length = count) => valuesOf(length, rank, salt);
  const zeros = (length) => Array(length).fill(0);
  const each = (make) => Array.from({ length: size }, (_, i) => make(i));
  const run = (sources, body) => compare(device, dtype, sources, body);
  const root = size - 1;
  const isRoot = rank === root;
  await run([values(1)], ([x]) => group.allReduce(x));
  await run([values(2)], ([x]) => group.allReduce(x, { op: 'max' }));
  await run([values(3)], ([x]) => group.reduce(x, { root, op: 'min' }));
  await run([values(4)], ([x]) => group.broadcast(x, { root }));
  await run([values(5), zeros(size * count)], ([x, out]) => group.allGatherIntoTensor(out, x));
  await run([values(6), ...each(() => zeros(count))], ([x, ...out]) => group.allGather(out, x));
  await run([values(7), ...(isRoot ? each(() => zeros(count)) : [])], ([x, ...outputs]) =>
    group.gather(x, isRoot ? { root, outputs } : { root }),
  );
  await run([zeros(count), ...(isRoot ? each((i) => values(i)) : [])], ([out, ...inputs]) =>
    group.scatter(out, isRoot ? { root, inputs } : { root }),
  );
  await run([values(8, size * count), zeros(count)], ([x, out]) => group.reduceScatterTensor(out, x));
  await run([zeros(count), ...each((i) => values(i))], ([out, ...inputs]) => group.reduceScatter(out, inputs));
  await run([...each((i) => values(i)), ...each(() => zeros(count))], (all) =>
    group.allToAll(all.slice(size), all.slice(0, size)),
  );
  // Rank a sends a + b + 1 rows to rank b.
  const splits = each((i) => rank + i + 1);
  const total = splits.reduce((sum, one) => sum + one, 0);
  await run([values(9, total), zeros(total)], ([x, out]) =>
    group.allToAllSingle(out, x, { inputSplits: splits, outputSplits: splits }),
  );
  await run([values(10), values(11, 3), zeros(0)], (all) => group.allReduceCoalesced(all));
}

async function collectives({ transport, device, store, rank, worldSize, data }) {
  const stream = device.stream();
  const group = await openGroup({ transport, store, rank, worldSize }, stream);
  for (const dtype of data.dtypes) {
    for (const count of data.counts) await everyOperation(group, device, dtype, count);
  }
  const [host, there] = [createStorage('f32', 4), device.allocate(64)];
  const codes = [];
  const attempt = async (body) => {
    try {
      await body();
      codes.push('no error');
    } catch (error) {
      codes.push(error.code);
    }
  };
  const tensor = there.tensor('f32', [4]);
  await attempt(() =>
    group.allGatherIntoTensor(
      there.tensor(
        'f32',
        [4 * worldSize].map((n) => Math.min(n, 16)),
      ),
      host,
    ),
  );
  await attempt(() => group.allReduce({ ...tensor, address: 4096n }));
  const part = await group.newGroup([0]);
  if (part !== undefined) await attempt(() => part.allReduce(tensor));
  // None of these was a call of the group.
  await group.allReduce(tensor);
  await Promise.all([group.destroy(), there.close()]);
  await stream.close();
  return codes;
}

/** Copies and calls are put on the stream one behind the other; nobody waits in between. */
async function collectiveOrder({ transport, device, store, rank, worldSize, data }) {
  const stream = device.stream();
  const group = await openGroup({ transport, store, rank, worldSize }, stream);
  const count = 1000;
  const buffer = device.allocate(count * elementBytes('i64'));
  const x = buffer.tensor('i64', [count]);
  const pinned = device.pinned(count * elementBytes('i64') * (data.rounds + 1));
  const rows = new BigInt64Array(pinned.buffer, pinned.byteOffset, count * (data.rounds + 1));
  const row = (i) => rows.subarray(i * count, (i + 1) * count);
  row(0).fill(BigInt(rank + 1));
  const works = [];
  stream.copy(row(0), x);
  for (let round = 1; round <= data.rounds; round++) {
    works.push(group.allReduce(x));
    stream.copy(x, row(round));
  }
  await stream.synchronize();
  const first = BigInt((worldSize * (worldSize + 1)) / 2);
  for (let round = 1; round <= data.rounds; round++) {
    assert.equal(row(round)[count - 1], first * BigInt(worldSize) ** BigInt(round - 1), `round ${round}`);
  }
  await Promise.all(works);
  await group.destroy();
  await buffer.close();
  await stream.close();
  return data.rounds;
}

/** One rank does not come: the others say who, and the group is of no use any more. */
async function collectiveAbsent({ transport, device, store, rank, worldSize, data }) {
  const stream = device.stream();
  const group = await openGroup({ transport, store, rank, worldSize }, stream);
  const buffer = device.allocate(1 << 20);
  const x = buffer.tensor('f32', [1 << 18]);
  await group.allReduce(x);
  const said = [];
  if (rank !== data.absent) {
    for (const timeoutMs of [500, 500]) {
      await group.allReduce(x, { timeoutMs }).catch(({ code, context }) => said.push([code, context.awaited]));
    }
  }
  await transport.barrier();
  await group.destroy().catch(() => {});
  await buffer.close();
  await stream.close();
  return said;
}

/** One rank is killed in the middle of calls. */
async function collectiveLost({ transport, device, store, rank, worldSize, data, ready }) {
  const stream = device.stream();
  const group = await openGroup({ transport, store, rank, worldSize }, stream);
  const buffer = device.allocate(1 << 16);
  const x = buffer.tensor('f32', [1 << 14]);
  await group.allReduce(x);
  if (rank === data.victim) {
    await ready();
    await new Promise(() => {});
  }
  const began = performance.now();
  const said = await group.allReduce(x, { timeoutMs: 60_000 }).catch(({ code, context }) => [code, context.lost]);
  const ms = performance.now() - began;
  await group.destroy().catch(() => {});
  await buffer.close();
  await stream.close();
  return { said, ms };
}

/** Milliseconds of one call by events of the device, the median of many, for each size; checked. */
async function collectiveTimes({ transport, device, store, rank, worldSize, data }) {
  const stream = device.stream();
  const group = await openGroup({ transport, store, rank, worldSize }, stream, data.stagingBytes);
  const times = [];
  for (const bytes of data.sizes) {
    const buffer = device.allocate(bytes);
    const x = buffer.tensor('f32', [bytes / 4]);
    await writeTensor(new Float32Array(bytes / 4).fill(1), x);
    await group.allReduce(x);
    await transport.barrier();
    const begin = stream.record({ timed: true });
    const works = Array.from({ length: data.calls }, () => group.allReduce(x, { op: 'max' }));
    const end = stream.record({ timed: true });
    await Promise.all(works);
    await stream.synchronize();
    times.push(end.elapsedMs(begin) / data.calls);
    const found = new Float32Array((await readTensor(x)).buffer);
    assert.ok(found.every((value) => value === worldSize));
    await Promise.all([begin.close(), end.close(), buffer.close()]);
  }
  await group.destroy();
  await stream.close();
  return times;
}

export const collectiveScenarios = {
  collectives,
  collectiveOrder,
  collectiveAbsent,
  collectiveLost,
  collectiveTimes,
};
