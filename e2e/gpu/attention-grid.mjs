// Dispatches of attention on a GPU beside the same dispatches on the host: the bytes of every tensor are the same.
import assert from 'node:assert/strict';
import { createStorage, elementBytes, encode, prefixStore, tensor } from '@ep/core';
import { leaseBytesFor, openDeviceDispatcher, openDispatcher, readTensor } from '@ep/cuda-kernels';
import { nvshmem } from '@ep/nvshmem';
import { fullPlan, randomOf, randomPlan, specsOf, unevenPlan } from '../attention/plans.mjs';
import { place } from './tensors.mjs';

const TIMEOUT_MS = 60_000;
/** Whole vectors, such as end within one, and such as are longer than a chunk. */
const ROW_BYTES = [16, 20, 252, 1024, 4096, 16_384, 65_536];
const DTYPES = ['f32', 'bf16', 'f16', 'u8'];
const CHUNKS = [200, 5000, 262_144];

/** Plans with ranks that own or serve nothing, with keys that several ranks want (replicas), with shards of no rows; and such that all ranks have rows for all. */
const plans = {
  'replicas for each server': (ranks, seed, most) => randomPlan(seed, ranks, { maxLength: most }),
  'replicas for each query': (ranks, seed, most) => randomPlan(seed, ranks, { maxLength: most, sharing: 'each-query' }),
  'replicas, nobody empty': (ranks, seed, most) =>
    randomPlan(seed, ranks, { documents: 7, maxLength: most, everyone: true }),
  // The one with nothing is the last; rows grow with the square of the ranks.
  'an empty rank': (ranks, seed, most) =>
    ranks < 3 || ranks * most > 160 || most < 10 ? randomPlan(seed, ranks, { maxLength: most }) : unevenPlan(ranks),
  everybody: (ranks, _seed, most) => fullPlan(ranks, Math.ceil(most / 8)),
};

const bytesOf = (data) => Buffer.from(data.buffer, data.byteOffset, data.byteLength);

/** Bits of any kind, or, where they are summed, numbers with all of a significand. */
export function draw(dtype, count, seed, summed) {
  const random = randomOf(seed);
  if (summed) {
    const numbers = Float32Array.from({ length: count }, () => random(2 ** 24) / 2 ** 23 - 1);
    return dtype === 'f32' ? numbers : encode(dtype, numbers);
  }
  const made = createStorage(dtype, count);
  const bytes = bytesOf(made);
  for (let i = 0; i < bytes.length; i++) bytes[i] = random(256);
  return made;
}

export async function same(found, expected, what) {
  assert.equal(found.dtype, expected.dtype, what);
  assert.deepEqual(found.shape, expected.shape, what);
  const there = Buffer.from((await readTensor(found)).buffer);
  const here = bytesOf(expected.data);
  if (there.equals(here)) return here.length;
  const at = here.findIndex((byte, i) => byte !== there[i]);
  assert.fail(`${what}: byte ${at} of ${here.length} is ${there[at]} on the device, ${here[at]} on the host`);
}

/** What this rank gives to the calls of a round: rows on the host, and on the device, there with other numbers of elements between them. Made before any call: to allocate may wait for kernels that wait for this rank. */
async function sourcesOf({ device, rank, dtype, specs, number, round }) {
  const sources = {};
  for (const [salt, [name, part]] of [
    ['q', specs.forward[0]],
    ['kv', specs.forward[1]],
    ['dense', specs.dense[0]],
    ...(specs.reduced === undefined ? [] : [['reduced', specs.reduced[0]]]),
  ].entries()) {
    const rows = part.plan.sendTokens[rank];
    const [elements] = part.rowShape;
    const data = draw(dtype, rows * elements, number * 100 + round * 40 + salt * 10 + rank, part.reduce !== undefined);
    const { tensor: far, buffer } = await place(device, dtype, rows, elements, data, (number + round + salt) % 3);
    sources[name] = { far, near: tensor(dtype, [rows, elements], data), buffer };
  }
  return sources;
}

async function runCell({ transport, host, device, stream, plan, cell, number }) {
  const { rank } = transport;
  const { dtype, rowElements, chunkBytes } = cell;
  const specs = specsOf(plan, { dtype, qRow: rowElements, kvRow: Math.ceil(rowElements / 2) });
  const rounds = [];
  for (const round of [0, 1]) rounds.push(await sourcesOf({ device, rank, dtype, specs, number, round }));
  const shape = { leaseBytes: Math.max(...Object.values(specs).map(leaseBytesFor)), chunkBytes, timeoutMs: TIMEOUT_MS };
  const there = await openDeviceDispatcher(transport, {
    ...shape,
    ...{ stream, blocks: 1 + (number % 3), lanes: 32 << (number % 5) },
  });
  const here = await openDispatcher(host, shape);
  const [far, near] = [await there.bind(specs), await here.bind(specs)];
  let compared = 0;
  const call = async (name, sources) => {
    const side = (of) => Object.fromEntries(Object.entries(sources).map(([part, both]) => [part, both[of]]));
    const expected = await near[name].run(side('near'));
    const found = await far[name].run(side('far'));
    for (const part of Object.keys(sources)) {
      compared += await same(found.tensors[part], expected.tensors[part], `${name}, ${part}`);
    }
    return { found, expected };
  };
  const release = ({ found, expected }) => {
    found.release();
    expected.release();
  };
  for (const { q, kv, ...gradients } of rounds) {
    const first = await call('forward', { q, kv });
    // Sent back from the lease where it lies.
    const back = await call('output', { o: { far: first.found.tensors.q, near: first.expected.tensors.q } });
    release(first);
    release(back);
    for (const [name, dKv] of Object.entries(gradients)) release(await call(name, { dKv }));
  }
  await there.close();
  await here.close();
  for (const { buffer } of rounds.flatMap((round) => Object.values(round))) await buffer.close();
  return compared;
}

/** Every `step`-th cell from the `from`-th on. How many, and the bytes that arrived in them. */
async function attentionGrid({ transport, device, store, rank, worldSize, data: { from, step } }) {
  const host = await nvshmem.shm.open(
    { rank, worldSize, store: prefixStore(store, 'host') },
    { signal: AbortSignal.timeout(TIMEOUT_MS), timeoutMs: TIMEOUT_MS },
  );
  const stream = device.stream();
  let [number, cells, bytes] = [-1, 0, 0];
  for (const rowBytes of ROW_BYTES) {
    for (const [name, make] of Object.entries(plans)) {
      number++;
      if (number % step !== from % step) continue;
      // Not in step with the plans, of which there are five.
      const dtype = DTYPES[(number + Math.floor(number / 5)) % DTYPES.length];
      const chunkBytes = CHUNKS[number % CHUNKS.length];
      const cell = { dtype, rowElements: rowBytes / elementBytes(dtype), chunkBytes };
      const plan = make(worldSize, number, rowBytes > 4096 ? 6 : rowBytes > 252 ? 30 : 20);
      try {
        bytes += await runCell({ transport, host, device, stream, plan, cell, number });
      } catch (error) {
        const what = `${name}, rows of ${rowBytes} bytes of ${dtype} in chunks of ${chunkBytes}`;
        throw new Error(`${what}: ${error.code ?? ''} ${error.stack}`, { cause: error });
      }
      cells++;
    }
  }
  await stream.close();
  await host.close();
  return { cells, bytes };
}

export const attentionGridScenarios = { attentionGrid };
