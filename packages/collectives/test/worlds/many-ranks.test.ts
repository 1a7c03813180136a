/** More ranks than a mask of 64 bits has: threads, because they are many. */
import { resolveModule, World } from '@ep/conformance';
import { describe, it } from 'vitest';
import { bundleProgram } from '../bundle.js';

const full = process.env.EP_TEST_FULL === '1';
const module = await bundleProgram('conformance');

/** Those whose work grows with the square of the ranks are left to smaller worlds. */
const CASES = [
  'groups/facts',
  'barrier/holds',
  'reduce/rank-order',
  'reduce/same-bits',
  'all-reduce/coalesced',
  'all-to-all/one-gives-all',
  'objects/all-gather',
  'p2p/any-source',
  'failure/last-rank',
];

describe.each(full ? [17, 65] : [17])('%i threads over shared memory', (worldSize) => {
  it.each(CASES)('%s', async (id) => {
    const world = new World('threads', worldSize);
    try {
      await world.run({
        suite: { module, name: 'cases' },
        id,
        provider: { module: resolveModule(module), name: 'shm' },
        config: {},
        limitMs: 100_000,
        seed: 1,
      });
    } finally {
      await world.close();
    }
  });
});
