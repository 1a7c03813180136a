import { spawn } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { mkdir } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { ALL_SIZES, chooseCases, ourTargets, peerTarget, sizeText } from '../../bench/cases.js';
import { resultOf } from '../../bench/collectives.js';
import { Contender, checkBarriers } from '../../bench/contender.js';
import { goalOf, KIB, MIB } from '../../bench/goals.js';
import { numbersOf } from '../../bench/ours.js';
import {
  expectation,
  fillInput,
  isInPlace,
  mostCallsInPlace,
  poison,
  resultLength,
  type Shape,
  sampleStep,
  type Values,
} from '../../bench/pattern.js';
import {
  type Found,
  findGloo,
  findOpenMpi,
  GLOO_SCRIPT,
  OPEN_MPI_SOURCE,
  type StartOptions,
} from '../../bench/peers.js';
import { BENCH_OPS, formatCommand, parseAnswer, parseCommand, type Run, type Target } from '../../bench/protocol.js';
import { seriesOf, slowest, timesAsFast } from '../../bench/series.js';
import { paceOf, paysInRows, race } from '../../bench/turns.js';

const folder = mkdtempSync(join(tmpdir(), 'ep-bench-unit-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

let starts = 0;
async function startOptions(ranks: number, mostBytes: number): Promise<StartOptions> {
  const place = join(folder, `${starts++}`);
  await mkdir(place);
  return { folder: place, ranks, mostBytes, usableCores: 2, timeoutMs: 60_000 };
}

const budget = { turns: 2, turnMs: 2, caseMs: 200 } as const;

/** Every operation, a small and a large size: all of it is checked element by element by the peer's own program. */
async function runPeer(found: Found, ranks: number, large: number): Promise<void> {
  if ('unavailable' in found) {
    expect(found.unavailable).toMatch(/was not found|is not Open MPI|cannot import torch|without Gloo/);
    return;
  }
  const contender = await found.start(await startOptions(ranks, large));
  try {
    const { cases } = chooseCases(ranks, { ops: BENCH_OPS, sizes: [64, large] }, Number.POSITIVE_INFINITY);
    for (const one of cases) {
      const player = { name: found.name, contender, target: peerTarget(one) };
      const { times, unsupported } = await race([player], budget);
      if (unsupported.length > 0) continue;
      const { turns, calls } = times.get(found.name)!;
      expect(turns.length).toBe(budget.turns);
      const { p50, p99 } = seriesOf(turns, calls);
      expect(p50).toBeGreaterThan(0);
      expect(p99).toBeGreaterThanOrEqual(p50);
    }
    await contender.close();
  } finally {
    await contender.stop();
  }
}

/** The peer's own comparison must refuse what `from` becomes when it is replaced by `to`. */
async function runBroken(find: (source: string) => Promise<Found>, source: string, from: string, to: string) {
  const text = readFileSync(source, 'utf8');
  expect(text).toContain(from);
  const broken = join(folder, `broken-${starts}${source.slice(source.lastIndexOf('.'))}`);
  writeFileSync(broken, text.replaceAll(from, to));
  const found = await find(broken);
  if ('unavailable' in found) return;
  const contender = await found.start(await startOptions(2, 64 * KIB));
  try {
    const target = peerTarget({ op: 'all-reduce', bytes: 64 * KIB });
    await expect(race([{ name: 'broken', contender, target }], budget)).rejects.toThrow(
      /all-reduce.*element \d+ of 16384: found .*, expected/,
    );
  } finally {
    await contender.stop();
  }
}

describe('the peers of the benchmark', () => {
  it('runs and checks every operation of Open MPI, or says why there is none', async () => {
    await runPeer(await findOpenMpi(folder), 2, MIB);
    await runPeer(await findOpenMpi(folder), 4, MIB);
  }, 60_000);

  it('runs and checks every operation of Gloo, or says why there is none', async () => {
    await runPeer(await findGloo(), 2, 64 * KIB);
  }, 60_000);

  it('refuses wrong sums of Open MPI and of Gloo', async () => {
    await runBroken((source) => findOpenMpi(folder, source), OPEN_MPI_SOURCE, 'MPI_SUM', 'MPI_MAX');
    await runBroken(findGloo, GLOO_SCRIPT, 'ReduceOp.SUM', 'ReduceOp.MAX');
  }, 60_000);
});

/** A whole operation in this process: the input of every rank becomes what the operation makes of it. */
function perform(shapes: readonly Shape[], inputs: readonly Values[]): Values[] {
  const { op, elements, size } = shapes[0]!;
  const block = elements / size;
  const make = (length: number, of: (i: number) => number): Float32Array =>
    Float32Array.from({ length }, (_, i) => of(i));
  const sum = (i: number): number => inputs.reduce((total, data) => total + data[i]!, 0);
  return shapes.map((shape) => {
    const { rank } = shape;
    const length = resultLength(shape);
    if (op === 'all-reduce') return make(length, sum);
    if (op === 'broadcast') return make(length, (i) => inputs[0]![i]!);
    if (op === 'all-gather') return make(length, (i) => inputs[Math.floor(i / block)]![i % block]!);
    if (op === 'reduce-scatter') return make(length, (i) => sum(rank * block + i));
    return make(length, (i) => inputs[Math.floor(i / block)]![rank * block + (i % block)]!);
  });
}

/** A rank that introduces itself and then does `then` with its `link` and the next `line`. */
function rankProgram(then: string): string {
  return `const link = require('node:net').connect(process.argv[1], () => link.write('rank ' + process.argv[2] + '\\n'));
    link.on('data', (line) => { ${then} });`;
}

describe('a contender', () => {
  const programOf = async (programs: readonly string[], timeoutMs = 10_000) => {
    const { folder: place } = await startOptions(programs.length, 0);
    return Contender.start({
      name: 'peer',
      ranks: programs.length,
      socketPath: join(place, 'peer.sock'),
      timeoutMs,
      launch: (socketPath) =>
        programs.map((program, rank) => spawn(process.execPath, ['-e', program, socketPath, `${rank}`])),
    });
  };
  const command = {
    verb: 'run',
    ...peerTarget({ op: 'broadcast', bytes: 64 }),
    calls: 1,
    warm: 0,
    batches: 1,
  } as const;
  const good = rankProgram("if (String(line) === 'end\\n') link.end(); else link.write('ok 5\\n')");

  it('answers for all its ranks, and ends when told to', async () => {
    const contender = await programOf([good, good]);
    expect(await contender.numbers(command)).toEqual([[5], [5]]);
    await contender.close();
  });

  it('is lost with what it said last when a rank dies', async () => {
    const contender = await programOf([good, rankProgram("console.error('out of luck'); process.exit(3)")]);
    await expect(contender.ask(command)).rejects.toThrow(
      /^peer: a process ended with status 3 during run group broadcast f32 16 1 0 1; its last words: out of luck$/,
    );
    await contender.stop();
    await expect(programOf(['process.exit(4)'])).rejects.toThrow('ended with status 4 during start');
  });

  it('does not wait for the ranks that a failed one leaves hanging', async () => {
    const contender = await programOf([rankProgram(''), rankProgram("link.write('failed rank 1: no luck\\n')")]);
    await expect(contender.ask(command)).rejects.toThrow('peer: run group broadcast f32 16 1 0 1: rank 1: no luck');
    await contender.stop();
  });

  it('says which ranks do not answer', async () => {
    const contender = await programOf([good, rankProgram('')], 1500);
    await expect(contender.ask(command)).rejects.toThrow('no answer of ranks 1 within 1500 ms');
    await contender.stop();
  });
});

describe('the values of the benchmark', () => {
  const shapesOf = (op: Shape['op'], size: number, elements: number): Shape[] =>
    Array.from({ length: size }, (_, rank) => ({ op, dtype: 'f32', elements, rank, size }));

  it('become what each operation makes of them, in every place, and nothing else', () => {
    for (const size of [2, 4]) {
      for (const op of BENCH_OPS.filter((one) => one !== 'barrier')) {
        for (const elements of [size, 64, 8 * KIB, 16 * KIB + 4 * size]) {
          const shapes = shapesOf(op, size, elements);
          const inputs = shapes.map((shape) => {
            const data = new Float32Array(elements);
            fillInput(data, shape);
            return data;
          });
          const results = perform(shapes, inputs);
          shapes.forEach((shape, rank) => {
            const result = results[rank]!;
            const compare = expectation(shape);
            expect(() => compare(result, 1, 1)).not.toThrow();
            const step = sampleStep(shape);
            expect(() => compare(result, step, 1)).not.toThrow();
            const at = (elements + 7 * rank) % result.length;
            const kept = result[at]!;
            result[at] = kept + 1;
            expect(() => compare(result, 1, 1)).toThrow(
              `element ${at} of ${result.length}: found ${kept + 1}, expected`,
            );
            result[at] = kept;
            poison(result, shape, step);
            expect(() => compare(result, step, 1)).toThrow(/element 0 of .* found -1, expected/);
            expect(result.filter((value) => value === -1).length).toBe(Math.ceil(result.length / step));
          });
        }
      }
    }
  });

  it('tell a chunk in the wrong place, a missing call and a missing rank', () => {
    const [shape] = shapesOf('all-reduce', 2, 64 * KIB);
    const inputs = [0, 1].map((rank) => {
      const data = new Float32Array(shape!.elements);
      fillInput(data, { ...shape!, rank });
      return data;
    });
    const [result] = perform(shapesOf('all-reduce', 2, shape!.elements), inputs);
    const compare = expectation(shape!);
    const moved = result!.slice();
    moved.copyWithin(8 * KIB, 12 * KIB, 16 * KIB);
    for (const step of [1, sampleStep(shape!)]) {
      expect(() => compare(result!, step, 1)).not.toThrow();
      expect(() => compare(moved, step, 1)).toThrow('element ');
      expect(() => compare(result!, step, 2)).toThrow('element ');
      expect(() => compare(inputs[0]!, step, 1)).toThrow('element ');
    }
  });

  it('stay exact in both dtypes for as many all-reduces as may follow each other', () => {
    for (const size of [2, 4, 8, 16]) {
      const calls = mostCallsInPlace(size);
      for (const dtype of ['f32', 'bf16'] as const) {
        const shape: Shape = { op: 'all-reduce', dtype, elements: 5000, rank: 0, size };
        const data = dtype === 'f32' ? new Float32Array(5000) : new Uint16Array(5000);
        const floats = new Float64Array(5000);
        for (let rank = 0; rank < size; rank++) {
          fillInput(data, { ...shape, rank });
          for (let i = 0; i < 5000; i++) floats[i]! += dtype === 'f32' ? data[i]! : widen(data[i]!);
        }
        const scaled = floats.map((value) => value * size ** (calls - 1));
        expect(scaled.every((value) => Math.fround(value) === value)).toBe(true);
        const result = dtype === 'f32' ? Float32Array.from(scaled) : Uint16Array.from(scaled, narrow);
        if (dtype === 'bf16') expect(scaled.every((value, i) => widen(result[i]!) === value)).toBe(true);
        expect(() => expectation(shape)(result, 1, calls)).not.toThrow();
      }
    }
    expect(isInPlace('all-reduce') && isInPlace('broadcast') && !isInPlace('all-gather')).toBe(true);
  });
});

const word = new DataView(new ArrayBuffer(4));
function widen(bits: number): number {
  word.setUint32(0, bits * 2 ** 16);
  return word.getFloat32(0);
}
function narrow(value: number): number {
  word.setFloat32(0, value);
  return word.getUint16(0);
}

describe('what is said between the benchmark and its ranks', () => {
  it('is read as it was written', () => {
    const target = { variant: 'typed', op: 'all-to-all', dtype: 'bf16', elements: 4096 } as const;
    for (const command of [
      { verb: 'run', ...target, calls: 3, warm: 0, batches: 7 },
      { verb: 'check', ...target },
      { verb: 'bitwise', ...target },
    ] as const) {
      expect(parseCommand(formatCommand(command))).toEqual(command);
    }
    expect(() => parseCommand('dance')).toThrow('"dance"');
    expect(parseAnswer('ok 1 2\n')).toEqual({ kind: 'ok', words: ['1', '2'] });
    expect(parseAnswer('unsupported rank 0: no')).toEqual({ kind: 'unsupported', text: 'rank 0: no' });
    expect(parseAnswer('Segmentation')).toEqual({ kind: 'failed', text: 'answered "Segmentation"' });
  });

  it('shows a barrier that somebody leaves before the last has come', () => {
    const good = [
      [10, 30, 100, 131],
      [20, 31, 120, 130],
    ];
    expect(() => checkBarriers('x', good, 2)).not.toThrow();
    expect(() => checkBarriers('x', [[10, 30, 100, 119], good[1]!], 2)).toThrow(
      'x: barrier 1: rank 0 left 1 ns before rank 1 came',
    );
    expect(() => checkBarriers('x', good, 3)).toThrow();
  });
});

describe('figures', () => {
  it('take the slowest rank, and the percentiles of all samples', () => {
    expect(
      slowest(
        [
          [1000, 4000],
          [2000, 3000],
        ],
        2,
      ),
    ).toEqual([1, 2]);
    const turns = [Array.from({ length: 50 }, (_, i) => i + 1), Array.from({ length: 50 }, (_, i) => i + 51)];
    expect(seriesOf(turns, 4)).toMatchObject({ p50: 51, p99: 100, mean: 50.5, samples: 100, calls: 4 });
  });

  it('compare within turns: what slows everybody down for a while changes nothing', () => {
    const ours = [
      [10, 11, 12],
      [100, 110, 120],
      [10, 11, 12],
    ];
    const other = ours.map((turn) => turn.map((value) => value * 3));
    expect(timesAsFast(ours, other)).toBeCloseTo(3);
    expect(timesAsFast(ours, [...other.slice(0, 2), [1, 1, 1]])).toBeCloseTo(3);
  });

  it('pace many short calls and few long ones', () => {
    expect(paceOf({ callNs: 200, calls: 100, batchMs: 0.04 }, 40)).toMatchObject({
      calls: 100,
      batches: 1000,
      warm: 100,
    });
    expect(paceOf({ callNs: 1e6, calls: 1, batchMs: 4 }, 40)).toEqual({ calls: 1, batches: 10, warm: 1, turnMs: 44 });
    expect(paceOf({ callNs: 5e8, calls: 1, batchMs: 600 }, 40)).toEqual({ calls: 1, batches: 1, warm: 0, turnMs: 600 });
  });

  it('times in rows what is short, or seems long only because ranks leave the barrier one after the other', () => {
    expect(paysInRows(200, 300, 500)).toBe(true);
    expect(paysInRows(40_000, 300_000, 11)).toBe(true);
    expect(paysInRows(40_000, 60_000, 11)).toBe(false);
    expect(paysInRows(200, 300, 1)).toBe(false);
  });

  it('are of small calls that were warmed up, however long the first ones seemed', async () => {
    let made = 0;
    const cold = { ranks: 4, check: async () => undefined } as unknown as Contender;
    // As ranks that outnumber cores are while V8 compiles: no call by itself is short before a few thousand have been made.
    cold.numbers = async (command) => {
      const { calls, warm, batches } = command as Run;
      made += calls * (warm + batches);
      const us = made < 4000 ? 800 : 10;
      return Array.from({ length: 4 }, () => new Array<number>(batches).fill(calls * us * 1000));
    };
    const small = { variant: 'group', op: 'all-reduce', dtype: 'f32', elements: 16 } as const;
    const timed = async (target: Target): Promise<readonly number[]> => {
      const { times } = await race([{ name: 'cold', contender: cold, target }], { turns: 3, turnMs: 2, caseMs: 200 });
      return times.get('cold')!.turns.flat();
    };
    expect(new Set(await timed(small))).toEqual(new Set([10]));
    // Large ones may be as long as they seem: they are timed at once.
    made = 0;
    expect((await timed({ ...small, elements: MIB }))[0]).toBe(800);
  });

  it('are held against the goals of the project', () => {
    const at = (op: Shape['op'], bytes: number, ranks = 2, usableCores = 2) => ({ op, bytes, ranks, usableCores });
    const least = (value: number) => ({ at: 'least', value });
    const most = (value: number) => ({ at: 'most', value });
    expect(goalOf('group over Open MPI', at('all-reduce', MIB))).toEqual(least(3));
    expect(goalOf('group over Open MPI', at('all-reduce', 64 * MIB))).toEqual(least(5));
    expect(goalOf('group of the bound', at('all-reduce', 64 * MIB))).toEqual(least(0.8));
    for (const bytes of ALL_SIZES) {
      const large = bytes >= MIB;
      expect(goalOf('typed over Open MPI', at('all-reduce', bytes))).toEqual(large ? least(1.3) : undefined);
      expect(goalOf('group over Open MPI', at('all-to-all', bytes))).toEqual(large ? least(1.4) : undefined);
      for (const op of ['broadcast', 'all-gather', 'reduce-scatter'] as const) {
        expect(goalOf('group over Open MPI', at(op, bytes))).toEqual(large ? least(1.3) : undefined);
      }
      for (const op of BENCH_OPS) expect(goalOf('group over Open MPI', at(op, bytes, 4))).toEqual(least(1));
    }
    expect(goalOf('bf16 over f32', at('all-reduce', 64 * MIB))).toEqual(least(1.5));
    expect(goalOf('bf16 over f32', at('all-reduce', 16 * MIB))).toBeUndefined();
    expect([8, MIB, 64 * MIB].map((bytes) => goalOf('group over Gloo', at('all-reduce', bytes)))).toEqual(
      [50, 8, 5].map(least),
    );
    expect(goalOf('typed over Gloo', at('all-reduce', MIB))).toEqual(least(3.5));
    for (const [figure, value] of [
      ['native us', 0.15],
      ['inline us', 0.5],
      ['awaited us', 1.5],
    ] as const) {
      expect(goalOf(figure, at('all-reduce', 8))).toEqual(most(value));
      expect(goalOf(figure, at('barrier', 0))).toEqual(most(value));
      expect(goalOf(figure, at('all-reduce', 64))).toBeUndefined();
      expect(goalOf(figure, at('barrier', 0, 2, 1))).toBeUndefined();
    }
  });

  it('say whether a goal is met', () => {
    const times = new Map([
      ['group', { turns: [[10], [10]], calls: 1 }],
      ['typed', { turns: [[30], [30]], calls: 1 }],
      ['Open MPI', { turns: [[35], [36]], calls: 1 }],
    ] as const);
    const { series, figures } = resultOf({ op: 'all-reduce', bytes: MIB }, 2, 2, times);
    expect(series.group).toMatchObject({ p50: 10, samples: 2 });
    expect(figures).toEqual([
      expect.objectContaining({ name: 'group over Open MPI', value: 3.6, goal: { at: 'least', value: 3, met: true } }),
      expect.objectContaining({
        name: 'typed over Open MPI',
        value: 1.2,
        goal: { at: 'least', value: 1.3, met: false },
      }),
    ]);
  });
});

describe('the cores of ranks', () => {
  it("are read from the kernel's list", () => {
    expect(numbersOf('\t0-3,8,10-11\n')).toEqual([0, 1, 2, 3, 8, 10, 11]);
    expect(numbersOf('5')).toEqual([5]);
  });
});

describe('the cases', () => {
  it('are those of the issue, less what does not fit, with the reason', () => {
    const all = chooseCases(2, { ops: BENCH_OPS, sizes: ALL_SIZES }, Number.POSITIVE_INFINITY);
    expect(all.skipped).toEqual([]);
    expect(all.cases.length).toBe(5 * 11 + 1);
    expect(ALL_SIZES.map(sizeText).join(', ')).toBe(
      '8 B, 64 B, 1 KB, 16 KB, 64 KB, 256 KB, 1 MB, 4 MB, 16 MB, 64 MB, 256 MB',
    );
    const small = chooseCases(4, { ops: ['all-gather', 'all-reduce'], sizes: [256 * MIB, 8] }, 2 ** 33);
    expect(small.cases).toEqual([{ op: 'all-reduce', bytes: 8 }]);
    expect(small.skipped).toEqual([
      '4 ranks, 256 MB: all contenders together need 12 GB of memory, 8 GB are available',
      '4 ranks, all-gather of 8 B: not whole f32 elements for every rank',
    ]);
  });

  it('take on who is asked for by a goal', () => {
    const names = (op: Shape['op'], bytes: number) => ourTargets({ op, bytes }).map(([name]) => name);
    expect(names('all-reduce', 8)).toEqual(['group', 'typed', 'awaited', 'native', 'exchange']);
    expect(names('barrier', 0)).toEqual(['group', 'awaited', 'native', 'exchange']);
    expect(names('all-reduce', 64 * MIB)).toEqual(['group', 'typed', 'bf16', 'copy', 'copy-non-temporal']);
    expect(names('broadcast', 64 * MIB)).toEqual(['group', 'typed']);
  });
});
