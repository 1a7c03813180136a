/** A rank's slice of a plan in the shapes of the original's metadata, and what the per-token kernel cannot do with a plan. */
import { type DType, EpError, elementBytes } from '@ep/core';
import { type DispatchPlan, rankDispatch } from '@ep/plan';
import { type PartSpec, rowBytesOf } from './binding-spec.js';

/** Roles are warps, and a block has ten: one for the query, the others for replicas. */
const MAX_REPLICAS = 9;
const VECTOR_BYTES = 16;

export interface SendMetadata {
  /** Rows of each shard of the sender's tensor, in row order; their sum is the rows of the tensor. */
  readonly seqLen: Uint32Array;
  /** [shards][replicas]; -1: not sent. */
  readonly dstRank: Int32Array;
  readonly dstRow: Uint32Array;
  /** Rows that come from each rank, then all. */
  readonly counts: BigUint64Array;
}

export interface GradientMetadata {
  /** Rows of each home shard, in row order. */
  readonly seqLen: Uint32Array;
  /** [shards][replicas]: 1 where the replica exists. */
  readonly mask: Uint32Array;
}

interface Shard {
  readonly row: number;
  readonly rows: number;
  /** Of the plan, by replica; -1: there is none. */
  readonly entries: Int32Array;
}

/** Shards in row order; rows that no entry covers become shards without entries. */
function withGaps(shards: readonly Shard[], rows: number, replicas: number): Shard[] {
  const all: Shard[] = [];
  let end = 0;
  const none = new Int32Array(replicas).fill(-1);
  for (const shard of shards) {
    if (shard.row > end) all.push({ row: end, rows: shard.row - end, entries: none });
    all.push(shard);
    end = shard.row + shard.rows;
  }
  if (rows > end) all.push({ row: end, rows: rows - end, entries: none });
  return all;
}

/** Entries grouped by shard. */
function shardsOf(
  plan: DispatchPlan,
  entries: readonly number[],
  of: {
    readonly shard: Int32Array;
    readonly row: (entry: number) => number;
    readonly replica: (entry: number) => number;
  },
): Shard[] {
  const found = new Map<number, Shard>();
  for (const e of entries) {
    let shard = found.get(of.shard[e]!);
    if (shard === undefined) {
      shard = { row: of.row(e), rows: plan.length[e]!, entries: new Int32Array(plan.replicas).fill(-1) };
      found.set(of.shard[e]!, shard);
    }
    shard.entries[of.replica(e)] = e;
  }
  return [...found].sort(([a], [b]) => a - b).map(([, shard]) => shard);
}

const range = (from: number, to: number): number[] => Array.from({ length: to - from }, (_, i) => from + i);

/** Dispatches of one shard: a server sends every row that it holds to one place. */
export const sendReplicas = (plan: DispatchPlan): number => (plan.kind.startsWith('rev') ? 1 : plan.replicas);

export function sendMetadata(plan: DispatchPlan, rank: number): SendMetadata {
  const replicas = sendReplicas(plan);
  const entries = range(plan.entryOffsets[rank]!, plan.entryOffsets[rank + 1]!);
  const found = shardsOf(plan, entries, {
    shard: plan.srcShard,
    row: (e) => plan.srcOffset[e]!,
    replica: (e) => (replicas === 1 ? 0 : plan.replica[e]!),
  });
  const shards = withGaps(found, plan.sendTokens[rank]!, plan.replicas);
  const dstRank = new Int32Array(shards.length * replicas).fill(-1);
  const dstRow = new Uint32Array(shards.length * replicas);
  for (const [s, shard] of shards.entries()) {
    for (let c = 0; c < replicas; c++) {
      const e = shard.entries[c]!;
      if (e < 0) continue;
      dstRank[s * replicas + c] = plan.dstRank[e]!;
      dstRow[s * replicas + c] = plan.dstOffset[e]!;
    }
  }
  const { peer, tokens } = rankDispatch(plan, rank).received;
  const counts = new BigUint64Array(plan.worldSize + 1);
  for (const [i, from] of peer.entries()) {
    counts[from]! += BigInt(tokens[i]!);
    counts[plan.worldSize]! += BigInt(tokens[i]!);
  }
  return { seqLen: Uint32Array.from(shards, ({ rows }) => rows), dstRank, dstRow, counts };
}

function homeShards(plan: DispatchPlan, rank: number): Shard[] {
  const tokens = plan.recvTokens[rank]! / plan.replicas;
  const entries = range(0, plan.dstRank.length).filter((e) => plan.dstRank[e] === rank);
  const found = shardsOf(plan, entries, {
    shard: plan.dstShard,
    row: (e) => plan.dstOffset[e]! - plan.replica[e]! * tokens,
    replica: (e) => plan.replica[e]!,
  });
  return withGaps(found, tokens, plan.replicas);
}

/** Of a `rev-kv` plan at the rank that receives the gradients. */
export function gradientMetadata(plan: DispatchPlan, rank: number): GradientMetadata {
  const shards = homeShards(plan, rank);
  return {
    seqLen: Uint32Array.from(shards, ({ rows }) => rows),
    mask: Uint32Array.from(shards.flatMap(({ entries }) => Array.from(entries, (e) => (e < 0 ? 0 : 1)))),
  };
}

function refuse(text: string, context: Readonly<Record<string, unknown>> = {}): never {
  throw new EpError('EP_UNSUPPORTED', `compat: ${text}; openDispatcher and openDeviceDispatcher do this`, { context });
}

function refuseRows(part: PartSpec): void {
  const { plan } = part;
  const rowBytes = rowBytesOf(part);
  if (rowBytes % VECTOR_BYTES !== 0)
    refuse(`${part.name}: expected rows of whole ${VECTOR_BYTES}-byte vectors, found ${rowBytes} bytes`, { rowBytes });
  const idle = plan.sendTokens.indexOf(0);
  if (idle >= 0)
    refuse(
      `${part.name}: expected rows to send on every rank, found none on rank ${idle}: with one block per row it could not even receive`,
      { rank: idle },
    );
  if (part.reduce !== undefined) refuse(`${part.name}: it does not sum replicas (reduce)`);
}

function refuseUnsent(part: PartSpec): void {
  const { plan } = part;
  const odd = plan.recvTokens.findIndex((rows, rank) => {
    const { tokens } = rankDispatch(plan, rank).received;
    return tokens.reduce((sum, count) => sum + count, 0) !== rows;
  });
  if (odd >= 0)
    refuse(`${part.name}: expected every received row to be sent by someone, rank ${odd} keeps rows of its own`, {
      rank: odd,
    });
}

function refuseGradient(part: PartSpec): void {
  const { plan } = part;
  for (let rank = 0; rank < plan.worldSize; rank++) {
    if ((homeShards(plan, rank)[0]?.rows ?? 0) === 0)
      refuse(
        `${part.name}: expected a first home shard with rows on every rank, found an empty one on rank ${rank}: the receive cursor would never leave it`,
        { rank },
      );
  }
}

function sameDType(query: DType, keyValue: DType): void {
  if (query !== keyValue)
    refuse(`expected one dtype for both parts, found ${query} and ${keyValue} (${elementBytes(keyValue)} bytes)`);
}

/**
 * Throws `EP_UNSUPPORTED` for what the original could not do. Looks at all ranks' part of the plan, so every rank refuses alike. The kinds that it knows:
 * a query plan, a query and a key-value plan, or the dense key-value gradient.
 */
export function checkCompatParts(parts: readonly PartSpec[]): void {
  const [query, keyValue] = parts;
  const kinds = parts.map(({ plan }) => plan.kind).join(' + ');
  if (!['fwd-q', 'rev-q', 'fwd-q + fwd-kv', 'rev-kv'].includes(kinds))
    refuse(`expected plans fwd-q, rev-q, fwd-q + fwd-kv or rev-kv, found ${kinds === '' ? 'none' : kinds}`);
  for (const part of parts) refuseRows(part);
  if (query!.plan.kind === 'rev-kv') refuseGradient(query!);
  else refuseUnsent(query!);
  if (keyValue === undefined) return;
  sameDType(query!.dtype, keyValue.dtype);
  const { replicas, sendTokens } = keyValue.plan;
  if (replicas > MAX_REPLICAS)
    refuse(
      `${keyValue.name}: expected at most ${MAX_REPLICAS} replicas, found ${replicas}: the others have no warp, and their receivers would wait for ever`,
      { replicas },
    );
  const odd = sendTokens.findIndex((rows, rank) => rows !== query!.plan.sendTokens[rank]);
  if (odd >= 0)
    refuse(`expected as many key-value rows as query rows on every rank, rank ${odd} has others`, { rank: odd });
}
