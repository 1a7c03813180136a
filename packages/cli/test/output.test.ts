/** Commands whose output nobody takes: its reader has gone, or the disk is full. */
import { spawn } from 'node:child_process';
import { closeSync, openSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
import { CommandExit } from '../src/failure.js';
import { untilStopped } from '../src/stop.js';
import { bin, isAlive, startEp, untilGone } from './ep.js';

const program = (source: string): string[] => ['--', process.execPath, '-e', source];
const wqe = ['wqe', 'decode', '--nic', 'efa', '00'.repeat(64)];

/** With stdout on a disk that is full. */
async function runEpOnFullDisk(args: readonly string[]): Promise<{ readonly code: number | null; stderr: string }> {
  const full = openSync('/dev/full', 'w');
  const child = spawn(process.execPath, [bin, ...args], { stdio: ['ignore', full, 'pipe'] });
  closeSync(full);
  let stderr = '';
  child.stderr!.setEncoding('utf8').on('data', (text: string) => {
    stderr += text;
  });
  return new Promise((resolve) => child.on('close', (code) => resolve({ code, stderr })));
}

describe('a command whose reader has gone', () => {
  it.each([[['--help']], [wqe], [[...wqe, '--json']], [['doctor']]])(
    'ends as SIGPIPE would, quietly: %j',
    async (args) => {
      const run = startEp(args);
      run.child.stdout!.destroy();
      expect(await run.finished).toMatchObject({ code: 141, stderr: '' });
    },
  );

  it('of stderr ends so, too', async () => {
    const run = startEp(['plan', 'no-such-file.json']);
    run.child.stderr!.destroy();
    expect(await run.finished).toMatchObject({ code: 141, stdout: '' });
  });

  it.each(['stdout', 'stderr'] as const)('of %s has its ranks stopped in order', async (stream) => {
    const method = stream === 'stdout' ? 'log' : 'error';
    const other = stream === 'stdout' ? 'error' : 'log';
    const source = `process.on('SIGTERM', () => { console.${other}('got SIGTERM'); process.exit(0); });
      console.${other}('pid', process.pid); console.log('started'); setInterval(() => console.${method}('more'), 10);`;
    const run = startEp(['run', '-n', '1', ...program(source)]);
    await run.seen(/started/);
    run.child[stream]!.destroy();
    const { code, stdout, stderr } = await run.finished;
    expect(code).toBe(141);
    const said = stream === 'stdout' ? stderr : stdout;
    expect(said).toContain('got SIGTERM');
    const pids = [...said.matchAll(/pid (\d+)/g)].map((match) => Number(match[1]));
    expect(pids).toHaveLength(1);
    expect(pids.filter(isAlive)).toEqual([]);
  });

  it('stops what it waits for', async () => {
    const lost = (signal: AbortSignal): Promise<never> =>
      new Promise((_, reject) => {
        signal.addEventListener('abort', () => reject(signal.reason));
        process.stderr.emit('error', Object.assign(new Error('write EPIPE'), { code: 'EPIPE' }));
      });
    await expect(untilStopped('demo', lost)).rejects.toMatchObject({ status: 141, stream: 'stderr' });
    // What stopped it counts, whatever came of that.
    const failed = (signal: AbortSignal) => lost(signal).catch(() => Promise.reject(new Error('no result')));
    await expect(untilStopped('demo', failed)).rejects.toBeInstanceOf(CommandExit);
  });
});

describe('a command whose disk is full', () => {
  const told = 'ep: cannot write stdout: the file system is full (ENOSPC) [EP_SYSTEM]\n';

  it.each([[wqe], [[...wqe, '--json']]])('says so: %j', async (args) => {
    expect(await runEpOnFullDisk(args)).toEqual({ code: 1, stderr: told });
  });

  it('has its ranks stopped', async () => {
    const source = `console.error('pid', process.pid); setInterval(() => console.log('more'), 10);`;
    const { code, stderr } = await runEpOnFullDisk(['run', '-n', '1', ...program(source)]);
    expect(code).toBe(1);
    expect(stderr.endsWith(told)).toBe(true);
    const pids = [...stderr.matchAll(/pid (\d+)/g)].map((match) => Number(match[1]));
    expect(pids).toHaveLength(1);
    expect(await untilGone(pids, 5000)).toEqual([]);
  });
});
