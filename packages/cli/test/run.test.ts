import { existsSync, mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { describe, expect, it } from 'vitest';
import type { LaunchEvent } from '../src/run/launch.js';
import { LineSplitter, longestLine } from '../src/run/lines.js';
import { isAlive, runEp, startEp, untilEmpty, untilGone } from './ep.js';

const program = (source: string): string[] => ['--', process.execPath, '-e', source];
/** Prints its pid and stays until it is ended. */
const patient = `console.log('pid', process.pid); setInterval(() => {}, 1000);`;
const deaf = `for (const s of ['SIGTERM', 'SIGINT', 'SIGHUP']) process.on(s, () => console.log('got', s)); ${patient}`;

const pidsIn = (text: string): number[] => [...text.matchAll(/pid (\d+)/g)].map((match) => Number(match[1]));

async function startedPids(run: ReturnType<typeof startEp>, ranks: number): Promise<number[]> {
  const match = await run.seen(new RegExp(`(?:pid \\d+[^]*?){${ranks}}`));
  return pidsIn(match[0]);
}

/** Of each rank, what a launcher says where it is. */
async function environmentsOf(
  count: number,
  surrounding: Readonly<Record<string, string>> = {},
): Promise<ReadonlyMap<number, Readonly<Record<string, string>>>> {
  const said = /^((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_.*|TORCHELASTIC_.*|EP_STORE)$/;
  const source = `console.log(JSON.stringify(Object.entries(process.env).filter(([name]) => ${said}.test(name))))`;
  const { code, stdout, stderr } = await runEp(['run', '-n', String(count), ...program(source)], surrounding);
  expect({ code, stderr }).toEqual({ code: 0, stderr: '' });
  const lines = [...stdout.matchAll(/^\[rank (\d+)\] (.*)$/gm)];
  expect(lines).toHaveLength(count);
  return new Map(lines.map(([, rank, text]) => [Number(rank), Object.fromEntries(JSON.parse(text!))]));
}

describe('ep run', () => {
  it('gives each rank the environment contract, and removes the store afterwards', async () => {
    const ranks = [...(await environmentsOf(3)).entries()];
    for (const [rank, { MASTER_PORT, EP_STORE, TORCHELASTIC_RUN_ID, ...env }] of ranks) {
      expect(env).toEqual({
        RANK: String(rank),
        WORLD_SIZE: '3',
        LOCAL_RANK: String(rank),
        LOCAL_WORLD_SIZE: '3',
        GROUP_RANK: '0',
        GROUP_WORLD_SIZE: '1',
        ROLE_NAME: 'default',
        ROLE_RANK: String(rank),
        ROLE_WORLD_SIZE: '3',
        MASTER_ADDR: '127.0.0.1',
        TORCHELASTIC_RESTART_COUNT: '0',
        TORCHELASTIC_MAX_RESTARTS: '0',
        TORCHELASTIC_USE_AGENT_STORE: 'False',
      });
      expect(Number(MASTER_PORT)).toBeGreaterThan(0);
      expect(TORCHELASTIC_RUN_ID).toMatch(/^[-0-9a-f]{36}$/);
      expect(existsSync(dirname(EP_STORE!.replace(/^file:/, '')))).toBe(false);
    }
    for (const name of ['MASTER_PORT', 'EP_STORE', 'TORCHELASTIC_RUN_ID']) {
      expect(new Set(ranks.map(([, env]) => env[name])).size).toBe(1);
    }
  });

  it('lets nothing of a surrounding torchrun through to the ranks', async () => {
    const outer = {
      RANK: '7',
      GROUP_RANK: '5',
      GROUP_WORLD_SIZE: '9',
      ROLE_NAME: 'trainer',
      ROLE_RANK: '7',
      ROLE_WORLD_SIZE: '18',
      MASTER_ADDR: 'node-0',
      MASTER_PORT: '29500',
      TORCHELASTIC_RUN_ID: 'outer',
      TORCHELASTIC_RESTART_COUNT: '3',
      TORCHELASTIC_MAX_RESTARTS: '4',
      TORCHELASTIC_USE_AGENT_STORE: 'True',
      TORCHELASTIC_ERROR_FILE: 'errors.json',
    };
    const [inside, outside] = [await environmentsOf(1, outer), await environmentsOf(1)];
    expect(Object.keys(inside.get(0)!).sort()).toEqual(Object.keys(outside.get(0)!).sort());
    for (const [name, value] of Object.entries(outer)) expect(inside.get(0)![name]).not.toBe(value);
  });

  it('meets through EP_STORE', async () => {
    const core = import.meta.resolve('@ep/core');
    const source = `import(${JSON.stringify(core)}).then(async ({ readLaunchEnv, openFileStore }) => {
      const env = readLaunchEnv();
      const store = await openFileStore(env.store.path);
      console.log('sum', await store.add('ranks', env.rank + 1));
      await store.close();
    })`;
    const { code, stdout } = await runEp(['run', '-n', '2', ...program(source)]);
    expect(code).toBe(0);
    expect(stdout).toMatch(/sum 3/);
  });

  it('stops the rest at the first failure and passes its status on', async () => {
    const source = `if (process.env.RANK === '1') setTimeout(() => process.exit(7), 300); else { ${patient} }`;
    const { code, stdout, stderr } = await runEp(['run', '-n', '3', ...program(source)]);
    expect(code).toBe(7);
    expect(stderr).toContain('rank 1 ended with status 7; the other ranks were stopped');
    const pids = pidsIn(stdout);
    expect(pids).toHaveLength(2);
    expect(pids.filter(isAlive)).toEqual([]);
  });

  it('kills a rank that does not stop when told to', async () => {
    const source = `if (process.env.RANK === '1') setTimeout(() => process.exit(3), 500); else { ${deaf} }`;
    const { code, stdout } = await runEp(['run', '-n', '2', '--grace', '1', ...program(source)]);
    expect(code).toBe(3);
    expect(stdout).toContain('[rank 0] got SIGTERM');
    expect(pidsIn(stdout).filter(isAlive)).toEqual([]);
  });

  it('gives 128 + the number of the signal that ended a rank', async () => {
    const source = `if (process.env.RANK === '0') process.kill(process.pid, 'SIGKILL'); else { ${patient} }`;
    const { code, stderr } = await runEp(['run', '-n', '2', ...program(source)]);
    expect(code).toBe(137);
    expect(stderr).toContain('rank 0 was ended by SIGKILL (status 137)');
  });

  it('lets the others finish with --keep-going, and still fails', async () => {
    const source = `if (process.env.RANK === '0') process.exit(5); setTimeout(() => console.log('finished'), 600)`;
    const { code, stdout } = await runEp(['run', '-n', '3', '--keep-going', ...program(source)]);
    expect(code).toBe(5);
    expect(stdout.match(/finished/g)).toHaveLength(2);
  });

  for (const [signal, status] of [
    ['SIGINT', 130],
    ['SIGTERM', 143],
    ['SIGHUP', 129],
    ['SIGQUIT', 131],
  ] as const) {
    it(`passes ${signal} on to every rank and ends with ${status}`, async () => {
      const source = `process.on('${signal}', () => { console.log('got ${signal}'); process.exit(0); }); ${patient}`;
      const run = startEp(['run', '-n', '2', ...program(source)]);
      const pids = await startedPids(run, 2);
      run.child.kill(signal);
      const { code, stdout } = await run.finished;
      expect(code).toBe(status);
      expect(stdout.match(new RegExp(`got ${signal}`, 'g'))).toHaveLength(2);
      expect(pids.filter(isAlive)).toEqual([]);
    });
  }

  it('passes SIGUSR2 on to the ranks, not to their children, where ranks dump on it', async () => {
    const source = `const child = require('node:child_process').spawn('sleep', ['60']);
      child.on('exit', () => console.log('lost a child'));
      process.on('SIGUSR2', () => { console.log('got SIGUSR2'); setTimeout(() => process.exit(0), 200); });
      console.log('pid', process.pid); setInterval(() => {}, 1000);`;
    const run = startEp(['run', '-n', '2', ...program(source)], { EP_TRACE_DIR: tmpdir() });
    await startedPids(run, 2);
    run.child.kill('SIGUSR2');
    const { code, stdout } = await run.finished;
    expect(code).toBe(0);
    expect(stdout.match(/got SIGUSR2/g)).toHaveLength(2);
    expect(stdout).not.toContain('lost a child');
    const without = startEp(['run', '-n', '1', ...program(patient)], { EP_TRACE_DIR: '' });
    const pids = await startedPids(without, 1);
    without.child.kill('SIGUSR2');
    expect((await without.finished).signal).toBe('SIGUSR2');
    expect(await untilGone(pids, 10_000)).toEqual([]);
  });

  it('leaves neither a rank nor a file behind when it is killed itself, not even a rank that ignores signals', async () => {
    // Silent, since a write to the launcher's pipe would end it: only SIGKILL can.
    const stubborn = `for (const s of ['SIGTERM', 'SIGINT', 'SIGHUP', 'SIGPIPE']) process.on(s, () => {});
      require('node:fs').writeFileSync(process.env.EP_STORE.slice(5) + process.env.RANK, ''); ${patient}`;
    const temporary = mkdtempSync(join(tmpdir(), 'ep-run-test-'));
    try {
      const run = startEp(['run', '-n', '2', '--json', ...program(stubborn)], { TMPDIR: temporary });
      const pids = await startedPids(run, 2);
      expect(readdirSync(temporary)).toHaveLength(1);
      run.child.kill('SIGKILL');
      const killed = Date.now();
      expect((await run.finished).signal).toBe('SIGKILL');
      expect(await untilGone(pids, 10_000)).toEqual([]);
      // 0.8 s on an idle machine; the bound leaves room for a busy one.
      expect(Date.now() - killed).toBeLessThan(5000);
      await untilEmpty(temporary);
    } finally {
      rmSync(temporary, { recursive: true, force: true });
    }
  });

  it('kills what a rank leaves running', async () => {
    const source = `const c = require('node:child_process').spawn(process.execPath, ['-e', 'setInterval(() => {}, 1000)'], { stdio: 'inherit' });
      c.unref(); console.log('pid', c.pid); setTimeout(() => process.exit(0), 100);`;
    const { code, stdout } = await runEp(['run', '-n', '1', ...program(source)]);
    expect(code).toBe(0);
    expect(pidsIn(stdout)).toHaveLength(1);
    expect(await untilGone(pidsIn(stdout), 5000)).toEqual([]);
  });

  it('ends although a descendant in a session of its own holds the pipes', async () => {
    const source = `const c = require('node:child_process').spawn('sleep', ['30'], { stdio: 'inherit', detached: true });
      c.unref(); console.log('pid', c.pid); process.exit(0);`;
    const before = Date.now();
    const { code, stdout } = await runEp(['run', '-n', '1', ...program(source)]);
    for (const pid of pidsIn(stdout)) process.kill(pid, 'SIGKILL');
    expect(code).toBe(0);
    expect(Date.now() - before).toBeLessThan(20_000);
  });

  it('writes one JSON event per line', async () => {
    const source = `process.stdout.write('é without newline'); console.error('to stderr')`;
    const { code, stdout, stderr } = await runEp(['run', '-n', '2', '--json', ...program(source)]);
    expect({ code, stderr }).toEqual({ code: 0, stderr: '' });
    const events = stdout
      .trimEnd()
      .split('\n')
      .map((line) => JSON.parse(line) as LaunchEvent | { readonly event: 'end'; readonly code: number });
    expect(events.at(-1)).toEqual({ event: 'end', code: 0 });
    for (const rank of [0, 1]) {
      const own = events.filter((event) => 'rank' in event && event.rank === rank);
      expect(own[0]).toMatchObject({ event: 'start', pid: expect.any(Number) });
      expect(own).toContainEqual({ event: 'line', rank, stream: 'stdout', text: 'é without newline' });
      expect(own).toContainEqual({ event: 'line', rank, stream: 'stderr', text: 'to stderr' });
      expect(own.at(-1)).toEqual({ event: 'exit', rank, code: 0, signal: null });
    }
  });

  it('keeps the streams apart and uses no colour in a pipe', async () => {
    const { stdout, stderr } = await runEp(['run', '-n', '1', ...program(`console.log('out'); console.error('err')`)]);
    expect(stdout).toBe('[rank 0] out\n');
    expect(stderr).toBe('[rank 0] err\n');
  });

  it('names a program that cannot be started, and leaves none running', async () => {
    const { code, stderr, stdout } = await runEp(['run', '-n', '2', '--', './no-such-program']);
    expect({ code, stdout }).toEqual({ code: 1, stdout: '' });
    expect(stderr).toContain('rank 0: cannot start ./no-such-program: no such program [EP_SYSTEM]');
    const json = await runEp(['run', '-n', '1', '--json', '--', './no-such-program']);
    expect(JSON.parse(json.stdout)).toMatchObject({
      error: { code: 'EP_SYSTEM', context: { rank: 0, errno: 'ENOENT' } },
    });
  });

  it('refuses a command line that it does not understand, with --json as one object', async () => {
    for (const args of [
      ['run', '--', 'true'],
      ['run', '-n', '0', '--', 'true'],
      ['run', '-n', '2'],
      ['run', '-n', '2', '--', ''],
      ['nonsense'],
    ]) {
      const { code, stderr } = await runEp(args);
      expect(code).toBe(2);
      expect(stderr).toContain('error:');
    }
    for (const args of [
      ['run', '--json', '--', 'true'],
      ['plan', '--json'],
      ['doctor', '--json', '--nope'],
      ['--json'],
    ]) {
      const { code, stdout, stderr } = await runEp(args);
      expect({ code, stderr }).toEqual({ code: 2, stderr: '' });
      expect(stdout.trimEnd().split('\n')).toHaveLength(1);
      const { error } = JSON.parse(stdout) as { readonly error: Readonly<Record<string, unknown>> };
      expect(error).toMatchObject({ code: 'EP_INVALID_ARGUMENT', context: { usage: expect.stringMatching(/^\w+$/) } });
      expect(error.message).toMatch(/^(say how many ranks|missing required argument|unknown option) /);
    }
    // Options that are understood one by one, and do not fit together.
    const misused = await runEp(['bench', 'plan', '--ranks', '2', '--json']);
    expect(misused).toMatchObject({ code: 2, stderr: '' });
    expect(JSON.parse(misused.stdout)).toEqual({
      error: { code: 'EP_INVALID_ARGUMENT', message: 'bench plan takes no --ranks', context: { name: 'plan' } },
    });
    // What belongs to the program does not count.
    expect((await runEp(['run', '--', 'true', '--json'])).stderr).toContain('error:');
  });
});

describe('lines', () => {
  const linesOf = (...chunks: readonly (string | Buffer)[]): string[] => {
    const lines: string[] = [];
    const splitter = new LineSplitter((line) => lines.push(line));
    for (const chunk of chunks) splitter.push(Buffer.from(chunk));
    splitter.end();
    return lines;
  };

  it('joins chunks and keeps empty lines', () => {
    expect(linesOf('a', 'b\n\nc', '\r\nd')).toEqual(['ab', '', 'c', 'd']);
  });

  it('keeps a character whole that arrives in two chunks', () => {
    const bytes = Buffer.from('é\n');
    expect(linesOf(bytes.subarray(0, 1), bytes.subarray(1))).toEqual(['é']);
  });

  it('passes a line without end on in pieces', () => {
    const lines = linesOf(Buffer.alloc(longestLine, 'x'), 'y');
    expect(lines.map((line) => line.length)).toEqual([longestLine, 1]);
  });
});
