/**
 * Ranks that are killed (SIGKILL) before a call, and between its dispatch and its combine, over every way to reach them: bit by bit as the oracle has it for those that are left.
 * Where ranks are stored to, or reached by mlx5, the calls go on without the dead; over EFA they end, and a world of those that are left goes on.
 * Each way and mode once by default, with EP_TEST_FULL=1 the product with hooks, blocks, alignments and the order of the deaths.
 */
import { describe, expect, it } from 'vitest';
import { check, type MoeCase, maskOf, planWithout, rowsOfCall } from './case.js';
import type { CommandedRank } from './commanded.js';
import type { Way } from './programs/openers.mjs';
import { caseOf, closeAll, scriptOf, type Told, worldSize } from './script.js';

const full = process.env.EP_TEST_FULL === '1';

type Moment = 'before dispatch' | 'before combine';

interface Cell {
  readonly way: Way;
  readonly mode: MoeCase['mode'];
  readonly moments: readonly [Moment, Moment];
  readonly hook: boolean;
  readonly blocks: number;
  readonly alignment: number;
}

const ways = ['shm', 'ibgda', 'shm+ibgda', 'efa', 'shm+efa'] as const;
const modes = ['low-latency', 'high-throughput'] as const;
const before: readonly [Moment, Moment] = ['before dispatch', 'before combine'];
const after: readonly [Moment, Moment] = ['before combine', 'before dispatch'];
/** In the order of their deaths. Of nodes of two ranks, each is near to one that is left and far from another. */
const victims = [2, 1] as const;

function* cells(): Generator<Cell> {
  for (const way of ways) {
    for (const mode of modes) {
      const one = { way, mode, moments: before, hook: false, blocks: 1, alignment: 4 };
      if (!full) {
        yield { ...one, hook: mode === 'low-latency', blocks: way === 'shm' ? 1 : 3 };
        continue;
      }
      for (const moments of [before, after])
        for (const hook of [false, true])
          for (const blocks of [1, 3])
            for (const alignment of mode === 'low-latency' ? [1] : [1, 4])
              yield { ...one, moments, hook, blocks, alignment };
    }
  }
}

const nameOf = ({ way, mode, moments, hook, blocks, alignment }: Cell): string =>
  [way, mode, moments.join(', '), hook ? 'hook' : 'whole', `${blocks} blocks`, `alignment ${alignment}`].join(' | ');

const caseFor = ({ mode, hook, blocks, alignment }: Cell, ranks: number): MoeCase => {
  const one = caseOf(mode);
  return {
    ...one,
    worldSize: ranks,
    // Every rank sends rows to every other, so all miss whoever is dead.
    tokens: [9, 12, 10, 11].slice(0, ranks),
    hook,
    ...(mode === 'high-throughput' ? { alignment } : {}),
    // Longer than a test may take: nobody waits for the dead, and no block for what never comes because of them.
    options: { ...one.options, blocks, timeoutMs: 300_000 },
  };
};

/** Over what goes on without them. */
async function goesOn(cell: Cell): Promise<void> {
  const one = caseFor(cell, worldSize);
  const { open, complete, call, dispatch, combine, inputs } = scriptOf(one, 'processes', cell.way);
  await using world = await open();
  await complete(world, 0);
  const dead: number[] = [];
  let number = 1;
  for (const [i, moment] of cell.moments.entries()) {
    const victim = victims[i]!;
    const leftOut = [...dead];
    const rows = rowsOfCall(inputs, number);
    const kill = () => world.ranks[victim]!.kill();
    if (moment === 'before dispatch') await kill();
    else await Promise.all(world.others(...dead).map((of) => dispatch(of, number)));
    dead.push(victim);
    const left = world.others(...dead);
    if (moment === 'before dispatch') {
      check(one, rows, byRank(left, await call(left, number)), planWithout(inputs, { leftOut, absent: [victim] }));
    } else {
      await kill();
      const results = await Promise.all(left.map((of) => combine(of)));
      check(one, rows, byRank(left, results), planWithout(inputs, { leftOut }), [victim]);
    }
    for (const of of left) {
      const losses = await of.tell<[number, string][]>('losses');
      expect(losses.sort()).toEqual([...dead].sort().map((rank) => [rank, 'EP_PEER_LOST']));
    }
    const settled = planWithout(inputs, { leftOut: dead });
    for (const next of [number + 1, number + 2])
      check(one, rowsOfCall(inputs, next), byRank(left, await call(left, next)), settled);
    number += 3;
  }
  await closeAll({ ranks: world.others(...dead) });
}

function byRank<T>(ranks: readonly Told[], results: readonly T[]): (T | undefined)[] {
  const all: (T | undefined)[] = Array.from({ length: worldSize });
  for (const [i, { rank }] of ranks.entries()) all[rank] = results[i];
  return all;
}

/** Over EFA: each death ends the calls of all, who name the dead, and the next world has fewer ranks. */
async function ends(cell: Cell): Promise<void> {
  const whole = scriptOf(caseFor(cell, worldSize), 'processes', cell.way);
  await using world = await whole.open();
  let left: readonly CommandedRank[] = world.ranks;
  let told: readonly Told[] = left;
  let { complete, dispatch, combine, call } = whole;
  await complete({ ranks: told }, 0);
  for (const [i, moment] of cell.moments.entries()) {
    const victim = victims[i]!;
    const killed = told[left.findIndex(({ rank }) => rank === victim)]!.rank;
    if (moment === 'before combine') {
      for (const lost of await Promise.all(told.map((of) => dispatch(of, 1))))
        expect([...lost]).toEqual([...maskOf(told.length, [])]);
    }
    await world.ranks[victim]!.kill();
    const staying = told.filter(({ rank }) => rank !== killed);
    const ended = await Promise.allSettled(
      staying.map((of) => (moment === 'before combine' ? combine(of) : dispatch(of, 1))),
    );
    for (const end of ended) expect(end).toMatchObject({ reason: { code: 'EP_PEER_LOST', ranks: [killed] } });
    for (const end of await Promise.allSettled(staying.map((of) => call([of], 2))))
      expect(end).toMatchObject({ reason: { code: 'EP_POISONED' } });
    left = left.filter(({ rank }) => rank !== victim);
    const fewer = scriptOf(caseFor(cell, left.length), 'processes', cell.way);
    told = left.map((of, rank) => ({ rank, tell: (name, args) => of.tell(name, args) }));
    const again = { way: cell.way, worldSize: left.length, name: `without-${victim}`, options: fewer.options };
    await Promise.all(told.map((of) => of.tell('openAgain', { ...again, rank: of.rank })));
    ({ complete, dispatch, combine, call } = fewer);
    for (const number of [0, 1, 2]) await complete({ ranks: told }, number);
  }
  await closeAll({ ranks: left });
}

describe(`${full ? 'the product' : 'each way and mode'} of killed ranks`, () => {
  for (const cell of cells())
    it(nameOf(cell), { timeout: 60_000 }, () => (cell.way.endsWith('efa') ? ends(cell) : goesOn(cell)));
});
