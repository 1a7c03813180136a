/** The backward pass of each half by the other: inner products that have to be equal, exactly, on numbers whose sums and products are exact. */
import type { Storage } from '@ep/core';
import { planMoe, rankReceives, rankTopk } from '@ep/plan/moe';
import { expect, it } from 'vitest';
import { type Inputs, inputsOf, type MoeCase, openFor, rowsOf, tensorOf } from './case.js';
import { onRanks, type WorldTransport } from './world.js';

const full = process.env.EP_TEST_FULL === '1';
const transports: readonly WorldTransport[] = full ? ['shm', 'ibgda', 'efa', 'hostile', 'shm+ibgda'] : ['shm', 'ibgda'];
const modes = ['low-latency', 'high-throughput'] as const;
const hidden = 24;

const caseOf = (mode: MoeCase['mode']): MoeCase => ({
  worldSize: 3,
  mode,
  seed: 77,
  experts: 7,
  topK: 3,
  hidden,
  tokens: [5, 0, 8],
  dtype: 'f32',
  emptyShare: 0.2,
  ...(mode === 'high-throughput' ? { alignment: 4 } : {}),
});

/** Small integers: every product and every sum of a few thousand of them is a number of f32. */
function integers(seed: number, count: number): Float32Array {
  let state = Math.imul(seed + 1, 0x9e3779b1) >>> 0 || 1;
  return Float32Array.from({ length: count }, () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return (state >>> 28) - 8;
  });
}

/** Only of the rows that `of` says. */
function inner(a: Float32Array, b: Float32Array, of: (row: number) => boolean = () => true): number {
  let sum = 0;
  for (let i = 0; i < a.length; i++) if (of(Math.floor(i / hidden))) sum += a[i]! * b[i]!;
  return sum;
}

interface Sides {
  /** <rows, D x> and <D' rows, x>: dispatch against combine without weights. */
  readonly dispatch: readonly [number, number];
  /** <gradient, C rows> and <C' gradient, rows>: combine with weights against dispatch, each row times its weight. */
  readonly combine: readonly [number, number];
}

async function sidesOf(one: MoeCase, inputs: Inputs, transport: WorldTransport): Promise<readonly Sides[]> {
  const { topK, worldSize } = one;
  const { routing, map, form } = inputs;
  const plan = planMoe(routing, map, form);
  const weights = integers(5, inputs.weights.length);
  const offsets = routing.tokenOffsets;
  return onRanks(worldSize, transport, async (of) => {
    await using buffer = await openFor(of, one, inputs);
    const { rank } = buffer;
    const tokens = one.tokens[rank]!;
    const { sourceRank, recvRows } = rankReceives(plan, rank);
    const written = (row: number): boolean => sourceRank[row]! >= 0;
    const x = integers(10 + rank, tokens * hidden);
    const gradient = integers(20 + rank, tokens * hidden);
    const rows = integers(30 + rank, recvRows * hidden);
    const own = weights.slice(offsets[rank]! * topK, offsets[rank + 1]! * topK);
    const there = (numbers: Float32Array) => tensorOf('f32', tokens, hidden, numbers);
    const results = tensorOf('f32', recvRows, hidden, rows);
    const keepLayout = one.mode === 'high-throughput';
    const { handle, layout, ...forward } = await buffer.dispatch(there(x), rankTopk(routing, rank), { keepLayout });
    const sent = rowsOf({ handle, ...forward }, hidden);
    const back = await buffer.combine(results, handle);
    const again = await buffer.dispatch(there(gradient), layout ?? rankTopk(routing, rank));
    const spread = rowsOf(again, hidden);
    for (let row = 0; row < recvRows; row++) {
      if (!written(row)) continue;
      const choice = (offsets[sourceRank[row]!]! + again.sourceToken[row]!) * topK + again.sourceChoice[row]!;
      for (let h = 0; h < hidden; h++) spread[row * hidden + h]! *= weights[choice]!;
    }
    const mixed = await buffer.combine(results, again.handle, { weights: own });
    const data = (numbers: Storage['f32']): Float32Array => numbers.slice();
    return {
      dispatch: [inner(rows, sent, written), inner(data(back.y.data as Float32Array), x)],
      combine: [inner(gradient, data(mixed.y.data as Float32Array)), inner(spread, rows, written)],
    };
  });
}

const sum = (all: readonly Sides[], name: keyof Sides, side: 0 | 1): number =>
  all.reduce((total, sides) => total + sides[name][side], 0);

it.each(transports.flatMap((transport) => modes.map((mode) => [mode, transport] as const)))(
  '%s over %s: combine is the backward pass of dispatch, and dispatch that of combine',
  async (mode, transport) => {
    const one = caseOf(mode);
    const all = await sidesOf(one, inputsOf(one), transport);
    for (const name of ['dispatch', 'combine'] as const) {
      expect(sum(all, name, 0), name).toBe(sum(all, name, 1));
      expect(sum(all, name, 0), `${name}: of nothing they would be equal, too`).not.toBe(0);
    }
  },
);
