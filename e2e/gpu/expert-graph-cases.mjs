// The cases of graphs of calls of experts: halves, kept layouts, experts that compute.
import assert from 'node:assert/strict';
import { holds, modes, onGpu } from './expected.mjs';
import { runRanks, valuesOf } from './ranks.mjs';

/** On a GPU; what it does in seconds, host threads take minutes for. */
const replays = () => (onGpu() ? 100 : 6);

const forms = [
  { mode: 'low-latency', dtype: 'bf16', hidden: 64 },
  { mode: 'low-latency', dtype: 'bf16', hidden: 256, payload: 'f8e4m3+f32' },
  { mode: 'high-throughput', dtype: 'bf16', hidden: 64 },
  { mode: 'high-throughput', dtype: 'bf16', hidden: 256, payload: 'f8e4m3+ue8m0' },
];

const nameOf = (/** @type {{ mode: string, dtype: string, payload?: string }} */ { mode, dtype, payload }) =>
  `${mode} calls of ${dtype}${payload === undefined ? '' : ` as ${payload}`}`;

/** @type {readonly import('./cases.mjs').Case[]} */
export const expertGraphCases = [
  ...forms.map((form) => ({
    name: `experts: a graph of halves of two micro-batches between each other gives the bytes of ${nameOf(form)} that are not captured`,
    run: () => holds('halvesGraph', 3, { ...form, replays: replays() }),
  })),
  ...forms.slice(2).map((form) => ({
    name: `experts: a graph of halves by kept layouts gives the bytes of ${nameOf(form)} that are not captured`,
    run: () => holds('halvesGraph', 3, { ...form, kept: true, replays: replays() }),
  })),
  {
    name: 'experts: a graph of halves by kept layouts goes on without a rank that does not come',
    run: () =>
      holds('halvesGraph', 3, {
        ...{ mode: 'high-throughput', dtype: 'f32', hidden: 32, kept: true },
        ...{ replays: 2, absent: 1, timeoutMs: 1000 },
      }),
  },
  {
    name: 'experts: calls by one kept layout in a graph, and what makes a graph by a layout of no use',
    run: async () => {
      const data = { mode: 'high-throughput', dtype: 'bf16', hidden: 64, kept: true, layouts: 1, replays: replays() };
      const invalid = 'EP_INVALID_ARGUMENT';
      for (const { codes, losses, rows } of valuesOf(await runRanks('keptGraph', 3, { data }))) {
        assert.deepEqual(losses, []);
        assert.ok(rows > 0);
        assert.deepEqual(codes, {
          ...{ held: 'EP_BUSY', 'two at once': 'EP_BUSY', 'fewer tokens': invalid, 'one of others': invalid },
          ...{ 'released layout': invalid, 'captured anew': invalid, 'another layout': invalid },
          ...{ 'released call': invalid, 'rows of others are gone': invalid },
        });
      }
    },
  },
  ...forms.map((form) => ({
    name: `experts: dispatch, experts that compute and combine as one graph give the bytes of ${nameOf(form)} that are not captured`,
    run: async () => {
      const data = { ...form, intermediate: 40, replays: replays() };
      const values = valuesOf(await runRanks('computedGraph', 3, { data, timeoutMs: 180_000 }));
      const [computed, kept] = ['computed', 'kept'].map((name) => values.reduce((sum, one) => sum + one[name], 0));
      assert.ok(computed > 0 && kept > 0);
      return `${computed} rows computed, ${kept} left alone`;
    },
  })),
  ...modes.map((mode) => ({
    name: `experts: a graph of halves of ${mode} calls goes on without a rank that does not come`,
    run: () => holds('halvesGraph', 3, { mode, dtype: 'f32', hidden: 32, replays: 2, absent: 1, timeoutMs: 1000 }),
  })),
  ...modes.map((mode) => ({
    name: `experts between processes that share one GPU: a graph of halves of ${mode} calls`,
    run: () => holds('halvesGraph', 2, { mode, dtype: 'bf16', hidden: 64, replays: 6 }, { mode: 'processes' }),
    processes: true,
  })),
  ...modes.map((mode) => ({
    name: `experts: halves that a graph of ${mode} calls may not have are refused, and the buffer goes on`,
    run: async () => {
      const invalid = 'EP_INVALID_ARGUMENT';
      for (const { codes, losses } of valuesOf(
        await runRanks('refusedHalves', 2, { data: { mode, dtype: 'f32', hidden: 16 } }),
      )) {
        assert.deepEqual(losses, []);
        assert.deepEqual(codes, {
          ...{ 'no capture': invalid, 'half of a dispatch': invalid, 'after the capture': invalid },
          ...{ 'in another graph': invalid, 'of a combine that has begun': invalid, 'half of a combine': invalid },
          ...{ 'combine in another graph': invalid, released: invalid, 'received twice': invalid },
          ...{ 'more than there are slots': 'EP_BUSY', 'another body': 'of the body', limit: invalid },
        });
      }
    },
  })),
];
