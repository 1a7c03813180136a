/** The pull request's test of values as a user starts it, over processes: right for every seed, and by its first check wrong for some. */
import { execFile } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { expect, it } from 'vitest';

const here = (path: string): string => fileURLToPath(new URL(path, import.meta.url));
const command = [process.execPath, here('../../packages/efa-gda/bin/gin-putvalue.mjs')];

interface Ended {
  readonly status: number;
  readonly stdout: string;
  readonly stderr: string;
}

interface Report {
  readonly rank: number;
  readonly seed: number;
  readonly rounds: number;
  readonly behind: number;
  readonly pass: boolean;
}

function run(program: string, args: readonly string[], env: NodeJS.ProcessEnv = {}): Promise<Ended> {
  return new Promise((resolve, reject) => {
    execFile(program, args, { env: { ...process.env, ...env } }, (error, stdout, stderr) => {
      if (error !== null && typeof error.code !== 'number') reject(error);
      else resolve({ status: error === null ? 0 : Number(error.code), stdout, stderr });
    });
  });
}

function underEp(ranks: number, ...options: readonly string[]): Promise<Ended> {
  return runUnderEp(ranks, [...command, ...options]);
}

function runUnderEp(ranks: number, words: readonly string[]): Promise<Ended> {
  return run(process.execPath, [here('../../packages/cli/bin/ep.mjs'), 'run', '-n', `${ranks}`, '--', ...words]);
}

const reportsOf = ({ stdout }: Ended): Report[] =>
  stdout.split('\n').flatMap((line) => (line.includes('{"') ? [JSON.parse(line.slice(line.indexOf('{"')))] : []));

/** Eight writes, of rounds that are not the first, that take 5 ms each: whoever looks sees what was posted behind one of them first. */
const late = Array.from({ length: 8 }, (_, i) => `delay stage=land ns=5000000 skip=${23 + i * 41} count=1`).join('\n');

it.each(['inline', 'staged'])('passes for every seed, with values %s', async (values) => {
  const ended = await underEp(2, '--seeds', '1..60', '--rounds', '40', '--values', values, '--json');
  expect(ended).toMatchObject({ status: 0 });
  const reports = reportsOf(ended);
  expect(reports).toHaveLength(120);
  expect(new Set(reports.map(({ rank, seed }) => `${rank}/${seed}`)).size).toBe(120);
  expect(reports.every(({ pass, rounds }) => pass && rounds === 40)).toBe(true);
});

it('passes where values of bursts are late, and says that the last one came before it', async () => {
  const ended = await underEp(2, '--rounds', '40', '--faults', late, '--json');
  expect(ended).toMatchObject({ status: 0 });
  const receiver = reportsOf(ended).find(({ rank }) => rank === 1);
  expect(receiver).toMatchObject({ pass: true });
  expect(receiver!.behind).toBeGreaterThan(0);
});

it('fails for some seed where the last value is taken for a sign of the others', async () => {
  const ended = await underEp(2, '--seeds', '1..20', '--rounds', '40', '--check', 'last', '--faults', late);
  expect(ended.status).toBe(1);
  expect(ended.stdout).toMatch(/FAIL rank 1: seed \d+, 40 rounds, check last; in \d+ the last value/);
});

it('passes where a network joins the NICs', async () => {
  const options = ['--network', '127.0.0.1', '--seeds', '1..3', '--rounds', '20', '--json'];
  const ended = await underEp(2, ...options);
  expect(ended).toMatchObject({ status: 0 });
  expect(reportsOf(ended).map(({ pass, rounds }) => [pass, rounds])).toEqual(Array(6).fill([true, 20]));
  // It is told what the addresses are for.
  const nowhere = await underEp(2, '--network', '0.0.0.0', '--rounds', '1');
  expect(nowhere).toMatchObject({ status: 1, stderr: expect.stringContaining('network.address') });
});

it('passes by the path of hardware, over what stands for libfabric', async () => {
  const shim = here('../../packages/efa-gda/test/shim-provider.mjs');
  const library = here('../../native/build/Release/libep_fabric_shim.so');
  const [node = '', program = ''] = command;
  const options = ['--backing', 'hardware', '--seeds', '1..3', '--rounds', '40', '--json', '--library'];
  const ended = await runUnderEp(2, [node, '--import', shim, program, ...options, library]);
  expect(ended).toMatchObject({ status: 0 });
  expect(reportsOf(ended).map(({ pass, rounds }) => [pass, rounds])).toEqual(Array(6).fill([true, 40]));
  // Nobody is asked but the library that is named.
  const alone = await runUnderEp(2, [...command, ...options, 'libfabric-of-nobody.so.1']);
  expect(alone).toMatchObject({ status: 1, stderr: expect.stringContaining('libfabric-of-nobody.so.1') });
});

const mpirun = await run('mpirun', ['--version']).catch(() => undefined);
it.skipIf(mpirun === undefined)('runs under mpirun', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'ep-gin-'));
  try {
    const allowed = process.getuid?.() === 0 ? ['--allow-run-as-root'] : [];
    const options = ['-n', '2', '--oversubscribe', '-x', 'EP_STORE', ...allowed];
    const env = { EP_STORE: `file:${join(folder, 'store')}` };
    const ended = await run('mpirun', [...options, ...command, '--seeds', '3..4', '--json'], env);
    expect(ended).toMatchObject({ status: 0 });
    expect(reportsOf(ended).map(({ pass }) => pass)).toEqual([true, true, true, true]);
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
});

it('tells what it was not given, and of hardware what is missing', async () => {
  expect(await underEp(3, '--rounds', '1')).toMatchObject({
    status: 1,
    stderr: expect.stringContaining('it takes two ranks, and there are 3'),
  });
  for (const [words, complaint] of [
    [['--seeds', '5..2'], '--seeds must be a..b'],
    [['--check', 'some'], '--check must be every or last'],
    [['--rounds', '0'], '--rounds must be an integer from 1'],
    [['--sneeds', '5'], "Unknown option '--sneeds'"],
  ] as const) {
    const ended = await run(command[0]!, [command[1]!, ...words]);
    expect(ended.status).toBe(2);
    expect(ended.stderr).toContain(complaint);
    expect(ended.stderr).toContain('usage: gin_putvalue');
  }
  const hardware = await underEp(2, '--backing', 'hardware', '--device', 'rdmap-of-nobody', '--rounds', '1');
  expect(hardware.status).toBe(1);
  expect(hardware.stderr).toMatch(/gin_putvalue: EP_[A-Z]+: .*(libfabric|EFA)/);
});
