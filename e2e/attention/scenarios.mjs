// What a rank of the attention suites does. Each function runs on every rank and returns what the test compares.
import { setTimeout as delay } from 'node:timers/promises';
import { decode, tensor } from '@ep/core';
import { attentionLeaseBytes, bindAttention, leaseBytesFor, openDispatcher, rowBytesOf } from '@ep/cuda-kernels';
import { allocateHost, native } from '@ep/native';
import { explain } from '@ep/plan';
import { movePlan, sumReplicas } from '@ep/plan/reference';
import { badInput } from './bad-input.mjs';
import { fillRows, fullPlan, randomOf, randomPlan, specsOf, storageOf, unevenPlan } from './plans.mjs';

/** The same in memory that kernels use in place. */
function nativeCopy(storage) {
  const out = new storage.constructor(allocateHost(storage.byteLength), 0, storage.length);
  out.set(storage);
  return out;
}

/** All ranks' tensors of one side, computed everywhere, so that the oracle needs no communication. */
function allRows(rowsOfRank, rowElements, dtype, salt) {
  return Array.from(rowsOfRank, (rows, rank) =>
    storageOf(dtype, fillRows(new Float32Array(rows * rowElements), rank, rowElements, salt)),
  );
}

/** Bytes that either staging buffer needs for the largest call of any rank. */
function stagingFor(specs) {
  const most = (rows) => rows.reduce((a, b) => Math.max(a, b), 0);
  return Math.max(
    ...Object.values(specs).map((parts) =>
      parts.reduce(
        (sum, part) => sum + rowBytesOf(part) * Math.max(most(part.plan.sendTokens), most(part.plan.recvTokens)),
        0,
      ),
    ),
  );
}

/** How many elements there were. */
function expectSame(found, expected, what) {
  if (found.length !== expected.length)
    throw new Error(`${what}: ${found.length} elements, expected ${expected.length}`);
  for (let i = 0; i < found.length; i++)
    if (found[i] !== expected[i]) throw new Error(`${what}[${i}]: found ${found[i]}, expected ${expected[i]}`);
  return found.length;
}

/** Rows and peers, of all kinds of traffic, between this rank and others. */
function remoteOf(plan, rank) {
  const all = explain(plan).traffic.filter(({ from, to }) => from !== to && (from === rank || to === rank));
  const some = all.filter(({ queryTokens, kvTokens }) => queryTokens + kvTokens > 0);
  const peers = (end, other) => new Set(some.filter((pair) => pair[end] === rank).map((pair) => pair[other])).size;
  return { sendsTo: peers('from', 'to'), receivesFrom: peers('to', 'from') };
}

/** Random plans against the plain oracle: forward, back, and both forms of the gradient. */
async function oracle({ transport, rank, worldSize, data }) {
  let compared = 0;
  const elements = { q: 0, kv: 0, o: 0, dense: 0, reduced: 0 };
  let remote;
  for (const seed of data.seeds) {
    const plan = randomPlan(seed, worldSize, { sharing: seed % 2 ? 'each-query' : 'each-server', ...data.plan });
    const { dtype, qRow, kvRow } = data;
    const specs = specsOf(plan, data);
    const leaseBytes = Math.max(...Object.values(specs).map(leaseBytesFor));
    const dispatcher = await openDispatcher(transport, {
      leaseBytes,
      chunkBytes: 64 + 64 * (seed % 7),
      ...(data.staged ? { leases: 1, stagingBytes: stagingFor(specs) } : {}),
      ...data.options,
    });
    const bound = await dispatcher.bind(specs);
    const q = allRows(plan.fwdQ.sendTokens, qRow, dtype, seed);
    const kv = allRows(plan.fwdKv.sendTokens, kvRow, dtype, seed + 1);
    const own = {
      q: tensor(dtype, [plan.fwdQ.sendTokens[rank], qRow], q[rank]),
      kv: tensor(dtype, [plan.fwdKv.sendTokens[rank], kvRow], nativeCopy(kv[rank])),
    };
    const there = await bound.forward.run(own);
    const atServers = movePlan(plan.fwdQ, q, qRow);
    elements.q += expectSame(there.tensors.q.data, atServers[rank], `seed ${seed}: q`);
    elements.kv += expectSame(there.tensors.kv.data, movePlan(plan.fwdKv, kv, kvRow)[rank], `seed ${seed}: kv`);
    const served = tensor(dtype, [plan.revQ.sendTokens[rank], qRow], nativeCopy(there.tensors.q.data));
    there.release();
    const back = await bound.output.run({ o: served });
    elements.o += expectSame(back.tensors.o.data, movePlan(plan.revQ, atServers, qRow)[rank], `seed ${seed}: o`);
    back.release();
    const gradients = allRows(plan.revKv.sendTokens, kvRow, dtype, seed + 2);
    const mine = tensor(dtype, [plan.revKv.sendTokens[rank], kvRow], nativeCopy(gradients[rank]));
    const dense = await bound.dense.run({ dKv: mine });
    const movement = movePlan(plan.revKv, gradients, kvRow);
    elements.dense += expectSame(dense.tensors.dKv.data, movement[rank], `seed ${seed}: dense gradient`);
    dense.release();
    if (bound.reduced) {
      const reduced = await bound.reduced.run({ dKv: mine });
      const values = dtype === 'f32' ? movement : movement.map((rows) => decode(dtype, rows));
      const sums = sumReplicas(plan.reduction, values, kvRow, 'dense', 'f32')[rank];
      const expected = storageOf(dtype, Float32Array.from(sums));
      elements.reduced += expectSame(reduced.tensors.dKv.data, expected, `seed ${seed}: reduced gradient`);
      reduced.release();
    }
    remote = remoteOf(plan, rank);
    // HAZARD: credits that others were given may still be on their way to memory that goes away here; a NIC on a network takes its time.
    for (let peer = 0; peer < worldSize; peer++) await (await transport.connect(peer)).flush();
    // The hostile transport has none.
    await transport.barrier?.();
    await dispatcher.close();
    compared++;
  }
  return { compared, elements, remote, leaks: native().binding.leaks() };
}

/** Rows by sender and receiver, as the plan says. */
function pairMatrix(plan, kind) {
  const matrix = Array.from({ length: plan.shards.worldSize }, () => Array(plan.shards.worldSize).fill(0));
  for (const pair of explain(plan).traffic) matrix[pair.from][pair.to] = pair[kind];
  return matrix;
}

/** Many calls on one dispatcher, ranks of uneven speed and of uneven shares, both leases in turn. */
async function repeated({ transport, rank, worldSize, data }) {
  const plan = unevenPlan(worldSize);
  const [qRow, kvRow] = [8, 4];
  const { forward: parts } = specsOf(plan, { dtype: 'f32', qRow, kvRow });
  const dispatcher = await openDispatcher(transport, { leaseBytes: leaseBytesFor(parts), chunkBytes: 256 });
  const { forward } = await dispatcher.bind({ forward: parts });
  const random = randomOf(rank + 1);
  const received = { q: 0, kv: 0 };
  for (let call = 0; call < data.calls; call++) {
    const q = allRows(plan.fwdQ.sendTokens, qRow, 'f32', call);
    const kv = allRows(plan.fwdKv.sendTokens, kvRow, 'f32', call + 1);
    if (random(20) === 0) await new Promise((resolve) => setTimeout(resolve, random(4)));
    const lease = await forward.run({
      q: tensor('f32', [plan.fwdQ.sendTokens[rank], qRow], q[rank]),
      kv: tensor('f32', [plan.fwdKv.sendTokens[rank], kvRow], kv[rank]),
    });
    const { tensors } = lease;
    received.q += expectSame(tensors.q.data, movePlan(plan.fwdQ, q, qRow)[rank], `call ${call}: q`) / qRow;
    received.kv += expectSame(tensors.kv.data, movePlan(plan.fwdKv, kv, kvRow)[rank], `call ${call}: kv`) / kvRow;
    if (random(20) === 0) await new Promise((resolve) => setTimeout(resolve, random(4)));
    lease.release();
  }
  await dispatcher.close();
  return { received, matrix: { q: pairMatrix(plan, 'queryTokens'), kv: pairMatrix(plan, 'kvTokens') } };
}

/** Rank 0 keeps its first result while the others run ahead as far as they can. */
async function hold({ transport, rank, worldSize }) {
  const plan = randomPlan(11, worldSize, { documents: 8, maxLength: 50 });
  const qRow = 8;
  const specs = { forward: [{ name: 'q', plan: plan.fwdQ, dtype: 'f32', rowShape: [qRow] }] };
  const dispatcher = await openDispatcher(transport, {
    leaseBytes: leaseBytesFor(specs.forward),
    leases: 4,
    chunkBytes: 128,
  });
  const { forward } = await dispatcher.bind(specs);
  const dataOf = (call) => allRows(plan.fwdQ.sendTokens, qRow, 'f32', call);
  const run = (call) => forward.run({ q: tensor('f32', [plan.fwdQ.sendTokens[rank], qRow], dataOf(call)[rank]) });
  const first = await run(0);
  const expected = movePlan(plan.fwdQ, dataOf(0), qRow)[rank];
  // Everyone else releases at once and runs three calls ahead; the fifth call reuses rank 0's held lease and must wait for it.
  let ahead = 0;
  if (rank !== 0) first.release();
  for (let call = 1; call <= 3; call++) {
    const lease = await run(call);
    expectSame(lease.tensors.q.data, movePlan(plan.fwdQ, dataOf(call), qRow)[rank], `call ${call}`);
    lease.release();
    ahead++;
  }
  if (rank === 0) {
    await new Promise((resolve) => setTimeout(resolve, 100));
    expectSame(first.tensors.q.data, expected, 'held result after peers ran ahead');
    let busy;
    try {
      run(4);
    } catch (error) {
      busy = error.code;
    }
    if (busy !== 'EP_BUSY') throw new Error(`a call into a held lease gave ${busy}`);
    first.release();
  }
  const fifth = await run(4);
  expectSame(fifth.tensors.q.data, movePlan(plan.fwdQ, dataOf(4), qRow)[rank], 'call 4');
  fifth.release();
  await dispatcher.close();
  return ahead;
}

/** One rank aborts in the middle of a call; everyone resynchronises; many correct calls follow. */
async function abort({ transport, rank, worldSize, data }) {
  const plan = fullPlan(worldSize, 20);
  const qRow = 8;
  const specs = { forward: [{ name: 'q', plan: plan.fwdQ, dtype: 'f32', rowShape: [qRow] }] };
  const dispatcher = await openDispatcher(transport, {
    leaseBytes: leaseBytesFor(specs.forward),
    chunkBytes: 128,
    timeoutMs: 1_000,
  });
  const { forward } = await dispatcher.bind(specs);
  const dataOf = (call) => allRows(plan.fwdQ.sendTokens, qRow, 'f32', call);
  const run = (call, options) =>
    forward.run({ q: tensor('f32', [plan.fwdQ.sendTokens[rank], qRow], dataOf(call)[rank]) }, options);
  const outcomes = [];
  for (let round = 0; round < data.rounds; round++) {
    const aborter = round % worldSize;
    const reason = new Error(`round ${round}`);
    if (rank === aborter) {
      const controller = new AbortController();
      // Even rounds abort before the call, odd ones while its rows are awaited: the others come late.
      if (round % 2 === 0) controller.abort(reason);
      else setTimeout(() => controller.abort(reason), 20);
      try {
        await run(0, { signal: controller.signal });
        outcomes.push('done');
      } catch (error) {
        // The abort of a call that never began has no effect: nothing is poisoned here, though the others wait in vain.
        outcomes.push(error === reason ? 'reason' : String(error));
      }
    } else {
      if (round % 2 === 1) await new Promise((resolve) => setTimeout(resolve, 100));
      try {
        const lease = await run(0);
        lease.release();
        outcomes.push('done');
      } catch (error) {
        outcomes.push(error.code);
        if (dispatcher.poisoned) {
          try {
            run(1);
            throw new Error('a poisoned dispatcher accepted a call');
          } catch (second) {
            if (second.code !== 'EP_POISONED') throw second;
          }
        }
      }
    }
    await dispatcher.resync({ timeoutMs: 20_000 });
    for (let call = 0; call < data.calls; call++) {
      const lease = await run(call);
      expectSame(lease.tensors.q.data, movePlan(plan.fwdQ, dataOf(call), qRow)[rank], `round ${round} call ${call}`);
      lease.release();
    }
  }
  const epoch = dispatcher.epoch;
  await dispatcher.close();
  return { outcomes, epoch };
}

/**
 * One rank aborts between two chunks: some have gone to one rank, the next wait for the credit of another, which holds the result of an earlier call.
 * Everyone resynchronises; correct calls follow. Gives for each round `done`, `reason` (this rank's abort) or the error's code, and how many chunks of the rank that it names were missing.
 */
async function abortBetween({ transport, rank, worldSize, data }) {
  const plan = fullPlan(worldSize, 21);
  const qRow = 8;
  const specs = { forward: [{ name: 'q', plan: plan.fwdQ, dtype: 'f32', rowShape: [qRow] }] };
  const leases = 2;
  const dispatcher = await openDispatcher(transport, {
    leaseBytes: leaseBytesFor(specs.forward),
    chunkBytes: data.chunkBytes,
    leases,
    timeoutMs: 1_000,
  });
  const { forward } = await dispatcher.bind(specs);
  const dataOf = (call) => allRows(plan.fwdQ.sendTokens, qRow, 'f32', call);
  const run = (call, options) =>
    forward.run({ q: tensor('f32', [plan.fwdQ.sendTokens[rank], qRow], dataOf(call)[rank]) }, options);
  const check = (lease, call, what) =>
    expectSame(lease.tensors.q.data, movePlan(plan.fwdQ, dataOf(call), qRow)[rank], what);
  const outcomes = [];
  for (let round = 0; round < data.rounds; round++) {
    const aborter = round % worldSize;
    const holder = (aborter + 1 + (Math.floor(round / worldSize) % (worldSize - 1))) % worldSize;
    const held = [];
    for (let call = 0; call < leases; call++) {
      const lease = await run(call);
      if (rank === holder) held.push(lease);
      else lease.release();
    }
    const reason = new Error(`round ${round}`);
    const controller = new AbortController();
    // The holder lets go after the aborter's call has ended: what that had not sent by then, it never sends.
    if (rank === aborter) setTimeout(() => controller.abort(reason), 30);
    if (rank === holder) {
      await new Promise((resolve) => setTimeout(resolve, 200));
      check(held[0], 0, `round ${round}, held`);
      for (const lease of held) lease.release();
    }
    try {
      const lease = await run(leases, rank === aborter ? { signal: controller.signal } : {});
      check(lease, leases, `round ${round}, cut call`);
      lease.release();
      outcomes.push(['done', 0]);
    } catch (error) {
      const { expected, found } = error.context ?? {};
      outcomes.push(error === reason ? ['reason', 0] : [error.code ?? String(error), Number(expected - found)]);
    }
    await dispatcher.resync({ timeoutMs: 20_000 });
    for (let call = 0; call < data.calls; call++) {
      const lease = await run(call);
      check(lease, call, `round ${round} call ${call}`);
      lease.release();
    }
  }
  await dispatcher.close();
  return outcomes;
}

/** A rank dies while the others wait for its rows. */
async function lost({ transport, rank, worldSize, data, ready }) {
  const { givesUp } = data;
  const plan = fullPlan(worldSize, 20);
  const specs = { forward: [{ name: 'q', plan: plan.fwdQ, dtype: 'f32', rowShape: [4] }] };
  const dispatcher = await openDispatcher(transport, { leaseBytes: leaseBytesFor(specs.forward), timeoutMs: 30_000 });
  const { forward } = await dispatcher.bind(specs);
  const q = tensor('f32', [plan.fwdQ.sendTokens[rank], 4]);
  if (rank === data.victim) {
    await ready();
    await new Promise(() => setInterval(() => {}, 1000));
  }
  let failure;
  if (rank === givesUp) await delay(4000);
  const began = performance.now();
  try {
    for (;;) (await forward.run({ q })).release();
  } catch (error) {
    failure = { code: error.code, rank: error.context?.rank, ms: performance.now() - began };
  }
  await dispatcher.close();
  return failure;
}

/** Rank 1 brings another plan, another row size, other options. */
async function mismatch({ transport, rank, worldSize }) {
  const odd = rank === 1;
  const found = {};
  const attempt = async (name, body) => {
    try {
      await body();
      found[name] = 'no error';
    } catch (error) {
      found[name] = { code: error.code, ranks: error.context?.ranks, message: error.message };
    }
  };
  await attempt('options', () => openDispatcher(transport, { leaseBytes: 65536, chunkBytes: odd ? 512 : 1024 }));
  await attempt('memory', () => openDispatcher(transport, { leaseBytes: odd ? 65536 : 131072 }));
  const dispatcher = await openDispatcher(transport, { leaseBytes: 65536 });
  const specs = (seed, width) => ({
    forward: [{ name: 'q', plan: randomPlan(seed, worldSize).fwdQ, dtype: 'f32', rowShape: [width] }],
  });
  await attempt('plan', () => dispatcher.bind(specs(odd ? 5 : 6, 4)));
  await attempt('row', () => dispatcher.bind(specs(5, odd ? 4 : 8)));
  await attempt('refused', () => dispatcher.bind(specs(5, odd ? 0 : 4)));
  const shape = { queryHeads: 4, kvHeads: 2, headDim: 2, dtype: 'f32' };
  const whole = fullPlan(worldSize, 5);
  for (const [name, plan, shaped] of [
    ['noPlan', undefined, shape],
    ['emptyPlan', {}, shape],
    ['partOfPlan', { ...whole, fwdKv: { worldSize } }, shape],
    ['noReduction', { ...whole, reduction: null }, shape],
    ['noShape', whole, undefined],
    ['oddHeads', whole, { ...shape, queryHeads: 3 }],
    ['noDtype', whole, { ...shape, dtype: 'f99' }],
  ])
    await attempt(name, () =>
      odd ? bindAttention(dispatcher, plan, shaped) : bindAttention(dispatcher, whole, shape),
    );
  for (const [name, wrong] of [
    ['noSpecs', null],
    ['partsNoList', { forward: 7 }],
    ['partNoObject', { forward: [null] }],
    ['twice', { forward: [...specs(5, 4).forward, ...specs(5, 4).forward] }],
  ])
    await attempt(name, () => dispatcher.bind(odd ? wrong : specs(5, 4)));
  // The dispatcher is still good: every refusal came before anything moved.
  const { forward } = await dispatcher.bind(specs(5, 4));
  const plan = randomPlan(5, worldSize).fwdQ;
  const q = allRows(plan.sendTokens, 4, 'f32', 9);
  const lease = await forward.run({ q: tensor('f32', [plan.sendTokens[rank], 4], q[rank]) });
  expectSame(lease.tensors.q.data, movePlan(plan, q, 4)[rank], 'after refusals');
  await dispatcher.close();
  return found;
}

/** close() while a resync waits for a rank that never joins it. */
async function closeInResync({ transport, rank }) {
  const dispatcher = await openDispatcher(transport, { leaseBytes: 4096, timeoutMs: 60_000 });
  if (rank === 1) {
    await new Promise((resolve) => setTimeout(resolve, 300));
    await dispatcher.close();
    return 'absent';
  }
  const outcome = dispatcher.resync().then(
    () => 'done',
    (error) => error.code,
  );
  await new Promise((resolve) => setTimeout(resolve, 50));
  const began = performance.now();
  await dispatcher.close();
  return performance.now() - began < 20_000 ? outcome : 'late';
}

/** The transport goes away under a call, and under a dispatcher that is still open. */
async function transportCloses({ transport, rank, worldSize }) {
  const plan = fullPlan(worldSize, 20);
  const dispatcher = await openDispatcher(transport, { leaseBytes: 65536, timeoutMs: 60_000 });
  const { forward } = await dispatcher.bind({ forward: [{ name: 'q', plan: plan.fwdQ, dtype: 'f32', rowShape: [4] }] });
  const idle = await openDispatcher(transport, { leaseBytes: 65536, timeoutMs: 60_000 });
  const { later } = await idle.bind({ later: [{ name: 'q', plan: plan.fwdQ, dtype: 'f32', rowShape: [4] }] });
  const q = tensor('f32', [plan.fwdQ.sendTokens[rank], 4]);
  const codeOf = (promise) =>
    promise.then(
      () => 'done',
      (error) => error.code,
    );
  const lease = await forward.run({ q });
  if (rank === 1) {
    await new Promise((resolve) => setTimeout(resolve, 200));
    lease.release();
    return 'absent';
  }
  const under = codeOf(forward.run({ q }));
  await new Promise((resolve) => setTimeout(resolve, 50));
  await transport.close();
  const codes = [await under];
  lease.release();
  try {
    later.run({ q });
    codes.push('launched');
  } catch (error) {
    codes.push(error.code);
  }
  await dispatcher.close();
  await idle.close();
  return codes.join(' ');
}

/** Several binds at once, on every rank in the same order. */
async function overlappingBinds({ transport, worldSize }) {
  const dispatcher = await openDispatcher(transport, { leaseBytes: 65536, timeoutMs: 20_000 });
  const parts = (seed) => ({
    forward: [{ name: 'q', plan: randomPlan(seed, worldSize).fwdQ, dtype: 'f32', rowShape: [4] }],
  });
  const ends = await Promise.allSettled([1, 2, 3, 4, 5, 6].map((seed) => dispatcher.bind(parts(seed))));
  await dispatcher.close();
  return ends.map(({ status, reason }) => reason?.message ?? status).join();
}

/** Calls that end inline, one after the other, for as long as no timer stops them. */
async function timers({ transport, rank, worldSize }) {
  const plan = fullPlan(worldSize, 2);
  const dispatcher = await openDispatcher(transport, { leaseBytes: 65536 });
  const { forward } = await dispatcher.bind({ forward: [{ name: 'q', plan: plan.fwdQ, dtype: 'f32', rowShape: [4] }] });
  const q = tensor('f32', [plan.fwdQ.sendTokens[rank], 4]);
  let fired = false;
  setTimeout(() => {
    fired = true;
  }, 50);
  const end = performance.now() + 10_000;
  let calls = 0;
  for (; !fired && performance.now() < end; calls++) (await forward.run({ q })).release();
  await dispatcher.close();
  // Some, so that it was a chain; how many fit into the time is the machine's business.
  return fired && calls > 3;
}

/** A resync that some ranks come to late, or not at all at first; a lease that is released while it is under way. */
async function lateResync({ transport, rank, worldSize }) {
  const plan = fullPlan(worldSize, 20);
  const qRow = 8;
  const parts = [{ name: 'q', plan: plan.fwdQ, dtype: 'f32', rowShape: [qRow] }];
  const dispatcher = await openDispatcher(transport, {
    leaseBytes: leaseBytesFor(parts),
    leases: 1,
    chunkBytes: 128,
    timeoutMs: 30_000,
  });
  const { forward } = await dispatcher.bind({ forward: parts });
  const dataOf = (call) => allRows(plan.fwdQ.sendTokens, qRow, 'f32', call);
  const run = (call, options) =>
    forward.run({ q: tensor('f32', [plan.fwdQ.sendTokens[rank], qRow], dataOf(call)[rank]) }, options);
  const check = (lease, call, what) =>
    expectSame(lease.tensors.q.data, movePlan(plan.fwdQ, dataOf(call), qRow)[rank], what);
  const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
  const held = await run(0);
  let code;
  if (rank === 0) {
    // Nobody else is there yet.
    code = await dispatcher.resync({ timeoutMs: 60 }).then(
      () => 'agreed alone',
      (error) => error.code,
    );
    const again = dispatcher.resync();
    await pause(20);
    // The others come now, see this rank's announcement and count from anew, while this rank has not looked yet.
    for (const end = performance.now() + 300; performance.now() < end; );
    held.release();
    await again;
  } else {
    await pause(150);
    await dispatcher.resync();
    held.release();
  }
  const first = await run(1);
  check(first, 1, 'first call of the epoch');
  if (rank === 0) {
    // The others are at their next call, which must wait for this lease.
    await pause(100);
    check(first, 1, 'first call, held');
  }
  first.release();
  const second = await run(2);
  check(second, 2, 'second call of the epoch');
  second.release();
  const { epoch } = dispatcher;
  await dispatcher.close();
  return { code, epoch };
}

/** close() while a call waits for a rank that never makes it. */
async function closeInFlight({ transport, rank, worldSize }) {
  const plan = fullPlan(worldSize, 20);
  const dispatcher = await openDispatcher(transport, { leaseBytes: 65536, timeoutMs: 60_000 });
  const { forward } = await dispatcher.bind({ forward: [{ name: 'q', plan: plan.fwdQ, dtype: 'f32', rowShape: [4] }] });
  if (rank === 1) {
    await dispatcher.close();
    await new Promise((resolve) => setTimeout(resolve, 200));
    return 'absent';
  }
  const work = forward.run({ q: tensor('f32', [plan.fwdQ.sendTokens[rank], 4]) });
  const outcome = work.then(
    () => 'done',
    (error) => error.code,
  );
  await new Promise((resolve) => setTimeout(resolve, 20));
  await Promise.all([dispatcher.close(), dispatcher.close()]);
  return outcome;
}

/** Q, K and V as slices of one projection: read in place, row stride and all. */
async function strided({ transport, rank, worldSize }) {
  const plan = randomPlan(21, worldSize, { documents: 7, maxLength: 60 });
  const shape = { queryHeads: 4, kvHeads: 2, headDim: 8, dtype: 'f32' };
  const [qWidth, kvWidth] = [32, 16];
  const width = qWidth + 2 * kvWidth;
  const projections = allRows(plan.fwdQ.sendTokens, width, 'f32', 4);
  const own = nativeCopy(projections[rank]);
  const slice = (from, columns) => ({
    dtype: 'f32',
    shape: [plan.fwdQ.sendTokens[rank], columns],
    strides: [width, 1],
    data: own.subarray(from),
  });
  const packed = (from, columns) =>
    projections.map((rows) => {
      const out = new Float32Array((rows.length / width) * columns);
      for (let i = 0; i < out.length; i++) out[i] = rows[Math.floor(i / columns) * width + from + (i % columns)];
      return out;
    });
  const dispatcher = await openDispatcher(transport, { leaseBytes: attentionLeaseBytes(plan, shape), leases: 4 });
  const attention = await bindAttention(dispatcher, plan, shape);
  const empty = own.length === 0;
  const tensors = empty
    ? { q: tensor('f32', [0, 4, 8]), k: tensor('f32', [0, 2, 8]), v: tensor('f32', [0, 2, 8]) }
    : { q: slice(0, qWidth), k: slice(qWidth, kvWidth), v: slice(qWidth + kvWidth, kvWidth) };
  const lease = await attention.queryKeyValue(tensors);
  expectSame(lease.tensors.q.data, movePlan(plan.fwdQ, packed(0, qWidth), qWidth)[rank], 'q');
  expectSame(lease.tensors.k.data, movePlan(plan.fwdKv, packed(qWidth, kvWidth), kvWidth)[rank], 'k');
  expectSame(lease.tensors.v.data, movePlan(plan.fwdKv, packed(qWidth + kvWidth, kvWidth), kvWidth)[rank], 'v');
  const stagedBytes = lease.stagedBytes;
  lease.release();
  await dispatcher.close();
  return stagedBytes;
}

/** By name, as the tests call them. */
export const scenarios = {
  oracle,
  repeated,
  hold,
  abort,
  abortBetween,
  lost,
  mismatch,
  badInput,
  closeInFlight,
  closeInResync,
  transportCloses,
  overlappingBinds,
  timers,
  lateResync,
  strided,
};
