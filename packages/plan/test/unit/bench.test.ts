import { describe, expect, it } from 'vitest';
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
