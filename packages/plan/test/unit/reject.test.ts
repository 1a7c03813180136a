import { describe, expect, it } from 'vitest';
import {
  balance,
  checkCapacity,
  digest,
  explain,
  fromPaddedAttention,
  fromPaddedQuery,
  fromPaddedReplicas,
  maxOverAverage,
  PlanError,
  type PlanErrorCode,
  packDocuments,
  planAttention,
  planQuery,
  planReplicas,
  rankDispatch,
  serialize,
  serverLayout,
  shardsOfDocuments,
  sizes,
  validate,
  validateReduction,
} from '../../src/index.js';
import { attentionForward, movePlan } from '../../src/reference/index.js';
import { expectPlanError } from '../expect-error.js';
import { shardsOfPlan } from '../goldens/documents.js';
import { padded } from '../padded.js';

const shards = { worldSize: 2, shardOffsets: Int32Array.of(0, 1, 3), lengths: Int32Array.of(4, 2, 3) };
const dst = Int32Array.of(1, 0, -1);
const documents = { ...shards, documents: 2, document: Int32Array.of(0, 0, 1), position: Int32Array.of(0, 1, 0) };
const servers = Int32Array.of(1, 0, 1);
const plan = planQuery(shards, dst).fwdQ;
const attention = planAttention(documents, servers);
const unit = { rowBytes: 16, chunkBytes: 32 };
const capacity = (change: object) => checkCapacity(plan, { ...sizes(plan, unit), ...change }, { sendBytes: 1e6 });
const untyped = (value: unknown) => value as never;

describe('bad input is named: what, where, expected, found', () => {
  const cases: readonly (readonly [string, () => unknown, readonly string[]])[] = [
    ['no table', () => planQuery(untyped(null), dst), ['shards', 'null']],
    ['world size 0', () => planQuery({ ...shards, worldSize: 0 }, dst), ['worldSize', 'found 0']],
    ['world size 1.5', () => planQuery({ ...shards, worldSize: 1.5 }, dst), ['worldSize', '1.5']],
    [
      'offsets as a plain array',
      () => planQuery({ ...shards, shardOffsets: untyped([0, 1, 3]) }, dst),
      ['shardOffsets', 'Int32Array', 'an array of 3'],
    ],
    [
      'offsets too short',
      () => planQuery({ ...shards, shardOffsets: Int32Array.of(0, 3) }, dst),
      ['shardOffsets', '3 elements', 'found 2'],
    ],
    [
      'offsets that start late',
      () => planQuery({ ...shards, shardOffsets: Int32Array.of(1, 1, 3) }, dst),
      ['shardOffsets[0]', 'found 1'],
    ],
    [
      'offsets that fall',
      () => planQuery({ ...shards, shardOffsets: Int32Array.of(0, 4, 3) }, dst),
      ['shardOffsets[2]', '4', 'found 3'],
    ],
    [
      'offsets that end early',
      () => planQuery({ ...shards, shardOffsets: Int32Array.of(0, 1, 2) }, dst),
      ['end at 3', 'found 2'],
    ],
    [
      'a negative length',
      () => planQuery({ ...shards, lengths: Int32Array.of(4, -2, 3) }, dst),
      ['lengths[1]', 'found -2'],
    ],
    ['too few destinations', () => planQuery(shards, Int32Array.of(0, 1)), ['dstRank', '3 elements', 'found 2']],
    ['a rank out of range', () => planQuery(shards, Int32Array.of(0, 2, 1)), ['dstRank[1]', '[-1, 1]', 'found 2']],
    ['a rank below -1', () => planQuery(shards, Int32Array.of(0, 1, -2)), ['dstRank[2]', 'found -2']],
    [
      'replicas that repeat',
      () =>
        planReplicas(shards, {
          replicas: 2,
          offsets: Int32Array.of(0, 2, 2, 2),
          dstRank: Int32Array.of(0, 1),
          replica: Int32Array.of(1, 1),
        }),
      ['replica[1]', 'above 1', 'found 1'],
    ],
    [
      'a replica out of range',
      () =>
        planReplicas(shards, {
          replicas: 2,
          offsets: Int32Array.of(0, 1, 1, 1),
          dstRank: Int32Array.of(0),
          replica: Int32Array.of(2),
        }),
      ['replica[0]', 'found 2'],
    ],
    [
      'a position twice',
      () => planAttention({ ...documents, position: Int32Array.of(1, 1, 0) }, servers),
      ['position[1]', 'document 0', 'unique'],
    ],
    [
      'a position out of range',
      () => planAttention({ ...documents, position: Int32Array.of(0, 2, 0) }, servers),
      ['position[1]', 'found 2'],
    ],
    [
      'a document out of range',
      () => planAttention({ ...documents, document: Int32Array.of(0, 0, 2) }, servers),
      ['document[2]', 'found 2'],
    ],
    [
      'a query without a server',
      () => planAttention(documents, Int32Array.of(1, -1, 1)),
      ['serverRank[1]', 'found -1'],
    ],
    ['an unknown sharing', () => planAttention(documents, servers, { sharing: untyped('some') }), ['sharing', 'some']],
    ['a rank slice out of range', () => rankDispatch(planQuery(shards, dst).fwdQ, 2), ['rank', 'found 2']],
    [
      'a server layout out of range',
      () => serverLayout(planAttention(documents, servers).layout, -1),
      ['rank', 'found -1'],
    ],
    [
      'an empty document list',
      () =>
        shardsOfDocuments({
          worldSize: 1,
          documentOffsets: new Int32Array(0),
          homeRank: new Int32Array(0),
          lengths: new Int32Array(0),
        }),
      ['documentOffsets', 'at least 1'],
    ],
    [
      'a home out of range',
      () =>
        shardsOfDocuments({
          worldSize: 2,
          documentOffsets: Int32Array.of(0, 1),
          homeRank: Int32Array.of(2),
          lengths: Int32Array.of(1),
        }),
      ['homeRank[0]', 'found 2'],
    ],
    ['row bytes 0', () => sizes(planQuery(shards, dst).fwdQ, { rowBytes: 0, chunkBytes: 1 }), ['rowBytes', 'found 0']],
    [
      'chunk bytes NaN',
      () => sizes(planQuery(shards, dst).fwdQ, { rowBytes: 1, chunkBytes: Number.NaN }),
      ['chunkBytes', 'NaN'],
    ],
    [
      'padded rows of different width',
      () =>
        fromPaddedQuery(
          [[1, 2], [3]],
          [
            [0, 0],
            [0, 0],
          ],
        ),
      ['seqLen[1]', '2 wide', 'found 1'],
    ],
    ['a padded matrix of another height', () => fromPaddedQuery([[1], [2]], [[0]]), ['dispatch', '2 rows', 'found 1']],
    ['a padded length of 1.5', () => fromPaddedQuery([[1.5]], [[0]]), ['seqLen[0][0]', '1.5']],
    ['a padded destination as text', () => fromPaddedQuery([[1]], untyped([['0']])), ['dispatch[0][0]', '0']],
    ['no padded matrix', () => fromPaddedQuery(untyped(7), [[0]]), ['seqLen', 'number 7']],
    [
      'fewer shards than columns in use',
      () => fromPaddedQuery([[1, 2]], [[0, 0]], [1]),
      ['numSeqs[0]', 'at least 2', 'found 1'],
    ],
    [
      'padded replicas of different depth',
      () => fromPaddedReplicas([[1, 2]], [[[0], [0, 0]]]),
      ['dispatch[0][1]', '1 deep', 'found 2'],
    ],
    [
      'an unknown split',
      () => packDocuments(Int32Array.of(1), Int32Array.of(1), untyped('zigzag')),
      ['split', 'zigzag'],
    ],
    ['no budgets', () => packDocuments(Int32Array.of(1), new Int32Array(0)), ['budgets']],
    [
      'a negative tolerance',
      () => balance(documents, { qRowBytes: 1, kvRowBytes: 1, tolerance: -0.1 }),
      ['tolerance', '-0.1'],
    ],
    ['block 0', () => balance(documents, { qRowBytes: 1, kvRowBytes: 1, block: 0 }), ['block', 'found 0']],
    [
      'a memory cap per server, one short',
      () => balance(documents, { qRowBytes: 1, kvRowBytes: 1, memoryBytes: [5] }),
      ['memoryBytes', '2 elements', 'found 1'],
    ],
    [
      'a NaN memory cap',
      () => balance(documents, { qRowBytes: 1, kvRowBytes: 1, memoryBytes: Number.NaN }),
      ['memory cap of server 0', 'NaN'],
    ],
    [
      'too few tensors to move',
      () => movePlan(planQuery(shards, dst).fwdQ, [new Int32Array(4)], 1),
      ['2 tensors', 'found 1'],
    ],
    [
      'a tensor of another size',
      () => movePlan(planQuery(shards, dst).fwdQ, [new Int32Array(4), new Int32Array(4)], 1),
      ['source[1]', '5 elements', 'found 4'],
    ],
    [
      'heads that do not divide',
      () => attentionForward({ queries: 0, keys: 0, heads: 3, kvHeads: 2, headDim: 1 }, [], [], []),
      ['heads', 'multiple of kvHeads', 'found 3'],
    ],
    [
      'more queries than keys',
      () => attentionForward({ queries: 2, keys: 1, heads: 1, kvHeads: 1, headDim: 1 }, [1, 1], [1], [1]),
      ['keys', 'found 1'],
    ],
  ];
  it.each(cases)('%s', (_, call, parts) => {
    expectPlanError(call, 'EP_INVALID_ARGUMENT', ...parts);
  });

  const detached = Int32Array.of(4, 2, 3);
  structuredClone(detached.buffer, { transfer: [detached.buffer] });
  const gone = Float64Array.of(1, 2);
  structuredClone(gone.buffer, { transfer: [gone.buffer] });
  const none = { worldSize: 1, shardOffsets: new Int32Array(2), lengths: new Int32Array(0) };
  it.each<readonly [string, () => unknown]>([
    ['lengths', () => planQuery({ ...shards, lengths: detached }, dst)],
    ['dstRank', () => planQuery(shards, detached)],
    ['lengths', () => planQuery({ ...none, lengths: detached }, none.lengths)],
    ['dstRank', () => planQuery(none, detached)],
    ['lengths', () => packDocuments(detached, Int32Array.of(8))],
    ['planned.sendBytes', () => capacity({ sendBytes: gone })],
    ['load', () => maxOverAverage(detached)],
    ['replica', () => validate({ ...plan, replica: detached })],
    ['sent.peer', () => validate({ ...plan, sent: { ...plan.sent, peer: detached } })],
    [
      'reduction.homeRow',
      () => validateReduction({ ...attention.reduction, homeRow: detached }, attention.revKvCompact),
    ],
    ['source[0]', () => movePlan(plan, [detached, detached], 1)],
  ])('a detached buffer of %s is one, not an empty array', (name, call) => {
    expectPlanError(call, 'EP_DETACHED', `the buffer of ${name} was detached, transferred or shrunk`);
  });

  it.each<readonly [string, () => unknown, readonly string[]]>([
    [
      'a column too short',
      () => rankDispatch({ ...plan, length: plan.length.slice(1) }, 0),
      ['plan.length', 'found 1'],
    ],
    ['a column too long', () => sizes({ ...plan, replica: new Int32Array(3) }, unit), ['plan.replica', 'found 3']],
    [
      'entries without an end',
      () => digest({ ...plan, entryOffsets: Int32Array.of(0, 1) }),
      ['plan.entryOffsets', '3 elements', 'found 2'],
    ],
    ['ranks without rows', () => serialize({ ...plan, sendTokens: new Int32Array(1) }), ['plan.sendTokens', 'found 1']],
    [
      'pairs without tokens',
      () => digest({ ...plan, sent: { ...plan.sent, tokens: new Int32Array(0) } }),
      ['plan.sent.tokens', 'found 0'],
    ],
    [
      'pairs of another world',
      () => digest({ ...plan, received: { ...plan.received, offsets: Int32Array.of(0, 2) } }),
      ['plan.received.offsets', '3 elements'],
    ],
    [
      'entries of a rank that come after the last',
      () => rankDispatch({ ...plan, entryOffsets: Int32Array.of(0, 9, 2) }, 0),
      ['plan.entryOffsets[0]', 'found 0 and 9'],
    ],
    [
      'groups of a server that come after the last',
      () => serverLayout({ ...attention.layout, groupOffsets: Int32Array.of(0, 9, 3) }, 0),
      ['layout.groupOffsets[0]', 'found 0 and 9'],
    ],
    [
      'a layout with too few rows',
      () => serverLayout({ ...attention.layout, cuSeqlensQ: new Int32Array(3) }, 0),
      ['layout.cuSeqlensQ', '5 elements'],
    ],
    [
      'a part of another world',
      () => explain({ ...attention, revQ: planQuery(none, none.lengths).revQ }),
      ['plan.revQ.worldSize must be 2', 'found number 1'],
    ],
    [
      'a reduction without its slots',
      () => explain({ ...attention, reduction: { ...attention.reduction, slotOffsets: new Int32Array(1) } }),
      ['plan.reduction.slotOffsets', '4 elements', 'found 1'],
    ],
  ])('%s is no plan', (_, call, parts) => {
    expectPlanError(call, 'EP_INVALID_ARGUMENT', ...parts);
  });

  it.each<readonly [string, object, string, readonly string[]]>([
    ['a smaller world', { sendBytes: Float64Array.of(1) }, 'EP_INVALID_ARGUMENT', ['2 elements', 'found 1']],
    ['a larger world', { sendBytes: new Float64Array(3) }, 'EP_INVALID_ARGUMENT', ['2 elements', 'found 3']],
    ['no number', { sendBytes: Float64Array.of(1, Number.NaN) }, 'EP_INVALID_ARGUMENT', ['[1] must be', 'found NaN']],
    ['less than nothing', { sendBytes: Float64Array.of(-1, 1) }, 'EP_INVALID_ARGUMENT', ['[0] must be', 'found -1']],
    ['another carrier', { sendBytes: Float32Array.of(1, 1) }, 'EP_INVALID_ARGUMENT', ['a Float64Array']],
    ['more than there is', { sendBytes: Float64Array.of(1, Infinity) }, 'EP_CAPACITY', ['rank 1', 'Infinity']],
  ])('sizes of %s fit no buffer', (_, planned, code, parts) => {
    expectPlanError(() => capacity(planned), code as PlanErrorCode, ...parts);
  });

  it('padded attention input that contradicts itself names the cell', () => {
    const good = { ...padded, seqLen: [[4, 3]], qToNumKvToken: [[4, 7]] };
    expect([...fromPaddedAttention(good).shards.position]).toEqual([0, 1]);
    expectPlanError(
      () => fromPaddedAttention({ ...good, kvContextSize: [[0, 5]] }),
      'EP_INVALID_ARGUMENT',
      'kvContextSize[0][1]',
      '4',
      'found 5',
    );
    expectPlanError(
      () => fromPaddedAttention({ ...good, qToNumKvToken: [[4, 8]] }),
      'EP_INVALID_ARGUMENT',
      'qToNumKvToken[0][1]',
      '7',
    );
    expectPlanError(
      () => fromPaddedAttention({ ...good, qToNumKvSeq: [[1, 1]] }),
      'EP_INVALID_ARGUMENT',
      'qToNumKvSeq[0][1]',
    );
    expectPlanError(
      () =>
        fromPaddedAttention({
          ...good,
          kvToQRank: [
            [
              [0, 1],
              [1, -1],
            ],
          ],
        }),
      'EP_INVALID_ARGUMENT',
      'kvToQRank[0][0][1]',
    );
    expectPlanError(
      () =>
        fromPaddedAttention({
          ...good,
          kvToQMapping: [
            [
              [
                [0, 0],
                [0, 1],
              ],
              [
                [0, 0],
                [-1, -1],
              ],
            ],
          ],
        }),
      'EP_INVALID_ARGUMENT',
      'kvToQMapping[0][1][0]',
    );
    expectPlanError(
      () =>
        fromPaddedAttention({
          ...good,
          kvToQMapping: [
            [
              [
                [0, 0],
                [0, 7],
              ],
              [
                [0, 1],
                [-1, -1],
              ],
            ],
          ],
        }),
      'EP_INVALID_ARGUMENT',
      'kvToQMapping[0][0][1][1]',
    );
    expectPlanError(
      () => fromPaddedAttention({ ...good, qDispatch: [[0, -1]] }),
      'EP_INVALID_ARGUMENT',
      'qDispatch[0][1]',
    );
  });

  it('documents larger than the budgets, plans larger than the buffers', () => {
    expectPlanError(
      () => packDocuments(Int32Array.of(5, 6), Int32Array.of(4, 6)),
      'EP_CAPACITY',
      '11 tokens',
      'hold 10',
    );
    const { fwdQ } = planQuery(shards, dst);
    const planned = sizes(fwdQ, unit);
    checkCapacity(fwdQ, planned, { sendBytes: 80, recvBytes: [32, 64], chunksSent: 2, chunksReceived: 2 });
    expect(
      expectPlanError(() => checkCapacity(fwdQ, planned, { recvBytes: [32, 63] }), 'EP_CAPACITY', 'rank 1', '64', '63')
        .context,
    ).toMatchObject({ rank: 1, name: 'recvBytes', needed: 64, available: 63 });
    expectPlanError(() => checkCapacity(fwdQ, planned, { sendBytes: 79 }), 'EP_CAPACITY', 'rank 1', '80');
    expectPlanError(() => checkCapacity(fwdQ, planned, { chunksSent: 1 }), 'EP_CAPACITY', 'rank 0');
    expectPlanError(() => checkCapacity(fwdQ, planned, { recvBytes: [1] }), 'EP_INVALID_ARGUMENT', 'recvBytes');
    expectPlanError(() => checkCapacity(fwdQ, planned, { recvBytes: Number.NaN }), 'EP_INVALID_ARGUMENT', 'NaN');
    expectPlanError(() => sizes(fwdQ, { rowBytes: Number.MAX_SAFE_INTEGER, chunkBytes: 1 }), 'EP_CAPACITY', '2^53');
  });

  it('errors carry the brand and the shape of EpError', () => {
    const error = expectPlanError(() => planQuery(shards, Int32Array.of(0, 2, 1)), 'EP_INVALID_ARGUMENT');
    expect(error).toMatchObject({ name: 'EpError', scope: 'call', context: { name: 'dstRank', index: 1, found: 2 } });
    expect((error as unknown as Record<symbol, unknown>)[Symbol.for('@ep/error')]).toBe(true);
    expect(error).toBeInstanceOf(PlanError);
    expect(String(error)).toMatch(/^EpError: dstRank\[1\] must be/);
  });

  it('inputs stay as they were, results are frozen', () => {
    const { shards: table, serverRank } = shardsOfPlan(2, [
      [
        [0, 1, 0, 4],
        [1, 0, 1, 2],
      ],
    ]);
    const before = JSON.stringify([table, serverRank], (_, v: unknown) => (v instanceof Int32Array ? [...v] : v));
    const plan = planAttention(table, serverRank);
    expect(JSON.stringify([table, serverRank], (_, v: unknown) => (v instanceof Int32Array ? [...v] : v))).toBe(before);
    for (const part of [plan, plan.fwdQ, plan.revKvCompact, plan.layout, plan.reduction, plan.fwdQ.sent])
      expect(Object.isFrozen(part)).toBe(true);
    serverRank[0] = 0;
    expect(plan.serverRank[0]).toBe(1);
    expect(plan.fwdQ.dstRank[0]).toBe(1);
  });
});
