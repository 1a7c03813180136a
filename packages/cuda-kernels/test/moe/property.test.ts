/** Odd shapes, found by fast-check, and many ranks, a mask among them. */
import { balanceExperts, expertLoad, planMoe } from '@ep/plan/moe';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { check, inputsOf, type MoeCase, openFor, runCall, runCase } from './case.js';
import { onRanks } from './world.js';

const full = process.env.EP_TEST_FULL === '1';

const anyCase: fc.Arbitrary<MoeCase> = fc
  .record({
    mode: fc.constantFrom('low-latency' as const, 'high-throughput' as const),
    worldSize: fc.integer({ min: 1, max: 5 }),
    experts: fc.integer({ min: 1, max: 12 }),
    hidden: fc.oneof(fc.integer({ min: 1, max: 40 }), fc.constantFrom(127, 128, 129, 260)),
    alignment: fc.constantFrom(1, 2, 5, 128),
    dtype: fc.constantFrom('bf16' as const, 'f16' as const, 'f32' as const),
    seed: fc.integer({ min: 1, max: 2 ** 30 }),
    biases: fc.constantFrom(0 as const, 1 as const, 2 as const),
    weighted: fc.boolean(),
    emptyShare: fc.constantFrom(0, 0.2, 1),
    hook: fc.boolean(),
    calls: fc.integer({ min: 1, max: 4 }),
    blocks: fc.integer({ min: 1, max: 3 }),
    zeroCopyCombine: fc.boolean(),
  })
  .chain(({ calls, blocks, zeroCopyCombine, ...shape }) =>
    fc
      .record({
        topK: fc.integer({ min: 1, max: shape.experts }),
        tokens: fc.array(fc.integer({ min: 0, max: 9 }), { minLength: shape.worldSize, maxLength: shape.worldSize }),
      })
      .map((more): MoeCase => ({ ...shape, ...more, options: { calls, blocks, zeroCopyCombine } })),
  );

it('agrees with the oracle on whatever shape', { timeout: 300_000 }, async () => {
  await fc.assert(
    fc.asyncProperty(anyCase, (one) => runCase(one, (body) => onRanks(one.worldSize, 'shm', body), 3)),
    { numRuns: full ? 400 : 25, endOnFailure: false },
  );
});

it('sends more than 1024 tokens of one rank to one expert', { timeout: 60_000 }, async () => {
  for (const mode of ['low-latency', 'high-throughput'] as const) {
    const one: MoeCase = { worldSize: 2, mode, seed: 5, experts: 2, topK: 2, hidden: 8, tokens: [1500, 1100] };
    await runCase(one, (body) => onRanks(2, 'shm', body));
  }
});

it('serves choices by the replicas of balanced experts', { timeout: 60_000 }, async () => {
  const shape = { worldSize: 3, experts: 8, topK: 2, hidden: 16, tokens: [20, 31, 7], seed: 9 } as const;
  const { map } = balanceExperts(expertLoad(inputsOf({ ...shape, mode: 'low-latency' }).routing), {
    worldSize: 3,
    places: 4,
  });
  for (const mode of ['low-latency', 'high-throughput'] as const) {
    await runCase({ ...shape, mode, map }, (body) => onRanks(3, 'shm', body));
  }
});

describe.each([65, 128])('%i ranks', (worldSize) => {
  it.each(['low-latency', 'high-throughput'] as const)('and a mask, %s', { timeout: 300_000 }, async (mode) => {
    const one: MoeCase = {
      worldSize,
      mode,
      seed: 2,
      experts: worldSize + 3,
      topK: 4,
      hidden: 16,
      tokens: Array.from({ length: worldSize }, (_, rank) => (rank * 7) % 5),
      renormalise: true,
      options: { calls: 1 },
    };
    const inputs = inputsOf(one);
    const gone = [3, 40, worldSize - 1];
    const results = await onRanks(worldSize, 'shm', async (transport) => {
      const buffer = await openFor(transport, one, inputs);
      const first = await runCall(buffer, one, inputs);
      let second: Awaited<ReturnType<typeof runCall>> | undefined;
      if (!gone.includes(buffer.rank)) {
        buffer.leaveOut(gone);
        second = await runCall(buffer, one, inputs);
      }
      await buffer.close();
      return [first, second];
    });
    check(
      one,
      inputs,
      results.map((all) => all[0]),
    );
    const activeRanks = Uint8Array.from({ length: worldSize }, (_, rank) => (gone.includes(rank) ? 0 : 1));
    const plan = planMoe(inputs.routing, inputs.map, inputs.form, { activeRanks });
    expect(plan.unserved).toBeGreaterThan(0);
    check(
      one,
      inputs,
      results.map((all) => all[1]),
      plan,
    );
  });
});
