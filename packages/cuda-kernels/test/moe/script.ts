/** What tests of ranks that come and go tell them. */
import { rankTopk } from '@ep/plan/moe';
import { expect } from 'vitest';
import { check, inputsOf, type MoeCase, optionsOf, type RankResult, rowsOfCall } from './case.js';
import { type CommandedRank, CommandedWorld, type RankKind } from './commanded.js';

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

/** What the tests tell ranks about one case. */
export function script(mode: MoeCase['mode'], kind: RankKind) {
  const one = caseOf(mode);
  const inputs = inputsOf(one);
  const options = optionsOf(one, inputs);
  const { hidden, seed, topK } = one;
  const dispatch = (of: CommandedRank, call: number, more: object = {}) => {
    const { x, routing } = rowsOfCall(inputs, call);
    return of.tell<Uint8Array>('dispatch', { x: x[of.rank], hidden, choices: rankTopk(routing, of.rank), ...more });
  };
  const combine = (of: CommandedRank, more: object = {}) => {
    const { tokenOffsets } = inputs.routing;
    const weights = inputs.weights.slice(tokenOffsets[of.rank]! * topK, tokenOffsets[of.rank + 1]! * topK);
    return of.tell<RankResult>('combine', { hidden, seed, weights, ...more });
  };
  const call = async (ranks: readonly CommandedRank[], number: number) => {
    await Promise.all(ranks.map((of) => dispatch(of, number)));
    return Promise.all(ranks.map((of) => combine(of)));
  };
  return {
    options,
    dispatch,
    combine,
    call,
    open: async (): Promise<CommandedWorld> => {
      const world = new CommandedWorld(kind, worldSize);
      await Promise.all(world.ranks.map((of) => of.tell('open', { options })));
      return world;
    },
    /** A call of all ranks, bit by bit as the oracle has it. */
    complete: async ({ ranks }: CommandedWorld, number: number) =>
      check(one, rowsOfCall(inputs, number), await call(ranks, number)),
    /** The second half of one. */
    finish: async ({ ranks }: CommandedWorld, number: number) =>
      check(one, rowsOfCall(inputs, number), await Promise.all(ranks.map((of) => combine(of)))),
    /** Others come in the place of `joining`. */
    replace: async (world: CommandedWorld, ...joining: readonly number[]) => {
      const staying = world.others(...joining);
      const coming = joining.map((rank) => world.replace(rank));
      await Promise.all([
        ...staying.map((of) => of.tell('readmit', { joining })),
        ...coming.map((of) => of.tell('rejoin')),
      ]);
      const back = await Promise.all([
        ...staying.map((of) => of.tell<number[]>('update')),
        ...coming.map((of) => of.tell('join', { options })),
      ]);
      for (const ranks of back.slice(0, staying.length)) expect(ranks).toEqual([...joining].sort());
      for (const of of world.ranks) expect(await of.tell('losses')).toEqual([]);
    },
  };
}

export const closeAll = ({ ranks }: CommandedWorld): Promise<unknown> =>
  Promise.all(ranks.map((of) => of.tell('close')));
