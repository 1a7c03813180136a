import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { balanceExperts } from '@ep/plan/moe';
import { afterAll, describe, expect, it } from 'vitest';
import { type MoeJob, readMoeJob, stepsOf, writeMoeJob } from '../src/demo-moe/job.js';
import { MoeModel } from '../src/demo-moe/model.js';
import { type MoeDemoReport, moePasses, moeReportText } from '../src/demo-moe/report.js';
import { runEp, runEpOnTerminal } from './ep.js';

const root = fileURLToPath(new URL('../../..', import.meta.url));
const folder = mkdtempSync(join(tmpdir(), 'ep-demo-moe-test-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

async function demo(...args: string[]): Promise<MoeDemoReport> {
  const { code, stdout, stderr } = await runEp(['demo', 'moe', '--small', '--from', root, '--json', ...args]);
  expect({ code, stderr }).toEqual({ code: 0, stderr: '' });
  return JSON.parse(stdout) as MoeDemoReport;
}

describe('ep demo moe', () => {
  it('passes over shared memory, draws a picture, and has the imbalance of real text', {
    timeout: 120_000,
  }, async () => {
    const svg = join(folder, 'moe.svg');
    const report = await demo('--ranks', '2', '--svg', svg);
    expect(report).toMatchObject({ pass: true, transport: 'shm', mode: 'low-latency', dtype: 'bf16', losses: [] });
    expect(report.gini).toBeGreaterThan(0.1);
    expect(report.gini).toBeLessThan(0.4);
    expect(report.imbalance.balanced).toBeLessThanOrEqual(report.imbalance.spread);
    const { experts, spread, balanced } = report.load;
    expect(experts).toHaveLength(report.experts);
    expect(experts.every(({ choices }, i) => i === 0 || choices <= experts[i - 1]!.choices)).toBe(true);
    const sum = (of: readonly number[]): number => of.reduce((all, one) => all + one, 0);
    const choices = report.tokens * report.topK;
    expect(report.expertRows).toEqual({ host: choices, cuda: 0 });
    expect(sum(experts.map((one) => one.choices))).toBe(choices);
    expect(sum(experts.map(({ replicas }) => replicas))).toBe(report.replicas);
    for (const ranks of [spread, balanced]) expect(sum(ranks)).toBeCloseTo(choices);
    expect((Math.max(...spread) * report.ranks) / choices).toBeCloseTo(report.imbalance.spread);
    expect((Math.max(...balanced) * report.ranks) / choices).toBeCloseTo(report.imbalance.balanced);
    const picture = readFileSync(svg, 'utf8');
    expect(picture).toContain('choices of each expert, and of each of its replicas');
    // Two bars of each expert, beside those of ranks.
    expect(picture.match(/aria-label="(expert|rank): /g)?.length).toBe(2 * (report.experts + report.ranks));
  });

  it('shows on a terminal what it is at, in one line that is empty at last', async () => {
    const args = ['demo', 'moe', '--small', '-n', '2', '--threads', '--from', root, '--no-svg'];
    const { code, stdout } = await runEpOnTerminal(args);
    expect(code).toBe(0);
    const lines = stdout.split('\r\u001b[K');
    // Both ranks tell of each phase; before the first text and after the last there is none.
    expect([...new Set(lines.slice(0, -1))]).toEqual([
      '',
      ...['collect and tokenise documents', 'route and place experts', 'run 2 threads'],
      ...['generate', 'steps', 'verify'],
    ]);
    expect(lines.at(-1)).toMatch(/^ {2}documents .*PASS: /s);
  });

  it.each([
    ['ibgda', 'high-throughput', ['--threads']],
    ['efa', 'low-latency', ['--threads']],
    ['efa', 'high-throughput', []],
    ['mixed', 'low-latency', ['--threads']],
    ['mixed', 'high-throughput', []],
  ] as const)(
    'passes with rows in fp8 over queue pairs of a software NIC: %s, %s',
    { timeout: 120_000 },
    async (transport, mode, ranks) => {
      const report = await demo(
        '--ranks',
        '3',
        '--mode',
        mode,
        '--dtype',
        'fp8',
        '--transport',
        transport,
        '--no-svg',
        ...ranks,
      );
      expect(report).toMatchObject({ pass: true, transport, mode, dtype: 'fp8' });
      // Quantised, so not as near as bf16: a comparison of something with itself would show.
      expect(report.error.relative).toBeGreaterThan(1e-2);
      if (transport !== 'mixed') return;
      expect(report.routes).toEqual(['own memory', 'nvshmem:shm', 'ibgda:soft']);
    },
  );

  it.each([
    ['low-latency', 'bf16'],
    ['high-throughput', 'fp8'],
  ])(
    'passes with rows in the memory of a stand-in for a GPU, which computes the experts: %s, %s',
    {
      timeout: 120_000,
    },
    async (mode, dtype) => {
      const form = ['--device', 'cuda', '--ranks', '2', '--mode', mode, '--dtype', dtype];
      const args = ['demo', 'moe', '--small', '--from', root, '--json', '--no-svg', ...form];
      const standIn = join(root, 'native/build/Release/libep_cuda_host.so');
      const { code, stdout, stderr } = await runEp(args, { EP_CUDA_PATH: standIn });
      expect({ code, stderr }).toEqual({ code: 0, stderr: '' });
      const report = JSON.parse(stdout) as MoeDemoReport;
      expect(report.expertRows).toEqual({ host: 0, cuda: report.tokens * report.topK });
      expect(report).toMatchObject({
        ...{
          pass: true,
          device: 'cuda',
          transport: 'cuda',
          rankMode: 'threads',
          mode,
          dtype,
          stagedBytes: 0,
          losses: [],
        },
        gpus: [{ gpu: 0, name: 'kernels on host threads (for tests)', ranks: [0, 1] }],
      });
    },
  );

  it.each([
    ['low-latency', 'fp8', '3'],
    ['high-throughput', 'bf16', '2'],
  ] as const)(
    'times two steps in turns, whose results are those of the steps: %s',
    {
      timeout: 120_000,
    },
    async (mode, dtype, ranks) => {
      const form = ['--device', 'cuda', '--ping-pong', '--ranks', ranks, '--mode', mode, '--dtype', dtype];
      const args = ['demo', 'moe', '--small', '--from', root, '--json', '--no-svg', ...form];
      const standIn = join(root, 'native/build/Release/libep_cuda_host.so');
      const { code, stdout, stderr } = await runEp(args, { EP_CUDA_PATH: standIn });
      expect({ code, stderr }).toEqual({ code: 0, stderr: '' });
      const report = JSON.parse(stdout) as MoeDemoReport;
      const { rounds, transfer, compute, together, hidden, differ } = report.turns!;
      expect({ pass: report.pass, rounds, differ }).toEqual({ pass: true, rounds: 2, differ: 0 });
      for (const milliseconds of [transfer, compute, together]) expect(milliseconds).toBeGreaterThan(0);
      // No more than all of it, whatever a busy machine made of the times.
      expect(hidden).toBeCloseTo(Math.min(1, (transfer + compute - together) / transfer));
      expect(moeReportText(report)).toMatch(/transfer hidden +-?\d+ % .*0 numbers differ/);
      expect(moePasses({ ...report, turns: { ...report.turns!, differ: 1 } })).toBe(false);
    },
  );

  it.each(['low-latency', 'high-throughput'])(
    'goes on at once without a rank that dies in the middle, whose kernels run on a stand-in for a GPU: %s',
    {
      timeout: 120_000,
    },
    async (mode) => {
      const form = ['--device', 'cuda', '--ranks', '3', '--kill', '1', '--mode', mode];
      const args = ['demo', 'moe', '--small', '--from', root, '--json', '--no-svg', ...form];
      const standIn = join(root, 'native/build/Release/libep_cuda_host.so');
      const { code, stdout, stderr } = await runEp(args, { EP_CUDA_PATH: standIn });
      expect({ code, stderr }).toEqual({ code: 0, stderr: '' });
      const { pass, losses } = JSON.parse(stdout) as MoeDemoReport;
      expect(pass).toBe(true);
      // Late ones would be EP_TIMEOUT.
      expect(losses.map(({ seenBy, rank, why }) => ({ seenBy, rank, why }))).toEqual([
        { seenBy: 0, rank: 1, why: 'EP_PEER_LOST' },
        { seenBy: 2, rank: 1, why: 'EP_PEER_LOST' },
      ]);
    },
  );

  it.each([
    ['a process', []],
    ['a thread', ['--threads', '--mode', 'high-throughput']],
    ['of one node with some, of another with others', ['--transport', 'mixed']],
    ['over EFA, where the step is done again', ['--transport', 'efa']],
    ['a thread over EFA', ['--threads', '--mode', 'high-throughput', '--transport', 'efa']],
  ])('goes on without a rank that dies in the middle, %s', { timeout: 120_000 }, async (_, more) => {
    const report = await demo('--ranks', '3', '--kill', '1', '--no-svg', ...more);
    expect(report.pass).toBe(true);
    expect(report.losses.map(({ seenBy, rank, why }) => ({ seenBy, rank, why }))).toEqual([
      { seenBy: 0, rank: 1, why: 'EP_PEER_LOST' },
      { seenBy: 2, rank: 1, why: 'EP_PEER_LOST' },
    ]);
    expect(report.replaced).toBe(false);
    // All tokens of the survivors, also in the step in the middle.
    expect(report.error.elements).toBe(report.expectedElements);
    expect(report.expectedElements).toBeGreaterThan((3 / 5) * report.tokens * 256);
    expect(report.droppedChoices).toBeGreaterThan(0);
  });

  it.each([
    ['a process', []],
    ['a thread', ['--threads', '--mode', 'high-throughput']],
    ['a process, over a NIC', ['--transport', 'ibgda']],
    ['a process, over EFA, where the step is done again', ['--transport', 'efa']],
    ['a process, over both', ['--transport', 'mixed', '--mode', 'high-throughput']],
  ])('takes another one in for a rank that died, %s', { timeout: 120_000 }, async (_, more) => {
    const report = await demo('--ranks', '3', '--kill', '1', '--replace', '--no-svg', ...more);
    expect(report.pass).toBe(true);
    expect(report.replaced).toBe(true);
    expect(report.losses.map(({ seenBy, rank }) => ({ seenBy, rank }))).toEqual([
      { seenBy: 0, rank: 1 },
      { seenBy: 2, rank: 1 },
    ]);
    // All that the survivors have, and what the newcomer did: more than two thirds.
    expect(report.error.elements).toBe(report.expectedElements);
    expect(report.expectedElements).toBeGreaterThan((2 / 3) * report.tokens * 256);
  });

  it.each([
    [['--replace'], '--replace must be with --kill'],
    [
      ['--kill', '1', '--replace', '--transport', 'fabric'],
      '--replace must be with --kill, over shm, ibgda, efa or mixed',
    ],
    [['--dtype', 'f32'], '--dtype must be bf16 or fp8'],
    [['--kill', '4'], '--kill must be one of 4 ranks'],
  ])('refuses %j', async (args, text) => {
    const { code, stderr } = await runEp(['demo', 'moe', ...args]);
    expect(code).toBe(2);
    expect(stderr).toContain(text);
  });
});

it('a job arrives at the ranks as it was written', () => {
  const { map } = balanceExperts([3, 1, 2], { worldSize: 2, places: 2 });
  const job: MoeJob = {
    seed: 4,
    mode: 'high-throughput',
    dtype: 'fp8',
    device: 'host',
    gpus: [],
    transport: 'shm',
    map,
    batch: 2,
    tokens: [Int32Array.of(1, 2, 3), Int32Array.of()],
    kill: { rank: 1, step: 0 },
  };
  const path = join(folder, 'job.json');
  writeMoeJob(path, job);
  expect(readMoeJob(path)).toEqual(job);
  expect(stepsOf(job)).toBe(2);
});

it('rows, routes and experts do not depend on who makes them, or in which pieces', () => {
  const tokens = Int32Array.of(5, 9, 5, 1);
  const [one, other] = [new MoeModel(3), new MoeModel(3)];
  const whole = one.rows(tokens, 10);
  expect(other.rows(tokens.subarray(2), 12)).toEqual(whole.subarray(2 * one.shape.hidden));
  expect(other.route(whole)).toEqual(one.route(whole));
  const x = Float32Array.from({ length: one.shape.hidden }, (_, h) => Math.sin(h));
  const [a, b] = [new Float32Array(x.length), new Float32Array(x.length)];
  one.apply(7, x, a, 1);
  other.apply(7, x, b, 1);
  expect(b).toEqual(a);
  other.apply(8, x, b, 1);
  expect(b).not.toEqual(a);
});

describe('the verdict', () => {
  const report: Omit<MoeDemoReport, 'pass'> = {
    date: '2026-01-01',
    machine: {} as MoeDemoReport['machine'],
    ranks: 3,
    rankMode: 'threads',
    mode: 'low-latency',
    dtype: 'bf16',
    device: 'host',
    gpus: [],
    transport: 'shm',
    documents: 1,
    tokens: 1,
    steps: 1,
    experts: 1,
    topK: 1,
    replicas: 1,
    gini: 0,
    imbalance: { spread: 1, balanced: 1 },
    load: { experts: [{ expert: 0, choices: 3, replicas: 2 }], spread: [3], balanced: [3] },
    bytes: { logical: 0, ownRank: 0, wire: 0 },
    phases: [],
    expertMilliseconds: 0,
    expertRows: { host: 3, cuda: 0 },
    stagedBytes: 0,
    error: { relative: 1e-3, largest: 0.1, elements: 10 },
    expectedElements: 10,
    tolerance: 1e-2,
    replaced: false,
    losses: [],
    droppedChoices: 0,
    routes: [],
  };

  it('fails on a NaN, on rows that were not compared, and on a death that a survivor did not see', () => {
    expect(moePasses(report)).toBe(true);
    expect(moePasses({ ...report, error: { ...report.error, relative: Number.NaN } })).toBe(false);
    expect(moePasses({ ...report, error: { ...report.error, elements: 9 } })).toBe(false);
    expect(moePasses({ ...report, killed: { rank: 1, step: 0 } })).toBe(false);
    const losses = [{ seenBy: 0, rank: 1, why: 'EP_PEER_LOST', step: 0 }];
    expect(moePasses({ ...report, losses })).toBe(false);
  });

  it('is printed as FAIL', () => {
    const machine = { cpu: '', cores: 1, memoryBytes: 1, os: '', node: '' } as unknown as MoeDemoReport['machine'];
    const text = moeReportText({ ...report, machine, pass: false });
    expect(text).toContain('FAIL: the relative error is 1.00e-3 of 10');
    expect(text).toMatch(/expert 0 +3 -> +2 x 1\.5/);
  });
});
