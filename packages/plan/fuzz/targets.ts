import { join } from 'node:path';
import { type FuzzSuite, type FuzzTarget, textTarget } from '@ep/fuzz';
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
