import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import {
  expectedGroups,
  expertLoad,
  explainMoe,
  generateRouting,
  gini,
  messageBytes,
  moeExplanationText,
  moeTraffic,
  payloadBytes,
  planMoe,
  rankSends,
  spreadExperts,
  withLostRanks,
} from '../../src/moe/index.js';
import { moeCases } from './arbitraries.js';

const runs = { numRuns: 100 };

describe('explainMoe', () => {
  it('accounts for every choice once', () => {
    fc.assert(
      fc.property(moeCases, ({ routing, map, form, options }) => {
        const plan = planMoe(routing, map, form, options);
        const e = explainMoe(plan);
        expect(e.emptyChoices + e.unservedChoices + e.lostChoices + e.servedChoices).toBe(routing.topkIdx.length);
        expect(e.emptyChoices).toBe(routing.topkIdx.filter((x) => x < 0).length);
        expect(e.servedChoices).toBe(plan.row.filter((row) => row >= 0).length);
        const sum = (field: 'sends' | 'serves' | 'keeps' | 'tokens' | 'localExperts') =>
          e.ranks.reduce((total, r) => total + r[field], 0);
        expect(sum('sends')).toBe(e.servedChoices);
        expect(sum('serves')).toBe(e.servedChoices);
        expect(sum('tokens')).toBe(e.tokens);
        expect(sum('localExperts')).toBe(e.replicas);
        expect(sum('keeps')).toBeLessThanOrEqual(e.servedChoices);
        expect(e.expertGini).toBe(gini(expertLoad(routing)));
        expect(e.byLoad.reduce((total, x) => total + x.chosen, 0)).toBe(routing.topkIdx.length - e.emptyChoices);
        expect(e.byLoad.flatMap((x) => x.replicas).reduce((total, r) => total + r.serves, 0)).toBe(e.servedChoices);
        for (const { state, sends, serves } of e.ranks) if (state !== 'active') expect([sends, serves]).toEqual([0, 0]);
        const text = moeExplanationText(e);
        expect(text).toContain(`${e.servedChoices} served, ${e.emptyChoices} empty`);
      }),
      runs,
    );
  });

  it('knows how many ranks a token of evenly chosen experts reaches', () => {
    // 8 experts in 4 groups, 2 choices: the second falls into the first one's group with probability 1/7.
    expect(expectedGroups(8, 4, 2)).toBeCloseTo(1 / 7 + 2 * (6 / 7), 12);
    expect(expectedGroups(8, 8, 3)).toBeCloseTo(3, 12);
    const routing = generateRouting({
      worldSize: 8,
      tokens: 2000,
      experts: 64,
      topK: 6,
      popularity: { kind: 'uniform' },
      seed: 5,
    });
    const e = explainMoe(planMoe(routing, spreadExperts(64, 8), { mode: 'high-throughput' }, { ranksPerNode: 4 }));
    expect(e.ranksPerToken).toBeCloseTo(e.expectedRanksPerToken, 1);
    expect(e.nodesPerToken).toBeCloseTo(expectedGroups(64, 2, 6), 1);
  });

  it('judges balance by the ranks that are there, and reach by the tokens that choose', () => {
    const routing = generateRouting({
      worldSize: 2,
      tokens: 10,
      experts: 2,
      topK: 1,
      popularity: { kind: 'uniform' },
      seed: 1,
    });
    const alone = planMoe(routing, spreadExperts(2, 2), { mode: 'high-throughput' }, { activeRanks: [1, 0] });
    const e = explainMoe(alone);
    expect([e.rankImbalance, e.ranksPerToken]).toEqual([1, 1]);
    expect(e.ranks.map(({ state }) => state)).toEqual(['active', 'inactive']);
    expect(explainMoe(withLostRanks(alone, [1, 0])).ranks[0]!.state).toBe('lost');
    const nobody = planMoe(routing, spreadExperts(2, 2), { mode: 'high-throughput' }, { activeRanks: [0, 0] });
    expect([explainMoe(nobody).ranksPerToken, explainMoe(nobody).nodesPerToken]).toEqual([0, 0]);
    expect(expectedGroups(4, 2, 4)).toBe(2);
  });

  it('lists at most 64 ranks and 8 experts', () => {
    const routing = generateRouting({
      worldSize: 65,
      tokens: 1,
      experts: 65,
      topK: 2,
      popularity: { kind: 'uniform' },
      seed: 1,
    });
    const text = moeExplanationText(explainMoe(planMoe(routing, spreadExperts(65, 65), { mode: 'high-throughput' })));
    expect(text).toContain('and 1 more ranks');
    expect(text).toContain('and 57 more experts');
  });
});

describe('moeTraffic', () => {
  it('is the sum over choices, one by one', () => {
    const unit = { hidden: 200, dispatch: 'f8e4m3+f32', combine: 'bf16' } as const;
    const [row, message] = [payloadBytes('f8e4m3+f32', 200), messageBytes('f8e4m3+f32', 200)];
    fc.assert(
      fc.property(moeCases, ({ routing, map, form, options }) => {
        const plan = planMoe(routing, map, form, options);
        const traffic = moeTraffic(plan, unit);
        const zero = () => new Array<number>(map.worldSize).fill(0);
        const [logical, own, wire, nodeWire, back, backWire] = [zero(), zero(), zero(), zero(), zero(), zero()];
        const pairs = zero().map(() => new Set<string>());
        for (let s = 0; s < map.worldSize; s++) {
          const sent = rankSends(plan, s);
          sent.row.forEach((at, i) => {
            if (at < 0) return;
            const r = map.rank[sent.replica[i]!]!;
            logical[s]! += row;
            back[r]! += 400;
            if (r === s) own[s]! += row;
            else {
              wire[s]! += message;
              backWire[r]! += 400;
              pairs[s]!.add(`${Math.floor(i / routing.topK)} ${r}`);
            }
            if (Math.floor(r / plan.ranksPerNode) !== Math.floor(s / plan.ranksPerNode)) nodeWire[s]! += message;
          });
        }
        expect([...traffic.dispatch.logicalBytes]).toEqual(logical);
        expect([...traffic.dispatch.ownRankBytes]).toEqual(own);
        expect([...traffic.dispatch.wireBytes]).toEqual(wire);
        expect([...traffic.dispatch.nodeWireBytes]).toEqual(nodeWire);
        expect([...traffic.combine.logicalBytes]).toEqual(back);
        expect([...traffic.combine.wireBytes]).toEqual(backWire);
        expect([...traffic.wireOncePerRankBytes]).toEqual(pairs.map((p) => p.size * message));
      }),
      runs,
    );
  });
});
