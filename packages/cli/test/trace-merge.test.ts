import type { CallKind, TraceDump } from '@ep/collectives/trace';
import { describe, expect, it } from 'vitest';
import { parseDump } from '../src/trace/dumps.js';
import { mergeDumps, type WorldReport } from '../src/trace/merge.js';
import { reportText } from '../src/trace/report.js';
import { durationText, ranksText } from '../src/trace/words.js';
import {
  type Call,
  type DumpOptions,
  dumpOf,
  entriesOf,
  groupOf,
  made,
  recv,
  reduce,
  send,
  wall,
} from './trace-dumps.js';

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
    expect(texts([early, dumpOf(1, [{}, none, { ...none, endedUs: 500_400 }], later)])).toEqual([
      expect.stringMatching(/^behind: rank 0 .* 2 calls behind/),
    ]);
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
      'rank 1 died or left: it is not among the active ranks of world (epoch 3); it left no dump',
      'rank 3 died or left: it is not among the active ranks of world (epoch 3); its dump was made by signal',
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
    // Rank 0 learned of it one call earlier.
    const poisoned = [
      dumpOf(0, [{}, failed('EP_POISONED')], { size: 2 }),
      dumpOf(1, [{}, {}, failed('EP_TIMEOUT')], { size: 2 }),
    ];
    expect(texts(poisoned).filter((text) => text.startsWith('failed'))).toEqual([
      'failed: call 3 of world, allReduce(f32[8], sum), failed with EP_TIMEOUT on rank 1',
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
    const early = dumpOf(1, [], { size: 2, fields: { clock: { monotonicUs: 400_000, wallUs: wall } } });
    expect(texts([dumpOf(0, [send(1, 3)], { size: 2 }), early])).toEqual([]);
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
    expect(merged(dumps.slice(0, 2)).skews).toEqual([]);
    expect(reportText([report], [])).toContain(
      'call 2 of world, barrier(): rank 1 came 7000 us after rank 0 (2 calls compared)',
    );
  });

  it('compare ranks of several machines by their wall clocks, and say so', () => {
    const other = { pid: 7, thread: 2, host: 'there', boot: 'other' };
    const far: Partial<TraceDump> = { process: other, clock: { monotonicUs: 600_000, wallUs: wall + 4000 } };
    const report = merged([dumpOf(0, [{}], { size: 2 }), dumpOf(1, [{}], { size: 2, fields: far })]);
    expect(report).toMatchObject({ clock: 'wall', findings: [], skews: [{ us: 404_000, first: 0, last: 1 }] });
    const unknown = [0, 1].map((rank) => dumpOf(rank, [], { size: 2, fields: { process: { ...other, boot: '' } } }));
    expect(merged(unknown).clock).toBe('wall');
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
