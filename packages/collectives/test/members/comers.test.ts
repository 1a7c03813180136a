/** Ranks that come to a group, and come back, in the places that they have in the transport's memory. In one thread. */
import { doneWork, type Transport, type Work } from '@ep/core';
import { describe, expect, it } from 'vitest';
import { type Call, pause, reduceOf, rejection, SMALL_STAGING, World, withMembers } from '../portable/world.js';
import { worksOver } from './works-over.js';

const barrier = (): Call => ({ kind: 'barrier' });

const takeOut = (world: World, members: readonly number[], out: readonly number[]): Promise<unknown> =>
  Promise.all(members.map((rank) => world.repair(rank, out)));

describe('a rank that was taken out', () => {
  it.each([0, 1, 2])('comes back (rank %i), as often as it likes, and finds nothing of before', async (rank) => {
    // What it had put before lands late.
    const hostile = { seed: rank + 1, maxDelayUs: 3000 };
    await using world = await World.open({ size: 3, stagingBytes: SMALL_STAGING, hostile });
    const others = [0, 1, 2].filter((one) => one !== rank);
    for (let round = 0; round < 4; round++) {
      await worksOver(world, [0, 1, 2]);
      const caught = world.settled(() => reduceOf(rank), [rank]);
      const sends = others.map((peer) =>
        world.engines[rank]!.send({ peer, tag: 9, data: new Uint8Array(9000), timeoutMs: 20_000 }).catch(() => {}),
      );
      await pause(round);
      await takeOut(world, others, [rank]);
      expect(await caught).toMatchObject([rejection('EP_EVICTED')]);
      await Promise.all(sends);
      if (round % 2 === 0) await worksOver(world, others);
      await Promise.all([world.join(rank), world.takeIn(others, [rank])]);
    }
    await worksOver(world, [0, 1, 2]);
    expect(world.engines[others[0]!]!.view().epoch).toBe(8);
  });

  it('comes back with another one', async () => {
    await using world = await World.open({ size: 4, stagingBytes: SMALL_STAGING });
    await world.all(() => barrier());
    await takeOut(world, [1, 3], [0, 2]);
    for (const rank of [0, 2]) await expect(world.run(rank, barrier())).rejects.toMatchObject({ code: 'EP_EVICTED' });
    await Promise.all([world.join(0), world.join(2), world.takeIn([1, 3], [0, 2])]);
    await worksOver(world, [0, 1, 2, 3]);
  });

  it('may be taken out again, and again takes nobody out', async () => {
    await using world = await World.open({ size: 2 });
    for (let round = 0; round < 3; round++) {
      await world.all(() => barrier());
      // The first wins, and who came back last is not the one that was out before.
      const ends = await Promise.allSettled([world.repair(0, [1]), world.repair(1, [0])]);
      const stays = ends.findIndex(({ status }) => status === 'fulfilled');
      expect(ends[1 - stays]).toMatchObject(rejection('EP_EVICTED'));
      await Promise.all([world.join(1 - stays), world.takeIn([stays], [1 - stays])]);
      await worksOver(world, [0, 1]);
    }
  });

  it('is waited for when it dies before it is there, as any member', async () => {
    await using world = await World.open({ size: 3 });
    await world.all(() => barrier());
    await takeOut(world, [0, 1], [2]);
    const joined = world.join(2).catch(() => {});
    await world.takeIn([0, 1], [2]);
    await world.lose(2);
    await joined;
    const ends = await world.settled(() => barrier(), [0, 1]);
    for (const end of ends) expect(end).toMatchObject(rejection('EP_PEER_LOST', { lost: [2] }));
    await worksOver(world, [0, 1]);
  });

  it('that gives up is no member, or lost if it was one already', async () => {
    await using world = await World.open({ size: 2 });
    await world.all(() => barrier());
    await takeOut(world, [0], [1]);
    await expect(world.join(1, { timeoutMs: 20 })).rejects.toMatchObject({
      code: 'EP_TIMEOUT',
      context: { awaited: [0] },
    });
    await world.engines[0]!.elastic!.refresh();
    expect((await world.change(0)).states).toEqual(['active', 'connected']);
    const abort = new AbortController();
    const joined = world.join(1, { signal: abort.signal });
    for (;;) {
      await world.engines[0]!.elastic!.refresh();
      if ((await world.change(0)).states[1] === 'joining') break;
    }
    abort.abort('enough');
    await expect(joined).rejects.toBe('enough');
    // Rank 0 has found it, and does not know.
    expect((await world.change(0, { admitted: [1] })).admitted).toBe(true);
    await expect(world.run(0, barrier())).rejects.toMatchObject({ code: 'EP_PEER_LOST', context: { lost: [1] } });
    await worksOver(world, [0]);
    await Promise.all([world.join(1), world.takeIn([0], [1])]);
    await worksOver(world, [0, 1]);
  });
});

it('a rank that comes is heard by a member that does not know yet', async () => {
  // Rank 0 says that it makes the call, and not that it has completed it.
  let left = Number.POSITIVE_INFINITY;
  const held: (() => Work)[] = [];
  const wrap = (transport: Transport<'bundled' | 'add'>, rank: number): Transport<'bundled' | 'add'> => {
    if (rank !== 0) return transport;
    const connect: typeof transport.connect = async (peer, options) => {
      const endpoint = await transport.connect(peer, options);
      if (peer !== 1) return endpoint;
      const put: typeof endpoint.put = (...args) => {
        if (left-- > 0) return endpoint.put(...args);
        held.push(() => endpoint.put(...args));
        return doneWork('put', 0);
      };
      return withMembers(endpoint, { put });
    };
    return withMembers(transport, { connect });
  };
  await using world = await World.open({ size: 3, active: [0, 1], wrap });
  const joined = world.join(2);
  for (let state = ''; state !== 'joining'; ) {
    await Promise.all([0, 1].map((rank) => world.engines[rank]!.elastic!.refresh()));
    state = (await Promise.all([world.change(0), world.change(1)]))[0].states[2]!;
  }
  await pause(20); // until nothing is under way
  left = 1;
  const [first, second] = [world.change(0, { admitted: [2] }), world.change(1, { admitted: [2] })];
  await Promise.all([first, joined]);
  const ends = world.all(() => barrier(), [0, 2]);
  await pause(50);
  expect(world.engines[1]!.view().active).toEqual([0, 1]);
  left = Number.POSITIVE_INFINITY;
  for (const post of held) post();
  await second;
  for (const end of (await Promise.all([ends, world.all(() => barrier(), [1])])).flat()) {
    expect(end.contributors).toEqual([0, 1, 2]);
  }
});

describe('an empty place', () => {
  it('is filled when its rank asks, and all say the same of it before', async () => {
    await using world = await World.open({ size: 4, stagingBytes: SMALL_STAGING, active: [0, 3] });
    await worksOver(world, [0, 3]);
    // Alone.
    expect((await world.run(1, reduceOf(1))).contributors).toEqual([1]);
    await Promise.all([0, 3].map((rank) => world.engines[rank]!.elastic!.refresh()));
    const [one, other] = await Promise.all([0, 3].map((rank) => world.change(rank, { admitted: [1] })));
    for (const end of [one!, other!]) {
      expect(end).toMatchObject({ admitted: false, states: ['active', 'connected', 'connected', 'active'] });
    }
    await worksOver(world, [0, 3]);
    await Promise.all([world.join(1), world.takeIn([0, 3], [1])]);
    await worksOver(world, [0, 1, 3]);
    // One that nobody has taken in goes.
    await world.lose(2);
    for (let states: readonly string[] = []; states[2] !== 'absent'; ) {
      await world.engines[3]!.elastic!.refresh();
      const ends = await Promise.all([0, 1, 3].map((rank) => world.change(rank)));
      for (const end of ends) expect(end.states).toEqual(ends[0]!.states);
      states = ends[0]!.states;
    }
    await worksOver(world, [0, 1, 3]);
  });
});

describe('a look for ranks that come', () => {
  it('ends in time where the store does not answer, and finds whoever came before', async () => {
    await using world = await World.open({ size: 2 });
    await world.all(() => barrier());
    await takeOut(world, [0], [1]);
    const joined = world.join(1);
    const { elastic } = world.engines[0]!;
    while ((await world.change(0)).states[1] !== 'joining') {
      await pause(1);
      await elastic!.refresh();
    }
    const store = world.stores[0]!;
    const { check } = store;
    let unanswered = 0;
    store.check = () => {
      unanswered++;
      return new Promise(() => {});
    };
    await elastic!.refresh({ timeoutMs: 20 });
    const abort = new AbortController();
    const looked = elastic!.refresh({ signal: abort.signal });
    abort.abort(new Error('enough'));
    await looked;
    expect(unanswered).toBe(2);
    store.check = check;
    expect((await world.change(0, { admitted: [1] })).admitted).toBe(true);
    await joined;
    await worksOver(world, [0, 1]);
  });
});
