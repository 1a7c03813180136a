/** The cases themselves: right over an engine of plain loops, and complete. */
import { describe, expect, it } from 'vitest';
import { processGroupCases } from './cases/index.js';
import { runInline } from './inline.js';
import { mandatoryGroupCases } from './mandatory.js';

it('are there, each once and with a sentence of its own', () => {
  const ids = processGroupCases.map((one) => one.id);
  expect(new Set(ids).size).toBe(ids.length);
  expect(new Set(processGroupCases.map((one) => one.sentence)).size).toBe(ids.length);
  expect(mandatoryGroupCases.filter((id) => !ids.includes(id))).toEqual([]);
});

/** Enough for every case but those that need four. */
const worlds = process.env.EP_TEST_FULL === '1' ? [1, 3, 4] : [3];

/** The memory engine has no queue of messages in which one could wait behind others, and its members are fixed. */
const beyond = (id: string): boolean => id === 'p2p/timeout-counts-from-activation' || id.startsWith('elastic/');

describe.each(worlds)('%i ranks of one thread', (worldSize) => {
  const fitting = processGroupCases.filter((one) => (one.ranks ?? 1) <= worldSize && !beyond(one.id));
  it.each(fitting)('$id', { timeout: 30_000 }, async (one) => {
    await runInline(one, worldSize);
  });
});
