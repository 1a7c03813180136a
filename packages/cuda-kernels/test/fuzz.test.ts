import { replay } from '@ep/fuzz';
import { describe, expect, it } from 'vitest';
import { suite } from '../fuzz/targets.js';

describe.each(suite.targets.map((target) => [target.name, target] as const))('fuzz target %s', (_, target) => {
  it('uses or refuses its corpus and 2000 mutations of it, always the same ones', () => {
    const kept = replay(suite, target, { mutations: 0, seed: 1 });
    expect(kept.used).toBeGreaterThan(0);
    const { used, refused } = replay(suite, target, { mutations: 2000, seed: 20261121 });
    expect(used).toBeGreaterThan(200);
    expect(refused).toBeGreaterThan(1000);
  });
});
