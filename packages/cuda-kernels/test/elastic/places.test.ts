/** Buffers over worlds of which not all ranks are there at first: the others come in while those that are there keep their buffers. */
import { describe, expect, it } from 'vitest';
import { cellsOf, closeAll, script, worldSize } from '../moe/script.js';

/** The transport's part of the ranks' store. */
const names = {
  shm: 'nvshmem:shm',
  ibgda: 'ibgda:soft',
  efa: 'efa-gda:soft',
  'shm+ibgda': 'shm/nvshmem:shm',
  'shm+efa': 'shm/nvshmem:shm',
} as const;

describe.each(cellsOf(['shm', 'ibgda', 'efa', 'shm+ibgda', 'shm+efa']))('%s over %s', (mode, way) => {
  it.each(['processes', 'threads'] as const)(
    'leaves empty places out, and takes ranks into them one after the other: %s',
    { timeout: 120_000 },
    async (kind) => {
      const { open, some, complete, replace } = script(mode, kind, way);
      await using world = await open(2);
      let number = 0;
      for (const of of world.ranks) {
        expect(await of.tell('losses')).toEqual([2, 3].map((rank) => [rank, 'EP_NOT_READY']));
      }
      for (let calls = 0; calls < 3; calls++) await some(world, number++);
      await replace(world, 2);
      for (let calls = 0; calls < 3; calls++) await some(world, number++);
      await replace(world, 3);
      for (let calls = 0; calls < 3; calls++) await complete(world, number++);
      // The second to come into the place, and one in the place of those who opened the buffer.
      for (const victim of [3, 0]) {
        await world.ranks[victim]!.kill();
        await replace(world, victim);
        for (let calls = 0; calls < 3; calls++) await complete(world, number++);
      }
      await closeAll(world);
    },
  );

  it('takes several at once', { timeout: 60_000 }, async () => {
    const { open, some, complete, replace } = script(mode, 'processes', way);
    await using world = await open(1);
    await some(world, 0);
    await replace(world, 1, 2, 3);
    for (let number = 1; number < 4; number++) await complete(world, number);
    await closeAll(world);
  });

  it('goes on where one is killed on its way, and takes the next one', { timeout: 60_000 }, async () => {
    const { open, some, replace, complete } = script(mode, 'processes', way);
    await using world = await open(3);
    await some(world, 0);
    const staying = [...world.ranks];
    // Killed when it has applied, then when it is in the world and not in the buffer.
    const first = world.replace(3);
    void first.tell('rejoin', { way }).catch(() => {});
    await world.has(`${names[way]}/members/latest/3`);
    await first.kill();
    for (const end of await Promise.allSettled(
      staying.map((of) => of.tell('readmit', { joining: [3], timeoutMs: 1500 })),
    )) {
      expect(end).toMatchObject({
        reason: { code: 'EP_TIMEOUT', message: expect.stringMatching(/rank 3 did not come/) },
      });
    }
    const second = world.replace(3);
    await Promise.all([second.tell('rejoin', { way }), ...staying.map((of) => of.tell('readmit', { joining: [3] }))]);
    await second.kill();
    for (const end of await Promise.allSettled(staying.map((of) => of.tell('update')))) {
      expect(end).toMatchObject({ reason: { code: 'EP_PEER_LOST', ranks: [3] } });
    }
    world.ranks.pop();
    // Over EFA ranks that were let in have cut off all others: memory is reached again when it has been renewed.
    if (!way.endsWith('efa')) await some(world, 1);
    await replace(world, 3);
    for (let number = 2; number < worldSize + 2; number++) await complete(world, number);
    await closeAll(world);
  });
});
