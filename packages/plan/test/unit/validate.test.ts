import { isDeepStrictEqual } from 'node:util';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { WordHash } from '../../src/digest.js';
import {
  type AttentionPlan,
  type DispatchPlan,
  digest,
  parseAttentionPlan,
  parseDispatchPlan,
  planAttention,
  planQuery,
  planReplicas,
  serialize,
  validate,
} from '../../src/index.js';
import { placements } from '../arbitraries.js';
import { expectPlanError } from '../expect-error.js';
import { shardsOfPlan } from '../goldens/documents.js';

const { shards, serverRank } = shardsOfPlan(3, [
  [
    [0, 2, 0, 5],
    [1, 2, 1, 3],
    [2, 0, 2, 4],
  ],
  [[1, 1, 0, 6]],
  [
    [2, 0, 0, 2],
    [0, 0, 1, 7],
  ],
]);
const plan = planAttention(shards, serverRank);

/** A deep copy with one element of one array changed. */
function changed<T extends object>(value: T, path: string, index: number, to: number): T {
  const copy = structuredClone(value);
  let at: unknown = copy;
  for (const key of path.split('.')) at = (at as Record<string, unknown>)[key];
  (at as Int32Array)[index] = to;
  return copy;
}

const arrayPaths = (value: object, prefix = ''): string[] =>
  Object.entries(value).flatMap(([key, v]: [string, unknown]) =>
    v instanceof Int32Array
      ? [prefix + key]
      : typeof v === 'object' && v !== null
        ? arrayPaths(v, `${prefix}${key}.`)
        : [],
  );

function elementsOf(value: object, path: string): Int32Array {
  return path.split('.').reduce<unknown>((at, key) => (at as Record<string, unknown>)[key], value) as Int32Array;
}

function isPlanOfItsShards(made: AttentionPlan): boolean {
  try {
    const again = planAttention(made.shards, made.serverRank, { sharing: made.sharing });
    return isDeepStrictEqual(again, made);
  } catch {
    return false;
  }
}

describe('validate', () => {
  it('accepts every plan made here', () => {
    for (const part of [plan, plan.fwdQ, plan.revQ, plan.fwdKv, plan.revKv, plan.revKvCompact]) validate(part);
  });

  // fwdQ: entries of rank 0: shard 0 (5 rows) -> 2, shard 1 (7) -> 0; rank 1: (3) -> 2, (6) -> 1; rank 2: (4) -> 0, (2) -> 0.
  const violations: readonly (readonly [string, DispatchPlan, string, readonly string[]])[] = [
    ['a rank outside the world', changed(plan.fwdQ, 'dstRank', 1, 3), 'dstRank[1]', ['[0, 2]', 'found 3']],
    ['a negative length', changed(plan.fwdQ, 'length', 0, -1), 'length[0]', ['found -1']],
    ['rows past the sender tensor', changed(plan.fwdQ, 'srcOffset', 1, 6), 'srcOffset[1]', ['[0, 5]', 'found 6']],
    ['rows past the receiver tensor', changed(plan.fwdQ, 'dstOffset', 5, 12), 'dstOffset[5]', ['[0, 11]', 'found 12']],
    ['overlapping arrivals', changed(plan.fwdQ, 'dstOffset', 5, 10), 'dstOffset[5]', ['11', 'found 10']],
    ['a slot twice', changed(plan.fwdQ, 'dstShard', 5, 1), 'dstShard[5]', ['slot 2 of rank 0', 'found 1']],
    ['a shard that goes back', changed(plan.fwdQ, 'srcShard', 1, -1), 'srcShard[1]', ['found -1']],
    ['a gap in the home tensor', changed(plan.fwdQ, 'srcOffset', 1, 4), 'srcOffset[1]', ['5', 'found 4']],
    ['a receive tensor too large', changed(plan.fwdQ, 'recvTokens', 1, 7), 'recvTokens[1]', ['6', 'found 7']],
    ['entries of nobody', changed(plan.fwdQ, 'entryOffsets', 3, 5), 'entryOffsets[3]', ['6', 'found 5']],
    ['a pair that lies about its rows', changed(plan.fwdQ, 'sent.tokens', 0, 8), 'sent.tokens[0]', ['7', 'found 8']],
    [
      'a receiver that lies about its dispatches',
      changed(plan.fwdQ, 'received.dispatches', 0, 2),
      'received.dispatches[0]',
      ['1', 'found 2'],
    ],
    ['a slot out of order', changed(plan.revQ, 'srcShard', 1, 2), 'srcShard[1]', ['1', 'found 2']],
    ['a server row twice', changed(plan.revQ, 'srcOffset', 1, 6), 'srcOffset[1]', ['7', 'found 6']],
    ['overlapping home rows', changed(plan.revQ, 'dstOffset', 0, 4), 'dstOffset[0]', ['found 4']],
    ['a replica too many', changed(plan.revKv, 'replica', 0, 3), 'replica[0]', ['[0, 2]', 'found 3']],
    ['a replica in the wrong copy', changed(plan.revKv, 'dstOffset', 2, 12), 'dstOffset[2]', ['24', 'found 12']],
    [
      'a buffer that is no multiple',
      changed(plan.revKv, 'recvTokens', 0, 37),
      'recvTokens[0]',
      ['a multiple of 3', 'found 37'],
    ],
    ['a hole in the compact form', changed(plan.revKvCompact, 'dstOffset', 0, 1), 'dstOffset', []],
  ];
  it.each(violations)('names %s', (_, broken, field, parts) => {
    const error = expectPlanError(() => validate(broken), 'EP_INVALID_PLAN', field, ...parts);
    expect(error.context).toHaveProperty('expected');
    expect(error.context).toHaveProperty('found');
  });

  it('names wrong kinds, versions, and things that are no plans', () => {
    expectPlanError(() => validate({ ...plan.fwdQ, kind: 'sideways' as never }), 'EP_INVALID_PLAN', 'kind', 'sideways');
    expectPlanError(() => validate({ ...plan.fwdQ, version: 2 as never }), 'EP_PLAN_VERSION', 'version 2', 'version 1');
    expectPlanError(() => validate({ ...plan.fwdQ, replicas: 2 }), 'EP_INVALID_PLAN', 'replicas');
    expectPlanError(() => validate({ ...plan.fwdQ, length: [1] as never }), 'EP_INVALID_PLAN', 'length', 'Int32Array');
    expectPlanError(() => validate({ ...plan.fwdQ, sent: null as never }), 'EP_INVALID_PLAN', 'sent');
    expectPlanError(() => validate({ ...plan, revQ: undefined as never }), 'EP_INVALID_PLAN', 'a dispatch plan');
    expectPlanError(() => validate({ ...plan, shards: null as never }), 'EP_INVALID_PLAN', 'documents');
    expectPlanError(() => validate({ ...plan, layout: null as never }), 'EP_INVALID_PLAN', 'layout');
    expectPlanError(() => validate(null as never), 'EP_INVALID_PLAN', 'null');
  });

  it('finds a change to any element of any array of an attention plan, and so does the digest of its plans', () => {
    fc.assert(
      fc.property(
        placements({ maxDocuments: 5, maxParts: 5 }),
        fc.constantFrom('each-query' as const, 'each-server' as const),
        fc.nat(),
        fc.nat(),
        fc.constantFrom(1, -1, 1000),
        (placement, sharing, pick, at, delta) => {
          const made: AttentionPlan = planAttention(placement.shards, placement.serverRank, { sharing });
          const paths = arrayPaths(made).filter((path) => elementsOf(made, path).length > 0);
          const path = paths[pick % paths.length]!;
          const values = elementsOf(made, path);
          const index = at % values.length;
          const broken = changed(made, path, index, values[index]! + delta);
          // Another server, length or document is another plan: then what follows from it is wrong, unless nothing does, as from the document of the only shard, which is empty.
          if (path.startsWith('s') && isPlanOfItsShards(broken)) validate(broken);
          else expectPlanError(() => validate(broken), 'EP_INVALID_PLAN');
          if (/^(fwd|rev)[^.]*\.[^.]*$/.test(path)) expect(digest(broken)).not.toBe(digest(made));
        },
      ),
      { numRuns: 300 },
    );
  });
});

describe('digest', () => {
  it('is MurmurHash3 x86_128 (values of an independent implementation)', () => {
    const known: readonly (readonly [readonly number[], string])[] = [
      [[], '00000000000000000000000000000000'],
      [[1], 'cf0f20ca519c70b1519c70b1519c70b1'],
      [[1, 2, 3], '8504721670aa166f7385e62f9204edfb'],
      [[1, 2, 3, 4], '37d6ee173d4a429d3dbb9c175b64b81d'],
      [[0x12345678, -1, 0, 7, 5], '97e4410fb0839f527d2050f8ed00890b'],
      [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], '3e04730fcbda7605e0bf512f086a15e7'],
    ];
    for (const [words, expected] of known) {
      const hash = new WordHash();
      for (const word of words) hash.word(word);
      expect(hash.hex()).toBe(expected);
    }
    const byArray = new WordHash();
    byArray.array(Int32Array.of(2, 3, 4, 5, 6, 7, 8, 9, 10, 11));
    const byWord = new WordHash();
    for (const word of [10, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) byWord.word(word);
    expect(byArray.hex()).toBe(byWord.hex());
  });

  it('is the same on every run and differs between plans', () => {
    expect(digest(plan)).toBe(digest(planAttention(shards, serverRank)));
    const all = [
      plan,
      planAttention(shards, serverRank, { sharing: 'each-server' }),
      plan.fwdQ,
      plan.revQ,
      plan.fwdKv,
      plan.revKv,
      plan.revKvCompact,
    ];
    expect(new Set(all.map(digest)).size).toBe(all.length);
  });
});

describe('serialisation', () => {
  it('brings back the same plan', () => {
    fc.assert(
      fc.property(
        placements(),
        fc.constantFrom('each-query' as const, 'each-server' as const),
        (placement, sharing) => {
          const made = planAttention(placement.shards, placement.serverRank, { sharing });
          expect(parseAttentionPlan(serialize(made))).toEqual(made);
          for (const part of [made.fwdQ, made.revQ, made.fwdKv, made.revKv, made.revKvCompact])
            expect(parseDispatchPlan(serialize(part))).toEqual(part);
        },
      ),
      { numRuns: 60 },
    );
    const { fwdQ } = planQuery(
      { worldSize: 2, shardOffsets: Int32Array.of(0, 1, 2), lengths: Int32Array.of(3, 4) },
      Int32Array.of(-1, 0),
    );
    expect(parseDispatchPlan(serialize(fwdQ))).toEqual(fwdQ);
    const replicas = planReplicas(
      { worldSize: 1, shardOffsets: Int32Array.of(0, 1), lengths: Int32Array.of(3) },
      { replicas: 4, offsets: Int32Array.of(0, 2), dstRank: Int32Array.of(0, 0), replica: Int32Array.of(1, 3) },
    );
    expect(parseDispatchPlan(serialize(replicas.revKv))).toEqual(replicas.revKv);
  });

  it('refuses another version, naming both', () => {
    const text = serialize(plan.fwdQ).replace('"version":1', '"version":7');
    expect(expectPlanError(() => parseDispatchPlan(text), 'EP_PLAN_VERSION', 'version 7', 'version 1').context).toEqual(
      { expected: 1, found: 7 },
    );
    expectPlanError(
      () => parseAttentionPlan(serialize(plan).replace('"version":1', '"version":"1"')),
      'EP_PLAN_VERSION',
    );
  });

  const edits: readonly (readonly [string, (text: string) => string, readonly string[]])[] = [
    ['no JSON', () => '{', ['JSON']],
    ['a list', () => '[]', ['JSON object', 'an array of 0']],
    ['another format', (t) => t.replace('@ep/plan', '@other'), ['format']],
    ['a plan of another type', () => serialize(plan), ['type', 'attention']],
    ['a digest that does not match', (t) => t.replace(/"digest":"./, '"digest":"z'), ['digest']],
    ['data that does not match', (t) => t.replace('"replica":[0', '"replica":[9'), ['replica[0]']],
    ['a fraction', (t) => t.replace('"length":[5', '"length":[5.5'), ['length[0]', '5.5']],
    ['a number beyond int32', (t) => t.replace('"length":[5', '"length":[2147483648'), ['length[0]', '2147483648']],
    ['a missing list', (t) => t.replace('"dstShard"', '"dstshard"'), ['dstShard', 'undefined']],
    ['a world of another size', (t) => t.replace('"worldSize":3', '"worldSize":4'), ['entryOffsets', '5 elements']],
    ['an enormous world', (t) => t.replace('"worldSize":3', '"worldSize":2147483647'), ['entryOffsets']],
    ['a rank outside', (t) => t.replace('"dstRank":[2', '"dstRank":[3'), ['dstRank[0]', 'found 3']],
    [
      'offsets outside',
      (t) => t.replace('"entryOffsets":[0,2', '"entryOffsets":[0,99'),
      ['entryOffsets[1]', 'found 99'],
    ],
  ];
  it.each(edits)('refuses %s', (_, edit, parts) => {
    const text = serialize(plan.fwdQ);
    expect(edit(text)).not.toBe(text);
    expectPlanError(() => parseDispatchPlan(edit(text)), 'EP_INVALID_PLAN', ...parts);
  });

  it('refuses an attention plan whose documents are wrong, or too many', () => {
    const text = serialize(plan);
    expectPlanError(
      () => parseAttentionPlan(text.replace('"position":[0', '"position":[1')),
      'EP_INVALID_PLAN',
      'position',
    );
    expectPlanError(
      () => parseAttentionPlan(text.replace('"documents":3', '"documents":2147483647')),
      'EP_INVALID_PLAN',
      'documents',
    );
    expectPlanError(() => parseAttentionPlan(text.replace('each-query', 'each-server')), 'EP_INVALID_PLAN', 'digest');
    expectPlanError(() => parseAttentionPlan(text.replace('each-query', 'each-other')), 'EP_INVALID_PLAN', 'sharing');
  });
});
