/** One rank of the attention benchmark; started by attention.ts. */
import { openFileStore, type Tensor, type TransportProvider, tensor } from '@ep/core';
import { allocateHost } from '@ep/native';
import { planAttention, shardsOfDocuments } from '@ep/plan';
import { HostStream } from '../src/host-stream.js';
import { compatBytesFor, leaseBytesFor, openCompatDispatcher, openDispatcher, type PartSpec } from '../src/index.js';
import type { RankTask, RankTimes } from './attention.js';

const task = JSON.parse(process.argv[2]!) as RankTask;
const { rank, worldSize, repeats } = task;
const TIMEOUT_MS = 120_000;
const WARM_UP = 2;

let found: unknown = await import(task.transport.url);
for (const name of task.transport.path) found = (found as Record<string, unknown>)[name];
const provider = found as TransportProvider<'bundled' | 'add'>;
const store = await openFileStore(task.store);
const transport = await provider.open(
  { rank, worldSize, store },
  { signal: new AbortController().signal, timeoutMs: TIMEOUT_MS },
);

/** Every rank sends the same number of rows to every rank, itself included, in shards of 512. */
function evenPlan(rowsPerRank: number) {
  const shard = 512;
  const perRank = Math.max(worldSize, Math.floor(rowsPerRank / shard / worldSize) * worldSize);
  const n = perRank * worldSize;
  const { shards } = shardsOfDocuments({
    worldSize,
    lengths: new Int32Array(n).fill(shard),
    homeRank: Int32Array.from({ length: n }, (_, i) => Math.floor(i / perRank)),
    documentOffsets: Int32Array.from({ length: n + 1 }, (_, i) => i),
  });
  return {
    plan: planAttention(
      shards,
      Int32Array.from({ length: n }, (_, i) => i % worldSize),
    ).fwdQ,
    rows: perRank * shard,
  };
}

/** What row `row` of rank `home` holds in its first word; the rest follows from it. */
const markOf = (home: number, row: number): number => (home + 1) * 1_000_003 + row;

function fill(data: Uint32Array, words: number): void {
  for (let row = 0; row * words < data.length; row++) {
    const mark = markOf(rank, row);
    for (let i = 0; i < words; i++) data[row * words + i] = mark + i;
  }
}

/** Checks every received row against the plan, first and last word and one in between. */
function verify(received: Uint32Array, words: number, plan: ReturnType<typeof evenPlan>['plan']): void {
  let rows = 0;
  for (let home = 0; home < worldSize; home++) {
    for (let e = plan.entryOffsets[home]!; e < plan.entryOffsets[home + 1]!; e++) {
      if (plan.dstRank[e] !== rank) continue;
      for (let i = 0; i < plan.length[e]!; i++, rows++) {
        const at = (plan.dstOffset[e]! + i) * words;
        const mark = markOf(home, plan.srcOffset[e]! + i);
        for (const word of [0, words >> 1, words - 1]) {
          if (received[at + word] !== (mark + word) >>> 0)
            throw new Error(
              `rank ${rank} row ${plan.dstOffset[e]! + i} word ${word}: found ${received[at + word]}, expected ${mark + word}`,
            );
        }
      }
    }
  }
  if (rows !== plan.recvTokens[rank]) throw new Error(`rank ${rank} received ${rows} of ${plan.recvTokens[rank]} rows`);
}

const barrierMemory = await transport.allocate({ byteLength: 64, signalSlots: worldSize, timeoutMs: TIMEOUT_MS });
const endpoints = await Promise.all(Array.from({ length: worldSize }, (_, peer) => transport.connect(peer)));
let rounds = 0n;

/** Counted signals: any transport offers them. */
async function barrier(): Promise<void> {
  rounds++;
  for (const endpoint of endpoints) endpoint.signal(barrierMemory, { slot: rank, op: 'add', value: 1n });
  for (let peer = 0; peer < worldSize; peer++) {
    await barrierMemory.signals.until(peer, { cmp: 'ge', value: rounds }, { timeoutMs: TIMEOUT_MS });
  }
}

async function series(body: () => Promise<void>): Promise<number[]> {
  const times: number[] = [];
  for (let i = -WARM_UP; i < repeats; i++) {
    await barrier();
    const begin = performance.now();
    await body();
    if (i >= 0) times.push(performance.now() - begin);
  }
  return times;
}

/** A few rows to every rank, call after call; each call's rows are checked. */
async function steps(calls: number) {
  const [rowsPerPair, words] = [2, 32];
  const n = worldSize * worldSize;
  const { shards } = shardsOfDocuments({
    worldSize,
    lengths: new Int32Array(n).fill(rowsPerPair),
    homeRank: Int32Array.from({ length: n }, (_, i) => Math.floor(i / worldSize)),
    documentOffsets: Int32Array.from({ length: n + 1 }, (_, i) => i),
  });
  const plan = planAttention(
    shards,
    Int32Array.from({ length: n }, (_, i) => i % worldSize),
  ).fwdQ;
  const rows = rowsPerPair * worldSize;
  const data = new Uint32Array(allocateHost(rows * words * 4));
  const source: Tensor = tensor('u32', [rows, words], data);
  const spec = [{ name: 'q', plan, dtype: 'u32' as const, rowShape: [words] }];
  const dispatcher = await openDispatcher(transport, { leaseBytes: leaseBytesFor(spec), timeoutMs: TIMEOUT_MS });
  const { call } = await dispatcher.bind({ call: spec });
  const microseconds = new Float64Array(calls);
  for (let i = -200; i < calls; i++) {
    data.fill(i + 1000);
    const begin = performance.now();
    const lease = await call.run({ q: source });
    const took = (performance.now() - begin) * 1000;
    if (i >= 0) microseconds[i] = took;
    const received = lease.tensors.q!.data as Uint32Array;
    if (received.some((word) => word !== i + 1000))
      throw new Error(`rank ${rank} call ${i} received another call's rows`);
    lease.release();
  }
  await barrier();
  await dispatcher.close();
  return { bytes: data.byteLength, microseconds };
}

/** The original's kernel, with the barrier that each of its calls needs. */
async function perToken(
  parts: readonly PartSpec[],
  source: Tensor,
  stream: HostStream,
  check: (received: Uint32Array) => void,
): Promise<number[]> {
  const dispatcher = await openCompatDispatcher(transport, {
    ...compatBytesFor(parts),
    stream,
    timeoutMs: TIMEOUT_MS,
  });
  const { call } = await dispatcher.bind({ call: parts });
  const { tensors: into } = await call.run({ q: source });
  const times = await series(async () => void (await call.run({ q: source }, { into })));
  check(into.q!.data as Uint32Array);
  await barrier();
  await dispatcher.close();
  return times;
}

async function throughput(): Promise<RankTimes[]> {
  const reports: RankTimes[] = [];
  for (const rowBytes of task.rowBytes) {
    const words = rowBytes / 4;
    const { plan, rows } = evenPlan(Math.ceil(task.payloadBytes / rowBytes));
    const bytes = rows * rowBytes;
    const data = new Uint32Array(allocateHost(bytes));
    fill(data, words);
    const source: Tensor = tensor('u32', [rows, words], data);
    const spec = [{ name: 'q', plan, dtype: 'u32' as const, rowShape: [words] }];
    const leaseBytes = leaseBytesFor(spec);

    // The machine's own copies, by the same threads at the same time, between the same kinds of memory.
    const stream = new HostStream();
    const target = new Uint8Array(allocateHost(bytes));
    const from = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    const copies = async (nonTemporal: boolean) => {
      const times = await series(() => stream.copy(from, target, { nonTemporal }));
      if (Buffer.compare(from, target) !== 0) throw new Error('the copy differs from its source');
      target.fill(0);
      return times;
    };
    const memcpy = await copies(false);
    const nonTemporal = await copies(true);

    const dispatched = async (options: { leases?: number; stagingBytes?: number }) => {
      const dispatcher = await openDispatcher(transport, { leaseBytes, stream, timeoutMs: TIMEOUT_MS, ...options });
      const { call } = await dispatcher.bind({ call: spec });
      const times = await series(async () => (await call.run({ q: source })).release());
      const lease = await call.run({ q: source });
      verify(lease.tensors.q!.data as Uint32Array, words, plan);
      lease.release();
      await barrier();
      await dispatcher.close();
      return times;
    };
    const direct = await dispatched({});
    const staged = await dispatched({ leases: 1, stagingBytes: Math.max(bytes, leaseBytes) });
    const compat = await perToken(spec, source, stream, (received) => verify(received, words, plan));
    await stream.close();
    reports.push({ rowBytes, bytes, series: { memcpy, nonTemporal, direct, staged, compat } });
  }
  return reports;
}

const report = task.stepCalls === undefined ? await throughput() : await steps(task.stepCalls);
await barrier();
await transport.close();
await store.close();
process.send!(report, () => process.disconnect());
