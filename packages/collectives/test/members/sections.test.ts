/** Sections of groups that were not closed by all of their members. In one thread. */
import { describe, expect, it } from 'vitest';
import type { GroupEngine } from '../../src/engine.js';
import { openPortableEngine } from '../../src/portable/engine.js';
import { complete, rejection, SMALL_STAGING, World } from '../portable/world.js';

/** Throws where a rank of the group does not get the sum. */
async function works(engines: readonly GroupEngine[], sequence = 1): Promise<void> {
  const outputs = engines.map(() => new Float64Array(500));
  await Promise.all(
    engines.map((engine, rank) =>
      engine.run(
        complete(
          {
            ...{ kind: 'all-reduce', dtype: 'f64', reduceOp: 'sum' },
            ...{ inputs: [new Float64Array(500).fill(10 ** rank)], outputs: [outputs[rank]!] },
          },
          sequence,
        ),
      ),
    ),
  );
  const sum = engines.reduce((total, _, rank) => total + 10 ** rank, 0);
  for (const output of outputs) expect(output.every((one) => one === sum)).toBe(true);
}

const closeAll = (engines: readonly GroupEngine[]): Promise<unknown> =>
  Promise.all(engines.map((engine) => engine.close()));

/** All that there is room for beside the world's own, again and again. */
async function checkRoom(world: World, ranks: readonly number[], room = 1): Promise<void> {
  for (let round = 0; round < 2; round++) {
    const groups: GroupEngine[][] = [];
    for (let i = 0; i < room; i++) {
      const group = await world.group(`room ${i}`, ranks);
      groups.push(group);
      await works(group);
    }
    for (const group of groups) await closeAll(group);
  }
}

const noRoom = async (world: World, ranks: readonly number[]): Promise<void> => {
  const ends = await Promise.allSettled(
    ranks.map((member, rank) =>
      openPortableEngine({
        ...{ transport: world.transports[member]!, store: world.stores[member]!, ranks, rank },
        ...{ name: 'none', timeoutMs: 20_000 },
      }),
    ),
  );
  for (const end of ends) expect(end).toMatchObject(rejection('EP_CAPACITY'));
};

describe.each(['shm', 'ibgda', 'mixed', 'efa'] as const)('the section of a group over %s', (kind) => {
  const open = (size: number, maxGroups = 2): Promise<World> =>
    World.open({ kind, size, stagingBytes: SMALL_STAGING, maxGroups });

  it.each([0, 1, 2])('is free again when those have closed it that are left (rank %i died)', async (lost) => {
    await using world = await open(3);
    const left = [0, 1, 2].filter((rank) => rank !== lost);
    const group = await world.group('g', [0, 1, 2]);
    await works(group);
    await world.lose(lost);
    const ends = await Promise.allSettled(left.map((rank) => group[rank]!.run(complete({ kind: 'barrier' }, 2))));
    for (const end of ends) expect(end).toMatchObject(rejection('EP_PEER_LOST', { lost: [lost] }));
    await noRoom(world, left);
    await group[left[0]!]!.close();
    await noRoom(world, left);
    await group[left[1]!]!.close();
    await checkRoom(world, left);
  });

  it('is free again where one had closed it before another died', async () => {
    await using world = await open(3);
    const group = await world.group('g', [0, 1, 2]);
    await works(group);
    await group[0]!.close();
    await world.lose(2);
    await group[1]!.close();
    await checkRoom(world, [0, 1]);
  });

  it('is free again where all are gone that had it, also if one had closed it', async () => {
    await using world = await open(4, 3);
    const [one, two] = [await world.group('one', [1, 2]), await world.group('two', [2, 3])];
    await Promise.all([works(one), works(two)]);
    await noRoom(world, [0]);
    await two[0]!.close();
    for (const rank of [1, 2, 3]) await world.lose(rank);
    await checkRoom(world, [0], 2);
  });

  it('stays where one that lives has not closed it', async () => {
    await using world = await open(4);
    const group = await world.group('g', [1, 2, 3]);
    await works(group);
    await world.lose(3);
    await group[0]!.close();
    await noRoom(world, [0, 1]);
    await group[1]!.close();
    await checkRoom(world, [0, 1]);
  });
});

describe.each(['shm', 'ibgda', 'mixed'] as const)('the section of a group over %s', (kind) => {
  it('is free again when others have come in the places of all that had it', async () => {
    await using world = await World.open({ kind, size: 3, stagingBytes: SMALL_STAGING, maxGroups: 2 });
    for (let round = 0; round < 4; round++) {
      const group = await world.group('g', [1, 2]);
      await works(group);
      for (const rank of [1, 2]) {
        await world.lose(rank);
        await expect(world.run(0, { kind: 'barrier' })).rejects.toMatchObject({ code: 'EP_PEER_LOST' });
      }
      for (const rank of [1, 2]) {
        // One after the other: a rank that is let in meets those that live.
        await world.readmitWithout(rank, rank === 1 ? [2] : []);
        await world.openSuccessor(rank);
      }
      await Promise.all([world.join(1), world.join(2), world.takeIn([0], [1, 2])]);
    }
    await checkRoom(world, [0, 1, 2]);
  });

  it('stays with a process that has come into the group, until it has closed it', async () => {
    await using world = await World.open({ kind, size: 2, stagingBytes: SMALL_STAGING, maxGroups: 1 });
    await world.all(() => ({ kind: 'barrier' }));
    await world.lose(1);
    await expect(world.run(0, { kind: 'barrier' })).rejects.toMatchObject({ code: 'EP_PEER_LOST' });
    await world.replace(1);
    await Promise.all([world.join(1), world.takeIn([0], [1])]);
    await world.engines[0]!.close();
    await noRoom(world, [0, 1]);
    await world.engines[1]!.close();
    await checkRoom(world, [0, 1]);
  });
});
