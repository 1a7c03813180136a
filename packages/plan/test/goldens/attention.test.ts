import { describe, expect, it } from 'vitest';
import {
  fromPaddedAttention,
  fromPaddedQuery,
  planAttention,
  planQuery,
  planReplicas,
  replicaMask,
  serverLayout,
} from '../../src/index.js';
import { movePlan, sumReplicas } from '../../src/reference/index.js';
import { shardsOfPlan } from './documents.js';
import {
  type Cube,
  forwardCube,
  goldenNames,
  lists,
  type Matrix,
  type Metadata,
  readGolden,
  receiveMatrix,
  reverseRows,
  squeeze,
  tokenIds,
} from './golden.js';

interface KvGolden {
  readonly inputs: {
    readonly mlp_seq_len: Matrix;
    readonly mlp_num_seqs: number[];
    readonly mlp_q_dispatch: Matrix;
    readonly kv_to_q_mapping: number[][][][];
    readonly kv_to_q_rank: Cube;
    readonly kv_context_size: Matrix;
    readonly q_to_num_kv_seq: Matrix;
    readonly q_to_num_kv_token: Matrix;
  };
  readonly plan_shards: { readonly docs: number[][][] };
  readonly outputs: {
    readonly fwd_q: Metadata;
    readonly rev_q: Metadata;
    readonly fwd_k: Metadata<Cube>;
    readonly rev_k: Metadata;
    readonly fa_params: {
      cu_seqlens_q: Matrix;
      cu_seqlens_kv: Matrix;
      max_seqlen_q: number[];
      max_seqlen_kv: number[];
    };
    readonly kv_dst_global_seq_id: Cube;
  };
  readonly true_kv_counts?: { readonly fwd_num_recv_tokens: Matrix; readonly rev_num_recv_tokens: Matrix };
  readonly token_movement: {
    readonly q_recv: Matrix;
    readonly k_recv: Matrix;
    readonly q_reverse_recv: Matrix;
    readonly k_reverse_recv_replica_major: Cube;
  };
  readonly kv_grad_reduction: { readonly summed: Matrix; readonly num_replicas_per_token: Matrix };
}

function readPlacement({ inputs }: KvGolden) {
  return fromPaddedAttention({
    seqLen: inputs.mlp_seq_len,
    numSeqs: inputs.mlp_num_seqs,
    qDispatch: inputs.mlp_q_dispatch,
    kvToQMapping: inputs.kv_to_q_mapping,
    kvToQRank: inputs.kv_to_q_rank,
    kvContextSize: inputs.kv_context_size,
    qToNumKvSeq: inputs.q_to_num_kv_seq,
    qToNumKvToken: inputs.q_to_num_kv_token,
  });
}

describe.each(goldenNames().filter((name) => name.startsWith('kv_')))('%s', (name) => {
  const golden = readGolden<KvGolden>(name);
  const { inputs, outputs } = golden;
  const worldSize = inputs.mlp_seq_len.length;
  const width = inputs.mlp_seq_len[0]!.length;
  const replicas = inputs.kv_to_q_rank[0]![0]!.length;
  const { shards, serverRank } = readPlacement(golden);
  const plan = planAttention(shards, serverRank);
  const { fwdQ, revQ, fwdKv, revKv, revKvCompact, reduction, layout } = plan;
  const reverseOf = ({ dst_rank, dst_offset, seq_len }: Metadata) => ({ dst_rank, dst_offset, seq_len });

  it('query plans equal the original', () => {
    expect(squeeze(forwardCube(fwdQ, fwdQ.dstRank, width, 1, -1))).toEqual(outputs.fwd_q.dst_rank);
    expect(squeeze(forwardCube(fwdQ, fwdQ.dstOffset, width, 1, 0))).toEqual(outputs.fwd_q.dst_offset);
    expect(receiveMatrix(fwdQ)).toEqual(outputs.fwd_q.num_recv_tokens);
    expect(reverseRows(revQ)).toEqual(reverseOf(outputs.rev_q));
    expect(receiveMatrix(revQ)).toEqual(outputs.rev_q.num_recv_tokens);
  });

  it('key-value plans equal the original', () => {
    expect(fwdKv.replicas).toBe(replicas);
    expect(forwardCube(fwdKv, fwdKv.dstRank, width, replicas, -1)).toEqual(outputs.fwd_k.dst_rank);
    expect(forwardCube(fwdKv, fwdKv.dstOffset, width, replicas, 0)).toEqual(outputs.fwd_k.dst_offset);
    expect([...fwdKv.recvTokens]).toEqual(outputs.fwd_k.num_total_recv_tokens);
    expect(reverseRows(revKv)).toEqual(reverseOf(outputs.rev_k));
    const slots = outputs.rev_k.dst_rank[0]!.length;
    const globalSlot = fwdKv.dstShard.map((slot, e) => slot + fwdKv.dstRank[e]! * slots);
    expect(forwardCube(fwdKv, globalSlot, width, replicas, -1)).toEqual(outputs.kv_dst_global_seq_id);
  });

  it('counts received KV by the home of the KV shard, not of the query as the original does', () => {
    const truth = golden.true_kv_counts ?? {
      fwd_num_recv_tokens: outputs.fwd_k.num_recv_tokens,
      rev_num_recv_tokens: outputs.rev_k.num_recv_tokens,
    };
    expect(receiveMatrix(fwdKv)).toEqual(truth.fwd_num_recv_tokens);
    expect(receiveMatrix(revKv)).toEqual(truth.rev_num_recv_tokens);
    if (golden.true_kv_counts) {
      expect(outputs.fwd_k.num_recv_tokens).not.toEqual(truth.fwd_num_recv_tokens);
      expect(outputs.rev_k.num_recv_tokens).not.toEqual(truth.rev_num_recv_tokens);
    }
    // MLP-CP documents are where the two rules differ; both MLP-CP goldens must be among the corrected ones.
    expect(golden.true_kv_counts !== undefined).toBe(name.startsWith('kv_cp_'));
  });

  it('attention layout equals the original', () => {
    const servers = Array.from({ length: worldSize }, (_, t) => serverLayout(layout, t));
    expect(servers.map((s) => [...s.cuSeqlensQ])).toEqual(outputs.fa_params.cu_seqlens_q);
    expect(servers.map((s) => [...s.cuSeqlensKv!])).toEqual(outputs.fa_params.cu_seqlens_kv);
    expect(servers.map((s) => s.maxSeqlenQ)).toEqual(outputs.fa_params.max_seqlen_q);
    expect(servers.map((s) => s.maxSeqlenKv)).toEqual(outputs.fa_params.max_seqlen_kv);
    for (const s of servers) expect([...s.kvStart]).toEqual([...s.cuSeqlensKv!.subarray(0, s.groups)]);
  });

  it('the replica mask equals the original', () => {
    const mask = replicaMask(plan);
    const rows = inputs.mlp_seq_len.map((row, r) =>
      row.map((_, s) => {
        const g = shards.shardOffsets[r]! + s;
        const isShard = g < shards.shardOffsets[r + 1]!;
        return isShard ? [...mask.subarray(g * replicas, (g + 1) * replicas)] : new Array<number>(replicas).fill(0);
      }),
    );
    expect(rows).toEqual(outputs.rev_k.seq_recv_mask);
  });

  it('moves every token as recorded', () => {
    const send = tokenIds(fwdQ.sendTokens);
    const q = movePlan(fwdQ, send, 1);
    const kv = movePlan(fwdKv, send, 1);
    expect(lists(q)).toEqual(golden.token_movement.q_recv);
    expect(lists(kv)).toEqual(golden.token_movement.k_recv);
    expect(lists(movePlan(revQ, q, 1))).toEqual(golden.token_movement.q_reverse_recv);
    expect(lists(movePlan(revKv, kv, 1))).toEqual(
      golden.token_movement.k_reverse_recv_replica_major.map((rank) => rank.flat()),
    );
  });

  it('sums the replicas of the KV gradient as recorded, in both forms', () => {
    const gradients = Array.from(fwdKv.recvTokens, (n, t) =>
      Float32Array.from({ length: n }, (_, i) => 10000 * (t + 1) + i),
    );
    const { summed, num_replicas_per_token } = golden.kv_grad_reduction;
    for (const [form, revPlan] of [
      ['dense', revKv],
      ['compact', revKvCompact],
    ] as const) {
      const home = sumReplicas(reduction, movePlan(revPlan, gradients, 1), 1, form, 'f32');
      expect(home.map((t) => [...t])).toEqual(summed);
      const ones = gradients.map((t) => new Float32Array(t.length).fill(1));
      const counts = sumReplicas(reduction, movePlan(revPlan, ones, 1), 1, form, 'f32');
      expect(counts.map((t) => [...t])).toEqual(num_replicas_per_token);
    }
  });
});

// kv_random_seed0_w4 comes from a generator without documents.
describe.each(['kv_dp_causal_w3', 'kv_cp_headtail_w2', 'kv_cp_uneven_w3'])('%s', (name) => {
  const golden = readGolden<KvGolden>(name);
  const { shards, serverRank } = readPlacement(golden);
  const { fwdKv, revKv, layout } = planAttention(shards, serverRank);

  it('the documents of the planner output give the same plan as the padded inputs', () => {
    const fromDocuments = shardsOfPlan(shards.worldSize, golden.plan_shards.docs);
    expect(fromDocuments.shards.shardOffsets).toEqual(shards.shardOffsets);
    expect(fromDocuments.shards.lengths).toEqual(shards.lengths);
    const again = planAttention(fromDocuments.shards, fromDocuments.serverRank);
    expect(again.fwdKv).toEqual(fwdKv);
    expect(again.revKv).toEqual(revKv);
    // Documents are numbered by the list on one side and by their first part's home on the other; nothing else differs.
    expect({ ...again.layout }).toEqual({ ...layout });
  });
});

interface LayoutGolden {
  readonly inputs: { readonly seq_shard_len: Matrix; readonly seq_shard_cumsum: Matrix; readonly dispatch: Matrix };
  readonly outputs: { readonly shard_to_tuple: [Matrix, Matrix, number[], number[], number[]] };
}

describe('attn_layout_seqlens_w3', () => {
  const golden = readGolden<LayoutGolden>('attn_layout_seqlens_w3');

  it('equals the original, but a rank that receives nothing has 0 groups where the original counts 1', () => {
    const { seq_shard_len, seq_shard_cumsum, dispatch } = golden.inputs;
    const { shards, dstRank } = fromPaddedQuery(seq_shard_len, dispatch);
    // Every row is one document per run of growing sums: a part whose sum equals its length starts one.
    const document = new Int32Array(shards.lengths.length);
    const position = new Int32Array(shards.lengths.length);
    let documents = 0;
    for (let r = 0; r < shards.worldSize; r++) {
      for (let g = shards.shardOffsets[r]!; g < shards.shardOffsets[r + 1]!; g++) {
        const starts = seq_shard_cumsum[r]![g - shards.shardOffsets[r]!] === shards.lengths[g];
        if (starts) documents++;
        document[g] = documents - 1;
        position[g] = starts ? 0 : position[g - 1]! + 1;
      }
    }
    const { layout } = planAttention({ ...shards, documents, document, position }, dstRank);
    const servers = Array.from({ length: shards.worldSize }, (_, t) => serverLayout(layout, t));
    const [cuQ, cuKv, maxQ, maxKv, received] = golden.outputs.shard_to_tuple;
    expect(received).toEqual([2, 1, 4]);
    expect(servers.map((s) => s.groups)).toEqual([2, 0, 4]);
    expect([cuQ[1], cuKv[1]]).toEqual([
      [0, 0],
      [0, 0],
    ]);
    expect(servers.map((s) => [...s.cuSeqlensQ])).toEqual([cuQ[0], [0], cuQ[2]]);
    expect(servers.map((s) => [...s.cuSeqlensKv!])).toEqual([cuKv[0], [0], cuKv[2]]);
    expect(servers.map((s) => s.maxSeqlenQ)).toEqual(maxQ);
    expect(servers.map((s) => s.maxSeqlenKv)).toEqual(maxKv);
  });
});

interface LocalGolden {
  readonly outputs: Record<'mlp_to_attn' | 'attn_to_mlp' | 'mlp_to_attn_kv_grad', Metadata> & {
    readonly mlp_to_attn_kv: Metadata<Cube>;
  };
}

describe('local_proj_w4', () => {
  const { outputs } = readGolden<LocalGolden>('local_proj_w4');
  const { shards, dstRank } = fromPaddedQuery(outputs.mlp_to_attn.seq_len, outputs.mlp_to_attn.dst_rank);

  it('each rank to its neighbour, both directions, Q and KV', () => {
    const { fwdQ, revQ } = planQuery(shards, dstRank);
    expect(squeeze(forwardCube(fwdQ, fwdQ.dstOffset, 1, 1, 0))).toEqual(outputs.mlp_to_attn.dst_offset);
    expect(receiveMatrix(fwdQ)).toEqual(outputs.mlp_to_attn.num_recv_tokens);
    const { dst_rank, dst_offset, seq_len } = outputs.attn_to_mlp;
    expect(reverseRows(revQ)).toEqual({ dst_rank, dst_offset, seq_len });
    expect(receiveMatrix(revQ)).toEqual(outputs.attn_to_mlp.num_recv_tokens);
    const offsets = Int32Array.of(0, 1, 2, 3, 4);
    const plans = planReplicas(shards, { replicas: 1, offsets, dstRank, replica: new Int32Array(4) });
    expect(forwardCube(plans.fwdKv, plans.fwdKv.dstRank, 1, 1, -1)).toEqual(outputs.mlp_to_attn_kv.dst_rank);
    expect(forwardCube(plans.fwdKv, plans.fwdKv.dstOffset, 1, 1, 0)).toEqual(outputs.mlp_to_attn_kv.dst_offset);
    expect(receiveMatrix(plans.fwdKv)).toEqual(outputs.mlp_to_attn_kv.num_recv_tokens);
    const grad = outputs.mlp_to_attn_kv_grad;
    expect(reverseRows(plans.revKv)).toEqual({
      dst_rank: grad.dst_rank,
      dst_offset: grad.dst_offset,
      seq_len: grad.seq_len,
    });
    expect(receiveMatrix(plans.revKv)).toEqual(grad.num_recv_tokens);
    expect([...replicaMask(plans)]).toEqual(grad.seq_recv_mask!.flat(2));
  });
});
