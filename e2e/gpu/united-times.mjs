// What calls of experts take that one launch makes for all ranks of a GPU, beside those that each rank launches for itself: the same numbers, in turns, seen from JS.
import assert from 'node:assert/strict';
import { createHash } from 'node:crypto';
import { readTensor, uniteMoeBuffers, writeTensor } from '@ep/cuda-kernels';
import { draw, openBuffers, openWorld } from './united.mjs';

const median = (list) => [...list].sort((a, b) => a - b)[Math.floor(list.length / 2)];

/** Where the numbers of a rank begin, each so many behind those of the one before. */
const apart = 17;

/** Different experts for each token. */
export function choicesOf(tokens, topK, experts, rank) {
  return Int32Array.from({ length: tokens * topK }, (_, i) => {
    const token = Math.floor(i / topK);
    const stride = 2 * Math.floor((draw(2, rank, token) * experts) / 2) + 1;
    return (Math.floor(draw(1, rank, token) * experts) + (i % topK) * stride) % experts;
  });
}

const numbers = (count, seed) =>
  Uint16Array.from({ length: count }, (_, i) => 0x3f00 + ((i * 2654435761 + seed) >>> 24));

/** As many numbers, the same ones over and over: a receive tensor has more than JS makes one by one in a minute. */
function manyNumbers(count) {
  const made = new Uint16Array(count);
  made.set(numbers(Math.min(count, 65_521), 3));
  for (let filled = 65_521; filled < count; filled *= 2) made.copyWithin(filled, 0, Math.min(filled, count - filled));
  return made;
}

/** A set of buffers, with all that its calls take. */
async function openSet(world, device, shape, oneStream) {
  const { tokens, hidden, topK, experts, payload, blocks, lanes } = shape;
  const opened = await openBuffers(
    world.transports,
    device,
    {
      ...{ experts, hidden, topK, maxTokens: tokens, dtype: 'bf16', zeroCopyCombine: true, calls: 1, blocks, lanes },
      ...(payload === undefined ? {} : { payload }),
    },
    oneStream,
  );
  const memory = [];
  const take = (dtype, dims, bytes) => {
    memory.push(device.allocate(dims[0] * dims[1] * bytes));
    return memory.at(-1).tensor(dtype, dims);
  };
  const own = [];
  for (const { rank } of opened.buffers) {
    const x = take('bf16', [tokens, hidden], 2);
    const out = take('bf16', [tokens, hidden], 2);
    const weights = take('f32', [tokens, topK], 4);
    const choices = take('i32', [tokens, topK], 4);
    const chosen = choicesOf(tokens, topK, experts, rank);
    const weighed = Float32Array.from({ length: tokens * topK }, (_, i) => draw(4, rank, i));
    await writeTensor(numbers(tokens * hidden, rank), x);
    await writeTensor(chosen, choices);
    await writeTensor(weighed, weights);
    own.push({ x, out, weights, choices, chosen, weighed });
  }
  const united = uniteMoeBuffers(opened.buffers);
  const first = await Promise.all(united.dispatch(own.map(({ x, chosen }) => ({ x, choices: chosen }))));
  const ends = first.map(({ combineBuffer, handle }, rank) => ({ y: combineBuffer, handle, out: own[rank].out }));
  // What experts return, once for all calls: the slot is one, and its results stay in place.
  const elements = Math.max(...first.map(({ combineBuffer }) => combineBuffer.shape.reduce((a, b) => a * b, 1)));
  const results = manyNumbers(elements + apart * first.length);
  for (const [rank, { combineBuffer }] of first.entries()) {
    const own = combineBuffer.shape.reduce((a, b) => a * b, 1);
    await writeTensor(results.subarray(apart * rank, apart * rank + own), combineBuffer);
  }
  await Promise.all(united.combine(ends));
  return {
    ...opened,
    own,
    united,
    close: async () => {
      await opened.close();
      for (const one of memory) await one.close();
    },
  };
}

/** Clears what the calls write, runs them, and says what they have written. */
async function written({ own }, shape, run) {
  for (const { out } of own) await writeTensor(new Uint16Array(shape.tokens * shape.hidden), out);
  await run();
  const hash = createHash('sha256');
  for (const { out } of own) hash.update(Buffer.from((await readTensor(out)).buffer));
  return hash.digest('hex');
}

/** Microseconds that each of these takes, all of them in turns; they resolve with nothing, or with what they have measured themselves. */
async function inTurns(rounds, bodies) {
  const times = bodies.map(() => []);
  for (let round = 0; round < rounds + 5; round++) {
    for (const [i, body] of bodies.entries()) {
      const began = performance.now();
      const own = await body();
      const took = own ?? (performance.now() - began) * 1000;
      if (round >= 5) times[i].push(took);
    }
  }
  return times.map(median);
}

/** Calls of all ranks, each launched by its rank and by one launch, in turns. */
async function callTimes(set, shape, rounds) {
  const { buffers, own, united } = set;
  let received;
  const ends = () =>
    received.map(({ combineBuffer, handle }, rank) => {
      const { out, weighed: weights } = own[rank];
      return { y: combineBuffer, handle, out, weights };
    });
  const single = {
    dispatch: () => buffers.map((one, rank) => one.dispatch(own[rank].x, own[rank].chosen)),
    combine: () => ends().map(({ y, handle, ...rest }, rank) => buffers[rank].combine(y, handle, rest)),
  };
  const together = {
    dispatch: () => united.dispatch(own.map(({ x, chosen }) => ({ x, choices: chosen }))),
    combine: () => united.combine(ends()),
  };
  const bodies = [single, together].map(({ dispatch, combine }) => ({
    dispatch: async () => {
      received = await Promise.all(dispatch());
    },
    combine: async () => void (await Promise.all(combine())),
  }));
  const hashes = [];
  for (const { dispatch, combine } of bodies) {
    const run = async () => {
      await dispatch();
      await combine();
    };
    hashes.push(await written(set, shape, run));
  }
  const times = await inTurns(
    rounds,
    bodies.flatMap(({ dispatch, combine }) => [dispatch, combine]),
  );
  return { times, hashes };
}

/** Replays of `pairs` dispatches and combines: a graph of each rank, or where ranks have one stream a graph of all. Microseconds of a pair, by JS's clock and, of one stream, by the device's. */
async function graphTimes(world, device, { pairs, ...shape }, rounds, oneStream) {
  const set = await openSet(world, device, shape, oneStream);
  const { buffers, own, streams, united } = set;
  const ends = (list) =>
    list.map(({ combineBuffer, handle }, rank) => {
      const { out, weights } = own[rank];
      return { y: combineBuffer, handle, out, weights };
    });
  const repeated = (stream, pair) =>
    stream.capture(() => {
      for (let i = 0; i < pairs; i++) pair();
    });
  const ofRank = (one, rank) =>
    repeated(streams[rank], () => {
      const { x, choices, out, weights } = own[rank];
      const { combineBuffer, handle } = one.captureDispatch(x, choices);
      one.captureCombine(combineBuffer, handle, { out, weights });
    });
  const graphs = oneStream
    ? [repeated(streams[0], () => united.captureCombine(ends(united.captureDispatch(own))))]
    : buffers.map(ofRank);
  const replay = async () => void (await Promise.all(graphs.map((graph, i) => streams[i].launch(graph))));
  const onDevice = async () => {
    const [stream] = streams;
    // Behind another replay: else the time that JS takes to launch it would be in it.
    const before = stream.launch(graphs[0]);
    const begin = stream.record({ timed: true });
    const under = stream.launch(graphs[0]);
    const end = stream.record({ timed: true });
    await Promise.all([before, under]);
    await end.synchronize();
    const us = end.elapsedMs(begin) * 1000;
    await Promise.all([begin.close(), end.close()]);
    return us;
  };
  const hash = await written(set, shape, replay);
  const times = await inTurns(rounds, oneStream ? [replay, onDevice] : [replay]);
  for (const graph of graphs) await graph.close();
  await set.close();
  return { times: times.map((us) => us / pairs), hash };
}

async function unitedTimes({ device, data: { ranks, rounds, pairs, ...shape } }) {
  const world = await openWorld(ranks);
  const set = await openSet(world, device, shape, false);
  const calls = await callTimes(set, shape, rounds);
  await set.close();
  const graphs = [];
  for (const oneStream of [false, true, false, true]) {
    graphs.push(await graphTimes(world, device, { pairs, ...shape }, rounds, oneStream));
  }
  await world.close();
  const hashes = new Set([...calls.hashes, ...graphs.map(({ hash }) => hash)]);
  assert.equal(hashes.size, 1, 'calls by one launch and calls of each rank have written different bytes');
  return { calls: calls.times, graphs: graphs.map(({ times }) => times) };
}

export const unitedTimesScenarios = { unitedTimes };
