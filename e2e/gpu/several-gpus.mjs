// Where there are two GPUs or more that reach each other: processes that take them in turn. The scenarios, and what ranks must say of them, are those of streams of one GPU.
import { severalDemos } from './demos.mjs';
import {
  dispatchRows,
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
  { name: 'a step captured as a graph is replayed with new values', scenario: 'graph', data: { replays: 200 } },
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
  ...offeredForms.map((data) => ({
    name: `experts: sources read results of ${data.hidden} channels where ${data.mode} experts leave them`,
    scenario: 'offeredExperts',
    data,
  })),
  ...modes.flatMap((mode) =>
    [false, true].map((offered) => ({
      name: `experts: a graph of ${mode} calls${offered ? ', results in place' : ''}, 40 replays`,
      scenario: 'graphExperts',
      data: { mode, offered, replays: 40 },
      sample: mode === 'high-throughput' && offered,
    })),
  ),
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

/** What only GPUs have figures for. @type {readonly import('./cases.mjs').Case[]} */
export const severalGpuMeasurements = [
  {
    name: 'several GPUs: all-reduces of device tensors on two, timed',
    run: async () => {
      const sizes = [4096, 65_536, 2 ** 20, 2 ** 24, 2 ** 28];
      const data = spread({ sizes, calls: 20, stagingBytes: 2 ** 28 });
      const reports = await runRanks('collectiveTimes', 2, { mode: 'processes', data, timeoutMs: 120_000 });
      const [times = []] = valuesOf(reports);
      return sizes.map((bytes, i) => `${bytes} bytes ${((times[i] ?? 0) * 1000).toFixed(1)} us`).join(', ');
    },
    processes: true,
  },
];
