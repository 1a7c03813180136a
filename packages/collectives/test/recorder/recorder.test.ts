import { chmodSync, mkdtempSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { EpError } from '@ep/core';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { MOST_FILES } from '../../src/recorder/dump-file.js';
import { readTraceDump, type TraceDump } from '../../src/recorder/dump-format.js';
import { FlightRecorder, type RecordedGroup } from '../../src/recorder/recorder.js';
import { RING_CALLS } from '../../src/recorder/ring.js';
import type { CallEntry } from '../../src/recorder/types.js';

let folder: string;
const closers: (() => void)[] = [];

beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'ep-recorder-test-'));
});
afterEach(() => {
  for (const close of closers.splice(0)) close();
  vi.restoreAllMocks();
  vi.useRealTimers();
  rmSync(folder, { recursive: true, force: true });
});

const world: RecordedGroup = { name: 'world', ranks: [0, 1, 2], rank: 1, view: () => ({ epoch: 4, active: [0, 1] }) };

function opened(to: string | undefined = folder, group = world): FlightRecorder {
  const recorder = new FlightRecorder({ world: 'world', rank: 1, size: 3, folder: to });
  closers.push(recorder.openGroup(group));
  return recorder;
}

const call = (sequence: number, fields: Partial<CallEntry> = {}): CallEntry => ({
  group: 'world',
  rank: 1,
  kind: 'all-reduce',
  op: 'allReduce',
  sequence,
  dtype: 'f32',
  elements: 8,
  bytes: 32,
  root: -1,
  reduceOp: 'sum',
  peer: -1,
  tag: -1,
  ...fields,
});

const message = (fields: Partial<CallEntry>): CallEntry =>
  call(1, { kind: 'send', op: 'send', reduceOp: '', peer: 2, tag: 5, ...fields });

const timedOut = () => new EpError('EP_TIMEOUT', 'ranks 2 did not come', { context: { awaited: [2] } });

/** Fails the next call of `sequence`. */
function fail(recorder: FlightRecorder, sequence: number, error: unknown): void {
  recorder.end(recorder.begin(call(sequence)), 'failed', error);
}

const read = (path: string): TraceDump => readTraceDump(JSON.parse(readFileSync(path, 'utf8')), path);
const files = (): string[] => readdirSync(folder).sort();

it('dumps a group that has grown so that it can be read', () => {
  const grown: RecordedGroup = { ...world, view: () => ({ epoch: 5, active: [0, 1, 2, 4] }) };
  const recorder = opened(folder, grown);
  expect(read(recorder.dump()).groups[0]).toMatchObject({ ranks: [0, 1, 2, 3, 4], active: [0, 1, 2, 4] });
});
const dumps = (): TraceDump[] => files().map((name) => read(join(folder, name)));
/** A turn in which timers that are due have run. */
const turn = () => new Promise((resolve) => setTimeout(resolve, 20));

describe('the ring of a flight recorder', () => {
  it('keeps the last thousand calls, and how far each group came', () => {
    const recorder = opened();
    for (let sequence = 1; sequence <= 2 * RING_CALLS + 345; sequence++)
      recorder.end(recorder.begin(call(sequence)), 'done');
    const entries = recorder.entries();
    expect(entries.map((entry) => entry.sequence)).toEqual(
      Array.from({ length: RING_CALLS }, (_, i) => RING_CALLS + 346 + i),
    );
    const dump = read(recorder.dump());
    expect(dump).toMatchObject({ recorded: 2345, capacity: 1000, groups: [{ entered: 2345, ended: 2345 }] });
    expect(dump.entries).toEqual(entries);
  });

  it('keeps what it was told, not the entry, which is filled anew', () => {
    const recorder = opened();
    const entry = { ...call(1, { root: 2 }) };
    recorder.begin(entry);
    Object.assign(entry, message({ sequence: 9 }));
    const token = recorder.begin(entry);
    Object.assign(entry, call(99));
    recorder.end(token, 'done');
    const [first, second, ...rest] = recorder.entries();
    expect(rest).toEqual([]);
    expect(first).toMatchObject({
      group: 'world',
      kind: 'all-reduce',
      op: 'allReduce',
      sequence: 1,
      dtype: 'f32',
      elements: 8,
      bytes: 32,
      root: 2,
      reduceOp: 'sum',
      epoch: 4,
      state: 'started',
      endedUs: null,
    });
    expect(first).not.toHaveProperty('peer');
    expect(second).toMatchObject({ kind: 'send', sequence: 9, peer: 2, tag: 5, state: 'done' });
    for (const absent of ['root', 'reduceOp', 'code']) expect(second).not.toHaveProperty(absent);
  });

  it('finds nothing for the end of a call that was overwritten', () => {
    const recorder = opened();
    const lost = recorder.begin(call(1));
    for (let sequence = 2; sequence <= RING_CALLS + 1; sequence++) recorder.begin(call(sequence));
    recorder.end(lost, 'failed', timedOut());
    const entries = recorder.entries();
    expect(entries).toHaveLength(RING_CALLS);
    expect(entries.filter((entry) => entry.state === 'failed')).toEqual([]);
    expect(entries.map((entry) => entry.sequence).slice(-1)).toEqual([RING_CALLS + 1]);
  });

  it('shows nothing of the call whose row it uses again', () => {
    const recorder = opened();
    for (let sequence = 1; sequence <= RING_CALLS; sequence++) fail(recorder, sequence, timedOut());
    recorder.begin(call(RING_CALLS + 1));
    expect(recorder.entries().at(-2)).toMatchObject({ code: 'EP_TIMEOUT', endedUs: expect.any(Number) });
    const last = recorder.entries().at(-1);
    expect(last).toMatchObject({ state: 'started', endedUs: null });
    expect(last).not.toHaveProperty('code');
  });

  it('says which call is the oldest and which wait behind it', () => {
    const recorder = opened();
    const tokens = [1, 2, 3].map((sequence) => recorder.begin(call(sequence)));
    recorder.begin(message({ sequence: 1 }));
    const states = () => recorder.entries().map((entry) => entry.state);
    expect(states()).toEqual(['started', 'queued', 'queued', 'started']);
    recorder.end(tokens[0]!, 'done');
    expect(states()).toEqual(['done', 'started', 'queued', 'started']);
    recorder.end(tokens[1]!, 'failed', timedOut());
    recorder.end(tokens[2]!, 'aborted', new DOMException('enough', 'AbortError'));
    expect(states()).toEqual(['done', 'failed', 'aborted', 'started']);
    expect(recorder.entries().map((entry) => entry.code)).toEqual([undefined, 'EP_TIMEOUT', 'AbortError', undefined]);
  });

  it('starts a call when the one before it ends', () => {
    const now = vi.spyOn(performance, 'now');
    const recorder = opened();
    const at = (ms: number) => now.mockReturnValue(ms);
    at(100);
    const first = recorder.begin(call(1));
    at(101);
    const second = recorder.begin(call(2));
    at(105);
    recorder.end(first, 'done');
    at(107);
    recorder.end(second, 'done');
    at(110);
    recorder.begin(call(3));
    const start = recorder.entries()[0]!.queuedUs!;
    const since = (time: number | null) => (time === null ? null : time - start);
    expect(
      recorder.entries().map((entry) => [since(entry.queuedUs), since(entry.startedUs), since(entry.endedUs)]),
    ).toEqual([
      [0, 0, 5000],
      [1000, 5000, 7000],
      [10000, 10000, null],
    ]);
  });

  it('reads the clock for every slow call, and for few in a loop of fast ones, on every rank for the same', () => {
    let clock = 1000;
    const now = vi.spyOn(performance, 'now').mockImplementation(() => clock);
    const loop = (recorder: FlightRecorder, from: number, count: number, ms: number): number => {
      const before = now.mock.calls.length;
      for (let sequence = from; sequence < from + count; sequence++) {
        clock += ms;
        recorder.end(recorder.begin(call(sequence)), 'done');
      }
      return now.mock.calls.length - before;
    };
    const [one, other] = [opened(), opened()] as const;
    expect(loop(one, 1, 500, 0.1)).toBe(1000);
    expect(loop(one, 501, 16_000, 0.0005)).toBeLessThan(16_000 / 6);
    loop(other, 1, 16_500, 0.0002);
    // The epoch is asked of the engine as rarely.
    for (const entry of [...one.entries(), ...other.entries()])
      expect(entry.epoch).toBe(entry.queuedUs === null ? undefined : 4);
    const timed = (recorder: FlightRecorder) =>
      recorder.entries().flatMap((entry) => (entry.queuedUs === null ? [] : [entry.sequence]));
    const both = timed(one).filter((sequence) => timed(other).includes(sequence));
    expect(both.length).toBeGreaterThanOrEqual(Math.floor(RING_CALLS / 16));
    // A failure gets its time whatever the clock has cost.
    fail(one, 16_502, timedOut());
    expect(one.entries().at(-1)).toMatchObject({ state: 'failed', endedUs: expect.any(Number) });
  });

  it('tells groups of one name apart, forgets those long gone, and records only what is open', () => {
    const recorder = new FlightRecorder({ world: 'world', rank: 1, size: 3, folder: undefined });
    expect(recorder.begin(call(1))).toBe(recorder.begin(call(2)));
    recorder.end(recorder.begin(call(1)), 'done');
    expect(recorder.entries()).toEqual([]);
    for (let i = 0; i < 3; i++) {
      const close = recorder.openGroup(world);
      expect(() => recorder.openGroup(world)).toThrow(/name must be one that no open group has, found "world"/);
      recorder.end(recorder.begin(call(1)), 'done');
      close();
      close();
    }
    expect(recorder.entries().map((entry) => entry.group)).toEqual(['world', 'world#2', 'world#3']);
    for (let i = 0; i < 1000; i++) recorder.openGroup({ ...world, name: `short ${i}` })();
    const dump = read(recorder.dump(folder));
    expect(dump.groups.length).toBeLessThan(300);
    expect(dump.groups.slice(0, 3).map((group) => group.name)).toEqual(['world', 'world#2', 'world#3']);
  });
});

describe('dumps of a flight recorder', () => {
  it('hold rank, world, groups, clocks and calls', () => {
    const recorder = opened();
    closers.push(
      recorder.openGroup({
        name: 'pair',
        ranks: [2, 1],
        rank: 1,
        view: () => {
          throw new Error('coming down');
        },
      }),
    );
    recorder.begin(call(1));
    recorder.begin(call(1, { group: 'pair', kind: 'barrier', op: 'barrier', elements: 0, bytes: 0, reduceOp: '' }));
    const path = recorder.dump();
    expect(files()).toEqual([path.slice(folder.length + 1)]);
    const dump = read(path);
    expect(dump).toMatchObject({
      reason: 'call',
      world: 'world',
      rank: 1,
      size: 3,
      process: { pid: process.pid, host: expect.stringMatching(/./), boot: expect.stringMatching(/^[\da-f-]{36}$/) },
      groups: [
        { name: 'world', ranks: [0, 1, 2], rank: 1, epoch: 4, active: [0, 1], closed: false, entered: 1, ended: 0 },
        { name: 'pair', ranks: [2, 1], rank: 1, epoch: 0, active: [], closed: false, entered: 1, ended: 0 },
      ],
    });
    expect(Math.abs(dump.clock.wallUs - Date.now() * 1000)).toBeLessThan(60e6);
    expect(Math.abs(dump.clock.monotonicUs - Number(process.hrtime.bigint() / 1000n))).toBeLessThan(60e6);
    expect(dump.entries.map((entry) => [entry.group, entry.op])).toEqual([
      ['world', 'allReduce'],
      ['pair', 'barrier'],
    ]);
    expect(dump.entries[0]!.queuedUs).toBeLessThanOrEqual(dump.clock.monotonicUs + 1);
  });

  it('come from failures: one for those that come together, with the first as its cause', async () => {
    const recorder = opened();
    const tokens = [1, 2, 3].map((sequence) => recorder.begin(call(sequence)));
    recorder.end(tokens[0]!, 'failed', timedOut());
    for (const token of tokens.slice(1)) recorder.end(token, 'failed', new EpError('EP_POISONED', 'call 1 failed'));
    expect(files()).toEqual([]);
    await turn();
    expect(dumps()).toMatchObject([
      {
        reason: 'timeout',
        cause: { code: 'EP_TIMEOUT', message: 'ranks 2 did not come' },
        entries: [{ code: 'EP_TIMEOUT' }, { code: 'EP_POISONED' }, { code: 'EP_POISONED' }],
      },
    ]);
    // What is poisoned is known by now.
    fail(recorder, 4, new EpError('EP_POISONED', 'call 1 failed'));
    closers.pop()!();
    expect(files()).toHaveLength(1);
  });

  const reasons: readonly [string, 'failed' | 'aborted', unknown, string | undefined][] = [
    ['a lost peer', 'failed', new EpError('EP_PEER_LOST', 'rank 2 died'), 'failure'],
    ['a group that others poisoned', 'failed', new EpError('EP_POISONED', 'rank 0 gave up'), 'failure'],
    ["a foreign error's end", 'failed', new RangeError('odd'), 'failure'],
    ['something thrown that is no error', 'failed', 'odd', 'failure'],
    ["the caller's own deadline", 'aborted', new DOMException('late', 'TimeoutError'), 'timeout'],
    ["the caller's own abort", 'aborted', new DOMException('enough', 'AbortError'), undefined],
    ['closing', 'failed', new EpError('EP_CLOSED', 'closed'), undefined],
  ];
  for (const [what, outcome, error, reason] of reasons) {
    it(`${reason === undefined ? 'do not come' : 'come'} from ${what}`, () => {
      const recorder = opened();
      recorder.end(recorder.begin(call(1)), outcome, error);
      // The last group flushes what is due.
      closers.pop()!();
      expect(dumps().map((dump) => dump.reason)).toEqual(reason === undefined ? [] : [reason]);
    });
  }

  it('do not follow each other closely, and stop at so many files: the first ones stay', () => {
    vi.useFakeTimers();
    const recorder = opened();
    fail(recorder, 1, timedOut());
    vi.advanceTimersByTime(1);
    expect(files()).toHaveLength(1);
    for (let i = 2; i <= 50; i++) {
      fail(recorder, i, new EpError('EP_PEER_LOST', `rank ${i}`));
      vi.advanceTimersByTime(10);
    }
    expect(files()).toHaveLength(1);
    vi.advanceTimersByTime(600);
    expect(dumps().map((dump) => dump.cause?.message)).toEqual(['ranks 2 did not come', 'rank 2']);
    for (let i = 51; i <= 70; i++) {
      fail(recorder, i, new EpError('EP_PEER_LOST', `rank ${i}`));
      vi.advanceTimersByTime(1001);
    }
    expect(files()).toHaveLength(MOST_FILES);
    expect(dumps().map((dump) => dump.entries.at(-1)!.sequence)).toEqual([1, 50, 51, 52, 53, 54, 55, 70]);
  });

  it('are not written where EP_TRACE_DIR is not set, but by call', () => {
    vi.stubEnv('EP_TRACE_DIR', '');
    const before = process.listenerCount('SIGUSR2');
    const recorder = new FlightRecorder({ world: 'world', rank: 1, size: 3 });
    closers.push(recorder.openGroup(world));
    expect(recorder.folder).toBeUndefined();
    expect(process.listenerCount('SIGUSR2')).toBe(before);
    fail(recorder, 1, timedOut());
    recorder.dumpFor('signal');
    closers.pop()!();
    expect(files()).toEqual([]);
    expect(() => recorder.dump()).toThrow(/no folder to dump into: set EP_TRACE_DIR or name one in the call/);
    const deeper = join(folder, 'a', 'b');
    expect(read(recorder.dump(deeper)).entries).toHaveLength(1);
    vi.stubEnv('EP_TRACE_DIR', deeper);
    expect(new FlightRecorder({ world: 'world', rank: 1, size: 3 }).folder).toBe(deeper);
    vi.unstubAllEnvs();
  });

  it('that cannot be written fail no call: the process is warned once', () => {
    const blocked = join(folder, 'file');
    writeFileSync(blocked, '');
    const warn = vi.spyOn(process, 'emitWarning').mockImplementation(() => {});
    const recorder = opened(blocked);
    recorder.dumpFor('signal');
    recorder.dumpFor('signal');
    expect(warn.mock.calls).toEqual([
      [expect.stringMatching(/^flight recorder of rank 1: cannot write the dump .*: E(EXIST|NOTDIR)/), 'EpWarning'],
    ]);
    expect(() => recorder.dump()).toThrow(expect.objectContaining({ code: 'EP_SYSTEM' }));
  });

  it('take their place whole: a reader never finds half of one, and no pieces are left', () => {
    const recorder = opened();
    const paths = Array.from({ length: MOST_FILES + 2 }, () => recorder.dump());
    expect(new Set(paths).size).toBe(MOST_FILES);
    const last = paths.at(-1)!;
    const inode = statSync(last).ino;
    chmodSync(last, 0o444);
    expect(recorder.dump()).toBe(last);
    expect(statSync(last).ino).not.toBe(inode);
    expect(files().filter((name) => !name.endsWith('.json'))).toEqual([]);
  });

  it('of worlds with any name stay in the folder, and apart', () => {
    const names = ['../up', 'a/b', 'a_b', '', '\u0000', 'ü'.repeat(300)].map((name) => {
      const recorder = new FlightRecorder({ world: name, rank: 0, size: 1, folder });
      return recorder.dump();
    });
    expect(new Set(names).size).toBe(6);
    expect(files()).toHaveLength(6);
    expect(
      dumps()
        .map((dump) => dump.world.length)
        .sort((a, b) => a - b),
    ).toEqual([0, 1, 3, 3, 5, 300]);
  });
});

describe('SIGUSR2', () => {
  it('dumps every rank of the process between its first group and its last, beside other listeners', async () => {
    const others = process.listenerCount('SIGUSR2');
    let heard = 0;
    const other = () => {
      heard++;
    };
    process.on('SIGUSR2', other);
    const first = new FlightRecorder({ world: 'world', rank: 0, size: 2, folder });
    const second = new FlightRecorder({ world: 'world', rank: 1, size: 2, folder });
    expect(process.listenerCount('SIGUSR2')).toBe(others + 1);
    const closeFirst = first.openGroup({ ...world, ranks: [0, 1], rank: 0 });
    const closePair = first.openGroup({ ...world, name: 'pair', ranks: [0, 1], rank: 0 });
    const closeSecond = second.openGroup({ ...world, ranks: [0, 1], rank: 1 });
    expect(process.listenerCount('SIGUSR2')).toBe(others + 2);
    process.kill(process.pid, 'SIGUSR2');
    await vi.waitFor(() => expect(dumps().map((dump) => [dump.rank, dump.reason])).toHaveLength(2));
    expect(dumps().map((dump) => [dump.rank, dump.reason])).toEqual([
      [0, 'signal'],
      [1, 'signal'],
    ]);
    closeFirst();
    closeSecond();
    expect(process.listenerCount('SIGUSR2')).toBe(others + 2);
    process.kill(process.pid, 'SIGUSR2');
    await vi.waitFor(() => expect(files()).toHaveLength(3));
    closePair();
    expect(process.listenerCount('SIGUSR2')).toBe(others + 1);
    expect(heard).toBe(2);
    process.off('SIGUSR2', other);
  });
});
