/** The launcher as programs use it: what it resolves with, and what is left where ranks cannot be started. */
import { ChildProcess, spawn } from 'node:child_process';
import { beforeEach, describe, expect, it, vi } from 'vitest';
import { type LaunchEvent, type LaunchOptions, launchRanks } from '../src/run/launch.js';
import { isAlive } from './ep.js';

vi.mock('node:child_process', async (load) => {
  const real = await load<typeof import('node:child_process')>();
  return { ...real, spawn: vi.fn(real.spawn) };
});

const patient = 'setInterval(() => {}, 1000)';

/** Ranks of a program, and what it said of them. */
function launched(source: string, options: Partial<LaunchOptions> = {}) {
  const events: LaunchEvent[] = [];
  const done = launchRanks({
    ranks: 1,
    program: process.execPath,
    args: ['-e', source],
    onEvent: (event) => events.push(event),
    ...options,
  });
  const pids = () => events.flatMap((event) => (event.event === 'start' ? [event.pid] : []));
  return { done, pids };
}

describe('a launch that its signal stops', () => {
  it.each([
    ['SIGINT', 130],
    [new Error('for a reason of its own'), 143],
  ])('resolves with 128 + the number of the signal that was passed on: %s', async (reason, code) => {
    const stop = new AbortController();
    const onEvent = (event: LaunchEvent): void => {
      if (event.event === 'line') stop.abort(reason);
    };
    // It answers with status 0.
    const source = `for (const s of ['SIGINT', 'SIGTERM']) process.on(s, () => process.exit(0)); console.log('here'); ${patient}`;
    const result = await launched(source, { onEvent, signal: stop.signal }).done;
    expect(result).toEqual({ code, exits: [{ rank: 0, code: 0, signal: null }] });
  });

  it('before it began has started nothing, and is no success', async () => {
    expect(await launched(patient, { signal: AbortSignal.abort('SIGHUP') }).done).toEqual({ code: 129, exits: [] });
  });

  it('after a rank had failed resolves with the status of that rank', async () => {
    const stop = new AbortController();
    const onEvent = (event: LaunchEvent): void => {
      if (event.event === 'exit') stop.abort('SIGINT');
    };
    const source = `if (process.env.RANK === '0') process.exit(7); ${patient}`;
    const { done } = launched(source, { ranks: 2, keepGoing: true, onEvent, signal: stop.signal });
    expect(await done).toMatchObject({ code: 7, failed: { rank: 0 } });
  });
});

const { spawn: real } = await vi.importActual<typeof import('node:child_process')>('node:child_process');

describe('a rank that cannot be started', () => {
  beforeEach(() => void vi.mocked(spawn).mockReset().mockImplementation(real));

  /** From rank 1 on. */
  function failing(how: () => ChildProcess): void {
    let ranks = 0;
    vi.mocked(spawn).mockImplementation(((program: string, ...more: [string[], object]) =>
      program === process.execPath && ++ranks > 1 ? how() : real(program, ...more)) as typeof spawn);
  }

  it.each([
    [
      'ENOMEM',
      'thrown by spawn',
      () => {
        throw Object.assign(new Error('spawn ENOMEM'), { code: 'ENOMEM' });
      },
    ],
    [
      'EMFILE',
      'told by a child without streams',
      () => {
        const child = new ChildProcess();
        process.nextTick(() => child.emit('error', Object.assign(new Error('spawn EMFILE'), { code: 'EMFILE' })));
        return child;
      },
    ],
  ])('for %s, %s, is named, and those before it are stopped', async (errno, _, how) => {
    failing(how);
    const { done, pids } = launched(patient, { ranks: 3 });
    await expect(done).rejects.toMatchObject({ code: 'EP_SYSTEM', context: { rank: 1, errno } });
    expect(pids()).toHaveLength(1);
    expect(pids().filter(isAlive)).toEqual([]);
  });

  it('for want of descriptors for the guardian is started without one', async () => {
    vi.mocked(spawn).mockImplementationOnce(() => new ChildProcess());
    await expect(launched('', {}).done).resolves.toMatchObject({ code: 0 });
    vi.mocked(spawn).mockImplementationOnce(() => {
      throw new Error('spawn ENOMEM');
    });
    await expect(launched('', {}).done).resolves.toMatchObject({ code: 0 });
  });
});

describe('a launch that is wrong', () => {
  const wrong = <K extends keyof LaunchOptions>(name: K, value: unknown, what: string = name) =>
    [`${what} ${String(value)}`, { [name]: value } as Partial<LaunchOptions>, what] as const;

  it.each([
    wrong('program', ''),
    wrong('program', undefined),
    wrong('program', 'a\0b'),
    wrong('args', undefined),
    wrong('args', 'x'),
    wrong('args', [1], 'args[0]'),
    wrong('args', ['a', 'a\0b'], 'args[1]'),
    wrong('onEvent', undefined),
    wrong('graceMs', -1),
    wrong('graceMs', Number.NaN),
    wrong('graceMs', 2 ** 31),
    wrong('env', { A: 1 }, 'env.A'),
    wrong('keepGoing', 1),
    wrong('place', 1),
    wrong('signal', {}),
  ])('is refused before anything starts: %s', async (_, options, what) => {
    vi.mocked(spawn).mockClear();
    await expect(launched(patient, options).done).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      context: { what },
    });
    expect(spawn).not.toHaveBeenCalled();
  });

  it('in all is refused', async () => {
    await expect(launchRanks(undefined as never)).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
  });
});

describe('a program that throws in onEvent', () => {
  // Rank 0 ends, so that there is an exit, too; the other answers to no SIGTERM.
  const source = `process.on('SIGTERM', () => {}); console.log('here'); process.env.RANK === '0' || ${patient}`;

  it.each(['start', 'line', 'exit'] as const)('for %s gets that back, once no rank is left', async (when) => {
    const pids: number[] = [];
    let told = 0;
    const onEvent = (event: LaunchEvent): void => {
      if (event.event === 'start') pids.push(event.pid);
      if (event.event !== when) return;
      told++;
      throw new Error(`thrown for ${when}`);
    };
    await expect(launched(source, { ranks: 3, onEvent }).done).rejects.toThrow(`thrown for ${when}`);
    expect(pids.length).toBeGreaterThan(0);
    expect(pids.filter(isAlive)).toEqual([]);
    expect(told).toBe(1);
  });
});
