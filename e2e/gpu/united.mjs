// Calls of experts of several ranks of one process by one launch, beside the same calls made by each buffer for itself.
import assert from 'node:assert/strict';
import { memoryStore, prefixStore } from '@ep/core';
import { CudaStream, openDeviceMoeBuffer, readTensor, uniteMoeBuffers, writeTensor } from '@ep/cuda-kernels';
import { nvshmem } from '@ep/nvshmem';

const TOP_K = 2;
const TIMEOUT_MS = 20_000;

export const draw = (...words) => {
  let h = 2166136261;
  for (const word of words) h = Math.imul(h ^ word, 16777619) ^ (h >>> 13);
  return (h >>> 0) / 2 ** 32;
};

/** The transports of so many ranks, all of them here. */
export async function openWorld(ranks) {
  const store = memoryStore();
  const transports = await Promise.all(
    Array.from({ length: ranks }, (_, rank) =>
      nvshmem.cuda.open(
        { rank, worldSize: ranks, store: store.handle() },
        { signal: AbortSignal.timeout(60_000), timeoutMs: 60_000, config: { device: 0 } },
      ),
    ),
  );
  return {
    transports,
    close: async () => {
      await Promise.all(transports.map((one) => one.close()));
      await store.close();
    },
  };
}

/** A buffer of each rank, on streams of their own or on one. Closing closes what was made here. */
export async function openBuffers(transports, device, options, oneStream = false) {
  const shared = oneStream ? device.stream() : undefined;
  const streams = transports.map(() => shared ?? device.stream());
  const defaults = { mode: 'low-latency', topK: TOP_K, calls: 2, blocks: 2, lanes: 64, timeoutMs: TIMEOUT_MS };
  const buffers = await Promise.all(
    transports.map((one, rank) => openDeviceMoeBuffer(one, { ...defaults, ...options, stream: streams[rank] })),
  );
  return {
    buffers,
    streams,
    close: async () => {
      await Promise.all(buffers.map((one) => one.close()));
      for (const one of new Set(streams)) await one.close();
    },
  };
}

const bytesOf = async (tensor) => Buffer.from((await readTensor(tensor)).buffer);
const all = (list, each) => Promise.all(list.map(each));

/** Rows of x that are not 0 elsewhere: only those which a token wrote can be compared. */
async function rowsOf(received, worldSize) {
  const { x, scales, counts, layoutRange, blockStart, sourceToken, sourceChoice } = received;
  const bytes = await bytesOf(x);
  const rows = x.shape[0] * x.shape[1];
  const rowBytes = bytes.length / rows;
  const factors = scales && (await bytesOf(scales));
  const [blocks, room] = scales?.shape ?? [0, 1];
  const factorBytes = factors ? factors.length / (blocks * room) : 0;
  const found = [];
  for (let run = 0; run < counts.length * worldSize; run++) {
    const [begin, count] = [Number(layoutRange[run] >> 32n), Number(layoutRange[run] & 0xffffffffn)];
    for (let i = 0; i < count; i++) {
      const row = blockStart[Math.floor(run / worldSize)] + begin + i;
      const own = Array.from({ length: blocks }, (_, block) => {
        const at = (block * room + row) * factorBytes;
        return factors.subarray(at, at + factorBytes).toString('hex');
      });
      const data = bytes.subarray(row * rowBytes, (row + 1) * rowBytes).toString('hex');
      found.push([row, sourceToken[row], sourceChoice[row], data, own.join()].join(' '));
    }
  }
  return found;
}

/** Numbers of a call, and memory for each rank of one set of buffers. */
function places(buffers, device, { tokens, hidden }) {
  const memory = [];
  const take = (dtype, shape, bytes) => {
    const one = device.allocate(Math.max(64, bytes * shape.reduce((product, extent) => product * extent, 1)));
    memory.push(one);
    return one.tensor(dtype, shape);
  };
  const own = buffers.map(({ worldSize, localExperts }) => ({
    x: take('bf16', [tokens, hidden], 2),
    out: take('bf16', [tokens, hidden], 2),
    bias: take('bf16', [tokens, hidden], 2),
    y: take('bf16', [localExperts, worldSize * tokens, hidden], 2),
    choices: take('i32', [tokens, TOP_K], 4),
    weights: take('f32', [tokens, TOP_K], 4),
  }));
  return { own, close: () => all(memory, (one) => one.close()) };
}

const numbers = (count, ...words) =>
  Uint16Array.from({ length: count }, (_, i) => 0x3f00 + Math.floor(draw(...words, i) * 256));
const choicesOf = (tokens, experts, ...words) =>
  Int32Array.from({ length: tokens * TOP_K }, (_, i) => {
    const first = Math.floor(draw(...words, i - (i % TOP_K)) * experts);
    if (draw(...words, i, 1) < 0.1) return -1;
    return i % TOP_K === 0 ? first : (first + 1) % experts;
  });
const weightsOf = (tokens, ...words) => Float32Array.from({ length: tokens * TOP_K }, (_, i) => draw(...words, i));

/** What ranks give to a call: of the same numbers whoever asks. */
async function fill({ own }, { tokens, hidden, experts }, call) {
  await all(own, async (place, rank) => {
    await writeTensor(numbers(tokens * hidden, 1, rank, call), place.x);
    await writeTensor(numbers(tokens * hidden, 2, rank, call), place.bias);
    await writeTensor(choicesOf(tokens, experts, 3, rank, call), place.choices);
    await writeTensor(weightsOf(tokens, 4, rank, call), place.weights);
  });
}

/** Experts that return what they got, or numbers of theirs where it was cast. */
async function results({ own }, received, call) {
  await all(own, async ({ y }, rank) => {
    const { x } = received[rank];
    const bytes =
      x.dtype === 'bf16'
        ? await readTensor(x)
        : numbers(
            y.shape.reduce((a, b) => a * b, 1),
            5,
            rank,
            call,
          );
    await writeTensor(bytes, y);
  });
}

/**
 * Calls by one launch give the bytes of calls by each buffer for itself; every third call of the united buffers is made by themselves. With `absent`, that rank is not united and makes its part
 * alone. `oneStream`: the united buffers have one between them. Rows compared.
 */
async function unitedExperts({ device, data }) {
  const { ranks, payload, hidden, tokens, offered = false, oneStream = false, alone } = data;
  const experts = 3 * ranks;
  const shape = { tokens, hidden, experts };
  const world = await openWorld(ranks);
  const options = {
    ...{ experts, hidden, maxTokens: tokens, dtype: 'bf16', zeroCopyCombine: offered },
    ...(payload === undefined ? {} : { payload }),
  };
  const single = await openBuffers(world.transports, device, options);
  const joined = await openBuffers(world.transports, device, options, oneStream);
  const members = joined.buffers.filter(({ rank }) => rank !== alone);
  const united = uniteMoeBuffers(members);
  assert.deepEqual(united.shape, { ...members[0].shape, blocks: members.length * members[0].shape.blocks });
  const [mine, theirs] = [places(single.buffers, device, shape), places(joined.buffers, device, shape)];
  let compared = 0;
  for (let call = 0; call < 7; call++) {
    await fill(mine, shape, call);
    await fill(theirs, shape, call);
    const choices = single.buffers.map(({ rank }) => choicesOf(tokens, experts, 3, rank, call));
    const weights = single.buffers.map(({ rank }) => weightsOf(tokens, 4, rank, call));
    const apart = !oneStream && call % 3 === 2;
    const dispatch = ({ buffers }, { own }) => all(buffers, (one, rank) => one.dispatch(own[rank].x, choices[rank]));
    const together = async () => {
      const works = united.dispatch(members.map(({ rank }) => ({ x: theirs.own[rank].x, choices: choices[rank] })));
      const other = joined.buffers[alone]?.dispatch(theirs.own[alone].x, choices[alone]);
      const found = await Promise.all([...works, other]);
      return joined.buffers.map((one) => (one.rank === alone ? found.at(-1) : found[members.indexOf(one)]));
    };
    const expected = await dispatch(single, mine);
    const found = apart ? await dispatch(joined, theirs) : await together();
    for (const rank of single.buffers.keys()) {
      const rows = await rowsOf(found[rank], ranks);
      assert.deepEqual(rows, await rowsOf(expected[rank], ranks), `call ${call}: rows of rank ${rank}`);
      assert.deepEqual(found[rank].counts, expected[rank].counts);
      compared += rows.length;
    }
    const offers = (received, { own }, rank) =>
      offered && (rank + call) % 2 === 0 ? received.combineBuffer : own[rank].y;
    const put = async (received, place) => {
      await results(place, received, call);
      await all(received, async (one, rank) => {
        if (one.combineBuffer && offers(one, place, rank) === one.combineBuffer)
          await writeTensor(new Uint16Array((await readTensor(place.own[rank].y)).buffer), one.combineBuffer);
      });
    };
    await put(expected, mine);
    await put(found, theirs);
    const given = (received, place, rank) => ({
      y: offers(received[rank], place, rank),
      handle: received[rank].handle,
      ...{ out: place.own[rank].out, weights: weights[rank], bias: [place.own[rank].bias] },
    });
    const combine = ({ buffers }, received, place) =>
      all(buffers, (one, rank) => {
        const { y, handle, ...rest } = given(received, place, rank);
        return one.combine(y, handle, rest);
      });
    await combine(single, expected, mine);
    if (apart) {
      await combine(joined, found, theirs);
    } else {
      const works = united.combine(members.map(({ rank }) => given(found, theirs, rank)));
      const { y, handle, ...rest } = alone === undefined ? {} : given(found, theirs, alone);
      await Promise.all([...works, joined.buffers[alone]?.combine(y, handle, rest)]);
    }
    for (const rank of single.buffers.keys()) {
      const sums = await bytesOf(theirs.own[rank].out);
      assert.deepEqual(sums, await bytesOf(mine.own[rank].out), `call ${call}: sums of rank ${rank}`);
      assert.ok(sums.some((byte) => byte !== 0));
    }
  }
  for (const rank of single.buffers.keys()) {
    assert.deepEqual(joined.buffers[rank].totals(), single.buffers[rank].totals());
    assert.deepEqual([...joined.buffers[rank].losses], []);
  }
  for (const one of [single, joined, mine, theirs, world]) await one.close();
  return compared;
}

/** Graphs of united calls on one stream, replayed with new numbers, give the bytes of calls that are not captured. */
async function unitedGraph({ device, data }) {
  const { ranks, hidden, tokens, replays, offered } = data;
  const experts = 2 * ranks;
  const shape = { tokens, hidden, experts };
  const world = await openWorld(ranks);
  const options = { experts, hidden, maxTokens: tokens, dtype: 'bf16', zeroCopyCombine: offered };
  const single = await openBuffers(world.transports, device, options);
  const joined = await openBuffers(world.transports, device, options, true);
  const united = uniteMoeBuffers(joined.buffers);
  const [mine, theirs] = [places(single.buffers, device, shape), places(joined.buffers, device, shape)];
  const [stream] = joined.streams;
  let counts;
  const graph = stream.capture(() => {
    const received = united.captureDispatch(theirs.own.map(({ x, choices }) => ({ x, choices })));
    counts = received.map((one) => one.counts);
    const calls = received.map(({ x, combineBuffer, handle }, rank) => {
      const { y, out, weights, bias } = theirs.own[rank];
      const from = offered ? combineBuffer : y;
      stream.copy(x, from);
      return { y: from, handle, out, weights, bias: [bias] };
    });
    united.captureCombine(calls);
  });
  for (let replay = 0; replay < replays; replay++) {
    await fill(mine, shape, replay);
    await fill(theirs, shape, replay);
    const choices = single.buffers.map(({ rank }) => choicesOf(tokens, experts, 3, rank, replay));
    const weights = single.buffers.map(({ rank }) => weightsOf(tokens, 4, rank, replay));
    const received = await all(single.buffers, (one, rank) => one.dispatch(mine.own[rank].x, choices[rank]));
    await results(mine, received, replay);
    await all(single.buffers, (one, rank) => {
      const { y, out, bias } = mine.own[rank];
      return one.combine(y, received[rank].handle, { out, weights: weights[rank], bias: [bias] });
    });
    await stream.launch(graph);
    for (const rank of single.buffers.keys()) {
      assert.deepEqual(new Int32Array((await readTensor(counts[rank])).buffer), received[rank].counts);
      assert.deepEqual(await bytesOf(theirs.own[rank].out), await bytesOf(mine.own[rank].out), `replay ${replay}`);
    }
  }
  // A call between replays counts on the same epochs.
  const between = united.dispatch(
    theirs.own.map(({ x }, rank) => ({ x, choices: choicesOf(tokens, experts, 6, rank) })),
  );
  for (const { handle } of await Promise.all(between)) await handle.release();
  const other = united.dispatch(theirs.own.map(({ x }, rank) => ({ x, choices: choicesOf(tokens, experts, 7, rank) })));
  for (const { handle } of await Promise.all(other)) await handle.release();
  await stream.launch(graph);
  assert.deepEqual(
    joined.buffers.map(({ losses }) => losses.size),
    joined.buffers.map(() => 0),
  );
  await graph.close();
  for (const one of [single, joined, mine, theirs, world]) await one.close();
  return replays;
}

/**
 * Where buffers have streams of their own, a launch comes behind what lies on any of them, and what is put there later comes behind it: tokens and results are copied by the second rank's stream, which is
 * long busy before the one, as the first rank's is before the other.
 */
async function unitedOrder({ device }) {
  const [ranks, hidden, tokens] = [2, 16, 4];
  const shape = { tokens, hidden, experts: 4 };
  const world = await openWorld(ranks);
  const opened = await openBuffers(world.transports, device, { experts: 4, hidden, maxTokens: tokens, dtype: 'bf16' });
  const united = uniteMoeBuffers(opened.buffers);
  const place = places(opened.buffers, device, shape);
  const bytes = 1 << 26;
  const large = [0, 0].map(() => device.allocate(bytes));
  const seen = device.allocate(tokens * hidden * 2);
  const [from, to] = large.map((one) => one.tensor('u8', [bytes]));
  const copies = device.allocate(tokens * hidden * 2);
  const next = copies.tensor('bf16', [tokens, hidden]);
  const choices = Int32Array.from({ length: tokens * TOP_K }, (_, i) => (i % TOP_K === 0 ? 2 : -1));
  const found = [];
  for (let call = 0; call < 3; call++) {
    await fill(place, shape, call);
    await writeTensor(numbers(tokens * hidden, 8, call), next);
    const [first, second] = opened.streams;
    for (let i = 0; i < 8; i++) second.copy(from, to);
    second.copy(next, place.own[1].x);
    const received = await Promise.all(united.dispatch(place.own.map(({ x }) => ({ x, choices }))));
    const rows = await bytesOf(received[1].x);
    const begin = Number(received[1].layoutRange[1] >> 32n) * hidden * 2;
    const wanted = Buffer.from(numbers(tokens * hidden, 8, call).buffer);
    found.push(rows.subarray(begin, begin + wanted.length).equals(wanted));
    await all(place.own, ({ y }, rank) =>
      writeTensor(
        numbers(
          y.shape.reduce((a, b) => a * b, 1),
          9,
          call,
          rank,
        ),
        y,
      ),
    );
    await writeTensor(new Uint16Array(tokens * hidden), place.own[1].out);
    for (let i = 0; i < 8; i++) first.copy(from, to);
    const works = united.combine(
      received.map(({ handle }, rank) => ({ y: place.own[rank].y, handle, out: place.own[rank].out })),
    );
    second.copy(place.own[1].out, seen.tensor('bf16', [tokens, hidden]));
    await Promise.all(works);
    await second.synchronize();
    const sums = await bytesOf(seen.tensor('bf16', [tokens, hidden]));
    found.push(sums.some((byte) => byte !== 0) && sums.equals(await bytesOf(place.own[1].out)));
  }
  for (const one of [opened, place, ...large, seen, copies, world]) await one.close();
  return found;
}

/** A rank that is not united and does not come is named by each of those that are, whose calls go on without it; an aborted launch ends the calls of all of them. */
async function unitedLosses({ device }) {
  const [ranks, hidden, tokens] = [3, 16, 4];
  const shape = { tokens, hidden, experts: 2 * ranks };
  const world = await openWorld(ranks);
  const options = { experts: shape.experts, hidden, maxTokens: tokens, dtype: 'bf16' };
  const opened = await openBuffers(world.transports, device, options);
  const place = places(opened.buffers, device, shape);
  await fill(place, shape, 0);
  const members = opened.buffers.slice(0, 2);
  const united = uniteMoeBuffers(members);
  const calls = members.map(({ rank }) => ({ x: place.own[rank].x, choices: Int32Array.of(0, 1, 2, 3, 4, 5, -1, 0) }));
  const lostOf = ({ lostRanks }) => [...lostRanks];
  const said = [];
  const received = await Promise.all(united.dispatch(calls, { timeoutMs: 500 }));
  said.push(
    received.map(lostOf),
    members.map(({ losses }) => [...losses]),
  );
  const combined = united.combine(
    received.map(({ handle }, rank) => ({ y: place.own[rank].y, handle, out: place.own[rank].out })),
  );
  said.push((await Promise.all(combined)).map(lostOf));
  await opened.close();
  const again = await openBuffers(world.transports, device, options);
  const waiting = uniteMoeBuffers(again.buffers.slice(0, 2));
  const cut = new AbortController();
  const works = waiting.dispatch(calls, { signal: cut.signal });
  setTimeout(() => cut.abort(new Error('cut')), 100);
  const ends = await Promise.allSettled(works);
  said.push(ends.map(({ reason }) => reason?.message));
  said.push(codeOf(() => waiting.dispatch(calls)));
  for (const one of [again, place, world]) await one.close();
  return said;
}

function codeOf(body) {
  try {
    body();
    return 'no error';
  } catch (error) {
    return error.code ?? String(error);
  }
}

/**
 * Rank 0 of two processes has all ranks of a world of three but the last, united; the other has that one, on another GPU where there is one, and is killed before it makes the second call. What each of those that
 * are left says, and the milliseconds that their call took.
 */
async function unitedDeath({ device, rank, store, data: { united: members, spread }, ready }) {
  const [hidden, tokens, ranks] = [16, 4, members + 1];
  const shape = { tokens, hidden, experts: ranks };
  const own = rank === 0 ? [...Array(members).keys()] : [members];
  const transports = await all(own, (one) =>
    nvshmem.cuda.open(
      { rank: one, worldSize: ranks, store: prefixStore(store, 'united') },
      { signal: AbortSignal.timeout(60_000), timeoutMs: 60_000, config: { device: spread ? device.index : 0 } },
    ),
  );
  const options = { experts: ranks, hidden, maxTokens: tokens, dtype: 'bf16', timeoutMs: 30_000 };
  const opened = await openBuffers(transports, device, options);
  const place = places(opened.buffers, device, shape);
  const choices = Int32Array.from({ length: tokens * TOP_K }, (_, i) => i % ranks);
  const calls = place.own.map(({ x }) => ({ x, choices }));
  const [first] = opened.buffers;
  const united = rank === 0 ? uniteMoeBuffers(opened.buffers) : undefined;
  const dispatch = () => united?.dispatch(calls) ?? [first.dispatch(calls[0].x, choices)];
  for (const { handle } of await Promise.all(dispatch())) await handle.release();
  if (rank === 1) {
    await ready();
    await new Promise(() => {});
  }
  const began = performance.now();
  const received = await Promise.all(dispatch());
  const ms = performance.now() - began;
  const said = received.map(({ lostRanks, counts }, i) => [[...lostRanks], [...counts], [...opened.buffers[i].losses]]);
  for (const { handle } of received) await handle.release();
  await opened.close();
  await place.close();
  await Promise.all(transports.map((one) => one.close()));
  return { said, ms };
}

/** What may not be united, and calls that are refused before anything is launched: the good call behind each finds all as it was. */
async function refusedUnions({ device }) {
  const [ranks, hidden, tokens] = [2, 16, 4];
  const shape = { tokens, hidden, experts: 4 };
  const world = await openWorld(ranks);
  const options = { experts: 4, hidden, maxTokens: tokens, dtype: 'bf16', calls: 1, blocks: 1 };
  const opened = await openBuffers(world.transports, device, options);
  const wide = await openBuffers(world.transports, device, { ...options, lanes: 32 });
  const compact = await openBuffers(world.transports, device, { ...options, mode: 'high-throughput' });
  const second = await openBuffers(world.transports, device, options);
  const [a, b] = opened.buffers;
  const errors = {};
  const attempt = (name, body) => {
    try {
      body();
      errors[name] = 'no error';
    } catch (error) {
      errors[name] = `${error.code ?? error}: ${error.message}`;
    }
  };
  attempt('none', () => uniteMoeBuffers([]));
  attempt('no array', () => uniteMoeBuffers(a));
  attempt('something else', () => uniteMoeBuffers([a, device]));
  attempt('twice', () => uniteMoeBuffers([a, b, a]));
  attempt('other lanes', () => uniteMoeBuffers([a, wide.buffers[1]]));
  attempt('high throughput', () => uniteMoeBuffers(compact.buffers));
  attempt('another opening', () => uniteMoeBuffers([a, second.buffers[1]]));
  attempt('same rank', () => uniteMoeBuffers([a, second.buffers[0]]));
  const united = uniteMoeBuffers(opened.buffers);
  const place = places(opened.buffers, device, shape);
  await fill(place, shape, 0);
  const choices = Int32Array.of(0, 1, 2, 3, 0, 2, -1, 3);
  const good = () => place.own.map(({ x }) => ({ x, choices }));
  const odd = device.allocate(4096);
  const call = async (name, calls, limits) => {
    attempt(name, () => united.dispatch(calls, limits));
    const received = await Promise.all(united.dispatch(good()));
    assert.deepEqual(
      received.map(({ lostRanks }) => [...lostRanks]),
      [
        [0, 0],
        [0, 0],
      ],
    );
    for (const { handle } of received) await handle.release();
  };
  await call('one is missing', good().slice(1));
  await call('nothing of one', [good()[0], undefined]);
  await call('no calls', undefined);
  await call('another hidden size', [good()[0], { x: odd.tensor('bf16', [tokens, 2 * hidden]), choices }]);
  await call('another dtype', [good()[0], { x: odd.tensor('f32', [tokens, hidden]), choices }]);
  await call('no such expert', [good()[0], { ...good()[1], choices: choices.map((one) => one + 4) }]);
  await call('a layout', [good()[0], { ...good()[1], choices: { tokens, release() {} } }]);
  await call('bad time', good(), { timeoutMs: -1 });
  for (const [name, stream] of opened.streams.entries()) {
    attempt(`call in a capture, stream ${name}`, () => stream.capture(() => void united.dispatch(good())));
  }
  const received = await Promise.all(united.dispatch(good()));
  attempt('slot', () => united.dispatch(good()));
  const combine = (name, change) =>
    attempt(name, () =>
      united.combine(
        received.map(({ handle }, rank) => {
          const { y, out } = place.own[rank];
          return { y, handle, out, ...(rank === 1 ? change : {}) };
        }),
      ),
    );
  combine('no out', { out: undefined });
  combine('few rows', { y: odd.tensor('bf16', [2, hidden]) });
  combine('handle of another', { handle: received[0].handle });
  combine('weights', { weights: new Float32Array(3) });
  attempt('captured on many streams', () =>
    opened.streams[0].capture(() =>
      united.captureDispatch(place.own.map(({ x, choices: at }) => ({ x, choices: at }))),
    ),
  );
  const sums = united.combine(
    received.map(({ handle }, rank) => ({ ...place.own[rank], weights: undefined, bias: [], handle })),
  );
  await Promise.all(sums);
  await b.close();
  attempt('closed', () => united.dispatch(good()));
  attempt('united when closed', () => uniteMoeBuffers([a, b]));
  assert.ok(opened.streams.every((one) => one instanceof CudaStream));
  for (const one of [opened, wide, compact, second, place, odd, world]) await one.close();
  return errors;
}

export const unitedScenarios = { unitedDeath, unitedOrder, unitedExperts, unitedGraph, unitedLosses, refusedUnions };
