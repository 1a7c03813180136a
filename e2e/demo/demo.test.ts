/** The demo as `npm run demo` starts it, and its matrix with `--small`: every number of ranks, as processes and as threads, in both dtypes. */
import { execFile } from 'node:child_process';
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { describe, expect, it } from 'vitest';

const run = promisify(execFile);
const EP = join(createRequire(import.meta.url).resolve('@ep/cli/package.json'), '..', 'bin', 'ep.mjs');

interface DemoReport {
  readonly pass: boolean;
  readonly ranks: number;
  readonly mode: string;
  readonly documents: number;
  readonly tokens: number;
  readonly longest: { readonly tokens: number };
  readonly imbalance: { readonly atHome: number; readonly planned: number };
  readonly errors: readonly { readonly tensor: string; readonly elements: number; readonly relative: number }[];
}

it('on real documents, at full size, in less than a minute', { timeout: 60_000 }, async () => {
  const { stdout } = await run(process.execPath, [EP, 'demo', '--json', '--no-svg']);
  const report = JSON.parse(stdout) as DemoReport;
  expect(report).toMatchObject({ pass: true, ranks: 4, mode: 'processes' });
  expect(report.tokens).toBeGreaterThanOrEqual(32_000);
  expect(report.documents).toBeGreaterThanOrEqual(20);
  expect(report.longest.tokens).toBeGreaterThanOrEqual(8_000);
  expect(report.imbalance.planned).toBeLessThan(report.imbalance.atHome);
});

describe.each(['processes', 'threads'])('as %s', (mode) => {
  it.each([1, 2, 3, 4, 7])('on %i ranks', { timeout: 120_000 }, async (ranks) => {
    for (const [dtype, tolerance] of [
      ['bf16', 1e-2],
      ['f32', 1e-5],
    ] as const) {
      const options = [
        '--small',
        '--json',
        '--no-svg',
        '--dtype',
        dtype,
        '-n',
        `${ranks}`,
        ...(mode === 'threads' ? ['--threads'] : []),
      ];
      const { stdout } = await run(process.execPath, [EP, 'demo', ...options]);
      const report = JSON.parse(stdout) as DemoReport;
      expect(report).toMatchObject({ pass: true, ranks, mode });
      expect(report.errors.map(({ tensor }) => tensor)).toEqual(['o', 'dQ', 'dK', 'dV']);
      for (const { elements, relative } of report.errors) {
        expect(elements).toBeGreaterThan(100_000);
        expect(relative).toBeLessThanOrEqual(tolerance);
      }
    }
  });
});
