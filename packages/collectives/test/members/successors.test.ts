/** Processes that come in the place of others, over a transport that lets them in. In one thread. */
import { prefixStore } from '@ep/core';
import { describe, expect, it } from 'vitest';
import { type Call, pause, rejection, SMALL_STAGING, World } from '../portable/world.js';
import { worksOver } from './works-over.js';

const barrier = (timeoutMs = 20_000): Call => ({ kind: 'barrier', timeoutMs });

describe.each(['shm', 'ibgda', 'mixed', 'efa', 'mixed-efa'] as const)(
  'another process in the place of one that is gone, over %s',
  (kind) => {
    const open = (size: number): Promise<World> => World.open({ kind, size, stagingBytes: SMALL_STAGING });

    it.each([0, 1, 2])('takes part in all that the others do (rank %i), again and again', async (rank) => {
      await using world = await open(3);
      const others = [0, 1, 2].filter((one) => one !== rank);
      for (let round = 0; round < 3; round++) {
        await worksOver(world, [0, 1, 2]);
        await world.lose(rank);
        const ends = await world.settled(() => barrier(), others);
        for (const end of ends) expect(end).toMatchObject(rejection('EP_PEER_LOST', { lost: [rank] }));
        if (round % 2 === 0) await worksOver(world, others);
        await world.replace(rank);
        expect(world.engines[rank]!.view().active).toEqual([rank]);
        await Promise.all([world.join(rank), world.takeIn(others, [rank])]);
      }
      await worksOver(world, [0, 1, 2]);
    });

    it('is not taken for the one before by groups that had not found out', async () => {
      await using world = await open(3);
      const others = await world.group('others', [1, 2]);
      await world.all(() => barrier());
      await world.lose(2);
      await world.replace(2);
      const lost = rejection('EP_PEER_LOST', { lost: [2] });
      for (const end of await world.settled(() => barrier(), [0, 1])) expect(end).toMatchObject(lost);
      const call = { kind: 'barrier', dtype: 'u8', root: -1, inputs: [], outputs: [], sequence: 1 } as const;
      await expect(Promise.resolve(others[0]!.run({ ...call, timeoutMs: 20_000 }))).rejects.toMatchObject({
        code: 'EP_PEER_LOST',
      });
      await Promise.all([world.join(2), world.takeIn([0, 1], [2])]);
      await worksOver(world, [0, 1, 2]);
      // Their memory is that of all groups.
      const made = await world.group('made later', [2, 0]);
      await Promise.all(made.map((engine) => engine.run({ ...call, timeoutMs: 20_000 })));
    });

    it('asks for itself: what the one before had asked is nothing to it', async () => {
      await using world = await open(2);
      await world.all(() => barrier());
      await Promise.all([world.repair(0, [1]), world.repair(1, [1]).catch(() => {})]);
      const asked = world.join(1).catch(() => {});
      const stateOf1 = async (): Promise<string> => {
        await world.engines[0]!.elastic!.refresh();
        return (await world.change(0)).states[1]!;
      };
      while ((await stateOf1()) !== 'joining') await pause(1);
      await world.lose(1);
      while ((await stateOf1()) !== 'absent') await pause(1);
      await world.replace(1);
      expect(await stateOf1()).toBe('connected');
      await Promise.all([world.join(1), world.takeIn([0], [1])]);
      await worksOver(world, [0, 1]);
      void asked;
    });

    it('finds the memory of the others in their store, and takes it as they have it', async () => {
      await using world = await open(2);
      await world.all(() => barrier());
      await world.lose(1);
      await world.readmit(1);
      const elsewhere = prefixStore(world.stores[1]!, 'elsewhere');
      await expect(world.openSuccessor(1, { store: elsewhere, timeoutMs: 100 })).rejects.toMatchObject({
        code: 'EP_UNSUPPORTED',
      });
      for (const wrong of [{ stagingBytes: 2 * SMALL_STAGING }, { maxGroups: 3 }]) {
        await expect(world.openSuccessor(1, wrong)).rejects.toMatchObject({
          code: 'EP_INVALID_ARGUMENT',
          message: expect.stringContaining('as the others have it'),
        });
      }
      await world.openSuccessor(1);
      await expect(world.run(0, barrier())).rejects.toMatchObject({ code: 'EP_PEER_LOST' });
      await Promise.all([world.join(1), world.takeIn([0], [1])]);
      await worksOver(world, [0, 1]);
    });

    it('holds the place of a group until it has closed it, as the one before had', async () => {
      const options = { kind, size: 2, stagingBytes: SMALL_STAGING, maxGroups: 1 } as const;
      await using world = await World.open(options);
      await world.all(() => barrier());
      await Promise.all([world.repair(0, [1]), world.repair(1, [1]).catch(() => {})]);
      await world.engines[1]!.close();
      await world.lose(1);
      await world.replace(1);
      await Promise.all([world.join(1), world.takeIn([0], [1])]);
      await worksOver(world, [0, 1]);
      await world.engines[1]!.close();
      await expect(world.group('next', [0, 1])).rejects.toMatchObject({ code: 'EP_CAPACITY' });
      await world.engines[0]!.close();
      const next = await world.group('next', [0, 1]);
      expect(next).toHaveLength(2);
    });
  },
);
