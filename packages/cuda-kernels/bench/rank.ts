/** One rank of the attention benchmark; started by attention.ts. */
import { openFileStore, type Tensor, type TransportProvider, tensor } from '@ep/core';
import { allocateHost } from '@ep/native';
import { planAttention, shardsOfDocuments } from '@ep/plan';
import { HostStream } from '../src/host-stream.js';
import { compatBytesFor, leaseBytesFor, openCompatDispatcher, openDispatcher, type PartSpec } from '../src/index.js';
import type { RankTask, RankTimes } from './attention.js';
import { type Contender, race } from './race.js';
import { checkRows, fillRows } from './rows.js';
import { measureSteps } from './steps.js';

const task = JSON.parse(process.argv[2]!) as RankTask;
const { rank, worldSize, repeats } = task;
const TIMEOUT_MS = 120_000;

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

/** What all contenders move. */
interface Payload {
  readonly parts: readonly PartSpec[];
  readonly source: Tensor;
  readonly data: Uint32Array;
  readonly stream: HostStream;
  readonly check: (received: Uint32Array, round: number) => void;
}

/** The machine's own copy, by the same threads at the same time. */
function copyOf({ data, stream }: Payload, nonTemporal: boolean): Contender {
  const from = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
  const target = new Uint8Array(allocateHost(data.byteLength));
  return {
    run: () => stream.copy(from, target, { nonTemporal }),
    check() {
      if (Buffer.compare(from, target) !== 0) throw new Error('the copy differs from its source');
    },
    release() {},
    async close() {},
  };
}

async function dispatchOf(
  { parts, source, stream, check }: Payload,
  options: { readonly leases?: number; readonly stagingBytes?: number },
): Promise<Contender> {
  const leaseBytes = leaseBytesFor(parts);
  const dispatcher = await openDispatcher(transport, { leaseBytes, stream, timeoutMs: TIMEOUT_MS, ...options });
  const { call } = await dispatcher.bind({ call: parts });
  let lease: Awaited<ReturnType<typeof call.run>>;
  return {
    async run() {
      lease = await call.run({ q: source });
    },
    check: (round) => check(lease.tensors.q!.data as Uint32Array, round),
    release: () => lease.release(),
    close: () => dispatcher.close(),
  };
}

/** The original's kernel, with the barrier that each of its calls needs. */
async function perTokenOf({ parts, source, stream, check }: Payload): Promise<Contender> {
  const dispatcher = await openCompatDispatcher(transport, {
    ...compatBytesFor(parts),
    stream,
    timeoutMs: TIMEOUT_MS,
  });
  const { call } = await dispatcher.bind({ call: parts });
  const { tensors: into } = await call.run({ q: source });
  return {
    run: async () => void (await call.run({ q: source }, { into })),
    check: (round) => check(into.q!.data as Uint32Array, round),
    release() {},
    close: () => dispatcher.close(),
  };
}

async function throughput(): Promise<RankTimes[]> {
  const reports: RankTimes[] = [];
  for (const rowBytes of task.rowBytes) {
    if (task.rank === 0) process.send!(`dispatch in rows of ${rowBytes} bytes, ${task.worldSize} ranks`);
    const words = rowBytes / 4;
    const { plan, rows } = evenPlan(Math.ceil(task.payloadBytes / rowBytes));
    const bytes = rows * rowBytes;
    const data = new Uint32Array(allocateHost(bytes));
    const parts = [{ name: 'q', plan, dtype: 'u32' as const, rowShape: [words] }];
    const stream = new HostStream();
    const payload: Payload = {
      parts,
      source: tensor('u32', [rows, words], data),
      data,
      stream,
      check: (received, round) => checkRows(received, plan, rank, words, round),
    };
    const contenders = {
      memcpy: copyOf(payload, false),
      nonTemporal: copyOf(payload, true),
      direct: await dispatchOf(payload, {}),
      staged: await dispatchOf(payload, { leases: 1, stagingBytes: Math.max(bytes, leaseBytesFor(parts)) }),
      compat: await perTokenOf(payload),
    };
    const series = await race(contenders, { repeats, barrier, fill: (round) => fillRows(data, rank, round) });
    await stream.close();
    reports.push({ rowBytes, bytes, series });
  }
  return reports;
}

const report =
  task.stepCalls === undefined ? await throughput() : await measureSteps(transport, task.stepCalls, barrier);
await barrier();
await transport.close();
await store.close();
process.send!(report, () => process.disconnect());
