/** One of several ranks of a group whose members change. */
import assert from 'node:assert/strict';
import { readdirSync, readFileSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';
import { hostile } from '@ep/conformance/hostile';
import {
  byCapability,
  CloseScope,
  compose,
  isEpError,
  openFileStore,
  prefixStore,
  type Store,
  type Tensor,
} from '@ep/core';
import { type EfaTransport, efaGda } from '@ep/efa-gda';
import { type IbgdaTransport, ibgda } from '@ep/ibgda';
import { nvshmem, type ShmTransport } from '@ep/nvshmem';
import { type InitOptions, initProcessGroup, type ProcessGroup } from '../../src/index.js';
import type { ElasticArguments, ElasticMessage } from '../elastic/harness.js';

const given = JSON.parse(process.argv[2]!) as ElasticArguments;
const { rank, worldSize, capacity, victim, life, storePath } = given;
const tell = (message: ElasticMessage): boolean => process.send!(message);
const scope = new CloseScope();
const store = scope.add(await openFileStore(storePath));
const { signal } = new AbortController();
const range = (from: number, to: number): number[] => Array.from({ length: to - from }, (_, i) => from + i);
/** A transport has all places that a group may grow to; those who are there from the beginning open it. */
const member = { rank, worldSize: capacity, store };
const config = { activeRanks: range(0, worldSize) };
/** Those that let others in, each with its store. */
const letting: (readonly [ShmTransport | IbgdaTransport | EfaTransport, Store])[] = [];
const lets = <T extends (typeof letting)[number][0]>(one: T, own: Store = store): T => {
  letting.push([one, own]);
  return one;
};
const shmOf = async (own: Store): Promise<ShmTransport> => {
  const { shm } = nvshmem;
  const at = { ...member, store: own };
  return lets(life > 0 ? await shm.rejoin(at, { signal }) : await shm.open(at, { signal, config }), own);
};
const efaOf = async (own: Store): Promise<EfaTransport> =>
  lets(await efaGda.soft[life > 0 ? 'rejoin' : 'open']({ ...member, store: own }, { signal }), own);
const opened = {
  hostile: () => hostile.open(member, { signal, config: { seed: 1, maxDelayUs: 100 } }),
  nvshmem: () => shmOf(store),
  ibgda: async () => lets(await ibgda.soft[life > 0 ? 'rejoin' : 'open'](member, { signal })),
  efa: () => efaOf(store),
  /** Shared memory between pairs of ranks, EFA between these. */
  mixed: async () => {
    const shm = await shmOf(prefixStore(store, 'shm'));
    const efa = await efaOf(prefixStore(store, 'efa'));
    return compose([shm, efa], byCapability(range(0, capacity).map((one) => Math.floor(one / 2))));
  },
};
const transport = given.transport && scope.add(await opened[given.transport]());
const others = (size: number): number[] => range(0, size).filter((one) => one !== victim);

async function openGroup(options: Partial<InitOptions> = {}): Promise<ProcessGroup> {
  const joins = life > 0;
  return scope.add(
    await initProcessGroup({
      store,
      rank,
      worldSize,
      maxGroupSize: capacity,
      timeoutMs: 20_000,
      ...(transport && { backend: transport }),
      ...(joins && { isExtension: true }),
      ...options,
    }),
  );
}

const allocated = new Map<string, unknown>();
/** Zeroed memory of the group, which lives as long as it: the same one each time. */
function memoryOf(group: ProcessGroup, name: string, length: number): Tensor<'f64'> {
  const made = (allocated.get(name) as Tensor<'f64'> | undefined) ?? group.allocate('f64', length);
  allocated.set(name, made);
  made.data.fill(0);
  return made;
}

/** Everybody adds a digit of its own: says who took part. */
async function checkSum(group: ProcessGroup, ranks: readonly number[]): Promise<void> {
  const small = Float64Array.of(10 ** rank);
  const work = group.allReduce(small);
  await work;
  assert.deepEqual(work.contributors, ranks);
  assert.equal(
    small[0],
    ranks.reduce((sum, one) => sum + 10 ** one, 0),
  );
  const large = memoryOf(group, 'sum', 40_000);
  large.data.fill(10 ** rank);
  await group.allReduce(large);
  assert.ok(large.data.every((one) => one === small[0]));
}

/** Blocks for each rank, of several chunks: what is laid out by the number of ranks must be by the new one. */
async function checkBlocks(group: ProcessGroup, ranks: readonly number[]): Promise<void> {
  const LENGTH = 100_003;
  const { size } = group;
  const ordinary = (_: string, length: number) => new Float64Array(length);
  const shared = (name: string, length: number) => memoryOf(group, `${name} of ${size}`, length).data;
  for (const make of [ordinary, shared]) {
    const mine = make('mine', LENGTH).fill(rank + 1);
    const gathered = make('gathered', LENGTH * size);
    await group.allGatherIntoTensor(gathered, mine);
    for (const one of range(0, size)) {
      const expected = ranks.includes(one) ? one + 1 : 0;
      assert.ok(gathered.subarray(one * LENGTH, (one + 1) * LENGTH).every((found) => found === expected));
    }
    const parts = make('parts', LENGTH * size);
    for (const one of range(0, size)) parts.fill(100 * (rank + 1) + one, one * LENGTH, (one + 1) * LENGTH);
    await group.reduceScatterTensor(mine, parts);
    const sum = ranks.reduce((total, one) => total + 100 * (one + 1) + rank, 0);
    assert.ok(mine.every((found) => found === sum));
  }
}

async function failure(promise: PromiseLike<unknown>): Promise<string> {
  try {
    await promise;
    return 'none';
  } catch (error) {
    if (!isEpError(error)) throw error;
    return error.code;
  }
}

/** Every pair, both ways, and messages larger than a sender's pool. */
async function checkMessages(group: ProcessGroup, ranks: readonly number[]): Promise<void> {
  const peers = ranks.filter((one) => one !== rank);
  const room = peers.map(() => new Int32Array(200_000));
  const receives = peers.map((peer, i) => group.recv(room[i]!, peer));
  const sends = peers.map((peer) => group.send(new Int32Array(200_000).fill(100 * rank + peer), peer));
  await Promise.all([...sends, ...receives]);
  for (const [i, peer] of peers.entries()) assert.ok(room[i]!.every((one) => one === 100 * peer + rank));
}

/** Over a transport, which others come to first. */
async function readmit(joining: readonly number[]): Promise<void> {
  for (const [one, own] of letting) {
    // One that leaves in order takes its time.
    while ((await failure(one.readmit({ store: own, joining, timeoutMs: 40_000 }))) === 'EP_INVALID_ARGUMENT');
  }
}

/** A software NIC ends with its process: what it was told, and has not carried out, is lost. */
async function land({ size }: ProcessGroup): Promise<void> {
  if (transport === undefined) return;
  for (const peer of others(size)) await (await transport.connect(peer)).flush();
}

async function takeIn(group: ProcessGroup, ranks: readonly number[]): Promise<void> {
  for (;;) {
    const states = await group.peerState(ranks);
    if (states.every((state) => state === 'joining')) break;
    await delay(5);
  }
  await group.recoverRanks(ranks);
}

/** Dies on request of the round; all others go on, take another process in its place, and are complete again. */
async function replaced(): Promise<void> {
  const ROUNDS = 4;
  const all = range(0, worldSize);
  const group = await openGroup();
  if (life > 0) {
    assert.deepEqual(group.activeRanks, [rank]);
    await checkSum(group, [rank]);
    await group.joinGroup();
    await checkSum(group, all);
    await checkMessages(group, all);
    await checkBlocks(group, all);
  }
  const held: ReturnType<typeof holdings>[] = [];
  for (let round = life; round < ROUNDS; round++) {
    const part = await group.newGroup([victim, (victim + 1) % worldSize]);
    if (part !== undefined) await part.barrier();
    await group.barrier();
    if (rank === victim) {
      await land(group);
      process.kill(process.pid, 'SIGKILL');
    }
    if (rank === (victim + 1) % worldSize) tell({ kind: 'start', rank: victim });
    // Whoever enters before the death is seen loses the call, and all alike.
    const code = await failure(group.allReduce(new Float64Array(1)));
    assert.ok(code === 'none' || code === 'EP_PEER_LOST', code);
    await checkSum(group, others(worldSize));
    assert.equal(group.size, worldSize);
    await readmit([victim]);
    await takeIn(group, [victim]);
    assert.deepEqual(group.activeRanks, all);
    await checkSum(group, all);
    await checkMessages(group, all);
    await checkBlocks(group, all);
    await part?.close();
    held.push(holdings());
  }
  await group.barrier();
  // The first round maps what later ones use again.
  if (life === 0 && rank !== victim) assert.deepEqual(held.at(-1), held[1]);
}

/** Leaves in order: takes itself out with the others, and ends. Another process comes in its place. */
async function left(): Promise<void> {
  const all = range(0, worldSize);
  const group = await openGroup();
  if (life > 0) {
    await group.joinGroup();
  } else {
    await checkSum(group, all);
    await group.deactivate([victim]);
    if (rank === victim) {
      tell({ kind: 'start', rank });
      return;
    }
    await checkSum(group, others(worldSize));
    await checkBlocks(group, others(worldSize));
    await readmit([victim]);
    await takeIn(group, [victim]);
  }
  await checkSum(group, all);
  await checkMessages(group, all);
  await checkBlocks(group, all);
  await group.barrier();
}

/** What a process has of groups: mappings of their segments and open files. */
function holdings(): { readonly mappings: number; readonly files: number } {
  const mappings = readFileSync('/proc/self/maps', 'utf8')
    .split('\n')
    .filter((line) => line.includes('ep-segment'));
  return { mappings: mappings.length, files: readdirSync('/proc/self/fd').length };
}

/** Four rounds in which the victim is taken out and comes back leave nothing behind on the others. */
async function rounds(): Promise<void> {
  const all = range(0, worldSize);
  const group = await openGroup();
  const early: ReturnType<typeof holdings>[] = [];
  for (let round = 0; round < 4; round++) {
    await checkMessages(group, all);
    const value = Float64Array.of(1);
    await group.allReduce(value);
    assert.equal(value[0], worldSize);
    await group.deactivate([victim]);
    if (rank === victim) await group.joinGroup();
    else await takeIn(group, [victim]);
    early.push(holdings());
  }
  await group.barrier();
  if (rank !== victim) assert.deepEqual(early.at(-1), early[0]);
}

/** Stops for longer than the others wait; they take it out, and in again when it comes back. Its tensors are still there. */
async function stopped(): Promise<void> {
  const all = range(0, worldSize);
  const group = await openGroup({ onTimeout: 'evict' });
  const kept = group.allocate('f64', 1000);
  kept.data.fill(rank);
  for (let round = 0; round < 3; round++) {
    await checkSum(group, all);
    await group.barrier();
    // HAZARD: a rank that stops with its last words about the barrier under way stops the others in it.
    if (rank !== victim) await store.set(`passed/${round}/${rank}`, new Uint8Array(1));
    if (rank === victim) {
      await store.wait(others(worldSize).map((one) => `passed/${round}/${one}`));
      process.kill(process.pid, 'SIGSTOP');
      const code = await failure(group.allReduce(new Float64Array(1)));
      assert.equal(code, 'EP_EVICTED');
      assert.equal(await failure(group.barrier()), 'EP_EVICTED');
      assert.ok(!group.activeRanks.includes(rank));
      await group.joinGroup();
    } else {
      const code = await failure(group.allReduce(new Float64Array(1), { timeoutMs: 300 }));
      assert.ok(code === 'none' || code === 'EP_PEER_LOST', code);
      await checkSum(group, others(worldSize));
      if (rank === others(worldSize)[0]) tell({ kind: 'continue', rank: victim });
      await takeIn(group, [victim]);
    }
    await checkSum(group, all);
    assert.ok(kept.data.every((one) => one === rank));
    const gathered = group.allocate('f64', 1000 * worldSize);
    await group.allGatherIntoTensor(gathered, kept);
    for (const one of all) assert.equal(gathered.data[1000 * one + 999], one);
  }
}

/** Stops while this rank's group thread reduces tensors that hold `rank`: of its slice the first element is there and the last is not. False: it was too late. */
function stopInside(data: Float32Array): boolean {
  const [first, last] = [
    Math.ceil((rank * data.length) / worldSize) + 1000,
    Math.floor(((rank + 1) * data.length) / worldSize) - 1000,
  ];
  const until = performance.now() + 1000;
  while (data[first] === rank && performance.now() < until);
  const inside = data[first] !== rank && data[last] === rank;
  process.kill(process.pid, 'SIGSTOP');
  return inside;
}

/** Stopped in the middle of writing into the others' memory: what it still writes later does not arrive there. */
async function stoppedWriting(): Promise<void> {
  const LENGTH = 24_000_000;
  const group = await openGroup({ onTimeout: 'evict' });
  const target = group.allocate('f32', LENGTH);
  let inside = false;
  await group.barrier();
  if (rank === victim) {
    target.data.fill(rank);
    const work = group.allReduce(target);
    inside = stopInside(target.data);
    const code = await failure(work);
    assert.ok(code === 'none' || code === 'EP_EVICTED', code);
    if (inside) tell({ kind: 'hit' });
    return;
  }
  target.data.fill(rank);
  const code = await failure(group.allReduce(target, { timeoutMs: 400 }));
  assert.ok(code === 'none' || code === 'EP_PEER_LOST', code);
  target.data.fill(1);
  await failure(group.barrier({ timeoutMs: 400 }));
  await group.allReduce(target);
  const sum = others(worldSize).length;
  assert.ok(target.data.every((one) => one === sum));
  if (rank === others(worldSize)[0]) tell({ kind: 'continue', rank: victim });
  await delay(300);
  assert.ok(
    target.data.every((one) => one === sum),
    'somebody wrote into memory that is not theirs any more',
  );
  await group.barrier();
}

/** Ranks beyond those of the beginning, under load; then groups of them with holes. */
async function grown(): Promise<void> {
  const group = await openGroup();
  const all = range(0, capacity);
  if (life > 0) {
    await group.joinGroup();
  } else {
    await checkSum(group, range(0, worldSize));
    await group.newGroup([0]);
    assert.equal(await group.numSyncedRanks(), worldSize);
    assert.equal(await failure(group.recoverRanks([])), 'none');
    await group.extendGroupSizeTo(capacity);
    assert.equal(group.size, capacity);
    assert.deepEqual(group.ranks, all);
    assert.equal(await failure(group.recoverRanks([worldSize])), 'EP_NOT_READY');
    if (rank === 0) for (const added of range(worldSize, capacity)) tell({ kind: 'start', rank: added });
    const admitted = readmit(range(worldSize, capacity));
    let ready = false;
    while (!ready) {
      for (let i = 0; i < 50; i++) await checkSum(group, range(0, worldSize));
      const states = await group.peerState(range(worldSize, capacity));
      ready = states.every((state) => state === 'joining');
    }
    await admitted;
    await group.recoverRanks(range(worldSize, capacity));
  }
  assert.equal(group.size, capacity);
  await checkSum(group, all);
  await checkMessages(group, all);
  await checkBlocks(group, all);
  assert.equal(await group.numSyncedRanks(), capacity);
  const outputs = all.map(() => new Int32Array(3));
  await group.allGather(outputs, new Int32Array(3).fill(rank));
  for (const one of all) assert.equal(outputs[one]![2], one);
  const parts = [[0, capacity - 1], range(0, capacity).filter((one) => one % 2 === 0), [capacity - 1, 1]];
  for (const members of parts) {
    const part = await group.newGroup(members);
    if (part === undefined) continue;
    const value = Float64Array.of(rank);
    await part.allReduce(value);
    assert.equal(
      value[0],
      members.reduce((sum, one) => sum + one, 0),
    );
    await part.close();
  }
  await group.barrier();
}

/** A group that begins with holes; one is filled, one stays. */
async function holes(): Promise<void> {
  const filled = 1;
  const first = range(0, worldSize).filter((one) => one % 2 === 0);
  if (rank % 2 === 1 && rank !== filled) {
    // A transport is opened by all of its ranks, and the first group over it.
    if (transport !== undefined) await openGroup({ activeRanks: first, isExtension: true });
    return;
  }
  const group = await openGroup({ activeRanks: first, ...(rank === filled && { isExtension: true }) });
  if (rank === filled) {
    await group.joinGroup();
  } else {
    assert.deepEqual(group.activeRanks, first);
    await checkSum(group, first);
    const to = new Int32Array(1);
    assert.equal(await failure(group.send(to, filled)), 'EP_PEER_LOST');
    await takeIn(group, [filled]);
  }
  const now = [...first, filled].sort((a, b) => a - b);
  await checkSum(group, now);
  await checkMessages(group, now);
  await group.barrier();
}

/** Taken out on purpose, with its knowledge or without; a group that failed agrees anew. */
async function deactivated(): Promise<void> {
  const all = range(0, worldSize);
  const group = await openGroup();
  await checkSum(group, all);
  assert.throws(() => group.deactivate(all), { code: 'EP_INVALID_ARGUMENT' });
  await group.barrier();
  // It knows.
  await group.deactivate([victim]);
  assert.deepEqual(group.activeRanks, others(worldSize));
  if (rank === victim) {
    await group.joinGroup();
  } else {
    await checkSum(group, others(worldSize));
    await takeIn(group, [victim]);
  }
  await checkSum(group, all);
  // It does not come: all wait in vain, then go on without it.
  if (rank === victim) {
    await delay(900);
    assert.ok(['EP_EVICTED', 'EP_ABORTED', 'EP_TIMEOUT'].includes(await failure(group.barrier())));
    await group.deactivate([victim]).catch(() => {});
    await group.joinGroup();
  } else {
    const code = await failure(group.barrier({ timeoutMs: 200 }));
    assert.ok(code === 'EP_TIMEOUT' || code === 'EP_ABORTED', code);
    await group.deactivate([victim]);
    await checkSum(group, others(worldSize));
    await takeIn(group, [victim]);
  }
  await checkSum(group, all);
  // Nobody leaves: one gave up.
  const cut = new AbortController();
  const work = rank === victim ? group.barrier({ signal: cut.signal }) : undefined;
  if (work !== undefined) {
    cut.abort(new Error('given up'));
    await assert.rejects(Promise.resolve(work), /given up/);
  } else {
    await delay(100);
    const code = await failure(group.barrier());
    assert.equal(code, 'EP_ABORTED');
  }
  await group.deactivate([]);
  await checkSum(group, all);
  // One has made fewer calls than the others, then more.
  if (rank !== victim) {
    const code = await failure(group.barrier({ timeoutMs: 100 }));
    assert.ok(code === 'EP_TIMEOUT' || code === 'EP_ABORTED', code);
    assert.equal(await failure(group.barrier()), 'EP_POISONED');
  }
  await group.deactivate([]);
  await checkSum(group, all);
  if (rank === victim) {
    const code = await failure(group.barrier({ timeoutMs: 100 }));
    assert.ok(code === 'EP_TIMEOUT' || code === 'EP_ABORTED', code);
    for (let i = 0; i < 5; i++) assert.equal(await failure(group.barrier()), 'EP_POISONED');
  }
  await group.deactivate([]);
  await checkSum(group, all);
}

/** Stopped in the middle of writing into the others' memory, where a call that times out poisons the group: they take it out themselves. */
async function stoppedAndDeactivated(): Promise<void> {
  const LENGTH = 24_000_000;
  const group = await openGroup();
  const target = group.allocate('f32', LENGTH);
  await group.barrier();
  target.data.fill(rank);
  if (rank === victim) {
    const work = group.allReduce(target);
    const inside = stopInside(target.data);
    const code = await failure(work);
    assert.ok(code === 'none' || code === 'EP_EVICTED' || code === 'EP_ABORTED' || code === 'EP_TIMEOUT', code);
    if (inside) tell({ kind: 'hit' });
    return;
  }
  const codes = ['none', 'EP_TIMEOUT', 'EP_ABORTED'];
  const code = await failure(group.allReduce(target, { timeoutMs: 400 }));
  assert.ok(codes.includes(code), code);
  await group.deactivate([victim], { timeoutMs: 10_000 });
  target.data.fill(1);
  await group.allReduce(target);
  const sum = others(worldSize).length;
  assert.ok(target.data.every((one) => one === sum));
  if (rank === others(worldSize)[0]) tell({ kind: 'continue', rank: victim });
  await delay(300);
  assert.ok(
    target.data.every((one) => one === sum),
    'somebody wrote into memory that is not theirs any more',
  );
  await group.barrier();
}

/** Taken out and in, many times, where it may be late in the call before: nothing of that is left behind. */
async function again(): Promise<void> {
  const ROUNDS = 40;
  const WARM = 8;
  const group = await openGroup();
  const all = range(0, worldSize);
  const { gc } = globalThis;
  const counted = async (): Promise<readonly number[]> => {
    gc!();
    await delay(20);
    gc!();
    const mapped = readFileSync('/proc/self/maps', 'utf8').split('ep-segment').length;
    return [mapped, readdirSync('/proc/self/fd').length, readdirSync('/proc/self/task').length];
  };
  const tensor = group.allocate('f64', 300_000);
  let before: readonly number[] = [];
  for (let round = 0; round < ROUNDS; round++) {
    if (round === WARM) before = await counted();
    const code = await failure(group.allReduce(tensor));
    assert.ok(code === 'none' || (rank === victim && code === 'EP_EVICTED'), code);
    await group.deactivate([victim]);
    assert.deepEqual(group.activeRanks, others(worldSize));
    if (rank === victim) await group.joinGroup();
    else await takeIn(group, [victim]);
    assert.deepEqual(group.activeRanks, all);
  }
  await group.barrier();
  const after = await counted();
  for (const [i, count] of after.entries()) assert.ok(count <= before[i]! + 2, `${after} after ${before}`);
  await group.barrier();
}

const scenarios: Readonly<Record<string, () => Promise<void>>> = {
  replaced,
  left,
  rounds,
  stopped,
  stoppedWriting,
  stoppedAndDeactivated,
  grown,
  holes,
  deactivated,
  again,
};
try {
  await scenarios[given.scenario]!();
  await scope.close();
  tell({ kind: 'done' });
} catch (error) {
  tell({ kind: 'failed', why: error instanceof Error ? (error.stack ?? error.message) : String(error) });
}
process.disconnect();
