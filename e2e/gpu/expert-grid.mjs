// Calls of experts on a GPU beside the same calls of a buffer on the host: the bytes of every row, scale, count and sum are the same.
import assert from 'node:assert/strict';
import { encode, prefixStore, tensor } from '@ep/core';
import { openDeviceMoeBuffer, openMoeBuffer, readTensor, writeTensor } from '@ep/cuda-kernels';
import { nvshmem } from '@ep/nvshmem';
import { mapExperts } from '@ep/plan/moe';

const TOP_K = 3;
const MAX_TOKENS = 13;
const TIMEOUT_MS = 60_000;
/** Less than a block of 128 channels that share a scale, one, several, and parts of one. */
const WIDTHS = [40, 128, 200, 384, 1000];
const DTYPES = ['bf16', 'f16', 'f32'];

/** Everything that a buffer can be opened with which changes what travels, and how: 108 cells. */
function* expertCells() {
  let turn = 0;
  for (const form of [
    { mode: 'low-latency' },
    { mode: 'high-throughput', alignment: 1 },
    { mode: 'high-throughput', alignment: 8 },
  ]) {
    for (const dtype of DTYPES) {
      for (const cast of [{}, { payload: 'f8e4m3+f32' }, { payload: 'f8e4m3+f32', roundScales: true }, ue8m0]) {
        for (const back of [{}, { zeroCopyCombine: true }, { combinePayload: 'logfmt10' }]) {
          yield { ...form, dtype, ...cast, ...back, hidden: WIDTHS[turn++ % WIDTHS.length] };
        }
      }
    }
  }
}
const ue8m0 = { payload: 'f8e4m3+ue8m0' };

/** How each call of a cell is made: at once or in halves, by choices or a kept layout. */
const repeats = {
  'low-latency': [{}, { halves: true }, {}],
  'high-throughput': [
    { keepLayout: true },
    { cached: true },
    { halves: true },
    { halves: true, keepLayout: true },
    { halves: true, cached: true },
  ],
};

class Draws {
  constructor(...seeds) {
    this.state = 0x2545f491;
    for (const seed of seeds) this.state = Math.imul(this.state ^ (seed + 1), 0x9e3779b1) ^ (this.state >>> 15);
    this.state = this.state >>> 0 || 1;
    for (let i = 0; i < 4; i++) this.below(2);
  }

  unit() {
    this.state ^= this.state << 13;
    this.state ^= this.state >>> 17;
    this.state ^= this.state << 5;
    this.state >>>= 0;
    return this.state / 2 ** 32;
  }

  below(end) {
    return Math.floor(this.unit() * end);
  }
}

/** The dtype's bits of numbers between -1 and 1 with all of a significand. */
function moderate(dtype, count, draws) {
  const numbers = Float32Array.from({ length: count }, () => draws.unit() * 2 - 1);
  return dtype === 'f32' ? numbers : encode(dtype, numbers);
}

/** Rows as casts find them hard: blocks of zeros, of very large, very small and mixed magnitudes, and some that hold an infinity or a NaN. */
function hard(dtype, tokens, hidden, draws) {
  const numbers = new Float32Array(tokens * hidden);
  for (let token = 0; token < tokens; token++) {
    for (let first = 0; first < hidden; first += 128) {
      const kind = draws.below(8);
      const scale = 2 ** (kind === 1 ? 14 : kind === 2 ? -14 : kind === 3 ? -24 : draws.below(12) - 6);
      const end = Math.min(hidden, first + 128);
      for (let h = first; h < end; h++) {
        const spread = kind === 4 ? 2 ** -draws.below(16) : 1;
        numbers[token * hidden + h] = kind === 0 ? 0 : (draws.unit() * 2 - 1) * scale * spread;
      }
      if (kind === 5 && draws.below(4) === 0) {
        numbers[token * hidden + first + draws.below(end - first)] = draws.below(2) === 0 ? Number.NaN : -1 / 0;
      }
    }
  }
  return dtype === 'f32' ? numbers : encode(dtype, numbers);
}

/** Two or three experts a rank, of which the first one is also on the last rank. */
function mapOf(worldSize) {
  const rankOffsets = new Int32Array(worldSize + 1);
  const expert = [];
  let experts = 0;
  for (let rank = 0; rank < worldSize; rank++) {
    for (let i = 0; i < (worldSize === 1 ? 5 : 2 + (rank % 2)); i++) expert.push(experts++);
    if (rank === worldSize - 1 && rank > 0) expert.push(0);
    rankOffsets[rank + 1] = expert.length;
  }
  return mapExperts({ worldSize, experts, rankOffsets, expert: Int32Array.from(expert) });
}

/** Some ranks have none, one has as many as there may be. */
function tokensOf(rank, call, worldSize) {
  if ((rank + call) % worldSize === 0) return MAX_TOKENS;
  const drawn = new Draws(1, rank, call).below(MAX_TOKENS + 4) - 3;
  return Math.max(0, drawn);
}

function choicesOf(tokens, experts, draws) {
  const choices = new Int32Array(tokens * TOP_K).fill(-1);
  for (let token = 0; token < tokens; token++) {
    const taken = new Set();
    for (let k = 0; k < TOP_K; k++) {
      // The first experts are asked for more often.
      const expert = Math.floor(draws.unit() ** 2 * experts);
      if (draws.unit() < 0.1 || taken.has(expert)) continue;
      taken.add(expert);
      choices[token * TOP_K + k] = expert;
    }
  }
  return choices;
}

const bytesOf = (data) => Buffer.from(data.buffer, data.byteOffset, data.byteLength);
const deviceBytes = async (of) => bytesOf(await readTensor(of));

/** Numbers of rows that tokens were written to, in order. */
function* rowsOf({ layoutRange, blockStart }, worldSize) {
  for (let run = 0; run < layoutRange.length; run++) {
    const [begin, count] = [Number(layoutRange[run] >> 32n), Number(layoutRange[run] & 0xffffffffn)];
    for (let i = 0; i < count; i++) yield blockStart[Math.floor(run / worldSize)] + begin + i;
  }
}

async function sameReceived(found, expected, { hidden, mode }, worldSize) {
  for (const name of ['counts', 'blockStart', 'layoutRange']) assert.deepEqual(found[name], expected[name], name);
  assert.deepEqual([...found.lostRanks], [...expected.lostRanks]);
  assert.equal(found.x.dtype, expected.x.dtype);
  assert.deepEqual(found.x.shape, expected.x.shape);
  const width = expected.x.data.BYTES_PER_ELEMENT;
  const apart = (expected.x.strides?.at(-2) ?? hidden) * width;
  const [rows, wanted] = [await deviceBytes(found.x), bytesOf(expected.x.data)];
  const factors = expected.scales && [await deviceBytes(found.scales), bytesOf(expected.scales.data)];
  const factorBytes = expected.scales?.data.BYTES_PER_ELEMENT;
  if (factors !== undefined) {
    assert.equal(found.scales.dtype, expected.scales.dtype);
    assert.equal(found.scales.shape[0], expected.scales.shape.at(-1));
  }
  const room = found.scales?.shape[1];
  const rowBytes = hidden * width;
  const sameRow = (row) => {
    const here = rows.subarray(row * rowBytes, (row + 1) * rowBytes);
    const there = wanted.subarray(row * apart, row * apart + rowBytes);
    assert.ok(here.equals(there), `row ${row}: ${here.toString('hex')}, on the host ${there.toString('hex')}`);
  };
  let compared = 0;
  for (const row of rowsOf(expected, worldSize)) {
    assert.equal(found.sourceToken[row], expected.sourceToken[row], `token of row ${row}`);
    assert.equal(found.sourceChoice[row], expected.sourceChoice[row], `choice of row ${row}`);
    sameRow(row);
    for (let block = 0; block < (factors === undefined ? 0 : Math.ceil(hidden / 128)); block++) {
      const at = (block * room + row) * factorBytes;
      const [here, there] = factors.map((all) => all.subarray(at, at + factorBytes).toString('hex'));
      assert.equal(here, there, `scale of block ${block} of row ${row}`);
    }
    compared++;
  }
  // Rows that pad a block are zeros on either side.
  if (mode === 'high-throughput') for (let row = 0; row < expected.x.shape[0]; row++) sameRow(row);
  return compared;
}

/** Who took long over what: a rank that others have given up was late, and its last steps say where. */
class Steps {
  slow = [];
  #last = performance.now();

  done(step) {
    const now = performance.now();
    if (now - this.#last > 2000) this.slow.push(`${step} took ${((now - this.#last) / 1000).toFixed(1)} s`);
    this.#last = now;
  }
}

/** A call that blocks its thread, and one that is long under way, are told apart. */
async function whole(steps, halves, buffer, name, ...rest) {
  const begun = halves ? buffer[`${name}Send`](...rest) : buffer[name](...rest);
  steps.done(`putting ${name} on its way`);
  if (!halves) return begun;
  const hook = await begun;
  steps.done(`the first half of ${name}`);
  return hook.receive();
}

/** One cell: buffers of either kind, and the same calls of both. Rows that were compared. */
async function runCell({ transport, host, stream, cell, number, memory, steps }) {
  const { rank, worldSize } = transport;
  const { mode, dtype, hidden, zeroCopyCombine } = cell;
  const map = mapOf(worldSize);
  const shape = { ...cell, experts: map, maxTokens: MAX_TOKENS, topK: TOP_K, calls: 2, timeoutMs: TIMEOUT_MS };
  const layouts = mode === 'high-throughput' ? { layouts: 1 } : {};
  const kernels = { blocks: 1 + (number % 2), lanes: 32 << (number % 4) };
  const there = await openDeviceMoeBuffer(transport, { ...shape, ...layouts, ...kernels, stream });
  steps.done('opening on the GPU');
  const here = await openMoeBuffer(host, { ...shape, zeroCopyCombine: false });
  steps.done('opening on the host');
  const width = dtype === 'f32' ? 4 : 2;
  const place = (i, rows) => memory[i].tensor(dtype, [rows, hidden]);
  assert.ok(there.receiveRows * hidden * width <= memory[0].byteLength, 'results do not fit');
  const kept = {};
  let compared = 0;
  for (const [call, { halves, keepLayout, cached }] of repeats[mode].entries()) {
    const draws = new Draws(number, call, rank);
    const routed = cached ? call - 1 : call;
    const tokens = tokensOf(rank, routed, worldSize);
    const choices = choicesOf(tokens, map.experts, new Draws(2, number, routed, rank));
    const rows = hard(dtype, tokens, hidden, draws);
    const weights = call % 3 === 2 ? undefined : Float32Array.from(choices, () => draws.unit());
    const bias = Array.from({ length: call % 3 }, () => moderate(dtype, tokens * hidden, draws));
    await writeTensor(rows, place(1, tokens));
    for (const [i, one] of bias.entries()) await writeTensor(one, place(3 + i, tokens));
    steps.done(`call ${call}: writing to the GPU`);
    const limits = mode === 'high-throughput' ? { keepLayout: keepLayout === true } : {};
    const x = tensor(dtype, [tokens, hidden], rows);
    const expected = await whole(steps, halves, here, 'dispatch', x, cached ? kept.here : choices, limits);
    steps.done(`call ${call}: dispatch on the host`);
    const found = await whole(
      steps,
      halves,
      there,
      'dispatch',
      place(1, tokens),
      cached ? kept.there : choices,
      limits,
    );
    steps.done(`call ${call}: dispatch on the GPU`);
    if (keepLayout) Object.assign(kept, { here: expected.layout, there: found.layout });
    compared += await sameReceived(found, expected, cell, worldSize);

    const count = expected.x.shape.reduce((product, extent) => product * extent, 1);
    const y = moderate(dtype, count, draws);
    const offered = zeroCopyCombine && (call + rank) % 3 !== 0;
    const answer = offered ? found.combineBuffer : memory[0].tensor(dtype, found.x.shape);
    await writeTensor(y, answer);
    steps.done(`call ${call}: comparing, and writing results to the GPU`);
    const given = weights === undefined ? {} : { weights };
    const sums = await whole(
      steps,
      halves,
      here,
      'combine',
      tensor(dtype, [count / hidden, hidden], y),
      expected.handle,
      {
        ...given,
        bias: bias.map((one) => tensor(dtype, [tokens, hidden], one)),
      },
    );
    steps.done(`call ${call}: combine on the host`);
    const out = place(2, tokens);
    await whole(steps, halves, there, 'combine', answer, found.handle, {
      ...given,
      bias: bias.map((_, i) => place(3 + i, tokens)),
      out,
    });
    steps.done(`call ${call}: combine on the GPU`);
    if (cached) kept.there.release();
    const both = [await deviceBytes(out), bytesOf(sums.y.data).subarray(0, tokens * hidden * width)];
    const at = both[0].findIndex((byte, i) => byte !== both[1][i]);
    const where = `call ${call}: channel ${Math.floor(at / width) % hidden} of token ${Math.floor(at / width / hidden)}`;
    const read = (bytes) => bytes.subarray(at - (at % width), at - (at % width) + width).toString('hex');
    assert.ok(at < 0 && both[0].length === both[1].length, `${where}: ${both.map(read).join(', on the host ')}`);
  }
  assert.deepEqual(there.totals(), here.totals());
  assert.deepEqual([[...there.losses], [...here.losses]], [[], []]);
  await there.close();
  await here.close();
  steps.done('closing');
  return compared;
}

const nameOf = (cell) =>
  Object.entries(cell)
    .map(([name, value]) => `${name} ${value}`)
    .join(', ');

/** Every `step`-th cell from the `from`-th on. How many, and rows that arrived in them. */
async function expertGrid({ transport, device, store, rank, worldSize, data: { from, step } }) {
  const host = await nvshmem.shm.open(
    { rank, worldSize, store: prefixStore(store, 'host') },
    { signal: AbortSignal.timeout(TIMEOUT_MS), timeoutMs: TIMEOUT_MS },
  );
  const stream = device.stream();
  const most = Math.max(...WIDTHS) * 4;
  const locals = worldSize === 1 ? 5 : 4;
  const sizes = [locals * (worldSize * MAX_TOKENS + 8), ...Array(4).fill(MAX_TOKENS)];
  const memory = sizes.map((rows) => device.allocate(rows * most));
  let [cells, rows] = [0, 0];
  for (const [number, cell] of [...expertCells()].entries()) {
    if (number % step !== from % step) continue;
    const steps = new Steps();
    try {
      rows += await runCell({ transport, host, stream, cell, number, memory, steps });
    } catch (error) {
      const slow = steps.slow.length > 0 ? ` (${steps.slow.join(', ')})` : '';
      throw new Error(`${nameOf(cell)}${slow}: ${error.code ?? ''} ${error.stack}`, { cause: error });
    }
    cells++;
  }
  for (const one of memory) await one.close();
  await stream.close();
  await host.close();
  return { cells, rows };
}

export const expertGridScenarios = { expertGrid };
