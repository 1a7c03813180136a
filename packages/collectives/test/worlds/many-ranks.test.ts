/** More ranks than a mask of 64 bits has, up to as many as a group may have. */
import { resolveModule, Worlds } from '@ep/conformance';
import type { Mode } from '@ep/conformance/cases';
import { afterAll, describe, it } from 'vitest';
import { bundleProgram } from '../bundle.js';

const full = process.env.EP_TEST_FULL === '1';
const module = await bundleProgram('conformance');
const worlds = new Worlds();

/** Those whose work grows with the square of the ranks are left to smaller worlds. */
const CASES = [
  'groups/facts',
  'barrier/holds',
  'reduce/rank-order',
  'objects/all-gather',
  'p2p/any-source',
  'failure/last-rank',
];
/** What is expected takes every rank longer the more of them there are. */
const UP_TO_65 = ['reduce/same-bits', 'all-reduce/coalesced', 'all-to-all/one-gives-all'];

const LIMIT_MS = 180_000;
// Ranks inherit it: of 128 that begin on few cores, the last one begins late.
process.env.EP_TIMEOUT_MS = `${LIMIT_MS / 2}`;

async function run(mode: Mode, worldSize: number, suite: 'cases' | 'many', id: string): Promise<void> {
  await worlds.run(mode, worldSize, {
    suite: { module, name: suite },
    id,
    provider: { module: resolveModule(module), name: 'shm' },
    config: {},
    limitMs: LIMIT_MS,
    seed: 1,
  });
}

afterAll(() => worlds.close());

describe.each(full ? [17, 65, 128] : [17])('%i threads over shared memory', (worldSize) => {
  const cases = worldSize > 65 ? CASES : [...UP_TO_65, ...CASES];
  it.each(cases)('%s', (id) => run('threads', worldSize, 'cases', id), 2 * LIMIT_MS);
});

const most: readonly Mode[] = full ? ['threads', 'processes'] : ['threads'];
describe.each(most)('128 %s over shared memory', (mode) => {
  it('sum, gather, send, lose one and go on', () => run(mode, 128, 'many', 'many/ranks'), 2 * LIMIT_MS);
});
