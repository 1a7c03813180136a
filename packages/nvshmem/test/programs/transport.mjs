/** The transport by itself: allocation, endpoints, teams, and how everything ends. */
import assert from 'node:assert/strict';
import { isMainThread } from 'node:worker_threads';
import { prefixStore } from '@ep/core';
import { nvshmem } from '@ep/nvshmem';
import { footprint } from './footprint.mjs';
import { codeOf, runRank } from './rank.mjs';

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
/** Detached windows drop their memory when their finalizers have run, a turn of the loop later. */
async function settled(wanted) {
  for (let i = 0; i < 200 && JSON.stringify(footprint()) !== JSON.stringify(wanted); i++) await pause(5);
  assert.deepEqual(footprint(), wanted);
}

await runRank(async ({ rank, worldSize, store }) => {
  const last = worldSize - 1;
  const signal = new AbortController().signal;
  let opened = 0;
  const open = (config = {}) =>
    nvshmem.shm.open(
      { rank, worldSize, store: prefixStore(store, `open ${opened++}`) },
      { signal, config: { timeoutMs: 60_000, ...config } },
    );

  const clean = footprint();
  const transport = await open();
  if (worldSize > 1) {
    await assert.rejects(open({ ranksOnHost: rank === 0 ? 1 : 2 }), { code: 'EP_RENDEZVOUS', message: /ranksOnHost/ });
  }
  // Allocation: refusals agree, and leave nothing behind.
  const idle = isMainThread ? footprint() : undefined;
  const small = { byteLength: 4096, signalSlots: 4 };
  if (worldSize > 1) {
    await assert.rejects(transport.allocate({ ...small, byteLength: rank === last ? 8192 : 4096 }), (error) => {
      assert.equal(error.code, 'EP_MISMATCH');
      assert.deepEqual(error.context.odd, rank === last ? Array.from({ length: last }, (_, i) => i) : [last]);
      assert.match(error.message, /8192 bytes/);
      return true;
    });
    await assert.rejects(transport.allocate({ ...small, signalSlots: rank }), { code: 'EP_MISMATCH' });
  }
  await assert.rejects(transport.allocate({ byteLength: 2 ** 45, signalSlots: 0 }), {
    code: 'EP_MEMORY_LIMIT',
    message: /leaves \d+ bytes/,
  });
  await assert.rejects(transport.allocate({ byteLength: Number.MAX_SAFE_INTEGER, signalSlots: 0 }), {
    code: 'EP_MEMORY_LIMIT',
  });
  for (const wrong of [
    { byteLength: -1 },
    { byteLength: 1.5 },
    { byteLength: '1' },
    { signalSlots: -1 },
    { signalSlots: 2 ** 33 },
  ]) {
    await assert.rejects(transport.allocate({ ...small, ...wrong }), { code: 'EP_INVALID_ARGUMENT' });
  }
  await assert.rejects(transport.allocate({ ...small, space: 'device' }), { code: 'EP_UNSUPPORTED' });
  if (idle) assert.deepEqual(footprint(), idle);
  await transport.barrier();

  const memory = await transport.allocate(small);
  const view = memory.view('u64', 0, 512);
  assert.ok(view.every((word) => word === 0n));
  await transport.barrier();
  const peer = (rank + 1) % worldSize;
  const endpoint = await transport.connect(peer);
  assert.equal(await transport.connect(peer), endpoint);
  view[0] = BigInt(rank) + 7n;
  await endpoint.put(memory.local(0, 8), memory.remote(peer, 64, 8), { signal: { slot: 0, op: 'inc' } });
  assert.equal(await memory.signals.until(0, { cmp: 'ge', value: 1n }), 1n);
  assert.equal(view[8], BigInt((rank + last) % worldSize) + 7n);
  await transport.barrier();

  // One bad request in a batch has its own status, and the others go through.
  const works = endpoint.submit([
    { kind: 'put-value', to: memory.remote(peer, 128, 8), value: 5n },
    { kind: 'signal', memory, signal: { slot: 99, op: 'inc' } },
    { kind: 'put', from: memory.local(0, 16), to: memory.remote(peer, 256, 8) },
    { kind: 'put-value', to: memory.remote(peer, 136, 8), value: 6n, signal: { slot: 1, op: 'add', value: 3n } },
  ]);
  assert.deepEqual(
    works.map((work) => work.status),
    ['done', 'failed', 'failed', 'done'],
  );
  await assert.rejects(Promise.resolve(works[1]), { code: 'EP_INVALID_ARGUMENT', message: /slot 99 of a pad with 4/ });
  await assert.rejects(Promise.resolve(works[2]), { code: 'EP_INVALID_ARGUMENT' });
  await endpoint.flush();
  await memory.signals.until(1, { cmp: 'eq', value: 3n });
  assert.deepEqual([view[16], view[17], view[32]], [5n, 6n, 0n]);
  // A failure that nobody looked at is thrown by the next call, once.
  endpoint.signal(memory, { slot: 4, op: 'inc' });
  assert.throws(() => endpoint.signal(memory, { slot: 0, op: 'inc' }), {
    code: 'EP_INVALID_ARGUMENT',
    message: /failed earlier/,
  });
  await endpoint.signal(memory, { slot: 0, op: 'inc' });

  const second = await open();
  const foreign = await second.allocate(small);
  const codes = [];
  for (const body of [
    () => endpoint.put(memory.local(0, 8), foreign.remote(peer, 0, 8)),
    () => endpoint.put(memory.local(0, 8), memory.remote(rank, 0, 8)),
    () => endpoint.putValue(memory.remote(peer, 0, 3), 1n),
    () => endpoint.putValue(memory.remote(peer, 4, 8), 1n),
    () => endpoint.signal(memory, { slot: 0, op: 'sub', value: 1n }),
    () => endpoint.signal(memory, { slot: 0, op: 'add', value: 1 }),
    () => memory.remote(worldSize, 0, 8),
    () => memory.remote(0, 4090, 8),
    () => memory.local(-1, 8),
    () => memory.view('f64', 4, 1),
    () => memory.signals.until(4, { cmp: 'ge', value: 1n }),
    () => transport.device(foreign),
    () => transport.connect(worldSize),
  ]) {
    codes.push(worldSize === 1 && String(body).includes('remote(rank') ? 'EP_INVALID_ARGUMENT' : await codeOf(body));
  }
  assert.deepEqual([...new Set(codes)], ['EP_INVALID_ARGUMENT'], String(codes));

  // Teams: disjoint halves by one call, closed on their own.
  const half = Array.from({ length: worldSize }, (_, r) => r).filter((r) => r % 2 === rank % 2);
  const team = await transport.createTeam(half, transport.world);
  for (let i = 0; i < 20; i++) await team.barrier();
  const told = await team.allGather(Uint8Array.of(rank));
  assert.deepEqual(
    told.map((bytes) => bytes[0]),
    half,
  );
  if (worldSize > 1) {
    const all = Array.from({ length: worldSize }, (_, r) => r);
    const lists = (r) => (r === 0 ? all : (all.toReversed?.() ?? [...all].reverse()));
    await assert.rejects(transport.createTeam(lists(rank), transport.world), { code: 'EP_MISMATCH' });
  }
  for (const wrong of [[0, 0], [worldSize], [0.5], [-1]]) {
    await assert.rejects(transport.createTeam(wrong, transport.world), { code: 'EP_INVALID_ARGUMENT' });
  }
  await transport.barrier();
  await team.close();
  await team.close();
  await assert.rejects(team.barrier(), { code: 'EP_CLOSED' });

  // What is under way when its object closes is cut off.
  const cutByMemory = codeOf(() => foreign.signals.until(0, { cmp: 'ge', value: 1n }));
  await pause(2);
  await foreign.close();
  assert.equal(await cutByMemory, 'EP_ABORTED');
  assert.equal(await codeOf(() => foreign.signals.peek(0)), 'EP_CLOSED');
  assert.equal(await codeOf(() => foreign.view('u8', 0, 1)), 'EP_CLOSED');
  await second.barrier();
  if (worldSize > 1) {
    // Nobody else comes to this barrier: it ends because this rank closes, or because all others have.
    const cut = codeOf(() => (rank === 0 ? second.barrier() : pause(20).then(() => second.allocate(small))));
    await pause(5);
    await second.close();
    assert.match(await cut, rank === 0 ? /^EP_(ABORTED|PEER_LOST)$/ : /^EP_CLOSED$/);
  }
  await Promise.all([second.close(), second.close()]);
  await assert.rejects(second.barrier(), { code: 'EP_CLOSED' });

  const controller = new AbortController();
  const reason = new Error('the caller has enough');
  const until = memory.signals.until(3, { cmp: 'ge', value: 1n }, { signal: controller.signal });
  setTimeout(() => controller.abort(reason), 3);
  await assert.rejects(until, (error) => error === reason);
  await assert.rejects(memory.signals.until(3, { cmp: 'ge', value: 1n }, { timeoutMs: 3 }), { code: 'EP_TIMEOUT' });
  if (worldSize > 1) {
    if (rank === 0) {
      // Timed out by the others' lateness, then gone on with: one barrier, not two.
      await assert.rejects(transport.barrier({ timeoutMs: 1 }), { code: 'EP_TIMEOUT', message: /awaited rank/ });
      await transport.barrier();
    } else {
      await pause(30);
      await transport.barrier();
    }
  }
  await transport.barrier();
  const held = memory.view('f64', 0, 8);
  await transport.close();
  assert.equal(held.length, 0, 'views are detached');
  assert.equal(view.length, 0);
  assert.throws(() => memory.view('u8', 0, 1), { code: 'EP_CLOSED' });
  assert.throws(() => endpoint.put(memory.local(0, 1), memory.remote(0, 0, 1)), { code: 'EP_CLOSED' });
  await transport.close();

  if (isMainThread) await settled(clean);
  // A store serves one open.
  const again = { rank, worldSize, store: prefixStore(store, 'open 0') };
  await assert.rejects(nvshmem.shm.open(again, { signal, timeoutMs: 2000 }), {
    code: 'EP_RENDEZVOUS',
    message: /second time/,
  });
});
