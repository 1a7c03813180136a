import { join } from 'node:path';
import { bytesTarget, type FuzzSuite, type FuzzTarget, spoilObject, textTarget } from '@ep/fuzz';
import {
  balance,
  digest,
  explain,
  explanationText,
  fromPaddedAttention,
  fromPaddedQuery,
  fromPaddedReplicas,
  PlanError,
  parseAttentionPlan,
  parseDispatchPlan,
  planAttention,
  planQuery,
  planReplicas,
  reorder,
  serialize,
  shardsOfDocuments,
  validate,
} from '../src/index.js';
import {
  balanceExperts,
  expertLoad,
  explainMoe,
  generateRouting,
  moeExplanationText,
  parseRoutingTrace,
  planMoe,
  routingTraceText,
  validateMoe,
} from '../src/moe/index.js';

const isRefusal = (error: unknown): boolean => error instanceof PlanError && error.code.startsWith('EP_');

/** Any text: the planner either uses it or refuses it with a PlanError. */
const target = (name: string, use: (text: string) => void): FuzzTarget => textTarget(name, isRefusal, use);

/** JSON that a caller might hold in memory: not being JSON is no finding of the helpers' own. */
function json(text: string): Readonly<Record<string, never>> {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    throw new PlanError('EP_INVALID_ARGUMENT', 'the fuzz input is not JSON');
  }
  if (typeof value !== 'object' || value === null)
    throw new PlanError('EP_INVALID_ARGUMENT', 'the fuzz input is not an object');
  return value as Readonly<Record<string, never>>;
}

/** Padded inputs grow with the square of the parts of a document; a fuzzer has no use for plans of a million dispatches. */
const longest = 1 << 14;

/** A list of numbers as a typed array; anything else passes through, for the planner to refuse. */
function int32(value: unknown): Int32Array {
  return (
    Array.isArray(value) && value.every((v) => typeof v === 'number') ? Int32Array.from(value as number[]) : value
  ) as Int32Array;
}

/** Small plans of each kind, for edits that no parser makes. */
const shards = shardsOfDocuments({
  worldSize: 3,
  documentOffsets: Int32Array.of(0, 2, 3, 5),
  homeRank: Int32Array.of(0, 1, 2, 1, 2),
  lengths: Int32Array.of(3, 5, 4, 2, 6),
}).shards;
const attention = planAttention(shards, Int32Array.of(1, 1, 0, 2, 0));
const replicated = planAttention(shards, Int32Array.of(2, 1, 0, 2, 1), { sharing: 'each-server' });
const dispatches = [attention, replicated].flatMap(({ fwdQ, revQ, fwdKv, revKv, revKvCompact }) => [
  fwdQ,
  revQ,
  fwdKv,
  revKv,
  revKvCompact,
]);
const routing = generateRouting({
  worldSize: 2,
  tokens: 6,
  experts: 6,
  topK: 2,
  popularity: { kind: 'uniform' },
  seed: 3,
});
const { map: expertMap } = balanceExperts(expertLoad(routing), { worldSize: 2 });
const moe = [
  planMoe(routing, expertMap, { mode: 'low-latency', maxTokens: 8 }),
  planMoe(routing, expertMap, { mode: 'high-throughput', alignment: 4 }),
];

/** The first byte names the plan, the others are edits; what `validate` lets through must be of use. */
const objects = <T extends object>(name: string, plans: readonly T[], use: (plan: T) => void): FuzzTarget =>
  bytesTarget(name, isRefusal, (bytes) => use(spoilObject(plans[(bytes[0] ?? 0) % plans.length]!, bytes.subarray(1))));

export const suite: FuzzSuite = {
  corpus: join(import.meta.dirname, 'corpus'),
  targets: [
    target('documents', (text) => {
      if (text.length > longest) throw new PlanError('EP_INVALID_ARGUMENT', 'the fuzz input is too long');
      const input = json(text);
      const { shards, order } = shardsOfDocuments({
        worldSize: Math.min(Number(input.worldSize), 1 << 8),
        documentOffsets: int32(input.documentOffsets),
        homeRank: int32(input.homeRank),
        lengths: int32(input.lengths),
      });
      const serverRank = reorder(int32(input.serverRank), order);
      for (const sharing of ['each-query', 'each-server'] as const) {
        const plan = planAttention(shards, serverRank, { sharing });
        validate(plan);
        if (digest(parseAttentionPlan(serialize(plan))) !== digest(plan))
          throw new Error('a plan does not survive writing and reading');
        explanationText(explain(plan));
        const balanced = balance(shards, { qRowBytes: 2, kvRowBytes: 1, sharing, block: 2, memoryBytes: 1e9 });
        validate(planAttention(balanced.shards, balanced.serverRank, { sharing }));
      }
    }),
    target('parse-dispatch', (text) => {
      const plan = parseDispatchPlan(text);
      validate(plan);
      const again = parseDispatchPlan(serialize(plan));
      if (digest(again) !== digest(plan)) throw new Error('a plan that was read does not survive writing and reading');
    }),
    target('parse-attention', (text) => {
      if (text.length > longest) throw new PlanError('EP_INVALID_ARGUMENT', 'the fuzz input is too long');
      const plan = parseAttentionPlan(text);
      validate(plan);
    }),
    objects('dispatch-object', dispatches, (plan) => {
      validate(plan);
      if (digest(parseDispatchPlan(serialize(plan))) !== digest(plan))
        throw new Error('a plan that is valid does not survive writing and reading');
    }),
    objects('attention-object', [attention, replicated], (plan) => {
      validate(plan);
      if (digest(parseAttentionPlan(serialize(plan))) !== digest(plan))
        throw new Error('a plan that is valid does not survive writing and reading');
      explanationText(explain(plan));
    }),
    objects('moe-object', moe, (plan) => {
      validateMoe(plan);
      moeExplanationText(explainMoe(plan));
    }),
    target('padded', (text) => {
      if (text.length > longest) throw new PlanError('EP_INVALID_ARGUMENT', 'the fuzz input is too long');
      const input = json(text);
      if ('kvToQMapping' in input) {
        const { shards, serverRank } = fromPaddedAttention(input as never);
        validate(planAttention(shards, serverRank));
      } else if ('replicas' in input) {
        const { shards, table } = fromPaddedReplicas(input.seqLen!, input.replicas!, input.numSeqs);
        const plans = planReplicas(shards, table);
        for (const plan of [plans.fwdKv, plans.revKv, plans.revKvCompact]) validate(plan);
      } else {
        const { shards, dstRank } = fromPaddedQuery(input.seqLen!, input.dispatch!, input.numSeqs);
        const { fwdQ, revQ } = planQuery(shards, dstRank);
        validate(fwdQ);
        validate(revQ);
      }
    }),
    target('routing-trace', (text) => {
      const trace = parseRoutingTrace(text);
      const again = routingTraceText(parseRoutingTrace(routingTraceText(trace)));
      if (again !== routingTraceText(trace))
        throw new Error('a trace that was read does not survive writing and reading');
      // Plans are dense in ranks and experts, which a short trace may have many of.
      if (trace.worldSize > 64 || trace.experts > 256) return;
      for (const routing of trace.steps.slice(0, 8)) {
        const { map } = balanceExperts(expertLoad(routing), { worldSize: trace.worldSize });
        const plan = planMoe(routing, map, { mode: 'high-throughput', alignment: 8 });
        validateMoe(plan);
        moeExplanationText(explainMoe(plan));
      }
    }),
  ],
};
