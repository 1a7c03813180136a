/** What is read and written where it lies, and what is copied first. */
import type { Tensor } from '@ep/core';
import { tensor } from '@ep/core';
import { allocateHost } from '@ep/native';
import { rankTopk } from '@ep/plan/moe';
import { expect, it } from 'vitest';
import { inputsOf, type MoeCase, openFor } from './case.js';
import { onRanks } from './world.js';

const hidden = 32;
const rows = 3;

it.each(['low-latency', 'high-throughput'] as const)(
  '%s: tensors in native memory are taken as they are, results that experts leave in received rows too; others are copied and counted',
  async (mode) => {
    const one: MoeCase = {
      worldSize: 2,
      mode,
      seed: 5,
      experts: 4,
      topK: 2,
      hidden,
      tokens: [rows, rows],
      dtype: 'f32',
    };
    const inputs = inputsOf(one);
    await onRanks(2, 'shm', async (of) => {
      await using buffer = await openFor(of, one, inputs);
      const { rank } = buffer;
      const native = (numbers: Float32Array): Tensor<'f32'> => {
        const data = new Float32Array(allocateHost(4 * numbers.length), 0, numbers.length);
        data.set(numbers);
        return tensor('f32', [rows, hidden], data);
      };
      const choices = rankTopk(inputs.routing, rank);
      const call = async (x: Tensor<'f32'>, out: Tensor<'f32'>) => {
        const received = await buffer.dispatch(x, choices);
        const combined = await buffer.combine(received.x, received.handle, { out });
        return { staged: [received.stagedBytes, combined.stagedBytes], combined };
      };
      const out = native(new Float32Array(rows * hidden));
      const direct = await call(native(inputs.x[rank]!), out);
      expect(direct.staged).toEqual([0, 0]);
      // Each expert gives back what it got: a token comes back once for each choice.
      const twice = inputs.x[rank]!.map((value) => 2 * value);
      expect(direct.combined.y.data).toBe(out.data);
      expect(out.data).toEqual(twice);
      const ordinary = tensor('f32', [rows, hidden], inputs.x[rank]!.slice());
      const copied = await call(ordinary, tensor('f32', [rows, hidden], new Float32Array(rows * hidden)));
      expect(copied.staged[0]).toBe(4 * rows * hidden);
      expect(copied.combined.y.data).toEqual(twice);
    });
  },
);
