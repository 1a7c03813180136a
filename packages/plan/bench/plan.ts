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
  /** Goals: at most 100 ns and 200 bytes per dispatch, and time linear in dispatches (ns per dispatch at full size over a quarter of it). */
  readonly withinTime: boolean;
  readonly withinBytes: boolean;
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

const goalNs = 100;
const goalBytes = 200;

/** Plans attention for ranks * shardsPerRank shards in documents of up to `replicas` parts and verifies every plan it timed. */
export function benchPlan(options: PlanBenchOptions = {}): PlanBenchReport {
  const { ranks = 1024, shardsPerRank = 256, replicas = 8, repeats = 7, tell = () => {} } = options;
  const results = (['each-query', 'each-server'] as const).map((sharing) => {
    const sized = (size: number): Omit<PlanBenchResult, 'growth'> => {
      tell(`${sharing}, ${size} ranks x ${shardsPerRank} shards`);
      return measure(makeBatch(size, shardsPerRank, replicas), sharing, repeats);
    };
    const quarter = sized(Math.max(1, ranks >> 2));
    const full = sized(ranks);
    return { ...full, growth: full.nsPerDispatch / quarter.nsPerDispatch };
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

function measure({ shards, serverRank }: Batch, sharing: KvSharing, repeats: number): Omit<PlanBenchResult, 'growth'> {
  let plan = planAttention(shards, serverRank, { sharing });
  const columns = outputLengths(plan);
  const times: number[] = [];
  const ratios: number[] = [];
  for (let i = 0; i < repeats; i++) {
    const start = performance.now();
    plan = planAttention(shards, serverRank, { sharing });
    const planned = performance.now();
    const written = writeColumns(columns);
    times.push(planned - start);
    ratios.push((planned - start) / (performance.now() - planned));
    if (written.length !== columns.length) throw new Error('not every column was written');
  }
  const beforeValidate = performance.now();
  validate(plan);
  const validateMs = performance.now() - beforeValidate;
  verifyPrefixes(plan);
  times.sort((a, b) => a - b);
  ratios.sort((a, b) => a - b);
  const milliseconds = times[times.length >> 1]!;
  const dispatches = plan.fwdQ.dstRank.length + plan.fwdKv.dstRank.length;
  const nsPerDispatch = (milliseconds * 1e6) / dispatches;
  const bytesPerDispatch = (4 * columns.reduce((sum, length) => sum + length, 0)) / dispatches;
  return {
    case: sharing,
    dispatches,
    milliseconds,
    spread: (times[times.length - 1]! - times[0]!) / milliseconds,
    nsPerDispatch,
    bytesPerDispatch,
    overWriting: ratios[ratios.length >> 1]!,
    validateNsPerDispatch: (validateMs * 1e6) / dispatches,
    withinTime: nsPerDispatch <= goalNs,
    withinBytes: bytesPerDispatch <= goalBytes,
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

/** One line per case. */
export function planBenchText(report: PlanBenchReport): string {
  const head = `plan: ${report.ranks} ranks x ${report.shardsPerRank} shards, documents of up to ${report.replicas} parts, median of ${report.repeats}`;
  const lines = report.results.map(
    (r) =>
      `  ${r.case.padEnd(11)} ${r.dispatches} dispatches  ${r.milliseconds.toFixed(1)} ms  ${r.nsPerDispatch.toFixed(1)} ns/dispatch (goal ${goalNs}: ${r.withinTime ? 'met' : 'MISSED'})  ` +
      `${r.bytesPerDispatch.toFixed(1)} bytes/dispatch (goal ${goalBytes}: ${r.withinBytes ? 'met' : 'MISSED'})  ${r.overWriting.toFixed(1)} times writing its arrays  growth ${r.growth.toFixed(2)}  validate ${r.validateNsPerDispatch.toFixed(0)} ns/dispatch  spread ${(r.spread * 100).toFixed(0)} %`,
  );
  return `${[head, ...lines].join('\n')}\n`;
}
