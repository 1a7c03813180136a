// Collective calls in graphs: each replay is a call of all groups in it, without a word from the host.
import assert from 'node:assert/strict';
import { readTensor, writeTensor } from '@ep/cuda-kernels';
import { openGroup } from './collectives.mjs';

const open = (context, stream) => openGroup(context, stream, 2 ** 20);

const endOf = async (work) => {
  try {
    await work;
    return ['no error'];
  } catch (error) {
    return [error.code, error.context?.rank];
  }
};

const codeIn = (body) => {
  try {
    body();
    return 'no error';
  } catch (error) {
    return error.code;
  }
};

async function i64s(device, values) {
  const buffer = device.allocate(8 * values.length);
  const tensor = buffer.tensor('i64', [values.length]);
  await writeTensor(BigInt64Array.from(values, BigInt), tensor);
  const get = async () => [...new BigInt64Array((await readTensor(tensor)).buffer, 0, values.length)];
  return { buffer, tensor, get };
}

const wrapped = (value) => BigInt.asIntN(64, value);
const power = (base, exponent) => {
  let result = 1n;
  for (let i = 0; i < exponent; i++) result = wrapped(result * BigInt(base));
  return result;
};

/**
 * A sum of all ranks that grows with each replay, another one of large tensors, one of a pair, and rows that go round: replayed many times at once; then a plain call where others
 * replay; then again.
 */
async function collectiveGraph({ transport, device, store, rank, worldSize, data }) {
  const stream = device.stream();
  const world = await open({ transport, store, rank, worldSize }, stream);
  const pair = await world.newGroup([worldSize - 1, 0]);
  const x = await i64s(device, [rank + 1]);
  const large = await i64s(device, Array(data.elements).fill(rank === 0 ? 1 : 0));
  const y = await i64s(device, [rank + 1]);
  const row = await i64s(device, [rank]);
  const rows = await i64s(device, Array(worldSize).fill(-1));
  const out = await i64s(device, Array(worldSize).fill(-1));
  const graph = stream.capture(() => {
    world.allReduce(x.tensor);
    world.allReduce(large.tensor, { op: 'max' });
    pair?.allReduce(y.tensor);
    world.allGatherIntoTensor(rows.tensor, row.tensor);
    world.allToAllSingle(out.tensor, rows.tensor);
  });
  const one = stream.capture(() => world.allReduce(x.tensor));
  // Nothing of it has run.
  assert.deepEqual(await x.get(), [BigInt(rank + 1)]);
  const began = performance.now();
  await Promise.all(Array.from({ length: data.replays }, () => stream.launch(graph)));
  const ms = (performance.now() - began) / data.replays;
  const ranks = Array.from({ length: worldSize }, (_, i) => BigInt(i));
  assert.deepEqual(await rows.get(), ranks);
  assert.deepEqual(await out.get(), ranks.fill(BigInt(rank)));
  await (rank === 0 ? world.allReduce(x.tensor) : stream.launch(one));
  await (rank === 1 ? world.allReduce(x.tensor) : stream.launch(one));
  await world.broadcast(row.tensor, { root: 0 });
  await Promise.all(Array.from({ length: 10 }, () => stream.launch(graph)));
  const first = BigInt((worldSize * (worldSize + 1)) / 2);
  assert.deepEqual(await x.get(), [wrapped(first * power(worldSize, data.replays + 2 + 10 - 1))]);
  if (pair !== undefined)
    assert.deepEqual(await y.get(), [wrapped(BigInt(worldSize + 1) * power(2, data.replays + 9))]);
  assert.ok((await large.get()).every((value) => value === 1n));
  // Since the broadcast all rows are rank 0's.
  assert.deepEqual(await rows.get(), Array(worldSize).fill(0n));
  assert.deepEqual(await out.get(), Array(worldSize).fill(0n));
  await Promise.all([graph.close(), one.close()]);
  await world.destroy();
  await Promise.all([x, large, y, row, rows, out].map(({ buffer }) => buffer.close()));
  await stream.close();
  return ms;
}

/** What has no place in a graph is refused; a replay that fails names who is missing and poisons the group; a closed group is replayed no more. */
async function collectiveGraphFails({ transport, device, store, rank, worldSize }) {
  const stream = device.stream();
  const world = await open({ transport, store, rank, worldSize }, stream);
  const pair = await world.newGroup([2, 0]);
  const sister = await world.newGroup([2, 0]);
  const x = await i64s(device, [rank + 1]);
  const said = [];
  let message;
  const graph = stream.capture(() => {
    message = world.send(x.tensor, 0);
    world.allReduceCoalesced([x.tensor]);
  });
  said.push((await endOf(message))[0]);
  const coalescing = world.allGatherObject(rank);
  said.push(codeIn(() => void stream.capture(() => world.allReduce(x.tensor)).close()));
  await coalescing;
  await stream.launch(graph);
  assert.deepEqual(await x.get(), [6n]);
  if (pair !== undefined) {
    const replay = stream.capture(() => pair.allReduce(x.tensor));
    const other = stream.capture(() => sister.allReduce(x.tensor));
    if (rank === 0) {
      said.push(await endOf(stream.launch(replay, { timeoutMs: 300 })));
      said.push(await endOf(stream.launch(replay)), await endOf(pair.allReduce(x.tensor)));
    }
    await sister.barrier();
    said.push(await endOf(stream.launch(other)));
    await sister.destroy();
    said.push(await endOf(stream.launch(other)));
    await Promise.all([replay.close(), other.close()]);
  }
  await world.allReduce(x.tensor);
  await graph.close();
  await world.destroy();
  await x.buffer.close();
  await stream.close();
  return said;
}

export const graphScenarios = { collectiveGraph, collectiveGraphFails };
