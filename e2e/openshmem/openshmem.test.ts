/** The ported program, started as a user would, gives what its arithmetic says. */
import { execFileSync } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { expect, it } from 'vitest';

const here = (path: string): string => fileURLToPath(new URL(path, import.meta.url));

interface Line {
  readonly rank: number;
  readonly came: number;
  readonly winner: number;
  readonly pi: number;
  readonly chunks: number;
}

function run(ranks: number): Line[] {
  const ep = here('../../packages/cli/bin/ep.mjs');
  const args = ['run', '-n', String(ranks), '--', process.execPath, here('pi.mjs')];
  const output = execFileSync(process.execPath, [ep, ...args], { encoding: 'utf8' });
  // Each line comes with the rank that printed it in front.
  const lines = output.split('\n').flatMap((line) => (line.includes('{') ? [line.slice(line.indexOf('{'))] : []));
  return lines.map((line) => JSON.parse(line) as Line).sort((a, b) => a.rank - b.rank);
}

it.each([1, 2, 4])('rotates, finds the largest and computes pi on %i PEs', (n) => {
  const lines = run(n);
  expect(lines.map(({ rank }) => rank)).toEqual(Array.from({ length: n }, (_, rank) => rank));
  const winner = Math.max(...lines.map(({ rank }) => (rank * 7919) % 1009));
  for (const { rank, came, winner: found, pi, chunks } of lines) {
    expect(came).toBe((rank + n - 1) % n);
    expect(found).toBe(winner);
    expect(Math.abs(pi - Math.PI)).toBeLessThan(1e-12);
    expect(pi).toBe(lines[0]!.pi);
    expect(chunks).toBe(200);
  }
});
