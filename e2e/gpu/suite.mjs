// The cases of process groups on device tensors, which are those of every engine, with the outcomes that are committed. bundle-suite.mjs puts them where this finds them.
import assert from 'node:assert/strict';
import { existsSync, readFileSync } from 'node:fs';
import { Worlds } from '@ep/conformance/world';

const RANKS = 4;
const LIMIT_MS = 60_000;

const suite = new URL('../.cache/group-suite/cases.mjs', import.meta.url);
const outcomes = new URL('../../packages/collectives/test/group-device.expected.json', import.meta.url);

/** The part of an id that cases of one matter share. */
const familyOf = (/** @type {string} */ id) => /** @type {string} */ (id.split('/')[0]);

/** By id: what is committed of each. @returns {Readonly<Record<string, unknown>>} */
const committedCases = () => JSON.parse(readFileSync(outcomes, 'utf8')).cases;

export const isBundled = () => existsSync(suite);

/**
 * Runs those cases, in one world of ranks for as long as nobody dies in it. Throws what went otherwise than was committed. How many ran.
 * @param {(id: string, index: number) => boolean} wanted
 */
export async function runSuite(wanted) {
  const committed = committedCases();
  const found = { module: suite.href, name: 'cases' };
  const { cases } = await import(found.module);
  const ids = cases.map((/** @type {{ id: string }} */ { id }) => id);
  assert.deepEqual([...ids].sort(), Object.keys(committed).sort());
  const provider = { module: import.meta.resolve('@ep/nvshmem'), name: 'nvshmem.cuda' };
  const worlds = new Worlds();
  const wrong = [];
  let ran = 0;
  try {
    for (const [index, { id, ranks = 1 }] of cases.entries()) {
      if (ranks > RANKS || !wanted(id, index)) continue;
      const order = { suite: found, id, provider, config: {}, limitMs: LIMIT_MS, seed: index + 1 };
      const failure = await worlds.run('threads', RANKS, order).then(
        () => undefined,
        (error) => error,
      );
      const passes = committed[id] === 'pass';
      if (passes !== (failure === undefined)) wrong.push(failure?.message ?? `${id} passes, and did not`);
      ran++;
    }
  } finally {
    await worlds.close();
  }
  if (wrong.length > 0) throw new Error(wrong.join('\n\n'));
  return ran;
}

/** One for each family. @returns {readonly import('./cases.mjs').Case[]} */
export function suiteCases() {
  const families = new Set(Object.keys(committedCases()).map(familyOf));
  return [...families].map((family) => ({
    name: `process groups on device tensors, the suite of every engine: ${family}`,
    run: async () => `${await runSuite((id) => familyOf(id) === family)} cases`,
  }));
}
