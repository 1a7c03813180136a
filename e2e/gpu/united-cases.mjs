// The cases of calls of experts that one launch makes for several ranks of a process.
import assert from 'node:assert/strict';
import { holds, onGpu } from './expected.mjs';
import { runRanks, valuesOf } from './ranks.mjs';

/** What the scenario gives, which has its ranks in one thread. @param {string} scenario @param {object} [data] */
async function told(scenario, data) {
  const [value] = valuesOf(await runRanks(scenario, 1, { data, timeoutMs: 120_000 }));
  return value;
}

/** @type {readonly import('./cases.mjs').Case[]} */
export const unitedCases = [
  ...[
    { name: 'bf16, two ranks', ranks: 2, hidden: 128, tokens: 7 },
    { name: 'bf16, four ranks on one stream', ranks: 4, hidden: 64, tokens: 16, oneStream: true },
    { name: 'fp8 with f32 scales, three ranks', ranks: 3, hidden: 256, tokens: 9, payload: 'f8e4m3+f32' },
    {
      name: 'fp8 with ue8m0 scales, eight ranks on one stream',
      ranks: 8,
      hidden: 128,
      tokens: 5,
      payload: 'f8e4m3+ue8m0',
      oneStream: true,
    },
    { name: 'results in place, three ranks', ranks: 3, hidden: 64, tokens: 8, offered: true },
    { name: 'one of three ranks by itself', ranks: 3, hidden: 64, tokens: 8, alone: 1 },
    { name: 'one rank alone', ranks: 1, hidden: 64, tokens: 8 },
  ].map(({ name, ...data }) => ({
    name: `experts, one launch of several ranks: the bytes of calls by each for itself, ${name}`,
    run: async () => {
      const rows = await told('unitedExperts', data);
      assert.ok(rows > data.ranks * data.tokens);
      return `${rows} rows`;
    },
  })),
  ...[false, true].map((offered) => ({
    name: `experts, one launch of several ranks: a graph${offered ? ', results in place' : ''}`,
    run: async () => {
      const replays = onGpu() ? 1000 : 12;
      assert.equal(await told('unitedGraph', { ranks: 3, hidden: 64, tokens: 8, replays, offered }), replays);
      return `${replays} replays`;
    },
  })),
  {
    name: 'experts, one launch of several ranks: it is behind what lies on the stream of any of them, and what comes later behind it',
    run: async () => assert.deepEqual(await told('unitedOrder'), Array(6).fill(true)),
  },
  {
    name: 'experts, one launch of several ranks: who does not come is named by each, and an abort ends the calls of all',
    run: async () => {
      const gone = [2, 'EP_TIMEOUT'];
      const mask = [0, 0, 1];
      assert.deepEqual(await told('unitedLosses'), [
        [mask, mask],
        [[gone], [gone]],
        [mask, mask],
        ['cut', 'cut'],
        'EP_POISONED',
      ]);
    },
  },
  {
    name: 'experts, one launch of several ranks: another one that is killed ends no call of theirs',
    run: () => holds('unitedDeath', 2, { united: 2 }, { kill: 1 }),
  },
  {
    name: 'experts, one launch of several ranks: what does not fit together is refused before anything is launched',
    run: async () => {
      const invalid = (/** @type {string} */ text) => `EP_INVALID_ARGUMENT: ${text}`;
      const found = await told('refusedUnions');
      const codes = Object.fromEntries(Object.entries(found).map(([name, text]) => [name, text.split(':')[0]]));
      const others = Object.keys(codes).filter((name) => !['slot', 'closed', 'united when closed'].includes(name));
      assert.equal(others.length, 23);
      assert.deepEqual(codes, {
        ...Object.fromEntries(others.map((name) => [name, 'EP_INVALID_ARGUMENT'])),
        ...{ slot: 'EP_BUSY', closed: 'EP_CLOSED', 'united when closed': 'EP_CLOSED' },
      });
      for (const [name, text] of /** @type {const} */ ([
        ['twice', 'uniteMoeBuffers: buffers[2] must be another one than those before it, found "that of rank 0 again"'],
        ['other lanes', 'uniteMoeBuffers: buffers[1] must be one of 1 blocks of 64 lanes, as buffers[0] is'],
        ['high throughput', 'uniteMoeBuffers: buffers[0] must be a buffer in low-latency mode'],
        ['one is missing', 'dispatch: calls must be an array of 2 objects, for ranks 0-1, found "1, without rank 1"'],
        ['another hidden size', 'dispatch, rank 1, x: '],
      ])) {
        assert.ok(found[name].startsWith(invalid(text)), found[name]);
      }
      assert.match(found['another opening'], /buffers\[1\], of rank 1, was not opened with buffers\[0\], of rank 0/);
    },
  },
];

const us = (/** @type {readonly number[]} */ list) => list.map((one) => one.toFixed(1)).join(' and ');

/** What only a GPU has figures for. @type {readonly import('./cases.mjs').Case[]} */
export const unitedMeasurements = [{ payload: 'f8e4m3+f32', name: 'fp8' }, { name: 'bf16' }].map(
  ({ name, ...data }) => ({
    name: `experts of eight ranks by one launch and by eight, ${name}, timed`,
    run: async () => {
      const shape = { ranks: 8, tokens: 128, hidden: 7168, experts: 256, topK: 8, blocks: 32, lanes: 256 };
      const { calls, graphs } = await told('unitedTimes', { ...shape, ...data, rounds: 40, pairs: 16 });
      const [eight, one] = [graphs.filter((_, i) => i % 2 === 0), graphs.filter((_, i) => i % 2 === 1)];
      return [
        `us of a dispatch and a combine in graphs of 16: eight graphs ${us(eight.map(([js]) => js))}`,
        `one ${us(one.map(([js]) => js))}, on the device ${us(one.map(([, device]) => device))}`,
        `calls from JS: dispatch ${us([calls[0]])}, combine ${us([calls[1]])}`,
        `by one launch ${us([calls[2]])}, ${us([calls[3]])}`,
      ].join('; ');
    },
  }),
);
