// What a rank measures on GPUs of its own: graphs of calls by the events of its device, every row and sum of them compared first and after the last replay.
import assert from 'node:assert/strict';
import { createStorage, decode, elementBytes, encode, viewStorage } from '@ep/core';
import {
  leaseBytesFor,
  openDeviceDispatcher,
  openDeviceMoeBuffer,
  readTensor,
  viewTensor,
  writeTensor,
} from '@ep/cuda-kernels';
import { planAttention, shardsOfDocuments } from '@ep/plan';
import { movePlan } from '@ep/plan/reference';
import { openGroup } from './collectives.mjs';
import { draw } from './united.mjs';
import { choicesOf } from './united-times.mjs';

/**
 * Microseconds that the device takes for a replay: of each round, after two that warm up. Behind another replay, with which ranks begin and end together: else who is launched first waits for the
 * others, for as long as JS takes to come to them. All ranks make as many.
 */
async function replayed(stream, graph, rounds) {
  const times = [];
  for (let round = -2; round < rounds; round++) {
    const first = stream.launch(graph);
    const begin = stream.record({ timed: true });
    const second = stream.launch(graph);
    const end = stream.record({ timed: true });
    await Promise.all([first, second]);
    await end.synchronize();
    if (round >= 0) times.push(end.elapsedMs(begin) * 1000);
    await Promise.all([begin.close(), end.close()]);
  }
  return times;
}

/** Some rows of a tensor, however many axes its rows are counted by. */
const rowsOf = (
  /** @type {import('@ep/core').DeviceTensor} */ tensor,
  /** @type {number} */ first,
  /** @type {number} */ count,
) => {
  const row = tensor.shape.at(-1) ?? 1;
  return viewTensor(tensor, [count, row], first * row);
};

/** All-reduces of a maximum, as many of each size in one graph. */
async function reduceTimes({ data: { sizes, calls, rounds, stagingBytes }, ...context }) {
  const { device, rank, worldSize } = context;
  const stream = device.stream();
  const group = await openGroup(context, stream, stagingBytes);
  const times = [];
  for (const bytes of sizes) {
    const buffer = device.allocate(bytes);
    const x = buffer.tensor('f32', [bytes / 4]);
    const graph = stream.capture(() => {
      for (let i = 0; i < calls; i++) void group.allReduce(x, { op: 'max' });
    });
    await writeTensor(new Float32Array(bytes / 4).fill(rank), x);
    const replays = await replayed(stream, graph, rounds);
    times.push(replays.map((us) => us / calls));
    const found = new Float32Array((await readTensor(x)).buffer, 0, bytes / 4);
    assert.ok(
      found.every((value) => value === worldSize - 1),
      `all-reduce of ${bytes} bytes`,
    );
    await graph.close();
    await buffer.close();
  }
  await group.destroy();
  await stream.close();
  return times;
}

/** All rows of each rank leave it, to all others in equal parts. */
function planOfOthers(worldSize, rows) {
  const pairs = [...Array(worldSize).keys()].flatMap((from) =>
    [...Array(worldSize).keys()].filter((to) => to !== from).map((to) => [from, to]),
  );
  const { shards } = shardsOfDocuments({
    worldSize,
    lengths: Int32Array.from(pairs, () => Math.floor(rows / (worldSize - 1))),
    homeRank: Int32Array.from(pairs, ([from]) => from),
    documentOffsets: Int32Array.from({ length: pairs.length + 1 }, (_, i) => i),
  });
  return planAttention(
    shards,
    Int32Array.from(pairs, ([, to]) => to),
  ).fwdQ;
}

/** Dispatches in which all rows go to others, `calls` of them in one graph, with as many blocks as each of these says. */
async function dispatchTimes({ transport, device, rank, worldSize, data: { bytes, rowBytes, blocks, calls, rounds } }) {
  const stream = device.stream();
  const words = rowBytes / 4;
  const plan = planOfOthers(worldSize, Math.floor(bytes / rowBytes));
  const [rows, received] = [plan.sendTokens[rank], plan.recvTokens[rank]];
  const ids = Array.from(plan.sendTokens, (count, from) =>
    Int32Array.from({ length: count }, (_, row) => (from << 24) + row),
  );
  const expected = movePlan(plan, ids, 1)[rank];
  const wordOf = (/** @type {number} */ id, /** @type {number} */ i) => (id ^ Math.imul(i, 0x9e3779b1)) | 0;
  const image = new Int32Array(rows * words);
  for (let row = 0; row < rows; row++) {
    const id = ids[rank][row];
    for (let i = 0; i < words; i++) image[row * words + i] = wordOf(id, i);
  }
  const own = device.allocate(image.byteLength);
  const q = own.tensor('i32', [rows, words]);
  await writeTensor(image, q);
  const specs = [{ name: 'q', plan, dtype: 'i32', rowShape: [words] }];
  const times = [];
  for (const count of blocks) {
    const dispatcher = await openDeviceDispatcher(transport, {
      ...{ stream, leaseBytes: leaseBytesFor(specs), leases: 2, timeoutMs: 60_000 },
      ...(count === undefined ? {} : { blocks: count }),
    });
    const { forward } = await dispatcher.bind({ forward: specs });
    let last;
    const graph = stream.capture(() => {
      for (let i = 0; i < calls; i++) {
        const { lease } = forward.enqueue({ q });
        last = lease.tensors.q;
        lease.release();
      }
    });
    await writeTensor(new Int32Array(received * words), last);
    const replays = await replayed(stream, graph, rounds);
    times.push({ blocks: dispatcher.shape.blocks, us: replays.map((us) => us / calls) });
    const found = new Int32Array((await readTensor(last)).buffer, 0, received * words);
    for (let row = 0; row < received; row++) {
      const id = expected[row];
      for (let i = 0; i < words; i++)
        if (found[row * words + i] !== wordOf(id, i)) throw new Error(`row ${row} from ${id >> 24}: word ${i}`);
    }
    await graph.close();
    await dispatcher.close();
  }
  await own.close();
  await stream.close();
  return { bytes: rows * rowBytes, times };
}

/** bf16 from 0.5 to 2. */
function rowOf(hidden, rank, token) {
  const row = new Uint16Array(hidden);
  const factor = 2654435761 + 40_503 * (rank * 8192 + token);
  for (let h = 0; h < hidden; h++) row[h] = 0x3f00 + (Math.imul(h + 1, factor) >>> 24);
  return row;
}
const factorOf = (/** @type {number} */ expert) => 1 + (expert % 64) / 64;

/** A dispatch and a combine of experts, `pairs` of them in one graph, by so many blocks and lanes; experts multiply by a factor of theirs, once for all. */
async function timeExperts({ transport, device, rank, worldSize, data }, stream, grid) {
  const { mode, payload, offered, pairs, rounds, ...shape } = data;
  const { tokens, hidden, topK, experts } = shape;
  const buffer = await openDeviceMoeBuffer(transport, {
    ...{ stream, mode, experts, hidden, topK, maxTokens: tokens, dtype: 'bf16', calls: 1, timeoutMs: 60_000 },
    ...{ zeroCopyCombine: offered },
    ...grid,
    ...(payload === undefined ? {} : { payload }),
  });
  const memory = [];
  const take = (dtype, dims) => {
    memory.push(device.allocate(dims.reduce((product, extent) => product * extent, elementBytes(dtype))));
    return memory.at(-1).tensor(dtype, dims);
  };
  const chosen = [...Array(worldSize).keys()].map((one) => choicesOf(tokens, topK, experts, one));
  const weighed = Float32Array.from({ length: tokens * topK }, (_, i) => draw(4, rank, i));
  const x = take('bf16', [tokens, hidden]);
  const out = take('bf16', [tokens, hidden]);
  const [choices, weights] = [take('i32', [tokens, topK]), take('f32', [tokens, topK])];
  const rows = Array.from({ length: tokens }, (_, token) => rowOf(hidden, rank, token));
  for (const [token, row] of rows.entries()) await writeTensor(row, rowsOf(x, token, 1));
  await writeTensor(chosen[rank], choices);
  await writeTensor(weighed, weights);
  const first = buffer.map.rankOffsets[rank];
  const bound = payload === undefined ? 0 : 0.07;
  const received = await buffer.dispatch(x, chosen[rank]);
  const y = offered ? received.combineBuffer : take('bf16', [Math.max(1, buffer.receiveRows), hidden]);
  const blocksOfRows = [...received.layoutRange].map((range, i) => {
    const expert = Math.floor(i / worldSize);
    return {
      ...{ expert, from: i % worldSize, count: Number(range & 0xffffffffn) },
      row: received.blockStart[expert] + Number(range >> 32n),
    };
  });
  /** Looks at every row that came, and says what its expert makes of it. */
  const look = async () => {
    let seen = 0;
    for (const { expert, from, count, row } of blocksOfRows) {
      const wanted = [...Array(tokens).keys()].filter((token) =>
        chosen[from].subarray(token * topK, (token + 1) * topK).includes(first + expert),
      );
      assert.equal(count, wanted.length, `rows of rank ${from} for expert ${first + expert}`);
      if (count === 0) continue;
      const bytes = await readTensor(rowsOf(received.x, row, count));
      const found = decode(received.x.dtype, viewStorage(received.x.dtype, bytes.buffer, 0, count * hidden));
      if (received.scales !== undefined) {
        const [bands, room] = received.scales.shape;
        for (let band = 0; band < bands; band++) {
          const factors = viewTensor(received.scales, [count], band * room + row);
          const scales = new Float32Array((await readTensor(factors)).buffer);
          for (let i = 0; i < count; i++)
            for (let h = band * 128; h < (band + 1) * 128; h++) found[i * hidden + h] *= scales[i];
        }
      }
      for (const [i, token] of wanted.entries()) {
        const sent = decode('bf16', rowOf(hidden, from, token));
        for (let h = 0; h < hidden; h++) {
          if (Math.abs(found[i * hidden + h] - sent[h]) > bound * sent[h])
            throw new Error(`row ${row + i}, of token ${token} of rank ${from}: element ${h}`);
        }
      }
      await writeTensor(
        encode(
          'bf16',
          found.map((value) => value * factorOf(first + expert)),
        ),
        rowsOf(y, row, count),
      );
      seen += count;
    }
    return seen;
  };
  const sums = async () => {
    const found = decode('bf16', new Uint16Array((await readTensor(out)).buffer, 0, tokens * hidden));
    for (const [token, row] of rows.entries()) {
      let factor = 0;
      for (let k = token * topK; k < (token + 1) * topK; k++) factor += weighed[k] * factorOf(chosen[rank][k]);
      const sent = decode('bf16', row);
      for (let h = 0; h < hidden; h++) {
        const expected = factor * sent[h];
        if (Math.abs(found[token * hidden + h] - expected) > (bound + 0.01) * expected)
          throw new Error(`sum of token ${token}: element ${h}: ${found[token * hidden + h]}, expected ${expected}`);
      }
    }
  };
  const seen = await look();
  await buffer.combine(viewTensor(y, received.x.shape), received.handle, { out, weights: weighed });
  await sums();
  const graph = stream.capture(() => {
    for (let i = 0; i < pairs; i++) {
      const { x: there, combineBuffer, handle } = buffer.captureDispatch(x, choices);
      assert.equal(there.address, received.x.address);
      buffer.captureCombine(offered ? combineBuffer : viewTensor(y, there.shape), handle, { out, weights });
    }
  });
  // What the last replay leaves is looked at as the first call was.
  for (const { count, row } of blocksOfRows) {
    const rowsThere = rowsOf(received.x, row, count);
    await writeTensor(createStorage(rowsThere.dtype, count * hidden), rowsThere);
  }
  await writeTensor(new Uint16Array(tokens * hidden), out);
  await transport.barrier({ timeoutMs: 60_000 });
  const replays = await replayed(stream, graph, rounds);
  assert.equal(await look(), seen);
  await sums();
  await transport.barrier({ timeoutMs: 60_000 });
  const taken = buffer.shape;
  await graph.close();
  await buffer.close();
  for (const one of memory) await one.close();
  return { rows: seen, ...taken, us: replays.map((us) => us / pairs) };
}

/** By blocks and lanes of each of these shapes, in turn. */
async function expertTimes({ data: { grids, ...data }, ...context }) {
  const stream = context.device.stream();
  const times = [];
  for (const grid of grids) times.push(await timeExperts({ ...context, data }, stream, grid));
  await stream.close();
  return times;
}

export const timesScenarios = { reduceTimes, dispatchTimes, expertTimes };
