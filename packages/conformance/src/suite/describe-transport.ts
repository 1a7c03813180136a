/** The vitest side: one test per case, world and mode, compared with the committed outcomes. */
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import type { Need, Probe, TransportProvider } from '@ep/core';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { inapplicableBecause, type Mode, type TransportCase } from '../cases/case.js';
import { transportCases } from '../cases/index.js';
import { mandatoryCases } from '../mandatory.js';
import { type Named, resolveNamed } from '../world/protocol.js';
import { Worlds } from '../world/world.js';
import { Outcomes } from './outcomes.js';

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

/** True if EP_REQUIRE names it: unavailable is then a failure. */
export function isRequired(name: string, env: NodeJS.ProcessEnv = process.env): boolean {
  return (env.EP_REQUIRE ?? '').split(',').some((one) => one.trim() === name);
}

/** Declares the tests. `title` names the transport, for example `nvshmem (shm)`. */
export function describeTransport(title: string, options: TransportConformance): void {
  const all = options.modes.flatMap((mode) => options.worlds.map((size) => [mode, size] as const));
  const runs = process.env.EP_TEST_FULL === '1' || options.sample === undefined ? all : options.sample;
  const provider = { module: resolveModule(options.provider.module), name: options.provider.name };
  const suite = { module: resolveModule('@ep/conformance/cases'), name: 'transportCases' };
  const ids = transportCases.map((one) => one.id);

  describe(title, () => {
    const worlds = new Worlds();
    const outcomes = new Outcomes(options.expected, ids, mandatoryCases);
    let name = '';
    let probe: Probe;

    beforeAll(async () => {
      const typed = (await resolveNamed(provider)) as TransportProvider<Need>;
      name = typed.name;
      probe = await typed.probe(options.config);
    });

    afterAll(async () => {
      await worlds.close();
      outcomes.save({ suite: 'transport', name, modes: options.modes, worlds: options.worlds });
    });

    it('has the committed outcomes of all cases, no other, and the mandatory ones among them', () => {
      outcomes.checkComplete({ suite: 'transport', name });
    });

    it('is available where EP_REQUIRE names it', (context) => {
      if (probe.available) return;
      const why = `${name} is unavailable: ${probe.code}: ${probe.reason}`;
      expect(isRequired(name), `EP_REQUIRE names it, but ${why}`).toBe(false);
      context.skip(why);
    });

    for (const [mode, size] of runs) {
      const fitting = transportCases.filter((one) => (one.ranks ?? 2) <= size);
      describe(`${size} ${mode}`, () => {
        for (const one of fitting) {
          it(one.id, async (context) => {
            if (!probe.available) context.skip(`${name} is unavailable: ${probe.code}: ${probe.reason}`);
            else await runCase(one, mode, size, probe);
          });
        }
      });
    }

    async function runCase(
      one: TransportCase,
      mode: Mode,
      size: number,
      { capabilities }: Extract<Probe, { readonly available: true }>,
    ): Promise<void> {
      const { id } = one;
      if (inapplicableBecause(one, capabilities) !== undefined) {
        outcomes.note(id, 'not-applicable');
        return;
      }
      let failure: unknown;
      try {
        const { config = {} } = options;
        await worlds.run(mode, size, { suite, id, provider, config, limitMs: LIMIT_MS, seed: ids.indexOf(id) + 1 });
      } catch (error) {
        failure = error;
      }
      outcomes.note(id, failure === undefined ? 'pass' : 'fail', failure);
    }
  });
}
