/** One rank of the attention benchmark; started by attention.ts. */
import { openFileStore, type Tensor, type TransportProvider, tensor } from '@ep/core';
import { allocateHost } from '@ep/native';
import { planAttention, shardsOfDocuments } from '@ep/plan';
import { HostStream } from '../src/host-stream.js';
import { compatBytesFor, leaseBytesFor, openCompatDispatcher, openDispatcher, type PartSpec } from '../src/index.js';
import type { RankTask, RankTimes } from './attention.js';
import { measureSteps } from './steps.js';

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

/** One way of moving the payload. */
interface Contender {
  readonly run: () => Promise<void>;
  /** Throws if the last run moved anything else than it should have. */
  readonly check: () => Promise<void>;
  readonly close: () => Promise<void>;
}

/**
 * Milliseconds of each repeat. The contenders take turns: a machine whose speed drifts, as a shared one does, slows all of them alike, and ratios within a
 * repeat stay true.
 */
async function race<K extends string>(contenders: Readonly<Record<K, Contender>>): Promise<Record<K, number[]>> {
  const entries = Object.entries<Contender>(contenders);
  const times = Object.fromEntries(entries.map(([name]) => [name, [] as number[]])) as Record<K, number[]>;
  for (let i = -WARM_UP; i < repeats; i++) {
    for (const [name, { run }] of entries) {
      await barrier();
      const begin = performance.now();
      await run();
      if (i >= 0) times[name as K].push(performance.now() - begin);
    }
  }
  for (const [, { check }] of entries) await check();
  await barrier();
  for (const [, { close }] of entries) await close();
  return times;
}

/** What all contenders move. */
interface Payload {
  readonly parts: readonly PartSpec[];
  readonly source: Tensor;
  readonly data: Uint32Array;
  readonly stream: HostStream;
  readonly verify: (received: Uint32Array) => void;
}

/** The machine's own copy, by the same threads at the same time. */
function copyOf({ data, stream }: Payload, nonTemporal: boolean): Contender {
  const from = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
  const target = new Uint8Array(allocateHost(data.byteLength));
  return {
    run: () => stream.copy(from, target, { nonTemporal }),
    async check() {
      if (Buffer.compare(from, target) !== 0) throw new Error('the copy differs from its source');
    },
    async close() {},
  };
}

async function dispatchOf(
  { parts, source, stream, verify }: Payload,
  options: { readonly leases?: number; readonly stagingBytes?: number },
): Promise<Contender> {
  const leaseBytes = leaseBytesFor(parts);
  const dispatcher = await openDispatcher(transport, { leaseBytes, stream, timeoutMs: TIMEOUT_MS, ...options });
  const { call } = await dispatcher.bind({ call: parts });
  return {
    run: async () => (await call.run({ q: source })).release(),
    async check() {
      const lease = await call.run({ q: source });
      verify(lease.tensors.q!.data as Uint32Array);
      lease.release();
    },
    close: () => dispatcher.close(),
  };
}

/** The original's kernel, with the barrier that each of its calls needs. */
async function perTokenOf({ parts, source, stream, verify }: Payload): Promise<Contender> {
  const dispatcher = await openCompatDispatcher(transport, {
    ...compatBytesFor(parts),
    stream,
    timeoutMs: TIMEOUT_MS,
  });
  const { call } = await dispatcher.bind({ call: parts });
  const { tensors: into } = await call.run({ q: source });
  return {
    run: async () => void (await call.run({ q: source }, { into })),
    check: async () => verify(into.q!.data as Uint32Array),
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
    fill(data, words);
    const parts = [{ name: 'q', plan, dtype: 'u32' as const, rowShape: [words] }];
    const stream = new HostStream();
    const payload: Payload = {
      parts,
      source: tensor('u32', [rows, words], data),
      data,
      stream,
      verify: (received) => verify(received, words, plan),
    };
    const series = await race({
      memcpy: copyOf(payload, false),
      nonTemporal: copyOf(payload, true),
      direct: await dispatchOf(payload, {}),
      staged: await dispatchOf(payload, { leases: 1, stagingBytes: Math.max(bytes, leaseBytesFor(parts)) }),
      compat: await perTokenOf(payload),
    });
    await stream.close();
    reports.push({ rowBytes, bytes, series });
  }
  return reports;
}

const report = task.stepCalls === undefined ? await throughput() : await measureSteps(transport, task.stepCalls);
await barrier();
await transport.close();
await store.close();
process.send!(report, () => process.disconnect());
