import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import {
  appendFileSync,
  mkdtempSync,
  openSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import fc from 'fast-check';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { FileStore, isEpError, openFileStore } from '../src/index.js';
import { formatRecord, type LogRecord, parseLine } from '../src/stores/log.js';
import type { Operation } from '../src/stores/replica.js';

let directory: string;
let path: string;
beforeEach(() => {
  directory = mkdtempSync(join(tmpdir(), 'ep-store-'));
  path = join(directory, 'store');
});
afterEach(() => rmSync(directory, { recursive: true }));

const bytes = (text: string) => new TextEncoder().encode(text);
const text = (value: Uint8Array) => new TextDecoder().decode(value);
const openFds = () => readdirSync('/proc/self/fd').length;

const aBytes = fc.uint8Array({ maxLength: 40 });
const anOperation: fc.Arbitrary<Operation> = fc.oneof(
  fc.record({ kind: fc.constant('set' as const), key: fc.string({ unit: 'binary' }), value: aBytes }),
  fc.record({ kind: fc.constant('add' as const), key: fc.string(), delta: fc.maxSafeInteger() }),
  fc.record({ kind: fc.constant('compare-set' as const), key: fc.string(), expected: aBytes, desired: aBytes }),
  fc.record({ kind: fc.constant('append' as const), key: fc.string(), value: aBytes }),
  fc.record({
    kind: fc.constant('multi-set' as const),
    entries: fc.array(fc.tuple(fc.string(), aBytes), { maxLength: 4 }),
  }),
  fc.record({ kind: fc.constant('delete' as const), key: fc.string() }),
);
const aRecord: fc.Arbitrary<LogRecord> = fc.record({
  writer: fc.string(),
  number: fc.nat(),
  operation: anOperation,
});
const lineOf = (record: LogRecord) => formatRecord(record).toString('utf8').slice(1, -1);

describe('records', () => {
  it('round-trip, one line each', () => {
    fc.assert(
      fc.property(aRecord, (record) => {
        const line = lineOf(record);
        expect(line.includes('\n')).toBe(false);
        expect(parseLine(line, 'p')).toEqual(record);
      }),
      { numRuns: 2000 },
    );
  });

  it('are skipped wherever they are torn', () => {
    fc.assert(
      fc.property(aRecord, (record) => {
        const line = lineOf(record);
        for (let cut = 0; cut < line.length; cut++) expect(parseLine(line.slice(0, cut), 'p')).toBeUndefined();
      }),
      { numRuns: 200 },
    );
  });

  it('never become another record when bytes change, and never crash the parser', () => {
    fc.assert(
      fc.property(aRecord, fc.nat(), fc.string({ unit: 'binary', maxLength: 3 }), (record, at, junk) => {
        const line = lineOf(record);
        const place = at % (line.length + 1);
        const changed = (line.slice(0, place) + junk + line.slice(place + junk.length)).replaceAll('\n', ' ');
        if (changed === line) return;
        try {
          expect(parseLine(changed, 'p')).toBeUndefined();
        } catch (error) {
          if (!isEpError(error)) throw error;
        }
      }),
      { numRuns: 3000 },
    );
    fc.assert(
      fc.property(fc.string({ unit: 'binary' }), (line) => {
        try {
          expect(parseLine(line, 'p')).toBeUndefined();
        } catch (error) {
          if (!isEpError(error)) throw error;
        }
      }),
      { numRuns: 3000 },
    );
  });

  it.each([
    '{}',
    '[]',
    '["w",1,"set","k"]',
    '["w",1,"set","k","@@"]',
    '["w",1,"add","k",0.5]',
    '["w",1,"add","k","1"]',
    '["w","1","delete","k"]',
    '["w",1,"delete","k",1]',
    '["w",1,"push","k",""]',
    '["w",1,"append","k",1]',
    '["w",1,"multi-set","k"]',
    '["w",1,"multi-set",1,""]',
    '[1,1,"delete","k"]',
    'not json',
  ])('with a good checksum and the unknown body %s are refused', async (body) => {
    const { crc32 } = await import('node:zlib');
    const line = `ep1 ${crc32(body).toString(16).padStart(8, '0')} ${body}`;
    expect(() => parseLine(line, 'p')).toThrow(expect.objectContaining({ code: 'EP_INVALID_ARGUMENT' }));
  });
});

describe('the file', () => {
  it('is replayed by whoever opens it later, with the same outcome', async () => {
    await using a = await openFileStore(path);
    await a.set('k', bytes('v'));
    await a.add('n', 5);
    await a.compareSet('k', bytes('v'), bytes('w'));
    await a.set('gone', bytes('x'));
    await a.delete('gone');
    await using b = await openFileStore(path);
    expect([text(await b.get('k')), text(await b.get('n')), await b.numKeys()]).toEqual(['w', '5', 2]);
    expect(statSync(path).mode & 0o777).toBe(0o600);
  });

  it('survives a record torn at any byte, before and between other records', async () => {
    const torn = formatRecord({ writer: 'dead', number: 1, operation: { kind: 'add', key: 'n', delta: 100 } });
    let expected = 0;
    await using watching = await openFileStore(path);
    for (let cut = 0; cut < torn.byteLength - 1; cut++) {
      appendFileSync(path, torn.subarray(0, cut));
      expect(await watching.numKeys()).toBe(cut === 0 ? 0 : 1);
      await using next = await openFileStore(path);
      expect(await next.add('n', 1)).toBe(++expected);
    }
    expect(text(await watching.get('n'))).toBe(String(expected));
    expect(expected).toBeGreaterThan(30);
  });

  it('counts a record whose last newline was torn off as soon as somebody writes after it', async () => {
    const torn = formatRecord({ writer: 'dead', number: 1, operation: { kind: 'add', key: 'n', delta: 100 } });
    appendFileSync(path, torn.subarray(0, -1));
    await using store = await openFileStore(path);
    expect(await store.numKeys()).toBe(0);
    expect(await store.add('n', 1)).toBe(101);
  });

  it('is refused if it holds something else, or records of another version', async () => {
    for (const content of ['#!/bin/sh\n', '\nep2 00000000 []\n', '{"a":1}\n', '\u0000\u0000\n']) {
      const fds = openFds();
      writeFileSync(path, content);
      await expect(openFileStore(path)).rejects.toMatchObject({
        code: 'EP_INVALID_ARGUMENT',
        message: expect.stringMatching(/is not a store file of this version: found "/),
      });
      expect(openFds()).toBe(fds);
    }
  });

  it('stays refused after a bad record appeared in it, also for who waits', async () => {
    await using store = await openFileStore(path);
    const wait = store.get('never').catch((error) => error);
    appendFileSync(path, '\nrubbish\n');
    expect(await wait).toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
    await expect(store.numKeys()).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
  });

  it('names what is wrong when it shrinks', async () => {
    await using store = await openFileStore(path);
    await store.set('k', bytes('v'));
    truncateSync(path, 3);
    await expect(store.get('k')).rejects.toMatchObject({
      code: 'EP_TRANSPORT_FAILED',
      message: /shrank from \d+ to 3 bytes/,
    });
  });

  it('names the failing call and errno', async () => {
    await expect(openFileStore(join(directory, 'no', 'where'))).rejects.toMatchObject({
      code: 'EP_SYSTEM',
      message: expect.stringMatching(/^file store: open of .* failed: ENOENT$/),
      native: { name: 'ENOENT', errno: 2 },
    });
    await expect(openFileStore('/dev/full')).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      message: /a regular file/,
    });
    await using full = new FileStore('/dev/full', openSync('/dev/full', 'a+'));
    await expect(full.set('k', bytes('v'))).rejects.toMatchObject({
      code: 'EP_SYSTEM',
      message: 'file store: write of /dev/full failed: ENOSPC',
    });
  });

  it('replays records that are longer than what it reads at a time, among short ones', async () => {
    await using writer = await openFileStore(path);
    const long = (seed: number): Uint8Array => Uint8Array.from({ length: 700_000 }, (_, i) => (i * seed) >>> 3);
    for (const seed of [3, 5, 7]) {
      await writer.set(`short ${seed}`, bytes('v'));
      await writer.set(`long ${seed}`, long(seed));
    }
    await using reader = await openFileStore(path);
    for (const seed of [3, 5, 7]) {
      expect(text(await reader.get(`short ${seed}`))).toBe('v');
      expect(Buffer.compare(await reader.get(`long ${seed}`), long(seed))).toBe(0);
    }
    expect(await reader.numKeys()).toBe(6);
  });

  it('lets go of file, watcher and timers on close', async () => {
    const before = openFds();
    const store = await openFileStore(path);
    await store.get('never', { timeoutMs: 5 }).catch(() => {});
    const wait = store.get('never').catch(() => {});
    await store.close();
    await wait;
    // libuv keeps its one inotify instance for the life of the loop.
    expect(openFds() - before).toBeLessThanOrEqual(1);
    await new Promise((resolve) => setTimeout(resolve, 20));
    expect(process.getActiveResourcesInfo().filter((name) => name === 'FSEventWrap')).toEqual([]);
  });
});

describe('between processes', () => {
  const children: ChildProcess[] = [];
  const start = (...args: string[]) => {
    const child = spawn(process.execPath, ['--import', 'tsx', 'test/programs/store-worker.ts', path, ...args], {
      cwd: new URL('..', import.meta.url),
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    children.push(child);
    let output = '';
    child.stdout.on('data', (chunk) => {
      output += chunk;
    });
    return { child, output: () => output, ended: once(child, 'close') };
  };
  afterEach(() => {
    for (const child of children.splice(0)) child.kill('SIGKILL');
  });

  it('adds are atomic although writers are killed at any moment', async () => {
    const survivors = ['a', 'b'].map((name) => start(name, 'add', '150'));
    const victims = ['c', 'd', 'e'].map((name) => start(name, 'add', '1000000'));
    await using store = await openFileStore(path);
    for (const [i, victim] of victims.entries()) {
      await once(victim.child.stdout!, 'data');
      await new Promise((resolve) => setTimeout(resolve, 15 * i));
      victim.child.kill('SIGKILL');
      await victim.ended;
    }
    await Promise.all(survivors.map(({ ended }) => ended));
    expect(survivors.map(({ child }) => child.exitCode)).toEqual([0, 0]);
    const sums = [...survivors, ...victims].flatMap(({ output }) => output().split('\n').slice(0, -1).map(Number));
    expect(new Set(sums).size).toBe(sums.length);
    const total = Number(text(await store.get('counter')));
    expect(Math.max(...sums)).toBeLessThanOrEqual(total);
    // Every killed process may have added once more than it could print.
    expect(total - sums.length).toBeLessThanOrEqual(victims.length);
    const log = readFileSync(path, 'latin1');
    expect(log.match(/"add","counter",1\]\n/g)?.length).toBe(total);
  });

  it('a turn goes round 4 processes', async () => {
    await using store = await openFileStore(path);
    const ranks = ['0', '1', '2', '3'].map((name) => start(name, 'turn', '200'));
    await store.set('turn/0', bytes('go'));
    expect(text(await store.get('turn/200', { timeoutMs: 20_000 }))).toBe('3');
    await Promise.all(ranks.map(({ ended }) => ended));
    expect(ranks.map(({ child }) => child.exitCode)).toEqual([0, 0, 0, 0]);
  });
});
