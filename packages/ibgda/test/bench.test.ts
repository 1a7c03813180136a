/** The benchmark's own checks, on runs too short to mean anything. */
import { native } from '@ep/native';
import { expect, test } from 'vitest';
import { benchIbgda } from '../bench/ibgda.js';

test('every way posts, drained and executed, and the software NIC moves what it is told to', async () => {
  const { posts, nic } = await benchIbgda({ repeats: 1, posts: 4000 });
  const ways = native().binding.postWays();
  expect(ways[0]).toEqual({ name: 'lock', sharing: 'device', shared: true });
  expect(posts).toHaveLength(ways.length * 2 * 2 * 3);
  for (const { samples } of posts) expect(samples).toEqual([expect.any(Number)]);
  expect(Math.min(...posts.flatMap((one) => one.samples))).toBeGreaterThan(0);
  expect(nic.requests.map((one) => one.batch)).toEqual([1, 8, 512]);
  expect(nic.written).toHaveLength(3);
  expect(Math.min(...nic.written, ...nic.copied, ...nic.requests.flatMap((one) => one.samples))).toBeGreaterThan(0);
});

test('what cannot be measured is refused', () => {
  const { binding } = native();
  expect(() => binding.postsPerSecond(99, 1, 1, 100, false)).toThrow(/way 99 exceeds 64/);
  expect(() => binding.postsPerSecond(60, 1, 1, 100, true)).toThrow(/way, posters or batch are out of range/);
  expect(() => binding.postsPerSecond(0, 1, 1000, 100, false)).toThrow(/batch 1000 exceeds 512/);
  expect(() => binding.softwareNicSpeed(1, 100, 4096)).toThrow(/batch or region are out of range/);
});
