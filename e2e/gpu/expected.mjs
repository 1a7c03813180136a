// What ranks must say of each scenario, however many they are and wherever they run: as streams of one GPU, or as processes on several.
import assert from 'node:assert/strict';
import { openGpus } from '@ep/native';
import { runRanks, valuesOf } from './ranks.mjs';

export const range = (/** @type {number} */ from, /** @type {number} */ to) =>
  Array.from({ length: to - from }, (_, i) => from + i);

/** What a GPU does in seconds, host threads in its place take minutes for. */
export const onGpu = () => openGpus().devices[0]?.runsOn === 'cuda';

const same = (/** @type {readonly any[]} */ values, /** @type {any} */ value) =>
  assert.deepEqual(values, Array(values.length).fill(value));

/** @type {Readonly<Record<string, (values: readonly any[], data: any) => string | void>>} values: of those who live, in order */
const expected = {
  oracle: (values, { seeds }) => same(values, { compared: seeds.length, pending: 0 }),
  graph: (values) => {
    same(values, values[0]);
    return `${values[0]} replays`;
  },
  absent: (values) => {
    for (const [rank, { outcomes, epoch }] of values.entries()) {
      assert.equal(epoch, values.length);
      const rounds = [...values.keys()].flatMap((round) =>
        round === rank ? ['absent'] : [`EP_TIMEOUT ${round} true`, 'EP_POISONED'],
      );
      assert.deepEqual(outcomes, rounds);
    }
  },
  failedReplay: (values) => {
    const last = values.length - 1;
    const cut = [`EP_TIMEOUT ${last}`, true, 'EP_POISONED', 'enough', true, 'EP_ABORTED', 'EP_CLOSED'];
    assert.deepEqual(values, [...Array(last).fill(cut), ['EP_CLOSED']]);
  },
  lateRelease: ([first, ...others]) => {
    assert.equal(first, 'none');
    same(others, 'EP_TIMEOUT');
  },
  lost: (values) => {
    for (const { code, ms } of values) {
      assert.equal(code, 'EP_PEER_LOST');
      assert.ok(ms < 20_000, `${ms} ms`);
    }
  },
  alone: (values) => same(values, 'done'),
  // On each rank: its part, the table of parts, the other's part.
  closedFirst: (values) => same(values, { kept: true, mapped: 3, left: 0 }),
  collectives: (values) => {
    const refused = ['EP_INVALID_ARGUMENT', 'EP_INVALID_ARGUMENT'];
    for (const [rank, codes] of values.entries())
      assert.deepEqual(codes, rank > 0 ? refused : [...refused, 'no error']);
  },
  collectiveGrid: (values) => {
    same(values, values[0]);
    assert.ok(values[0] > 0);
    return `${values[0]} calls`;
  },
  expertGrid: (values) => {
    const [{ cells }] = values;
    for (const one of values) assert.equal(one.cells, cells);
    const rows = values.reduce((sum, one) => sum + one.rows, 0);
    assert.ok(cells > 0 && rows > cells);
    return `${cells} openings, ${rows} rows`;
  },
  attentionGrid: (values) => {
    const [{ cells }] = values;
    for (const one of values) assert.equal(one.cells, cells);
    const bytes = values.reduce((sum, one) => sum + one.bytes, 0);
    assert.ok(cells > 0 && bytes > 0);
    return `${cells} plans, ${bytes} bytes`;
  },
  compatGrid: (values) => {
    const [{ compared, refused }] = values;
    for (const one of values) assert.deepEqual([one.compared, one.refused], [compared, refused]);
    const bytes = values.reduce((sum, one) => sum + one.bytes, 0);
    // Of random plans some dispatches are nothing for it.
    assert.ok(compared > 2 * refused && bytes > 0, `${compared} compared, ${refused} refused, ${bytes} bytes`);
    return `${compared} calls, ${bytes} bytes, ${refused} dispatches refused`;
  },
  compatAbsent: (values, { absent }) =>
    assert.deepEqual(
      values,
      [...values.keys()].map((rank) => (rank === absent ? [] : [['EP_TIMEOUT', [absent]], 'EP_POISONED'])),
    ),
  collectiveOrder: (values, { rounds }) => same(values, rounds),
  // Each rank has one expert, and every token goes to two of three.
  unitedDeath: (values, { united }) => {
    const [{ said, ms }] = values;
    const lost = [...Array(united).fill(0), 1];
    assert.deepEqual(
      said.map(([mask, , losses]) => [mask, losses]),
      Array(united).fill([lost, [[united, 'EP_PEER_LOST']]]),
    );
    for (const [, counts] of said) assert.ok(counts[0] > 0);
    assert.ok(ms < 15_000, `${ms} ms`);
  },
  collectiveAbsent: (values, { absent }) => {
    assert.deepEqual(values[absent], []);
    const others = values.filter((_, rank) => rank !== absent);
    for (const [[code, awaited], second] of others) {
      // Whose time is up first tells the others, which then hear that it gave up; all know whom they awaited.
      assert.ok(code === 'EP_TIMEOUT' || code === 'EP_ABORTED', code);
      assert.deepEqual(awaited, [absent]);
      assert.deepEqual(second, ['EP_POISONED', undefined]);
    }
    assert.ok(others.some(([[code]]) => code === 'EP_TIMEOUT'));
  },
  collectiveLost: (values, { victim }) => {
    for (const { said, ms } of values) {
      assert.deepEqual(said, ['EP_PEER_LOST', [victim]]);
      assert.ok(ms < 20_000, `${ms} ms`);
    }
  },
  collectiveGraph: (values) => `${(Math.max(...values) * 1000).toFixed(0)} us a replay of five calls`,
  // Groups that a rank is in: the world, another one of the same ranks, and its own of the lists.
  deviceGroups: (values, { lists }) =>
    assert.deepEqual(
      values,
      [...values.keys()].map((rank) => 2 + lists.filter((list) => list.includes(rank)).length),
    ),
  // Bytes that each rank's messages had in all: to everybody but itself.
  messages: (values, { messages }) => {
    const width = { f32: 4, bf16: 2, u8: 1, i64: 8 };
    const bytes = messages.reduce((sum, { dtype, length }) => sum + width[dtype] * length, 0);
    same(values, (values.length - 1) * bytes);
  },
  messageOrder: (values) => {
    const mismatches = ['EP_MISMATCH', 'EP_MISMATCH', 'EP_MISMATCH'];
    same(values, [...mismatches, 'EP_INVALID_ARGUMENT', 'no error']);
  },
  messageCut: (values, { rounds }) => {
    for (const [rank, codes] of values.entries()) {
      for (const [round, code] of codes.slice(0, rounds).entries()) {
        assert.ok(code === 'done' || code === (round % 2 === rank ? 'enough' : 'EP_ABORTED'), `${round}: ${code}`);
      }
      assert.equal(codes[rounds], 'EP_TIMEOUT');
    }
    assert.ok(values.flat().includes('enough'), 'no message was cut off');
  },
  experts: (values, { absent }) => {
    for (const [rank, { compared, totals, losses }] of values.entries()) {
      assert.deepEqual(losses, absent === undefined || rank === absent ? [] : [[absent, 'EP_TIMEOUT']]);
      if (absent !== undefined) continue;
      assert.ok(compared > 0);
      assert.equal(totals, compared);
    }
  },
  offeredExperts: (values) => same(values, [6, 8, 10]),
  graphExperts: (values, { absent }) => {
    for (const [rank, { codes, losses }] of values.entries()) {
      const loses = absent !== undefined && rank !== absent;
      assert.deepEqual(losses, loses ? [[absent, 'EP_TIMEOUT']] : []);
      assert.deepEqual(codes, {
        ...{ 'not captured': 'EP_INVALID_ARGUMENT', half: 'EP_INVALID_ARGUMENT' },
        ...{ busy: 'EP_BUSY', held: 'EP_BUSY', left: loses ? 'EP_PEER_LOST' : 'no error' },
        again: loses ? 'EP_INVALID_ARGUMENT' : 'no error',
      });
    }
    return `${values[0].replays} replays`;
  },
  halvesGraph: (values, { kept, absent }) => {
    for (const [rank, { codes, losses }] of values.entries()) {
      const loses = absent !== undefined && rank !== absent;
      assert.deepEqual(losses, loses ? [[absent, 'EP_TIMEOUT']] : []);
      assert.deepEqual(codes, {
        ...(loses ? { lost: 'EP_PEER_LOST' } : {}),
        ...(kept && absent === undefined ? { released: 'EP_INVALID_ARGUMENT' } : {}),
      });
    }
    const rows = values.reduce((sum, one) => sum + one.rows, 0);
    assert.ok(rows > 0);
    return `${rows} rows`;
  },
  killedExperts: (values, { victim, late, lateMs }) => {
    const ranks = [...Array(values.length + 1).keys()].filter((rank) => rank !== victim);
    for (const [i, { ms, losses }] of values.entries()) {
      assert.deepEqual(losses, [[victim, 'EP_PEER_LOST']]);
      assert.ok(ms < 5000, `${ms} ms`);
      if (late >= 0 && ranks[i] !== late) assert.ok(ms > lateMs / 2, `${ms} ms, but rank ${late} came later`);
    }
    return values.map(({ ms }) => `${ms.toFixed(0)} ms`).join(', ');
  },
};

/**
 * Runs a scenario, and throws unless those who live say what they should.
 * @param {string} scenario
 * @param {number} ranks
 * @param {object} [data]
 * @param {Omit<NonNullable<Parameters<typeof runRanks>[2]>, 'data'>} [options]
 */
export async function holds(scenario, ranks, data = {}, options = {}) {
  const check = expected[scenario];
  if (check === undefined) throw new Error(`nobody knows what ranks must say of ${scenario}`);
  const reports = await runRanks(scenario, ranks, { data, timeoutMs: 120_000, ...options });
  assert.equal(reports.length, ranks);
  return check(valuesOf(reports.filter(({ rank }) => rank !== options.kill)), data);
}

/** Messages of all widths, one of nothing, and one of several pieces. */
export const someMessages = [
  { dtype: 'f32', length: 1 },
  { dtype: 'bf16', length: 3001 },
  { dtype: 'u8', length: 0 },
  { dtype: 'i64', length: 517 },
  { dtype: 'u8', length: 1_000_003 },
];

/** All dtypes of collectives, in lots that take about as long. */
export const dtypesOf = {
  floats: ['f64', 'f32', 'f16', 'bf16'],
  'short integers': ['i8', 'u8', 'i16', 'u16'],
  'long integers': ['i32', 'u32', 'i64', 'u64'],
  'codes of 8 bits': ['f8e4m3', 'f8e5m2', 'ue8m0'],
};

/** Rows of other widths than those of the plain f32 cases. */
export const dispatchRows = [
  { dtype: 'bf16', qRow: 5, kvRow: 3 },
  { dtype: 'u8', qRow: 1, kvRow: 33 },
  { dtype: 'f16', qRow: 64, kvRow: 8 },
];

/** Calls of experts: both modes, plain and quantised rows, halves, kept layouts, results in place. */
export const expertForms = [
  { mode: 'low-latency', dtype: 'f32', hidden: 96, maxTokens: 9, calls: 2 },
  { mode: 'low-latency', dtype: 'bf16', hidden: 256, maxTokens: 30, calls: 1, payload: 'f8e4m3+f32' },
  { mode: 'high-throughput', dtype: 'bf16', hidden: 128, maxTokens: 40, calls: 3 },
  { mode: 'high-throughput', dtype: 'bf16', hidden: 256, maxTokens: 20, calls: 2, payload: 'f8e4m3+f32' },
  { mode: 'low-latency', dtype: 'bf16', hidden: 64, maxTokens: 9, calls: 2, halves: true, offered: true },
  { mode: 'high-throughput', dtype: 'f32', hidden: 32, maxTokens: 9, calls: 2, halves: true, kept: true },
  { mode: 'high-throughput', dtype: 'bf16', hidden: 64, maxTokens: 9, calls: 1, kept: true, offered: true },
  ...['low-latency', 'high-throughput'].flatMap((mode) => [
    { mode, dtype: 'f16', hidden: 96, maxTokens: 9, calls: 2, halves: true },
    { mode, dtype: 'bf16', hidden: 256, maxTokens: 20, calls: 2, payload: 'f8e4m3+f32', roundScales: true },
    { mode, dtype: 'f16', hidden: 200, maxTokens: 12, calls: 1, payload: 'f8e4m3+f32', halves: true },
    { mode, dtype: 'bf16', hidden: 384, maxTokens: 12, calls: 2, payload: 'f8e4m3+ue8m0' },
    { mode, dtype: 'f32', hidden: 130, maxTokens: 12, calls: 1, payload: 'f8e4m3+ue8m0', halves: true },
    { mode, dtype: 'bf16', hidden: 256, maxTokens: 20, calls: 2, combinePayload: 'logfmt10' },
    { mode, dtype: 'f16', hidden: 200, maxTokens: 9, calls: 2, payload: 'f8e4m3+ue8m0', combinePayload: 'logfmt10' },
    { mode, dtype: 'f32', hidden: 64, maxTokens: 9, calls: 2, payload: 'f8e4m3+f32', offered: true },
  ]),
];

/** @param {(typeof expertForms)[number]} form */
export const nameOfForm = ({ mode, payload, roundScales, combinePayload, dtype, halves, kept, offered }) =>
  `${mode} calls of ${payload === undefined ? '' : `${payload}${roundScales ? ' in powers of two' : ''} for `}${dtype} rows${combinePayload ? `, back as ${combinePayload}` : ''}${halves ? ' in halves' : ''}${kept ? ' by kept layouts' : ''}${offered ? ', results in place' : ''}`;

export const offeredForms = [
  { mode: 'low-latency', hidden: 64 },
  { mode: 'low-latency', hidden: 33 },
  { mode: 'high-throughput', hidden: 64 },
];

export const modes = ['low-latency', 'high-throughput'];
export const moments = ['dispatch', 'combine', 'replay'];
