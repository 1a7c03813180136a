/** Ranks that are killed at any moment, and others that come in their place. */
import { setTimeout as sleep } from 'node:timers/promises';
import { describe, expect, it } from 'vitest';
import type { CommandedRank } from '../moe/commanded.js';
import { cellsOf, closeAll, script } from '../moe/script.js';

/** The transport's part of the ranks' store. */
const names = { shm: 'nvshmem:shm', ibgda: 'ibgda:soft', 'shm+ibgda': 'shm/nvshmem:shm' } as const;

describe.each(cellsOf(['shm', 'ibgda', 'shm+ibgda']))('%s over %s', (mode, way) => {
  it.each(['processes', 'threads'] as const)(
    'takes another rank in after one was killed in the middle of a call, four times, and keeps nothing: %s',
    { timeout: 120_000 },
    async (kind) => {
      const { open, dispatch, combine, complete, replace } = script(mode, kind, way);
      await using world = await open();
      let number = 0;
      const footprints: { readonly mapped: number; readonly segments: number; readonly descriptors: number }[] = [];
      await complete(world, number++);
      for (const victim of [2, 0, 3, 2]) {
        await Promise.all(world.ranks.map((of) => dispatch(of, number)));
        await world.ranks[victim]!.kill();
        const others = world.others(victim);
        for (const { combinedLost } of await Promise.all(others.map((of) => combine(of)))) {
          expect([...combinedLost]).toEqual(world.ranks.map(({ rank }) => (rank === victim ? 1 : 0)));
        }
        await replace(world, victim);
        for (let after = 0; after < 3; after++) await complete(world, ++number);
        footprints.push(await world.ranks[1]!.tell('footprint'));
      }
      // Of its own part, the words of each transport, its NIC's port if it has one, and the teams' segments if it was the lowest of those that stayed.
      const own = { shm: 2, ibgda: 3, 'shm+ibgda': 4 }[way];
      const leads = [0, way === 'shm+ibgda' ? 2 : 1, 0, 0];
      if (kind === 'processes') {
        const [{ mapped, segments }] = footprints as [(typeof footprints)[0]];
        expect(footprints).toEqual(leads.map((teams) => ({ mapped, segments, descriptors: own + teams })));
      }
      await closeAll(world);
    },
  );

  it('takes two in at once, and has them in later calls of every slot', { timeout: 60_000 }, async () => {
    const { open, dispatch, finish, complete, replace } = script(mode, 'processes', way);
    await using world = await open();
    await complete(world, 0);
    // They are ahead of the others, with other rows: what they have said of this call must not pass for what their successors say.
    const ahead = [1, 2].map((rank) => dispatch(world.ranks[rank]!, 3, { options: { timeoutMs: 300 } }));
    await Promise.all(ahead);
    await Promise.all([1, 2].map((rank) => world.ranks[rank]!.kill()));
    await replace(world, 1, 2);
    // Those that stayed are first now.
    const first = world.others(1, 2).map((of) => dispatch(of, 1));
    await sleep(200);
    await Promise.all([...first, ...[1, 2].map((rank) => dispatch(world.ranks[rank]!, 1))]);
    await finish(world, 1);
    for (let call = 2; call < 6; call++) await complete(world, call);
    await closeAll(world);
  });

  it('goes on without a newcomer that dies while it joins, and takes the next one', { timeout: 60_000 }, async () => {
    const { open, call, complete, replace } = script(mode, 'processes', way);
    await using world = await open();
    await complete(world, 0);
    await world.ranks[2]!.kill();
    // Dies when it has applied: nobody takes it for one that lives.
    const first = world.replace(2);
    const never = first.tell('rejoin', { way }).catch(() => {});
    await world.has(`${names[way]}/members/latest/2`);
    await first.kill();
    const staying = world.others(2);
    const asked = staying.map((of) => of.tell('readmit', { joining: [2], timeoutMs: 1500 }));
    for (const ended of await Promise.allSettled(asked)) {
      expect(ended).toMatchObject({
        reason: { code: 'EP_TIMEOUT', message: expect.stringMatching(/rank 2 did not come.*died/) },
      });
    }
    // Dies when it is in the world, and not yet in the buffer.
    const second = world.replace(2);
    await Promise.all([second.tell('rejoin', { way }), ...staying.map((of) => of.tell('readmit', { joining: [2] }))]);
    await second.kill();
    for (const ended of await Promise.allSettled(staying.map((of) => of.tell('update')))) {
      expect(ended).toMatchObject({ reason: { code: 'EP_PEER_LOST', ranks: [2] } });
    }
    await call(staying, 1);
    expect(await staying[0]!.tell('losses')).toEqual([[2, 'EP_PEER_LOST']]);
    await replace(world, 2);
    await complete(world, 2);
    await closeAll(world);
    void never;
  });

  it('says who did not come, who lives, who is at another call and who was opened otherwise', {
    timeout: 60_000,
  }, async () => {
    const { open, options, call, complete, dispatch, combine } = script(mode, 'processes', way);
    await using world = await open();
    const [, one, two] = world.ranks as [CommandedRank, CommandedRank, CommandedRank, CommandedRank];
    const all = (of: readonly CommandedRank[], name: string, args: object) =>
      Promise.allSettled(of.map((rank) => rank.tell(name, args)));
    const failed = (code: string, message: RegExp) => ({ reason: { code, message: expect.stringMatching(message) } });
    for (const end of await all(world.others(2), 'readmit', { joining: [2], timeoutMs: 5000 }))
      expect(end).toMatchObject(failed('EP_INVALID_ARGUMENT', /rank 2 live/));
    await two.kill();
    for (const end of await all(world.others(2), 'readmit', { joining: [2], timeoutMs: 800 }))
      expect(end).toMatchObject(failed('EP_TIMEOUT', /rank 2 did not come: nobody came/));
    const other = world.replace(2);
    const [[wrong], refused] = await Promise.all([
      all([other], 'rejoin', { way, config: { ranksOnHost: 64 } }),
      all(world.others(2), 'readmit', { joining: [2] }),
    ]);
    expect(wrong).toMatchObject(failed('EP_RENDEZVOUS', /rank 2 differ.*ranksOnHost/));
    for (const end of refused) expect(end).toMatchObject(failed('EP_RENDEZVOUS', /rank 2 differ.*ranksOnHost/));
    await other.kill();
    // Rank 1 holds a call when the others update; then it is a call ahead; then all is well.
    await call(world.others(2), 0);
    const next = world.replace(2);
    await Promise.all([
      next.tell('rejoin', { way }),
      ...world.others(2).map((of) => of.tell('readmit', { joining: [2] })),
    ]);
    await dispatch(one, 1, { options: { timeoutMs: 300 } });
    const joining = (with_: object) => next.tell('join', { options: { ...options, ...with_ } });
    for (const end of await Promise.allSettled([joining({}), ...world.others(2).map((of) => of.tell('update'))]))
      expect(end).toMatchObject(failed('EP_BUSY', /rank 1: it holds 1 call/));
    await combine(one, { options: { timeoutMs: 300 } });
    for (const end of await Promise.allSettled([joining({}), ...world.others(2).map((of) => of.tell('update'))]))
      expect(end).toMatchObject(failed('EP_MISMATCH', /different calls.*rank 1 has begun 2/));
    await Promise.all(world.others(1, 2).map((of) => dispatch(of, 1, { options: { timeoutMs: 300 } })));
    await Promise.all(world.others(1, 2).map((of) => combine(of, { options: { timeoutMs: 300 } })));
    for (const end of await Promise.allSettled([
      joining({ calls: 1 }),
      ...world.others(2).map((of) => of.tell('update')),
    ]))
      expect(end).toMatchObject(failed('EP_MISMATCH', /rank 2 opened the buffer with other options/));
    // Ranks 0, 1 and 3 have given each other up alive meanwhile: who is here takes part again.
    const back = await Promise.all([...world.others(2).map((of) => of.tell<number[]>('update')), joining({})]);
    for (const ranks of back.slice(0, 3)) expect(ranks).toContain(1);
    for (let number = 2; number < 5; number++) await complete(world, number);
    await closeAll(world);
  });
});
