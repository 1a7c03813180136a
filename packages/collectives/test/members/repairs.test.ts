/** Groups that go on: after failures, without ranks that are alive, with calls that take ranks out. In one thread. */
import { doneWork, type Transport, type Work } from '@ep/core';
import { describe, expect, it } from 'vitest';
import type { MembershipEnd } from '../../src/engine.js';
import {
  type Call,
  MANY_CHUNKS,
  pause,
  reduceOf,
  rejection,
  SMALL_STAGING,
  World,
  withMembers,
} from '../portable/world.js';

const barrier = (timeoutMs = 20_000): Call => ({ kind: 'barrier', timeoutMs });

/** Of a hundred times as many: it lasts. */
const LARGE = 200_000;

/** In the middle of a large call of all, one rank gives up. */
async function giveUp(world: World, rank: number, afterMs: number): Promise<void> {
  const abort = new AbortController();
  const ends = world.settled((one) => ({
    ...reduceOf(one, new Float32Array(LARGE)),
    ...(one === rank && { signal: abort.signal }),
  }));
  await pause(afterMs);
  abort.abort('enough');
  for (const end of await ends) expect(end.status).toBe('rejected');
}

async function until(what: () => boolean): Promise<void> {
  for (let ms = 0; !what() && ms < 10_000; ms++) await pause(1);
}

/** Several calls, small and of many chunks, over exactly these ranks. */
async function worksOver(world: World, ranks: readonly number[]): Promise<void> {
  const sum = ranks.reduce((total, rank) => total + 2 ** rank, 0);
  for (let round = 0; round < 3; round++) {
    const outputs = new Map(ranks.map((rank) => [rank, new Float32Array(MANY_CHUNKS)]));
    const ends = await world.all((rank) => reduceOf(rank, outputs.get(rank)), ranks);
    for (const end of ends) expect(end.contributors).toEqual(ranks);
    for (const output of outputs.values()) expect(output).toEqual(new Float32Array(MANY_CHUNKS).fill(sum));
    await world.all(() => barrier(), ranks);
  }
  for (const rank of ranks) expect(world.engines[rank]!.view().active).toEqual(ranks);
}

const repairAll = (world: World, ranks: readonly number[], evicted: readonly number[] = []): Promise<MembershipEnd[]> =>
  Promise.all(ranks.map((rank) => world.repair(rank, evicted)));

/** What rank `from` puts and signals goes through `allows`, or nowhere. */
function filtered(
  from: number,
  allows: (peer: number, isPut: boolean) => boolean,
): (transport: Transport<'bundled' | 'add'>, rank: number) => Transport<'bundled' | 'add'> {
  return (transport, rank) => {
    if (rank !== from) return transport;
    const connect: typeof transport.connect = async (peer, options) => {
      const endpoint = await transport.connect(peer, options);
      const through = <A extends readonly unknown[]>(post: (...args: A) => Work, isPut: boolean) => {
        return (...args: A): Work => (allows(peer, isPut) ? post(...args) : doneWork('put', 0));
      };
      return withMembers(endpoint, { put: through(endpoint.put, true), signal: through(endpoint.signal, false) });
    };
    return withMembers(transport, { connect });
  };
}

describe('a repair', () => {
  it('makes a poisoned group work again, however many calls each rank has made', async () => {
    for (let seed = 1; seed <= 2; seed++) {
      await using world = await World.open({ size: 3, stagingBytes: SMALL_STAGING, hostile: { seed } });
      await world.all(() => barrier());
      for (let round = 0; round < 2; round++) {
        await giveUp(world, 1, round);
        // Rank 2 goes on in vain.
        for (let call = 0; call < 4; call++) {
          await expect(world.run(2, barrier())).rejects.toMatchObject({ code: expect.stringMatching(/POISON|ABORT/) });
        }
        const told = await repairAll(world, [0, 1, 2]);
        expect(new Set(told.map(({ sequence }) => sequence)).size).toBe(1);
        expect(told[0]!.contributors).toEqual([0, 1, 2]);
        await worksOver(world, [0, 1, 2]);
      }
      // Nobody has gone.
      expect(world.engines[0]!.view().epoch).toBe(0);
    }
  });

  it('ends what the others still wait for, and is what they make next', async () => {
    await using world = await World.open({ size: 3 });
    await world.all(() => barrier());
    const waiting = world.settled(() => barrier(), [1, 2]);
    const first = world.repair(0);
    for (const end of await waiting) expect(end).toMatchObject(rejection('EP_ABORTED', { ranks: [0], sequence: 2 }));
    await expect(world.run(1, barrier())).rejects.toMatchObject({ code: 'EP_POISONED' });
    const [one, two] = await repairAll(world, [1, 2]);
    expect([(await first).sequence, one!.sequence, two!.sequence]).toEqual([4, 4, 4]);
    await worksOver(world, [0, 1, 2]);
  });

  it('comes after the calls that were made before it, which end well', async () => {
    for (let seed = 1; seed <= 3; seed++) {
      await using world = await World.open({ size: 3, stagingBytes: SMALL_STAGING, hostile: { seed } });
      const calls = [0, 1, 2].flatMap((rank) => Array.from({ length: 6 }, () => world.run(rank, reduceOf(rank))));
      const repairs = repairAll(world, [0, 1, 2]);
      for (const end of await Promise.all(calls)) expect(end.contributors).toEqual([0, 1, 2]);
      for (const { sequence } of await repairs) expect(sequence).toBe(7);
      await worksOver(world, [0, 1, 2]);
    }
  });

  it('goes on without ranks that die while it waits for them', async () => {
    await using world = await World.open({ size: 4 });
    await world.all(() => barrier());
    const repairs = repairAll(world, [0, 1, 3]);
    await pause(20);
    await world.lose(2);
    for (const end of await repairs) expect(end.contributors).toEqual([0, 1, 3]);
    await worksOver(world, [0, 1, 3]);
  });

  it('that nobody else comes to ends by its time, and one that came too early is made again', async () => {
    await using world = await World.open({ size: 3 });
    await world.all(() => barrier());
    await expect(world.repair(0, [], 50)).rejects.toMatchObject({ code: 'EP_TIMEOUT', context: { awaited: [1, 2] } });
    await expect(world.run(0, barrier())).rejects.toMatchObject({ code: 'EP_POISONED' });
    // They take the word of rank 0 for its coming; it tells them that it had gone.
    await repairAll(world, [1, 2]);
    for (const end of await world.settled(() => barrier(), [1, 2])) {
      expect(end).toMatchObject(rejection('EP_ABORTED', { ranks: [0] }));
    }
    await expect(world.run(0, barrier())).rejects.toMatchObject({ code: expect.stringMatching(/POISON|ABORT/) });
    await repairAll(world, [0, 1, 2]);
    await worksOver(world, [0, 1, 2]);
  });

  it('leaves messages alone', async () => {
    await using world = await World.open({ size: 2 });
    const data = new Int32Array(1);
    const received = world.engines[1]!.recv({ peer: 0, tag: 0, data, timeoutMs: 20_000 });
    await repairAll(world, [0, 1]);
    await world.engines[0]!.send({ peer: 1, tag: 0, data: Int32Array.of(5), timeoutMs: 20_000 });
    await received;
    expect(data[0]).toBe(5);
  });
});

describe('a rank that is taken out alive', () => {
  it('has no effect on the others, whatever of it is still under way', async () => {
    for (let seed = 1; seed <= 4; seed++) {
      // What it had put lands in the middle of later calls.
      const hostile = { seed, maxDelayUs: 5000 };
      await using world = await World.open({ size: 3, stagingBytes: SMALL_STAGING, hostile });
      await world.all(() => barrier());
      const message = { tag: 1, data: new Uint8Array(2_000_000), timeoutMs: 20_000 };
      const messages = Promise.allSettled([
        world.engines[2]!.send({ peer: 0, ...message }),
        world.engines[0]!.recv({ peer: 2, ...message }),
      ]);
      await giveUp(world, seed % 3, seed);
      for (const end of await repairAll(world, [0, 1], [2])) expect(end.contributors).toEqual([0, 1]);
      await worksOver(world, [0, 1]);
      const [sent, received] = await messages;
      expect(sent).toMatchObject(rejection('EP_EVICTED'));
      expect(received).toMatchObject(rejection('EP_PEER_LOST', { lost: [2] }));
      await until(() => world.engines[2]!.view().active.length === 2);
      await expect(world.run(2, barrier())).rejects.toMatchObject({ code: 'EP_EVICTED' });
      await expect(world.repair(2)).rejects.toMatchObject({ code: 'EP_EVICTED' });
      expect(world.engines[2]!.view().active).toEqual([0, 1]);
      expect(world.engines[0]!.view()).toEqual({ epoch: 1, active: [0, 1] });
      expect(world.engines[0]!.connections()[2]).toMatchObject({ state: 'lost' });
    }
  });

  it('may have called so itself: then its calls before end as everybody’s', async () => {
    for (let seed = 1; seed <= 4; seed++) {
      await using world = await World.open({ size: 3, stagingBytes: SMALL_STAGING, hostile: { seed } });
      const calls = [0, 1, 2].flatMap((rank) => Array.from({ length: 5 }, () => world.run(rank, reduceOf(rank))));
      const leaving = world.repair(2, [2]).catch((error: unknown) => error);
      const repairs = repairAll(world, [0, 1], [2]);
      for (const end of await Promise.all(calls)) expect(end.contributors).toEqual([0, 1, 2]);
      expect(await leaving).toMatchObject({ code: 'EP_EVICTED' });
      await world.engines[2]!.close();
      for (const end of await repairs) expect(end.contributors).toEqual([0, 1]);
      await worksOver(world, [0, 1]);
    }
  });

  it('closes at once: its last words are taken, though nobody reads them', async () => {
    await using world = await World.open({ size: 3 });
    await world.all(() => barrier());
    const left = Promise.all([0, 1].map((rank) => world.repair(rank, [2])));
    // More than there are slots.
    const sends = Array.from({ length: 40 }, (_, tag) =>
      world.engines[2]!.send({ peer: tag % 2, tag, data: new Uint8Array(1), timeoutMs: 20_000 }),
    );
    await Promise.allSettled(sends);
    await left;
    const began = performance.now();
    await world.engines[2]!.close();
    // Engines whose words are not taken wait for 5 s.
    expect(performance.now() - began).toBeLessThan(4500);
    await worksOver(world, [0, 1]);
  });

  it('by one that it takes out itself: one of them goes on, and the other one knows', async () => {
    for (let seed = 1; seed <= 6; seed++) {
      await using world = await World.open({ size: 2, hostile: { seed } });
      const ends = await Promise.allSettled([world.repair(0, [1]), world.repair(1, [0])]);
      const stays = ends.findIndex(({ status }) => status === 'fulfilled');
      expect(ends[stays]).toMatchObject({ value: { contributors: [stays] } });
      expect(ends[1 - stays]).toMatchObject(rejection('EP_EVICTED'));
      await worksOver(world, [stays]);
      await expect(world.run(1 - stays, barrier())).rejects.toMatchObject({ code: 'EP_EVICTED' });
    }
  });
});

describe('who takes part', () => {
  it('is what all members say that it is', async () => {
    await using world = await World.open({ size: 3 });
    const all = await Promise.all([0, 1, 2].map((rank) => world.change(rank)));
    for (const { states } of all) expect(states).toEqual(['active', 'active', 'active']);
    await world.lose(1);
    await repairAll(world, [0, 2]);
    for (const rank of [0, 2]) expect(world.engines[rank]!.trace()).toEqual({});
    const left = await Promise.all([0, 2].map((rank) => world.change(rank)));
    for (const { states } of left) expect(states).toEqual(['active', 'absent', 'active']);
  });

  it('is no barrier to those who ask', async () => {
    await using world = await World.open({ size: 2 });
    const ends = await Promise.allSettled([world.change(0), world.run(1, barrier())]);
    for (const end of ends) expect(end).toMatchObject(rejection('EP_MISMATCH', { sequence: 1 }));
  });
});

describe('a group that takes out who is late', () => {
  it('goes on without a rank that does not come, which learns of it', async () => {
    await using world = await World.open({ size: 3, evicts: true });
    await world.all(() => barrier());
    // One deadline is enough.
    const ends = await world.settled((rank) => barrier(rank === 0 ? 50 : 60_000), [0, 1]);
    for (const end of ends) expect(end).toMatchObject(rejection('EP_PEER_LOST', { lost: [2], sequence: 2 }));
    await worksOver(world, [0, 1]);
    await expect(world.run(2, barrier())).rejects.toMatchObject({ code: 'EP_EVICTED' });
  });

  it('goes on without one that stops in the middle, and takes nothing of it when it goes on', async () => {
    // After its words to both that it has come, and one piece of its data.
    let left = Number.POSITIVE_INFINITY;
    const held: (() => Work)[] = [];
    const wrap = (transport: Transport<'bundled' | 'add'>, rank: number): Transport<'bundled' | 'add'> => {
      if (rank !== 2) return transport;
      const connect: typeof transport.connect = async (peer, options) => {
        const endpoint = await transport.connect(peer, options);
        const through = <A extends readonly unknown[]>(post: (...args: A) => Work, isPut: boolean) => {
          return (...args: A): Work => {
            if (left > 0) {
              if (isPut) left--;
              return post(...args);
            }
            held.push(() => post(...args));
            return doneWork('put', 0);
          };
        };
        return withMembers(endpoint, { put: through(endpoint.put, true), signal: through(endpoint.signal, false) });
      };
      return withMembers(transport, { connect });
    };
    await using world = await World.open({ size: 3, stagingBytes: SMALL_STAGING, evicts: true, wrap });
    await world.all(() => barrier());
    left = 3;
    const ends = world.settled((rank) => ({ ...reduceOf(rank), timeoutMs: rank === 2 ? 60_000 : 100 }));
    const [first, second, third] = await ends;
    expect(first).toMatchObject(rejection('EP_PEER_LOST', { lost: [2], sequence: 2 }));
    expect(second).toMatchObject(rejection('EP_PEER_LOST', { lost: [2], sequence: 2 }));
    expect(third).toMatchObject(rejection('EP_EVICTED'));
    // All that it had not said yet.
    left = Number.POSITIVE_INFINITY;
    expect(held.length).toBeGreaterThan(0);
    for (const post of held) post();
    await worksOver(world, [0, 1]);
  });

  it('does not take out who waits for the one that is late', async () => {
    // Rank 2 stops between its words of a call: rank 0 has completed it, and rank 1 waits.
    let left: Map<number, number> | undefined;
    const wrap = filtered(2, (peer, isPut) => {
      if (left === undefined) return true;
      const puts = left.get(peer)!;
      if (isPut) left.set(peer, puts - 1);
      return puts > 0;
    });
    await using world = await World.open({ size: 3, evicts: true, wrap });
    await world.all(() => barrier());
    await pause(20); // until nothing of it is under way
    left = new Map([
      [0, 1],
      [1, 0],
    ]);
    const caught = world.settled(() => barrier(), [2]);
    const waits = world.run(1, barrier(60_000));
    await world.run(0, barrier());
    await expect(world.run(0, barrier(50))).rejects.toMatchObject({ code: 'EP_PEER_LOST', context: { lost: [2] } });
    expect((await waits).contributors).toEqual([0, 1, 2]);
    await expect(world.run(1, barrier())).rejects.toMatchObject({ code: 'EP_PEER_LOST', context: { lost: [2] } });
    await caught;
    await worksOver(world, [0, 1]);
  });

  it('is poisoned where all are there and answer', async () => {
    // Of a call, the first piece of what rank 1 sends is lost.
    let puts = Number.NEGATIVE_INFINITY;
    const wrap = filtered(1, (_, isPut) => !isPut || ++puts !== 2);
    await using world = await World.open({ size: 2, evicts: true, wrap });
    await world.all(() => barrier());
    puts = 0;
    const [first, second] = await world.settled((rank) => ({
      ...reduceOf(rank),
      timeoutMs: rank === 0 ? 50 : 60_000,
    }));
    expect(first).toMatchObject(rejection('EP_TIMEOUT', { awaited: [1], sequence: 2 }));
    expect(second).toMatchObject(rejection('EP_ABORTED', { ranks: [0], sequence: 2 }));
    for (const rank of [0, 1]) expect(world.engines[rank]!.view().active).toEqual([0, 1]);
  });
});
