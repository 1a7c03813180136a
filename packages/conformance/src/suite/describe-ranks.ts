/** The vitest side of every suite whose cases run on ranks: one test per case, world and mode, compared with the committed outcomes. */
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import type { Capabilities, Need, Probe, TransportProvider } from '@ep/core';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import type { Mode } from '../cases/case.js';
import { type Named, resolveNamed } from '../world/protocol.js';
import { Worlds } from '../world/world.js';
import type { Suite } from './expected.js';
import { Outcomes } from './outcomes.js';

const LIMIT_MS = 60_000;
/** What a test may take beyond its case: ranks start, and those that hang are killed. */
const AROUND_MS = 60_000;

/** What is under test, and in which worlds. */
export interface RankMatrix {
  /**
   * A package or file, as the package under test would import it, and the export: `name` may be a path, `nvshmem.shm`. A suite whose cases never
   * call `CaseRank.open` needs only its name and probe.
   */
  readonly provider: Named;
  readonly config?: object;
  /** A configuration that is as good, but that must not meet the other: see `CaseRank.otherConfig`. */
  readonly otherConfig?: object;
  /** What the committed outcomes and EP_REQUIRE call it; the provider's name unless given. */
  readonly name?: string;
  readonly worlds: readonly number[];
  readonly modes: readonly Mode[];
  /** The modes that this file's tests run, where another file runs the others; all unless given. */
  readonly part?: readonly Mode[];
  /** Which of them run unless EP_TEST_FULL=1; all unless given. */
  readonly sample?: readonly (readonly [Mode, number])[];
  /** `[k, n]`: of the cases the k-th (from 0) of every n run unless EP_TEST_FULL=1, where other matrices run the others; all unless given. */
  readonly share?: readonly [number, number];
  /** Of the committed outcomes. */
  readonly expected: URL;
}

/** What this side needs of a case; its body is found by the ranks, in `RankSuite.found`. */
export interface DeclaredCase {
  readonly id: string;
  readonly sentence: string;
  /** Fewest ranks with which it says anything; 2 unless given. */
  readonly ranks?: number;
  /** How long it may take, in ms: 60 000 unless given. */
  readonly limitMs?: number;
}

export interface RankSuite<C extends DeclaredCase> {
  readonly suite: Suite;
  /** What the committed outcomes name; the provider's name unless given. */
  readonly name?: string;
  readonly cases: readonly C[];
  /** The same list, as ranks import it. */
  readonly found: Named;
  readonly mandatory: readonly string[];
  /** Why a case says nothing about a subject with these capabilities. */
  readonly inapplicable?: (one: C, capabilities: Capabilities) => string | undefined;
  /** Keeps the sentences with the outcomes: the support page cannot import the cases of every package. */
  readonly keepSentences?: boolean;
}

/** Modules are named as seen from the package whose tests run, and found again by ranks that stand elsewhere. */
export function resolveModule(module: string): string {
  if (module.startsWith('file:')) return module;
  return pathToFileURL(createRequire(join(process.cwd(), 'package.json')).resolve(module)).href;
}

/** True if EP_REQUIRE names it: unavailable is then a failure. */
export function isRequired(name: string, env: NodeJS.ProcessEnv = process.env): boolean {
  return (env.EP_REQUIRE ?? '').split(',').some((one) => one.trim() === name);
}

/** Declares the tests. `title` names the subject, for example `nvshmem (shm)`. */
export function describeRanks<C extends DeclaredCase>(title: string, suite: RankSuite<C>, matrix: RankMatrix): void {
  const { modes, worlds: sizes, part = modes, sample } = matrix;
  const isFull = process.env.EP_TEST_FULL === '1';
  const [share, shares] = isFull ? [0, 1] : (matrix.share ?? [0, 1]);
  const all = modes.flatMap((mode) => sizes.map((size) => [mode, size] as const));
  const chosen = isFull || sample === undefined ? all : sample;
  const runs = chosen.filter(([mode]) => part.includes(mode));
  const provider = { module: resolveModule(matrix.provider.module), name: matrix.provider.name };
  const found = { module: resolveModule(suite.found.module), name: suite.found.name };
  const ids = suite.cases.map((one) => one.id);

  describe(title, () => {
    const worlds = new Worlds();
    const outcomes = new Outcomes(matrix.expected, ids, suite.mandatory);
    const sentences = suite.keepSentences
      ? { sentences: Object.fromEntries(suite.cases.map((one) => [one.id, one.sentence])) }
      : {};
    let name = '';
    let probe: Probe;

    beforeAll(async () => {
      const typed = (await resolveNamed(provider)) as TransportProvider<Need>;
      name = suite.name ?? matrix.name ?? typed.name;
      probe = await typed.probe(matrix.config);
    });

    afterAll(async () => {
      await worlds.close();
      outcomes.save({ suite: suite.suite, name, modes, worlds: sizes, ...sentences });
    });

    it('has the committed outcomes of all cases, no other, and the mandatory ones among them', () => {
      outcomes.checkComplete({ suite: suite.suite, name, ...sentences });
    });

    it('is available where EP_REQUIRE names it', (context) => {
      if (probe.available) return;
      const why = `${name} is unavailable: ${probe.code}: ${probe.reason}`;
      expect(isRequired(name), `EP_REQUIRE names it, but ${why}`).toBe(false);
      context.skip(why);
    });

    for (const [mode, size] of runs) {
      const fitting = suite.cases.filter((one, index) => (one.ranks ?? 2) <= size && index % shares === share);
      describe(`${size} ${mode}`, () => {
        for (const one of fitting) {
          const { limitMs } = one;
          const options = limitMs === undefined ? {} : { timeout: limitMs + AROUND_MS };
          it(one.id, options, async (context) => {
            if (!probe.available) context.skip(`${name} is unavailable: ${probe.code}: ${probe.reason}`);
            else await runCase(one, mode, size, probe);
          });
        }
      });
    }

    async function runCase(
      one: C,
      mode: Mode,
      size: number,
      { capabilities }: Extract<Probe, { readonly available: true }>,
    ): Promise<void> {
      const { id, limitMs = LIMIT_MS } = one;
      if (suite.inapplicable?.(one, capabilities) !== undefined) {
        outcomes.note(id, 'not-applicable');
        return;
      }
      let failure: unknown;
      try {
        const { config = {}, otherConfig } = matrix;
        const order = { suite: found, id, provider, config, limitMs, seed: ids.indexOf(id) + 1 };
        await worlds.run(mode, size, otherConfig === undefined ? order : { ...order, otherConfig });
      } catch (error) {
        failure = error;
      }
      outcomes.note(id, failure === undefined ? 'pass' : 'fail', failure);
    }
  });
}
