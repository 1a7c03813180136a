import { describe, expect, it } from 'vitest';
import {
  balance,
  explain,
  maxOverAverage,
  packDocuments,
  planAttention,
  shardsOfDocuments,
  validate,
} from '../../src/index.js';
import { shardsOfPlan } from './documents.js';
import { goldenNames, readGolden } from './golden.js';

interface PlannerGolden {
  readonly inputs: {
    readonly batch: number[][];
    readonly num_tokens_per_rank: number;
    readonly world_size: number;
    readonly model: {
      readonly hidden_size: number;
      readonly num_attention_heads: number;
      readonly num_key_value_heads: number;
    };
  };
  readonly outputs: {
    readonly initial_items: readonly { q: number; kv: number; gpuid: number; seqid: number }[];
    readonly shard_infos: number[][][];
    readonly flops_before: number[];
    readonly flops_after: number[];
    readonly max_over_avg_before: number;
    readonly max_over_avg_after: number;
  };
}

describe.each(goldenNames().filter((name) => name.startsWith('planner_')))('%s', (name) => {
  const { inputs, outputs } = readGolden<PlannerGolden>(name);
  const w = inputs.world_size;
  // Rows of bf16: the queries have the model's width, keys and values together 2 * kv heads * head dimension.
  const qRowBytes = inputs.model.hidden_size * 2;
  const kvRowBytes =
    ((2 * inputs.model.hidden_size) / inputs.model.num_attention_heads) * inputs.model.num_key_value_heads * 2;
  const lengths = Int32Array.from(inputs.batch.flat());
  const { shards } = shardsOfDocuments(
    packDocuments(lengths, new Int32Array(w).fill(inputs.num_tokens_per_rank), 'head-tail'),
  );
  const original = shardsOfPlan(w, outputs.shard_infos);

  it('packs the batch as the original does', () => {
    const ours = [];
    for (let r = 0; r < w; r++) {
      for (let g = shards.shardOffsets[r]!; g < shards.shardOffsets[r + 1]!; g++)
        ours.push(`${r} ${shards.document[g]} ${shards.lengths[g]}`);
    }
    // The original keeps the two middle halves of a rank apart; they are one run of rows.
    const theirs = new Map<string, number>();
    for (const item of [...outputs.initial_items].sort((a, b) => a.seqid - b.seqid || a.kv - b.kv)) {
      const key = `${item.gpuid} ${item.seqid}`;
      const from = item.kv - item.q;
      const joined = [...theirs.entries()].find(([k]) => k.startsWith(`${key} `) && k.endsWith(` ${from}`));
      if (joined !== undefined) theirs.delete(joined[0]);
      theirs.set(`${key} ${item.kv}`, item.q + (joined?.[1] ?? 0));
    }
    expect(ours.sort()).toEqual(
      [...theirs.entries()].map(([k, q]) => `${k.split(' ').slice(0, 2).join(' ')} ${q}`).sort(),
    );
  });

  it('counts work as the original does, before and after its own plan', () => {
    const explained = explain(planAttention(original.shards, original.serverRank));
    expect(explained.ranks.map((r) => r.pairsBefore)).toEqual(outputs.flops_before);
    expect(explained.ranks.map((r) => r.pairsAfter)).toEqual(outputs.flops_after);
    expect(explained.imbalanceBefore).toBeCloseTo(outputs.max_over_avg_before, 12);
    expect(explained.imbalanceAfter).toBeCloseTo(outputs.max_over_avg_after, 12);
  });

  it.each(['each-server', 'each-query'] as const)('balances to 1.01 or better at tolerance 0, %s', (sharing) => {
    const balanced = balance(shards, { qRowBytes, kvRowBytes, sharing });
    const plan = planAttention(balanced.shards, balanced.serverRank, { sharing });
    validate(plan);
    const explained = explain(plan);
    expect(explained.imbalanceBefore).toBeCloseTo(outputs.max_over_avg_before, 12);
    expect(explained.imbalanceAfter).toBeLessThanOrEqual(1.01);
    expect(maxOverAverage(balanced.loadAfter)).toBeCloseTo(explained.imbalanceAfter, 9);
    expect([balanced.movedQueryTokens, balanced.movedKvTokens]).toEqual([
      explained.movedQueryTokens,
      explained.movedKvTokens,
    ]);
    expect([...balanced.memoryBytes]).toEqual(
      explained.ranks.map((r) => r.queryTokens * qRowBytes + r.kvTokens * kvRowBytes),
    );
  });

  it.each(['each-server', 'each-query'] as const)(
    'at the balance of the original it moves no more bytes, %s',
    (sharing) => {
      const theirs = explain(planAttention(original.shards, original.serverRank, { sharing }));
      const balanced = balance(shards, { qRowBytes, kvRowBytes, sharing, tolerance: outputs.max_over_avg_after - 1 });
      const ours = explain(planAttention(balanced.shards, balanced.serverRank, { sharing }));
      expect(ours.imbalanceAfter).toBeLessThanOrEqual(outputs.max_over_avg_after + 1e-12);
      const bytes = (e: typeof ours) => e.movedQueryTokens * qRowBytes + e.movedKvTokens * kvRowBytes;
      expect(bytes(ours)).toBeLessThanOrEqual(bytes(theirs));
      if (sharing === 'each-server') {
        expect(ours.movedQueryTokens).toBeLessThanOrEqual(theirs.movedQueryTokens);
        expect(ours.movedKvTokens).toBeLessThanOrEqual(theirs.movedKvTokens);
      }
    },
  );
});
