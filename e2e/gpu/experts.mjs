// What a rank does in the cases of experts: every row that arrives is looked at, experts multiply by their number, and each token's sum is computed once more.
import assert from 'node:assert/strict';
import { setTimeout as sleep } from 'node:timers/promises';
import { decode, elementBytes, encode, viewStorage } from '@ep/core';
import { openDeviceMoeBuffer, readTensor, writeTensor } from '@ep/cuda-kernels';
import { native } from '@ep/native';
import { codeOf } from '../code-of.mjs';
import { manyReplays } from './tensors.mjs';

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

/** All rows of the received tensor in f32, scales applied; row r begins at element r * hidden. `rounded`: scales are powers of two. */
async function receivedRows({ x, scales }, hidden, rounded) {
  const rows = x.shape.slice(0, -1).reduce((product, extent) => product * extent, 1);
  const values = floats(x.dtype, await readTensor(x), rows * hidden);
  if (scales === undefined) return values;
  const [, room] = scales.shape;
  const bytes = await readTensor(scales);
  const factors = scales.dtype === 'f32' ? new Float32Array(bytes.buffer) : decode(scales.dtype, bytes);
  // As the name says: powers of two have no significand.
  if (rounded) for (const one of factors) assert.ok(one === 0 || Number.isInteger(Math.log2(one)), `scale ${one}`);
  const out = Float32Array.from(values);
  for (let row = 0; row < rows; row++) {
    for (let h = 0; h < hidden; h++) out[row * hidden + h] *= factors[Math.floor(h / 128) * room + row];
  }
  return out;
}

/** A whole call, or its halves one after the other. */
const whole = async (halves, buffer, name, ...rest) =>
  halves ? (await buffer[`${name}Send`](...rest)).receive() : buffer[name](...rest);

/**
 * Calls in either form, in one dtype and payload; `absent` takes no part in the second one. `halves`: every other call in two. `kept`: every other call goes by the layout of the one before it.
 * `offered`: results of some calls of some ranks stay where their experts write them.
 */
export async function experts({ transport, device, rank, worldSize, data }) {
  const { mode, dtype, payload, combinePayload, roundScales, hidden, maxTokens, calls: slots } = data;
  const { absent, halves, kept, offered } = data;
  const stream = device.stream();
  const routed = (call) => (kept ? call - (call % 2) : call);
  const buffer = await openDeviceMoeBuffer(transport, {
    ...{ stream, mode, experts: EXPERTS, maxTokens, topK: TOP_K, hidden, dtype, calls: slots, blocks: 2, lanes: 64 },
    ...(payload === undefined ? {} : { payload }),
    ...(combinePayload === undefined ? {} : { combinePayload }),
    ...(roundScales === undefined ? {} : { roundScales }),
    ...(mode === 'high-throughput' ? { alignment: 4 } : {}),
    ...(kept ? { layouts: 1 } : {}),
    ...(offered ? { zeroCopyCombine: true } : {}),
    timeoutMs: absent === undefined ? 20_000 : 1000,
  });
  const first = buffer.map.rankOffsets[rank];
  const plain = dtype === 'f32' ? 1e-6 : 1e-2;
  const bound = payload === undefined ? plain : 5e-2;
  // 9 bits of a logarithm hold a number within some hundredths.
  const boundBack = combinePayload === undefined ? bound : 8e-2;
  const rowBytes = hidden * elementBytes(dtype);
  const [x, y, out] = [maxTokens, Math.max(1, buffer.receiveRows), maxTokens].map((rows) =>
    device.allocate(rows * rowBytes),
  );
  let compared = 0;
  let layout;
  for (let call = 0; call < (kept ? 8 : 4); call++) {
    const apart = halves === true && call % 2 === 1;
    if (absent === rank && call >= 1) break;
    const gone = absent !== undefined && call >= 1 ? absent : -1;
    const tokens = tokensOf(rank, routed(call), maxTokens);
    const own = Array.from({ length: tokens }, (_, token) => rowOf(rank, call, token, hidden));
    const choices = own.map((_, token) => choicesOf(rank, routed(call), token));
    const source = x.tensor(dtype, [tokens, hidden]);
    await writeTensor(storage(dtype, Float32Array.from(own.flatMap((row) => [...row]))), source);
    const keepLayout = kept === true && call % 2 === 0;
    const by = kept && !keepLayout ? layout : Int32Array.from(choices.flat());
    const received = await whole(apart, buffer, 'dispatch', source, by, { keepLayout });
    ({ layout } = keepLayout ? received : { layout });
    const rows = await receivedRows(received, hidden, roundScales);
    const results = new Float32Array(rows.length);
    for (let e = 0; e < received.counts.length; e++) {
      let found = 0;
      for (let from = 0; from < worldSize; from++) {
        const range = received.layoutRange[e * worldSize + from];
        const [begin, count] = [Number(range >> 32n), Number(range & 0xffffffffn)];
        const theirs = Array.from({ length: tokensOf(from, routed(call), maxTokens) }, (_, token) => token);
        const wanted = theirs.filter((token) => choicesOf(from, routed(call), token).includes(first + e));
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
    const answer = offered && (call + rank) % 3 !== 0 ? received.combineBuffer : y.tensor(dtype, shape);
    await writeTensor(storage(dtype, results), answer);
    const weights = Float32Array.from(
      choices.flatMap((_, token) => choices[token].map((_, k) => weightOf(rank, call, token, k))),
    );
    const into = out.tensor(dtype, [tokens, hidden]);
    const combined = await whole(apart, buffer, 'combine', answer, received.handle, { out: into, weights });
    if (kept && !keepLayout) layout.release();
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
      assert.ok(error <= boundBack, `call ${call}: sums: error ${error}`);
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

/**
 * What experts write where results are offered is what their sources read, and nothing else: between the halves of a combine, when nobody has summed yet, the results change once more.
 */
export async function offeredExperts({ transport, device, rank, worldSize, data: { mode, hidden } }) {
  const stream = device.stream();
  const [tokens, topK] = [3, 2];
  const buffer = await openDeviceMoeBuffer(transport, {
    ...{
      stream,
      mode,
      experts: 2 * worldSize,
      maxTokens: 4,
      topK,
      hidden,
      dtype: 'bf16',
      calls: 1,
      blocks: 2,
      lanes: 64,
    },
    ...{ zeroCopyCombine: true, timeoutMs: 20_000 },
  });
  const memory = [0, 0].map(() => device.allocate(tokens * hidden * 2));
  const [x, out] = memory.map((one) => one.tensor('bf16', [tokens, hidden]));
  const filled = (value, count) => encode('bf16', new Float32Array(count).fill(value));
  const sums = [];
  for (let call = 0; call < 3; call++) {
    await writeTensor(filled(rank + 1, tokens * hidden), x);
    const choices = Int32Array.from({ length: tokens * topK }, (_, i) => (rank * 2 + call + 1 + i) % (2 * worldSize));
    const { combineBuffer, handle } = await buffer.dispatch(x, choices);
    const elements = combineBuffer.shape.reduce((product, extent) => product * extent, 1);
    await writeTensor(filled(1000, elements), combineBuffer);
    const hook = await buffer.combineSend(combineBuffer, handle, { out });
    await writeTensor(filled(call + 3, elements), combineBuffer);
    await transport.barrier({ timeoutMs: 20_000 });
    await hook.receive();
    const found = new Set(floats('bf16', await readTensor(out), tokens * hidden));
    assert.deepEqual([...found], [topK * (call + 3)]);
    sums.push(...found);
    // Nobody writes there before all have summed.
    await transport.barrier({ timeoutMs: 20_000 });
  }
  await buffer.close();
  for (const one of memory) await one.close();
  await stream.close();
  return sums;
}

/**
 * Two calls of experts, who return rows as they are, as one graph: replayed with new tokens, choices and weights on the device, many times at once, around a call that is not captured, and without a rank
 * that does not come any more.
 */
export async function graphExperts({ transport, device, rank, worldSize, data }) {
  const { mode, offered, replays = manyReplays(device), absent } = data;
  const stream = device.stream();
  const [tokens, topK, hidden, experts] = [6, 2, 16, 2 * worldSize];
  const buffer = await openDeviceMoeBuffer(transport, {
    ...{ stream, mode, experts, maxTokens: tokens, topK, hidden, dtype: 'f32', calls: 2, blocks: 2, lanes: 64 },
    ...{ zeroCopyCombine: offered, timeoutMs: absent === undefined ? 20_000 : 1000 },
  });
  const room = Math.max(1, buffer.receiveRows);
  const memory = [tokens, tokens, tokens, room].map((rows) => device.allocate(rows * hidden * 4));
  const [x, between, out] = memory.map((one) => one.tensor('f32', [tokens, hidden]));
  const small = [0, 0].map(() => device.allocate(tokens * topK * 4));
  const choices = small[0].tensor('i32', [tokens, topK]);
  const weights = small[1].tensor('f32', [tokens, topK]);
  const codes = { 'not captured': await codeOf(() => buffer.captureDispatch(x, choices)) };
  let counts;
  const capture = () =>
    stream.capture(() => {
      for (const [from, to] of [
        [x, between],
        [between, out],
      ]) {
        const received = buffer.captureDispatch(from, choices);
        counts ??= received.counts;
        const y = offered ? received.combineBuffer : memory[3].tensor('f32', received.x.shape);
        stream.copy(received.x, y);
        buffer.captureCombine(y, received.handle, { out: to, weights });
      }
    });
  const graph = capture();
  const first = buffer.map.rankOffsets[rank];
  const chosen = (from, step) =>
    Array.from({ length: tokens }, (_, token) => draw(7, from, step, token)).map((drawn) => [
      Math.floor(drawn * experts),
      drawn < 0.2 ? -1 : (Math.floor(drawn * experts) + 1) % experts,
    ]);
  let sent = 0;
  const fill = async (step) => {
    const own = chosen(rank, step);
    await writeTensor(
      Float32Array.from({ length: tokens * hidden }, (_, i) => draw(8, rank, step, i)),
      x,
    );
    await writeTensor(Int32Array.from(own.flat()), choices);
    await writeTensor(
      Float32Array.from({ length: tokens * topK }, (_, i) => draw(9, rank, step, i)),
      weights,
    );
  };
  const check = async (step, gone = -1) => {
    const expected = new Float32Array(tokens * hidden);
    for (const [token, ks] of chosen(rank, step).entries()) {
      const all = ks.reduce(
        (sum, expert, k) =>
          sum + (expert < 0 || buffer.map.rank[expert] === gone ? 0 : draw(9, rank, step, token * topK + k)),
        0,
      );
      for (let h = 0; h < hidden; h++)
        expected[token * hidden + h] = draw(8, rank, step, token * hidden + h) * all * all;
    }
    const found = new Float32Array((await readTensor(out)).buffer);
    assert.ok(relative(found, expected) < 1e-6, `replay ${step}: sums differ`);
    const here = new Int32Array((await readTensor(counts)).buffer);
    for (const [e, count] of here.entries()) {
      let wanted = 0;
      for (let from = 0; from < worldSize; from++) {
        if (from !== gone)
          wanted += chosen(from, step)
            .flat()
            .filter((expert) => expert === first + e).length;
      }
      assert.equal(count, wanted, `replay ${step}: rows of expert ${first + e}`);
      sent += 2 * wanted;
    }
  };
  let steps = 0;
  const step = async (launches = 1) => {
    await fill(steps);
    await transport.barrier({ timeoutMs: 60_000 });
    const under = Array.from({ length: launches }, () => stream.launch(graph));
    codes.busy ??= await codeOf(() => buffer.dispatch(x, Int32Array.from(chosen(rank, steps).flat())));
    await Promise.all(under);
    const before = sent;
    await check(steps++);
    sent += (launches - 1) * (sent - before);
  };
  for (let i = 0; i < replays; i++) await step();
  await step(20);
  await fill(steps);
  const plain = await buffer.dispatch(x, Int32Array.from(chosen(rank, steps).flat()));
  sent += plain.counts.reduce((sum, count) => sum + count, 0);
  codes.held = await codeOf(() => stream.launch(graph));
  await plain.handle.release();
  const other = await buffer.dispatch(x, new Int32Array(tokens * topK).fill(-1));
  await other.handle.release();
  await step();
  const totals = buffer.totals().reduce((sum, one) => sum + one, 0n);
  assert.equal(Number(totals), sent);
  codes.half = await codeOf(() => stream.capture(() => void buffer.dispatchSend(x, new Int32Array(tokens * topK))));
  codes.left = codes.again = 'no error';
  if (absent !== undefined) {
    await fill(steps);
    await transport.barrier({ timeoutMs: 60_000 });
    if (rank !== absent) {
      await stream.launch(graph);
      await check(steps, absent);
      codes.left = await codeOf(() => stream.launch(graph));
      codes.again = await codeOf(capture);
      for (let slot = 0; slot < 2; slot++) {
        const { handle } = await buffer.dispatch(x, new Int32Array(tokens * topK).fill(-1));
        await handle.release();
      }
      const again = capture();
      await stream.launch(again);
      await check(steps, absent);
      await again.close();
    }
    await transport.barrier({ timeoutMs: 60_000 });
  }
  const losses = [...buffer.losses];
  await graph.close();
  await buffer.close();
  for (const one of [...memory, ...small]) await one.close();
  await stream.close();
  return { codes, losses, replays };
}

/**
 * What may not change a graph of experts, or begin a replay of it: a capture that fails on one rank, calls in which each rank goes by itself, a second stream, a call that was captured and released.
 */
export async function keptGraphExperts({ transport, device, rank, worldSize, data: { mode } }) {
  const [stream, second] = [device.stream(), device.stream()];
  const [tokens, hidden] = [2 * worldSize, 16];
  const buffer = await openDeviceMoeBuffer(transport, {
    ...{ stream, mode, experts: 2 * worldSize, maxTokens: tokens, topK: 1, hidden, dtype: 'f32', calls: 2, blocks: 2 },
    ...{ lanes: 64, timeoutMs: 20_000 },
  });
  const memory = [tokens, tokens, Math.max(1, buffer.receiveRows), 1].map((rows) => device.allocate(rows * hidden * 4));
  const [x, out] = memory.slice(0, 2).map((one) => one.tensor('f32', [tokens, hidden]));
  const choices = memory[3].tensor('i32', [tokens, 1]);
  const chosen = Int32Array.from({ length: tokens }, (_, token) => token);
  await writeTensor(chosen, choices);
  let sent = 0;
  const put = () => {
    const received = buffer.captureDispatch(x, choices);
    const y = memory[2].tensor('f32', received.x.shape);
    stream.copy(received.x, y);
    buffer.captureCombine(y, received.handle, { out });
  };
  const replay = async (graph) => {
    const values = Float32Array.from({ length: tokens * hidden }, (_, i) => ++sent + i + rank);
    await writeTensor(values, x);
    await stream.launch(graph);
    assert.deepEqual(new Float32Array((await readTensor(out)).buffer), values, 'a row of some rank is missing');
  };
  const codes = {};
  if (rank === 0) {
    codes.capture = await codeOf(() =>
      stream.capture(() => {
        put();
        buffer.captureDispatch(x, choices);
        throw Object.assign(new Error('in the body'), { code: 'of the body' });
      }),
    );
  }
  const graph = stream.capture(put);
  await replay(graph);
  const alone = Uint8Array.from({ length: worldSize }, (_, one) => (one === rank ? 1 : 0));
  for (let call = 0; call < 3; call++) {
    const { handle, counts } = await buffer.dispatch(x, chosen, { activeRanks: alone });
    assert.deepEqual([...counts], [1, 1]);
    await handle.release();
  }
  const other = stream.capture(put);
  await replay(graph);
  await replay(other);
  const under = stream.launch(graph);
  codes.stream = await codeOf(() => second.launch(graph));
  codes['stream of another graph'] = await codeOf(() => second.launch(other));
  await under;
  await second.launch(graph);
  let received;
  const uncombined = stream.capture(() => {
    received = buffer.captureDispatch(x, choices);
  });
  codes.held = await codeOf(() => stream.launch(uncombined));
  await received.handle.release();
  codes.released = await codeOf(() => stream.launch(uncombined));
  await replay(other);
  const losses = [...buffer.losses];
  for (const one of [graph, other, uncombined, buffer, ...memory, stream, second]) await one.close();
  return { codes, losses };
}

/**
 * A rank is killed where the others are about to await it, in a dispatch, a combine or a replay, and another one comes later than that: milliseconds that each of them took, and whom it lost. Each rank
 * has one expert, which returns rows as they are, and sends it one token.
 */
export async function killedExperts({ transport, device, rank, worldSize, data, ready }) {
  const { mode, moment, victim, late, lateMs } = data;
  const replays = moment.startsWith('replay');
  const stream = device.stream();
  const [tokens, hidden] = [worldSize, 16];
  const buffer = await openDeviceMoeBuffer(transport, {
    ...{ stream, mode, experts: worldSize, maxTokens: tokens, topK: 1, hidden, dtype: 'f32', calls: 1 },
    ...{ blocks: 2, lanes: 64, timeoutMs: 30_000 },
  });
  const memory = [tokens, tokens, Math.max(1, buffer.receiveRows), 1].map((rows) => device.allocate(rows * hidden * 4));
  const [x, out] = memory.slice(0, 2).map((one) => one.tensor('f32', [tokens, hidden]));
  const chosen = Int32Array.from({ length: tokens }, (_, token) => token);
  const choices = memory[3].tensor('i32', [tokens, 1]);
  await writeTensor(chosen, choices);
  let calls = 0;
  const rowOf = (token) => 1 + token + rank * tokens + calls * 100;
  const fill = async () => {
    calls++;
    const values = Float32Array.from({ length: tokens * hidden }, (_, i) => rowOf(Math.floor(i / hidden)));
    await writeTensor(values, x);
  };
  const check = async (gone) => {
    const sums = new Float32Array((await readTensor(out)).buffer);
    const found = Array.from(chosen, (token) => sums[token * hidden + hidden - 1]);
    assert.deepEqual(
      found,
      Array.from(chosen, (token) => (token === gone ? 0 : rowOf(token))),
    );
  };
  let graph;
  if (replays) {
    const halves = moment === 'replay of halves';
    graph = stream.capture(() => {
      const received = halves ? buffer.captureDispatchSend(x, choices).receive() : buffer.captureDispatch(x, choices);
      const y = memory[2].tensor('f32', received.x.shape);
      stream.copy(received.x, y);
      if (halves) buffer.captureCombineSend(y, received.handle, { out }).receive();
      else buffer.captureCombine(y, received.handle, { out });
    });
  }
  /** As if the rank were about to call: whoever is killed never does. */
  const come = async () => {
    if (rank === victim) {
      await ready();
      await new Promise(() => {});
    }
    if (rank === late) await sleep(lateMs);
  };
  let ms = 0;
  const timed = async (work) => {
    const began = performance.now();
    const value = await work();
    ms = performance.now() - began;
    return value;
  };
  const lostOf = ({ lostRanks }) => [...lostRanks].flatMap((lost, r) => (lost ? [r] : []));
  const call = async (dies) => {
    await fill();
    if (dies && replays) {
      await come();
      await timed(() => stream.launch(graph));
      return check(victim);
    }
    if (dies && moment === 'dispatch') await come();
    const dispatch = async () => buffer.dispatch(x, chosen);
    const received = await (dies && moment === 'dispatch' ? timed(dispatch) : dispatch());
    const gone = buffer.losses.has(victim) ? [victim] : [];
    assert.deepEqual(lostOf(received), gone);
    assert.deepEqual([...received.counts], [worldSize - gone.length]);
    const dying = dies && moment === 'combine';
    if (dying) await come();
    const combine = async () => buffer.combine(received.x, received.handle, { out });
    const combined = await (dying ? timed(combine) : combine());
    assert.deepEqual(lostOf(combined), dying ? [victim] : gone);
    await check(dying ? victim : gone[0]);
  };
  await call(false);
  await call(true);
  for (let i = 0; i < 3; i++) await call(false);
  const losses = [...buffer.losses];
  await graph?.close();
  for (const one of [buffer, ...memory, stream]) await one.close();
  return { ms, losses };
}

/** Buffers of as many blocks as there may be, one after the other: a closed one leaves its share of the GPU, whatever of it is not collected yet. How many were opened. */
export async function reopenedExperts({ transport, device }) {
  const stream = device.stream();
  const memory = device.allocate(4096);
  const x = memory.tensor('f32', [2, 16]);
  let opened = 0;
  for (; opened < 5; opened++) {
    const buffer = await openDeviceMoeBuffer(transport, {
      ...{ stream, mode: 'low-latency', experts: EXPERTS, maxTokens: 4, topK: 2, hidden: 16, dtype: 'f32', calls: 1 },
    });
    const { handle } = await buffer.dispatch(x, Int32Array.of(0, 1, 2, -1));
    await handle.release();
    await buffer.close();
  }
  await memory.close();
  await stream.close();
  return opened;
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
  await attempt('kept', () => buffer.dispatch(x, choices, { keepLayout: true }));
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
  await attempt('layouts of low latency', () => openDeviceMoeBuffer(transport, { ...options, layouts: 1 }));
  await attempt('cast results', () =>
    openDeviceMoeBuffer(transport, { ...options, combinePayload: 'logfmt10', zeroCopyCombine: true }),
  );
  const keeping = await openDeviceMoeBuffer(transport, {
    ...{ ...options, mode: 'high-throughput', layouts: 1, blocks: 1, lanes: 32 },
  });
  const first = await keeping.dispatch(x, choices, { keepLayout: true });
  await attempt('held layout', () => keeping.dispatch(x, first.layout));
  await attempt('another layout', () => keeping.dispatch(x, choices, { keepLayout: true }));
  await first.handle.release();
  await attempt('layout of others', () => keeping.dispatch(x, { tokens: 2, release() {} }));
  const send = await keeping.dispatchSend(x, first.layout);
  const second = await send.receive();
  await attempt('received twice', () => send.receive());
  first.layout.release();
  await attempt('released layout', () => keeping.dispatch(x, first.layout));
  await second.handle.release();
  const third = await keeping.dispatch(x, choices, { keepLayout: true });
  await third.handle.release();
  await keeping.close();
  await memory.close();
  await stream.close();
  return codes;
}
