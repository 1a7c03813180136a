/** Ranks that are killed over EFA, where a death ends the call and all ranks make their endpoints anew: the buffer begins again, in the memory that there is. */
import { describe, expect, it } from 'vitest';
import { cellsOf, closeAll, script } from '../moe/script.js';

const short = { options: { timeoutMs: 1500 } };

describe.each(cellsOf(['efa', 'efa (hardware)', 'shm+efa']))('%s over %s', (mode, way) => {
  it('begins again with another rank in the place of one that was killed, three times', {
    timeout: 120_000,
  }, async () => {
    const { open, dispatch, combine, complete, replace } = script(mode, 'processes', way);
    await using world = await open();
    let number = 0;
    await complete(world, number);
    for (const victim of [2, 0, 2]) {
      // Each at a place of its own: some have ended the call that others fail in, some hold one, some have begun another.
      await Promise.all(world.ranks.map((of) => dispatch(of, number)));
      await world.ranks[victim]!.kill();
      const [first, second, third] = world.others(victim);
      const ends = await Promise.allSettled([
        combine(first!, short),
        dispatch(second!, number + 1, short),
        combine(third!, short).then(() => dispatch(third!, number + 1, short)),
      ]);
      expect(ends.filter(({ status }) => status === 'rejected').length).toBeGreaterThan(0);
      for (const end of ends) {
        if (end.status === 'rejected') expect(end.reason.code).toMatch(/^EP_(PEER_LOST|TIMEOUT|TRANSPORT_FAILED)$/);
      }
      await replace(world, victim);
      for (let after = 0; after < 5; after++) await complete(world, ++number);
    }
    await closeAll(world);
  });

  it.each(['dispatch', 'combine'] as const)(
    'goes on without one that died before %s, and takes another one in later',
    {
      timeout: 120_000,
    },
    async (before) => {
      const { open, call, dispatch, combine, complete, some, replace } = script(mode, 'processes', way);
      await using world = await open();
      await complete(world, 0);
      const staying = world.others(1);
      if (before === 'combine') await Promise.all(world.ranks.map((of) => dispatch(of, 1)));
      await world.ranks[1]!.kill();
      const ends = before === 'combine' ? staying.map((of) => combine(of)) : staying.map((of) => call([of], 1));
      for (const end of await Promise.allSettled(ends)) {
        expect(end).toMatchObject({ reason: { code: 'EP_PEER_LOST', ranks: [1] } });
      }
      await Promise.all(staying.map((of) => of.tell('readmit', { joining: [], without: [1] })));
      expect(await Promise.all(staying.map((of) => of.tell('update')))).toEqual(staying.map(() => []));
      // Who it was that the call has lost, as over ways where one goes on by itself.
      for (const of of staying) expect(await of.tell('losses')).toEqual([[1, 'EP_PEER_LOST']]);
      for (let number = 1; number < 5; number++) await some({ ranks: staying }, number);
      await replace(world, 1);
      for (let number = 5; number < 8; number++) await complete(world, number);
      await closeAll(world);
    },
  );
});

it('takes two in at once, and goes on after one that died while it joined', { timeout: 60_000 }, async () => {
  const { open, complete, replace } = script('high-throughput', 'processes', 'efa');
  await using world = await open();
  await complete(world, 0);
  await Promise.all([1, 2].map((rank) => world.ranks[rank]!.kill()));
  await replace(world, 1, 2);
  for (let call = 1; call < 4; call++) await complete(world, call);
  await world.ranks[3]!.kill();
  // Dies when it is in the world, and not yet in the buffer.
  const next = world.replace(3);
  const staying = world.others(3);
  await Promise.all([
    next.tell('rejoin', { way: 'efa' }),
    ...staying.map((of) => of.tell('readmit', { joining: [3] })),
  ]);
  await next.kill();
  for (const ended of await Promise.allSettled(staying.map((of) => of.tell('update', { timeoutMs: 3000 })))) {
    expect(ended).toMatchObject({ reason: { code: 'EP_PEER_LOST', ranks: [3] } });
  }
  await replace(world, 3);
  for (let call = 4; call < 7; call++) await complete(world, call);
  await closeAll(world);
});
