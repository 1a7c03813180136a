// The cases for GPUs: on a GPU by main.mjs, and over the host's stand-in for one by vitest. Each throws where it fails.
import assert from 'node:assert/strict';
import { demos } from './demos.mjs';
import {
  dispatchRows,
  dtypesOf,
  expertForms,
  holds,
  modes,
  moments,
  nameOfForm,
  offeredForms,
  onGpu,
  range,
  someMessages,
} from './expected.mjs';
import { expertGraphCases } from './expert-graph-cases.mjs';
import { runRanks, valuesOf } from './ranks.mjs';
import { unitedCases, unitedMeasurements } from './united-cases.mjs';

/**
 * @typedef {{ name: string, run: () => Promise<string | void>, processes?: boolean }} Case `processes`: needs memory shared between processes. What `run` resolves with is
 * for people.
 */

/** @param {number} ranks @param {object} data @param {import('./ranks.mjs').Mode} mode */
const oracle = (ranks, data, mode) => () =>
  holds('oracle', ranks, { seeds: range(ranks * 100, ranks * 100 + 8), ...data }, { mode });

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
    run: () =>
      holds(
        'collectives',
        ranks,
        ranks === 4 ? { dtypes: ['f32', 'f16', 'i64', 'u8'], counts: [1, 333, 40_000] } : floats,
      ),
  })),
  {
    name: 'collectives of device tensors run in the order of their stream',
    run: () => holds('collectiveOrder', 3, { rounds: 30 }),
  },
  {
    name: 'collectives of device tensors name the rank that does not come',
    run: () => holds('collectiveAbsent', 3, { absent: 1 }),
  },
  {
    name: 'collectives of device tensors end when a rank is terminated',
    run: () => holds('collectiveLost', 3, { victim: 1 }, { kill: 1 }),
  },
  {
    name: 'collectives of device tensors between processes that share one GPU',
    run: () => holds('collectives', 2, { dtypes: ['f32'], counts: [100] }, { mode: 'processes' }),
    processes: true,
  },
  ...Object.entries(dtypesOf).flatMap(([of, dtypes]) =>
    [
      { ranks: 2, mode: /** @type {const} */ ('threads') },
      { ranks: 4, mode: /** @type {const} */ ('threads'), blocks: 1 },
      { ranks: 2, mode: /** @type {const} */ ('processes'), blocks: 2 },
    ].map(({ ranks, mode, blocks }) => ({
      name: `collectives of ${of}: every operation and reduction gives the bits of that in host memory, ${ranks} ranks as ${mode}`,
      run: () => {
        // The longest ones are several chunks for each of few blocks, in all dtypes; processes that share a GPU take turns on it, for each of them.
        const sizes = onGpu()
          ? { counts: [0, 1, 7, 333, mode === 'threads' ? 40_001 : 9_001], stagingBytes: 2 ** 16 }
          : { counts: [0, 1, 4_003], stagingBytes: 2 ** 13 };
        const shape = blocks === undefined ? {} : { blocks };
        return holds('collectiveGrid', ranks, { dtypes, ...sizes, shape }, { mode });
      },
      processes: mode === 'processes',
    })),
  ),
];

/** @type {readonly Case[]} */
const groups = [
  {
    name: 'groups of some ranks, overlapping, make every operation of device tensors and send messages',
    run: () => {
      const lists = [[0, 1], [1, 2, 3], [3, 0], [2, 0, 3, 1], [2]];
      return holds('deviceGroups', 4, { lists, dtypes: ['f32', 'bf16', 'u8'], count: 2_500, rounds: 20 });
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
    run: () => holds('collectiveGraph', 3, { replays: 1000, elements: 3_000 }),
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

/** @type {readonly Case[]} */
const messages = [
  ...[1, 2, 4].map((ranks) => ({
    name: `messages of device tensors, ${ranks} ranks as streams of one process`,
    run: () => holds('messages', ranks, { messages: someMessages }),
  })),
  {
    name: 'messages of device tensors go behind what lies on their stream, and beside its collectives',
    run: () => holds('messageOrder', 2),
  },
  {
    name: 'messages of device tensors that are given up leave room for the next ones',
    run: () => holds('messageCut', 2, { rounds: 12, bytes: 5_000_001 }),
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
    run: () => holds('messages', 2, { messages: someMessages }, { mode: 'processes' }),
    processes: true,
  },
];

/**
 * Rank 1 of four is killed, rank 2 comes later. HAZARD: far less than any share of the call's time (30 s), so that nobody can have been given up for that.
 * @param {{ mode: string, moment: string, rankMode?: import('./ranks.mjs').Mode }} how
 */
export const killedExperts = ({ mode, moment, rankMode = 'threads' }) => ({
  name: `experts: a rank that is killed before its ${moment} ends no wait for others, and those for itself at once, ${mode}, ${rankMode}`,
  run: () => holds('killedExperts', 4, { mode, moment, victim: 1, late: 2, lateMs: 1000 }, { mode: rankMode, kill: 1 }),
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
  ...dispatchRows.map((data) => ({
    name: `dispatch moves ${data.dtype} rows of ${data.qRow} and ${data.kvRow} elements`,
    run: oracle(3, data, 'threads'),
  })),
  ...[
    ...[1, 2, 3, 4, 8].map((ranks) => ({ ranks, mode: /** @type {const} */ ('threads'), processes: false })),
    { ranks: 2, mode: /** @type {const} */ ('processes'), processes: true },
  ].map(({ ranks, mode, processes }) => ({
    name: `dispatch of rows of 16 bytes to 64 KiB by plans of all kinds gives the bytes of a dispatcher on the host, ${ranks} ranks as ${mode}`,
    run: () => holds('attentionGrid', ranks, { from: ranks, step: onGpu() ? 1 : 4 }, { mode }),
    processes,
  })),
  ...[
    ...[1, 2, 4].map((ranks) => ({ ranks, mode: /** @type {const} */ ('threads'), processes: false })),
    { ranks: 2, mode: /** @type {const} */ ('processes'), processes: true },
  ].map(({ ranks, mode, processes }) => ({
    name: `per-token dispatch gives the bytes of the one on the host, and refuses what that refuses, ${ranks} ranks as ${mode}`,
    run: () => holds('compatGrid', ranks, { from: ranks, step: onGpu() ? 1 : 3 }, { mode }),
    processes,
  })),
  {
    name: 'per-token dispatch names the rank that does not come, and has no way back',
    run: () => holds('compatAbsent', 3, { absent: 1 }),
  },
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
  ...expertForms.flatMap((form) =>
    [1, 4].map((ranks) => ({
      name: `experts: ${nameOfForm(form)}, ${ranks} ranks as streams of one process`,
      run: () => holds('experts', ranks, form),
    })),
  ),
  ...[
    ...[1, 2, 4, 8].map((ranks) => ({ ranks, mode: /** @type {const} */ ('threads'), processes: false })),
    { ranks: 2, mode: /** @type {const} */ ('processes'), processes: true },
  ].map(({ ranks, mode, processes }) => ({
    name: `experts: every mode, payload and way back gives the bytes of a buffer on the host, ${ranks} ranks as ${mode}`,
    // Over host threads another part of the grid for each number of ranks; on a GPU all of it, and a half where openings take longest.
    run: () =>
      holds('expertGrid', ranks, { from: ranks, step: onGpu() ? (ranks === 8 || processes ? 2 : 1) : 7 }, { mode }),
    processes,
  })),
  ...offeredForms.map((data) => ({
    name: `experts: sources read results of ${data.hidden} channels where ${data.mode} experts leave them`,
    run: () => holds('offeredExperts', 3, data),
  })),
  ...[
    { mode: 'low-latency', offered: false, ranks: 1 },
    { mode: 'low-latency', offered: true, ranks: 3 },
    { mode: 'high-throughput', offered: false, ranks: 3 },
    { mode: 'high-throughput', offered: true, ranks: 2 },
  ].map(({ ranks, ...data }) => ({
    name: `experts: a graph of ${data.mode} calls${data.offered ? ', results in place' : ''}, replayed many times, ${ranks} ranks`,
    run: () => holds('graphExperts', ranks, data, { timeoutMs: 180_000 }),
  })),
  {
    name: 'experts: a graph of low-latency calls goes on without a rank that does not come',
    run: () => holds('graphExperts', 3, { mode: 'low-latency', offered: false, replays: 3, absent: 1 }),
  },
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
    run: () =>
      holds('experts', 3, { mode: 'low-latency', dtype: 'f32', hidden: 32, maxTokens: 8, calls: 2, absent: 1 }),
  },
  ...modes.flatMap((mode) => [...moments, 'replay of halves'].map((moment) => killedExperts({ mode, moment }))),
  ...modes.map((mode) => ({ ...killedExperts({ mode, moment: 'combine', rankMode: 'processes' }), processes: true })),
  ...expertForms.slice(1, 7).map((form) => ({
    name: `experts between processes that share one GPU: ${nameOfForm(form)}`,
    run: () => holds('experts', 2, form, { mode: 'processes' }),
    processes: true,
  })),
  ...modes.flatMap((mode) => [
    {
      name: `experts between processes that share one GPU: sources read results where ${mode} experts leave them`,
      run: async () => {
        await holds('offeredExperts', 2, { mode, hidden: 64 }, { mode: 'processes' });
      },
      processes: true,
    },
    {
      name: `experts between processes that share one GPU: a graph of ${mode} calls, replayed many times`,
      // They take turns on it, which is slow.
      run: () =>
        holds('graphExperts', 2, { mode, offered: false, replays: 100 }, { mode: 'processes', timeoutMs: 180_000 }),
      processes: true,
    },
  ]),
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
  ...expertGraphCases,
  ...unitedCases,
  {
    name: 'a step captured as a graph is replayed with new values',
    run: () => holds('graph', 3),
  },
  {
    name: 'a rank that does not come is named, and calls go on after a resync',
    run: () => holds('absent', 3),
  },
  {
    name: 'a resync waits for releases that lie on a stream',
    run: () => holds('lateRelease', 2),
  },
  {
    name: 'a replay that fails poisons its dispatcher, and the graph is good after a resync',
    run: () => holds('failedReplay', 3),
  },
  {
    name: 'a terminated rank ends the kernels that wait for it',
    run: () => holds('lost', 3, { victim: 1 }, { kill: 1 }),
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
    run: () => holds('alone', 2),
  },
  {
    name: 'memory that another process maps is not freed before it has unmapped it',
    run: () => holds('closedFirst', 2, {}, { mode: 'processes' }),
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
  ...unitedMeasurements,
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
