import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { readDumps } from '../src/trace/dumps.js';
import { mergeDumps } from '../src/trace/merge.js';
import { runEp } from './ep.js';
import { type DumpOptions, dumpOf, made, reduce, send, wall } from './trace-dumps.js';

const folder = mkdtempSync(join(tmpdir(), 'ep-trace-test-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

let folders = 0;
/** Writes dumps, or other files, into a new folder. */
function folderOf(files: Readonly<Record<string, unknown>>): string {
  const path = join(folder, `dumps ${folders++}`);
  mkdirSync(path);
  for (const [name, content] of Object.entries(files))
    writeFileSync(join(path, name), typeof content === 'string' ? content : JSON.stringify(content));
  return path;
}

describe('the files of a merge', () => {
  it('are of each rank the latest in a folder, and nothing but dumps', () => {
    const later = (us: number): DumpOptions => ({ fields: { clock: { monotonicUs: made + us, wallUs: wall + us } } });
    const path = folderOf({
      'ep-trace-world-rank0-1-0-0-0.json': dumpOf(0, [{}], later(1)),
      'ep-trace-world-rank0-1-0-0-1.json': dumpOf(0, [{}, {}], later(2)),
      'ep-trace-world-rank0-9-0-0-0.json': dumpOf(0, [], later(0)),
      'ep-trace-world-rank1-1-0-0-0.json': dumpOf(1, [{}]),
      'ep-trace-world-rank2-1-0-0-0.json.part': '{"for',
      'notes.json': 'none',
    });
    const { files, older } = readDumps([path]);
    expect(files.map((file) => [file.dump.rank, file.dump.entries.length])).toEqual([
      [0, 2],
      [1, 1],
    ]);
    expect(older.map((name) => name.slice(path.length + 1))).toEqual([
      'ep-trace-world-rank0-1-0-0-0.json',
      'ep-trace-world-rank0-9-0-0-0.json',
    ]);
  });

  it('of several worlds are merged world by world', () => {
    const other = { fields: { world: 'other' } };
    const path = folderOf({ 'ep-trace-a.json': dumpOf(0, [], other), 'ep-trace-b.json': dumpOf(0, [], { size: 1 }) });
    const reports = mergeDumps(readDumps([path]).files, 10);
    expect(reports.map((report) => [report.world, report.findings.length])).toEqual([
      ['other', 1],
      ['world', 0],
    ]);
  });

  it('are refused when two are of one rank', () => {
    const path = folderOf({ 'a.json': dumpOf(1, []), 'b.json': dumpOf(1, [{}]) });
    const [a, b] = [join(path, 'a.json'), join(path, 'b.json')];
    expect(() => readDumps([a, b])).toThrow(/a\.json and .*b\.json are both of rank 1 of "world": name one of them/);
    expect(() => readDumps([a, a])).toThrow(/both of rank 1/);
    expect(() => readDumps([a, folderOf({ 'ep-trace-x.json': dumpOf(1, []) })])).toThrow(/both of rank 1/);
  });

  const good = dumpOf(0, [{}, send(1, 2)], { size: 2 });
  const entry = (fields: object) => ({ ...good, entries: [{ ...good.entries[0], ...fields }] });
  const group = (fields: object) => ({ ...good, groups: [{ ...good.groups[0], ...fields }] });
  const bad: readonly [string, unknown, RegExp][] = [
    ['no JSON', '{"format": }', /: not JSON at line 1, column 12: expected a value, found "}"/],
    ['the half of one', JSON.stringify(good).slice(0, 200), /: not JSON at line 1, column 201/],
    ['a list', [], /the file must be a JSON object/],
    [
      'another format',
      { documents: [1] },
      /format must be "ep-flight-recorder": a dump of a flight recorder, found undefined/,
    ],
    ['another version', { ...good, version: 2 }, /a dump of version 2; this program reads version 1/],
    ['no version', { ...good, version: undefined }, /a dump of version undefined; this program reads/],
    ['a rank outside of its world', { ...good, rank: 2 }, /rank must be an integer from 0 to 1, found 2/],
    ['no groups', { ...good, groups: {} }, /groups must be a list of at most 65536/],
    [
      'a group twice',
      { ...good, groups: [good.groups[0], good.groups[0]] },
      /groups\[1\]\.name must be a name that no other group has/,
    ],
    ['a member twice', group({ ranks: [0, 0] }), /groups\[0\]\.ranks must be ranks that differ/],
    [
      'a member outside of the world',
      group({ ranks: [0, 2] }),
      /groups\[0\]\.ranks\[1\] must be an integer from 0 to 1/,
    ],
    ['a group of others', group({ rank: 1 }), /groups\[0\]\.rank must be the place of world rank 0 in ranks, found 1/],
    ['more ended than entered', group({ ended: 5 }), /groups\[0\]\.ended must be an integer from 0 to 1/],
    ['an unknown group', entry({ group: 'x' }), /entries\[0\]\.group must be a name of the dump's groups, found "x"/],
    ['an unknown kind', entry({ kind: 'sum' }), /entries\[0\]\.kind must be one of barrier, broadcast/],
    ['an unknown dtype', entry({ dtype: 'f4' }), /entries\[0\]\.dtype must be one of/],
    [
      'a call that was not entered',
      entry({ sequence: 9 }),
      /entries\[0\]\.sequence must be at most entered of its group, 1/,
    ],
    ['a root outside', entry({ root: 2 }), /entries\[0\]\.root must be an integer from 0 to 1/],
    [
      'a message without peer',
      entry({ kind: 'send' }),
      /entries\[0\]\.peer must be an integer from -1 to 1, found undefined/,
    ],
    [
      'a time that is none',
      entry({ queuedUs: 'now' }),
      /entries\[0\]\.queuedUs must be microseconds or null, found "now"/,
    ],
    ['more calls than its ring', { ...good, capacity: 1 }, /entries must be a list of at most 1, found \[/],
    ['no process', { ...good, process: undefined }, /process must be a JSON object, found undefined/],
    ['a clock without time', { ...good, clock: {} }, /clock\.monotonicUs must be a safe integer of at least 0/],
    ['an odd cause', { ...good, cause: { code: 1 } }, /cause\.code must be a string, found 1/],
  ];
  for (const [what, content, message] of bad) {
    it(`are refused with the file and the field: ${what}`, () => {
      const path = folderOf({ 'x.json': content });
      expect(() => readDumps([join(path, 'x.json')])).toThrow(
        expect.objectContaining({ code: 'EP_INVALID_ARGUMENT', message: expect.stringMatching(message) }),
      );
      expect(() => readDumps([join(path, 'x.json')])).toThrow(/x\.json/);
    });
  }
});

describe('ep trace merge', () => {
  it('ends with 0 when nothing differs, and draws what each rank did', async () => {
    const path = folderOf(
      Object.fromEntries([0, 1].map((rank) => [`ep-trace-${rank}.json`, dumpOf(rank, [{}, reduce], { size: 2 })])),
    );
    const { code, stdout, stderr } = await runEp(['trace', 'merge', path]);
    expect({ code, stderr }).toEqual({ code: 0, stderr: '' });
    expect(stdout).toContain('world: 2 ranks, 2 dumps: nothing differs');
    expect(stdout).toMatch(
      /rank 0 {2}in no call; last was call 2 of world, allReduce\(f32\[8\], sum\), ended after 100 us/,
    );
    expect(stdout).toMatch(/ {2}-500\.000 ms {2}world {2}1 {2}barrier\(\) {15}ended after 100 us/);
    const one = await runEp(['trace', 'merge', path, '--calls', '1']);
    expect(one.stdout).toMatch(/ms {2}world {2}2 /);
    expect(one.stdout).not.toMatch(/ms {2}world {2}1 /);
  });

  it('ends with 1 and says what differs', async () => {
    const path = folderOf({
      'ep-trace-0.json': dumpOf(0, [reduce, { state: 'started' }], { size: 2 }),
      'ep-trace-1.json': dumpOf(1, [{ ...reduce, elements: 7 }], { size: 2 }),
    });
    const { code, stdout } = await runEp(['trace', 'merge', path]);
    expect(code).toBe(1);
    expect(stdout).toContain('2 differences');
    expect(stdout).toContain(
      'mismatch: call 1 of world differs: rank 0 called allReduce(f32[8], sum), rank 1 called allReduce(f32[7], sum)',
    );
    expect(stdout).toContain(
      'rank 0  in call 2 of world, barrier(), 499 ms after it was called (dump by signal, pid 100, here)',
    );
    const json = await runEp(['trace', 'merge', '--json', path]);
    expect({ code: json.code, stderr: json.stderr }).toEqual({ code: 1, stderr: '' });
    expect(JSON.parse(json.stdout)).toMatchObject({
      differs: true,
      older: [],
      worlds: [
        {
          findings: [
            { kind: 'mismatch', sequence: 1 },
            { kind: 'behind', rank: 1, by: 1 },
          ],
        },
      ],
    });
  });

  it('says why files cannot be used, and what it does not understand', async () => {
    const empty = folderOf({ 'readme.txt': '' });
    const missing = await runEp(['trace', 'merge', join(folder, 'none')]);
    expect(missing).toMatchObject({ code: 1, stdout: '' });
    expect(missing.stderr).toMatch(/cannot read .*none: there is no such file or folder \(ENOENT\) \[EP_SYSTEM\]/);
    const none = await runEp(['trace', 'merge', empty, '--json']);
    expect(none).toMatchObject({ code: 1, stderr: '' });
    expect(JSON.parse(none.stdout).error).toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      message: expect.stringMatching(/the folder must be one with dumps, ep-trace-….json, found "1 other file"/),
    });
    for (const args of [
      ['trace'],
      ['trace', 'merge'],
      ['trace', 'split', empty],
      ['trace', 'merge', empty, '--nope'],
    ]) {
      expect(await runEp(args)).toMatchObject({ code: 2, stdout: '' });
      const json = await runEp([...args, '--json']);
      expect(json).toMatchObject({ code: 2, stderr: '' });
      expect(JSON.parse(json.stdout).error.code).toBe('EP_INVALID_ARGUMENT');
    }
    expect(await runEp(['trace', 'merge', '--help'])).toMatchObject({
      code: 0,
      stdout: expect.stringContaining('--calls'),
    });
  });
});
