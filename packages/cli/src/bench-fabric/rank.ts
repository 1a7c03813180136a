/** One rank of `ep bench fabric`. Whatever is timed is compared afterwards, and no turn moves the bytes of the one before it. */
import { exchange, openFileStore, prefixStore, tensor, type Work } from '@ep/core';
import { HostStream, leaseBytesFor, openDispatcher } from '@ep/cuda-kernels';
import { allocateHost, native, nativePlaceOf } from '@ep/native';
import { nvshmem } from '@ep/nvshmem';
import { planAttention, shardsOfDocuments } from '@ep/plan';
import { movePlan } from '@ep/plan/reference';
import { type FabricTask, type FabricTimes, libraryName } from './task.js';

const task = JSON.parse(process.argv[2]!) as FabricTask;
const { rank, address, ranksOnHost, rounds, turns, messageBytes, messages, window, rowBytes } = task;
const worldSize = 2;
const peer = 1 - rank;
const timeoutMs = 60_000;

const store = await openFileStore(task.store);
const transport = await nvshmem.fabric.open(
  { rank, worldSize, store: prefixStore(store, 'fabric') },
  { signal: new AbortController().signal, config: { address, ranksOnHost, timeoutMs } },
);
const { binding, operations } = native();
const { provider, version } = transport.offer;
const link = new binding.FabricLink({ library: libraryName, provider, address, gpu: -1 }, messages * messageBytes);
const met = { rank, worldSize, key: 'raw', bytes: link.description() };
link.connect((await exchange(store, met, { timeoutMs }))[peer]!);

const memory = await transport.allocate({ byteLength: 2 * window * messageBytes, signalSlots: 3 });
const endpoint = await transport.connect(peer);
const kernels = new binding.HostStream(0);
const samples = new Float64Array(allocateHost(8 * rounds));
const operand = nativePlaceOf(samples)!.operand;

function spreadOf(values: Float64Array): readonly [number, number] {
  const sorted = values.toSorted();
  const at = (fraction: number): number => sorted[Math.floor(rounds * fraction)]!;
  return [at(0.5), at(0.99)];
}

/** Half of a round in microseconds. */
const latency = (): readonly [number, number] => spreadOf(samples.map((ns) => ns / 2000));

async function rawPingPong(): Promise<readonly [number, number]> {
  await transport.barrier();
  link.pingPong(rank === 0, operand, timeoutMs);
  return latency();
}

async function putPingPong(): Promise<readonly [number, number]> {
  const base = memory.signals.peek(0);
  await transport.barrier();
  const { status, expected, found } = await operations.run(() =>
    kernels.pingPong({
      handle: transport.device(memory).bytes,
      peer,
      first: rank === 0,
      rounds,
      byteLength: 8,
      slot: 0,
      base,
      samples: operand,
      timeoutMs,
    }),
  );
  if (status !== 0) throw new Error(`ping-pong: native status ${status}, expected ${expected}, found ${found}`);
  return latency();
}

/** Rank 0 awaits each put of its, rank 1 that all have come. */
async function awaitedPuts(): Promise<readonly [number, number]> {
  const slot = 2;
  const before = memory.signals.peek(slot);
  await transport.barrier();
  const us = new Float64Array(rounds);
  if (rank === 0) {
    const [from, to] = [memory.local(0, 8), memory.remote(peer, 8, 8)];
    for (let i = 0; i < rounds; i++) {
      const begin = performance.now();
      await endpoint.put(from, to, { signal: { slot, op: 'inc' } });
      us[i] = (performance.now() - begin) * 1000;
    }
  } else {
    await memory.signals.until(slot, { cmp: 'ge', value: before + BigInt(rounds) });
  }
  return spreadOf(us);
}

/** One direction: rank 0's to rank 1. */
async function rawStream(turn: number): Promise<number> {
  await transport.barrier();
  const [sends, receives] = rank === 0 ? [messages, 0] : [0, messages];
  return link.stream(sends, receives, messageBytes, window, window, turn, timeoutMs);
}

/** From and to as much memory as a dispatch: what stays in caches takes less time. */
async function rawBothWays(turn: number): Promise<number> {
  await transport.barrier();
  return link.stream(messages, messages, messageBytes, window, messages, turn, timeoutMs);
}

const wordOf = (source: number, turn: number): number =>
  (Math.imul(source + 1, 0x9e3779b1) + Math.imul(turn + 1, 0x85ebca77)) >>> 0;

/** Every word says whose it is, in which turn, and where it lay. */
function fill(words: Uint32Array, source: number, turn: number): void {
  const base = wordOf(source, turn);
  for (let i = 0; i < words.length; i++) words[i] = base + i;
}

/** One direction, too: of `put`, which is to end when the last one has been carried out by rank 1. */
async function timedPuts(turn: number, put: () => Promise<number>): Promise<number> {
  const bytes = window * messageBytes;
  fill(memory.view('u32', 0, bytes / 4), rank, turn);
  const before = memory.signals.peek(1);
  await transport.barrier();
  const seconds = rank === 0 ? await put() : 0;
  await transport.barrier();
  if (rank === 1) {
    if (memory.signals.peek(1) !== before + BigInt(messages)) throw new Error('puts: signals are missing');
    const found = memory.view('u32', bytes, bytes / 4);
    const base = wordOf(0, turn);
    const wrong = found.findIndex((word, i) => word !== (base + i) >>> 0);
    if (wrong >= 0) throw new Error(`puts: word ${wrong} of turn ${turn} is not the one that was sent`);
  }
  return seconds;
}

async function putsOfKernel(): Promise<number> {
  const handle = transport.device(memory).bytes;
  const wanted = { handle, peer, messages, byteLength: messageBytes, window, slot: 1, timeoutMs };
  const { status, found } = await operations.run(() => kernels.putStream(wanted));
  if (status !== 0) throw new Error(`puts of a kernel: native status ${status}, ${found} of ${messages} ended`);
  return Number(found) / 1e9;
}

async function putsOfJs(): Promise<number> {
  const bytes = window * messageBytes;
  const begin = performance.now();
  const under: Work[] = [];
  for (let i = 0; i < messages; i++) {
    if (under.length === window) await under.shift();
    const at = (i % window) * messageBytes;
    const [from, to] = [memory.local(at, messageBytes), memory.remote(peer, bytes + at, messageBytes)];
    under.push(endpoint.put(from, to, { signal: { slot: 1, op: 'inc' } }));
  }
  await Promise.all(under);
  return (performance.now() - begin) / 1000;
}

/** All rows of either rank go to the other: what crosses the network is what `rawBothWays` moves. */
const rows = (messages * messageBytes) / rowBytes;
const words = rowBytes / 4;
const { shards } = shardsOfDocuments({
  worldSize,
  lengths: new Int32Array(worldSize).fill(rows),
  homeRank: Int32Array.from({ length: worldSize }, (_, document) => document),
  documentOffsets: Int32Array.from({ length: worldSize + 1 }, (_, document) => document),
});
const plan = planAttention(shards, Int32Array.of(1, 0)).fwdQ;
const data = new Uint32Array(allocateHost(rows * rowBytes));
const parts = [{ name: 'q', plan, dtype: 'u32' as const, rowShape: [words] }];
const stream = new HostStream();
const dispatcher = await openDispatcher(transport, { leaseBytes: leaseBytesFor(parts), stream, timeoutMs });
const { call } = await dispatcher.bind({ call: parts });

async function dispatch(turn: number): Promise<number> {
  fill(data, rank, turn);
  await transport.barrier();
  const begin = performance.now();
  const lease = await call.run({ q: tensor('u32', [rows, words], data) });
  const seconds = (performance.now() - begin) / 1000;
  const sources = Array.from({ length: worldSize }, (_, source) => {
    if (source === rank) return data;
    const theirs = new Uint32Array(data.length);
    fill(theirs, source, turn);
    return theirs;
  });
  const expected = movePlan(plan, sources, words)[rank]!;
  const found = lease.tensors.q!.data as Uint32Array;
  const bytesOf = (of: Uint32Array): Buffer => Buffer.from(of.buffer, of.byteOffset, of.byteLength);
  if (Buffer.compare(bytesOf(found.subarray(0, expected.length)), bytesOf(expected)) !== 0)
    throw new Error(`dispatch: rank ${rank} received other rows in turn ${turn} than the plan says`);
  lease.release();
  return seconds;
}

const times = {
  latency: {
    raw: [] as (readonly [number, number])[],
    put: [] as (readonly [number, number])[],
    awaited: [] as (readonly [number, number])[],
  },
  seconds: {
    raw: [] as number[],
    put: [] as number[],
    awaited: [] as number[],
    'raw both ways': [] as number[],
    dispatch: [] as number[],
  },
};
for (let turn = 0; turn <= turns; turn++) {
  const [raw, put, awaited] = [await rawPingPong(), await putPingPong(), await awaitedPuts()];
  const raws = await rawStream(2 * turn);
  const [puts, awaitedOnes] = [await timedPuts(2 * turn, putsOfKernel), await timedPuts(2 * turn + 1, putsOfJs)];
  const bothWays = [await rawBothWays(2 * turn + 1), await dispatch(turn)] as const;
  if (turn === 0) continue;
  times.latency.raw.push(raw);
  times.latency.put.push(put);
  times.latency.awaited.push(awaited);
  times.seconds.raw.push(raws);
  times.seconds.put.push(puts);
  times.seconds.awaited.push(awaitedOnes);
  times.seconds['raw both ways'].push(bothWays[0]);
  times.seconds.dispatch.push(bothWays[1]);
}
await transport.barrier();
link.close();
await dispatcher.close();
await stream.close();
kernels.close();
const report: FabricTimes = { provider, version, ...times };
await transport.close();
await store.close();
process.stdout.write(`${JSON.stringify(report)}\n`);
