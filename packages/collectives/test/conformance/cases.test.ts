/** The cases themselves: right over an engine of plain loops, and complete. */
import { readFileSync } from 'node:fs';
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

it('are what the table of counterparts names, and so are the scenarios of test/elastic', () => {
  const read = (path: string): string => readFileSync(new URL(path, import.meta.url), 'utf8');
  const rows = read('cases/index.ts')
    .split('\n')
    .filter((line) => line.startsWith(' * | ') && !line.startsWith(' * | theirs'));
  expect(rows.length).toBe(36);
  const ids = processGroupCases.map((one) => one.id);
  const elastic = read('../elastic/elastic.test.ts');
  for (const row of rows) {
    const [, theirs, ours = ''] = row.split(' | ');
    expect(ours, theirs).not.toBe('');
    for (const [, name = ''] of ours.matchAll(/`([^`]+)`/g)) {
      if (name.includes('/')) expect(ids).toContain(name);
      else if (/^[a-z]+$/i.test(name)) expect(elastic).toContain(`'${name}'`);
    }
  }
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
