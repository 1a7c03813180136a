import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import type { CpuInfo } from 'node:os';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it, vi } from 'vitest';
import { attentionBench } from '../src/bench/attention.js';
import { benchFilters, meetsGoal, progressMark } from '../src/bench/bench.js';
import { causeAmong } from '../src/bench/cause.js';
import { collectivesResult } from '../src/bench/collectives.js';
import { efaResult } from '../src/bench/efa.js';
import { ibgdaResult } from '../src/bench/ibgda.js';
import { loadBetween } from '../src/bench/idle.js';
import { type BenchName, benchNames, loadBench, loadFrom } from '../src/bench/registry.js';
import { type BenchReport, reportText } from '../src/bench/report.js';
import { fabricCases, groupCases } from '../src/bench-fabric/measure.js';
import { casesOf, tooLargeFor } from '../src/bench-moe/measure.js';
import { bytesOf, shapesOf } from '../src/bench-moe/shapes.js';
import { type MoeShape, moeTransports } from '../src/bench-moe/task.js';
import { runEp, runEpOnTerminal, startEp } from './ep.js';

// Reports are compared as plain text, also where CI is set, which has them coloured.
vi.hoisted(() => vi.stubEnv('NO_COLOR', '1'));

const folder = mkdtempSync(join(tmpdir(), 'ep-bench-test-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

const core = (idle: number, user: number): CpuInfo => ({
  model: '',
  speed: 0,
  times: { idle, user, nice: 0, sys: 0, irq: 0 },
});

describe('ep bench', () => {
  it('measures planning and says where, when and beside what', async () => {
    const { code, stdout } = await runEp(['bench', 'plan', '--quick', '--json']);
    expect(code).toBe(0);
    const report = JSON.parse(stdout) as BenchReport;
    expect(report).toMatchObject({ quick: true, busy: expect.any(Boolean), unavailable: [] });
    expect(Math.abs(Date.now() - Date.parse(report.date))).toBeLessThan(120_000);
    expect(report.machine.node).toBe(process.version);
    expect(report.load.before.cores.length).toBe(report.machine.onlineCores);
    const cases = report.results.flatMap((result) => result.cases);
    expect(cases.map((one) => one.name)).toEqual([
      expect.stringMatching(/^each-query, 64 ranks/),
      expect.stringMatching(/^each-server, 64 ranks/),
    ]);
    for (const one of cases) {
      expect(one.median).toBeGreaterThan(0);
      expect(one.ratios.find((ratio) => ratio.name === 'bytes per dispatch')).toMatchObject({
        goal: { at: 'most', value: 200 },
      });
      expect(one.ratios.find((ratio) => ratio.name.endsWith('a quarter of the size'))).toMatchObject({
        value: expect.any(Number),
        goal: { at: 'most', value: 1.5 },
      });
    }
  });

  it('loads each benchmark, or says which module is missing and fails when it is asked for by name', async () => {
    const among: Partial<Record<BenchName, readonly RegExp[]>> = {
      moe: [
        /^low-latency bf16 dispatch .* 2 ranks$/,
        /^high-throughput fp8 dispatch .* 4 ranks$/,
        /^high-throughput bf16 combine .* 2 ranks, over ibgda:soft \(an emulator's figure\)$/,
        /^low-latency bf16 combine .* 2 ranks, over efa:soft \(an emulator's figure\)$/,
      ],
    };
    for (const name of benchNames) {
      const loaded = await loadBench(name);
      if (loaded.available) {
        expect(loaded.bench.name).toBe(name);
        const { code, stdout, stderr } = await runEp(['bench', name, '--quick', '--json']);
        // Quiet in a pipe, but for a machine that is busy.
        expect({ code, told: stderr.includes(progressMark) }).toEqual({ code: 0, told: false });
        const [result] = (JSON.parse(stdout) as BenchReport).results;
        expect(result?.name).toBe(name);
        expect(result?.cases.length).toBeGreaterThan(0);
        // A machine may have no stalls.
        for (const one of result!.cases) expect(one.median > 0 || one.name.startsWith('stalls')).toBe(true);
        const names = result!.cases.map((one) => one.name);
        for (const one of among[name] ?? []) expect(names).toContainEqual(expect.stringMatching(one));
        continue;
      }
      const { code, stderr, stdout } = await runEp(['bench', name]);
      expect({ code, stdout }).toEqual({ code: 1, stdout: '' });
      expect(stderr).toContain(`bench ${name}: ${loaded.reason} [EP_UNAVAILABLE]`);
    }
  }, 300_000);

  it.each([
    ['plan', [/each-query, 64 ranks x 16 shards/, /each-server, 64 ranks x 16 shards/]],
    ['attention', [/dispatch in rows of 2048 bytes, 2 ranks/, /4000 small steps, 4 ranks, V8 without threads/]],
    ['shm', [/2 ranks, native put-with-signal of 4096 bytes/, /4 ranks, JS barrier/]],
  ] as const)(
    'tells on a terminal what %s measures, in one line that is empty at last',
    async (name, told) => {
      const { code, stdout } = await runEpOnTerminal(['bench', name, '--quick', '--json']);
      expect(code).toBe(0);
      const lines = stdout.split('\r\u001b[K');
      for (const text of told)
        expect(lines).toContainEqual(expect.stringMatching(new RegExp(`^${progressMark}${text.source}$`)));
      expect(JSON.parse(lines.at(-1)!)).toMatchObject({ results: [{ name }] });
    },
    120_000,
  );

  it('finds what a rank died of among the lines that it left', () => {
    const lines = [
      'file:///packages/nvshmem/bench/rounds.js:31',
      '      if (entered < round) throw new Error(text);',
      '                                 ^',
      '',
      'Error: left barrier 8 while rank 0 had entered 7',
      '    at timedRounds (file:///packages/nvshmem/bench/rounds.js:31:34)',
      'EpError [EP_PEER_LOST]: barrier: rank 1 died',
    ];
    expect(causeAmong(lines)).toBe('Error: left barrier 8 while rank 0 had entered 7');
    expect(causeAmong(lines.slice(5))).toBe('EpError [EP_PEER_LOST]: barrier: rank 1 died');
    expect(causeAmong(lines.slice(0, 4))).toBeUndefined();
  });

  it('refuses a name that it does not know', async () => {
    const { code, stderr } = await runEp(['bench', 'nonsense']);
    expect(code).toBe(2);
    expect(stderr).toContain('plan, attention, moe, shm, ibgda, efa, fabric, collectives, all');
  });

  it('stops at once when told to, although planning blocks its thread', async () => {
    const run = startEp(['bench', 'plan', '--repeats', '10000']);
    setTimeout(() => run.child.kill('SIGINT'), 4000);
    const { code, stderr } = await run.finished;
    expect(code).toBe(130);
    expect(stderr).toContain('stopped by SIGINT');
  });

  it('finds a core busy that works more than a fifth of the time', () => {
    const idle = loadBetween([core(0, 0), core(0, 0)], [core(900, 100), core(1000, 0)]);
    expect(idle).toEqual({ cores: [expect.closeTo(0.1), 0], busy: false });
    expect(loadBetween([core(0, 0), core(0, 0)], [core(1000, 0), core(700, 300)]).busy).toBe(true);
    expect(loadBetween([], [core(5, 5)])).toEqual({ cores: [0], busy: false });
  });

  it('tells a module that is missing from one that is broken', async () => {
    const bench = { name: 'good', run: () => Promise.reject(new Error('not run here')) };
    const load = (module: string) => loadFrom({ module, measure: 'measure', adapt: () => bench });
    expect(await load('@ep/plan/no-such-subpath')).toEqual({
      available: false,
      reason: '@ep/plan/no-such-subpath is not in this installation',
    });
    expect(await load('@ep/no-such-package/bench')).toMatchObject({ available: false });
    const module = (name: string, text: string): string => {
      writeFileSync(join(folder, name), text);
      return join(folder, name);
    };
    await expect(load(module('wrong.mjs', 'export const measure = 7;'))).rejects.toThrow(
      'must export a function measure, found number',
    );
    await expect(load(module('broken.mjs', `import '@ep/not-installed-at-all';`))).rejects.toThrow(
      'not-installed-at-all',
    );
    expect(await load(module('good.mjs', 'export function measure() {}'))).toEqual({ available: true, bench });
  });

  it('marks a busy machine and missed goals in the text', () => {
    const load = { cores: [0.9], busy: true };
    const ratio = (value: number, at: 'least' | 'most') => ({
      name: `of something at ${at}`,
      value,
      goal: { at, value: 0.85 },
    });
    const report: BenchReport = {
      date: '2026-11-20T00:00:00.000Z',
      machine: { cpu: 'a processor', onlineCores: 2, kernel: 'linux', node: 'v20.19.0' },
      busy: true,
      quick: false,
      load: { before: load, after: load },
      results: [
        {
          name: 'attention',
          skipped: ['MPI_Alltoallv: mpirun is not installed'],
          cases: [
            {
              name: 'dispatch',
              unit: 'ms',
              median: 12.5,
              spread: 0.125,
              samples: 9,
              ratios: [ratio(0.9, 'least'), ratio(0.5, 'least'), ratio(0.5, 'most')],
              detail: { ranks: 2 },
            },
          ],
        },
      ],
      unavailable: [{ name: 'shm', reason: 'it is not there' }],
    };
    const text = reportText(report);
    expect(text).toContain('attention: dispatch: median 12.50 ms, spread 13 % of 9 runs');
    expect(text.match(/met\)/g)).toHaveLength(2);
    expect(text.match(/MISSED\)/g)).toHaveLength(1);
    expect(text).toContain('attention: not measured: MPI_Alltoallv: mpirun is not installed');
    expect(text).toContain('busy: true');
    expect(text).toContain('shm: not available: it is not there');
    expect(text).toContain('a processor, 2 cores, linux, node v20.19.0; 2026-11-20T00:00:00.000Z');
    expect(meetsGoal({ name: 'x', value: Number.NaN, goal: { at: 'most', value: 1 } })).toBe(false);
    expect(meetsGoal({ name: 'x', value: 1 })).toBeUndefined();
  });

  it('says of small steps that the slowest missed its goal, beside the stalls of the same run', async () => {
    const step = (slowest: number) => ({
      from: 'JS' as const,
      ranks: 4,
      bytesPerRank: 1024,
      count: 4000,
      p50: 10,
      p99: 90,
      slowest,
      goals: [
        { at: 'p99' as const, microseconds: 100, met: true },
        { at: 'slowest' as const, microseconds: 1000, met: slowest <= 1000 },
      ],
    });
    const bench = attentionBench({
      benchAttention: async () => ({
        bench: 'attention',
        ranks: 2,
        repeats: 3,
        results: [],
        steps: [step(999), step(3014)],
        stalls: { cores: 2, shortest: 50, count: 321, p50: 60, p99: 700, slowest: 2900 },
        skipped: [],
      }),
    });
    const { cases } = await bench.run({ quick: false }, () => {});
    expect(cases[0]).toMatchObject({
      name: 'stalls of 50 us and more in a second of reading the clock, on each of 2 cores',
      samples: 321,
    });
    const verdicts = cases.map(({ ratios }) => ratios.map(meetsGoal));
    expect(verdicts).toEqual([
      [undefined, undefined, undefined],
      [undefined, true, true],
      [undefined, true, false],
    ]);
    expect(cases[2]!.ratios[2]).toEqual({
      name: 'us, the slowest',
      value: 3014,
      goal: { at: 'most', value: 1000 },
    });
  });

  it('tells posts by how they compare with the lock, and promises only what one poster gains', () => {
    const series = (way: string, posters: number, samples: readonly number[]) =>
      ({ way, sharing: 'device', posters, batch: 4, executed: false, samples }) as const;
    const { cases, tables } = ibgdaResult({
      bench: 'ibgda',
      posts: [
        series('lock', 1, [10e6, 12e6, 11e6]),
        series('in-turn', 1, [22e6, 33e6, 20e6]),
        series('lock', 2, [5e6]),
        series('in-turn', 2, [2e6]),
      ],
      nic: { requests: [{ batch: 8, samples: [3e6, 1e6] }], written: [6e9], copied: [10e9] },
    });
    expect(cases.map((one) => [one.name, one.median, one.ratios])).toEqual([
      ['lock, shared by device, 1 posters, batch 4', 11, []],
      [
        'in-turn, shared by device, 1 posters, batch 4',
        22,
        [{ name: 'times the lock', value: 2, goal: { at: 'least', value: 1.2 } }],
      ],
      ['lock, shared by device, 2 posters, batch 4', 5, []],
      ['in-turn, shared by device, 2 posters, batch 4', 2, [{ name: 'times the lock', value: 0.4 }]],
      [
        'software NIC, 8-byte inline writes, 8 a doorbell',
        2,
        [{ name: 'million requests a second', value: 2, goal: { at: 'least', value: 2 } }],
      ],
      [
        'software NIC, 64 KiB writes',
        6,
        [{ name: 'of copy bandwidth of one thread', value: 0.6, goal: { at: 'least', value: 0.7 } }],
      ],
    ]);
    expect(tables?.[0]?.rows).toEqual([
      ['way, sharing', '1 x 4', '2 x 4'],
      ['lock, device', '11.0 (1.00)', '5.00 (1.00)'],
      ['in-turn, device', '22.0 (2.00)', '2.00 (0.40)'],
    ]);
  });

  it('tells puts over EFA by how they compare with the lock, and what each costs a device', () => {
    const series = (way: string, run: number, samples: readonly number[]) =>
      ({ way, sharing: 'device', posters: 1, run, samples }) as const;
    const cost = { sharing: 'device', puts: 80, doorbells: 10, words: 640, registerFences: 90, systemFences: 0 };
    const { cases, tables } = efaResult({
      bench: 'efa',
      puts: [
        series('lock', 1, [10e6, 12e6, 11e6]),
        series('lock-free', 1, [22e6]),
        series('lock', 8, [20e6]),
        series('lock-free', 8, [15e6]),
      ],
      costs: [{ way: 'lock-free', run: 8, ...cost }],
    });
    expect(cases.map((one) => [one.name, one.median, one.ratios])).toEqual([
      ['lock, shared by device, 1 posters, runs of 1', 11, []],
      [
        'lock-free, shared by device, 1 posters, runs of 1',
        22,
        [{ name: 'times the lock', value: 2, goal: { at: 'least', value: 1.2 } }],
      ],
      ['lock, shared by device, 1 posters, runs of 8', 20, []],
      ['lock-free, shared by device, 1 posters, runs of 8', 15, [{ name: 'times the lock', value: 0.75 }]],
      [
        'lock-free, shared by device, doorbells in runs of 8',
        0.125,
        [{ name: 'doorbells of each put', value: 0.125, goal: { at: 'most', value: 0.125 } }],
      ],
    ]);
    expect(tables?.[1]?.rows[1]).toEqual(['lock-free, device, 8', '0.125', '8.00', '1.13', '0.00']);
  });

  it('compares what a fabric does with what libfabric alone did in the same turn, and promises what the project wants', () => {
    const rank = (raw: readonly number[], put: readonly number[]) => ({
      provider: 'net',
      version: '1.17',
      latency: {
        raw: raw.map((us) => [us, 9] as const),
        put: put.map((us) => [us, 8] as const),
        awaited: raw.map((us) => [3 * us, 7] as const),
      },
      seconds: {
        raw: [1, 2, 4],
        put: [2, 2, 16],
        awaited: [4, 4, 16],
        'raw both ways': [1, 1, 1],
        dispatch: [2, 1, 4],
      },
    });
    // The machine slows down threefold: ratios within a turn stay what they are.
    const first = rank([10, 20, 30], [12, 24, 36]);
    const second = { ...first, seconds: { ...first.seconds, raw: [2, 2, 8] } };
    const mpi = { latency: [48], seconds: [1] };
    const size = { messages: 4, messageBytes: 500_000_000 };
    const cases = fabricCases('loopback', size, [first, second], mpi);
    expect(cases.map((one) => [one.name, one.unit, one.median, one.ratios])).toEqual([
      ['loopback: raw write of 8 bytes with data, half a ping-pong', 'us', 20, []],
      [
        'loopback: put of 8 bytes with signal, half a ping-pong',
        'us',
        24,
        [
          { name: 'times a raw write', value: 1.2, goal: { at: 'most', value: 1.3 } },
          { name: 'times Open MPI over TCP (send and receive)', value: 0.5 },
        ],
      ],
      [
        'loopback: put of 8 bytes with signal that JS awaits',
        'us',
        60,
        [{ name: 'times a round of raw writes', value: 1.5 }],
      ],
      // Of the rank that took longer.
      ['loopback: raw writes of 500000000 bytes', 'GB/s', 1, []],
      [
        'loopback: puts of 500000000 bytes with signal',
        'GB/s',
        1,
        [
          { name: 'of raw writes', value: 1, goal: { at: 'least', value: 0.9 } },
          { name: 'times Open MPI over TCP', value: 0.5 },
        ],
      ],
      [
        'loopback: puts of 500000000 bytes with signal that JS awaits',
        'GB/s',
        0.5,
        [{ name: 'of raw writes', value: 0.5 }],
      ],
      ['loopback: raw writes of 500000000 bytes, both ways at once', 'GB/s', 4, []],
      [
        'loopback: attention dispatch, both ways at once',
        'GB/s',
        2,
        [{ name: 'of raw writes', value: 0.5, goal: { at: 'least', value: 0.85 } }],
      ],
    ]);
    expect(cases[1]!.detail['p99 us']).toBe(8);
    expect(fabricCases('x', size, [first, second]).flatMap(({ ratios }) => ratios)).toHaveLength(5);
  });

  it('compares groups on two hosts with Open MPI by their medians, and promises more of large all-reduces', () => {
    const calls = [
      { op: 'all-reduce', bytes: 8, calls: 100 },
      { op: 'all-reduce', bytes: 1 << 20, calls: 10 },
      { op: 'all-to-all', bytes: 1 << 20, calls: 10 },
    ] as const;
    const ours = [
      [10, 30, 20],
      [100, 100, 100],
      [50, 50, 50],
    ];
    const tcp = [
      [40, 10, 20],
      [150, 120, 90],
      [25, 25, 25],
    ];
    const mpi = { tcp, shared: tcp.map((turns) => turns.map((us) => us / 2)) };
    const cases = groupCases(calls, ours, mpi);
    const told = (value: number, least: number) => [
      { name: 'times as fast as Open MPI over TCP', value, goal: { at: 'least', value: least } },
      { name: 'times as fast as Open MPI with shared memory on each host', value: value / 2 },
    ];
    expect(cases.map((one) => [one.name, one.median, one.ratios])).toEqual([
      ['two hosts of two ranks: all-reduce of 8 bytes, f32', 20, told(1, 1)],
      ['two hosts of two ranks: all-reduce of 1048576 bytes, f32', 100, told(1.2, 1.2)],
      ['two hosts of two ranks: all-to-all of 1048576 bytes, f32', 50, told(0.5, 1)],
    ]);
    expect(groupCases(calls, ours).flatMap(({ ratios }) => ratios)).toEqual([]);
  });

  it('measures experts in all the shapes that are promised, over shared memory and both NICs, within 24 GiB', () => {
    const shapes = shapesOf({ quick: false });
    const sizes = ['low-latency 128', 'high-throughput 128', 'high-throughput 4096'];
    for (const transport of moeTransports) {
      const of = shapes.filter((shape) => shape.transport === transport);
      expect(of.map(({ worldSize, mode, tokens }) => `${worldSize} ranks, ${mode} ${tokens}`)).toEqual(
        [2, 4].flatMap((ranks) => sizes.map((size) => `${ranks} ranks, ${size}`)),
      );
      expect(of.every(({ hidden, experts, topK }) => hidden === 7168 && experts === 256 && topK === 8)).toBe(true);
    }
    const largest = shapes.find(
      ({ transport, worldSize, tokens }) => transport === 'shm' && worldSize * tokens > 16_000,
    )!;
    const bytes = bytesOf(largest);
    // What comes to its ranks, twice over, is the least of it.
    expect(bytes).toBeGreaterThan(4 * 4096 * 8 * 7168 * 2 * 2);
    for (const shape of shapes) if (shape.worldSize === 4) expect(bytesOf(shape)).toBeLessThan(24 * 2 ** 30);
    expect([tooLargeFor(largest, null), tooLargeFor(largest, bytes)]).toEqual([undefined, undefined]);
    expect(tooLargeFor(largest, bytes - 1)).toMatch(
      /^high-throughput, 4096 tokens, 4 ranks, over shm: its ranks need [\d.]+ GiB, [\d.]+ GiB may be allocated$/,
    );
  });

  it('promises of experts what shared memory does, and of an emulator of a NIC nothing', () => {
    const size = { worldSize: 2, mode: 'high-throughput', tokens: 128, hidden: 7168, experts: 256, topK: 8 } as const;
    const of = (transport: MoeShape['transport']): MoeShape => ({ ...size, transport, repeats: 1, steps: 0 });
    const series = { copy: [2], 'copy past the caches': [1], 'bf16 dispatch': [2], 'fp8 dispatch': [3] };
    const shm = { rows: 10, series: { ...series, 'allToAllSingle dispatch': [8] } };
    const told = (transport: MoeShape['transport'], times: Parameters<typeof casesOf>[1][number]) =>
      casesOf(of(transport), [times, times], undefined).map(({ ratios }) => ratios);
    expect(told('shm', shm)).toEqual([
      [
        { name: 'of the copy bandwidth of the same threads', value: 0.5, goal: { at: 'least', value: 0.75 } },
        { name: 'times the same by allToAllSingle', value: 4 },
      ],
      [{ name: 'times what bf16 takes', value: 1.5, goal: { at: 'most', value: 2 } }],
    ]);
    expect(told('efa', { rows: 10, series })).toEqual([
      [{ name: 'of the copy bandwidth of the same threads', value: 0.5 }],
      [{ name: 'times what bf16 takes', value: 1.5 }],
    ]);
  });

  it('refuses a filter that the benchmark does not take, and one that it does not understand', async () => {
    const plan = await runEp(['bench', 'plan', '--sizes', '8,16KB']);
    expect(plan.code).toBe(2);
    expect(plan.stderr).toContain('bench plan takes no --sizes');
    const all = await runEp(['bench', 'all', '--ops', 'barrier']);
    expect(all.stderr).toContain('bench all takes no --ops: plan has none');
    const nonsense = await runEp(['bench', 'collectives', '--sizes', '8,many']);
    expect(nonsense.code).toBe(2);
    expect(nonsense.stderr).toContain('expected bytes, for example 8, 16KB or 64MB');
    const unknown = await runEp(['bench', 'collectives', '--quick', '--ops', 'all-red']);
    expect(unknown.code).toBe(2);
    expect(unknown.stderr).toContain('all-reduce, broadcast, all-gather, reduce-scatter, all-to-all, barrier');
    const odd = await runEp(['bench', 'collectives', '--quick', '--ranks', '3']);
    expect(odd.code).toBe(2);
    expect(odd.stderr).toContain('bench collectives: --ranks must be a power of two from 2 to 16, found 3');
    for (const size of ['0', '7', '9999GB']) {
      const { code, stderr } = await runEp(['bench', 'collectives', '--quick', '--sizes', size]);
      expect({ size, code }).toEqual({ size, code: 2 });
      expect(stderr).toContain('bench collectives: --sizes must be multiples of 4 bytes up to 2 GB, found ');
    }
  });

  it('names in its help who takes a filter', async () => {
    const { stdout } = await runEp(['bench', '--help']);
    for (const filter of benchFilters) {
      const takes: string[] = [];
      for (const name of benchNames) {
        const loaded = await loadBench(name);
        if (loaded.available && loaded.bench.filters?.includes(filter)) takes.push(name);
      }
      const [, text] = new RegExp(`--${filter} <list>([^]*?)\\n  -`).exec(stdout)!;
      expect(text).toContain(`(${takes.join(', ')})`);
    }
  });

  it('shows collectives as a table with the goals below', () => {
    const of = (p50: number) => ({ p50, p99: 2 * p50, mean: p50, spread: 0.1, samples: 100, calls: 5 });
    const result = collectivesResult(
      {
        bench: 'collectives',
        usableCores: 2,
        peers: ['Open MPI 4.1.4'],
        results: [
          {
            op: 'all-reduce',
            ranks: 2,
            bytes: 2 ** 20,
            series: { group: of(40), typed: of(100), 'Open MPI': of(130), native: of(0.25), exchange: of(0.2) },
            figures: [
              {
                name: 'group over Open MPI',
                text: 'times Open MPI',
                value: 3.25,
                goal: { at: 'least', value: 3, met: true },
              },
              {
                name: 'typed over Open MPI',
                text: 'times it, typed',
                value: 1.25,
                goal: { at: 'least', value: 1.3, met: false },
              },
              { name: 'bf16 over f32', text: 'without a goal', value: 1.125 },
            ],
          },
        ],
        bitwise: [{ ranks: 2, elements: [7, 9], runs: 2 }],
        skipped: ['Gloo: python3 was not found'],
      },
      (bytes) => `${bytes} bytes`,
    );
    const load = { cores: [0, 0], busy: false };
    const report: BenchReport = {
      date: '2026-11-20T00:00:00.000Z',
      machine: { cpu: 'a processor', onlineCores: 2, kernel: 'linux', node: 'v20.19.0' },
      busy: false,
      quick: false,
      load: { before: load, after: load },
      results: [result],
      unavailable: [],
    };
    const lines = reportText(report).split('\n');
    expect(lines[1]).toMatch(/group +p99 +typed +bf16 +Open MPI +Gloo +x Open MPI/);
    expect(lines[2]).toMatch(/^ +all-reduce 1048576 bytes +40 +80 +100 +- +130 +- +3\.250 +1\.250 +- +- +26\.21$/);
    expect(lines.slice(4, 10)).toEqual([
      'collectives: all-reduce of 1048576 bytes, 2 ranks: 3.250 times Open MPI (goal: at least 3, met)',
      'collectives: all-reduce of 1048576 bytes, 2 ranks: 1.250 times it, typed (goal: at least 1.3, MISSED)',
      'collectives: beside us: Open MPI 4.1.4; 2 usable cores; every result was compared',
      'collectives: all-reduce of 1048576 bytes, 2 ranks: 0.250 us in a native loop, beside 0.200 us of a bare exchange between the same ranks',
      'collectives: sums of 7, 9 f32 bitwise equal on 2 ranks, in group memory and typed arrays, in 2 runs each',
      'collectives: not measured: Gloo: python3 was not found',
    ]);
    expect(result.cases[0]).toMatchObject({ unit: 'us', median: 40, samples: 100 });
    expect(reportText({ ...report, quick: true })).not.toContain('goal');
  });
});
