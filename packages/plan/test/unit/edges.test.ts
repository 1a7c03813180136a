import { describe, expect, it } from 'vitest';
import {
  explain,
  fromPaddedAttention,
  fromPaddedQuery,
  planAttention,
  planQuery,
  planReplicas,
  rankDispatch,
  serverLayout,
  shardsOfDocuments,
  sizes,
  validate,
} from '../../src/index.js';
import { movePlan, sumReplicas } from '../../src/reference/index.js';
import { expectPlanError } from '../expect-error.js';
import { shardsOfPlan } from '../goldens/documents.js';

const unit = { rowBytes: 64, chunkBytes: 256 };

describe('ranks that have nothing to do', () => {
  it('no shards at all, on 1 and on 5 ranks', () => {
    for (const worldSize of [1, 5]) {
      const shards = { worldSize, shardOffsets: new Int32Array(worldSize + 1), lengths: new Int32Array(0) };
      const { fwdQ, revQ } = planQuery(shards, new Int32Array(0));
      for (const plan of [fwdQ, revQ]) {
        validate(plan);
        expect(plan.dstRank.length).toBe(0);
        expect(sizes(plan, unit).remoteBytes).toBe(0);
      }
      const documents = { ...shards, documents: 0, document: new Int32Array(0), position: new Int32Array(0) };
      for (const sharing of ['each-query', 'each-server'] as const) {
        const plan = planAttention(documents, new Int32Array(0), { sharing });
        validate(plan);
        expect(plan.fwdKv.replicas).toBe(1);
        expect(explain(plan).imbalanceAfter).toBe(1);
      }
    }
  });

  it('a rank that only sends, one that only receives, one that does neither', () => {
    const { shards, dstRank } = fromPaddedQuery(
      [
        [3, 2],
        [0, 0],
        [0, 0],
      ],
      [
        [1, 1],
        [-1, -1],
        [-1, -1],
      ],
    );
    const { fwdQ, revQ } = planQuery(shards, dstRank);
    validate(fwdQ);
    validate(revQ);
    expect([...fwdQ.sendTokens, ...fwdQ.recvTokens]).toEqual([5, 0, 0, 0, 5, 0]);
    const [first, second, third] = [0, 1, 2].map((r) => rankDispatch(fwdQ, r));
    expect([first!.dstRank.length, second!.dstRank.length, third!.dstRank.length]).toEqual([2, 0, 0]);
    expect([first!.received.peer.length, second!.received.peer.length, third!.received.peer.length]).toEqual([0, 1, 0]);
  });

  it('the original counts 1 group on a server that receives nothing; here it has 0 and cuSeqlens [0]', () => {
    const { shards, serverRank } = shardsOfPlan(3, [[[0, 2, 0, 4]]]);
    const { layout } = planAttention(shards, serverRank);
    const idle = serverLayout(layout, 1);
    expect([idle.groups, [...idle.cuSeqlensQ], [...idle.cuSeqlensKv!], idle.maxSeqlenQ]).toEqual([0, [0], [0], 0]);
  });
});

describe('one rank', () => {
  it('plans padded input with -1 in the mapping, where the original raises IndexError', () => {
    const { shards, serverRank } = fromPaddedAttention({
      seqLen: [[4, 3, 0]],
      numSeqs: [2],
      qDispatch: [[0, 0, -1]],
      kvToQMapping: [
        [
          [
            [0, 0],
            [0, 1],
          ],
          [
            [0, 1],
            [-1, -1],
          ],
          [
            [-1, -1],
            [-1, -1],
          ],
        ],
      ],
      kvToQRank: [
        [
          [0, 0],
          [1, -1],
          [-1, -1],
        ],
      ],
      kvContextSize: [[0, 4, 0]],
      qToNumKvSeq: [[1, 2, -1]],
      qToNumKvToken: [[4, 7, 0]],
    });
    const plan = planAttention(shards, serverRank);
    validate(plan);
    expect([...plan.fwdKv.recvTokens]).toEqual([11]);
    expect(sizes(plan.fwdKv, unit).remoteBytes).toBe(0);
    expect([...serverLayout(plan.layout, 0).cuSeqlensKv!]).toEqual([0, 4, 11]);
  });
});

describe('shards of length 0', () => {
  const { shards, serverRank } = shardsOfPlan(2, [
    [
      [0, 1, 0, 0],
      [0, 0, 1, 5],
      [1, 1, 2, 0],
      [1, 0, 3, 2],
    ],
  ]);

  it('are dispatches like others, first in a document, last on a rank, and in gradients', () => {
    for (const sharing of ['each-query', 'each-server'] as const) {
      const plan = planAttention(shards, serverRank, { sharing });
      validate(plan);
      expect(plan.fwdQ.dstRank.length).toBe(4);
      const ones = Array.from(plan.fwdKv.recvTokens, (n) => new Float32Array(n).fill(1));
      const dense = sumReplicas(plan.reduction, movePlan(plan.revKv, ones, 1), 1, 'dense', 'f32');
      expect(dense.map((t) => t.length)).toEqual([5, 2]);
      expect(dense).toEqual(sumReplicas(plan.reduction, movePlan(plan.revKvCompact, ones, 1), 1, 'compact', 'f32'));
    }
  });

  it('are no chunk and no byte, but they are counted as dispatches', () => {
    const { fwdQ } = planAttention(shards, serverRank);
    const { chunksSent, remoteChunks } = sizes(fwdQ, unit);
    expect([...chunksSent]).toEqual([2, 1]);
    expect(remoteChunks).toBe(1);
    expect([...fwdQ.sent.dispatches].reduce((a, b) => a + b)).toBe(4);
  });
});

describe('many replicas', () => {
  it('16 copies of one shard, also to one and the same rank (the original sends at most 9)', () => {
    for (const target of [() => 1, (c: number) => c]) {
      const shards = {
        worldSize: 16,
        shardOffsets: Int32Array.from({ length: 17 }, (_, r) => Math.min(r, 1)),
        lengths: Int32Array.of(3),
      };
      const ids = Int32Array.from({ length: 16 }, (_, c) => c);
      const plans = planReplicas(shards, {
        replicas: 16,
        offsets: Int32Array.of(0, 16),
        dstRank: ids.map(target),
        replica: ids,
      });
      for (const plan of [plans.fwdKv, plans.revKv, plans.revKvCompact]) validate(plan);
      const gradients = Array.from(plans.fwdKv.recvTokens, (n) => new Float32Array(n).fill(1));
      expect([...sumReplicas(plans.reduction, movePlan(plans.revKv, gradients, 1), 1, 'dense', 'f32')[0]!]).toEqual([
        16, 16, 16,
      ]);
      expect(plans.revKv.recvTokens[0]).toBe(48);
    }
  });

  it('a document of 16 parts: 16 replicas each query, one each server when all are on one server', () => {
    const { shards, serverRank } = shardsOfPlan(2, [Array.from({ length: 16 }, (_, p) => [0, 1, p, 2])]);
    const eachQuery = planAttention(shards, serverRank);
    const eachServer = planAttention(shards, serverRank, { sharing: 'each-server' });
    expect([eachQuery.fwdKv.replicas, eachServer.fwdKv.replicas]).toEqual([16, 1]);
    expect([eachQuery.fwdKv.recvTokens[1], eachServer.fwdKv.recvTokens[1]]).toEqual([272, 32]);
  });
});

describe('row counts beyond int32 are refused, never wrapped', () => {
  const half = 2 ** 30;
  const table = (lengths: readonly number[], offsets: readonly number[]) => ({
    worldSize: offsets.length - 1,
    shardOffsets: Int32Array.from(offsets),
    lengths: Int32Array.from(lengths),
  });

  it('in a home tensor', () => {
    const error = expectPlanError(
      () => planQuery(table([half, half], [0, 2]), Int32Array.of(0, 0)),
      'EP_CAPACITY',
      'rank 0',
      String(2 ** 31),
    );
    expect(error.context).toMatchObject({ rank: 0, needed: 2 ** 31, limit: 2 ** 31 - 1 });
  });

  it('in a receive tensor', () => {
    expectPlanError(
      () => planQuery(table([half, half], [0, 1, 2]), Int32Array.of(1, 1)),
      'EP_CAPACITY',
      'receive tensor of rank 1',
    );
  });

  it('in a replica-major buffer, though no receive tensor is too large', () => {
    const shards = table([half], [0, 1, 1]);
    expectPlanError(
      () =>
        planReplicas(shards, {
          replicas: 3,
          offsets: Int32Array.of(0, 1),
          dstRank: Int32Array.of(1),
          replica: Int32Array.of(2),
        }),
      'EP_CAPACITY',
      'replica-major buffer of rank 0',
    );
  });

  it('in a document, and in the keys and values of a server', () => {
    const list = (lengths: readonly number[], homes: readonly number[]) =>
      shardsOfDocuments({
        worldSize: 3,
        documentOffsets: Int32Array.of(0, lengths.length),
        homeRank: Int32Array.from(homes),
        lengths: Int32Array.from(lengths),
      }).shards;
    expectPlanError(() => planAttention(list([half, half], [0, 1]), Int32Array.of(0, 1)), 'EP_CAPACITY', 'document 0');
    expectPlanError(
      () => planAttention(list([half, 5, half - 6], [0, 1, 2]), Int32Array.of(2, 1, 2)),
      'EP_CAPACITY',
      'key-value receive tensor of rank 2',
    );
  });

  it('at exactly 2^31 - 1 rows all is well', () => {
    const { fwdQ } = planQuery(table([half, half - 1], [0, 2]), Int32Array.of(0, 0));
    expect(fwdQ.recvTokens[0]).toBe(2 ** 31 - 1);
    validate(fwdQ);
  });

  it('and a document of too many parts is refused before memory is asked for', () => {
    const parts = 2 ** 14 + 1;
    const { shards } = shardsOfDocuments({
      worldSize: 1,
      documentOffsets: Int32Array.of(0, parts),
      homeRank: new Int32Array(parts),
      lengths: new Int32Array(parts),
    });
    expectPlanError(() => planAttention(shards, new Int32Array(parts)), 'EP_CAPACITY', 'dispatches');
  });
});
