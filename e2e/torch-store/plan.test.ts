/** One job of TypeScript and torch ranks: they meet at one TCP store and share a file plan through it. */
import { execFile } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { openTcpStoreServer } from '@ep/core';
import { describe, expect, it } from 'vitest';
import { torch, torchLabel } from './torch.js';

const run = promisify(execFile);
const program = (name: string): string => fileURLToPath(new URL(name, import.meta.url));
const python = 'python' in torch ? torch.python : '';
const LIMIT = { timeout: 180_000 };

type Kind = 'typescript' | 'torch';

async function freePort(): Promise<number> {
  await using server = await openTcpStoreServer({ port: 0 });
  return server.port;
}

/** Runs one process for each rank, the first TypeScript rank plans; returns what each saw of all ranks. */
async function runJob(kinds: readonly Kind[]): Promise<readonly (readonly string[])[]> {
  const port = await freePort();
  const planner = kinds.indexOf('typescript');
  const runs = kinds.map(async (kind, rank) => {
    const env = {
      ...process.env,
      RANK: `${rank}`,
      WORLD_SIZE: `${kinds.length}`,
      MASTER_ADDR: '127.0.0.1',
      MASTER_PORT: `${port}`,
    };
    const [file, ...args] =
      kind === 'torch'
        ? [python, program('rank.py')]
        : [process.execPath, program('rank.mjs'), `${planner}`, kinds.includes('torch') ? 'mixed' : 'alone'];
    const { stdout } = await run(file, args, { env, timeout: 150_000 });
    const report = JSON.parse(stdout) as { readonly rank: number; readonly seen: readonly string[] };
    expect(report.rank).toBe(rank);
    return report.seen;
  });
  return Promise.all(runs);
}

function expectOnePlan(reports: readonly (readonly string[])[]): void {
  const worldSize = reports.length;
  const seen = new Set(reports.flat());
  expect(reports.map((report) => report.length)).toEqual(reports.map(() => worldSize));
  // The hash of the file, the digest of the plan that was made from it, and its world size: the same on all ranks.
  expect(seen.size).toBe(1);
  expect([...seen][0]).toMatch(new RegExp(`^[0-9a-f]{64} \\S+ ${worldSize}$`));
}

describe('a file plan reaches all ranks through the store', () => {
  it('TypeScript ranks alone', LIMIT, async () => {
    expectOnePlan(await runJob(['typescript', 'typescript', 'typescript']));
  });

  it.skipIf(!('python' in torch)).each<[string, readonly Kind[]]>([
    ['a TypeScript rank', ['typescript', 'torch', 'typescript', 'torch']],
    ['a torch rank', ['torch', 'typescript', 'torch', 'typescript']],
  ])(`TypeScript and torch ranks, %s holds the store, with ${torchLabel}`, LIMIT, async (_, kinds) => {
    expectOnePlan(await runJob(kinds));
  });

  it.skipIf(!('python' in torch))(
    `TypeScript ranks under torchrun, at its agent's store, with ${torchLabel}`,
    LIMIT,
    async () => {
      const torchrun = ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '3', '--no-python'];
      const { stdout } = await run(python, [...torchrun, process.execPath, program('rank.mjs'), '0', 'alone'], {
        timeout: 150_000,
      });
      const lines = stdout.split('\n').filter((line) => line.startsWith('{'));
      const reports = lines.map(
        (line) => JSON.parse(line) as { readonly rank: number; readonly seen: readonly string[] },
      );
      expect(reports.map(({ rank }) => rank).sort()).toEqual([0, 1, 2]);
      expectOnePlan(reports.map(({ seen }) => seen));
    },
  );
});
