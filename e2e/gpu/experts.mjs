// What a rank does in the cases of experts: every row that arrives is looked at, experts multiply by their number, and each token's sum is computed once more.
import assert from 'node:assert/strict';
import { decode, elementBytes, encode, viewStorage } from '@ep/core';
import { openDeviceMoeBuffer, readTensor, writeTensor } from '@ep/cuda-kernels';
import { native } from '@ep/native';

const EXPERTS = 12;
const TOP_K = 3;

/** Numbers that every rank can make again; small enough that rounding to bf16 and e4m3 stays small against the sum. */
const draw = (...words) => {
  let h = 2166136261;
  for (const word of words) h = Math.imul(h ^ word, 16777619) ^ (h >>> 13);
  return (h >>> 0) / 2 ** 32;
};
const tokensOf = (rank, call, most) => Math.floor(draw(1, rank, call) * (most + 1));
const rowOf = (rank, call, token, hidden) =>
  Float32Array.from({ length: hidden }, (_, h) => draw(2, rank, call, token, h) * 2 - 1);
const weightOf = (rank, call, token, k) => draw(4, rank, call, token, k);

/** Different experts, some choices left open. */
function choicesOf(rank, call, token) {
  const taken = new Set();
  return Array.from({ length: TOP_K }, (_, k) => {
    if (draw(3, rank, call, token, k) < 0.1) return -1;
    for (let i = 0; ; i++) {
      const expert = Math.floor(draw(5, rank, call, token, k, i) * EXPERTS);
      if (taken.has(expert)) continue;
      taken.add(expert);
      return expert;
    }
  });
}

const storage = (dtype, values) => (dtype === 'f32' ? values : encode(dtype, values));
const floats = (dtype, bytes, count) => {
  const found = viewStorage(dtype, bytes.buffer, 0, count);
  return dtype === 'f32' ? found : decode(dtype, found);
};

function relative(found, expected) {
  let [error, norm] = [0, 0];
  for (let i = 0; i < expected.length; i++) {
    error += (found[i] - expected[i]) ** 2;
    norm += expected[i] ** 2;
  }
  return norm === 0 ? Math.sqrt(error) : Math.sqrt(error / norm);
}

/** All rows of the received tensor in f32, scales applied; row r begins at element r * hidden. */
async function receivedRows({ x, scales }, hidden) {
  const rows = x.shape.slice(0, -1).reduce((product, extent) => product * extent, 1);
  const values = floats(x.dtype, await readTensor(x), rows * hidden);
  if (scales === undefined) return values;
  const [, room] = scales.shape;
  const factors = new Float32Array((await readTensor(scales)).buffer);
  const out = Float32Array.from(values);
  for (let row = 0; row < rows; row++) {
    for (let h = 0; h < hidden; h++) out[row * hidden + h] *= factors[Math.floor(h / 128) * room + row];
  }
  return out;
}

/** Calls in either form, in one dtype and payload; `absent` takes no part in the second one. */
export async function experts({ transport, device, rank, worldSize, data }) {
  const { mode, dtype, payload, hidden, maxTokens, calls: slots, absent } = data;
  const stream = device.stream();
  const buffer = await openDeviceMoeBuffer(transport, {
    ...{ stream, mode, experts: EXPERTS, maxTokens, topK: TOP_K, hidden, dtype, calls: slots, blocks: 2, lanes: 64 },
    ...(payload === undefined ? {} : { payload }),
    ...(mode === 'high-throughput' ? { alignment: 4 } : {}),
    timeoutMs: absent === undefined ? 20_000 : 1000,
  });
  const first = buffer.map.rankOffsets[rank];
  const bound = payload === undefined ? (dtype === 'f32' ? 1e-6 : 1e-2) : 5e-2;
  const rowBytes = hidden * elementBytes(dtype);
  const [x, y, out] = [maxTokens, Math.max(1, buffer.receiveRows), maxTokens].map((rows) =>
    device.allocate(rows * rowBytes),
  );
  let compared = 0;
  for (let call = 0; call < 4; call++) {
    if (absent === rank && call >= 1) break;
    const gone = absent !== undefined && call >= 1 ? absent : -1;
    const tokens = tokensOf(rank, call, maxTokens);
    const own = Array.from({ length: tokens }, (_, token) => rowOf(rank, call, token, hidden));
    const choices = own.map((_, token) => choicesOf(rank, call, token));
    const source = x.tensor(dtype, [tokens, hidden]);
    await writeTensor(storage(dtype, Float32Array.from(own.flatMap((row) => [...row]))), source);
    const received = await buffer.dispatch(source, Int32Array.from(choices.flat()));
    const rows = await receivedRows(received, hidden);
    const results = new Float32Array(rows.length);
    for (let e = 0; e < received.counts.length; e++) {
      let found = 0;
      for (let from = 0; from < worldSize; from++) {
        const range = received.layoutRange[e * worldSize + from];
        const [begin, count] = [Number(range >> 32n), Number(range & 0xffffffffn)];
        const theirs = Array.from({ length: tokensOf(from, call, maxTokens) }, (_, token) => token);
        const wanted = theirs.filter((token) => choicesOf(from, call, token).includes(first + e));
        assert.equal(
          count,
          from === gone ? 0 : wanted.length,
          `call ${call}: rows of rank ${from} for expert ${first + e}`,
        );
        for (let i = 0; i < count; i++) {
          const row = received.blockStart[e] + begin + i;
          assert.equal(received.sourceToken[row], wanted[i]);
          const values = rows.subarray(row * hidden, (row + 1) * hidden);
          const error = relative(values, rowOf(from, call, wanted[i], hidden));
          assert.ok(error <= bound, `call ${call}: row ${row} of rank ${from}: error ${error}`);
          for (let h = 0; h < hidden; h++) results[row * hidden + h] = values[h] * (first + e + 1);
          compared++;
        }
        found += count;
      }
      assert.equal(received.counts[e], found);
    }
    const shape = received.x.shape;
    const answer = y.tensor(dtype, shape);
    await writeTensor(storage(dtype, results), answer);
    const weights = Float32Array.from(
      choices.flatMap((_, token) => choices[token].map((_, k) => weightOf(rank, call, token, k))),
    );
    const into = out.tensor(dtype, [tokens, hidden]);
    const combined = await buffer.combine(answer, received.handle, { out: into, weights });
    const sums = new Float32Array(tokens * hidden);
    for (let token = 0; token < tokens; token++) {
      for (let k = 0; k < TOP_K; k++) {
        const expert = choices[token][k];
        if (expert < 0 || (gone >= 0 && buffer.map.rank[expert] === gone)) continue;
        for (let h = 0; h < hidden; h++)
          sums[token * hidden + h] += weights[token * TOP_K + k] * (expert + 1) * own[token][h];
      }
    }
    if (tokens > 0) {
      const error = relative(floats(dtype, await readTensor(combined.y), tokens * hidden), sums);
      assert.ok(error <= bound, `call ${call}: sums: error ${error}`);
    }
    assert.deepEqual(
      [...received.lostRanks].flatMap((lost, r) => (lost ? [r] : [])),
      gone < 0 ? [] : [gone],
    );
  }
  const losses = [...buffer.losses];
  const totals = buffer.totals().reduce((sum, one) => sum + one, 0n);
  // The memory of the one that was absent stays until the others are through.
  if (absent !== undefined) await transport.barrier({ timeoutMs: 60_000 });
  await buffer.close();
  for (const one of [x, y, out]) await one.close();
  await stream.close();
  assert.equal(native().binding.leaks().pending, 0);
  return { compared, totals: Number(totals), losses };
}

/** Wrong calls are refused before they count. */
export async function refusedExperts({ transport, device, worldSize }) {
  const stream = device.stream();
  const options = { stream, mode: 'low-latency', experts: EXPERTS, maxTokens: 4, topK: 2, hidden: 16, dtype: 'f32' };
  const codes = {};
  const attempt = async (name, body) => {
    try {
      await body();
      codes[name] = 'no error';
    } catch (error) {
      codes[name] = error.code ?? String(error);
    }
  };
  await attempt('lanes', () => openDeviceMoeBuffer(transport, { ...options, lanes: 48 }));
  await attempt('blocks', () => openDeviceMoeBuffer(transport, { ...options, blocks: 60_000 }));
  const buffer = await openDeviceMoeBuffer(transport, { ...options, blocks: 1, lanes: 32 });
  const memory = device.allocate(4096);
  const x = memory.tensor('f32', [2, 16]);
  const choices = Int32Array.of(0, 1, 2, -1);
  await attempt('dtype', () => buffer.dispatch(memory.tensor('bf16', [2, 16]), choices));
  await attempt('tokens', () => buffer.dispatch(memory.tensor('f32', [5, 16]), new Int32Array(10)));
  await attempt('choices', () => buffer.dispatch(x, Int32Array.of(0, 1, 2)));
  await attempt('expert', () => buffer.dispatch(x, Int32Array.of(0, 1, 2, EXPERTS)));
  await attempt('twice', () => buffer.dispatch(x, Int32Array.of(0, 0, 2, 3)));
  await attempt('capture', () => stream.capture(() => void buffer.dispatch(x, choices)));
  const { handle } = await buffer.dispatch(x, choices);
  await attempt('few rows', () => buffer.combine(x, handle, { out: x }));
  const y = device
    .allocate(buffer.localExperts * worldSize * 4 * 64)
    .tensor('f32', [buffer.localExperts * worldSize * 4, 16]);
  await attempt('no out', () => buffer.combine(y, handle, {}));
  await attempt('weights', () => buffer.combine(y, handle, { out: x, weights: new Float32Array(3) }));
  await attempt('good', () => buffer.combine(y, handle, { out: memory.tensor('f32', [2, 16], 1024) }));
  await attempt('again', () => buffer.combine(y, handle, { out: x }));
  const held = [await buffer.dispatch(x, choices), await buffer.dispatch(x, choices)];
  await attempt('busy', () => buffer.dispatch(x, choices));
  for (const one of held) await one.handle.release();
  await buffer.close();
  await attempt('closed', () => buffer.dispatch(x, choices));
  await memory.close();
  await stream.close();
  return codes;
}
