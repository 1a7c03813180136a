/** The benchmark's own checks, on runs too short to mean anything; and what a put costs a device. */
import { native } from '@ep/native';
import { expect, it } from 'vitest';
import { benchEfa } from '../bench/efa.js';

it('puts in every way, and rings once for a run', async () => {
  const { puts, costs } = await benchEfa({ repeats: 1, puts: 3200 });
  const ways = native().binding.efaPutWays();
  expect(ways[0]).toEqual({ name: 'lock', sharing: 'device', shared: true });
  expect(puts).toHaveLength(ways.length * 2 * 3);
  for (const { samples } of puts) expect([samples.length, samples[0]! > 0]).toEqual([1, true]);
  expect(costs).toHaveLength(ways.length * 3);
  for (const { way, run, puts: count, doorbells, words, registerFences, systemFences } of costs) {
    expect([doorbells, words]).toEqual([count / run, count * 8]);
    // The lock's fences order nothing towards the device but a doorbell; each of its puts waits for all at its end.
    const fences = way === 'lock' ? [(2 * count) / run, count] : [count + count / run, 0];
    expect([registerFences, systemFences]).toEqual(fences);
  }
});

it('refuses what it does not have', () => {
  const { binding } = native();
  expect(() => binding.efaPutsPerSecond(99, 1, 1, 10)).toThrow('way 99 exceeds 64');
  expect(() => binding.efaPutsPerSecond(9, 1, 1, 10)).toThrow('out of range');
  expect(() => binding.efaPutsPerSecond(0, 0, 1, 10)).toThrow('out of range');
  expect(() => binding.efaPutCounts(0, 0, 10)).toThrow('out of range');
});
