/** Attention dispatch between real ranks, compared with the plain oracle of @ep/plan/reference. */
import { describe, expect, it } from 'vitest';
import { type Mode, runRanks, valuesOf } from './ranks.js';

const range = (from: number, to: number) => Array.from({ length: to - from }, (_, i) => from + i);

interface Compared {
  readonly compared: number;
  readonly elements: Readonly<Record<'q' | 'kv' | 'o' | 'dense' | 'reduced', number>>;
  /** Of the last plan: other ranks to which this one sent rows, and from which it received some. */
  readonly remote: { readonly sendsTo: number; readonly receivesFrom: number };
  readonly leaks: { readonly pending: number };
}

describe('moves what the plan says', () => {
  for (const worldSize of [1, 2, 3, 4, 7]) {
    it(`f32 on ${worldSize} threads`, { timeout: 120_000 }, async () => {
      const seeds = range(worldSize * 100, worldSize * 100 + 12);
      const reports = await runRanks('oracle', worldSize, 'threads', {
        data: { seeds, dtype: 'f32', qRow: 16, kvRow: 8 },
      });
      for (const { compared, leaks } of valuesOf<Compared>(reports)) {
        expect(compared).toBe(seeds.length);
        expect(leaks.pending).toBe(0);
      }
    });
  }

  for (const [dtype, qRow, kvRow] of [
    ['bf16', 5, 3],
    ['f16', 64, 7],
    ['u8', 1, 33],
    ['f64', 3, 2],
  ] as const) {
    it(`${dtype} rows of ${qRow} and ${kvRow} elements on 3 processes`, { timeout: 120_000 }, async () => {
      const reports = await runRanks('oracle', 3, 'processes', { data: { seeds: range(0, 6), dtype, qRow, kvRow } });
      expect(valuesOf<Compared>(reports).map(({ compared }) => compared)).toEqual([6, 6, 6]);
    });
  }

  for (const [what, extra] of [
    ['three copying threads per rank', { options: { blocks: 3 } }],
    [
      'two blocks of eight lanes under the interleaver',
      { options: { blocks: 2, executor: { lanes: 8, warpLanes: 4, seed: 5 } } },
    ],
    ['send and receive buffers in between', { staged: true, options: { blocks: 2 } }],
  ] as const) {
    it(`with ${what}`, { timeout: 120_000 }, async () => {
      const data = { seeds: range(40, 46), dtype: 'f32', qRow: 16, kvRow: 8, ...extra };
      const reports = await runRanks('oracle', 2, 'threads', { data });
      expect(valuesOf<Compared>(reports).map(({ compared }) => compared)).toEqual([6, 6]);
    });
  }

  for (const [what, options] of [
    ['the fast executor', {}],
    ['the simt executor', { executor: { lanes: 8, warpLanes: 4, seed: 3 }, blocks: 2 }],
  ] as const) {
    it(`over a transport that reorders and delays everything it may, on ${what}`, { timeout: 120_000 }, async () => {
      const data = {
        seeds: range(60, 64),
        dtype: 'f32',
        qRow: 16,
        kvRow: 8,
        transport: 'hostile',
        config: { seed: 9, maxDelayUs: 200 },
        options,
      };
      const reports = await runRanks('oracle', 3, 'threads', { data });
      expect(valuesOf<Compared>(reports).map(({ compared }) => compared)).toEqual([4, 4, 4]);
    });
  }

  for (const worldSize of process.env.EP_TEST_FULL === '1' ? [65, 128] : [65]) {
    it(`on ${worldSize} threads`, { timeout: 240_000 }, async () => {
      const plan = { documents: worldSize, maxShards: 6, maxLength: 30, everyone: true };
      const reports = await runRanks('oracle', worldSize, 'threads', {
        data: { seeds: [7], dtype: 'f32', qRow: 4, kvRow: 2, plan },
        timeoutMs: 200_000,
      });
      const ranks = valuesOf<Compared>(reports);
      expect(ranks.map(({ compared }) => compared)).toEqual(Array(worldSize).fill(1));
      const talking = ranks.filter(({ remote }) => remote.sendsTo > 0 && remote.receivesFrom > 0);
      expect(talking.length).toBeGreaterThan(0.8 * worldSize);
      // Most of them with several others, in every leg.
      expect(talking.filter(({ remote }) => remote.sendsTo > 2).length).toBeGreaterThan(0.5 * worldSize);
      for (const leg of ['q', 'kv', 'o', 'dense', 'reduced'] as const) {
        const rows = ranks.filter(({ elements }) => elements[leg] > 0);
        expect([leg, rows.length > 0.8 * worldSize]).toEqual([leg, true]);
      }
    });
  }
});

describe('leases', () => {
  it('carry 1 000 calls between ranks of uneven speed and shares, one of them idle', { timeout: 180_000 }, async () => {
    const [worldSize, calls] = [4, 1000];
    const reports = await runRanks('repeated', worldSize, 'threads', { data: { calls }, timeoutMs: 150_000 });
    interface Repeated {
      readonly received: Readonly<Record<'q' | 'kv', number>>;
      readonly matrix: Readonly<Record<'q' | 'kv', readonly (readonly number[])[]>>;
    }
    const ranks = valuesOf<Repeated>(reports);
    const busy = range(0, worldSize - 1);
    const idle = worldSize - 1;
    for (const kind of ['q', 'kv'] as const) {
      const matrix = ranks[0]!.matrix[kind];
      const pairs = busy.flatMap((from) => busy.map((to) => matrix[from]![to]!));
      // Each pair of busy ranks, a rank and itself included, has rows, and no two as many.
      expect(Math.min(...pairs)).toBeGreaterThan(0);
      expect(new Set(pairs).size).toBe(pairs.length);
      expect(matrix[idle]).toEqual(Array(worldSize).fill(0));
      expect(matrix.map((row) => row[idle])).toEqual(Array(worldSize).fill(0));
      for (const [to, rank] of ranks.entries()) {
        expect(rank.matrix[kind]).toEqual(matrix);
        expect(rank.received[kind]).toBe(calls * matrix.reduce((sum, row) => sum + row[to]!, 0));
      }
    }
    expect(ranks[0]!.matrix.q).not.toEqual(ranks[0]!.matrix.kv);
  });

  for (const mode of ['threads', 'processes'] as Mode[]) {
    it(`keep a held result unchanged while peers run three calls ahead (${mode})`, { timeout: 60_000 }, async () => {
      expect(valuesOf<number>(await runRanks('hold', 3, mode))).toEqual([3, 3, 3]);
    });
  }
});

describe('failures', () => {
  it.each([
    ['nvshmem', 100],
    ['hostile', 20],
  ])(
    'one rank aborts over %s, all resynchronise, %i correct calls follow',
    { timeout: 120_000 },
    async (transport, calls) => {
      const data = {
        rounds: 3,
        calls,
        transport,
        config: transport === 'hostile' ? { seed: 4, maxDelayUs: 100 } : undefined,
      };
      const reports = await runRanks('abort', 3, 'threads', { data, timeoutMs: 100_000 });
      const values = valuesOf<{ outcomes: string[]; epoch: number }>(reports);
      for (const [rank, { outcomes, epoch }] of values.entries()) {
        expect(epoch).toBe(3);
        expect(outcomes[rank]).toBe('reason');
        // An aborter that had begun had sent its rows: the others lack nothing.
        for (const [round, outcome] of outcomes.entries()) {
          if (round !== rank) expect(outcome).toBe(round % 2 === 0 ? 'EP_TIMEOUT' : 'done');
        }
      }
    },
  );

  it.each<[string, Mode, number]>([
    ['nvshmem', 'threads', 1],
    ['nvshmem', 'threads', 5],
    ['nvshmem', 'processes', 5],
    ['hostile', 'threads', 5],
  ])(
    'one rank of %s aborts between two chunks (%s, %i for each peer), all resynchronise',
    { timeout: 120_000 },
    async (transport, mode, chunks) => {
      const worldSize = 3;
      const rounds = 4;
      const config = transport === 'hostile' ? { seed: 5, maxDelayUs: 100 } : undefined;
      // Each pair of ranks has 21 to 23 rows of 32 bytes.
      const chunkBytes = chunks === 1 ? 1024 : 160;
      const data = { rounds, calls: 20, chunkBytes, transport, config };
      const outcomes = valuesOf<[string, number][]>(
        await runRanks('abortBetween', worldSize, mode, { data, timeoutMs: 100_000 }),
      );
      for (let round = 0; round < rounds; round++) {
        const aborter = round % worldSize;
        const holder = (aborter + 1 + Math.floor(round / worldSize)) % worldSize;
        const third = worldSize - aborter - holder;
        expect(outcomes[aborter]![round]).toEqual(['reason', 0]);
        expect(outcomes[holder]![round]).toEqual(['EP_TIMEOUT', chunks]);
        // The aborter's first turn is the rank's behind it: where that is the holder, the third has got nothing, and otherwise its first chunk.
        const missing = holder === (aborter + 1) % worldSize ? chunks : chunks - 1;
        expect(outcomes[third]![round]).toEqual(missing === 0 ? ['done', 0] : ['EP_TIMEOUT', missing]);
      }
    },
  );

  for (const mode of ['threads', 'processes'] as Mode[]) {
    it(`a killed rank is named by everyone who waits for it (${mode})`, { timeout: 60_000 }, async () => {
      const victim = 1;
      const reports = await runRanks('lost', 3, mode, { data: { victim }, kill: { rank: victim, afterMs: 100 } });
      const survivors = reports.filter(({ rank }) => rank !== victim);
      const failures = valuesOf<{ code: string; rank: number }>(survivors);
      for (const failure of failures) expect(failure.code).toBe('EP_PEER_LOST');
      // Whoever fails second may be told of the first survivor, who has left by then.
      expect(failures.map((failure) => failure.rank)).toContain(victim);
    });
  }

  it('a killed rank ends the call of one that waits for another first, which has given up', {
    timeout: 60_000,
  }, async () => {
    const data = { victim: 1, givesUp: 0 };
    const reports = await runRanks('lost', 3, 'processes', { data, kill: { rank: 1, afterMs: 100 } });
    const [waiting] = valuesOf<{ code: string; rank: number; ms: number }>([reports[2]!]);
    expect(waiting).toMatchObject({ code: 'EP_PEER_LOST', rank: 1 });
    expect(waiting!.ms).toBeLessThan(3000);
  });

  it('different plans, rows or options are refused on every rank before anything moves', {
    timeout: 60_000,
  }, async () => {
    const reports = await runRanks('mismatch', 3, 'threads');
    interface Found {
      readonly code: string;
      readonly ranks: readonly number[];
      readonly message: string;
    }
    for (const [rank, found] of valuesOf<Record<string, Found>>(reports).entries()) {
      const { options, memory, plan, row, ...refused } = found;
      for (const error of [options, plan, row]) expect(error).toMatchObject({ code: 'EP_MISMATCH', ranks: [1] });
      expect(options!.message).toContain('expected "chunkBytes is 1024" as on the others, found "chunkBytes is 512"');
      expect(memory).toMatchObject({ code: 'EP_MISMATCH' });
      expect(memory!.message).toContain(`on this rank leases is 2, leaseBytes is ${rank === 1 ? 65536 : 131072}`);
      expect(plan!.message).toMatch(
        /expected "forward: plan of q is .*" as on the others, found "forward: plan of q is /,
      );
      expect(row!.message).toContain(
        'expected "forward: rows of q are f32 [8]" as on the others, found "forward: rows of q are f32 [4]" on rank 1',
      );
      expect(Object.keys(refused)).toHaveLength(12);
      for (const [name, { code, message }] of Object.entries(refused)) {
        expect({ name, code }).toEqual({ name, code: rank === 1 ? 'EP_INVALID_ARGUMENT' : 'EP_MISMATCH' });
        if (rank !== 1) expect(message).toMatch(/^bind: refused by rank 1 \(bind\w* ?\w*( \w+)?: .* must be /);
      }
    }
  });

  it('a resync that was tried in vain leaves no trace in the next, nor does a lease released meanwhile', {
    timeout: 60_000,
  }, async () => {
    const values = valuesOf<{ code?: string; epoch: number }>(await runRanks('lateResync', 3, 'threads'));
    expect(values[0]!.code).toBe('EP_TIMEOUT');
    expect(new Set(values.map(({ epoch }) => epoch)).size).toBe(1);
  });

  it('close() cuts off a call that waits for a rank which never makes it', { timeout: 30_000 }, async () => {
    const began = performance.now();
    expect(valuesOf(await runRanks('closeInFlight', 2, 'threads'))).toEqual(['EP_ABORTED', 'absent']);
    expect(performance.now() - began).toBeLessThan(20_000);
  });

  it('close() cuts off a resync that waits for a rank which never joins it', { timeout: 30_000 }, async () => {
    expect(valuesOf(await runRanks('closeInResync', 2, 'threads'))).toEqual(['EP_ABORTED', 'absent']);
  });

  it('a transport that closes first ends calls with an error and leaves the process alone', {
    timeout: 30_000,
  }, async () => {
    const [codes] = valuesOf<string>(await runRanks('transportCloses', 2, 'processes'));
    expect(codes).toMatch(/^EP_(CLOSED|ABORTED) EP_CLOSED$/);
  });

  it('binds that overlap do not mix', { timeout: 30_000 }, async () => {
    const all = Array.from({ length: 6 }, () => 'fulfilled').join();
    expect(valuesOf(await runRanks('overlappingBinds', 3, 'threads'))).toEqual([all, all, all]);
  });

  it('inline calls let timers fire', { timeout: 30_000 }, async () => {
    expect(valuesOf(await runRanks('timers', 1, 'threads'))).toEqual([true]);
  });

  it('wrong calls are refused with their code', { timeout: 60_000 }, async () => {
    const [codes] = valuesOf<Record<string, string>>(await runRanks('badInput', 1, 'threads'));
    expect(codes).toEqual({
      missing: 'EP_INVALID_ARGUMENT',
      dtype: 'EP_INVALID_ARGUMENT',
      rows: 'EP_INVALID_ARGUMENT',
      width: 'EP_INVALID_ARGUMENT',
      shape: 'EP_INVALID_ARGUMENT',
      noTensor: 'EP_INVALID_ARGUMENT',
      nothing: 'EP_INVALID_ARGUMENT',
      shapeNoList: 'EP_INVALID_ARGUMENT',
      dataNoArray: 'EP_INVALID_ARGUMENT',
      dataOfAnotherType: 'EP_INVALID_ARGUMENT',
      dataTooShort: 'EP_INVALID_ARGUMENT',
      noOptions: 'EP_INVALID_ARGUMENT',
      detached: 'EP_DETACHED',
      resizable: 'EP_DETACHED',
      capacity: 'EP_CAPACITY',
      world: 'EP_INVALID_ARGUMENT',
      reduceDtype: 'EP_INVALID_ARGUMENT',
      planVersion: 'EP_PLAN_VERSION',
      planKind: 'EP_INVALID_PLAN',
      planOverlap: 'EP_INVALID_PLAN',
      planLength: 'EP_INVALID_PLAN',
      planSums: 'EP_INVALID_PLAN',
      planPairs: 'EP_INVALID_PLAN',
      planOffsets: 'EP_INVALID_PLAN',
      timeout: 'EP_INVALID_ARGUMENT',
      executor: 'EP_INVALID_ARGUMENT',
      closed: 'EP_CLOSED',
    });
  });
});

it('sends slices of one projection without a copy', { timeout: 60_000 }, async () => {
  expect(valuesOf<number>(await runRanks('strided', 3, 'threads'))).toEqual([0, 0, 0]);
});
