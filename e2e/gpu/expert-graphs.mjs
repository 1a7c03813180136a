// What a rank does in the cases of graphs of calls of experts: halves of two micro-batches between each other, kept layouts, experts that compute. Each replay leaves the bytes of the same calls that are not captured.
import assert from 'node:assert/strict';
import { elementBytes, encode } from '@ep/core';
import { openDeviceMoeBuffer, readTensor, viewTensor, writeTensor } from '@ep/cuda-kernels';
import { codeOf } from '../code-of.mjs';

const TOP_K = 2;
const MAX_TOKENS = 6;

/** Numbers that every rank can make again. Each word is mixed into all bits, so that neighbours draw different ones. */
const draw = (...words) => {
  let h = 2166136261;
  for (const word of words) {
    h = Math.imul(h ^ word, 0x85ebca6b);
    h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
    h ^= h >>> 16;
  }
  return (h >>> 0) / 2 ** 32;
};

const numbers = (dtype, count, ...words) => {
  const values = Float32Array.from({ length: count }, (_, i) => draw(...words, i) * 2 - 1);
  return dtype === 'f32' ? values : encode(dtype, values);
};

/** Different experts, some choices left open. */
const choicesOf = (rank, batch, step, experts) =>
  Int32Array.from({ length: MAX_TOKENS * TOP_K }, (_, i) => {
    const drawn = draw(1, rank, batch, step, Math.floor(i / TOP_K));
    const first = Math.floor(drawn * experts);
    return i % TOP_K === 0 ? first : drawn < 0.2 ? -1 : (first + 1) % experts;
  });

const valuesOn = async (tensor, kind) => new kind((await readTensor(tensor)).buffer);

/** What a dispatch has left, copied: of one in a graph, counts and the rest lie on the device. */
async function takenOf({ x, scales, ...said }) {
  const counted = said.counts instanceof Int32Array;
  const [i32, i64] = [Int32Array, BigInt64Array].map((kind) => (one) => (counted ? one.slice() : valuesOn(one, kind)));
  return {
    counts: await i32(said.counts),
    blockStart: await i32(said.blockStart),
    layoutRange: await i64(said.layoutRange),
    sourceToken: await i32(said.sourceToken),
    sourceChoice: await i32(said.sourceChoice),
    x: Buffer.from(await readTensor(x)),
    rowBytes: x.shape.at(-1) * elementBytes(x.dtype),
    ...(scales && {
      scales: Buffer.from(await readTensor(scales)),
      scaleBytes: elementBytes(scales.dtype),
      room: scales.shape[1],
    }),
  };
}

/** Row by row, and of each row where it came from. How many there are. */
function sameRows(found, wanted, worldSize, what) {
  assert.deepEqual(found.counts, wanted.counts, `${what}: counts`);
  assert.deepEqual(found.layoutRange, wanted.layoutRange, `${what}: runs`);
  const locals = wanted.counts.length;
  assert.deepEqual(found.blockStart.slice(0, locals), wanted.blockStart.slice(0, locals), `${what}: blocks`);
  let rows = 0;
  for (const [run, range] of wanted.layoutRange.entries()) {
    const first = wanted.blockStart[Math.floor(run / worldSize)] + Number(range >> 32n);
    for (let row = first; row < first + Number(range & 0xffffffffn); row++, rows++) {
      for (const name of ['sourceToken', 'sourceChoice'])
        assert.equal(found[name][row], wanted[name][row], `${what}: ${name} of row ${row}`);
      const [here, there] = [found, wanted].map(({ x, rowBytes }) => x.subarray(row * rowBytes, (row + 1) * rowBytes));
      assert.ok(here.equals(there), `${what}: row ${row}`);
      for (let at = row; wanted.scales && at * wanted.scaleBytes < wanted.scales.length; at += wanted.room) {
        const [one, other] = [found, wanted].map(({ scales, scaleBytes }) =>
          scales.subarray(at * scaleBytes, (at + 1) * scaleBytes).toString('hex'),
        );
        assert.equal(one, other, `${what}: scales of row ${row}`);
      }
    }
  }
  return rows;
}

/** As if that rank had sent nothing to the places that its rows have. */
function withoutRank({ layoutRange, counts }, rank, worldSize) {
  for (let run = rank; run < layoutRange.length; run += worldSize) {
    counts[(run - rank) / worldSize] -= Number(layoutRange[run] & 0xffffffffn);
    layoutRange[run] = (layoutRange[run] >> 32n) << 32n;
  }
}

/** A buffer and two micro-batches of its calls: tensors on the device that the graph and plain calls read alike. */
async function openBatches({ transport, device, rank, worldSize, data }) {
  const { mode, dtype, payload, hidden, kept, layouts = 2, timeoutMs = 20_000 } = data;
  const stream = device.stream();
  const experts = 2 * worldSize;
  const buffer = await openDeviceMoeBuffer(transport, {
    ...{ stream, mode, experts, maxTokens: MAX_TOKENS, topK: TOP_K, hidden, dtype, calls: 2, blocks: 2, lanes: 64 },
    ...(payload && { payload }),
    ...(kept && { layouts }),
    timeoutMs,
  });
  const memory = [];
  const allocate = (of, shape) => {
    const elements = shape.reduce((product, extent) => product * extent, 1);
    memory.push(device.allocate(Math.max(64, elements * elementBytes(of))));
    return memory.at(-1).tensor(of, shape);
  };
  const room = Math.max(1, buffer.receiveRows);
  const shapeOfY = mode === 'low-latency' ? [2, worldSize * MAX_TOKENS, hidden] : [room, hidden];
  const batches = [0, 1].map((batch) => ({
    ...{ batch, x: allocate(dtype, [MAX_TOKENS, hidden]), y: allocate(dtype, shapeOfY) },
    ...{ choices: allocate('i32', [MAX_TOKENS, TOP_K]), weights: allocate('f32', [MAX_TOKENS, TOP_K]) },
    ...{ out: allocate(dtype, [MAX_TOKENS, hidden]), plainOut: allocate(dtype, [MAX_TOKENS, hidden]) },
  }));
  const weightsOf = (batch, step) => numbers('f32', MAX_TOKENS * TOP_K, 2, rank, batch, step);
  const fill = async (step) => {
    for (const { batch, x, y, choices, weights } of batches) {
      await writeTensor(numbers(dtype, MAX_TOKENS * hidden, 3, rank, batch, step), x);
      await writeTensor(numbers(dtype, room * hidden, 4, rank, batch, step), y);
      await writeTensor(choicesOf(rank, batch, kept ? 0 : step, experts), choices);
      await writeTensor(weightsOf(batch, step), weights);
    }
  };
  /** The same calls, not captured, one behind the other. */
  const plain = async (step, layouts) => {
    const taken = [];
    for (const { batch, x, y, plainOut } of batches) {
      const choices = layouts?.[batch] ?? choicesOf(rank, batch, kept ? 0 : step, experts);
      const received = await buffer.dispatch(x, choices);
      taken.push(await takenOf(received));
      const answer = mode === 'low-latency' ? y : viewTensor(y, received.x.shape);
      await buffer.combine(answer, received.handle, { out: plainOut, weights: weightsOf(batch, step) });
    }
    return taken;
  };
  const close = async () => {
    await buffer.close();
    for (const one of memory) await one.close();
    await stream.close();
  };
  return { buffer, stream, batches, fill, plain, close, allocate };
}

/**
 * Two micro-batches in one graph, each half between those of the other. `kept`: by layouts of earlier dispatches. `absent`: does not come to the last replay.
 */
async function halvesGraph(context) {
  const { transport, rank, worldSize, data } = context;
  const { kept, absent, replays } = data;
  const { buffer, stream, batches, fill, plain, close } = await openBatches(context);
  const codes = {};
  let layouts;
  if (kept) {
    await fill(0);
    layouts = [];
    for (const { batch, x } of batches) {
      const received = await buffer.dispatch(x, choicesOf(rank, batch, 0, 2 * worldSize), { keepLayout: true });
      layouts.push(received.layout);
      await received.handle.release();
    }
  }
  let received;
  const graph = stream.capture(() => {
    const sent = batches.map(({ batch, x, choices }) => buffer.captureDispatchSend(x, layouts?.[batch] ?? choices));
    // Rows travel meanwhile, and nothing of this rank awaits them.
    stream.copy(batches[0].x, batches[0].plainOut);
    received = sent.map((hook) => hook.receive());
    const back = batches.map(({ batch, y, out, weights }) =>
      buffer.captureCombineSend(y, received[batch].handle, { out, weights }),
    );
    for (const hook of back) hook.receive();
  });
  let rows = 0;
  /** Of the plain calls that the last replays were compared with. */
  let wanted;
  const takenOfReplay = async () => {
    const taken = [];
    for (const one of received) taken.push(await takenOf(one));
    return taken;
  };
  const compare = (found, step) => {
    for (const { batch } of batches)
      rows += sameRows(found[batch], wanted[batch], worldSize, `replay ${step}, batch ${batch}`);
  };
  const check = async (step) => {
    const found = await takenOfReplay();
    wanted = await plain(step, layouts);
    compare(found, step);
    for (const { batch, out, plainOut } of batches)
      assert.deepEqual(await readTensor(out), await readTensor(plainOut), `replay ${step}, batch ${batch}: sums`);
  };
  for (let step = 0; step < replays; step++) {
    await fill(step);
    await stream.launch(graph);
    await check(step);
  }
  // Replays behind each other, without a word in between.
  await fill(replays);
  await Promise.all(Array.from({ length: 5 }, () => stream.launch(graph)));
  await check(replays);
  if (absent !== undefined) {
    await fill(replays);
    await transport.barrier({ timeoutMs: 60_000 });
    if (rank !== absent) {
      await stream.launch(graph);
      if (kept) {
        // Rows of a rank that was given up alive may still come: plain calls by a layout with them are refused.
        for (const one of wanted) withoutRank(one, absent, worldSize);
        compare(await takenOfReplay(), replays);
      } else {
        await check(replays);
      }
      codes.lost = await codeOf(() => stream.launch(graph));
    }
    await transport.barrier({ timeoutMs: 60_000 });
  } else if (kept) {
    layouts[1].release();
    codes.released = await codeOf(() => stream.launch(graph));
  }
  const losses = [...buffer.losses];
  await graph.close();
  await close();
  return { codes, losses, rows };
}

/** What has no place in a graph, and what makes one of no use; the buffer goes on. */
async function refusedHalves(context) {
  const { buffer, stream, batches, fill, plain, close } = await openBatches(context);
  const [{ x, y, choices, out }, other] = batches;
  const codes = {};
  const both = (hook) => {
    const { handle } = hook.receive();
    buffer.captureCombineSend(y, handle, { out }).receive();
  };
  codes['no capture'] = await codeOf(() => buffer.captureDispatchSend(x, choices));
  let late;
  const half = stream.capture(() => {
    late = buffer.captureDispatchSend(x, choices);
  });
  codes['half of a dispatch'] = await codeOf(() => stream.launch(half));
  codes['after the capture'] = await codeOf(() => late.receive());
  const next = stream.capture(() => {
    codes['in another graph'] = 'no error';
    try {
      late.receive();
    } catch (error) {
      codes['in another graph'] = error.code;
    }
    both(buffer.captureDispatchSend(x, choices));
  });
  let received;
  const uncombined = stream.capture(() => {
    received = buffer.captureDispatch(x, choices);
    const hook = buffer.captureCombineSend(y, received.handle, { out });
    codes['of a combine that has begun'] = 'no error';
    try {
      buffer.captureCombine(y, received.handle, { out });
    } catch (error) {
      codes['of a combine that has begun'] = error.code;
    }
    void hook;
  });
  codes['half of a combine'] = await codeOf(() => stream.launch(uncombined));
  let earlier;
  const alone = stream.capture(() => {
    earlier = buffer.captureDispatch(x, choices);
  });
  codes['combine in another graph'] = await codeOf(() =>
    stream.capture(() => buffer.captureCombine(y, earlier.handle, { out })),
  );
  await earlier.handle.release();
  codes.released = await codeOf(() => stream.launch(alone));
  codes['received twice'] = await codeOf(() =>
    stream.capture(() => {
      const hook = buffer.captureDispatchSend(x, choices);
      hook.receive();
      hook.receive();
    }),
  );
  codes['more than there are slots'] = await codeOf(() =>
    stream.capture(() => {
      for (let i = 0; i < 3; i++) buffer.captureDispatchSend(x, choices);
    }),
  );
  codes['another body'] = await codeOf(() =>
    stream.capture(() => {
      buffer.captureDispatchSend(other.x, other.choices).receive();
      throw Object.assign(new Error('in the body'), { code: 'of the body' });
    }),
  );
  codes.limit = await codeOf(() =>
    stream.capture(() => {
      buffer.captureDispatchSend(x, choices).receive({ timeoutMs: -1 });
    }),
  );
  await fill(0);
  await stream.launch(next);
  await plain(0);
  const losses = [...buffer.losses];
  for (const one of [half, next, uncombined, alone]) await one.close();
  await close();
  return { codes, losses };
}

/**
 * Whole calls by one kept layout, one behind the other in a graph, and plain calls by it between replays; what the layout is refused for; and what becomes of a graph whose layout is released, or has lost a rank.
 */
async function keptGraph(context) {
  const { rank, worldSize, data } = context;
  const { buffer, stream, batches, fill, plain, close } = await openBatches(context);
  const [{ x }, other] = batches;
  const choices = choicesOf(rank, 0, 0, 2 * worldSize);
  const codes = {};
  const keep = async () => {
    const { layout, handle } = await buffer.dispatch(x, choices, { keepLayout: true });
    codes.held ??= await codeOf(() => stream.capture(() => void buffer.captureDispatch(x, layout)));
    await handle.release();
    return layout;
  };
  let received;
  const capture = (layout) =>
    stream.capture(() => {
      received = batches.map((one) => {
        const each = buffer.captureDispatch(one.x, layout);
        buffer.captureCombine(one.y, each.handle, { out: one.out, weights: one.weights });
        return each;
      });
    });
  let [rows, step] = [0, 0];
  const replay = async (graph, layout) => {
    await fill(step);
    await stream.launch(graph);
    const found = [];
    for (const one of received) found.push(await takenOf(one));
    const wanted = await plain(step, [layout, layout]);
    for (const { batch, out: sums, plainOut } of batches) {
      rows += sameRows(found[batch], wanted[batch], worldSize, `replay ${step}, batch ${batch}`);
      assert.deepEqual(await readTensor(sums), await readTensor(plainOut), `replay ${step}, batch ${batch}: sums`);
    }
    step++;
  };
  await fill(0);
  const layout = await keep();
  const graph = capture(layout);
  for (let i = 0; i < data.replays; i++) await replay(graph, layout);
  const refused = (name, body) =>
    codeOf(() => void stream.capture(body)).then((code) => {
      codes[name] = code;
    });
  await refused('two at once', () => {
    buffer.captureDispatchSend(x, layout);
    buffer.captureDispatchSend(other.x, layout);
  });
  await refused('fewer tokens', () => buffer.captureDispatch(viewTensor(x, [2, data.hidden]), layout));
  await refused('one of others', () => buffer.captureDispatch(x, { tokens: MAX_TOKENS, release() {} }));
  await replay(graph, layout);
  const under = stream.launch(graph);
  layout.release();
  await under;
  codes['released layout'] = await codeOf(() => stream.launch(graph));
  await refused('captured anew', () => buffer.captureDispatch(x, layout));
  // In the memory of the one that was released.
  const next = await keep();
  codes['another layout'] = await codeOf(() => stream.launch(graph));
  const again = capture(next);
  await replay(again, next);
  let handle;
  const released = stream.capture(() => {
    ({ handle } = buffer.captureDispatch(x, next));
  });
  await handle.release();
  codes['released call'] = await codeOf(() => stream.launch(released));
  await replay(again, next);
  const alone = Uint8Array.from({ length: worldSize }, (_, one) => (one === rank ? 1 : 0));
  const last = await buffer.dispatch(x, next, { activeRanks: alone });
  await last.handle.release();
  codes['rows of others are gone'] = await codeOf(() => stream.launch(again));
  const losses = [...buffer.losses];
  for (const one of [graph, again, released]) await one.close();
  await close();
  return { codes, losses, rows };
}

/** Dispatch, experts that compute, and combine as one graph: all of what experts write, and sums, as of calls that are not captured; rows that no token came to stay as they were. */
async function computedGraph(context) {
  const { device, rank, worldSize, data } = context;
  const { mode, dtype, hidden, intermediate, replays } = data;
  const { buffer, stream, batches, fill, allocate, close } = await openBatches(context);
  const [{ x, y, choices, weights, out, plainOut }] = batches;
  const locals = buffer.localExperts;
  const matrix = async (salt, shape) => {
    const made = allocate('f32', shape);
    const values = numbers(
      'f32',
      shape.reduce((product, extent) => product * extent),
      5,
      rank,
      salt,
    );
    await writeTensor(
      values.map((value) => value / 4),
      made,
    );
    return made;
  };
  const layer = device.experts({
    gate: await matrix(0, [locals, intermediate, hidden]),
    up: await matrix(1, [locals, intermediate, hidden]),
    down: await matrix(2, [locals, hidden, intermediate]),
  });
  let received;
  const graph = stream.capture(() => {
    received = buffer.captureDispatch(x, choices);
    layer.captureForward(stream, { ...received, y });
    buffer.captureCombine(y, received.handle, { out, weights });
  });
  const elements = y.shape.reduce((product, extent) => product * extent);
  const untouched = numbers(dtype, elements, 6, rank);
  const rowBytes = hidden * elementBytes(dtype);
  let [computed, kept] = [0, 0];
  for (let step = 0; step < replays; step++) {
    await fill(step);
    await writeTensor(untouched, y);
    await stream.launch(graph);
    const [found, counts] = [await readTensor(y), await valuesOn(received.counts, Int32Array)];
    await writeTensor(untouched, y);
    const one = await buffer.dispatch(x, choicesOf(rank, 0, step, 2 * worldSize));
    assert.deepEqual(counts, one.counts);
    const results = mode === 'low-latency' ? y : viewTensor(y, one.x.shape);
    await layer.forward(stream, { ...one, y: results });
    const given = numbers('f32', MAX_TOKENS * TOP_K, 2, rank, 0, step);
    await buffer.combine(results, one.handle, { out: plainOut, weights: given });
    assert.deepEqual(found, await readTensor(y), `replay ${step}: results`);
    assert.deepEqual(await readTensor(out), await readTensor(plainOut), `replay ${step}: sums`);
    const before = new Uint8Array(untouched.buffer);
    const blocks = [...counts.keys()].map((e) => [one.blockStart[e], one.blockStart[e] + counts[e]]);
    for (let row = 0; row * rowBytes < found.length; row++) {
      const same =
        Buffer.compare(
          found.subarray(row * rowBytes, (row + 1) * rowBytes),
          before.subarray(row * rowBytes, (row + 1) * rowBytes),
        ) === 0;
      const isOfBlock = blocks.some(([begin, end]) => begin <= row && row < end);
      assert.equal(same, !isOfBlock, `replay ${step}: row ${row}`);
      if (isOfBlock) computed++;
      else kept++;
    }
  }
  await graph.close();
  await layer.close();
  await close();
  return { computed, kept };
}

export const expertGraphScenarios = { halvesGraph, refusedHalves, keptGraph, computedGraph };
