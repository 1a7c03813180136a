/** Over EFA, ranks that need nothing of the one that is missing: those that do tell them whom they have missed, and nobody names a rank that lives and comes. */
import { mapExperts } from '@ep/plan/moe';
import { describe, expect, it } from 'vitest';
import type { MoeCase } from '../moe/case.js';
import type { CommandedWorld } from '../moe/commanded.js';
import { caseOf, cellsOf, closeAll, scriptOf, worldSize } from '../moe/script.js';

/** Ranks 1 and 2 have no experts, so neither awaits anything of the other: only ranks 0 and 3 miss rank 2. */
const map = mapExperts({
  worldSize,
  experts: 8,
  rankOffsets: Int32Array.of(0, 4, 4, 4, 8),
  expert: Int32Array.of(0, 1, 2, 3, 4, 5, 6, 7),
});
const missing = 2;
const needsNothing = 1;

const caseWith = (mode: MoeCase['mode'], options: MoeCase['options']): MoeCase => ({
  ...caseOf(mode),
  map,
  options: { ...options },
});

/** How the call of each rank but the missing one ends. */
const endsOf = (world: CommandedWorld, { dispatch, combine }: ReturnType<typeof scriptOf>, number: number) =>
  Promise.allSettled(world.others(missing).map((of) => dispatch(of, number).then(() => combine(of))));

describe.each(cellsOf(['efa', 'shm+efa']))('%s over %s', (mode, way) => {
  it('names who was killed on all ranks, three times, without a wait to any limit', { timeout: 120_000 }, async () => {
    // Longer than the test may take: whoever waits for one that has failed, and was not told, does not end.
    const of = scriptOf(caseWith(mode, { timeoutMs: 300_000, calls: 2 }), 'processes', way);
    await using world = await of.open();
    let number = 0;
    await of.complete(world, number++);
    for (let death = 0; death < 3; death++) {
      await world.ranks[missing]!.kill();
      const ends = await endsOf(world, of, number++);
      for (const end of ends) expect(end).toMatchObject({ reason: { code: 'EP_PEER_LOST', ranks: [missing] } });
      // It awaits nobody that is dead, so it cannot know by itself.
      const [, told] = ends as PromiseRejectedResult[];
      expect(world.others(missing)[1]!.rank).toBe(needsNothing);
      expect(told!.reason.message).toMatch(/rank 2 is lost, as rank [03] has told, whose call has failed/);
      for (const end of await Promise.allSettled(world.others(missing).map((rank) => of.call([rank], number))))
        expect(end).toMatchObject({ reason: { code: 'EP_POISONED' } });
      await of.replace(world, missing);
      for (let after = 0; after < 3; after++) await of.complete(world, number++);
    }
    await closeAll(world);
  });

  it('names who was stopped', { timeout: 120_000 }, async () => {
    const of = scriptOf(caseWith(mode, { timeoutMs: 6000 }), 'processes', way);
    await using world = await of.open();
    await of.complete(world, 0);
    void world.ranks[missing]!.tell('stop').catch(() => {});
    const ends = await endsOf(world, of, 1);
    for (const end of ends) expect(end).toMatchObject({ reason: { code: 'EP_TIMEOUT', ranks: [missing] } });
  });
});
