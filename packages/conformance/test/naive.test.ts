/** The hostile transport has teeth: protocols that are wrong fail over it, and its engine really delivers out of order. */
import { resolveModule, World } from '@ep/conformance';
import { naiveCases } from '@ep/conformance/naive';
import { afterAll, describe, expect, it } from 'vitest';

const provider = { module: resolveModule('@ep/conformance/hostile'), name: 'hostile' };
const suite = { module: resolveModule('@ep/conformance/naive'), name: 'naiveCases' };

describe('over the hostile transport', () => {
  let world: World | undefined;
  afterAll(() => world?.close());

  for (const seed of [1, 2]) {
    it.each(naiveCases.map((one) => [one.id, one.sentence] as const))(`seed ${seed}: %s fails: %s`, async (id) => {
      if (world === undefined || world.spent) {
        await world?.close();
        world = new World('threads', 2);
      }
      const run = world.run({ suite, id, provider, config: { seed, maxDelayUs: 20_000 }, limitMs: 60_000, seed });
      // It fails by what it found, not by an accident of set-up.
      await expect(run).rejects.toThrow(/EP_TIMEOUT|expected \d+, found \d+/);
    });
  }
});
