import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import {
  inRankMask,
  type MoePlan,
  placeRows,
  planMoe,
  rankReceives,
  rankSends,
  rankTopk,
  routingLayout,
  routingOfRanks,
  rowsOfChoices,
  validateMoe,
  withLostRanks,
} from '../../src/moe/index.js';
import { moeCombine, moeDense, moeDispatch } from '../../src/reference/index.js';
import { integerTensors, type MoeCase, moeCases } from './arbitraries.js';

const runs = { numRuns: 150 };
const hidden = 3;

function planOf({ routing, map, form, options }: MoeCase): MoePlan {
  return planMoe(routing, map, form, options);
}

const ranksOf = (plan: MoePlan) => Array.from({ length: plan.map.worldSize }, (_, r) => r);
const tokensOf = (plan: MoePlan) => ranksOf(plan).map((s) => rankSends(plan, s).tokens);
const isGone = (plan: MoePlan, r: number) => plan.activeRanks[r] === 0 || plan.lostRanks[r] === 1;

/** An expert that tells itself from all others. */
const apply = (expert: number, row: Float64Array) => row.map((x, h) => (expert + 2) * x + h);

/** What the ranks' experts make of what they received. */
function runExperts(plan: MoePlan, received: readonly Float64Array[]): Float64Array[] {
  return received.map((rows, r) => {
    const out = new Float64Array(rows.length).fill(Number.NaN);
    const { blockStart, localExperts, recvRows, sourceRank } = rankReceives(plan, r);
    for (let e = 0; e < localExperts; e++) {
      const end = e + 1 < localExperts ? blockStart[e + 1]! : recvRows;
      for (let row = blockStart[e]!; row < end; row++) {
        if (sourceRank[row]! < 0) continue;
        const expert = plan.map.expert[plan.map.rankOffsets[r]! + e]!;
        out.set(apply(expert, rows.subarray(row * hidden, (row + 1) * hidden)), row * hidden);
      }
    }
    return out;
  });
}

/** The routing without the choices that do not travel. */
function travelling(plan: MoePlan) {
  const { experts, topK } = plan.routing;
  return routingOfRanks(
    experts,
    topK,
    ranksOf(plan).map((s) => {
      const { topkIdx, row } = rankSends(plan, s);
      return topkIdx.map((e, i) => (row[i]! < 0 ? -1 : e));
    }),
  );
}

describe('any routing', () => {
  it('lays out as counted one choice at a time', () => {
    fc.assert(
      fc.property(moeCases, ({ map, routing, options }) => {
        const nodeOf = (r: number) => Math.floor(r / options.ranksPerNode!);
        for (let rank = 0; rank < map.worldSize; rank++) {
          const topkIdx = rankTopk(routing, rank);
          const layout = routingLayout({ map, rank, topK: routing.topK, topkIdx, ...options });
          const perReplica = new Map<number, number>();
          const reached = new Set<string>();
          const reachedNodes = new Set<string>();
          let unserved = 0;
          topkIdx.forEach((e, i) => {
            const p = layout.replica[i]!;
            const hosts = [...map.expert.keys()].filter(
              (q) => map.expert[q] === e && options.activeRanks![map.rank[q]!] === 1,
            );
            if (e < 0 || hosts.length === 0 || options.activeRanks![rank] === 0) {
              expect([p, layout.slot[i]]).toEqual([-1, -1]);
              if (e >= 0) unserved++;
              return;
            }
            expect(hosts).toContain(p);
            if (options.policy === 'nearest') {
              const distance = (q: number) =>
                map.rank[q] === rank ? 0 : nodeOf(map.rank[q]!) === nodeOf(rank) ? 1 : 2;
              expect(distance(p)).toBe(Math.min(...hosts.map(distance)));
            }
            expect(layout.slot[i]).toBe(perReplica.get(p) ?? 0);
            perReplica.set(p, layout.slot[i]! + 1);
            reached.add(`${Math.floor(i / routing.topK)} ${map.rank[p]}`);
            reachedNodes.add(`${Math.floor(i / routing.topK)} ${nodeOf(map.rank[p]!)}`);
          });
          expect(layout.unserved).toBe(unserved);
          expect([...layout.tokensPerReplica]).toEqual([...map.expert.keys()].map((p) => perReplica.get(p) ?? 0));
          for (let e = 0; e < map.experts; e++) {
            const replicas = [...map.expert.keys()].filter((p) => map.expert[p] === e);
            const counts = replicas.map((p) => layout.tokensPerReplica[p]!);
            expect(layout.tokensPerExpert[e]).toBe(counts.reduce((a, b) => a + b, 0));
            const used = replicas
              .filter((p) => options.activeRanks![map.rank[p]!] === 1)
              .map((p) => layout.tokensPerReplica[p]!);
            if (options.policy === 'spread' && used.length > 0)
              expect(Math.max(...used) - Math.min(...used)).toBeLessThanOrEqual(1);
          }
          const mask = inRankMask(layout, map);
          expect(mask.reduce((a, b) => a + b, 0)).toBe(reached.size);
          for (let r = 0; r < map.worldSize; r++) {
            const tokens = [...Array(layout.tokens).keys()].filter((t) => reached.has(`${t} ${r}`));
            expect(layout.tokensPerRank[r]).toBe(tokens.length);
            for (const t of tokens) expect(mask[t * map.worldSize + r]).toBe(1);
          }
          layout.tokensPerNode.forEach((n, node) => {
            expect(n).toBe([...reachedNodes].filter((key) => key.endsWith(` ${node}`)).length);
          });
        }
      }),
      runs,
    );
  });

  it('has one row for each choice that travels, by expert, source rank and token', () => {
    fc.assert(
      fc.property(moeCases, (given) => {
        const plan = planOf(given);
        const { map, placement, form } = plan;
        for (const r of ranksOf(plan)) {
          const receive = rankReceives(plan, r);
          const ranges = Array.from(receive.layoutRange, (v) => [Number(v >> 32n), Number(v & 0xffffffffn)] as const);
          const written = new Set<number>();
          let block = 0;
          for (let e = 0; e < receive.localExperts; e++) {
            const p = map.rankOffsets[r]! + e;
            expect(receive.blockStart[e]).toBe(block);
            let next = 0;
            let count = 0;
            for (const s of ranksOf(plan)) {
              const [begin, n] = ranges[e * map.worldSize + s]!;
              expect([begin, n]).toEqual([
                placement.begin[p * map.worldSize + s],
                placement.count[p * map.worldSize + s],
              ]);
              const sent = rankSends(plan, s);
              const mine = [...sent.replica.keys()].filter((i) => sent.replica[i] === p && sent.row[i]! >= 0);
              expect(n).toBe(mine.length);
              mine.forEach((i, slot) => {
                const row = block + begin + slot;
                expect(sent.row[i]).toBe(row);
                expect(written.has(row)).toBe(false);
                written.add(row);
                expect([receive.sourceRank[row], receive.sourceToken[row], receive.sourceChoice[row]]).toEqual([
                  s,
                  Math.floor(i / plan.routing.topK),
                  i % plan.routing.topK,
                ]);
              });
              // Runs follow each other; only in high-throughput form do lost ones leave a gap.
              if (form.mode === 'low-latency' || !plan.lostRanks.includes(1)) expect(begin).toBe(next);
              expect(begin).toBeGreaterThanOrEqual(next);
              next = begin + n;
              count += n;
            }
            expect(receive.recvCount[e]).toBe(count);
            expect(placement.rows[p]).toBeGreaterThanOrEqual(next);
            if (form.mode === 'low-latency') block += map.worldSize * form.maxTokens;
            else block += Math.ceil(placement.rows[p]! / form.alignment!) * form.alignment!;
          }
          expect(receive.recvRows).toBe(block);
          receive.sourceRank.forEach((s, row) => {
            expect(s >= 0).toBe(written.has(row));
          });
        }
      }),
      runs,
    );
  });

  it('is planned alike by ranks that know their own choices and all counts', () => {
    fc.assert(
      fc.property(moeCases, ({ map, routing, form, options: { lostRanks: _, ...options } }) => {
        const { topK } = routing;
        const layouts = Array.from({ length: map.worldSize }, (__, rank) =>
          routingLayout({ map, rank, topK, topkIdx: rankTopk(routing, rank), ...options }),
        );
        const counts = Int32Array.from(layouts.flatMap((layout) => [...layout.tokensPerReplica]));
        const placement = placeRows(map, counts, form);
        const plan = planMoe(routing, map, form, options);
        expect(placement).toEqual(plan.placement);
        layouts.forEach((layout, rank) => {
          const sent = rankSends(plan, rank);
          expect([layout.replica, layout.slot]).toEqual([sent.replica, sent.slot]);
          expect(rowsOfChoices(placement, layout)).toEqual(sent.row);
          expect([layout.tokensPerRank, layout.tokensPerNode]).toEqual([sent.tokensPerRank, sent.tokensPerNode]);
        });
      }),
      runs,
    );
  });

  it('dispatched, computed and combined is the mixture computed in place, bit by bit', () => {
    fc.assert(
      fc.property(moeCases, fc.integer(), (given, seed) => {
        const plan = planOf(given);
        const sizes = tokensOf(plan);
        const x = integerTensors(
          sizes.map((n) => n * hidden),
          seed,
        ).map((t) => t.map((v) => v / 7));
        const weights = integerTensors(
          sizes.map((n) => n * plan.routing.topK),
          seed + 1,
        ).map((t) => t.map((v) => v / 3));
        const y = runExperts(plan, moeDispatch(plan, x, hidden, Number.NaN));
        const combined = moeCombine(plan, y, { hidden, precision: 'f64', weights });
        const dense = moeDense(travelling(plan), x, weights, hidden, apply);
        expect(combined).toEqual(dense);
        for (const s of ranksOf(plan)) if (isGone(plan, s)) expect(combined[s]!.every((v) => v === 0)).toBe(true);
      }),
      runs,
    );
  });

  it('combine without weights is the transpose of dispatch', () => {
    fc.assert(
      fc.property(moeCases, fc.integer(), (given, seed) => {
        const plan = planOf(given);
        const x = integerTensors(
          tokensOf(plan).map((n) => n * hidden),
          seed,
        );
        const y = integerTensors(
          [...plan.placement.recvRows].map((n) => n * hidden),
          seed + 1,
        );
        const dot = (a: readonly Float64Array[], b: readonly Float64Array[]) =>
          a.reduce((sum, t, r) => sum + t.reduce((part, v, i) => part + v * b[r]![i]!, 0), 0);
        const left = dot(moeDispatch(plan, x, hidden), y);
        expect(left).toBe(dot(x, moeCombine(plan, y, { hidden, precision: 'f64' })));
      }),
      runs,
    );
  });

  it('loses all rows of a rank that dies in the combine, and keeps the sum of weights where asked to', () => {
    fc.assert(
      fc.property(moeCases, fc.nat(), (given, who) => {
        const plan = planOf(given);
        const dead = who % plan.map.worldSize;
        const lostRanks = ranksOf(plan).map((r) => r === dead);
        const weights = tokensOf(plan).map((n) => new Float64Array(n * plan.routing.topK).fill(1));
        // Every expert answers 1, so the result is the sum of weights; what the dead rank holds must not matter.
        const y = [...plan.placement.recvRows].map((n, r) =>
          new Float64Array(n * hidden).fill(r === dead ? Number.NaN : 1),
        );
        const plain = moeCombine(plan, y, { hidden, precision: 'f64', weights, lostRanks });
        const kept = moeCombine(plan, y, { hidden, precision: 'f64', weights, lostRanks, renormalise: true });
        const later = withLostRanks(
          plan,
          ranksOf(plan).map((r) => plan.lostRanks[r] === 1 || r === dead),
        );
        for (const s of ranksOf(plan)) {
          const { tokens, topkIdx, replica, row } = rankSends(plan, s);
          for (let t = 0; t < tokens; t++) {
            const choices = [...Array(plan.routing.topK).keys()].map((k) => t * plan.routing.topK + k);
            const left = choices.filter((i) => row[i]! >= 0 && s !== dead && plan.map.rank[replica[i]!] !== dead);
            expect(left).toEqual(choices.filter((i) => rankSends(later, s).row[i]! >= 0));
            expect(plain[s]![t * hidden]).toBe(left.length);
            const asked = choices.filter((i) => topkIdx[i]! >= 0).length;
            expect(kept[s]![t * hidden]).toBeCloseTo(left.length === 0 ? 0 : asked, 12);
          }
        }
      }),
      runs,
    );
  });

  it('gives a plan that validates', () => {
    fc.assert(
      fc.property(moeCases, (given) => {
        validateMoe(planOf(given));
      }),
      runs,
    );
  });
});
