// The cases for GPUs: on a GPU by main.mjs, and over the host's stand-in for one by vitest. Each throws where it fails.
import assert from 'node:assert/strict';
import { demos } from './demos.mjs';
import { runRanks, valuesOf } from './ranks.mjs';

const range = (/** @type {number} */ from, /** @type {number} */ to) =>
  Array.from({ length: to - from }, (_, i) => from + i);

/**
 * @typedef {{ name: string, run: () => Promise<string | void>, processes?: boolean }} Case `processes`: needs memory shared between processes. What `run` resolves with is
 * for people.
 */

/** @param {number} ranks @param {object} data @param {import('./ranks.mjs').Mode} mode */
const oracle = (ranks, data, mode) => async () => {
  const seeds = range(ranks * 100, ranks * 100 + 8);
  const reports = await runRanks('oracle', ranks, { mode, data: { seeds, ...data }, timeoutMs: 120_000 });
  for (const { compared, pending } of valuesOf(reports))
    assert.deepEqual({ compared, pending }, { compared: 8, pending: 0 });
};

const floats = { dtypes: ['f32', 'bf16'], counts: [1, 1000] };

/** Of one call each, in microseconds. @param {number} ranks @param {readonly number[]} sizes @param {number} calls @param {number} stagingBytes */
const allReduceTimes = (ranks, sizes, calls, stagingBytes) => ({
  name: `all-reduces of device tensors, ${ranks} ranks as streams of one process, timed`,
  run: async () => {
    const data = { sizes, calls, stagingBytes };
    const [times = []] = valuesOf(await runRanks('collectiveTimes', ranks, { data, timeoutMs: 120_000 }));
    return sizes.map((bytes, i) => `${bytes} bytes ${((times[i] ?? 0) * 1000).toFixed(1)} us`).join(', ');
  },
});

/** @type {readonly Case[]} */
const collectives = [
  ...[1, 2, 4].map((ranks) => ({
    name: `collectives of device tensors give the bits of those in host memory, ${ranks} ranks as streams of one process`,
    run: async () => {
      const data = ranks === 4 ? { dtypes: ['f32', 'f16', 'i64', 'u8'], counts: [1, 333, 40_000] } : floats;
      const values = valuesOf(await runRanks('collectives', ranks, { data, timeoutMs: 120_000 }));
      const refused = ['EP_INVALID_ARGUMENT', 'EP_INVALID_ARGUMENT'];
      for (const [rank, codes] of values.entries()) {
        assert.deepEqual(codes, rank > 0 ? refused : [...refused, 'no error']);
      }
    },
  })),
  {
    name: 'collectives of device tensors run in the order of their stream',
    run: async () => {
      const values = valuesOf(await runRanks('collectiveOrder', 3, { data: { rounds: 30 } }));
      assert.deepEqual(values, [30, 30, 30]);
    },
  },
  {
    name: 'collectives of device tensors name the rank that does not come',
    run: async () => {
      const values = valuesOf(await runRanks('collectiveAbsent', 3, { data: { absent: 1 } }));
      assert.deepEqual(values[1], []);
      const firsts = [values[0][0], values[2][0]];
      // Whose time is up first tells the other, which then hears that it gave up; both know whom they awaited.
      for (const [code, awaited] of firsts) {
        assert.ok(code === 'EP_TIMEOUT' || code === 'EP_ABORTED', code);
        assert.deepEqual(awaited, [1]);
      }
      assert.ok(firsts.some(([code]) => code === 'EP_TIMEOUT'));
      for (const rank of [0, 2]) assert.deepEqual(values[rank][1], ['EP_POISONED', undefined]);
    },
  },
  {
    name: 'collectives of device tensors end when a rank is terminated',
    run: async () => {
      const reports = await runRanks('collectiveLost', 3, { data: { victim: 1 }, kill: 1 });
      for (const { said, ms } of valuesOf(reports.filter(({ rank }) => rank !== 1))) {
        assert.deepEqual(said, ['EP_PEER_LOST', [1]]);
        assert.ok(ms < 20_000);
      }
    },
  },
  {
    name: 'collectives of device tensors between processes that share one GPU',
    run: async () => {
      const data = { dtypes: ['f32'], counts: [100] };
      valuesOf(await runRanks('collectives', 2, { mode: 'processes', data, timeoutMs: 120_000 }));
    },
    processes: true,
  },
];

/** @type {readonly Case[]} */
const groups = [
  {
    name: 'groups of some ranks, overlapping, make every operation of device tensors and send messages',
    run: async () => {
      const lists = [[0, 1], [1, 2, 3], [3, 0], [2, 0, 3, 1], [2]];
      const data = { lists, dtypes: ['f32', 'bf16', 'u8'], count: 2_500, rounds: 20 };
      assert.deepEqual(valuesOf(await runRanks('deviceGroups', 4, { data, timeoutMs: 120_000 })), [5, 5, 5, 5]);
    },
  },
  {
    name: 'sections of groups that were closed are taken again; where none is free all members hear of it',
    run: async () => {
      const values = valuesOf(await runRanks('deviceSections', 4, { data: { rounds: 12 } }));
      const full = 'EP_CAPACITY';
      const good = 'no error';
      assert.deepEqual(values, [
        [good, good, good],
        [full, good, good, good],
        [full, good, good, good],
        [good, good, good],
      ]);
    },
  },
  {
    name: 'a rank that is terminated ends calls of its groups, and no others',
    run: async () => {
      const data = { victim: 3, pair: [3, 2], others: [0, 1, 2] };
      const reports = await runRanks('deviceGroupLost', 4, { data, kill: 3 });
      const values = valuesOf(reports.filter(({ rank }) => rank !== 3));
      for (const [rank, { sums, lost, poisoned }] of values.entries()) {
        assert.deepEqual(sums, [6, 6, 6]);
        assert.deepEqual(lost, rank === 2 ? ['EP_PEER_LOST', [0]] : undefined);
        assert.equal(poisoned, rank === 2 ? 'EP_POISONED' : undefined);
      }
    },
  },
  {
    name: 'a member that does not come is named by its rank in the group, and other groups go on',
    run: async () => {
      const said = [['EP_TIMEOUT', [0], [1]], 'EP_POISONED', 4, 6];
      assert.deepEqual(valuesOf(await runRanks('deviceGroupAbsent', 3)), [said, [6], [4, 6]]);
    },
  },
  {
    name: 'groups on streams of their own run beside each other',
    run: async () => {
      assert.deepEqual(valuesOf(await runRanks('deviceGroupStreams', 3)), [
        [6, 2, 6, 6, 'EP_INVALID_ARGUMENT'],
        [6, 2, 6, 6, 'EP_MISMATCH'],
        [6, 3, 6, 6, 'no error'],
      ]);
    },
  },
  {
    name: 'collective calls captured as a graph are replayed a thousand times',
    run: async () => {
      const data = { replays: 1000, elements: 3_000 };
      const values = valuesOf(await runRanks('collectiveGraph', 3, { data, timeoutMs: 120_000 }));
      return `${(Math.max(...values) * 1000).toFixed(0)} us a replay of five calls`;
    },
  },
  {
    name: 'a graph of collective calls that fails names who is missing and poisons its groups',
    run: async () => {
      const refused = ['EP_INVALID_ARGUMENT', 'EP_BUSY'];
      const closed = [['no error'], ['EP_CLOSED', undefined]];
      const failed = [
        ['EP_TIMEOUT', 2],
        ['EP_POISONED', undefined],
        ['EP_POISONED', undefined],
      ];
      assert.deepEqual(valuesOf(await runRanks('collectiveGraphFails', 3)), [
        [...refused, ...failed, ...closed],
        refused,
        [...refused, ...closed],
      ]);
    },
  },
];

/** Bytes that each rank's messages had in all: to everybody but itself. @param {number} ranks @param {object} [options] */
const messagesOf = async (ranks, options) => {
  const messages = [
    { dtype: 'f32', length: 1 },
    { dtype: 'bf16', length: 3001 },
    { dtype: 'u8', length: 0 },
    { dtype: 'i64', length: 517 },
    { dtype: 'u8', length: 1_000_003 },
  ];
  const bytes = 4 + 2 * 3001 + 8 * 517 + 1_000_003;
  const values = valuesOf(await runRanks('messages', ranks, { data: { messages }, timeoutMs: 120_000, ...options }));
  assert.deepEqual(values, Array(ranks).fill((ranks - 1) * bytes));
};

/** @type {readonly Case[]} */
const messages = [
  ...[1, 2, 4].map((ranks) => ({
    name: `messages of device tensors, ${ranks} ranks as streams of one process`,
    run: () => messagesOf(ranks),
  })),
  {
    name: 'messages of device tensors go behind what lies on their stream, and beside its collectives',
    run: async () => {
      const values = valuesOf(await runRanks('messageOrder', 2));
      const mismatches = ['EP_MISMATCH', 'EP_MISMATCH', 'EP_MISMATCH'];
      const codes = [...mismatches, 'EP_INVALID_ARGUMENT', 'no error'];
      assert.deepEqual(values, [codes, codes]);
    },
  },
  {
    name: 'messages of device tensors that are given up leave room for the next ones',
    run: async () => {
      const rounds = 12;
      const values = valuesOf(await runRanks('messageCut', 2, { data: { rounds, bytes: 5_000_001 } }));
      for (const [rank, codes] of values.entries()) {
        for (const [round, code] of codes.slice(0, rounds).entries()) {
          assert.ok(code === 'done' || code === (round % 2 === rank ? 'enough' : 'EP_ABORTED'), `${round}: ${code}`);
        }
        assert.equal(codes[rounds], 'EP_TIMEOUT');
      }
      assert.ok(values.flat().includes('enough'), 'no message was cut off');
    },
  },
  {
    name: 'messages of device tensors end when a rank is terminated',
    run: async () => {
      const reports = await runRanks('messageLost', 3, { data: { victim: 1, bytes: 3_000_000 }, kill: 1 });
      const lost = ['EP_PEER_LOST', 'EP_PEER_LOST'];
      assert.deepEqual(valuesOf(reports.filter(({ rank }) => rank !== 1)), [lost, lost]);
    },
  },
  {
    name: 'messages of device tensors between processes that share one GPU',
    run: () => messagesOf(2, { mode: 'processes' }),
    processes: true,
  },
];

/**
 * Rank 1 of four is killed, rank 2 comes later. HAZARD: far less than any share of the call's time (30 s), so that nobody can have been given up for that.
 * @param {{ mode: string, moment: string, rankMode?: import('./ranks.mjs').Mode }} how
 */
export const killedExperts = ({ mode, moment, rankMode = 'threads' }) => ({
  name: `experts: a rank that is killed before its ${moment} ends no wait for others, and those for itself at once, ${mode}, ${rankMode}`,
  run: async () => {
    const [victim, late, lateMs] = [1, 2, 1000];
    const data = { mode, moment, victim, late, lateMs };
    const reports = await runRanks('killedExperts', 4, { mode: rankMode, data, kill: victim });
    const values = valuesOf(reports.filter(({ rank }) => rank !== victim));
    for (const { ms, losses } of values) {
      assert.deepEqual(losses, [[victim, 'EP_PEER_LOST']]);
      assert.ok(ms < 5000, `${ms} ms`);
    }
    for (const { ms } of [values[0], values[2]]) assert.ok(ms > lateMs / 2, `${ms} ms, but rank ${late} came later`);
    return values.map(({ ms }) => `${ms.toFixed(0)} ms`).join(', ');
  },
});

/** @type {readonly Case[]} */
export const cases = [
  ...collectives,
  ...groups,
  ...messages,
  ...[1, 2, 4, 8].map((ranks) => ({
    name: `dispatch moves f32 rows as the oracle says, ${ranks} ranks as streams of one process`,
    run: oracle(ranks, { dtype: 'f32', qRow: 16, kvRow: 8 }, 'threads'),
  })),
  ...[
    { dtype: 'bf16', qRow: 5, kvRow: 3 },
    { dtype: 'u8', qRow: 1, kvRow: 33 },
    { dtype: 'f16', qRow: 64, kvRow: 8 },
  ].map((data) => ({
    name: `dispatch moves ${data.dtype} rows of ${data.qRow} and ${data.kvRow} elements`,
    run: oracle(3, data, 'threads'),
  })),
  ...[
    { ranks: 3, mode: /** @type {const} */ ('threads') },
    { ranks: 2, mode: /** @type {const} */ ('processes') },
  ].map(({ ranks, mode }) => ({
    name: `dispatch by queue pairs of a software NIC that the kernels post to, ${ranks} ranks as ${mode}`,
    run: async () => {
      const data = { seeds: range(ranks, ranks + 2) };
      const values = valuesOf(await runRanks('nicDispatch', ranks, { mode, data, timeoutMs: 120_000 }));
      for (const { kernels, placement, fallbacks, requests, doorbells } of values) {
        const found = { kernels, placement, fallbacks };
        assert.deepEqual(found, { kernels: 'cuda:0', placement: 'host memory', fallbacks: 2 });
        assert.ok(requests > 0 && doorbells > 0, `${requests} requests, ${doorbells} doorbells`);
      }
      return values.map(({ requests, doorbells }) => `${requests} requests by ${doorbells} doorbells`).join(', ');
    },
  })),
  ...[
    { dtype: 'f32', queryHeads: 4, kvHeads: 2, headDim: 64 },
    { dtype: 'bf16', queryHeads: 8, kvHeads: 2, headDim: 128 },
    { dtype: 'bf16', queryHeads: 3, kvHeads: 3, headDim: 20 },
    { dtype: 'f32', queryHeads: 2, kvHeads: 1, headDim: 256 },
  ].map((data) => ({
    name: `core attention of ${data.dtype}, ${data.queryHeads} heads over ${data.kvHeads} of ${data.headDim}, is that of the host`,
    run: async () => assert.deepEqual(valuesOf(await runRanks('coreAttention', 1, { data })), [5]),
  })),
  ...[
    { dtype: 'f32', results: 'f32', hidden: 130, intermediate: 50, bound: 1e-5 },
    { dtype: 'bf16', results: 'bf16', hidden: 256, intermediate: 64, bound: 5e-3 },
    { dtype: 'f8e4m3', scale: 'f32', results: 'bf16', hidden: 320, intermediate: 96, bound: 5e-3 },
    { dtype: 'f8e4m3', scale: 'ue8m0', results: 'f16', hidden: 200, intermediate: 33, bound: 1e-3 },
  ].map(({ bound, ...data }) => ({
    name: `experts compute ${data.results} of ${data.dtype}${data.scale === undefined ? '' : ` with ${data.scale} scales`}, ${data.hidden} channels, as a plain computation does`,
    run: async () => {
      const [error] = valuesOf(await runRanks('expertLayer', 1, { data, timeoutMs: 120_000 }));
      assert.ok(error <= bound, `relative error ${error}`);
      return `relative error ${error.toExponential(2)}`;
    },
  })),
  ...[
    { mode: 'low-latency', dtype: 'f32', hidden: 96, maxTokens: 9, calls: 2 },
    { mode: 'low-latency', dtype: 'bf16', hidden: 256, maxTokens: 30, calls: 1, payload: 'f8e4m3+f32' },
    { mode: 'high-throughput', dtype: 'bf16', hidden: 128, maxTokens: 40, calls: 3 },
    { mode: 'high-throughput', dtype: 'bf16', hidden: 256, maxTokens: 20, calls: 2, payload: 'f8e4m3+f32' },
    { mode: 'low-latency', dtype: 'bf16', hidden: 64, maxTokens: 9, calls: 2, halves: true, offered: true },
    { mode: 'high-throughput', dtype: 'f32', hidden: 32, maxTokens: 9, calls: 2, halves: true, kept: true },
    { mode: 'high-throughput', dtype: 'bf16', hidden: 64, maxTokens: 9, calls: 1, kept: true, offered: true },
  ].flatMap((data) =>
    [1, 4].map((ranks) => ({
      name: `experts: ${data.mode} calls of ${data.payload ?? data.dtype} rows${data.halves ? ' in halves' : ''}${data.kept ? ' by kept layouts' : ''}${data.offered ? ', results in place' : ''}, ${ranks} ranks as streams of one process`,
      run: async () => {
        const values = valuesOf(await runRanks('experts', ranks, { data, timeoutMs: 120_000 }));
        for (const { compared, totals, losses } of values) {
          assert.ok(compared > 0);
          assert.deepEqual({ totals, losses }, { totals: compared, losses: [] });
        }
      },
    })),
  ),
  ...[
    { mode: 'low-latency', hidden: 64 },
    { mode: 'low-latency', hidden: 33 },
    { mode: 'high-throughput', hidden: 64 },
  ].map((data) => ({
    name: `experts: sources read results of ${data.hidden} channels where ${data.mode} experts leave them`,
    run: async () =>
      assert.deepEqual(valuesOf(await runRanks('offeredExperts', 3, { data })), Array(3).fill([6, 8, 10])),
  })),
  ...[
    { mode: 'low-latency', offered: false, replays: 40, ranks: 1 },
    { mode: 'low-latency', offered: true, replays: 40, ranks: 3 },
    { mode: 'high-throughput', offered: false, replays: 40, ranks: 3 },
    { mode: 'high-throughput', offered: true, replays: 20, ranks: 2 },
    { mode: 'low-latency', offered: false, replays: 3, ranks: 3, absent: 1 },
  ].map(({ ranks, ...data }) => ({
    name: `experts: a graph of ${data.mode} calls${data.offered ? ', results in place' : ''}, ${data.replays} replays of ${ranks} ranks${data.absent === undefined ? '' : ', and one without a rank'}`,
    run: async () => {
      for (const [rank, { codes, losses }] of valuesOf(
        await runRanks('graphExperts', ranks, { data, timeoutMs: 120_000 }),
      ).entries()) {
        const loses = data.absent !== undefined && rank !== data.absent;
        assert.deepEqual(losses, loses ? [[data.absent, 'EP_TIMEOUT']] : []);
        assert.deepEqual(codes, {
          ...{ 'not captured': 'EP_INVALID_ARGUMENT', half: 'EP_INVALID_ARGUMENT' },
          ...{ busy: 'EP_BUSY', held: 'EP_BUSY', left: loses ? 'EP_PEER_LOST' : 'no error' },
          again: loses ? 'EP_INVALID_ARGUMENT' : 'no error',
        });
      }
    },
  })),
  ...['low-latency', 'high-throughput'].map((mode) => ({
    name: `experts: what may not change a graph of ${mode} calls, or begin a replay of it`,
    run: async () => {
      for (const [rank, value] of valuesOf(await runRanks('keptGraphExperts', 3, { data: { mode } })).entries()) {
        assert.deepEqual(value.losses, []);
        assert.deepEqual(value.codes, {
          ...(rank === 0 ? { capture: 'of the body' } : {}),
          ...{
            stream: 'EP_BUSY',
            'stream of another graph': 'EP_BUSY',
            held: 'EP_BUSY',
            released: 'EP_INVALID_ARGUMENT',
          },
        });
      }
    },
  })),
  {
    name: 'experts: calls go on without a rank that does not come',
    run: async () => {
      const data = { mode: 'low-latency', dtype: 'f32', hidden: 32, maxTokens: 8, calls: 2, absent: 1 };
      const values = valuesOf(await runRanks('experts', 3, { data }));
      assert.deepEqual(
        values.map(({ losses }) => losses),
        [[[1, 'EP_TIMEOUT']], [], [[1, 'EP_TIMEOUT']]],
      );
    },
  },
  ...['low-latency', 'high-throughput'].flatMap((mode) =>
    ['dispatch', 'combine', 'replay'].map((moment) => killedExperts({ mode, moment })),
  ),
  {
    name: 'experts: wrong calls are refused with their code',
    run: async () => {
      const invalid = 'EP_INVALID_ARGUMENT';
      assert.deepEqual(valuesOf(await runRanks('refusedExperts', 1))[0], {
        ...{ lanes: invalid, blocks: invalid, dtype: invalid, tokens: invalid, choices: invalid, expert: invalid },
        ...{ twice: invalid, capture: invalid, 'few rows': invalid, 'no out': invalid, weights: invalid },
        ...{ good: 'no error', again: invalid, busy: 'EP_BUSY', closed: 'EP_CLOSED', kept: invalid },
        ...{ 'layouts of low latency': invalid, 'cast results': invalid, 'held layout': 'EP_BUSY' },
        ...{ 'another layout': 'EP_CAPACITY', 'layout of others': invalid, 'received twice': invalid },
        'released layout': invalid,
      });
    },
  },
  {
    name: 'experts: a closed buffer leaves its share of the GPU to the next',
    run: async () => assert.deepEqual(valuesOf(await runRanks('reopenedExperts', 1)), [5]),
  },
  {
    name: 'a step captured as a graph is replayed with new values',
    run: async () =>
      assert.deepEqual(valuesOf(await runRanks('graph', 3, { data: { replays: 200 } })), [200, 200, 200]),
  },
  {
    name: 'a rank that does not come is named, and calls go on after a resync',
    run: async () => {
      const values = valuesOf(await runRanks('absent', 3));
      for (const [rank, { outcomes, epoch }] of values.entries()) {
        assert.equal(epoch, 3);
        const expected = range(0, 3).flatMap((round) =>
          round === rank ? ['absent'] : [`EP_TIMEOUT ${round} true`, 'EP_POISONED'],
        );
        assert.deepEqual(outcomes, expected);
      }
    },
  },
  {
    name: 'a resync waits for releases that lie on a stream',
    run: async () => {
      assert.deepEqual(valuesOf(await runRanks('lateRelease', 2)), ['none', 'EP_TIMEOUT']);
    },
  },
  {
    name: 'a replay that fails poisons its dispatcher, and the graph is good after a resync',
    run: async () => {
      const values = valuesOf(await runRanks('failedReplay', 3));
      const cut = ['EP_TIMEOUT 2', true, 'EP_POISONED', 'enough', true, 'EP_ABORTED', 'EP_CLOSED'];
      assert.deepEqual(values, [cut, cut, ['EP_CLOSED']]);
    },
  },
  {
    name: 'a terminated rank ends the kernels that wait for it',
    run: async () => {
      const reports = await runRanks('lost', 3, { data: { victim: 1 }, kill: 1 });
      for (const { code, ms } of valuesOf(reports.filter(({ rank }) => rank !== 1))) {
        assert.equal(code, 'EP_PEER_LOST');
        assert.ok(ms < 20_000);
      }
    },
  },
  {
    name: 'a stream behind an event of another is closed without holding up JS',
    run: async () => assert.deepEqual(valuesOf(await runRanks('closeBehind', 2)), ['done', 'done']),
  },
  {
    name: 'a rank is terminated while a stream of it waits for an event of another',
    run: async () => {
      const reports = await runRanks('endedBehind', 2, { data: { victim: 0 }, kill: 0 });
      assert.deepEqual(valuesOf(reports.filter(({ rank }) => rank !== 0)), ['EP_PEER_LOST']);
    },
  },
  {
    name: 'wrong calls are refused with their code',
    run: async () => {
      const invalid = 'EP_INVALID_ARGUMENT';
      assert.deepEqual(valuesOf(await runRanks('refused', 1))[0], {
        missing: invalid,
        rows: invalid,
        hostTensor: invalid,
        noDevice: invalid,
        otherDevice: invalid,
        hostAddress: invalid,
        strides: invalid,
        tooShort: invalid,
        tooLarge: invalid,
        capture: invalid,
        synchronizeInCapture: invalid,
        blocks: invalid,
        lanes: invalid,
        view: invalid,
        good: 'no error',
        closedBuffer: 'EP_CLOSED',
        closed: 'EP_CLOSED',
      });
    },
  },
  {
    name: 'memory of others is adopted where it lies on this GPU',
    run: async () =>
      assert.deepEqual(valuesOf(await runRanks('adopted', 1)), [
        ['EP_INVALID_ARGUMENT', 'EP_UNSUPPORTED', 'EP_INVALID_ARGUMENT', 'EP_CLOSED'],
      ]),
  },
  {
    name: 'events order two streams and time them',
    run: async () => assert.deepEqual(valuesOf(await runRanks('streams', 1)), [true]),
  },
  {
    name: 'a call that needs nothing of ranks that have closed goes on without them',
    run: async () => assert.deepEqual(valuesOf(await runRanks('alone', 2)), ['done', 'done']),
  },
  {
    name: 'memory that another process maps is not freed before it has unmapped it',
    run: async () => {
      // On each rank: its part, the table of parts, the other's part.
      const report = { kept: true, mapped: 3, left: 0 };
      assert.deepEqual(valuesOf(await runRanks('closedFirst', 2, { mode: 'processes' })), [report, report]);
    },
    processes: true,
  },
  {
    name: 'dispatch moves rows between processes that share one GPU',
    run: oracle(2, { dtype: 'f32', qRow: 16, kvRow: 8 }, 'processes'),
    processes: true,
  },
  ...demos,
];

/** What only a GPU has figures for. */
export const measurements = [
  ...[2, 4, 8].map((ranks) => allReduceTimes(ranks, [4096, 65_536, 2 ** 20, 2 ** 24, 2 ** 28], 20, 2 ** 28)),
  {
    name: 'messages of device tensors between two ranks as streams of one process, timed',
    run: async () => {
      const sizes = [4096, 2 ** 20, 2 ** 24, 2 ** 28];
      const data = { sizes, calls: 20, stagingBytes: 2 ** 25 };
      const [, times = []] = valuesOf(await runRanks('messageTimes', 2, { data, timeoutMs: 120_000 }));
      return sizes.map((bytes, i) => `${bytes} bytes ${((times[i] ?? 0) * 1000).toFixed(1)} us`).join(', ');
    },
  },
];

/** Where there are two GPUs or more: a process on each, which reach each other's memory. */
export const severalGpus = [
  {
    name: 'dispatch moves rows between processes on two GPUs',
    run: oracle(2, { dtype: 'f32', qRow: 16, kvRow: 8, spread: true }, 'processes'),
  },
  {
    name: 'collectives of device tensors on two GPUs give the bits of those in host memory',
    run: async () => {
      const data = { dtypes: ['f32', 'bf16', 'i64'], counts: [1, 333, 40_000], spread: true };
      valuesOf(await runRanks('collectives', 2, { mode: 'processes', data, timeoutMs: 120_000 }));
    },
  },
  {
    name: 'all-reduces of device tensors on two GPUs, timed',
    run: async () => {
      const sizes = [4096, 65_536, 2 ** 20, 2 ** 24, 2 ** 28];
      const data = { sizes, calls: 20, stagingBytes: 2 ** 28, spread: true };
      const reports = await runRanks('collectiveTimes', 2, { mode: 'processes', data, timeoutMs: 120_000 });
      const [times = []] = valuesOf(reports);
      return sizes.map((bytes, i) => `${bytes} bytes ${((times[i] ?? 0) * 1000).toFixed(1)} us`).join(', ');
    },
  },
];
