import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { afterAll, describe, expect, it } from 'vitest';
import {
  collectDocuments,
  findRoot,
  fullSelection,
  selectDocuments,
  smallSelection,
  type TextFile,
} from '../src/demo/documents.js';
import { draw, TokenRows } from '../src/demo/inputs.js';
import { readJob, writeJob } from '../src/demo/job.js';
import { runRankThreads } from '../src/demo/rank-threads.js';
import { passes, reportText, sentBytesOf, tensorErrors, tolerances, turnsOf } from '../src/demo/report.js';
import { COMPARED, type ComparedTensor } from '../src/demo/results.js';
import type { StepResult } from '../src/demo/step.js';
import { demoTransportNames } from '../src/demo/transports.js';
import { evenBudgets, planStep } from '../src/plan/plan-step.js';
import { runEp, runEpOnTerminal, startEp, untilEmpty, untilGone } from './ep.js';
import { demo } from './small-demo.js';

const root = fileURLToPath(new URL('../../..', import.meta.url));
const folder = mkdtempSync(join(tmpdir(), 'ep-demo-test-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

/** The rank processes of a demo, once all have been started. */
async function rankProcesses(demoPid: number, count: number): Promise<number[]> {
  for (let tries = 0; tries < 1000; tries++) {
    const found = readdirSync('/proc').filter((name) => /^\d+$/.test(name) && isRankOf(name, demoPid));
    if (found.length === count) return found.map(Number);
    await sleep(20);
  }
  throw new Error(`demo ${demoPid} did not start ${count} ranks`);
}

function isRankOf(pid: string, parent: number): boolean {
  try {
    const stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
    const [, parentPid] = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
    return Number(parentPid) === parent && readFileSync(`/proc/${pid}/cmdline`, 'utf8').includes('demo-rank');
  } catch {
    // It ended while it was looked at.
    return false;
  }
}

describe('ep demo', () => {
  for (const [ranks, mode, dtype] of [
    [1, 'processes', 'bf16'],
    [2, 'threads', 'f32'],
    [3, 'processes', 'f32'],
    [4, 'threads', 'bf16'],
  ] as const) {
    it(`passes on ${ranks} ranks as ${mode} in ${dtype}`, async () => {
      const report = await demo(['-n', String(ranks), '--dtype', dtype, ...(mode === 'threads' ? ['--threads'] : [])]);
      expect(report).toMatchObject({ pass: true, ranks, mode, dtype });
      expect(report.documents).toBeGreaterThanOrEqual(smallSelection.documents);
      expect(report.tokens).toBeGreaterThanOrEqual(smallSelection.tokens);
      expect(report.longest.tokens).toBeGreaterThanOrEqual(smallSelection.longest);
      expect(report.imbalance.planned).toBeLessThanOrEqual(report.imbalance.atHome);
      expect(report.bytes.remote).toBe(report.bytes.needed);
      expect(report.bytes.remote > 0).toBe(ranks > 1);
      expect(report.bytes.staged).toBe(0);
      expect(report.errors.map((error) => error.tensor)).toEqual(COMPARED);
      for (const error of report.errors) expect(error.relative).toBeLessThanOrEqual(tolerances[dtype]);
      // Rounding to bf16 must show: errors of 0 would mean that a tensor was compared with itself.
      if (dtype === 'bf16') for (const error of report.errors) expect(error.relative).toBeGreaterThan(1e-4);
      expect(report.phases.every((phase) => phase.milliseconds >= 0)).toBe(true);
    });
  }

  it('shows on a terminal what it is at, and tells the report after that', async () => {
    const args = ['demo', 'attention', '--small', '-n', '2', '--threads', '--from', root, '--no-svg'];
    const { code, stdout } = await runEpOnTerminal(args);
    expect(code).toBe(0);
    const [shown, told] = stdout.split('\u001b[?25h  documents ') as [string, string];
    const begins = [
      /◼\S* collect documents/,
      /✔\S* collect documents: \d+ different files/,
      /✔\S* tokenise: \d+ documents/,
      /✔\S* plan: imbalance \d\.\d{3} -> \d\.\d{3}/,
      /› generate\r/,
      /› verify\r/,
      /✔\S* run 2 threads/,
    ].map((line) => shown.search(line));
    expect(begins).not.toContain(-1);
    expect(begins).toEqual([...begins].sort((a, b) => a - b));
    expect(told).toMatch(/PASS: /);
    // Nothing but the report where nobody watches.
    const { stdout: piped, stderr } = await runEp(args);
    expect(stderr).toBe('');
    expect(piped).toMatch(/^ {2}documents /);
  });

  describe('--device cuda', () => {
    it('says what is missing where there is no GPU', async () => {
      const missing = join(folder, 'nowhere.so');
      const { code, stdout, stderr } = await runEp(['demo', 'attention', '--device', 'cuda'], {
        EP_CUDA_PATH: missing,
      });
      expect({ code, stdout }).toEqual({ code: 1, stdout: '' });
      expect(stderr).toMatch(
        /demo attention: --device cuda: no GPU can be used: .*nowhere\.so.*; needed only.*\[EP_UNAVAILABLE\]/,
      );
    });

    it('refuses a transport of the host', async () => {
      const { code, stderr } = await runEp(['demo', '--device', 'cuda', '--transport', 'efa']);
      expect(code).toBe(2);
      expect(stderr).toMatch(/--transport.*absent with --device cuda/);
    });
  });

  it.each([
    [['attention'], /--ping-pong.*with --device cuda/],
    [['moe'], /--ping-pong.*with --device cuda/],
    [['moe', '--device', 'cuda', '--kill', '1'], /--ping-pong.*without --kill/],
  ])('refuses --ping-pong where nothing goes in turns: %s', async (job, text) => {
    const { code, stderr } = await runEp(['demo', ...job, '--ping-pong']);
    expect(code).toBe(2);
    expect(stderr).toMatch(text);
  });

  it.each([
    [['--dtype', 'fp8']],
    [['--mode', 'high-throughput']],
    [['--mode', 'low-latency']],
    [['--kill', '1']],
    [['--replace']],
  ])('refuses for attention what is of experts: %j', async (option) => {
    const { code, stdout, stderr } = await runEp(['demo', 'attention', ...option]);
    expect({ code, stdout }).toEqual({ code: 2, stdout: '' });
    expect(stderr).toMatch(new RegExp(`demo attention: ${option[0]} must be .* \\[EP_INVALID_ARGUMENT\\]`));
  });

  it('names in its README all that carries rows', () => {
    const readme = readFileSync(new URL('../README.md', import.meta.url), 'utf8');
    const rows = readme.split('\n').filter((line) => line.startsWith('| `--transport'));
    expect(rows).toHaveLength(2);
    for (const row of rows) {
      expect(demoTransportNames.filter((name) => !new RegExp(`\\b${name}\\b`).test(row))).toEqual([]);
    }
  });

  it('ends worker threads that are stopped before they have begun', async () => {
    const source = `import { parentPort } from 'node:worker_threads'; setTimeout(() => parentPort.postMessage('lived'), 1000);`;
    const said: unknown[] = [];
    const places = [{ rank: 0, worldSize: 1, jobPath: '', storePath: '' }];
    const program = new URL(`data:text/javascript,${encodeURIComponent(source)}`);
    await runRankThreads({ program, places, signal: AbortSignal.abort() }, (what) => said.push(what));
    expect(said).toEqual([]);
  });

  it('prints a report for people, quietly in a pipe, and draws the plan', async () => {
    const svg = join(folder, 'demo.svg');
    const { code, stdout, stderr } = await runEp(['demo', '--small', '--from', root, '-n', '2', '--svg', svg]);
    expect({ code, stderr }).toEqual({ code: 0, stderr: '' });
    expect(stdout).toMatch(/imbalance +\d\.\d{3} with every shard at home, 1\.0\d\d as planned/);
    expect(stdout).toMatch(/bytes moved +.* between ranks, .* needed/);
    expect(stdout).toMatch(/attention backward +\d+\.\d ms/);
    expect(stdout).toMatch(/dV +\d\.\d\de-\d/);
    expect(stdout).toMatch(/PASS: every relative error is at most 0\.01\n$/);
    expect(stdout).not.toContain('\u001b');
    expect(readFileSync(svg, 'utf8')).toContain('ep demo: 8 documents');
  });

  it.each([
    ['SIGTERM', 143],
    ['SIGINT', 130],
  ] as const)('leaves no rank behind when %s stops it', async (signal, status) => {
    const run = startEp(['demo', '--from', root, '-n', '2', '--no-svg']);
    const ranks = await rankProcesses(run.child.pid!, 2);
    run.child.kill(signal);
    const { code, stderr } = await run.finished;
    expect(code).toBe(status);
    expect(stderr).toContain(`stopped by ${signal}`);
    expect(await untilGone(ranks, 5000)).toEqual([]);
  });

  it.each(['processes', 'threads'])('leaves nothing behind when it is killed itself (%s)', async (mode) => {
    const temporary = mkdtempSync(join(folder, 'killed-'));
    const flags = mode === 'threads' ? ['--threads'] : [];
    const run = startEp(['demo', '--from', root, '-n', '2', '--no-svg', ...flags], { TMPDIR: temporary });
    // Killed while the ranks have its files: the job folder has been made, and read by processes that exist.
    while (readdirSync(temporary).length === 0) await sleep(10);
    const ranks = mode === 'threads' ? [] : await rankProcesses(run.child.pid!, 2);
    run.child.kill('SIGKILL');
    expect((await run.finished).signal).toBe('SIGKILL');
    expect(await untilGone(ranks, 5000)).toEqual([]);
    await untilEmpty(temporary);
  });

  it('ends with an error that names the rank when one is killed', async () => {
    const run = startEp(['demo', '--from', root, '-n', '3', '--no-svg', '--json']);
    const ranks = await rankProcesses(run.child.pid!, 3);
    // All are at work once their files of the store are open; before, the loss is only noticed by the launcher.
    await sleep(2500);
    process.kill(ranks[1]!, 'SIGKILL');
    const { code, stdout } = await run.finished;
    expect(code).toBe(1);
    const { error } = JSON.parse(stdout) as { readonly error: { readonly code: string; readonly message: string } };
    expect(error.code).toBe('EP_PEER_LOST');
    expect(error.message).toMatch(/rank \d/);
    expect(await untilGone(ranks, 5000)).toEqual([]);
  });

  it.each(['attention', 'moe'])(
    'prints FAIL and ends with status 1 when a rank of %s computes with other rows',
    async (job) => {
      const preload = new URL('./programs/other-seed.mjs', import.meta.url).href;
      const run = (...more: string[]) =>
        runEp(['demo', job, '--small', '--from', root, '-n', '2', '--no-svg', ...more], {
          NODE_OPTIONS: `--import ${preload}`,
        });
      const text = await run();
      expect({ code: text.code, stderr: text.stderr }).toEqual({ code: 1, stderr: '' });
      expect(text.stdout).toMatch(/^FAIL: /m);
      const json = await run('--json');
      expect({ code: json.code, stderr: json.stderr }).toEqual({ code: 1, stderr: '' });
      expect(JSON.parse(json.stdout)).toMatchObject({ pass: false, ranks: 2 });
    },
  );

  it.each(['attention', 'moe'])('%s says that its picture cannot be written before it does anything', async (job) => {
    // Nor is there any text, which would be the next complaint.
    const args = ['demo', job, '--small', '--from', folder, '--svg'];
    const missing = await runEp([...args, join(folder, 'missing', 'a.svg')]);
    expect(missing.code).toBe(1);
    expect(missing.stderr).toMatch(/cannot write .*a\.svg: there is no such file or folder \(ENOENT\) \[EP_SYSTEM\]/);
    const aFolder = await runEp([...args, folder]);
    expect(aFolder.stderr).toMatch(/cannot write .*: it is a folder, not a file \(EISDIR\) \[EP_SYSTEM\]/);
  });

  it('says what is missing where there is too little text', async () => {
    const { code, stderr } = await runEp(['demo', '--small', '--from', folder, '--no-svg']);
    expect(code).toBe(1);
    expect(stderr).toMatch(
      /demo: found 0 documents of 0 tokens, none long enough; needed 8 .* \[EP_INVALID_ARGUMENT\]/,
    );
  });
});

const write = (path: string, text: string): void => {
  mkdirSync(dirname(path), { recursive: true });
  writeFileSync(path, text);
};
const words = (word: string, count: number): string => `${word} `.repeat(count);

describe('documents', () => {
  it('are found in the folder and in installed packages, once each, in an order that does not depend on names', () => {
    const base = join(folder, 'workspace');
    const store = join(base, 'node_modules/.pnpm');
    write(join(base, 'package.json'), '{}');
    write(join(base, 'README.md'), words('own', 100));
    write(join(base, 'docs/guide.txt'), words('guide', 100));
    write(join(base, 'docs/code.ts'), words('code', 100));
    write(join(base, 'short.md'), 'short');
    write(join(base, 'dist/built.md'), words('built', 100));
    write(join(store, 'a@1.0.0/node_modules/a/README.md'), words('package-a', 100));
    write(join(store, 'b@2.0.0/node_modules/b/README.md'), words('package-b', 100));
    write(join(store, 'b@2.0.0/node_modules/b/copy.md'), words('own', 100));
    symlinkSync('.pnpm/a@1.0.0/node_modules/a', join(base, 'node_modules/a'));
    // A dependency of a, and back: the links of a pnpm store have cycles.
    symlinkSync('../../b@2.0.0/node_modules/b', join(store, 'a@1.0.0/node_modules/b'));
    symlinkSync('../../a@1.0.0/node_modules/a', join(store, 'b@2.0.0/node_modules/a'));
    symlinkSync('nowhere', join(base, 'node_modules/broken'));
    symlinkSync('../docs', join(base, 'node_modules/linked'));
    const files = collectDocuments(base);
    expect(files.map((file) => file.name).sort()).toEqual([
      'README.md',
      'a/README.md',
      'b/README.md',
      'docs/guide.txt',
    ]);
    expect(files.map((file) => file.hash)).toEqual(files.map((file) => file.hash).sort());
    expect(collectDocuments(base)).toEqual(files);
    expect(findRoot(join(base, 'docs'))).toBe(base);
  });

  it('of this repository and its packages are enough for the demo', () => {
    const files = collectDocuments(root);
    const quarter = (text: string): number[] => Array.from({ length: text.length / 4 }, (_, i) => i);
    const documents = selectDocuments(files, fullSelection, quarter);
    const lengths = documents.map((document) => document.tokens.length);
    expect(lengths.reduce((a, b) => a + b, 0)).toBeGreaterThanOrEqual(32_000);
    expect(documents.length).toBeGreaterThanOrEqual(20);
    expect(Math.max(...lengths)).toBeGreaterThanOrEqual(8000);
    expect(new Set(documents.map((document) => document.name)).size).toBe(documents.length);
  });

  it('are cut, with one longer than the others', () => {
    const files: TextFile[] = Array.from({ length: 12 }, (_, i) => ({
      name: `${i}`,
      hash: `${i}`,
      text: words('w', 400),
    }));
    const encode = (text: string): number[] => [...text.matchAll(/\w/g)].map((_, i) => i);
    const wanted = { documents: 4, tokens: 700, longest: 300, longestCut: 350, cut: 100 };
    const lengths = selectDocuments(files, wanted, encode).map((document) => document.tokens.length);
    expect(lengths).toEqual([350, 100, 100, 100, 100]);
    expect(() => selectDocuments(files.slice(0, 2), wanted, encode)).toThrow(
      'found 2 documents of 450 tokens; needed 4 of 700',
    );
    expect(() => selectDocuments(files, { ...wanted, longest: 401 }, encode)).toThrow('none long enough');
  });
});

describe('rows from tokens', () => {
  const documents = [Int32Array.of(5, 9, 5, 7, 5), Int32Array.of(7, 5)];
  const rows = (
    seed: number,
    kind: 'q' | 'k' | 'v' | 'dO',
    document: number,
    from: number,
    count: number,
  ): Float32Array => {
    const into = new Float32Array(count * (kind === 'q' || kind === 'dO' ? 512 : 128));
    new TokenRows(seed, documents).fill(kind, document, from, count, into);
    return into;
  };

  it('are the same whoever makes them, in whatever pieces', () => {
    for (const kind of ['q', 'k', 'v', 'dO'] as const) {
      const whole = rows(1, kind, 0, 0, 5);
      const width = whole.length / 5;
      for (let from = 0; from < 5; from++) {
        expect(rows(1, kind, 0, from, 1)).toEqual(whole.slice(from * width, (from + 1) * width));
      }
    }
  });

  it('depend on seed and token, and on the position where they should', () => {
    expect(rows(1, 'v', 0, 0, 1)).toEqual(rows(1, 'v', 0, 2, 1));
    expect(rows(1, 'v', 0, 0, 1)).toEqual(rows(1, 'v', 1, 1, 1));
    expect(rows(1, 'v', 0, 0, 1)).not.toEqual(rows(1, 'v', 0, 1, 1));
    expect(rows(1, 'q', 0, 0, 1)).not.toEqual(rows(1, 'q', 0, 2, 1));
    expect(rows(1, 'dO', 0, 0, 1)).not.toEqual(rows(1, 'dO', 1, 0, 1));
    expect(rows(1, 'k', 0, 0, 1)).not.toEqual(rows(2, 'k', 0, 0, 1));
  });

  it('keep the norm and the relative angle under rotation', () => {
    const norm = (row: Float32Array): number => Math.hypot(...row);
    const dot = (a: Float32Array, b: Float32Array): number => a.reduce((sum, value, i) => sum + value * b[i]!, 0);
    const q0 = rows(1, 'q', 0, 0, 1).subarray(0, 64);
    const q2 = rows(1, 'q', 0, 2, 1).subarray(0, 64);
    const k2 = rows(1, 'k', 0, 2, 1).subarray(0, 64);
    const k4 = rows(1, 'k', 0, 4, 1).subarray(0, 64);
    expect(norm(q2)).toBeCloseTo(norm(q0), 4);
    // Token 5 at 0 and 2, and at 2 and 4: the score depends on the distance alone.
    expect(dot(q2, k4)).toBeCloseTo(dot(q0, k2), 3);
  });

  it('have mean 0 and variance 1', () => {
    const values = Float64Array.from({ length: 100_000 }, (_, i) => draw(3, 1, i >> 8, i & 255));
    const mean = values.reduce((a, b) => a + b, 0) / values.length;
    const variance = values.reduce((a, b) => a + (b - mean) ** 2, 0) / values.length;
    expect(Math.abs(mean)).toBeLessThan(0.02);
    expect(variance).toBeCloseTo(1, 1);
    const projected = rows(1, 'q', 0, 0, 5);
    expect(projected.reduce((a, b) => a + b * b, 0) / projected.length).toBeGreaterThan(0.7);
    expect(projected.reduce((a, b) => a + b * b, 0) / projected.length).toBeLessThan(1.4);
  });

  it('refuse tokens that are not there', () => {
    const source = new TokenRows(1, documents);
    expect(() => source.fill('q', 1, 1, 2, new Float32Array(1024))).toThrow('tokens 1 + 2 of document 1');
    expect(() => source.fill('q', 2, 0, 1, new Float32Array(512))).toThrow('it has 0 tokens');
    expect(() => source.fill('k', 0, 0, 1, new Float32Array(512))).toThrow('a row of k 128 elements');
  });
});

const resultOf = (
  rank: number,
  change: Partial<Record<ComparedTensor, Partial<StepResult['compared']['o']>>> = {},
): StepResult => {
  const one = { elements: 10, squaredError: 1e-8, squaredReference: 4, largest: 1e-3 };
  const compared = Object.fromEntries(COMPARED.map((name) => [name, { ...one, ...change[name] }]));
  return {
    rank,
    pid: 1,
    milliseconds: {},
    bytesSent: { forward: 0, backward: 0 },
    stagedBytes: 0,
    compared,
  } as unknown as StepResult;
};

describe('two halves in turns', () => {
  const turnsOfRank = (transfer: number[], compute: number[], together: number[]) => ({
    ...resultOf(0),
    turns: { transfer, compute, together },
  });

  it('say which share of the transfer took no time of its own', () => {
    // By round the slowest rank: 4, 6, 5; 10, 10, 10; 12, 11, 30.
    const results = [turnsOfRank([4, 6, 1], [10, 1, 10], [12, 1, 30]), turnsOfRank([2, 3, 5], [9, 10, 8], [8, 11, 5])];
    const turns = { rounds: 3, transfer: 5, compute: 10, together: 12, hidden: 0.6 };
    expect(turnsOf(results)).toEqual(turns);
    expect(turnsOf([resultOf(0)])).toBe(undefined);
  });

  it('hide nothing where each waits for the other, and less than nothing where they slow each other down', () => {
    expect(turnsOf([turnsOfRank([5], [10], [15])])!.hidden).toBe(0);
    expect(turnsOf([turnsOfRank([5], [10], [20])])!.hidden).toBe(-1);
  });
});

describe('the verdict', () => {
  const elements = { o: 20, dQ: 20, dK: 20, dV: 20 };
  const bytes = { remote: 1000, local: 24, needed: 900, staged: 0, sent: 1024 };

  it('adds up the ranks', () => {
    const errors = tensorErrors([resultOf(0), resultOf(1)]);
    expect(errors[0]).toEqual({ tensor: 'o', elements: 20, relative: Math.sqrt(2e-8 / 8), largestAbsolute: 1e-3 });
    expect(passes(errors, 1e-3, elements, bytes)).toBe(true);
    expect(passes(errors, 1e-5, elements, bytes)).toBe(false);
  });

  it('fails on a NaN, and when rows were not compared', () => {
    const nan = tensorErrors([resultOf(0), resultOf(1, { dK: { squaredError: Number.NaN, largest: Number.NaN } })]);
    expect(passes(nan, 1, elements, bytes)).toBe(false);
    expect(nan[2]?.largestAbsolute).toBeNaN();
    const short = tensorErrors([resultOf(0), resultOf(1, { dV: { elements: 9 } })]);
    expect(passes(short, 1, elements, bytes)).toBe(false);
    expect(passes([], 1, elements, bytes)).toBe(false);
  });

  it('fails where the ranks did not send the bytes that were planned', async () => {
    const errors = tensorErrors([resultOf(0), resultOf(1)]);
    expect(passes(errors, 1e-3, elements, { ...bytes, sent: 1000 })).toBe(false);
    expect(passes(errors, 1e-3, elements, { ...bytes, sent: 1025 })).toBe(false);
    const sent = { forward: 300, backward: 212 };
    expect(sentBytesOf([resultOf(0), resultOf(1)].map((result) => ({ ...result, bytesSent: sent })))).toBe(1024);
    const report = await demo(['-n', '2']);
    expect(report.bytes.sent).toBe(report.bytes.remote + report.bytes.local);
    expect(report.bytes.remote).toBeGreaterThan(0);
    const less = { ...report, pass: false, bytes: { ...report.bytes, sent: 17 } };
    expect(reportText(less)).toContain(
      `; the ranks sent 17 bytes where ${report.bytes.remote + report.bytes.local} were planned`,
    );
    expect(reportText({ ...report, pass: false })).not.toContain('were planned');
  });

  it('is printed as FAIL', async () => {
    const report = await demo(['-n', '1']);
    expect(reportText({ ...report, pass: false })).toMatch(/FAIL: the relative errors must be at most 0\.01/);
  });
});

it('a job arrives at the ranks as it was written', () => {
  const { planned } = planStep({
    lengths: Int32Array.of(40, 3),
    budgets: evenBudgets(43, 2),
    balance: true,
    tolerance: 0,
    block: 1,
    sharing: 'each-server',
    rowBytesQ: 8,
    rowBytesKv: 4,
  });
  const documents = [Int32Array.of(1, 2), Int32Array.of()];
  const job = {
    dtype: 'f32',
    seed: 7,
    device: 'host',
    gpus: [],
    transport: 'ibgda',
    plan: planned,
    documents,
  } as const;
  const path = join(folder, 'job.json');
  writeJob(path, job);
  expect(readJob(path)).toEqual(job);
});
