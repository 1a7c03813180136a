import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import {
  type DispatchPlan,
  planAttention,
  planQuery,
  planReplicas,
  replicaMask,
  serverLayout,
  sizes,
  validate,
} from '../../src/index.js';
import { movePlan, sumReplicas } from '../../src/reference/index.js';
import { placements, rowIds, worldSizes } from '../arbitraries.js';

const runs = { numRuns: 150 };

/** Shards with any destinations: replica ids with gaps, up to 16 of them. */
const replicaInputs = worldSizes.chain((worldSize) =>
  fc
    .array(
      fc.record({
        home: fc.oneof(fc.integer({ min: 0, max: worldSize - 1 }), fc.constant(0)),
        length: fc.integer({ min: 0, max: 7 }),
        dispatches: fc.array(fc.option(fc.integer({ min: 0, max: worldSize - 1 })), { maxLength: 16 }),
      }),
      { maxLength: 40 },
    )
    .map((list) => {
      const rows = [...list].sort((a, b) => a.home - b.home);
      const shardOffsets = Int32Array.from({ length: worldSize + 1 }, (_, r) => rows.filter((s) => s.home < r).length);
      const offsets = [0];
      const dstRank: number[] = [];
      const replica: number[] = [];
      for (const shard of rows) {
        shard.dispatches.forEach((t, c) => {
          if (t === null) return;
          dstRank.push(t);
          replica.push(c);
        });
        offsets.push(dstRank.length);
      }
      return {
        rows,
        shards: { worldSize, shardOffsets, lengths: Int32Array.from(rows, (s) => s.length) },
        table: {
          replicas: 16,
          offsets: Int32Array.from(offsets),
          dstRank: Int32Array.from(dstRank),
          replica: Int32Array.from(replica),
        },
      };
    }),
);

/** The formulas of the metadata, spelled out: dst_offset is the sum of earlier lengths to the same destination. */
function expectGlobalOrderFill(plan: DispatchPlan): void {
  const fill = new Array<number>(plan.worldSize).fill(0);
  const slots = new Array<number>(plan.worldSize).fill(0);
  const counts = new Map<string, [number, number]>();
  for (let r = 0; r < plan.worldSize; r++) {
    for (let e = plan.entryOffsets[r]!; e < plan.entryOffsets[r + 1]!; e++) {
      const t = plan.dstRank[e]!;
      expect([plan.dstOffset[e], plan.dstShard[e]]).toEqual([fill[t], slots[t]]);
      fill[t]! += plan.length[e]!;
      slots[t]!++;
      const pair = counts.get(`${r} ${t}`) ?? [0, 0];
      counts.set(`${r} ${t}`, [pair[0] + plan.length[e]!, pair[1] + 1]);
    }
  }
  expect([...plan.recvTokens]).toEqual(fill);
  const listed = new Map<string, [number, number]>();
  for (let r = 0; r < plan.worldSize; r++) {
    const peers = [...plan.sent.peer.subarray(plan.sent.offsets[r], plan.sent.offsets[r + 1])];
    expect(peers).toEqual([...peers].sort((a, b) => a - b));
    for (let p = plan.sent.offsets[r]!; p < plan.sent.offsets[r + 1]!; p++) {
      listed.set(`${r} ${plan.sent.peer[p]}`, [plan.sent.tokens[p]!, plan.sent.dispatches[p]!]);
    }
  }
  expect(listed).toEqual(counts);
}

describe('plans against the oracle', () => {
  it('replica plans: order, rows, masks, sums', () => {
    fc.assert(
      fc.property(replicaInputs, ({ rows, shards, table }) => {
        const plans = planReplicas(shards, table);
        for (const plan of [plans.fwdKv, plans.revKv, plans.revKvCompact]) validate(plan);
        expectGlobalOrderFill(plans.fwdKv);
        const send = Array.from(plans.fwdKv.sendTokens, (n, r) =>
          Float64Array.from({ length: n }, (_, i) => 1000 * r + i + 1),
        );
        const received = movePlan(plans.fwdKv, send, 1, -1);
        for (const tensor of received) expect(tensor.includes(-1)).toBe(false);
        const dense = movePlan(plans.revKv, received, 1);
        const compact = movePlan(plans.revKvCompact, received, 1, -1);
        for (const tensor of compact) expect(tensor.includes(-1)).toBe(false);
        const copies = rows.map((s) => s.dispatches.filter((t) => t !== null).length);
        const expected = Array.from({ length: shards.worldSize }, (_, r) => {
          const sums: number[] = [];
          rows.forEach((s, g) => {
            if (s.home === r) for (let i = 0; i < s.length; i++) sums.push(copies[g]! * (1000 * r + sums.length + 1));
          });
          return Float64Array.from(sums);
        });
        expect(sumReplicas(plans.reduction, dense, 1, 'dense', 'f64')).toEqual(expected);
        expect(sumReplicas(plans.reduction, compact, 1, 'compact', 'f64')).toEqual(expected);
        expect([...replicaMask(plans)]).toEqual(
          rows.flatMap((s) => Array.from({ length: 16 }, (_, c) => Number((s.dispatches[c] ?? null) !== null))),
        );
      }),
      runs,
    );
  });

  it('query plans: there and back is the identity on sent rows', () => {
    fc.assert(
      fc.property(replicaInputs, ({ rows, shards }) => {
        const dstRank = Int32Array.from(rows, (s) => s.dispatches[0] ?? -1);
        const { fwdQ, revQ } = planQuery(shards, dstRank);
        validate(fwdQ);
        validate(revQ);
        expectGlobalOrderFill(fwdQ);
        const send = Array.from(fwdQ.sendTokens, (n, r) => Int32Array.from({ length: n }, (_, i) => 1000 * r + i + 1));
        const back = movePlan(revQ, movePlan(fwdQ, send, 1), 1);
        const row = new Array<number>(shards.worldSize).fill(0);
        rows.forEach((s, g) => {
          for (let i = 0; i < s.length; i++) {
            const at = row[s.home]!++;
            expect(back[s.home]![at]).toBe(dstRank[g]! < 0 ? 0 : send[s.home]![at]);
          }
        });
      }),
      runs,
    );
  });

  it.each(['each-query', 'each-server'] as const)(
    'attention plans, %s: every query group finds its document prefix',
    (sharing) => {
      fc.assert(
        fc.property(placements(), ({ shards, serverRank }) => {
          const plan = planAttention(shards, serverRank, { sharing });
          validate(plan);
          const ids = rowIds(shards);
          const q = movePlan(plan.fwdQ, ids, 1);
          const kv = movePlan(plan.fwdKv, ids, 1);
          let groups = 0;
          for (let t = 0; t < shards.worldSize; t++) {
            const server = serverLayout(plan.layout, t);
            groups += server.groups;
            let kvEnd = 0;
            let lastStart = 0;
            const documents = new Set<number>();
            for (let k = 0; k < server.groups; k++) {
              const g = server.shard[k]!;
              expect(serverRank[g]).toBe(t);
              const length = shards.lengths[g]!;
              const prefix = Array.from(
                { length: server.kvLength[k]! },
                (_, i) => shards.document[g]! * 2 ** 16 + i + 1,
              );
              expect([...q[t]!.subarray(server.cuSeqlensQ[k], server.cuSeqlensQ[k + 1])]).toEqual(
                prefix.slice(prefix.length - length),
              );
              expect([...kv[t]!.subarray(server.kvStart[k], server.kvStart[k]! + server.kvLength[k]!)]).toEqual(prefix);
              if (server.cuSeqlensKv !== null) {
                expect(server.kvStart[k]).toBe(kvEnd);
                kvEnd += server.kvLength[k]!;
                expect(server.cuSeqlensKv[k + 1]).toBe(kvEnd);
              }
              if (sharing === 'each-server' && !documents.has(shards.document[g]!)) {
                // Documents lie in the order of their first query group.
                expect(server.kvStart[k]).toBeGreaterThanOrEqual(lastStart);
                lastStart = server.kvStart[k]!;
              }
              documents.add(shards.document[g]!);
            }
            if (sharing === 'each-server') expect(new Set(kv[t]!).size).toBe(kv[t]!.length);
          }
          expect(groups).toBe(shards.lengths.length);
          const ones = kv.map((tensor) => new Float32Array(tensor.length).fill(1));
          const dense = sumReplicas(plan.reduction, movePlan(plan.revKv, ones, 1), 1, 'dense', 'f32');
          const compact = sumReplicas(plan.reduction, movePlan(plan.revKvCompact, ones, 1), 1, 'compact', 'f32');
          expect(compact).toEqual(dense);
        }),
        runs,
      );
    },
  );

  it('sizes count every byte and chunk once', () => {
    fc.assert(
      fc.property(
        replicaInputs,
        fc.integer({ min: 1, max: 40 }),
        fc.integer({ min: 1, max: 100 }),
        ({ shards, table }, rowBytes, chunkBytes) => {
          const { fwdKv } = planReplicas(shards, table);
          const planned = sizes(fwdKv, { rowBytes, chunkBytes });
          const chunkRows = Math.max(1, Math.floor(chunkBytes / rowBytes));
          const chunks = new Map<string, number>();
          let bytes = 0;
          let total = 0;
          for (let r = 0; r < shards.worldSize; r++) {
            for (let e = fwdKv.entryOffsets[r]!; e < fwdKv.entryOffsets[r + 1]!; e++) {
              let count = 0;
              for (let row = 0; row < fwdKv.length[e]!; row += chunkRows) count++;
              const key = `${r} ${fwdKv.dstRank[e]}`;
              chunks.set(key, (chunks.get(key) ?? 0) + count);
              total += count;
              bytes += fwdKv.length[e]! * rowBytes;
            }
          }
          const found = new Map<string, number>();
          const mirrored = new Map<string, number>();
          for (let r = 0; r < shards.worldSize; r++) {
            for (let p = fwdKv.sent.offsets[r]!; p < fwdKv.sent.offsets[r + 1]!; p++)
              found.set(`${r} ${fwdKv.sent.peer[p]}`, planned.sent.chunks[p]!);
            for (let p = fwdKv.received.offsets[r]!; p < fwdKv.received.offsets[r + 1]!; p++) {
              mirrored.set(`${fwdKv.received.peer[p]} ${r}`, planned.received.chunks[p]!);
            }
          }
          expect(found).toEqual(chunks);
          expect(mirrored).toEqual(chunks);
          expect(planned.localChunks + planned.remoteChunks).toBe(total);
          expect(planned.localBytes + planned.remoteBytes).toBe(bytes);
        },
      ),
      runs,
    );
  });
});
