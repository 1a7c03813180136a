// Where there are two GPUs or more that reach each other: processes that take them in turn. The scenarios, and what ranks must say of them, are those of streams of one GPU.
import { severalDemos } from './demos.mjs';
import {
  dispatchRows,
  dtypesOf,
  expertForms,
  holds,
  modes,
  moments,
  nameOfForm,
  offeredForms,
  range,
  someMessages,
} from './expected.mjs';
import { runRanks, valuesOf } from './ranks.mjs';

/** More show nothing that these do not. */
const MOST_RANKS = 4;

const spread = (/** @type {object} */ data) => ({ ...data, spread: true });

/**
 * @typedef {object} Row a scenario with its data
 * @property {string} name
 * @property {string} scenario
 * @property {object} [data]
 * @property {number} [kill] this rank, when it says that it is ready
 * @property {number} [ranks] as many as GPUs unless given
 * @property {boolean} [sample] one of the few that CI runs over the stand-in
 */

/** @param {number} ranks @returns {readonly Row[]} */
const rows = (ranks) => [
  ...[{ dtype: 'f32', qRow: 16, kvRow: 8 }, ...dispatchRows].map((row, i) => ({
    name: `dispatch moves ${row.dtype} rows of ${row.qRow} and ${row.kvRow} elements as the oracle says`,
    scenario: 'oracle',
    data: { seeds: range(200, 208), ...row },
    sample: i === 1,
  })),
  {
    name: 'dispatch moves rows between twice as many processes',
    scenario: 'oracle',
    data: { seeds: range(400, 403), dtype: 'f32', qRow: 16, kvRow: 8 },
    ranks: 2 * ranks,
  },
  {
    name: 'per-token dispatch gives the bytes of the one on the host, and refuses what that refuses',
    scenario: 'compatGrid',
    data: { from: 1, step: 4 },
    sample: true,
  },
  { name: 'a step captured as a graph is replayed with new values', scenario: 'graph' },
  { name: 'a rank that does not come is named, and calls go on after a resync', scenario: 'absent', sample: true },
  {
    name: 'a replay that fails poisons its dispatcher, and the graph is good after a resync',
    scenario: 'failedReplay',
  },
  { name: 'a resync waits for releases that lie on a stream', scenario: 'lateRelease', ranks: 2 },
  { name: 'a rank that is killed ends the kernels that wait for it', scenario: 'lost', data: { victim: 1 }, kill: 1 },
  { name: 'a call that needs nothing of ranks that have closed goes on without them', scenario: 'alone', ranks: 2 },
  {
    name: 'memory that another process maps is not freed before it has unmapped it',
    scenario: 'closedFirst',
    ranks: 2,
  },
  {
    name: 'collectives of device tensors give the bits of those in host memory',
    scenario: 'collectives',
    data: { dtypes: ['f32', 'bf16', 'f16', 'i64', 'u8'], counts: [1, 333, 40_000] },
  },
  {
    name: 'collectives between twice as many processes',
    scenario: 'collectives',
    data: { dtypes: ['f32'], counts: [100] },
    ranks: 2 * ranks,
  },
  ...Object.entries(dtypesOf).map(([of, dtypes]) => ({
    name: `collectives of ${of}: every operation and reduction gives the bits of that in host memory`,
    scenario: 'collectiveGrid',
    data: { dtypes, counts: [0, 1, 333, 20_011], stagingBytes: 2 ** 16, shape: { blocks: 2 } },
  })),
  { name: 'collectives run in the order of their stream', scenario: 'collectiveOrder', data: { rounds: 30 } },
  { name: 'collectives name the rank that does not come', scenario: 'collectiveAbsent', data: { absent: 1 } },
  {
    name: 'collectives end when a rank is killed',
    scenario: 'collectiveLost',
    data: { victim: 1 },
    kill: 1,
    sample: true,
  },
  {
    name: 'collective calls captured as a graph are replayed a thousand times',
    scenario: 'collectiveGraph',
    data: { replays: 1000, elements: 3000 },
  },
  {
    name: 'groups of some ranks, overlapping, make every operation and send messages',
    scenario: 'deviceGroups',
    data: { lists: [[0, 1], [1, 0], [1]], dtypes: ['f32', 'bf16', 'u8'], count: 2500, rounds: 20 },
    ranks: 2,
    sample: true,
  },
  { name: 'messages of device tensors', scenario: 'messages', data: { messages: someMessages } },
  { name: 'messages go behind what lies on their stream', scenario: 'messageOrder', ranks: 2 },
  {
    name: 'messages that are given up leave room for the next ones',
    scenario: 'messageCut',
    data: { rounds: 12, bytes: 5_000_001 },
    ranks: 2,
  },
  ...expertForms.map((form, i) => ({
    name: `experts: ${nameOfForm(form)}`,
    scenario: 'experts',
    data: form,
    sample: i === 1 || i === 6,
  })),
  {
    name: 'experts: every mode, payload and way back gives the bytes of a buffer on the host',
    scenario: 'expertGrid',
    data: { from: 1, step: 5 },
  },
  ...offeredForms.map((data) => ({
    name: `experts: sources read results of ${data.hidden} channels where ${data.mode} experts leave them`,
    scenario: 'offeredExperts',
    data,
  })),
  ...modes.flatMap((mode) =>
    [false, true].map((offered) => ({
      name: `experts: a graph of ${mode} calls${offered ? ', results in place' : ''}, replayed many times`,
      scenario: 'graphExperts',
      data: { mode, offered },
      sample: mode === 'high-throughput' && offered,
    })),
  ),
  ...modes.map((mode) => ({
    name: `experts: a graph of halves of two micro-batches between each other, ${mode}`,
    scenario: 'halvesGraph',
    data: { mode, dtype: 'bf16', hidden: 256, payload: 'f8e4m3+f32', kept: mode === 'high-throughput', replays: 20 },
    sample: mode === 'low-latency',
  })),
  {
    name: 'experts, one launch of several ranks: one on another GPU that is killed ends no call of theirs',
    scenario: 'unitedDeath',
    data: { united: 2 },
    kill: 1,
    ranks: 2,
    sample: true,
  },
  {
    name: 'experts: a replay without a rank that does not come',
    scenario: 'graphExperts',
    data: { mode: 'low-latency', offered: false, replays: 3, absent: 1 },
  },
  ...modes.flatMap((mode) =>
    moments.map((moment) => ({
      name: `experts: a rank that is killed before its ${moment} ends waits for it at once, ${mode}`,
      scenario: 'killedExperts',
      data: { mode, moment, victim: 1, late: -1, lateMs: 0 },
      kill: 1,
      sample: mode === 'low-latency' && moment === 'combine',
    })),
  ),
];

/**
 * @param {number} gpus that can be used, at least 2
 * @returns {readonly (import('./cases.mjs').Case & { readonly sample: boolean })[]}
 */
export function severalGpus(gpus) {
  const most = Math.min(gpus, MOST_RANKS);
  return [
    ...rows(most).map(({ name, scenario, data = {}, kill, ranks = most, sample = false }) => ({
      name: `several GPUs: ${name}, ${ranks} processes`,
      run: () => holds(scenario, ranks, spread(data), { mode: 'processes', ...(kill === undefined ? {} : { kill }) }),
      processes: true,
      sample,
    })),
    ...severalDemos(most).map((one) => ({
      ...one,
      processes: true,
      sample: sampled.some((text) => one.name.endsWith(text)),
    })),
  ];
}

/** Demos of more ranks than GPUs, which the suite of the package has in other forms. */
const sampled = ['attention -n 4 --dtype f32', 'moe --kill 1 -n 4 --mode high-throughput --dtype bf16'];

const median = (/** @type {readonly number[]} */ list) =>
  [...list].sort((a, b) => a - b)[Math.floor(list.length / 2)] ?? 0;
/** Of ranks' rounds the slowest rank's each, and of those the median. @param {readonly (readonly number[])[]} ranks */
const slowest = ([first = [], ...rest]) =>
  median(first.map((us, round) => Math.max(us, ...rest.map((rounds) => rounds[round] ?? 0))));

/** @typedef {{ name: string, scenario: string, data: object, say: (values: readonly any[]) => string }} Timed what is measured, and how its values are said */

/**
 * What is measured on so many GPUs, a process and a rank each, in sizes of a machine for that or in `small` ones, whose times say nothing.
 * @param {number} ranks
 * @param {boolean} small
 * @returns {readonly Timed[]}
 */
function timed(ranks, small) {
  const rounds = small ? 2 : 15;
  const shape = small
    ? { tokens: 6, hidden: 256, topK: 2, experts: 4 * ranks }
    : { tokens: 128, hidden: 7168, topK: 8, experts: 256 };
  const pairs = small ? 2 : 16;
  const grids = small
    ? [{ blocks: 2, lanes: 64 }]
    : [{}, ...[16, 33, 66, 132].map((blocks) => ({ blocks, lanes: 256 })), { blocks: 66, lanes: 512 }];
  const ofExperts = (/** @type {readonly any[]} */ values) => {
    const most = Math.max(...values.map(([{ rows }]) => rows));
    const times = values[0].map(({ blocks, lanes }, i) => {
      const us = slowest(values.map((ofGrids) => ofGrids[i].us));
      return `${us.toFixed(1)} us by ${blocks} blocks of ${lanes}`;
    });
    return `${most} rows of a rank at most; ${times.join(', ')}`;
  };
  const lowLatency = [
    ['bf16, sent', { offered: false }],
    ['bf16, in place', { offered: true }],
    ['fp8, in place', { offered: true, payload: 'f8e4m3+f32' }],
  ].map(([name, form]) => ({
    name: `a dispatch and a combine of experts in low latency, ${name}`,
    scenario: 'expertTimes',
    data: { mode: 'low-latency', ...shape, grids, pairs, rounds, ...form },
    say: ofExperts,
  }));
  return [
    {
      name: 'all-reduces',
      scenario: 'reduceTimes',
      data: {
        sizes: small ? [4096, 65_536] : [4096, 65_536, 2 ** 20, 2 ** 24, 2 ** 28],
        ...{ calls: small ? 3 : 10, rounds, stagingBytes: small ? 2 ** 20 : 2 ** 28 },
      },
      say: (values) => values[0].map((_, i) => `${slowest(values.map((sizes) => sizes[i])).toFixed(1)} us`).join(', '),
    },
    {
      name: 'attention dispatch to the others',
      scenario: 'dispatchTimes',
      data: {
        ...(small ? { bytes: 2 ** 16, rowBytes: 1024 } : { bytes: 2 ** 28, rowBytes: 8192 }),
        ...{ blocks: small ? [2] : [8, 16, 33, 66, 132], calls: 4, rounds },
      },
      say: (values) =>
        values[0].times
          .map(({ blocks }, i) => {
            const us = slowest(values.map(({ times }) => times[i].us));
            return `${blocks} blocks ${us.toFixed(0)} us, ${(values[0].bytes / us / 1000).toFixed(0)} GB/s out of each`;
          })
          .join(', '),
    },
    ...lowLatency,
    ...[false, true].map((offered) => ({
      name: `a dispatch and a combine of experts in high throughput, bf16, ${offered ? 'in place' : 'sent'}`,
      scenario: 'expertTimes',
      data: {
        ...{ mode: 'high-throughput', ...shape, ...(small ? {} : { tokens: 4096 }), grids: grids.slice(0, 1) },
        ...{ pairs: 2, rounds, offered },
      },
      say: ofExperts,
    })),
  ];
}

/** @param {number} ranks @param {boolean} small @returns {readonly import('./cases.mjs').Case[]} */
const timedCases = (ranks, small) =>
  timed(ranks, small).map(({ name, scenario, data, say }) => ({
    name: `several GPUs, ${ranks} processes, timed: ${name}`,
    run: async () =>
      say(valuesOf(await runRanks(scenario, ranks, { mode: 'processes', data: spread(data), timeoutMs: 180_000 }))),
    processes: true,
  }));

/** What only GPUs have figures for: of two, and of all. @param {number} gpus @returns {readonly import('./cases.mjs').Case[]} */
export const severalGpuMeasurements = (gpus) =>
  [...new Set([2, Math.min(gpus, MOST_RANKS)])].flatMap((ranks) => timedCases(ranks, false));

/** The same in sizes for host threads, for what they compare. */
export const smallMeasurements = timedCases(2, true);
