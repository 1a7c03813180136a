/** The training ends with the same bits whoever is killed, and whenever: real processes, real signals. */
import { execFile } from 'node:child_process';
import { mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';

const run = promisify(execFile);
const PROGRAM = fileURLToPath(new URL('main.mjs', import.meta.url));
const RANKS = [0, 1, 2, 3];
/** As in train.mjs. */
const STEPS_SHORT_HANDED = 4;
const HUNG_MS = 50_000;

type Event = { readonly rank: number } & (
  | { readonly event: 'started'; readonly pid: number }
  | { readonly event: 'ended'; readonly pid: number; readonly code: number | null; readonly signal: string | null }
  | { readonly event: 'step'; readonly step: number; readonly loss: number; readonly active: readonly number[] }
  | { readonly event: 'lost'; readonly step: number; readonly lost: readonly number[] }
  | { readonly event: 'died'; readonly step: number; readonly moment: string }
  | { readonly event: 'joined'; readonly step: number }
  | {
      readonly event: 'done';
      readonly losses: readonly number[];
      readonly weights: string;
      readonly velocity: string;
    }
);

interface Run {
  readonly events: readonly Event[];
  readonly log: string;
}

const SMALL = ['--steps', '24'];
/** An all-reduce of 4.8 MB for each shard: long enough to die in the middle of it. */
const LARGE = ['--steps', '12', '--hidden', '32768', '--batch', '1'];

let folder: string;

beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'ep-data-parallel-'));
});

afterEach(() => {
  rmSync(folder, { recursive: true });
});

function isAlive(pid: number): boolean {
  try {
    return process.kill(pid, 0);
  } catch {
    return false;
  }
}

/** Nothing is left behind: neither a process nor a file. */
async function train(ranks: number, settings: readonly string[]): Promise<Run> {
  const { stdout, stderr } = await run(process.execPath, [PROGRAM, '--json', '--ranks', `${ranks}`, ...settings], {
    env: { ...process.env, TMPDIR: folder },
    timeout: HUNG_MS,
  });
  const events = stdout
    .trim()
    .split('\n')
    .map((line) => JSON.parse(line) as Event);
  const started = all(events, 'started').map(({ pid }) => pid);
  expect(
    all(events, 'ended')
      .map(({ pid }) => pid)
      .sort(),
  ).toEqual([...started].sort());
  expect(started.filter(isAlive)).toEqual([]);
  expect(readdirSync(folder)).toEqual([]);
  return { events, log: stderr };
}

const all = <K extends Event['event']>(events: readonly Event[], kind: K): Extract<Event, { event: K }>[] =>
  events.filter((event): event is Extract<Event, { event: K }> => event.event === kind);

/** By the program itself in one process, which computes all shards. */
function expectSameAsAlone({ events }: Run, alone: Run): void {
  const [reference] = all(alone.events, 'done');
  const { losses, weights, velocity } = reference!;
  const ends = all(events, 'done').sort((a, b) => a.rank - b.rank);
  expect(ends).toMatchObject(RANKS.map((rank) => ({ rank, losses, weights, velocity })));
}

const mean = (numbers: readonly number[]): number => numbers.reduce((sum, one) => sum + one, 0) / numbers.length;

function expectLearned({ events }: Run): void {
  const { losses } = all(events, 'done')[0]!;
  const third = losses.length / 3;
  expect(mean(losses.slice(-third))).toBeLessThan(0.75 * mean(losses.slice(0, third)));
}

/** Every death ended the same step on all survivors, who went on without and took the newcomer in. */
function expectRecovered({ events, log }: Run, killed: readonly number[], moment: string): void {
  const deaths = all(events, 'died');
  const { losses } = all(events, 'done')[0]!;
  expect(deaths.map(({ rank }) => rank)).toEqual(killed);
  for (const death of deaths) {
    const survivors = RANKS.filter((rank) => rank !== death.rank);
    expect(death.moment).toBe(moment);
    const told = all(events, 'lost').filter(({ lost }) => lost.includes(death.rank));
    expect(told.map(({ rank }) => rank).sort()).toEqual(survivors);
    for (const { step, lost } of told) expect({ step, lost }).toEqual({ step: death.step, lost: [death.rank] });
    const joined = all(events, 'joined').filter(({ rank }) => rank === death.rank);
    expect(joined).toHaveLength(1);
    const back = joined[0]!.step;
    expect(back).toBe(Math.min(death.step + STEPS_SHORT_HANDED, losses.length));
    for (const { rank, step, active } of all(events, 'step')) {
      if (step >= death.step && step < back) expect({ rank, active }).toEqual({ rank, active: survivors });
      else if (step === death.step - 1 || step === back) expect({ rank, active }).toEqual({ rank, active: RANKS });
    }
    expect(log).toMatch(
      new RegExp(
        `^rank ${death.rank} was killed ${moment} the all-reduce of step ${death.step}; ranks ${survivors.join(' ')} knew it after [\\d.]+ ms and had done step ${death.step} after [\\d.]+ ms$`,
        'm',
      ),
    );
  }
  const steps = all(events, 'step').filter(({ rank }) => !killed.includes(rank));
  for (const rank of RANKS.filter((one) => !killed.includes(one))) {
    const mine = steps.filter((step) => step.rank === rank).map(({ step }) => step);
    expect(mine).toEqual(mine.map((_, i) => i));
  }
  expect(log.trimEnd().split('\n').at(-1)).toMatch(/^\d+ steps, loss .+, all ranks have the weights [0-9a-f]{16}$/);
}

describe('small gradients', () => {
  it('rank 2 is killed, later rank 0, each between two all-reduces', async () => {
    const [alone, four] = [await train(1, SMALL), await train(4, [...SMALL, '--kill', '2@5', '--kill', '0@14'])];
    expectRecovered(four, [2, 0], 'before');
    expectSameAsAlone(four, alone);
    expectLearned(four);
  });
});

describe('gradients of megabytes', () => {
  it.each([0, 2])('rank %i is killed inside the all-reduces of a step', async (rank) => {
    const [alone, four] = [await train(1, LARGE), await train(4, [...LARGE, '--kill', `${rank}@3:inside`])];
    expectRecovered(four, [rank], 'inside');
    expectSameAsAlone(four, alone);
    expectLearned(four);
  });
});
