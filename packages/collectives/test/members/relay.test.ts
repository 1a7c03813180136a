/** Small calls while ranks die, are taken out, give up and agree anew: all survivors must tell the same story, with the same results, and nobody may wait at its end. */
import { describe, expect, it } from 'vitest';
import { numbers } from '../portable/world.js';
import { Model, type Script } from './calls-model.js';

const SEEDS = process.env.EP_TEST_FULL === '1' ? 5_000 : 100;
const CALLS = 6;
const WAITS = 'waits';

const PLAIN: Script = { calls: CALLS, repairs: false, evicted: [], givingUp: [] };

/** How each call of the survivors has ended, of one phase. */
async function storiesOf(model: Model, phase: 0 | 1): Promise<readonly (readonly string[])[]> {
  const waits = new Promise<string>((resolve) => setImmediate(resolve, WAITS));
  return Promise.all(
    model.survivors.map((rank) =>
      Promise.all(model.ranks[rank]!.stories[phase].map((end) => Promise.race([end, waits]))),
    ),
  );
}

const lossesIn = (story: readonly string[]): readonly string[] =>
  story.flatMap((end) => (end.startsWith('lost ') ? end.slice(5).split(',') : []));

/** Whoever goes is told as lost by the call before the first that is made without it; `members`: of the first call, if they are known. */
function checkMembers(story: readonly string[], members: readonly number[] | undefined, why: string): void {
  let expected = members;
  for (const end of story) {
    const ranks = end.split(' ')[1]?.split(',').map(Number) ?? [];
    if (end.startsWith('over ')) expect(ranks, `${why}: ${story}`).toEqual(expected ?? ranks);
    expected = end.startsWith('lost ') ? expected?.filter((rank) => !ranks.includes(rank)) : ranks;
  }
}

/** `hits` strike, any number of steps apart; then all goes on until nothing is left to do. */
async function play(model: Model, seed: number, apart: number, hits: readonly (() => void)[]): Promise<void> {
  const below = numbers(7919 * seed);
  for (const hit of hits) {
    for (let steps = below(apart); steps > 0 && (await model.step()); steps--);
    hit();
  }
  for (let steps = 0; await model.step(); steps++) expect(steps, `seed ${seed} does not end`).toBeLessThan(20_000);
}

function shuffled(size: number, seed: number): readonly number[] {
  const below = numbers(104_729 * seed);
  return [...Array(size).keys()].sort(() => below(2) - 0.5);
}

describe.each([
  { size: 2, deaths: 1, evictions: 0 },
  { size: 3, deaths: 1, evictions: 0 },
  { size: 3, deaths: 0, evictions: 1 },
  { size: 4, deaths: 1, evictions: 0 },
  { size: 4, deaths: 2, evictions: 0 },
  { size: 5, deaths: 1, evictions: 1 },
  { size: 5, deaths: 3, evictions: 0 },
])('$size ranks of which $deaths die and $evictions are taken out alive', ({ size, deaths, evictions }) => {
  it('end every call alike, and tell each loss once', async () => {
    let relayed = 0;
    let told = 0;
    for (let seed = 1; seed <= SEEDS; seed++) {
      const model = new Model(size, seed, PLAIN);
      const ranks = shuffled(size, seed);
      const dying = ranks.slice(0, deaths);
      const out = ranks.slice(deaths, deaths + evictions);
      const staying = ranks.slice(deaths + evictions);
      const by = (): number => staying[model.below(staying.length)]!;
      await play(model, seed, size * size * CALLS, [
        ...out.map((rank) => () => model.ranks[by()]!.evict([rank])),
        ...dying.map((rank) => () => model.die(rank)),
      ]);
      const { survivors } = model;
      const stories = await storiesOf(model, 0);
      const [first] = stories;
      expect(first, `seed ${seed}: rank ${survivors[0]}`).not.toContain(WAITS);
      for (const [i, story] of stories.entries()) {
        expect(story, `seed ${seed}: ranks ${survivors[i]} and ${survivors[0]}`).toEqual(first);
      }
      checkMembers(first!, [...ranks].sort(), `seed ${seed}`);
      const losses = lossesIn(first!);
      expect(losses.length, `seed ${seed}: ${losses}`).toBe(new Set(losses).size);
      for (const rank of losses) expect([...dying, ...out]).toContain(Number(rank));
      told += losses.length;
      relayed += model.relayed;
    }
    expect(told).toBeGreaterThan(SEEDS / 4);
    if (size > 2) expect(relayed).toBeGreaterThan(SEEDS / 4);
  });
});

describe.each([
  { size: 2, deaths: 0, evictions: 0, quitters: 1 },
  { size: 3, deaths: 0, evictions: 0, quitters: 0 },
  { size: 3, deaths: 1, evictions: 0, quitters: 1 },
  { size: 4, deaths: 0, evictions: 1, quitters: 1 },
  { size: 5, deaths: 2, evictions: 1, quitters: 1 },
  { size: 5, deaths: 3, evictions: 0, quitters: 0 },
])(
  '$size ranks of which $quitters give up, $deaths die and $evictions are taken out, and that agree anew',
  ({ size, deaths, evictions, quitters }) => {
    it('go on with the same calls, which all end alike', async () => {
      let worked = 0;
      for (let seed = 1; seed <= SEEDS; seed++) {
        const ranks = shuffled(size, seed);
        const dying = ranks.slice(0, deaths);
        const evicted = ranks.slice(deaths, deaths + evictions);
        const givingUp = ranks.slice(size - quitters);
        const model = new Model(size, seed, { calls: CALLS, repairs: true, evicted, givingUp });
        await play(
          model,
          seed,
          2 * size * size * CALLS,
          dying.map((rank) => () => model.die(rank)),
        );
        const { survivors } = model;
        const before = await storiesOf(model, 0);
        for (const [i, story] of before.entries()) {
          expect(story, `seed ${seed}: rank ${survivors[i]} before the repair`).not.toContain(WAITS);
          // Where nobody failed, all that was called before ends well.
          if (quitters + deaths + evictions === 0) expect(story).toEqual(Array(CALLS).fill(`over ${[0, 1, 2]}`));
        }
        const after = await storiesOf(model, 1);
        const [first] = after;
        for (const [i, story] of after.entries()) {
          expect(story, `seed ${seed}: ranks ${survivors[i]} and ${survivors[0]}`).toEqual(first);
        }
        expect(first, `seed ${seed}`).toHaveLength(CALLS);
        expect(first!.filter((end) => !end.startsWith('over ')).length, `seed ${seed}: ${first}`).toBe(
          first!.filter((end) => end.startsWith('lost ')).length,
        );
        checkMembers(first!, undefined, `seed ${seed}`);
        const losses = lossesIn(first!);
        expect(losses.length, `seed ${seed}: ${losses}`).toBe(new Set(losses).size);
        worked += first!.filter((end) => end === `over ${survivors}`).length;
      }
      expect(worked).toBeGreaterThan(SEEDS / 4);
    });
  },
);

async function finish(model: Model): Promise<void> {
  while (await model.step());
}

it('a call whose witnesses die one after the other is lost with the last of them', async () => {
  const [witness, left, first, second] = [0, 1, 2, 3];
  const model = new Model(4, 1, { ...PLAIN, calls: 3 });
  for (const rank of model.ranks) rank.call();
  for (const from of [left, first, second]) model.deliver(from, witness);
  expect((await storiesOf(model, 0))[witness]).toEqual(['over 0,1,2,3']);
  model.die(first, 'none');
  for (const rank of [witness, left, second]) model.hearOfDeath(first, rank);
  model.ranks[witness]!.call();
  // They agree with the witness, whose word the last one hears when it knows of the second one's death.
  for (const from of [left, second]) model.deliver(from, witness);
  model.die(second, 'none');
  model.hearOfDeath(second, left);
  model.deliver(witness, left);
  model.die(witness, 'none');
  await finish(model);
  expect(await storiesOf(model, 0)).toEqual([['lost 0,3', 'lost 2', 'over 1']]);
});

it('a call of which nobody is left who knows all does not hold up a repair', async () => {
  const [witness, waiting, silent, quitter, poisoned] = [0, 1, 2, 3, 4];
  const model = new Model(5, 1, { calls: 1, repairs: true, evicted: [], givingUp: [] });
  for (const rank of model.ranks) rank.call();
  for (const from of [waiting, silent, quitter, poisoned]) model.deliver(from, witness);
  model.ranks[witness]!.repair([]);
  model.deliver(witness, waiting);
  // Later, it would be answered.
  model.deliver(waiting, poisoned);
  model.ranks[quitter]!.giveUp();
  model.deliver(quitter, poisoned);
  for (const rank of [witness, silent, quitter]) model.die(rank, 'none');
  await finish(model);
  const [first, second] = await storiesOf(model, 0);
  expect(first![0]).toMatch(/^lost /);
  expect(second).toEqual(['EP_ABORTED']);
  expect(await storiesOf(model, 1)).toEqual([['over 1,4'], ['over 1,4']]);
});

it('a call that a rank has said not to have completed is not completed before all agree', async () => {
  const [far, middle, slow, victim] = [0, 1, 2, 3];
  const model = new Model(4, 1, { ...PLAIN, calls: 2 });
  for (const rank of model.ranks) rank.call();
  for (const from of [far, victim]) model.deliver(from, middle);
  model.die(victim, 'none');
  for (const rank of [far, middle, slow]) model.hearOfDeath(victim, rank);
  // The word of the slow one is all that the middle one lacks; and what the middle one makes of it is heard before that word.
  model.deliver(far, middle);
  model.deliver(slow, middle);
  model.deliver(middle, far);
  await finish(model);
  const story = [`lost ${victim}`, 'over 0,1,2'];
  expect(await storiesOf(model, 0)).toEqual([story, story, story]);
});
