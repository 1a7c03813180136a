/** What tests of ranks that come and go tell them. */
import { planMoe, rankTopk } from '@ep/plan/moe';
import { expect } from 'vitest';
import { check, inputsOf, type MoeCase, optionsOf, type RankResult, rowsOfCall } from './case.js';
import { type CommandedRank, CommandedWorld, type RankKind } from './commanded.js';
import type { ElasticWay, Way } from './programs/openers.mjs';

export const worldSize = 4;
export const caseOf = (mode: MoeCase['mode']): MoeCase => ({
  worldSize,
  mode,
  seed: 9,
  experts: 8,
  topK: 3,
  hidden: 64,
  tokens: [5, 4, 7, 3],
  dtype: 'f32',
  ...(mode === 'high-throughput' ? { alignment: 4 } : {}),
  options: { timeoutMs: 15_000 },
});

/** Who is told: a rank of the world, or of a later one of fewer ranks. */
export type Told = Pick<CommandedRank, 'rank' | 'tell'>;

/**
 * Each way with both modes under EP_TEST_FULL=1; otherwise with one, by turns: neither mode is a matter of the way in what these tests are about.
 */
export const cellsOf = <W extends string>(ways: readonly W[]): (readonly [MoeCase['mode'], W])[] => {
  const modes = ['low-latency', 'high-throughput'] as const;
  return ways.flatMap((way, index) =>
    (process.env.EP_TEST_FULL === '1' ? modes : [modes[index % 2]!]).map((mode) => [mode, way] as const),
  );
};

export const script = (mode: MoeCase['mode'], kind: RankKind, way: ElasticWay = 'shm') =>
  scriptOf(caseOf(mode), kind, way);

/** What the tests tell ranks about one case, with f32 rows. */
export function scriptOf(one: MoeCase, kind: RankKind, way: Way = 'shm') {
  const inputs = inputsOf(one);
  const options = optionsOf(one, inputs);
  const { hidden, seed, topK, hook = false } = one;
  const dispatch = (of: Told, call: number, more: object = {}) => {
    const { x, routing } = rowsOfCall(inputs, call);
    return of.tell<Uint8Array>('dispatch', {
      x: x[of.rank],
      hidden,
      choices: rankTopk(routing, of.rank),
      hook,
      ...more,
    });
  };
  const combine = (of: Told, more: object = {}) => {
    const { tokenOffsets } = inputs.routing;
    const weights = inputs.weights.slice(tokenOffsets[of.rank]! * topK, tokenOffsets[of.rank + 1]! * topK);
    return of.tell<RankResult>('combine', { hidden, seed, weights, hook, ...more });
  };
  const call = async (ranks: readonly Told[], number: number) => {
    await Promise.all(ranks.map((of) => dispatch(of, number)));
    return Promise.all(ranks.map((of) => combine(of)));
  };
  return {
    inputs,
    options,
    dispatch,
    combine,
    call,
    /** `first`: ranks that are there from the beginning; nobody is in the other places. */
    open: async (first = one.worldSize): Promise<CommandedWorld> => {
      const world = new CommandedWorld(kind, one.worldSize, first);
      const config = first === one.worldSize ? undefined : { activeRanks: world.ranks.map(({ rank }) => rank) };
      await Promise.all(world.ranks.map((of) => of.tell('open', { options, way, ...(config && { config }) })));
      return world;
    },
    /** A call of all ranks, bit by bit as the oracle has it. */
    complete: async ({ ranks }: { readonly ranks: readonly Told[] }, number: number) =>
      check(one, rowsOfCall(inputs, number), await call(ranks, number)),
    /** The same where nobody is in some of the places. */
    some: async ({ ranks }: { readonly ranks: readonly Told[] }, number: number) => {
      const results: (RankResult | undefined)[] = Array.from({ length: one.worldSize }, () => undefined);
      for (const [at, result] of (await call(ranks, number)).entries()) results[ranks[at]!.rank] = result;
      const rows = rowsOfCall(inputs, number);
      const activeRanks = Uint8Array.from(results, (result) => (result === undefined ? 0 : 1));
      check(one, rows, results, planMoe(rows.routing, rows.map, rows.form, { activeRanks }));
    },
    /** The second half of one. */
    finish: async ({ ranks }: CommandedWorld, number: number) =>
      check(one, rowsOfCall(inputs, number), await Promise.all(ranks.map((of) => combine(of)))),
    /** Others come in the place of `joining`. */
    replace: async (world: CommandedWorld, ...joining: readonly number[]) => {
      const staying = world.others(...joining);
      const coming = joining.map((rank) => world.replace(rank));
      await Promise.all([
        ...staying.map((of) => of.tell('readmit', { joining })),
        ...coming.map((of) => of.tell('rejoin', { way })),
      ]);
      const back = await Promise.all([
        ...staying.map((of) => of.tell<number[]>('update')),
        ...coming.map((of) => of.tell('join', { options })),
      ]);
      for (const ranks of back.slice(0, staying.length)) expect(ranks).toEqual([...joining].sort());
      const empty = Array.from({ length: one.worldSize }, (_, rank) => rank).filter((rank) => !world.ranks[rank]);
      for (const of of world.ranks)
        expect(await of.tell('losses')).toEqual(empty.map((rank) => [rank, 'EP_NOT_READY']));
    },
  };
}

export const closeAll = ({ ranks }: { readonly ranks: readonly Told[] }): Promise<unknown> =>
  Promise.all(ranks.map((of) => of.tell('close')));
