/** What a rank makes of what others have told, with words that are written by hand. */
import { setTimeout as sleep } from 'node:timers/promises';
import { type Endpoint, EpError, type SignalUpdate, type SymmetricMemory } from '@ep/core';
import { describe, expect, it } from 'vitest';
import { Culprits, type CulpritsInit, type Told, toldOf, toldWord } from '../../src/moe/culprits.js';

const first = 7;
const worldSize = 5;

/** Rank 0's: `told[r]` is the word of rank r. */
function culpritsWith(more: Partial<CulpritsInit> = {}) {
  const told: bigint[] = Array.from({ length: worldSize }, () => 0n);
  const said: [number, SignalUpdate<'add'>][] = [];
  const memory = { closed: false, signals: { peek: (slot: number) => told[slot - first]! } };
  const endpoints = told.map((_, peer) => ({
    peer,
    signal: (_: unknown, update: SignalUpdate<'add'>) => {
      said.push([peer, update]);
      return Promise.reject(new Error('nobody may look at this one'));
    },
  }));
  const culprits = new Culprits({
    rank: 0,
    memory: memory as unknown as SymmetricMemory,
    endpoints: endpoints as unknown as Endpoint<'add'>[],
    firstSlot: first,
    takesPart: () => true,
    calls: () => ({ begun: 3, first: 2 }),
    timeoutMs: 400,
    ...more,
  });
  return { culprits, told, said, memory };
}

const missed = (rank: number, code: Told['code']): EpError => new EpError(code, 'in words', { context: { rank } });
const word = (rank: number, code: Told['code'], call = 2): bigint => toldWord({ rank, code, call });

/** What is heard before the first look that hears anything, or once `rounds` looks heard nothing. */
function heard(culprits: Culprits, rounds = 3): Promise<EpError | undefined> {
  return new Promise((resolve) => {
    let looks = 0;
    const isBusy = (): boolean => {
      if (++looks > rounds) resolve(undefined);
      return looks <= rounds;
    };
    culprits.watch(isBusy, resolve);
  });
}

describe('a word', () => {
  it('holds a rank, a reason and a call, beside the count of the farewell', () => {
    for (const told of [
      { rank: 0, code: 'EP_PEER_LOST', call: 0 },
      { rank: 65_534, code: 'EP_TIMEOUT', call: 2 ** 32 - 1 },
    ] as const) {
      expect(toldOf(toldWord(told))).toEqual(told);
      expect(toldOf(toldWord(told) + 1n)).toEqual(told);
    }
    expect(toldOf(0n)).toBeUndefined();
    expect(toldOf(1n)).toBeUndefined();
  });
});

describe('who waits', () => {
  it('hears of calls that it has begun, and not of later ones', async () => {
    const { culprits, told } = culpritsWith();
    told[1] = word(4, 'EP_PEER_LOST', 3);
    expect(await heard(culprits)).toBeUndefined();
    told[1] = word(4, 'EP_PEER_LOST', 2);
    expect(await heard(culprits)).toMatchObject({ code: 'EP_PEER_LOST', context: { rank: 4, toldBy: 1 } });
  });

  it('hears of a call beyond 2^32, too', async () => {
    const { culprits, told } = culpritsWith({ calls: () => ({ begun: 2 ** 32 + 1, first: 2 ** 32 }) });
    told[1] = word(4, 'EP_TIMEOUT', 2 ** 32 - 1);
    expect(await heard(culprits)).toMatchObject({ code: 'EP_TIMEOUT' });
    told[1] = word(4, 'EP_TIMEOUT', 1);
    expect(await heard(culprits)).toBeUndefined();
  });

  it('hears nothing where the words are gone, and harms nobody', async () => {
    const { culprits, memory } = culpritsWith();
    let looks = 0;
    memory.signals.peek = () => {
      looks++;
      throw new EpError('EP_CLOSED', 'the memory');
    };
    const told: EpError[] = [];
    culprits.watch(
      () => true,
      (error) => told.push(error),
    );
    await expect.poll(() => looks, { timeout: 30_000 }).toBe(1);
    await sleep(100);
    expect([looks, told]).toEqual([1, []]);
  });

  it('hears nothing of itself, of ranks that are none, and of ranks that take no part', async () => {
    const { culprits, told } = culpritsWith({ takesPart: (rank) => rank !== 3 });
    told[1] = word(0, 'EP_TIMEOUT');
    told[2] = word(worldSize, 'EP_PEER_LOST');
    told[3] = word(4, 'EP_PEER_LOST');
    expect(await heard(culprits)).toBeUndefined();
  });
});

describe('whose call has failed', () => {
  it('tells all others but the one that it names, once until it begins again, and awaits none', async () => {
    const { culprits, said } = culpritsWith({ takesPart: (rank) => rank !== 1 });
    const reason = missed(2, 'EP_PEER_LOST');
    expect(await culprits.settle('combine', reason)).toBe(reason);
    await culprits.settle('combine', missed(4, 'EP_PEER_LOST'));
    const update = { slot: first, op: 'add', value: word(2, 'EP_PEER_LOST') };
    expect(said).toEqual([3, 4].map((peer) => [peer, update]));
    culprits.renew();
    await culprits.settle('combine', missed(4, 'EP_PEER_LOST'));
    expect(said.length).toBe(4);
  });

  it('goes from rank to rank to the one that has told nothing', async () => {
    const { culprits, told } = culpritsWith();
    told[1] = word(2, 'EP_TIMEOUT');
    told[2] = word(3, 'EP_PEER_LOST');
    expect(await culprits.settle('combine', missed(1, 'EP_TIMEOUT'))).toMatchObject({
      code: 'EP_PEER_LOST',
      message: expect.stringMatching(/^combine: rank 3 is lost, as rank 2 has told/),
      context: { rank: 3, toldBy: 2 },
    });
  });

  it('goes round no circle, and back to nobody who names this rank', async () => {
    const { culprits, told } = culpritsWith();
    told[1] = word(2, 'EP_TIMEOUT');
    told[2] = word(1, 'EP_TIMEOUT');
    for (const rank of [1, 2]) {
      const own = missed(rank, 'EP_TIMEOUT');
      expect(await culprits.settle('combine', own)).toBe(own);
    }
    // From one that is in no circle into one.
    told[3] = word(2, 'EP_TIMEOUT');
    const outside = missed(3, 'EP_TIMEOUT');
    expect(await culprits.settle('combine', outside)).toBe(outside);
    told[4] = word(0, 'EP_TIMEOUT');
    const reason = missed(4, 'EP_TIMEOUT');
    expect(await culprits.settle('combine', reason)).toBe(reason);
    // And over another one: this rank is here, so the one that misses it is the late one.
    told[3] = word(4, 'EP_TIMEOUT');
    expect(await culprits.settle('combine', missed(3, 'EP_TIMEOUT'))).toMatchObject({
      context: { rank: 4, toldBy: 3 },
    });
  });

  it('ends a circle at a rank that is dead, and had missed another one before', async () => {
    const { culprits, told } = culpritsWith();
    told[1] = word(2, 'EP_PEER_LOST');
    told[2] = word(1, 'EP_TIMEOUT');
    expect(await culprits.settle('combine', missed(1, 'EP_TIMEOUT'))).toMatchObject({
      ...{ code: 'EP_PEER_LOST', context: { rank: 2, toldBy: 1 } },
    });
  });

  it('lets one that was late say a little later whom it has missed, and ends where nobody says anything', async () => {
    const { culprits, told } = culpritsWith({ timeoutMs: 60_000 });
    const known = culprits.settle('dispatch', missed(1, 'EP_TIMEOUT'));
    setImmediate(() => {
      told[1] = word(4, 'EP_PEER_LOST');
    });
    expect(await known).toMatchObject({ code: 'EP_PEER_LOST', context: { rank: 4, toldBy: 1 } });
    const silent = missed(2, 'EP_TIMEOUT');
    expect(await culprits.settle('dispatch', silent)).toBe(silent);
  });

  it('says as it is what names nobody, or itself', async () => {
    const { culprits, said } = culpritsWith();
    for (const reason of [new Error('odd'), new EpError('EP_SYSTEM', 'a NIC'), missed(0, 'EP_TIMEOUT')])
      expect(await culprits.settle('combine', reason)).toBe(reason);
    expect(said).toEqual([]);
  });
});
