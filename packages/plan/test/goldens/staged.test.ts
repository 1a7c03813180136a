import { describe, expect, it } from 'vitest';
import { type AttentionPlan, type DispatchPlan, planAttention, serverLayout } from '../../src/index.js';
import { shardsOfPlan } from './documents.js';
import { goldenNames, type Matrix, readGolden } from './golden.js';

/**
 * The fa2a goldens stage rows in one contiguous chunk per pair of ranks, [Q shards][K shards][V shards], and send each KV shard to a
 * server once. A plan of ours knows no staging buffer, but who sends what to whom, in which order, decides all their offsets: this file
 * derives every one of their numbers from an `each-server` plan. Two things the later design does differently and this file adds: a
 * server lists its groups by (document, position) instead of by global index, and a rank's replica axis is only as long as it needs.
 */
interface Exchange {
  readonly sender_send_disp: Matrix;
  readonly sender_transfer_sz: Matrix;
  readonly sender_recv_disp: Matrix;
  readonly recver_transfer_sz: Matrix;
  readonly send_memcpy: readonly (number[] | number[][])[][];
  readonly recv_memcpy: readonly (number[] | number[][])[][];
  readonly my_rank_send_offset: number[];
  readonly my_rank_recv_offset: number[];
  readonly my_rank_send_sz: number[];
  readonly seq_lens: readonly { readonly send: Matrix; readonly recv: Matrix }[];
  readonly tensor_shape: readonly { readonly send: Matrix; readonly recv: Matrix }[];
  readonly kv_replica_mask: number[][][] | null;
  readonly kv_grad_send_dedup:
    | readonly { num_copies: number[]; copy_start_id: Matrix; main_copy_mask: number[] }[]
    | null;
}

interface StagedGolden {
  readonly inputs: {
    world_size: number;
    docs: number[][][];
    hidden_size_q: number;
    hidden_size_kv: number;
    element_size: number;
  };
  readonly outputs: Record<
    'qkv_linear_to_attn' | 'qkv_grad_attn_to_linear' | 'out_attn_to_linear' | 'out_grad_linear_to_attn',
    Exchange
  > & {
    readonly attn_metadata: readonly {
      cu_seqlens_q: number[];
      cu_seqlens_kv: number[];
      max_seqlen_q: number;
      max_seqlen_kv: number;
    }[];
  };
}

const transpose = (m: Matrix): Matrix => m[0]!.map((_, c) => m.map((row) => row[c]!));
const exclusive = (row: readonly number[]) => row.map((_, i) => row.slice(0, i).reduce((a, b) => a + b, 0));

function denseTokens(plan: DispatchPlan): Matrix {
  const matrix = Array.from({ length: plan.worldSize }, () => new Array<number>(plan.worldSize).fill(0));
  for (let r = 0; r < plan.worldSize; r++) {
    for (let p = plan.sent.offsets[r]!; p < plan.sent.offsets[r + 1]!; p++)
      matrix[r]![plan.sent.peer[p]!] = plan.sent.tokens[p]!;
  }
  return matrix;
}

/** Offset of every entry within its pair's chunk, when the pair's rows of one tensor lie back to back in global-index order. */
function offsetsInChunk(plan: DispatchPlan, rowBytes: number): number[] {
  const offsets: number[] = [];
  for (let r = 0; r < plan.worldSize; r++) {
    const fill = new Array<number>(plan.worldSize).fill(0);
    for (let e = plan.entryOffsets[r]!; e < plan.entryOffsets[r + 1]!; e++) {
      offsets.push(fill[plan.dstRank[e]!]!);
      fill[plan.dstRank[e]!]! += plan.length[e]! * rowBytes;
    }
  }
  return offsets;
}

function replicasOf({ fwdKv }: AttentionPlan, r: number): number {
  return 1 + Math.max(0, ...fwdKv.replica.subarray(fwdKv.entryOffsets[r], fwdKv.entryOffsets[r + 1]));
}

/** Global shard indices of a server's groups, by document. */
function groupsInDocumentOrder({ layout, shards }: AttentionPlan, t: number): number[] {
  return [...serverLayout(layout, t).shard].sort(
    (a, b) => shards.document[a]! - shards.document[b]! || shards.position[a]! - shards.position[b]!,
  );
}

/** Homes' and servers' buffer offsets of Q, K and V (Q only when `kvRow` is 0). */
function stage(plan: AttentionPlan, qRow: number, kvRow: number) {
  const { fwdQ, fwdKv, shards } = plan;
  const w = shards.worldSize;
  const qTokens = denseTokens(fwdQ);
  const kvTokens = denseTokens(fwdKv);
  const transfer = qTokens.map((row, r) => row.map((q, t) => q * qRow + 2 * kvRow * kvTokens[r]![t]!));
  const sendDisp = transfer.map(exclusive);
  const recvDisp = transpose(transpose(transfer).map(exclusive));
  const qOffset = offsetsInChunk(fwdQ, qRow);
  const kvOffset = offsetsInChunk(fwdKv, kvRow);
  const kOffset = (r: number, e: number) => qTokens[r]![fwdKv.dstRank[e]!]! * qRow + kvOffset[e]!;
  const vOffset = (r: number, e: number) => kOffset(r, e) + kvTokens[r]![fwdKv.dstRank[e]!]! * kvRow;
  const homeQ: number[][] = [];
  const homeKv: [number[][], number[][]][] = [];
  const mask: number[][][] = [];
  for (let r = 0; r < w; r++) {
    const count = shards.shardOffsets[r + 1]! - shards.shardOffsets[r]!;
    const replicas = replicasOf(plan, r);
    const grid = () => Array.from({ length: replicas }, () => new Array<number>(count).fill(-1));
    const [k, v] = [grid(), grid()];
    const q: number[] = [];
    for (let e = fwdQ.entryOffsets[r]!; e < fwdQ.entryOffsets[r + 1]!; e++)
      q.push(sendDisp[r]![fwdQ.dstRank[e]!]! + qOffset[e]!);
    for (let e = fwdKv.entryOffsets[r]!; e < fwdKv.entryOffsets[r + 1]!; e++) {
      k[fwdKv.replica[e]!]![fwdKv.srcShard[e]!] = sendDisp[r]![fwdKv.dstRank[e]!]! + kOffset(r, e);
      v[fwdKv.replica[e]!]![fwdKv.srcShard[e]!] = sendDisp[r]![fwdKv.dstRank[e]!]! + vOffset(r, e);
    }
    homeQ.push(q);
    homeKv.push([k, v]);
    mask.push(transpose(k.map((row) => row.map((x) => Number(x >= 0)))));
  }
  const serverQ: number[][] = [];
  const serverKv: [number[], number[]][] = [];
  const serverKvLengths: number[][] = [];
  const dedup: { num_copies: number[]; copy_start_id: Matrix; main_copy_mask: number[] }[] = [];
  for (let t = 0; t < w; t++) {
    const q: number[] = [];
    const [k, v]: [number[], number[]] = [[], []];
    const lengths: number[] = [];
    const entries: number[] = [];
    for (const g of groupsInDocumentOrder(plan, t)) {
      const r = shards.shardOffsets.findLastIndex((o) => o <= g);
      const e = fwdQ.entryOffsets[r]! + (g - shards.shardOffsets[r]!);
      q.push(recvDisp[r]![t]! + qOffset[e]!);
      for (let p = 0; p <= shards.position[g]!; p++) {
        const part = shards.position.findIndex((at, i) => at === p && shards.document[i] === shards.document[g]);
        const home = shards.shardOffsets.findLastIndex((o) => o <= part);
        const kv = fwdKv.dstRank.findIndex(
          (to, i) =>
            to === t &&
            i >= fwdKv.entryOffsets[home]! &&
            i < fwdKv.entryOffsets[home + 1]! &&
            fwdKv.srcShard[i] === part - shards.shardOffsets[home]!,
        );
        k.push(recvDisp[home]![t]! + kOffset(home, kv));
        v.push(recvDisp[home]![t]! + vOffset(home, kv));
        lengths.push(shards.lengths[part]!);
        entries.push(kv);
      }
    }
    const starts = exclusive(lengths);
    const copies = entries.map((kv, i) =>
      entries.indexOf(kv) === i ? entries.flatMap((x, j) => (x === kv && j > i ? [starts[j]!] : [])) : [],
    );
    const widest = Math.max(1, ...copies.map((c) => c.length));
    dedup.push({
      num_copies: copies.map((c) => c.length),
      copy_start_id: copies.map((c) => [...c, ...new Array<number>(widest - c.length).fill(0)]),
      main_copy_mask: entries.map((kv, i) => Number(entries.indexOf(kv) === i)),
    });
    serverQ.push(q);
    serverKv.push([k, v]);
    serverKvLengths.push(lengths);
  }
  return { transfer, sendDisp, recvDisp, homeQ, homeKv, serverQ, serverKv, serverKvLengths, mask, dedup };
}

function expectExchange(found: Exchange, transfer: Matrix): void {
  const recvDisp = transpose(transpose(transfer).map(exclusive));
  const diagonal = (m: Matrix) => m.map((row, i) => row[i]!);
  expect(found.sender_transfer_sz).toEqual(transfer);
  expect(found.sender_send_disp).toEqual(transfer.map(exclusive));
  expect(found.sender_recv_disp).toEqual(recvDisp);
  expect(found.recver_transfer_sz).toEqual(transpose(transfer));
  expect(found.my_rank_send_offset).toEqual(diagonal(transfer.map(exclusive)));
  expect(found.my_rank_recv_offset).toEqual(diagonal(recvDisp));
  expect(found.my_rank_send_sz).toEqual(diagonal(transfer));
}

describe.each(goldenNames().filter((name) => name.startsWith('fa2a_')))('%s', (name) => {
  const { inputs, outputs } = readGolden<StagedGolden>(name);
  const { shards, serverRank } = shardsOfPlan(inputs.world_size, inputs.docs);
  const plan = planAttention(shards, serverRank, { sharing: 'each-server' });
  const qRow = inputs.hidden_size_q * inputs.element_size;
  const kvRow = inputs.hidden_size_kv * inputs.element_size;
  const both = stage(plan, qRow, kvRow);
  const queryOnly = stage(plan, qRow, 0);
  const homeLengths = Array.from({ length: inputs.world_size }, (_, r) => [
    ...shards.lengths.subarray(shards.shardOffsets[r], shards.shardOffsets[r + 1]),
  ]);
  const groups = Array.from({ length: inputs.world_size }, (_, t) => groupsInDocumentOrder(plan, t));
  const serverLengths = groups.map((list) => list.map((g) => shards.lengths[g]!));

  it('bytes per pair and chunk places, both directions, with and without KV', () => {
    expectExchange(outputs.qkv_linear_to_attn, both.transfer);
    expectExchange(outputs.qkv_grad_attn_to_linear, transpose(both.transfer));
    expectExchange(outputs.out_grad_linear_to_attn, queryOnly.transfer);
    expectExchange(outputs.out_attn_to_linear, transpose(queryOnly.transfer));
  });

  it('offsets of every shard in the buffers', () => {
    const home = [both.homeQ, both.homeKv.map(([k]) => k), both.homeKv.map(([, v]) => v)];
    const server = [both.serverQ, both.serverKv.map(([k]) => k), both.serverKv.map(([, v]) => v)];
    expect(outputs.qkv_linear_to_attn.send_memcpy).toEqual(home);
    expect(outputs.qkv_linear_to_attn.recv_memcpy).toEqual(server);
    expect(outputs.qkv_grad_attn_to_linear.send_memcpy).toEqual(server);
    expect(outputs.qkv_grad_attn_to_linear.recv_memcpy).toEqual(home);
    expect(outputs.out_grad_linear_to_attn.send_memcpy).toEqual([queryOnly.homeQ]);
    expect(outputs.out_grad_linear_to_attn.recv_memcpy).toEqual([queryOnly.serverQ]);
    expect(outputs.out_attn_to_linear.send_memcpy).toEqual([queryOnly.serverQ]);
    expect(outputs.out_attn_to_linear.recv_memcpy).toEqual([queryOnly.homeQ]);
  });

  it('lengths, shapes, replicas and the copies that share one arrival', () => {
    const forward = outputs.qkv_linear_to_attn;
    expect(forward.seq_lens).toEqual([
      { send: homeLengths, recv: serverLengths },
      { send: homeLengths, recv: both.serverKvLengths },
    ]);
    const sum = (row: readonly number[]) => row.reduce((a, b) => a + b, 0);
    const shapes = [
      {
        send: homeLengths.map((l) => [sum(l), inputs.hidden_size_q]),
        recv: serverLengths.map((l) => [sum(l), inputs.hidden_size_q]),
      },
      {
        send: homeLengths.map((l, r) => [replicasOf(plan, r), sum(l), inputs.hidden_size_kv]),
        recv: both.serverKvLengths.map((l) => [sum(l), inputs.hidden_size_kv]),
      },
    ];
    expect(forward.tensor_shape).toEqual(shapes);
    expect(forward.kv_replica_mask).toEqual(both.mask);
    expect(outputs.qkv_grad_attn_to_linear.kv_grad_send_dedup).toEqual(both.dedup);
    const kvLengths = groups.map((list, t) => {
      const { shard, kvLength } = serverLayout(plan.layout, t);
      return list.map((g) => kvLength[shard.indexOf(g)]!);
    });
    const cumulative = (row: readonly number[]) => exclusive([...row, 0]);
    expect(serverLengths.map(cumulative)).toEqual(outputs.attn_metadata.map((m) => m.cu_seqlens_q));
    expect(kvLengths.map(cumulative)).toEqual(outputs.attn_metadata.map((m) => m.cu_seqlens_kv));
    expect([...plan.layout.maxSeqlenQ]).toEqual(outputs.attn_metadata.map((m) => m.max_seqlen_q));
    expect([...plan.layout.maxSeqlenKv]).toEqual(outputs.attn_metadata.map((m) => m.max_seqlen_kv));
  });

  it('receives each KV row once per server: our tensors are smaller than the original attention tensors by the copies', () => {
    const copied = both.dedup.map(({ main_copy_mask }, t) =>
      main_copy_mask.reduce((n, main, i) => n + (main ? 0 : both.serverKvLengths[t]![i]!), 0),
    );
    expect([...plan.fwdKv.recvTokens].map((n, t) => n + copied[t]!)).toEqual(
      outputs.qkv_linear_to_attn.tensor_shape[1]!.recv.map(([rows]) => rows),
    );
  });
});
