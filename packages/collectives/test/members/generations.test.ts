/** Ranks let in where that makes the ways between those who stay anew, too: nothing between these is lost, and no call ends because of it. In one thread. */
import { efaGda } from '@ep/efa-gda';
import { describe, expect, it } from 'vitest';
import { type Call, MANY_CHUNKS, pause, reduceOf, rejection, SMALL_STAGING, World } from '../portable/world.js';
import { worksOver } from './works-over.js';

const barrier = (timeoutMs = 20_000): Call => ({ kind: 'barrier', timeoutMs });
const LAST = 3;
const OTHERS = [0, 1, 2] as const;

async function openAndLose(kind: 'efa' | 'mixed-efa', faults = ''): Promise<World> {
  const world = await World.open({ kind, size: 4, stagingBytes: SMALL_STAGING, faults });
  await world.all(() => barrier());
  await world.lose(LAST);
  const ends = await world.settled(() => barrier(), OTHERS);
  for (const end of ends) expect(end).toMatchObject(rejection('EP_PEER_LOST', { lost: [LAST] }));
  return world;
}

async function takeIn(world: World): Promise<void> {
  await Promise.all([world.join(LAST), world.takeIn(OTHERS, [LAST])]);
  await worksOver(world, [...OTHERS, LAST]);
}

describe.each(['efa', 'mixed-efa'] as const)('those who stay, over %s', (kind) => {
  it('go on with calls while others are let in, and lose nothing of them', async () => {
    // Something is under way whenever they are asked to pause.
    await using world = await openAndLose(kind, 'delay stage=land ns=2000000');
    for (let round = 0; round < 3; round++) {
      let isOver = false;
      const call = async (): Promise<number> => {
        let calls = 0;
        for (; !isOver || calls < 2; calls++) {
          const outputs = OTHERS.map(() => new Float32Array(MANY_CHUNKS));
          await world.all((rank) => reduceOf(rank, outputs[rank]), OTHERS);
          for (const output of outputs) expect(output.every((one) => one === 7)).toBe(true);
        }
        return calls;
      };
      const calling = call();
      await world.readmit(LAST);
      await pause(20);
      isOver = true;
      expect(await calling).toBeGreaterThan(0);
      await world.openSuccessor(LAST);
      await takeIn(world);
      await world.lose(LAST);
      await world.settled(() => barrier(), OTHERS);
    }
  });

  it('end a call that had begun when the others are let in', async () => {
    await using world = await openAndLose(kind);
    const early = [0, 1].map((rank) => world.run(rank, barrier()));
    await world.readmit(LAST);
    await Promise.all([...early, world.run(2, barrier())]);
    await world.openSuccessor(LAST);
    await takeIn(world);
  });
});

it('they stand still after others were let in on some ranks alone, until a later call lets them in', async () => {
  await using world = await openAndLose('efa');
  const member = { rank: LAST, worldSize: 4, store: world.stores[LAST]! };
  const { signal } = new AbortController();
  const [comes, ...stay] = await Promise.allSettled([
    efaGda.soft.rejoin(member, { signal, config: { faults: 'no such fault' } }),
    ...OTHERS.map((rank) => {
      const { readmit } = world.transports[rank] as unknown as {
        readmit(options: { store: unknown; joining: readonly number[] }): Promise<void>;
      };
      return readmit.call(world.transports[rank], { store: world.stores[rank], joining: [LAST] });
    }),
  ]);
  expect(comes).toMatchObject({ status: 'rejected' });
  for (const end of stay)
    expect(end).toMatchObject({ reason: { message: expect.stringContaining('rank 3 could not') } });
  let ended = 0;
  const calls = OTHERS.map((rank) => world.run(rank, barrier()).then(() => ended++));
  // Whoever comes to use the ways now is asked to pause, too.
  const heard: string[] = [];
  world.transports[0]!.succession!.generations!.onChange({
    pause: async () => void heard.push('pause'),
    resume: () => void heard.push('resume'),
  });
  await pause(50);
  expect(ended).toBe(0);
  expect(heard).toEqual(['pause']);
  await world.readmit(LAST);
  expect(heard).toEqual(['pause', 'pause', 'resume']);
  await Promise.all(calls);
  await world.openSuccessor(LAST);
  await takeIn(world);
});
