import { replay } from '@ep/fuzz';
import { describe, expect, it } from 'vitest';
import { suite } from '../../fuzz/targets.js';

describe.each(suite.targets.map((target) => [target.name, target] as const))('fuzz target %s', (_, target) => {
  it('replays its corpus: every input is used or refused with a PlanError', () => {
    const { used, refused } = replay(suite, target, { mutations: 0, seed: 1 });
    expect(used).toBeGreaterThan(0);
    expect(refused).toBeGreaterThan(0);
  });

  it('and 2000 mutations of it, always the same ones', () => {
    const { used, refused } = replay(suite, target, { mutations: 2000, seed: 20261120 });
    expect(used + refused).toBeGreaterThan(2000);
    expect(refused).toBeGreaterThan(1000);
  });
});
