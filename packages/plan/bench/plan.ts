import {
  type AttentionPlan,
  type DocumentShards,
  type KvSharing,
  planAttention,
  serverLayout,
  shardsOfDocuments,
  validate,
} from '../src/index.js';

export interface PlanBenchOptions {
  readonly ranks?: number;
  readonly shardsPerRank?: number;
  readonly replicas?: number;
  readonly repeats?: number;
  /** Is told what is measured next. */
  readonly tell?: (text: string) => void;
}

/** Times are medians; `spread` is (slowest - fastest) / median. Dispatches are forward ones, Q and KV: their reverses come on top for free. */
export interface PlanBenchResult {
  readonly case: KvSharing;
  readonly dispatches: number;
  readonly milliseconds: number;
  readonly spread: number;
  readonly nsPerDispatch: number;
  readonly bytesPerDispatch: number;
  /** Times what it takes to make and write as many arrays of the same sizes, each element once, in turns with the planning: the machine's own speed. */
  readonly overWriting: number;
  /** `validate` on top, timed apart. */
  readonly validateNsPerDispatch: number;
  /** ns per dispatch over those of a quarter of the ranks, which take turns: 1 where time is linear in dispatches, 4 where it is quadratic. */
  readonly growth: number;
}

export interface PlanBenchReport {
  readonly bench: 'plan';
  readonly ranks: number;
  readonly shardsPerRank: number;
  readonly replicas: number;
  readonly repeats: number;
  readonly results: readonly PlanBenchResult[];
}

/** A plan of all ranks is compared with as many of so many times fewer. */
const QUARTERS = 4;

/** At most, per dispatch; linear, but for what larger arrays cost a cache. */
const goals = { ns: 100, bytes: 200, growth: 1.5 } as const;

/** Plans attention for ranks * shardsPerRank shards in documents of up to `replicas` parts and verifies every plan it timed. */
export function benchPlan(options: PlanBenchOptions = {}): PlanBenchReport {
  const { ranks = 1024, shardsPerRank = 256, replicas = 8, repeats = 7, tell = () => {} } = options;
  const quarter = makeBatch(Math.max(1, Math.floor(ranks / QUARTERS)), shardsPerRank, replicas);
  const full = makeBatch(ranks, shardsPerRank, replicas);
  const results = (['each-query', 'each-server'] as const).map((sharing) => {
    tell(`${sharing}, ${ranks} ranks x ${shardsPerRank} shards`);
    return measure(quarter, full, sharing, repeats);
  });
  return { bench: 'plan', ranks, shardsPerRank, replicas, repeats, results };
}

interface Batch {
  readonly shards: DocumentShards;
  readonly serverRank: Int32Array;
}

/** Documents of 1 to `replicas` parts, homes filled in order, servers drawn from a fixed sequence. */
function makeBatch(ranks: number, shardsPerRank: number, replicas: number): Batch {
  const n = ranks * shardsPerRank;
  const random = sequence(20261120);
  const offsets = [0];
  while (offsets[offsets.length - 1]! < n)
    offsets.push(Math.min(n, offsets[offsets.length - 1]! + 1 + (random() % replicas)));
  const homeRank = Int32Array.from({ length: n }, (_, i) => Math.floor(i / shardsPerRank));
  const lengths = Int32Array.from({ length: n }, () => 1 + (random() % 512));
  const { shards } = shardsOfDocuments({
    worldSize: ranks,
    documentOffsets: Int32Array.from(offsets),
    homeRank,
    lengths,
  });
  return { shards, serverRank: Int32Array.from({ length: n }, () => random() % ranks) };
}

function dispatchesOf({ fwdQ, fwdKv }: AttentionPlan): number {
  return fwdQ.dstRank.length + fwdKv.dstRank.length;
}

const medianOf = (values: readonly number[]): number => values.toSorted((a, b) => a - b)[values.length >> 1]!;

/**
 * What is compared takes turns with what it is compared with: a machine whose speed drifts slows both.
 *
 * HAZARD: the whole is compared with four quarters, not with one: collecting the garbage of a plan falls to whoever comes next, and one quarter after a whole paid for all of it.
 */
function measure(quarter: Batch, full: Batch, sharing: KvSharing, repeats: number): PlanBenchResult {
  const planned = ({ shards, serverRank }: Batch) => {
    const start = performance.now();
    const plan = planAttention(shards, serverRank, { sharing });
    return { plan, milliseconds: performance.now() - start };
  };
  const ns = ({ plan, milliseconds }: ReturnType<typeof planned>) => (milliseconds * 1e6) / dispatchesOf(plan);
  for (let i = 0; i < QUARTERS; i++) planned(quarter);
  let { plan } = planned(full);
  const columns = outputLengths(plan);
  const [times, overWriting, growth]: [number[], number[], number[]] = [[], [], []];
  for (let i = 0; i < repeats; i++) {
    const small = Array.from({ length: QUARTERS }, () => planned(quarter));
    const large = planned(full);
    const start = performance.now();
    const written = writeColumns(columns);
    overWriting.push(large.milliseconds / (performance.now() - start));
    if (written.length !== columns.length) throw new Error('not every column was written');
    growth.push((ns(large) * QUARTERS) / small.reduce((sum, one) => sum + ns(one), 0));
    times.push(large.milliseconds);
    if (i === repeats - 1) for (const one of small) verifyPrefixes(one.plan);
    ({ plan } = large);
  }
  const beforeValidate = performance.now();
  validate(plan);
  const validateMs = performance.now() - beforeValidate;
  verifyPrefixes(plan);
  const milliseconds = medianOf(times);
  const dispatches = dispatchesOf(plan);
  const bytesPerDispatch = (4 * columns.reduce((sum, length) => sum + length, 0)) / dispatches;
  return {
    case: sharing,
    dispatches,
    milliseconds,
    spread: (Math.max(...times) - Math.min(...times)) / milliseconds,
    nsPerDispatch: (milliseconds * 1e6) / dispatches,
    bytesPerDispatch,
    overWriting: medianOf(overWriting),
    validateNsPerDispatch: (validateMs * 1e6) / dispatches,
    growth: medianOf(growth),
  };
}

/** Every query group must find the parts of its document, from the first to its own, back to back from its first KV row. */
function verifyPrefixes(plan: AttentionPlan): void {
  const { shards, revKv, layout } = plan;
  for (let t = 0; t < shards.worldSize; t++) {
    const slotAtRow = new Map<number, number>();
    for (let e = revKv.entryOffsets[t]!; e < revKv.entryOffsets[t + 1]!; e++) slotAtRow.set(revKv.srcOffset[e]!, e);
    const server = serverLayout(layout, t);
    for (let k = 0; k < server.groups; k++) {
      const query = server.shard[k]!;
      let row = server.kvStart[k]!;
      for (let p = 0; p <= shards.position[query]!; p++) {
        const slot = slotAtRow.get(row)!;
        const g = shards.shardOffsets[revKv.dstRank[slot]!]! + revKv.dstShard[slot]!;
        if (shards.document[g] !== shards.document[query] || shards.position[g] !== p) {
          throw new Error(
            `server ${t}, group ${k}: row ${row} must hold part ${p} of document ${shards.document[query]}, holds shard ${g}`,
          );
        }
        row += shards.lengths[g]!;
      }
      if (row !== server.kvStart[k]! + server.kvLength[k]!)
        throw new Error(`server ${t}, group ${k}: ends at row ${row}`);
    }
  }
}

/** Elements of each distinct array that a plan holds, its copies of the inputs included. */
function outputLengths(value: object, seen = new Set<ArrayBufferLike>()): number[] {
  return Object.values(value).flatMap((part: unknown) => {
    if (!(part instanceof Int32Array))
      return typeof part === 'object' && part !== null ? outputLengths(part, seen) : [];
    if (seen.has(part.buffer)) return [];
    seen.add(part.buffer);
    return [part.buffer.byteLength / 4];
  });
}

function writeColumns(lengths: readonly number[]): readonly Int32Array[] {
  return lengths.map((length) => {
    const column = new Int32Array(length);
    for (let i = 0; i < length; i++) column[i] = i;
    return column;
  });
}

/** xorshift32: the same batch everywhere. */
function sequence(seed: number): () => number {
  let x = seed;
  return () => {
    x ^= x << 13;
    x ^= x >>> 17;
    x ^= x << 5;
    return x >>> 1;
  };
}

const verdict = (value: number, goal: number): string => `(goal ${goal}: ${value <= goal ? 'met' : 'MISSED'})`;

/** One line per case. */
export function planBenchText(report: PlanBenchReport): string {
  const head = `plan: ${report.ranks} ranks x ${report.shardsPerRank} shards, documents of up to ${report.replicas} parts, median of ${report.repeats}`;
  const lines = report.results.map(
    (r) =>
      `  ${r.case.padEnd(11)} ${r.dispatches} dispatches  ${r.milliseconds.toFixed(1)} ms  ${r.nsPerDispatch.toFixed(1)} ns/dispatch ${verdict(r.nsPerDispatch, goals.ns)}  ` +
      `${r.bytesPerDispatch.toFixed(1)} bytes/dispatch ${verdict(r.bytesPerDispatch, goals.bytes)}  ${r.overWriting.toFixed(1)} times writing its arrays  growth ${r.growth.toFixed(2)} ${verdict(r.growth, goals.growth)}  validate ${r.validateNsPerDispatch.toFixed(0)} ns/dispatch  spread ${(r.spread * 100).toFixed(0)} %`,
  );
  return `${[head, ...lines].join('\n')}\n`;
}
