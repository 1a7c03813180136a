/** The vitest side: one test per case, world and mode, compared with the committed outcomes. */
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';
import type { Need, Probe, TransportProvider } from '@ep/core';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { inapplicableBecause, type Mode, type TransportCase } from '../cases/case.js';
import { transportCases } from '../cases/index.js';
import { mandatoryCases } from '../mandatory.js';
import type { Named } from '../world/protocol.js';
import { Worlds } from '../world/world.js';
import {
  compareOutcome,
  type ExpectedFile,
  type Outcome,
  readExpected,
  UNEXPLAINED,
  writeExpected,
} from './expected.js';

const LIMIT_MS = 60_000;

export interface TransportConformance {
  /** A package or file, as the package under test would import it, and the export: `name` may be a path, `nvshmem.shm`. */
  readonly provider: Named;
  readonly config?: object;
  readonly worlds: readonly number[];
  readonly modes: readonly Mode[];
  /** Which of them run unless EP_TEST_FULL=1; all unless given. */
  readonly sample?: readonly (readonly [Mode, number])[];
  /** Of the committed outcomes. */
  readonly expected: URL;
}

/** Modules are named as seen from the package whose tests run, and found again by ranks that stand elsewhere. */
export function resolveModule(module: string): string {
  if (module.startsWith('file:')) return module;
  return pathToFileURL(createRequire(join(process.cwd(), 'package.json')).resolve(module)).href;
}

/** True if vitest was started with `--update`. */
function updating(): boolean {
  const state = expect.getState() as { readonly snapshotState?: { readonly snapshotUpdateState?: string } };
  return state.snapshotState?.snapshotUpdateState === 'all';
}

function required(name: string): boolean {
  return (process.env.EP_REQUIRE ?? '').split(',').some((one) => one.trim() === name);
}

const firstLine = (error: unknown): string => {
  const message = error instanceof Error ? error.message : String(error);
  return message.split('\n').slice(0, 2).join(' ');
};

/** Declares the tests. `title` names the transport, for example `nvshmem (shm)`. */
export function describeTransport(title: string, options: TransportConformance): void {
  const full = process.env.EP_TEST_FULL === '1';
  const all = options.modes.flatMap((mode) => options.worlds.map((size) => [mode, size] as const));
  const runs = full || options.sample === undefined ? all : options.sample;
  const path = fileURLToPath(options.expected);
  const provider = { module: resolveModule(options.provider.module), name: options.provider.name };
  const suite = { module: resolveModule('@ep/conformance/cases'), name: 'transportCases' };

  describe(title, () => {
    const worlds = new Worlds();
    const observed = new Map<string, Outcome>();
    let expected: ExpectedFile | undefined;
    let name = '';
    let probe: Probe;

    beforeAll(async () => {
      const module = await import(provider.module);
      const found = provider.name
        .split('.')
        .reduce<Record<string, unknown>>((value, key) => value[key] as Record<string, unknown>, module);
      const typed = found as unknown as TransportProvider<Need>;
      name = typed.name;
      probe = await typed.probe(options.config);
      expected = readExpected(path);
    });

    afterAll(async () => {
      await worlds.close();
      if (!updating() || observed.size === 0) return;
      const cases = transportCases.flatMap(({ id }) => {
        const outcome = observed.get(id) ?? expected?.cases[id];
        return outcome === undefined ? [] : [[id, outcome] as const];
      });
      const { modes, worlds: sizes } = options;
      writeExpected(path, { transport: name, modes, worlds: sizes, cases: Object.fromEntries(cases) });
    });

    it('has the committed outcomes of all cases, no other, and the mandatory ones among them', () => {
      const ids = transportCases.map((one) => one.id);
      expect(ids.filter((id, i) => ids.indexOf(id) !== i)).toEqual([]);
      expect(mandatoryCases.filter((id) => !ids.includes(id))).toEqual([]);
      if (updating()) return;
      expect(expected, `${path} is missing: run with --update`).toBeDefined();
      expect(expected!.transport).toBe(name);
      expect(Object.keys(expected!.cases).sort()).toEqual([...ids].sort());
      for (const [id, outcome] of Object.entries(expected!.cases)) {
        if (typeof outcome === 'object') expect(outcome.deviation, id).not.toMatch(new RegExp(`^${UNEXPLAINED}`));
      }
    });

    it('is available where EP_REQUIRE names it', () => {
      if (probe.available) return;
      expect(required(name), `EP_REQUIRE names ${name}, which is unavailable: ${probe.code}: ${probe.reason}`).toBe(
        false,
      );
    });

    const note = (id: string, outcome: 'pass' | 'fail' | 'not-applicable', failure?: unknown): void => {
      if (!updating()) {
        compareOutcome(id, expected?.cases[id], outcome, failure);
        return;
      }
      const before = observed.get(id);
      if (outcome !== 'fail') {
        if (before === undefined) observed.set(id, outcome);
        return;
      }
      const committed = expected?.cases[id];
      observed.set(
        id,
        typeof committed === 'object' ? committed : { deviation: `${UNEXPLAINED}${firstLine(failure)}` },
      );
    };

    for (const [mode, size] of runs) {
      describe(`${size} ${mode}`, () => {
        const fitting = transportCases.filter((one) => (one.ranks ?? 2) <= size);
        it.each(fitting.map((one) => [one.id, one] as const))('%s', async (id: string, one: TransportCase) => {
          const context = expect.getState().currentTestName;
          if (!probe.available) {
            console.warn(`${context}: unavailable: ${probe.code}: ${probe.reason}`);
            return;
          }
          if (inapplicableBecause(one, probe.capabilities) !== undefined) {
            note(id, 'not-applicable');
            return;
          }
          let failure: unknown;
          try {
            const seed = transportCases.indexOf(one) + 1;
            const { config = {} } = options;
            await worlds.run(mode, size, { suite, id, provider, config, limitMs: LIMIT_MS, seed });
          } catch (error) {
            failure = error;
          }
          note(id, failure === undefined ? 'pass' : 'fail', failure);
        });
      });
    }
  });
}
