import { describe, expect, it } from 'vitest';
import { planMoe, routingOfRanks, spreadExperts } from '../../src/moe/index.js';
import { moeCombine, moeDispatch } from '../../src/reference/index.js';
import { expectPlanError } from '../expect-error.js';

/** One token on rank 0 that chose experts 1 and 0, one on each rank. */
const plan = planMoe(routingOfRanks(2, 2, [Int32Array.of(1, 0), Int32Array.of()]), spreadExperts(2, 2), {
  mode: 'high-throughput',
  alignment: 2,
});
const rows = [Float64Array.of(10, 0), Float64Array.of(20, 0)];
const base = { hidden: 1, precision: 'f64' } as const;

describe('moeDispatch', () => {
  it('fills what no token wrote: 0 in high throughput, the caller’s choice in low latency', () => {
    const x = [Float32Array.of(7), Float32Array.of()];
    expect(moeDispatch(plan, x, 1, 9).map((t) => [...t])).toEqual([
      [7, 0],
      [7, 0],
    ]);
    const low = planMoe(plan.routing, plan.map, { mode: 'low-latency', maxTokens: 1 });
    expect(moeDispatch(low, x, 1, 9).map((t) => [...t])).toEqual([
      [7, 9],
      [7, 9],
    ]);
  });

  it('refuses tensors of another size, but not those of ranks that are gone', () => {
    expectPlanError(() => moeDispatch(plan, [Float32Array.of(7)], 1), 'EP_INVALID_ARGUMENT', 'x must hold 2 tensors');
    const x = [Float32Array.of(7, 8), Float32Array.of()];
    expectPlanError(() => moeDispatch(plan, x, 1), 'EP_INVALID_ARGUMENT', 'x[0] must hold 1 elements, found 2');
    const without = planMoe(plan.routing, plan.map, plan.form, { activeRanks: [0, 1] });
    expect(moeDispatch(without, x, 1).map((t) => [...t])).toEqual([[], []]);
  });
});

describe('moeCombine', () => {
  it('sums in the order of choices, after the biases', () => {
    const weights = [Float32Array.of(0.5, 2), Float32Array.of()];
    expect(moeCombine(plan, rows, { ...base, weights }).map((t) => [...t])).toEqual([[30], []]);
    // 2^53 swallows 1: (2^53 + 1) + 1 is 2^53, 1 + 1 + 2^53 is not. Choice 0 is on rank 1, choice 1 on rank 0.
    const big = 2 ** 53;
    const order = (first: number, second: number, bias: readonly number[]) =>
      moeCombine(plan, [Float64Array.of(second, 0), Float64Array.of(first, 0)], {
        ...base,
        bias: bias.map((b) => [Float64Array.of(b), Float64Array.of()]),
      })[0]![0];
    expect(order(1, big, [1])).toBe(big + 2);
    expect(order(big, 1, [1])).toBe(big);
    expect(order(1, 1, [big])).toBe(big);
    expect(order(big, 0, [1, 1])).toBe(big + 2);
  });

  it("'f32' rounds every product and every sum", () => {
    const third = Math.fround(1 / 3);
    const weights = [Float32Array.of(third, third), Float32Array.of()];
    const [[sum]] = moeCombine(plan, rows, { ...base, precision: 'f32', weights }) as unknown as [[number]];
    expect(sum).toBe(Math.fround(Math.fround(third * 20) + Math.fround(third * 10)));
    const [[wide]] = moeCombine(plan, rows, { ...base, weights }) as unknown as [[number]];
    expect(sum).not.toBe(wide);
  });

  it("'f32' rounds the factor of renormalisation and the weights that it makes", () => {
    const value = 3;
    for (let i = 1; i <= 50; i++) {
      const [x, y] = [i / 51, (51 - i) / 60];
      const [v, w] = [Math.fround(x), Math.fround(y)];
      const factor = Math.fround(Math.fround(v + w) / w);
      const [[left]] = moeCombine(plan, [Float64Array.of(value, 0), Float64Array.of(Number.NaN, 0)], {
        ...base,
        precision: 'f32',
        weights: [Float32Array.of(v, w), Float32Array.of()],
        lostRanks: [0, 1],
        renormalise: true,
      }) as unknown as [[number]];
      expect(left).toBe(Math.fround(Math.fround(w * factor) * value));
    }
  });

  it('renormalises what is left, and leaves alone what sums to 0', () => {
    const lostRanks = [0, 1];
    const of = (w: readonly [number, number]) =>
      moeCombine(plan, [rows[0]!, Float64Array.of(Number.NaN, Number.NaN)], {
        ...base,
        weights: [Float32Array.from(w), Float32Array.of()],
        lostRanks,
        renormalise: true,
      })[0]![0];
    expect(of([0.75, 0.25])).toBe(10);
    expect(of([1, 0])).toBe(0);
  });

  it('a token without any choice left is its biases', () => {
    const bias = [[Float64Array.of(3), Float64Array.of()]];
    const lost = planMoe(routingOfRanks(2, 1, [Int32Array.of(1), Int32Array.of()]), plan.map, plan.form, {
      lostRanks: [0, 1],
    });
    expect([...moeCombine(lost, [Float64Array.of(), Float64Array.of()], { ...base, bias })[0]!]).toEqual([3]);
  });

  it.each([
    [{ bias: [rows, rows, rows] }, ['bias must be at most 2 tensors, found 3']],
    [{ bias: [[Float64Array.of(1, 2), Float64Array.of()]] }, ['bias[0][0] must hold 1 elements, found 2']],
    [{ weights: [Float32Array.of(1), Float32Array.of()] }, ['weights[0] must hold 2 elements, found 1']],
    [{ hidden: 2 }, ['y[0] must hold 4 elements, found 2']],
    [{ lostRanks: [0] }, ['lostRanks must have 2 elements']],
  ])('refuses %j', (change, parts) => {
    expectPlanError(() => moeCombine(plan, rows, { ...base, ...change }), 'EP_INVALID_ARGUMENT', ...parts);
  });
});
