/** The ported programs, started as a user would, give what their originals give. */
import { execFileSync } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { expect, it } from 'vitest';

const here = (path: string): string => fileURLToPath(new URL(path, import.meta.url));

interface Line {
  readonly rank: number;
  readonly rotated: number;
  readonly laps: readonly number[];
  readonly relayed: readonly number[];
  readonly pi: number;
  readonly byCounter: { readonly pi: number; readonly chunks: number };
}

function run(ranks: number): Line[] {
  const ep = here('../../packages/cli/bin/ep.mjs');
  const args = ['run', '-n', String(ranks), '--', process.execPath, here('examples.mjs')];
  const output = execFileSync(process.execPath, [ep, ...args], { encoding: 'utf8' });
  // Each line comes with the rank that printed it in front.
  const lines = output.split('\n').flatMap((line) => (line.includes('{') ? [line.slice(line.indexOf('{'))] : []));
  return lines.map((line) => JSON.parse(line) as Line).sort((a, b) => a.rank - b.rank);
}

it.each([1, 2, 4])('rotates, goes round, relays and computes pi on %i PEs', (n) => {
  const lines = run(n);
  expect(lines.map(({ rank }) => rank)).toEqual(Array.from({ length: n }, (_, rank) => rank));
  for (const { rank, rotated, laps, relayed, pi, byCounter } of lines) {
    expect(rotated).toBe(rank);
    expect(laps).toEqual([10, 9, 8, 7, 6, 5, 4, 3, 2, 1]);
    expect(relayed).toEqual([(rank + n - 1) % n]);
    // The midpoint rule itself is off by 8e-10 with 10 000 rectangles.
    expect(Math.abs(pi - Math.PI)).toBeLessThan(1e-9);
    expect(pi).toBe(lines[0]!.pi);
    expect(Math.abs(byCounter.pi - Math.PI)).toBeLessThan(1e-12);
    expect(byCounter).toEqual({ pi: lines[0]!.byCounter.pi, chunks: 200 });
  }
});
