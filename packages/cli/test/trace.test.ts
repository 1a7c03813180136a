import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { CallKind, TraceDump, TraceEntry, TraceGroup } from '@ep/collectives/trace';
import { afterAll, describe, expect, it } from 'vitest';
import { parseDump, readDumps } from '../src/trace/dumps.js';
import { mergeDumps, type WorldReport } from '../src/trace/merge.js';
import { reportText } from '../src/trace/report.js';
import { durationText, ranksText } from '../src/trace/words.js';
import { runEp } from './ep.js';

const folder = mkdtempSync(join(tmpdir(), 'ep-trace-test-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

/** When the dumps of these tests are made, by the machine's clock. */
const made = 1_000_000;
const wall = 1_790_000_000_000_000;

interface Call extends Partial<TraceEntry> {
  readonly kind?: CallKind;
}

const reduce: Call = { kind: 'all-reduce', op: 'allReduce', dtype: 'f32', elements: 8, bytes: 32, reduceOp: 'sum' };
const send = (peer: number, tag: number, state: TraceEntry['state'] = 'started'): Call => ({
  kind: 'send',
  op: 'send',
  elements: 4,
  bytes: 4,
  peer,
  tag,
  state,
});
const recv = (peer: number, tag: number, state: TraceEntry['state'] = 'started'): Call => ({
  ...send(peer, tag, state),
  kind: 'recv',
  op: 'recv',
});

/** Barriers, numbered in the order of their group, made a millisecond apart and ended 100 us later unless they say otherwise. */
function entriesOf(calls: readonly Call[]): TraceEntry[] {
  const numbers = new Map<string, number>();
  return calls.map((call, i) => {
    const group = call.group ?? 'world';
    const counter = call.kind === 'send' || call.kind === 'recv' ? `${group} messages` : group;
    const sequence = call.sequence ?? (numbers.get(counter) ?? 0) + 1;
    numbers.set(counter, sequence);
    const queuedUs = 500_000 + 1000 * i;
    const ended = call.state === undefined || call.state === 'done' || call.state === 'failed';
    return {
      group,
      kind: 'barrier',
      op: 'barrier',
      dtype: 'u8',
      elements: 0,
      bytes: 0,
      state: 'done',
      queuedUs,
      startedUs: queuedUs,
      endedUs: ended ? queuedUs + 100 : null,
      ...call,
      sequence,
    };
  });
}

function groupOf(name: string, ranks: readonly number[], rank: number, entries: readonly TraceEntry[]): TraceGroup {
  const own = entries.filter((entry) => entry.group === name && entry.kind !== 'send' && entry.kind !== 'recv');
  const ended = own.filter((entry) => entry.endedUs !== null);
  const most = (of: readonly TraceEntry[]) => Math.max(0, ...of.map((entry) => entry.sequence));
  return {
    name,
    ranks,
    rank: ranks.indexOf(rank),
    epoch: 1,
    active: ranks.map((_, i) => i),
    closed: false,
    entered: most(own),
    ended: most(ended),
  };
}

interface DumpOptions {
  readonly size?: number;
  readonly groups?: readonly (readonly [string, readonly number[]])[];
  readonly group?: Partial<TraceGroup>;
  readonly fields?: Partial<TraceDump>;
}

function dumpOf(rank: number, calls: readonly Call[], options: DumpOptions = {}): TraceDump {
  const { size = 4, group, fields } = options;
  const entries = entriesOf(calls);
  const groups = options.groups ?? [['world', Array.from({ length: size }, (_, i) => i)]];
  return {
    format: 'ep-flight-recorder',
    version: 1,
    reason: 'signal',
    world: 'world',
    rank,
    size,
    process: { pid: 100 + rank, thread: 0, host: 'here', boot: 'b00t' },
    clock: { monotonicUs: made, wallUs: wall },
    capacity: 1000,
    recorded: entries.length,
    groups: groups.map(([name, ranks]) => ({ ...groupOf(name, ranks, rank, entries), ...group })),
    entries,
    ...fields,
  };
}

function merged(dumps: readonly TraceDump[], calls = 10): WorldReport {
  const files = dumps.map((dump) => {
    const path = `rank${dump.rank}.json`;
    return { path, dump: parseDump(JSON.stringify(dump), path) };
  });
  const [report, ...others] = mergeDumps(files, calls);
  expect(others).toEqual([]);
  return report!;
}

const texts = (dumps: readonly TraceDump[]): string[] =>
  merged(dumps).findings.map((one) => `${one.kind}: ${one.text}`);

describe('merged dumps of flight recorders', () => {
  it('of ranks that did the same differ in nothing', () => {
    const same = [0, 1, 2, 3].map((rank) => dumpOf(rank, [{}, reduce, { state: 'started' }]));
    const report = merged(same);
    expect(report).toMatchObject({ world: 'world', size: 4, clock: 'machine', findings: [] });
    expect(report.ranks.map((rank) => rank.dump && rank.underWay)).toMatchObject(
      Array.from({ length: 4 }, () => ({ group: 'world', sequence: 3, call: 'barrier()', state: 'started' })),
    );
    expect(report.ranks[2]).toMatchObject({ rank: 2, pid: 102, host: 'here', dumpedUs: wall, reason: 'signal' });
  });

  it('name the rank that called something else, and what', () => {
    const broadcast: Call = { kind: 'broadcast', op: 'broadcast', dtype: 'f32', elements: 4, bytes: 16, root: 0 };
    const dumps = [0, 1, 2, 3].map((rank) =>
      dumpOf(rank, [{}, rank === 1 ? broadcast : { ...reduce, state: 'started' }, rank === 1 ? { ...reduce } : {}]),
    );
    const report = merged(dumps);
    expect(report.findings.filter((one) => one.kind === 'mismatch')).toEqual([
      {
        kind: 'mismatch',
        group: 'world',
        sequence: 2,
        camps: [
          { ranks: [0, 2, 3], text: 'allReduce(f32[8], sum)' },
          { ranks: [1], text: 'broadcast(f32[4], root 0)' },
        ],
        text: 'call 2 of world differs: rank 1 called broadcast(f32[4], root 0) where ranks 0, 2-3 called allReduce(f32[8], sum)',
      },
    ]);
  });

  const differing: readonly [string, Call, Call, string][] = [
    [
      'lengths',
      reduce,
      { ...reduce, elements: 9 },
      'rank 0 called allReduce(f32[8], sum), rank 1 called allReduce(f32[9], sum)',
    ],
    [
      'dtypes',
      reduce,
      { ...reduce, dtype: 'i32' },
      'rank 0 called allReduce(f32[8], sum), rank 1 called allReduce(i32[8], sum)',
    ],
    [
      'reductions',
      reduce,
      { ...reduce, reduceOp: 'max' },
      'rank 0 called allReduce(f32[8], sum), rank 1 called allReduce(f32[8], max)',
    ],
    [
      'roots',
      { kind: 'gather', op: 'gather', root: 0, elements: 1 },
      { kind: 'gather', op: 'gather', root: 1, elements: 1 },
      'rank 0 called gather(u8[1], root 0), rank 1 called gather(u8[1], root 1)',
    ],
  ];
  for (const [what, zero, one, said] of differing) {
    it(`tell ${what} apart`, () => {
      expect(texts([dumpOf(0, [zero], { size: 2 }), dumpOf(1, [one], { size: 2 })])).toEqual([
        `mismatch: call 1 of world differs: ${said}`,
      ]);
    });
  }

  it('take two methods for one operation, and lengths of all-to-all, as they are', () => {
    const all = (op: string, kind: CallKind, elements: number): Call => ({ op, kind, elements });
    const zero = [all('allGather', 'all-gather', 4), all('allToAllSingle', 'all-to-all', 4)];
    const one = [all('allGatherIntoTensor', 'all-gather', 4), all('allToAll', 'all-to-all', 9)];
    expect(texts([dumpOf(0, zero, { size: 2 }), dumpOf(1, one, { size: 2 })])).toEqual([]);
  });

  it('say that three ranks went three ways', () => {
    const kinds: readonly Call[] = [reduce, { ...reduce, elements: 1 }, { ...reduce, elements: 2 }];
    expect(texts(kinds.map((call, rank) => dumpOf(rank, [call], { size: 3 })))[0]).toMatch(
      /rank 0 called .*\[8\].*, rank 1 called .*\[1\].*, rank 2 called .*\[2\]/,
    );
  });

  it('name the rank that never came, by how much, and where it is instead', () => {
    const in3: readonly Call[] = [{}, reduce, { ...reduce, state: 'started' }, { state: 'queued' }];
    const pair: DumpOptions = {
      groups: [
        ['world', [0, 1, 2, 3]],
        ['pair', [2, 3]],
      ],
    };
    const inPair: Call = { ...reduce, group: 'pair', state: 'started' };
    const dumps = [dumpOf(0, in3), dumpOf(1, in3), dumpOf(2, in3, pair), dumpOf(3, [{}, reduce, inPair], pair)];
    expect(texts(dumps)).toEqual([
      'behind: rank 3 never entered call 3 of world, allReduce(f32[8], sum), as ranks 0-2 did: it is 2 calls behind; its last there was call 2, allReduce(f32[8], sum), ended; it is in call 1 of pair, allReduce(f32[8], sum)',
      // Rank 2 dumped while rank 3 was in its call.
      'behind: rank 2 never entered call 1 of pair, allReduce(f32[8], sum), as rank 3 did: it is 1 call behind; it has made no call there; it is in call 3 of world, allReduce(f32[8], sum)',
    ]);
    expect(merged(dumps).findings[0]).toMatchObject({ kind: 'behind', rank: 3, entered: 2, by: 2 });
  });

  it('do not take a rank that dumped earlier for one that is behind', () => {
    const later: DumpOptions = { size: 2, fields: { clock: { monotonicUs: made + 5000, wallUs: wall + 5000 } } };
    const early = dumpOf(0, [{}], { size: 2, fields: { clock: { monotonicUs: 500_500, wallUs: wall } } });
    expect(texts([early, dumpOf(1, [{}, {}, {}], later)])).toEqual([]);
    const none: Call = { queuedUs: null, startedUs: null, endedUs: null };
    // Where times were not read, a call is as old as a later one at least.
    expect(
      texts([early, dumpOf(1, [{}, none, { queuedUs: 500_400, endedUs: null, state: 'started' }], later)]),
    ).toEqual([expect.stringMatching(/^behind: rank 0 .* 2 calls behind/)]);
    expect(texts([early, dumpOf(1, [{}, none, none], later)])).toEqual([]);
  });

  it('count calls that the ring has lost', () => {
    const world = groupOf('world', [0, 1], 0, []);
    const other = entriesOf([{ group: 'pair' }, { group: 'pair' }]);
    const full = dumpOf(0, [], {
      size: 2,
      fields: {
        groups: [{ ...world, entered: 700, ended: 700 }, groupOf('pair', [0, 1], 0, other)],
        entries: other,
        recorded: 702,
      },
    });
    const idle = dumpOf(1, [{ group: 'pair' }, { group: 'pair' }], {
      size: 2,
      groups: [
        ['world', [0, 1]],
        ['pair', [0, 1]],
      ],
    });
    expect(texts([full, idle])).toEqual([
      'behind: rank 1 never entered call 1 of world as rank 0 did: it is 700 calls behind; it has made no call there',
    ]);
  });

  it('name who has not made a group, who destroyed it, and who has it with other members', () => {
    const two: DumpOptions = {
      size: 2,
      groups: [
        ['world', [0, 1]],
        ['pair', [0, 1]],
      ],
    };
    const inPair: Call = { group: 'pair', state: 'started' };
    expect(texts([dumpOf(0, [inPair], two), dumpOf(1, [], { size: 2 })])).toEqual([
      'behind: rank 1 never entered call 1 of pair, barrier(), as rank 0 did: it is 1 call behind; it has not made the group',
    ]);
    expect(texts([dumpOf(0, [{}], { size: 2 }), dumpOf(1, [], { size: 2, group: { closed: true } })])).toEqual([
      expect.stringMatching(/it has made no call there; it has destroyed the group$/),
    ]);
    const with01 = (ranks: readonly number[]): DumpOptions => ({ size: 3, groups: [['pair', ranks]] });
    expect(texts([dumpOf(0, [], with01([0, 1])), dumpOf(1, [], with01([1, 0])), dumpOf(2, [], { size: 3 })])).toEqual([
      'members: pair is not one group: it is [0, 1] on rank 0, [1, 0] on rank 1',
    ]);
  });

  it('name ranks without a dump, and those that the others go on without', () => {
    const view: DumpOptions = { group: { epoch: 3, active: [0, 2] } };
    const dumps = [dumpOf(0, [{}], view), dumpOf(2, [{}]), dumpOf(3, [{}])];
    const report = merged(dumps);
    expect(report.findings.map((one) => one.text)).toEqual([
      'rank 1 is dead or was removed: it is not among the active ranks of world (epoch 3); it left no dump',
      'rank 3 is dead or was removed: it is not among the active ranks of world (epoch 3); its dump was made by signal',
    ]);
    expect(report.ranks[1]).toEqual({ rank: 1, dump: false });
    expect(merged([dumpOf(1, [{}])]).findings).toEqual([
      {
        kind: 'missing',
        ranks: [0, 2, 3],
        text: 'ranks 0, 2-3 left no dump: they were killed, their event loops do not turn, or the files are elsewhere',
      },
    ]);
    expect(texts([0, 1, 3].map((rank) => dumpOf(rank, [{}])))).toEqual([
      'missing: rank 2 left no dump: it was killed, its event loop does not turn, or the files are elsewhere',
    ]);
  });

  it('say how the first call that failed ended on each rank', () => {
    const failed = (code: string): Call => ({ ...reduce, state: 'failed', code });
    const dumps = [
      dumpOf(0, [{}, failed('EP_TIMEOUT'), failed('EP_POISONED')]),
      dumpOf(1, [{}, failed('EP_TIMEOUT')]),
      dumpOf(2, [{}, failed('EP_ABORTED')]),
      dumpOf(3, [{}, { ...reduce }]),
    ];
    expect(texts(dumps).filter((text) => text.startsWith('failed'))).toEqual([
      'failed: call 2 of world, allReduce(f32[8], sum), failed with EP_TIMEOUT on ranks 0-1, failed with EP_ABORTED on rank 2, ended on rank 3',
    ]);
    const closing: Call = { state: 'aborted', code: 'EP_ABORTED' };
    const two = (closed: boolean) =>
      [0, 1].map((rank) => dumpOf(rank, [closing], { size: 2, group: { closed, entered: 1 } }));
    expect(texts(two(true))).toEqual([]);
    expect(texts(two(false))).toEqual(['failed: call 1 of world, barrier(), aborted with EP_ABORTED on ranks 0-1']);
    const lost = { ...send(1, 2, 'failed'), code: 'EP_PEER_LOST' };
    expect(texts([dumpOf(0, [lost], { size: 2 }), dumpOf(1, [], { size: 2 })])).toEqual([
      'failed: send(u8[4] to 1, tag 2) of rank 0 in world failed with EP_PEER_LOST',
    ]);
  });

  it('name messages that nobody takes or sends, and only those', () => {
    const of = (zero: readonly Call[], one: readonly Call[]) =>
      texts([dumpOf(0, zero, { size: 2 }), dumpOf(1, one, { size: 2 })]);
    expect(of([send(1, 3)], [recv(0, 4)])).toEqual([
      'waiting: rank 0 waits in send(u8[4] to 1, tag 3) of world: rank 1 has no recv for it with tag 3',
      'waiting: rank 1 waits in recv(u8[4] from 0, tag 4) of world: rank 0 has no send for it with tag 4',
    ]);
    expect(of([send(1, 3)], [recv(-1, 3)])).toEqual([]);
    expect(of([send(1, 3)], [recv(0, 3)])).toEqual([]);
    expect(of([send(1, 3, 'done')], [recv(-1, 4)])).toEqual([
      'waiting: rank 1 waits in recv(u8[4] from any, tag 4) of world: no other rank has a send for it with tag 4',
    ]);
    // Of a rank without a dump nothing is known.
    expect(texts([dumpOf(0, [send(1, 3)], { size: 2 })])).toEqual([expect.stringMatching(/^missing/)]);
  });

  it('find who came last, and how late', () => {
    const at = (queuedUs: number, fields: Call = {}): Call => ({ queuedUs, endedUs: 900_000, ...fields });
    const dumps = [
      dumpOf(0, [at(1000), at(2000), at(3000)], { size: 3 }),
      dumpOf(1, [at(1500), at(9000), { queuedUs: null, endedUs: null }], { size: 3 }),
      dumpOf(2, [at(1200), at(2500), at(90_000)], { size: 3 }),
    ];
    const report = merged(dumps);
    expect(report.skews).toEqual([
      { group: 'world', sequence: 2, call: 'barrier()', us: 7000, first: 0, last: 1, calls: 2 },
    ]);
    expect(reportText([report], [])).toContain(
      'call 2 of world, barrier(): rank 1 came 7000 us after rank 0 (2 calls compared)',
    );
  });

  it('compare ranks of several machines by their wall clocks, and say so', () => {
    const other = { pid: 7, thread: 2, host: 'there', boot: 'other' };
    const far: Partial<TraceDump> = { process: other, clock: { monotonicUs: 600_000, wallUs: wall + 4000 } };
    const report = merged([dumpOf(0, [{}], { size: 2 }), dumpOf(1, [{}], { size: 2, fields: far })]);
    expect(report).toMatchObject({ clock: 'wall', findings: [], skews: [{ us: 404_000, first: 0, last: 1 }] });
    const text = reportText([report], []);
    expect(text).toContain('clocks of several machines, as they are set');
    expect(text).toContain('pid 7 thread 2, there');
  });

  it('show names and messages without what would steer a terminal', () => {
    const evil = '\u001b[2Jx';
    const dump = dumpOf(0, [{ op: evil, group: evil, state: 'failed', code: evil }], {
      size: 1,
      groups: [[evil, [0]]],
      fields: { world: evil, cause: { code: evil, message: `a\n${evil}` } },
    });
    const text = reportText([merged([{ ...dump, process: { ...dump.process, host: evil } }])], []);
    expect(text).not.toContain(evil);
    expect(text).toContain('x');
  });

  it('write ranks and durations for people', () => {
    expect([[3], [0, 1], [5, 0, 2, 3, 4]].map((ranks) => ranksText(ranks))).toEqual([
      'rank 3',
      'ranks 0-1',
      'ranks 0, 2-5',
    ]);
    expect([0.4, 999, 1000, 12_345.6, 2.5e6].map(durationText)).toEqual([
      '0 us',
      '999 us',
      '1 ms',
      '12.35 ms',
      '2.5 s',
    ]);
  });
});

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
