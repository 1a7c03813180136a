import { describe, expect, it } from 'vitest';
import { benchMoe, moeBenchText } from '../../bench/moe.js';
import { benchPlan, planBenchText } from '../../bench/plan.js';

describe('the bench', () => {
  it('verifies what it times and stays within 200 bytes per dispatch', () => {
    const report = benchPlan({ ranks: 16, shardsPerRank: 32, repeats: 1 });
    expect(report.results.map((r) => r.case)).toEqual(['each-query', 'each-server']);
    for (const r of report.results) {
      expect(r.dispatches).toBeGreaterThan(16 * 32 * 2);
      expect(r.bytesPerDispatch).toBeLessThanOrEqual(200);
    }
    expect(planBenchText(report)).toContain('16 ranks x 32 shards');
  });
});

describe('the bench of expert plans', () => {
  it('verifies every row it times', () => {
    const report = benchMoe({ ranks: 3, tokensPerRank: 16, experts: 10, topK: 2, repeats: 1 });
    expect(report.results.map((r) => [r.case, r.tokens])).toEqual([
      ['layout', 16],
      ['low-latency', 48],
      ['high-throughput', 48],
    ]);
    expect(moeBenchText(report)).toContain('3 ranks x 16 tokens');
  });
});
