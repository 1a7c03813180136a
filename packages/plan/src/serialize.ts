import { type AttentionPlan, planAttention } from './attention.js';
import { describe, maxRows } from './check.js';
import { digest } from './digest.js';
import { type DispatchPlan, type PlanKind, planVersion } from './dispatch-plan.js';
import { PlanError } from './error.js';
import { entryFields } from './form.js';
import { pairTables } from './pairs.js';
import { checkVersion, validate } from './validate.js';

const format = '@ep/plan';

/**
 * A plan as JSON: the format's name, its version, the data and the digest. A dispatch plan is written as its entries, an attention plan
 * as what it was planned from; pair tables, and the rest of an attention plan, follow from those and are made again when read.
 */
export function serialize(plan: DispatchPlan | AttentionPlan): string {
  const head = { format, version: planVersion, digest: digest(plan) };
  if ('layout' in plan) {
    const { worldSize, documents, shardOffsets, lengths, document, position } = plan.shards;
    const arrays = { shardOffsets, lengths, document, position, serverRank: plan.serverRank };
    return JSON.stringify({
      ...head,
      type: 'attention',
      sharing: plan.sharing,
      worldSize,
      documents,
      ...asLists(arrays),
    });
  }
  const { kind, worldSize, replicas } = plan;
  const arrays = Object.fromEntries(entryFields.map((name) => [name, plan[name]]));
  return JSON.stringify({ ...head, type: 'dispatch', kind, worldSize, replicas, ...asLists(arrays) });
}

/** Reads and validates a dispatch plan. Throws EP_INVALID_PLAN, or EP_PLAN_VERSION when it was written by another version. */
export function parseDispatchPlan(text: string): DispatchPlan {
  const fields = readFields(text, 'dispatch');
  const arrays = Object.fromEntries(entryFields.map((name) => [name, readList(fields, name)])) as Record<
    (typeof entryFields)[number],
    Int32Array
  >;
  const worldSize = readInteger(fields, 'worldSize', 1);
  const draft: Omit<DispatchPlan, 'sent' | 'received'> = {
    version: planVersion,
    kind: fields.kind as PlanKind,
    worldSize,
    replicas: readInteger(fields, 'replicas', 1),
    ...arrays,
  };
  // HAZARD: the pair tables index by rank, so what they index by is checked before they are built from a stranger's file.
  const { entryOffsets, dstRank, length } = arrays;
  if (entryOffsets.length !== worldSize + 1)
    throw malformed('entryOffsets', `${worldSize + 1} elements`, `${entryOffsets.length}`);
  if (length.length !== dstRank.length) throw malformed('length', `${dstRank.length} elements`, `${length.length}`);
  for (let r = 0; r <= worldSize; r++) {
    const least = r === 0 ? 0 : entryOffsets[r - 1]!;
    const o = entryOffsets[r]!;
    if (o < least || o > dstRank.length)
      throw malformed(`entryOffsets[${r}]`, `an integer in [${least}, ${dstRank.length}]`, String(o));
  }
  dstRank.forEach((t, e) => {
    if (t < 0 || t >= worldSize) throw malformed(`dstRank[${e}]`, `an integer in [0, ${worldSize - 1}]`, String(t));
  });
  const plan: DispatchPlan = Object.freeze({ ...draft, ...pairTables(worldSize, entryOffsets, dstRank, length) });
  validate(plan);
  checkDigest(fields, plan);
  return plan;
}

/** Reads an attention plan: plans again from the documents in the file and compares the digest. */
export function parseAttentionPlan(text: string): AttentionPlan {
  const fields = readFields(text, 'attention');
  const shards = {
    worldSize: readInteger(fields, 'worldSize', 1),
    documents: readInteger(fields, 'documents', 0),
    shardOffsets: readList(fields, 'shardOffsets'),
    lengths: readList(fields, 'lengths'),
    document: readList(fields, 'document'),
    position: readList(fields, 'position'),
  };
  // HAZARD: a count is not backed by data, so a short file could ask for any amount of memory. Documents without shards are legal but few.
  const most = shards.lengths.length + maxEmptyDocuments;
  if (shards.documents > most) throw malformed('documents', `at most ${most}`, String(shards.documents));
  const sharing = fields.sharing;
  if (sharing !== 'each-query' && sharing !== 'each-server')
    throw malformed('sharing', `'each-query' or 'each-server'`, describe(sharing));
  let plan: AttentionPlan;
  try {
    plan = planAttention(shards, readList(fields, 'serverRank'), { sharing });
  } catch (cause) {
    if (!(cause instanceof PlanError)) throw cause;
    throw new PlanError('EP_INVALID_PLAN', `the plan's documents are invalid: ${cause.message}`, cause.context);
  }
  checkDigest(fields, plan);
  return plan;
}

const maxEmptyDocuments = 2 ** 16;

function asLists(arrays: Readonly<Record<string, Int32Array>>): Record<string, number[]> {
  return Object.fromEntries(Object.entries(arrays).map(([name, values]) => [name, Array.from(values)]));
}

function readFields(text: string, type: 'dispatch' | 'attention'): Readonly<Record<string, unknown>> {
  if (typeof text !== 'string') throw malformed('plan', 'JSON text', describe(text));
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (cause) {
    throw malformed('plan', 'JSON text', cause instanceof Error ? cause.message : String(cause));
  }
  if (typeof value !== 'object' || value === null || Array.isArray(value))
    throw malformed('plan', 'a JSON object', describe(value));
  const fields = value as Readonly<Record<string, unknown>>;
  if (fields.format !== format) throw malformed('format', `'${format}'`, describe(fields.format));
  checkVersion(fields.version);
  if (fields.type !== type) throw malformed('type', `'${type}'`, describe(fields.type));
  return fields;
}

function readInteger(fields: Readonly<Record<string, unknown>>, name: string, min: number): number {
  const value = fields[name];
  if (typeof value !== 'number' || !Number.isSafeInteger(value) || value < min || value > maxRows) {
    throw malformed(name, `an integer in [${min}, ${maxRows}]`, describe(value));
  }
  return value;
}

function readList(fields: Readonly<Record<string, unknown>>, name: string): Int32Array {
  const value = fields[name];
  if (!Array.isArray(value)) throw malformed(name, 'a list of integers', describe(value));
  const list = new Int32Array(value.length);
  for (let i = 0; i < list.length; i++) {
    const v: unknown = value[i];
    if (typeof v !== 'number' || (v | 0) !== v) throw malformed(`${name}[${i}]`, 'an int32', describe(v));
    list[i] = v;
  }
  return list;
}

function checkDigest(fields: Readonly<Record<string, unknown>>, plan: DispatchPlan | AttentionPlan): void {
  const expected = digest(plan);
  if (fields.digest !== expected)
    throw malformed('digest', `'${expected}', the digest of the plan as read`, describe(fields.digest));
}

function malformed(field: string, expected: string, found: string): PlanError {
  return new PlanError('EP_INVALID_PLAN', `${field} must be ${expected}, found ${found}`, { field, expected, found });
}
