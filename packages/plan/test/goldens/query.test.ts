import { describe, expect, it } from 'vitest';
import {
  fromPaddedQuery,
  fromPaddedReplicas,
  planQuery,
  planReplicas,
  rankDispatch,
  replicaMask,
} from '../../src/index.js';
import { movePlan, sumReplicas } from '../../src/reference/index.js';
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

interface QueryGolden<T> {
  readonly inputs: { readonly seq_len: Matrix; readonly global_dispatch: T };
  readonly outputs: { readonly fwd: Metadata<T>; readonly rev: Metadata };
  readonly token_movement: { readonly send: Matrix; readonly recv: Matrix; readonly reverse_recv: Matrix };
}

const queryNames = goldenNames().filter((name) => name.startsWith('q_'));
const replicaNames = goldenNames().filter((name) => name.startsWith('q3d_'));

/** `num_seqs` of the original counts lengths above 0; where that differs from the shards that exist, ours is on the right. */
const countsThatDiffer: Record<
  string,
  { readonly forward?: readonly [number[], number[]]; readonly reverse?: readonly [number[], number[]] }
> = {
  q_interior_padding_w3: {
    forward: [
      [2, 3, 2],
      [2, 3, 3],
    ],
  },
  q_zero_len_shard_w2: {
    forward: [
      [2, 3],
      [3, 3],
    ],
    reverse: [
      [2, 3],
      [2, 4],
    ],
  },
};

describe.each(queryNames)('%s', (name) => {
  const golden = readGolden<QueryGolden<Matrix>>(name);
  const { shards, dstRank } = fromPaddedQuery(golden.inputs.seq_len, golden.inputs.global_dispatch);
  const { fwdQ, revQ } = planQuery(shards, dstRank);
  const width = golden.inputs.seq_len[0]!.length;
  const { fwd, rev } = golden.outputs;

  it('forward equals the original', () => {
    expect(squeeze(forwardCube(fwdQ, fwdQ.dstRank, width, 1, -1))).toEqual(fwd.dst_rank);
    expect(squeeze(forwardCube(fwdQ, fwdQ.dstOffset, width, 1, 0))).toEqual(fwd.dst_offset);
    expect(receiveMatrix(fwdQ)).toEqual(fwd.num_recv_tokens);
    expect([...fwdQ.recvTokens]).toEqual(fwd.num_total_recv_tokens);
  });

  it('reverse equals the original', () => {
    const { dst_rank, dst_offset, seq_len } = rev;
    expect(reverseRows(revQ)).toEqual({ dst_rank, dst_offset, seq_len });
    expect(receiveMatrix(revQ)).toEqual(rev.num_recv_tokens);
    // The reverse buffer has a row for every home token; the original's total is what arrives.
    expect([...revQ.recvTokens]).toEqual(golden.inputs.seq_len.map((row) => row.reduce((a, b) => a + b, 0)));
  });

  it('counts shards that exist, where the original counts lengths above 0', () => {
    const forward = Array.from(
      { length: shards.worldSize },
      (_, r) => shards.shardOffsets[r + 1]! - shards.shardOffsets[r]!,
    );
    const reverse = Array.from({ length: shards.worldSize }, (_, r) => rankDispatch(revQ, r).dstRank.length);
    const [originalForward, ourForward] = countsThatDiffer[name]?.forward ?? [forward, forward];
    const [originalReverse, ourReverse] = countsThatDiffer[name]?.reverse ?? [reverse, reverse];
    expect(fwd.num_seqs).toEqual(originalForward);
    expect(forward).toEqual(ourForward);
    expect(rev.num_seqs).toEqual(originalReverse);
    expect(reverse).toEqual(ourReverse);
  });

  it('moves every token as recorded', () => {
    const send = tokenIds(fwdQ.sendTokens);
    expect(lists(send)).toEqual(golden.token_movement.send);
    const received = movePlan(fwdQ, send, 1);
    expect(lists(received)).toEqual(golden.token_movement.recv);
    expect(lists(movePlan(revQ, received, 1))).toEqual(golden.token_movement.reverse_recv);
  });
});

describe.each(replicaNames)('%s', (name) => {
  const golden = readGolden<QueryGolden<Cube>>(name);
  const { shards, table } = fromPaddedReplicas(golden.inputs.seq_len, golden.inputs.global_dispatch);
  const plans = planReplicas(shards, table);
  const { fwdKv, revKv, revKvCompact, reduction } = plans;
  const width = golden.inputs.seq_len[0]!.length;
  const replicas = golden.inputs.global_dispatch[0]![0]!.length;
  const { fwd, rev } = golden.outputs;

  it('forward equals the original', () => {
    expect(fwdKv.replicas).toBe(replicas);
    expect(forwardCube(fwdKv, fwdKv.dstRank, width, replicas, -1)).toEqual(fwd.dst_rank);
    expect(forwardCube(fwdKv, fwdKv.dstOffset, width, replicas, 0)).toEqual(fwd.dst_offset);
    expect(receiveMatrix(fwdKv)).toEqual(fwd.num_recv_tokens);
  });

  it('reverse, mask and lengths equal the original', () => {
    const { dst_rank, dst_offset, seq_len } = rev;
    expect(reverseRows(revKv)).toEqual({ dst_rank, dst_offset, seq_len });
    expect(receiveMatrix(revKv)).toEqual(rev.num_recv_tokens);
    const mask = replicaMask(plans);
    rev.seq_recv_mask!.forEach((row, r) => {
      row.forEach((cell, s) => {
        const g = shards.shardOffsets[r]! + s;
        const isShard = g < shards.shardOffsets[r + 1]!;
        expect(isShard ? [...mask.subarray(g * replicas, (g + 1) * replicas)] : new Array(replicas).fill(0)).toEqual(
          cell,
        );
      });
    });
  });

  it('moves every token as recorded, and the compact form holds the same sums', () => {
    const send = tokenIds(fwdKv.sendTokens);
    const received = movePlan(fwdKv, send, 1);
    expect(lists(received)).toEqual(golden.token_movement.recv);
    const dense = movePlan(revKv, received, 1);
    expect(lists(dense)).toEqual(golden.token_movement.reverse_recv);
    const compact = movePlan(revKvCompact, received, 1);
    expect(sumReplicas(reduction, compact, 1, 'compact', 'f64')).toEqual(
      sumReplicas(reduction, dense, 1, 'dense', 'f64'),
    );
  });
});
