// Every collective of device tensors in every dtype, with every reduction: the bits of the same call of the same group in host memory, and no byte beside its outputs.
import assert from 'node:assert/strict';
import { createStorage, elementBytes, encode, viewStorage } from '@ep/core';
import { readTensor, writeTensor } from '@ep/cuda-kernels';
import { openGroup } from './collectives.mjs';

const FLOATS = ['f64', 'f32', 'f16', 'bf16'];
/** Moved, not reduced. */
const CODES = ['f8e4m3', 'f8e5m2', 'ue8m0'];

const premul = { op: 'premul-sum', factor: 0.7 };
const everywhere = ['sum', 'product', 'min', 'max'];
const ofFloats = ['avg', premul];
const ofIntegers = ['band', 'bor', 'bxor'];

function takenBy(dtype) {
  if (CODES.includes(dtype)) return [];
  return [...everywhere, ...(FLOATS.includes(dtype) ? ofFloats : ofIntegers)];
}

/** Bits of any kind; of floats every other element is a number of moderate size, so that sums are not all infinite. */
function fill(data, dtype, seed) {
  let state = (Math.imul(seed, 0x9e3779b1) ^ 0x85ebca6b) >>> 0 || 1;
  const next = () => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return state >>> 0;
  };
  const words = Uint32Array.from({ length: Math.ceil(data.byteLength / 4) }, next);
  const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
  bytes.set(new Uint8Array(words.buffer, 0, bytes.length));
  if (!FLOATS.includes(dtype)) return;
  const numbers = Float32Array.from({ length: Math.ceil(data.length / 2) }, () => next() / 2 ** 31 - 1);
  const moderate = dtype === 'f64' || dtype === 'f32' ? numbers : encode(dtype, numbers);
  for (let i = 0; i < moderate.length; i++) data[2 * i] = moderate[i];
}

/** Memory on the device, and the same bytes in host memory. */
class Twin {
  constructor(device, byteLength) {
    this.device = device.allocate(byteLength);
    this.most = byteLength;
    this.salt = 0;
  }

  /**
   * One call in host memory and on the device, on tensors of these lengths, filled alike, each one or two elements behind a border of 16 bytes: then all bytes of both are the same. `run` gets the tensors.
   */
  async compare(what, dtype, lengths, rank, run) {
    const width = elementBytes(dtype);
    let end = 0;
    const places = lengths.map((length, i) => {
      const begin = Math.ceil(end / 16) * 16 + (i % 3) * width;
      end = begin + length * width + 16;
      return begin;
    });
    assert.ok(end <= this.most, `${what}: ${end} bytes do not fit`);
    const image = new Uint8Array(end).fill(0x5a);
    this.salt++;
    const host = lengths.map((length, i) => {
      const data = viewStorage(dtype, image.buffer, places[i], length);
      fill(data, dtype, this.salt * 64 + rank * 8 + i);
      return { dtype, shape: [length], data };
    });
    const whole = this.device.tensor('u8', [end]);
    await writeTensor(image.slice(), whole);
    const there = lengths.map((length, i) => this.device.tensor(dtype, [length], places[i]));
    await run(host);
    await run(there);
    const found = Buffer.from((await readTensor(whole)).buffer, 0, end);
    if (found.equals(image)) return;
    const at = found.findIndex((byte, i) => byte !== image[i]);
    assert.fail(`${what}: tensors at ${places}: byte ${at} is ${found[at]} on the device, ${image[at]} on the host`);
  }

  close() {
    return this.device.close();
  }
}

/** Calls by name: lengths of the tensors of this rank, and the call on them. */
function movements({ rank, size }, count) {
  const each = (make) => Array.from({ length: size }, (_, i) => make(i));
  const counts = each(() => count);
  const moves = {};
  for (const root of new Set([0, size - 1])) {
    const isRoot = rank === root;
    moves[`broadcast of ${root}`] = [[count], (group, [x]) => group.broadcast(x, { root })];
    moves[`gather of ${root}`] = [
      isRoot ? [count, ...counts] : [count],
      (group, [x, ...outputs]) => group.gather(x, isRoot ? { root, outputs } : { root }),
    ];
    moves[`scatter of ${root}`] = [
      isRoot ? [count, ...counts] : [count],
      (group, [out, ...inputs]) => group.scatter(out, isRoot ? { root, inputs } : { root }),
    ];
  }
  moves.allGather = [[count, ...counts], (group, [x, ...out]) => group.allGather(out, x)];
  moves.allGatherIntoTensor = [[count, size * count], (group, [x, out]) => group.allGatherIntoTensor(out, x)];
  moves.allToAll = [[...counts, ...counts], (group, all) => group.allToAll(all.slice(size), all.slice(0, size))];
  moves.allToAllSingle = [[size * count, size * count], (group, [x, out]) => group.allToAllSingle(out, x)];
  // Nothing goes from a to b where a + b is a multiple of three.
  const splits = each((i) => ((rank + i) % 3 === 0 ? 0 : count + rank + i));
  const total = splits.reduce((sum, one) => sum + one, 0);
  moves['allToAllSingle by splits'] = [
    [total, total],
    (group, [x, out]) => group.allToAllSingle(out, x, { inputSplits: splits, outputSplits: splits }),
  ];
  return moves;
}

function folds({ size }, count, op) {
  const counts = Array(size).fill(count);
  const calls = {
    allReduce: [[count], (group, [x]) => group.allReduce(x, { op })],
    allReduceCoalesced: [[count, 3, 0, count], (group, all) => group.allReduceCoalesced(all, { op })],
    reduceScatter: [[count, ...counts], (group, [out, ...inputs]) => group.reduceScatter(out, inputs, { op })],
    reduceScatterTensor: [[size * count, count], (group, [x, out]) => group.reduceScatterTensor(out, x, { op })],
  };
  for (const root of new Set([0, size - 1])) {
    calls[`reduce to ${root}`] = [[count], (group, [x]) => group.reduce(x, { root, op })];
  }
  return calls;
}

const refusalOf = async (body) => {
  try {
    await body();
    return 'no error';
  } catch (error) {
    return `${error.code}: ${error.message}`;
  }
};

/** Reductions that a dtype does not take, in all forms: by name, in the words of the host, and the group goes on. */
async function refusals(group, { device }, dtype, codes) {
  const taken = new Set(takenBy(dtype));
  const there = (length) => device.tensor(dtype, [length]);
  const here = (length) => ({ dtype, shape: [length], data: createStorage(dtype, length) });
  for (const op of [...everywhere, ...ofFloats, ...ofIntegers]) {
    if (taken.has(op)) continue;
    const name = op.op ?? op;
    const said = async (make) => [
      await refusalOf(() => group.allReduce(make(4), { op })),
      await refusalOf(() => group.reduce(make(4), { root: 0, op })),
      await refusalOf(() => group.reduceScatterTensor(make(1), make(group.size), { op })),
    ];
    const [found, expected] = [await said(there), await said(here)];
    assert.deepEqual(found, expected);
    for (const text of found) {
      assert.match(text, /^EP_INVALID_ARGUMENT: /, `${name} of ${dtype}`);
      assert.ok(text.includes(dtype) && (text.includes(name) || codes), `${name} of ${dtype}: ${text}`);
    }
  }
}

/** How many calls were compared. `data`: dtypes, counts, bytes of staging memory, shape of kernels. */
async function collectiveGrid({ transport, device, store, rank, worldSize, data }) {
  const stream = device.stream();
  const group = await openGroup({ transport, store, rank, worldSize }, stream, data.stagingBytes, data.shape);
  const most = Math.max(...data.counts) + 2 * worldSize;
  const twin = new Twin(device, 2 * worldSize * (8 * most + 64) + 1024);
  let compared = 0;
  for (const dtype of data.dtypes) {
    for (const count of data.counts) {
      const calls = [
        Object.entries(movements(group, count)),
        ...takenBy(dtype).map((op) =>
          Object.entries(folds(group, count, op)).map(([name, call]) => [`${name}, ${op.op ?? op}`, call]),
        ),
      ];
      for (const [name, [lengths, call]] of calls.flat()) {
        const run = (tensors) => call(group, tensors);
        await twin.compare(`${name}, ${count} elements of ${dtype}`, dtype, lengths, rank, run);
        compared++;
      }
    }
    await refusals(group, twin, dtype, CODES.includes(dtype));
  }
  await group.barrier();
  await group.destroy();
  await twin.close();
  await stream.close();
  return compared;
}

export const collectiveGridScenarios = { collectiveGrid };
