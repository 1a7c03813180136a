/** Receive tensors that are exactly full, and of one row too few. */
import { isEpError } from '@ep/core';
import { rankTopk, routingOfRanks, spreadExperts } from '@ep/plan/moe';
import { describe, expect, it } from 'vitest';
import { check, inputsOf, type MoeCase, openFor, type RankResult, runCall, tensorOf } from './case.js';
import { onRanks } from './world.js';

describe('a compact receive tensor', () => {
  const tokens = [4, 4];
  // Everybody to experts 0 and 1, which rank 0 holds: 16 rows there, none at rank 1.
  const routing = routingOfRanks(4, 2, [Int32Array.of(0, 1, 1, 0, 0, 1, 1, 0), Int32Array.of(0, 1, 1, 0, 0, 1, 1, 0)]);
  const one = (recvRows: number): MoeCase => ({
    worldSize: 2,
    mode: 'high-throughput',
    seed: 3,
    experts: 4,
    topK: 2,
    hidden: 32,
    tokens,
    options: { recvRows },
  });
  const inputsFor = (recvRows: number) => ({ ...inputsOf(one(recvRows)), routing, map: spreadExperts(4, 2) });

  it('may be exactly full', async () => {
    const inputs = inputsFor(16);
    const results = await onRanks(2, 'shm', async (transport) => {
      await using buffer = await openFor(transport, one(16), inputs);
      return await runCall(buffer, one(16), inputs);
    });
    check(one(16), inputs, results);
  });

  it('of one row too few refuses the call on every rank, before anything moves, and takes the next', async () => {
    const inputs = inputsFor(15);
    const fewer = Int32Array.of(0, 1, 1, 0, 0, 1, 1, -1);
    const results = await onRanks(2, 'shm', async (transport) => {
      await using buffer = await openFor(transport, one(15), inputs);
      const x = tensorOf('bf16', 4, 32, inputs.x[buffer.rank]!);
      for (let i = 0; i < 3; i++) {
        const failure = await buffer.dispatch(x, rankTopk(routing, buffer.rank)).then(
          () => undefined,
          (error: unknown) => error,
        );
        expect(isEpError(failure) && failure.code).toBe('EP_CAPACITY');
        expect((failure as Error).message).toMatch(/rank 0 has room for 15 rows, 16 were to go there/);
      }
      const less = { ...inputs, routing: routingOfRanks(4, 2, [fewer, rankTopk(routing, 1)]) };
      return await runCall(buffer, one(15), less);
    });
    check(one(15), { ...inputs, routing: routingOfRanks(4, 2, [fewer, rankTopk(routing, 1)]) }, results);
  });

  it('of a rank that one rank does without refuses the call there, too, by the others, and takes the next', {
    timeout: 60_000,
  }, async () => {
    const three: MoeCase = { ...one(15), worldSize: 3, experts: 6, tokens: [4, 4, 4] };
    const full = Int32Array.of(0, 1, 1, 0, 0, 1, 1, 0);
    const choices = [full, Int32Array.of(4, 5, 4, 5, 2, 4, 3, 5), full];
    const map = spreadExperts(6, 3);
    const inputs = { ...inputsOf(three), routing: routingOfRanks(6, 2, choices), map };
    const counts = await onRanks(3, 'shm', async (transport) => {
      await using buffer = await openFor(transport, three, inputs);
      const { rank } = buffer;
      // What ranks know of each other's loss differs.
      if (rank < 2) buffer.leaveOut([1 - rank]);
      const x = tensorOf('bf16', 4, 32, inputs.x[rank]!);
      for (let i = 0; i < 3; i++) {
        const failure = await buffer
          .dispatchSend(x, choices[rank]!)
          .then((hook) => hook.receive())
          .then(
            () => undefined,
            (error: unknown) => error,
          );
        expect(isEpError(failure) && failure.code).toBe('EP_CAPACITY');
        expect((failure as Error).message).toMatch(
          rank === 1 ? /receive: rank 0 has room for 15 rows, more were/ : /rank 0 has room for 15 rows, 16 were/,
        );
      }
      const { counts, handle, lostRanks } = await buffer.dispatch(x, rank === 2 ? choices[1]! : choices[rank]!);
      await handle.release();
      expect([...lostRanks]).toEqual([rank === 1 ? 1 : 0, rank === 0 ? 1 : 0, 0]);
      return [...counts];
    });
    expect(counts).toEqual([
      [4, 4],
      [2, 2],
      [6, 6],
    ]);
  });

  it('is refused over EFA by as many arrivals as rows were owed', { timeout: 60_000 }, async () => {
    const n = 40;
    const times = (count: number, ...of: readonly number[]): number[] => Array.from({ length: count }, () => of).flat();
    const full = times(n, 0, 1, 1, 0, 0, 1, 1, 0);
    const choices = [
      Int32Array.from(full),
      Int32Array.from(times(n, 4, 5, 4, 5, 2, 4, 3, 5)),
      // Rank 0 refuses these; rank 1, which does without it, then hears of that where it awaits its rows of rank 2.
      Int32Array.from([...full, ...times(4 * n, 2, 3)]),
    ];
    const fits = Int32Array.from([...times(4 * n, 4, 5), ...times(4 * n, -1, -1)]);
    const three: MoeCase = { ...one(16 * n - 1), worldSize: 3, experts: 6, tokens: [4 * n, 4 * n, 8 * n] };
    const inputs = { ...inputsOf(three), routing: routingOfRanks(6, 2, choices), map: spreadExperts(6, 3) };
    const counts = await onRanks(3, 'efa', async (transport) => {
      await using buffer = await openFor(transport, three, inputs);
      const { rank } = buffer;
      if (rank < 2) buffer.leaveOut([1 - rank]);
      const x = tensorOf('bf16', three.tokens[rank]!, 32, inputs.x[rank]!);
      for (let i = 0; i < 3; i++) {
        const failure = await buffer
          .dispatchSend(x, choices[rank]!)
          .then((hook) => hook.receive())
          .then(
            () => undefined,
            (error: unknown) => error,
          );
        expect(isEpError(failure) && failure.code).toBe('EP_CAPACITY');
      }
      const { counts, handle } = await buffer.dispatch(x, rank === 2 ? fits : choices[rank]!);
      await handle.release();
      return [...counts];
    });
    expect(counts).toEqual([
      [4 * n, 4 * n],
      [n, n],
      [7 * n, 7 * n],
    ]);
  });
});

describe('completion counters of an EFA', () => {
  const one: MoeCase = {
    worldSize: 3,
    mode: 'low-latency',
    seed: 3,
    experts: 6,
    topK: 2,
    hidden: 32,
    tokens: [2, 2, 2],
  };
  const inputs = inputsOf(one);
  const withCounters = (counters: number) =>
    onRanks(
      3,
      'efa',
      async (transport) => {
        try {
          await using buffer = await openFor(transport, one, inputs);
          return await runCall(buffer, one, inputs);
        } catch (error) {
          return error;
        }
      },
      () => ({ maxCounters: counters }),
    );

  it('are looked at when a buffer is opened: as many as it needs will do, one less is told on every rank', async () => {
    const needs = async (counters: number): Promise<number> => {
      const failures = await withCounters(counters);
      const needed = failures.map((failure) => {
        expect(isEpError(failure) && failure.code, String(failure)).toBe('EP_CAPACITY');
        const said = /2 calls over 3 ranks need (\d+) signal slots, efa-gda:soft has (\d+)/.exec(
          (failure as Error).message,
        );
        expect(Number(said?.[2]), (failure as Error).message).toBe(counters);
        return Number(said![1]);
      });
      expect(new Set(needed).size).toBe(1);
      return needed[0]!;
    };
    const enough = await needs(4);
    expect(await needs(enough - 1)).toBe(enough);
    check(one, inputs, (await withCounters(enough)) as RankResult[]);
  });
});
