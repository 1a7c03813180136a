// The per-token dispatch on a GPU beside the same dispatch on the host: the bytes of every tensor are the same, and so is what both refuse.
import assert from 'node:assert/strict';
import { elementBytes, prefixStore, tensor } from '@ep/core';
import { compatBytesFor, openCompatDispatcher, openDeviceCompatDispatcher, writeTensor } from '@ep/cuda-kernels';
import { allocateHost } from '@ep/native';
import { nvshmem } from '@ep/nvshmem';
import { fullPlan, randomPlan, specsOf } from '../attention/plans.mjs';
import { draw, same } from './attention-grid.mjs';
import { place } from './tensors.mjs';

const TIMEOUT_MS = 60_000;
/** Whole vectors: fewer than a warp has lanes, about as many as a block has, and more. */
const ROW_BYTES = [32, 96, 5152, 32_768];
const DTYPES = ['f32', 'u8', 'bf16', 'f16'];
const BLOCKS = [1, 20, undefined];

const plans = {
  everybody: (ranks) => fullPlan(ranks, 5),
  'replicas for each server': (ranks, seed) =>
    randomPlan(seed, ranks, { documents: 4 * ranks, maxLength: 12, everyone: true }),
  'replicas for each query': (ranks, seed) =>
    randomPlan(seed, ranks, { documents: 4 * ranks, maxLength: 12, everyone: true, sharing: 'each-query' }),
};

const outcomeOf = (body) =>
  body().then(
    (value) => ({ value }),
    (error) => ({ refused: `${error.code} ${error.message}` }),
  );

async function runCell({ transport, host, device, stream, plan, dtype, rowBytes, blocks, number }) {
  const { rank } = transport;
  const rowElements = rowBytes / elementBytes(dtype);
  const { reduced: _, ...specs } = specsOf(plan, { dtype, qRow: rowElements, kvRow: rowElements / 2 });
  specs.queries = [specs.forward[0]];
  const sizes = Object.values(specs).map(compatBytesFor);
  const options = {
    queryBytes: Math.max(...sizes.map(({ queryBytes }) => queryBytes)),
    keyValueBytes: Math.max(...sizes.map(({ keyValueBytes }) => keyValueBytes)),
    timeoutMs: TIMEOUT_MS,
  };
  const there = await openDeviceCompatDispatcher(transport, { ...options, stream, blocks });
  const here = await openCompatDispatcher(host, options);
  const counts = { compared: 0, refused: 0, bytes: 0 };
  for (const [name, parts] of Object.entries(specs)) {
    const [far, near] = [
      await outcomeOf(() => there.bind({ [name]: parts })),
      await outcomeOf(() => here.bind({ [name]: parts })),
    ];
    assert.equal(far.refused, near.refused, name);
    if (far.refused !== undefined) {
      assert.match(far.refused, /^EP_UNSUPPORTED/);
      counts.refused++;
      continue;
    }
    for (const round of [0, 1]) {
      const sides = { far: {}, near: {}, into: {}, beside: {} };
      const buffers = [];
      for (const [salt, { name: part, plan: of, rowShape }] of parts.entries()) {
        const [rows, received] = [of.sendTokens[rank], of.recvTokens[rank]];
        const data = draw(dtype, rows * rowShape[0], number * 100 + round * 40 + salt * 10 + rank, false);
        const placed = await place(device, dtype, rows, rowShape[0], data);
        sides.far[part] = placed.tensor;
        sides.near[part] = tensor(dtype, [rows, ...rowShape], data);
        buffers.push(placed.buffer);
        if (round === 0) continue; // new memory, zeroed on either side
        // Rows of replicas that do not exist keep these.
        const before = draw(dtype, received * rowShape[0], number * 100 + 90 + salt * 10 + rank, false);
        const kept = new before.constructor(allocateHost(before.byteLength), 0, before.length);
        kept.set(before);
        sides.beside[part] = tensor(dtype, [received, ...rowShape], kept);
        const target = await place(device, dtype, received, rowShape[0], before);
        sides.into[part] = target.tensor;
        buffers.push(target.buffer);
      }
      const into = round === 1;
      const found = await far.value[name].run(sides.far, into ? { into: sides.into } : {});
      const expected = await near.value[name].run(sides.near, into ? { into: sides.beside } : {});
      for (const { name: part } of parts) {
        counts.bytes += await same(found.tensors[part], expected.tensors[part], `${name}, ${part}, round ${round}`);
      }
      found.release();
      counts.compared++;
      for (const buffer of buffers) await buffer.close();
    }
  }
  await there.close();
  await here.close();
  return counts;
}

/** Every `step`-th cell from the `from`-th on. Calls compared, dispatches that both sides refuse, and the bytes that arrived. */
async function compatGrid({ transport, device, store, rank, worldSize, data: { from, step } }) {
  const host = await nvshmem.shm.open(
    { rank, worldSize, store: prefixStore(store, 'host') },
    { signal: AbortSignal.timeout(TIMEOUT_MS), timeoutMs: TIMEOUT_MS },
  );
  const stream = device.stream();
  const counts = { compared: 0, refused: 0, bytes: 0 };
  let number = -1;
  for (const rowBytes of ROW_BYTES) {
    for (const [name, make] of Object.entries(plans)) {
      number++;
      if (number % step !== from % step) continue;
      const dtype = DTYPES[(number + Math.floor(number / 3)) % DTYPES.length];
      const given = BLOCKS[(number + Math.floor(number / 3)) % BLOCKS.length];
      // The stand-in has room for 32 blocks of all ranks.
      const blocks = given === undefined || device.facts.runsOn === 'cuda' ? given : Math.min(given, 3);
      const plan = make(worldSize, number);
      try {
        const cell = await runCell({ transport, host, device, stream, plan, dtype, rowBytes, blocks, number });
        for (const key of Object.keys(counts)) counts[key] += cell[key];
      } catch (error) {
        const what = `${name}, rows of ${rowBytes} bytes of ${dtype}, ${blocks ?? 'as many as fit'} blocks`;
        throw new Error(`${what}: ${error.code ?? ''} ${error.stack}`, { cause: error });
      }
    }
  }
  await stream.close();
  await host.close();
  return counts;
}

/** A rank does not come; the others name it, and have no way back but another dispatcher. */
async function compatAbsent({ transport, device, rank, worldSize, data: { absent } }) {
  const stream = device.stream();
  const [part] = specsOf(fullPlan(worldSize, 5), { dtype: 'f32', qRow: 8, kvRow: 4 }).forward;
  const options = { stream, ...compatBytesFor([part]), blocks: 2, timeoutMs: TIMEOUT_MS };
  const rows = part.plan.sendTokens[rank];
  const { tensor: q } = await place(device, 'f32', rows, 8, new Float32Array(rows * 8));
  const said = [];
  for (let round = 0; round < 2; round++) {
    const dispatcher = await openDeviceCompatDispatcher(transport, options);
    const { queries } = await dispatcher.bind({ queries: [part] });
    await queries.run({ q });
    await writeTensor(new Float32Array(rows * 8).fill(round), q);
    if (round === 0 && rank !== absent) {
      const error = await queries.run({ q }, { timeoutMs: 300 }).catch((reason) => reason);
      said.push([error.code, error.context?.awaited]);
      said.push((await outcomeOf(() => queries.run({ q }))).refused?.split(' ')[0]);
    }
    if (round === 1) await queries.run({ q });
    await dispatcher.close();
  }
  await stream.close();
  return said;
}

export const compatScenarios = { compatGrid, compatAbsent };
