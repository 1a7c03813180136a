/** One rank of `ep bench moe`, over shared memory or a software NIC. Contenders take turns, so that a machine whose speed drifts slows all of them alike; what they moved is verified. */
import { initProcessGroup } from '@ep/collectives';
import { openFileStore, prefixStore, type Tensor, tensor } from '@ep/core';
import { HostStream, type MoeBuffer, type MoeBufferOptions, openMoeBuffer } from '@ep/cuda-kernels';
import { efaGda } from '@ep/efa-gda';
import { ibgda } from '@ep/ibgda';
import { allocateHost } from '@ep/native';
import { nvshmem } from '@ep/nvshmem';
import { rankTopk, routingLayout } from '@ep/plan/moe';
import { planShape, QUANTISED } from './shapes.js';
import type { MoeTask, MoeTimes } from './task.js';
import { Verifier } from './verify.js';

const task = JSON.parse(process.argv[2]!) as MoeTask;
const { rank, worldSize, mode, tokens, hidden, experts, topK, repeats } = task;
const WARM_UP = 2;
const TIMEOUT_MS = 120_000;

const store = await openFileStore(task.store);
const member = { rank, worldSize, store };
const limits = { signal: new AbortController().signal, timeoutMs: TIMEOUT_MS };
const openers = {
  shm: () => nvshmem.shm.open(member, limits),
  ibgda: () => ibgda.soft.open(member, limits),
  efa: () => efaGda.soft.open(member, limits),
} as const;
const transport = await openers[task.transport]();
const stream = new HostStream();
const { map, routing, plan } = planShape(task);
const recvRows = Math.max(...plan.placement.recvRows);
const verifier = new Verifier(plan, rank, tokens, hidden);
const { rows } = verifier;
const choices = rankTopk(routing, rank).slice();

const host = (elements: number): Uint16Array => new Uint16Array(allocateHost(Math.max(64, elements * 2)), 0, elements);
/** As many rows as a dispatch brings here: what is copied, and what the collective receives and puts in order. Nothing of them is read again in a later turn. */
const scratch = [host(rows * hidden), host(rows * hidden)] as const;
/** By turn. */
const x: readonly Tensor<'bf16'>[] = [0, 1].map((turn) => {
  const data = host(tokens * hidden);
  verifier.fill(data, turn);
  return tensor('bf16', [tokens, hidden], data);
});
const weights = new Float32Array(allocateHost(4 * tokens * topK), 0, tokens * topK).fill(1 / topK);
const out: Tensor<'bf16'> = tensor('bf16', [tokens, hidden], host(tokens * hidden));

interface Contender {
  /** Milliseconds of each measured part, whose results it has compared. */
  readonly run: () => Promise<Readonly<Record<string, number>>>;
  readonly close: () => Promise<void>;
}

async function timed(body: () => PromiseLike<unknown>): Promise<number> {
  const begin = performance.now();
  await body();
  return performance.now() - begin;
}

async function bufferOf(
  name: string,
  options: Partial<MoeBufferOptions>,
  parts: readonly string[],
): Promise<Contender> {
  const buffer: MoeBuffer = await openMoeBuffer(transport, {
    mode,
    experts,
    maxTokens: tokens,
    topK,
    hidden,
    calls: 1,
    stream,
    timeoutMs: TIMEOUT_MS,
    ...(mode === 'high-throughput' ? { recvRows } : {}),
    ...options,
  });
  const quantised = options.payload !== undefined;
  const kept = mode === 'high-throughput' ? await buffer.dispatch(x[1]!, choices, { keepLayout: true }) : undefined;
  await kept?.handle.release();
  let turn = 0;
  const once = async (layout: boolean, inPlace = false): Promise<readonly [number, number]> => {
    const begin = performance.now();
    const received = await buffer.dispatch(x[turn]!, layout ? kept!.layout! : choices);
    const there = performance.now() - begin;
    verifier.received(received, turn);
    await transport.barrier();
    let back = 0;
    // Rows in e4m3 are not what experts return, and what they return is no other than in bf16.
    if (quantised) await received.handle.release();
    else {
      let y = received.x as Tensor<'bf16'>;
      if (inPlace) {
        // Where experts would write their results.
        y = received.combineBuffer as Tensor<'bf16'>;
        y.data.set((received.x as Tensor<'bf16'>).data);
        await transport.barrier();
      }
      back = await timed(() => buffer.combine(y, received.handle, { weights, out }));
      verifier.mixed(out.data, turn);
    }
    turn = 1 - turn;
    return [there, back];
  };
  return {
    run: async () => {
      const [there, back] = await once(false);
      const made: Record<string, number> = { [`${name} dispatch`]: there };
      if (!quantised) made[`${name} combine`] = back;
      if (parts.includes('cached')) {
        await transport.barrier();
        [made[`${name} cached dispatch`]] = await once(true);
      }
      if (parts.includes('zero-copy')) {
        await transport.barrier();
        [, made[`${name} zero-copy combine`]] = await once(false, true);
      }
      return made;
    },
    close: () => buffer.close(),
  };
}

/** The machine's own copies of the bytes that a dispatch brings here, by the same thread. */
function copyOf(nonTemporal: boolean): Contender {
  const [from, to] = scratch.map(({ buffer, byteLength }) => new Uint8Array(buffer, 0, byteLength)) as [
    Uint8Array,
    Uint8Array,
  ];
  const name = nonTemporal ? 'copy past the caches' : 'copy';
  let turn = 0;
  return {
    run: async () => {
      // A page that is not copied differs: the copy before this one was of another byte.
      turn = (turn + 2) % 256;
      for (let i = 0; i < from.length; i += 1024) from[i] = turn + Number(nonTemporal);
      const ms = await timed(() => stream.copy(from, to, { nonTemporal }));
      if (Buffer.compare(from, to) !== 0) throw new Error(`rank ${rank}: the copy differs from its source`);
      return { [name]: ms };
    },
    close: async () => {},
  };
}

/** The same by a collective: rows packed by destination, exchanged, put in the order of experts; and back, without the sum. */
async function collective(): Promise<Contender> {
  const group = await initProcessGroup({ store: prefixStore(store, 'group'), rank, worldSize, timeoutMs: TIMEOUT_MS });
  const { replica, slot, tokensPerReplica } = routingLayout({ map, rank, topK, topkIdx: choices });
  const first = new Int32Array(map.expert.length + 1);
  for (let p = 0; p < map.expert.length; p++) first[p + 1] = first[p]! + tokensPerReplica[p]!;
  const sendSplits = Array.from(
    { length: worldSize },
    (_, r) => first[map.rankOffsets[r + 1]!]! - first[map.rankOffsets[r]!]!,
  );
  const locals = map.rankOffsets[rank + 1]! - map.rankOffsets[rank]!;
  const sent = tensor('bf16', [first.at(-1)!, hidden], host(first.at(-1)! * hidden));
  const received = tensor('bf16', [rows, hidden], scratch[0]);
  const ordered = scratch[1];
  const sums = new Float32Array(hidden);
  const result = new Uint16Array(tokens * hidden);
  const bits = new Uint32Array(sums.buffer);
  const counts = new Int32Array(worldSize * map.maxLocalExperts);
  const place = (): {
    readonly splits: number[];
    readonly runs: (readonly [from: number, to: number, n: number])[];
  } => {
    const splits = Array.from({ length: worldSize }, (_, s) =>
      counts.subarray(s * map.maxLocalExperts, s * map.maxLocalExperts + locals).reduce((a, b) => a + b, 0),
    );
    const runs: (readonly [number, number, number])[] = [];
    let to = 0;
    for (let e = 0; e < locals; e++) {
      let base = 0;
      for (let s = 0; s < worldSize; s++) {
        let from = base;
        for (let i = 0; i < e; i++) from += counts[s * map.maxLocalExperts + i]!;
        const n = counts[s * map.maxLocalExperts + e]!;
        runs.push([from, to, n]);
        to += n;
        base += splits[s]!;
      }
    }
    return { splits, runs };
  };
  let placed = { splits: [] as number[], runs: [] as (readonly [number, number, number])[] };
  let turn = 0;
  return {
    run: async () => {
      const tokensOf = x[turn]!.data;
      const there = await timed(async () => {
        const mine = new Int32Array(counts.length);
        for (let r = 0; r < worldSize; r++) {
          mine.set(tokensPerReplica.subarray(map.rankOffsets[r]!, map.rankOffsets[r + 1]!), r * map.maxLocalExperts);
        }
        await group.allToAllSingle(counts, mine);
        placed = place();
        for (let i = 0; i < choices.length; i++) {
          if (replica[i]! < 0) continue;
          const token = Math.floor(i / topK);
          sent.data.set(
            tokensOf.subarray(token * hidden, (token + 1) * hidden),
            (first[replica[i]!]! + slot[i]!) * hidden,
          );
        }
        await group.allToAllSingle(received, sent, { outputSplits: placed.splits, inputSplits: sendSplits });
        for (const [from, to, n] of placed.runs) {
          ordered.set(received.data.subarray(from * hidden, (from + n) * hidden), to * hidden);
        }
      });
      verifier.compact(ordered, turn);
      await transport.barrier();
      const back = await timed(async () => {
        for (const [from, to, n] of placed.runs) {
          received.data.set(ordered.subarray(to * hidden, (to + n) * hidden), from * hidden);
        }
        await group.allToAllSingle(sent, received, { outputSplits: sendSplits, inputSplits: placed.splits });
      });
      // Not timed: summed in JS, it would be no baseline to be proud of.
      for (let t = 0; t < tokens; t++) {
        sums.fill(0);
        for (let k = 0; k < topK; k++) {
          const i = t * topK + k;
          const at = (first[replica[i]!]! + slot[i]!) * hidden;
          for (let h = 0; h < hidden; h++) sums[h]! += weights[i]! * widen(sent.data[at + h]!);
        }
        for (let h = 0; h < hidden; h++) result[t * hidden + h] = (bits[h]! + 0x8000) >>> 16;
      }
      verifier.mixed(result, turn);
      turn = 1 - turn;
      return { 'allToAllSingle dispatch': there, 'allToAllSingle combine': back };
    },
    close: () => group.destroy(),
  };
}

const wide = new Float32Array(1);
const wideBits = new Uint32Array(wide.buffer);
function widen(code: number): number {
  wideBits[0] = code << 16;
  return wide[0]!;
}

const stores = task.transport === 'shm';
const contenders: Contender[] = [
  copyOf(false),
  copyOf(true),
  await bufferOf('bf16', { zeroCopyCombine: stores }, [
    ...(mode === 'high-throughput' ? ['cached'] : []),
    ...(stores ? ['zero-copy'] : []),
  ]),
  await bufferOf('fp8', { payload: QUANTISED }, []),
  ...(stores ? [await collective()] : []),
];
const series: Record<string, number[]> = {};
for (let i = -WARM_UP; i < repeats; i++) {
  for (const { run } of contenders) {
    await transport.barrier();
    const took = await run();
    if (i < 0) continue;
    for (const [name, ms] of Object.entries(took)) {
      series[name] ??= [];
      series[name].push(ms);
    }
  }
}
await transport.barrier();
for (const { close } of contenders) await close();

async function stepsOf(zeroCopyCombine: boolean): Promise<number[]> {
  const one = { mode, experts, maxTokens: 1, topK, hidden, calls: 1, stream, zeroCopyCombine };
  await using buffer = await openMoeBuffer(transport, one);
  const [even, odd] = x.map(({ data }) => tensor('bf16', [1, hidden], data.subarray(0, hidden)));
  const first = choices.slice(0, topK);
  const measured = await buffer.measureSteps([even!, odd!], first, weights.slice(0, topK), task.steps);
  return [...measured.subarray(Math.floor(measured.length / 10))];
}

const loops = task.steps > 0 ? { steps: await stepsOf(false), stepsInPlace: await stepsOf(true) } : {};
await stream.close();
await transport.close();
await store.close();
const report: MoeTimes = { series, rows, ...loops };
process.stdout.write(`${JSON.stringify(report)}\n`);
