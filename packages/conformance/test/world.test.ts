/** The world itself: it says who did what, in threads and in processes, and is never stuck on a rank. */
import { isRequired, resolveModule, World } from '@ep/conformance';
import { describe, expect, it } from 'vitest';

const provider = { module: resolveModule('@ep/conformance/hostile'), name: 'hostile' };
const suite = { module: new URL('./programs/world-suite.mjs', import.meta.url).href, name: 'cases' };

async function runOnce(
  mode: 'threads' | 'processes',
  id: string,
  limitMs = 30_000,
): Promise<{ readonly spent: boolean }> {
  const world = new World(mode, 2);
  try {
    await world.run({ suite, id, provider, config: {}, limitMs, seed: 1 });
    return { spent: world.spent };
  } finally {
    await world.close();
  }
}

describe.each(['threads', 'processes'] as const)('%s', (mode) => {
  it('run cases one after the other on the same ranks', async () => {
    const world = new World(mode, 3);
    try {
      for (const id of ['all-end', 'seeded', 'all-end', 'seeded']) {
        await world.run({ suite, id, provider, config: {}, limitMs: 30_000, seed: 1 });
        expect(world.spent).toBe(false);
      }
    } finally {
      await world.close();
    }
  });

  it('names the rank that did not finish, and what it last reported', async () => {
    await expect(runOnce(mode, 'one-hangs', 500)).rejects.toThrow(
      /^one-hangs, 2 (threads|processes):\nrank 1 did not finish within 500 ms, last reported rank 1 waits for nothing$/,
    );
  });

  it('hands on what a rank threw, with its code and context', async () => {
    await expect(runOnce(mode, 'one-throws')).rejects.toThrow(
      /rank 1 failed[\s\S]*EpError[\s\S]*"never"[\s\S]*code EP_TIMEOUT, context \{[\s\S]*missing/,
    );
  });

  it('notices a rank that goes away by itself', async () => {
    await expect(runOnce(mode, 'one-exits')).rejects.toThrow(/rank 1 went away with exit code 7/);
  });

  it('kills a rank that asks for it, also while it is busy, and takes that for no failure', async () => {
    expect(await runOnce(mode, 'one-dies')).toEqual({ spent: true });
    expect(await runOnce(mode, 'one-is-busy')).toEqual({ spent: true });
  });

  it('says so when there is no such case', async () => {
    await expect(runOnce(mode, 'nonsense')).rejects.toThrow(/no case nonsense/);
  });
});

it('reads EP_REQUIRE as a list of names', () => {
  expect(isRequired('a:b', { EP_REQUIRE: 'x:y, a:b' })).toBe(true);
  expect(isRequired('a:b', { EP_REQUIRE: 'a:bc' })).toBe(false);
  expect(isRequired('a:b', {})).toBe(false);
});
