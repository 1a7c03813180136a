/** Words of small calls that go in rounds of the transport: who alone has a round owes its word to all others, in records, until none of them can lack it. */
import { EpError, type RoundMaker, type Rounds, type RoundsOptions, type Transport } from '@ep/core';
import { describe, expect, it } from 'vitest';
import type { EngineEnd } from '../../src/engine.js';
import { check, make } from './calls.js';
import { type Call, pause, reduceOf, rejection, SMALL_STAGING, World, withMembers } from './world.js';

const SIZE = 4;
const LAST = SIZE - 1;
/** Of all ranks together, in what `reduceOf` gives. */
const SUM = 2 ** SIZE - 1;

/** Whether rounds of this process have `exchange`: calls that hear at once end as quick ones. */
type Ways = 'entered' | 'exchanged';
const WAYS: readonly Ways[] = ['entered', 'exchanged'];

/** Rounds in this process, which the test gives to whom it wants. */
class Table {
  readonly #ways: Ways;
  /** Calls that ended as quick ones. */
  quick = 0;
  /** Ranks that get rounds. */
  hears: (rank: number) => boolean = () => false;
  /** Once a rank has said its word in a round, and before it hears. */
  onEnter: (rank: number) => void = () => {};
  entered = Array.from({ length: SIZE }, () => 0);
  refusing: number | undefined;
  readonly #words = new Map<bigint, Map<number, Uint8Array>>();

  constructor(ways: Ways = 'entered') {
    this.#ways = ways;
  }

  wrap = (transport: Transport<'bundled' | 'add'>, rank: number): Transport<'bundled' | 'add'> => {
    const rounds: RoundMaker = {
      mostMembers: SIZE,
      mostBytes: 1024,
      size: (groups) => ({ byteLength: groups * 8, signalSlots: groups }),
      part: () => Uint8Array.of(rank),
      settle: () => Promise.resolve(),
      open: (options) => this.#open(rank, options),
    };
    return withMembers(transport, { rounds });
  };

  #open(rank: number, { token, ranks, leader }: RoundsOptions): Rounds {
    if (rank === this.refusing) throw new EpError('EP_UNSUPPORTED', 'not here');
    expect([...leader]).toEqual([ranks[0]]);
    const look = (round: number): readonly Uint8Array[] | undefined => {
      const said = this.#words.get(token + BigInt(round));
      return this.hears(rank) && said?.size === ranks.length ? ranks.map((peer) => said.get(peer)!) : undefined;
    };
    const enter = (round: number, word: Uint8Array): readonly Uint8Array[] | undefined => {
      const key = token + BigInt(round);
      const said = this.#words.get(key) ?? new Map<number, Uint8Array>();
      this.#words.set(key, said.set(rank, word.slice()));
      this.entered[rank]!++;
      this.onEnter(rank);
      return look(round);
    };
    const exchange: NonNullable<Rounds['exchange']> = (round, head, given, _mostMs, fold) => {
      // Without carriers nothing is folded here.
      expect(fold).toBeUndefined();
      const behind = given && new Uint8Array(given.buffer, given.byteOffset, given.byteLength);
      const words = enter(round, Buffer.concat([head, behind ?? new Uint8Array(0)]));
      if (words === undefined) return 'late';
      const isAlike = words.every((word) => Buffer.compare(word.subarray(0, head.byteLength), head) === 0);
      if (isAlike) this.quick++;
      return isAlike ? 'alike' : 'unlike';
    };
    return {
      enter,
      look,
      ...(this.#ways === 'exchanged' && { exchange, kept: (round: number) => look(round) }),
      closed: false,
      close: () => Promise.resolve(),
      [Symbol.asyncDispose]: () => Promise.resolve(),
    };
  }
}

const sumOf = (rank: number): Call => reduceOf(rank, new Float32Array(2));

/** A group that goes in rounds: all ranks have found that all can. Nobody has heard one. */
async function inRounds(table: Table, options: { readonly evicts?: boolean } = {}): Promise<World> {
  const world = await World.open({
    size: SIZE,
    stagingBytes: SMALL_STAGING,
    wrap: table.wrap,
    hosts: [0, 0, 0, 0],
    ...options,
  });
  // Who finds that another one has told already says its own word in records as well.
  while (table.entered.includes(0)) await world.all(() => ({ kind: 'barrier' }));
  return world;
}

/** All ranks make the call, each inside of the one before, when that one has said its word in the round, and told nobody: the last one can have the round while the others have told nothing. */
function nested(world: World, table: Table, call: (rank: number) => Call, after: () => void = () => {}) {
  const ends: Promise<EngineEnd>[] = [];
  const entered = [...table.entered];
  table.hears = (rank) => rank === LAST;
  table.onEnter = (rank) => {
    if (rank < LAST) ends.push(world.run(rank + 1, call(rank + 1)));
    else queueMicrotask(after);
  };
  ends.unshift(world.run(0, call(0)));
  expect(table.entered).toEqual(entered.map((count) => count + 1));
  table.onEnter = () => {};
  return Promise.allSettled(ends);
}

describe.each(WAYS)('words are %s', (ways) => {
  it('who alone has the round of a call tells those who ask for it in records', async () => {
    const table = new Table(ways);
    await using world = await inRounds(table);
    for (let i = 0; i < 5; i++) {
      const calls = Array.from({ length: SIZE }, (_, rank) => sumOf(rank));
      // The last one is called first of all in the array of ends: it was the innermost.
      const ends = await nested(world, table, (rank) => calls[rank]!);
      expect(ends.map(({ status }) => status)).toEqual(Array(SIZE).fill('fulfilled'));
      for (const { outputs } of calls) expect([...(outputs![0] as Float32Array)]).toEqual([SUM, SUM]);
    }
    const { signals, calls } = world.engines[LAST]!.trace()['all-reduce']!;
    expect({ signals, calls }).toEqual({ signals: 5 * SIZE, calls: 5 });
  });

  it('who alone has the round of a call, and closes, has told it before', async () => {
    const table = new Table(ways);
    await using world = await inRounds(table);
    let closed: Promise<void> | undefined;
    const ends = await nested(world, table, sumOf, () => {
      closed = world.engines[LAST]!.close();
    });
    expect(ends.map(({ status }) => status)).toEqual(Array(SIZE).fill('fulfilled'));
    await closed;
    const survivors = [0, 1, 2];
    const lost = await world.settled(sumOf, survivors);
    expect(lost).toMatchObject(survivors.map(() => rejection('EP_PEER_LOST', { lost: [LAST] })));
    await expect(world.all(sumOf, survivors)).resolves.toHaveLength(3);
  });

  it.each([0, 1])(
    'a call that one survivor has ended in a round ends well on all, where rank %i is lost meanwhile',
    async (victim) => {
      const table = new Table(ways);
      await using world = await inRounds(table);
      let lost: Promise<void> | undefined;
      const ends = await nested(world, table, sumOf, () => {
        lost = world.lose(victim);
      });
      await lost;
      const survivors = [...Array(SIZE).keys()].filter((rank) => rank !== victim);
      // In the order in which they were called, innermost last but for the first.
      const byRank = ends.filter(({ status }) => status === 'fulfilled');
      expect(byRank.length).toBeGreaterThanOrEqual(survivors.length);
      const after = await world.settled(sumOf, survivors);
      expect(after).toMatchObject(survivors.map(() => rejection('EP_PEER_LOST', { lost: [victim] })));
      // In records, until all who are left have rounds of their own.
      const entered = [...table.entered];
      const haveRounds = (): boolean => survivors.every((rank) => table.entered[rank]! > entered[rank]!);
      for (let i = 0; !haveRounds() && i < 2000; i++) await world.all(sumOf, survivors);
      expect(haveRounds()).toBe(true);
      table.hears = () => true;
      const calls = Array.from({ length: SIZE }, (_, rank) => sumOf(rank));
      for (let i = 0; i < 5; i++) await world.all((rank) => calls[rank]!, survivors);
      for (const rank of survivors)
        expect([...(calls[rank]!.outputs![0] as Float32Array)]).toEqual(Array(2).fill(SUM - 2 ** victim));
      expect(table.entered[victim]).toBe(entered[victim]);
    },
  );

  it('calls of all kinds are right in rounds, some of which come late, and as many others do not come at all', async () => {
    const table = new Table(ways);
    await using world = await inRounds(table);
    let calls = 0;
    for (const op of [
      'all-reduce',
      'all-gather',
      'all-to-all',
      'broadcast',
      'reduce-scatter',
      'gather',
      'scatter',
      'reduce',
      'barrier',
    ] as const) {
      for (let i = 0; i < 8; i++) {
        table.hears = (rank) => ((calls + rank) & (1 << (i % 3))) === 0;
        await check(world, make(op, 'f32', SIZE, i % 2 === 0 ? 3 : 0, i % SIZE, 7 + calls));
        calls++;
      }
    }
  });

  it('ranks that call something else are named alike, whether or not they have the round', async () => {
    const table = new Table(ways);
    await using world = await inRounds(table);
    const ends = await nested(world, table, (rank) => (rank === 1 ? { kind: 'barrier' } : sumOf(rank)));
    expect(ends).toMatchObject(Array(SIZE).fill(rejection('EP_MISMATCH', { ranks: [1] })));
  });

  it('a rank that does not come is named by those who have not heard of it', async () => {
    const table = new Table(ways);
    await using world = await inRounds(table);
    table.hears = () => true;
    const ends = await world.settled((rank) => ({ ...sumOf(rank), timeoutMs: 300 }), [0, 1, 2]);
    const codes = ends.map((end) => (end.status === 'rejected' ? end.reason.code : end.status));
    for (const code of codes) expect(['EP_TIMEOUT', 'EP_ABORTED']).toContain(code);
    const timedOut = ends.flatMap((end) =>
      end.status === 'rejected' && end.reason.code === 'EP_TIMEOUT' ? [end.reason] : [],
    );
    expect(timedOut.length).toBeGreaterThan(0);
    for (const { context } of timedOut) expect(context.awaited).toEqual([3]);
  });

  it('members go on without one that was late, where the group evicts, and without rounds', async () => {
    const table = new Table(ways);
    await using world = await inRounds(table, { evicts: true });
    table.hears = () => true;
    const ends = await world.settled((rank) => ({ ...sumOf(rank), timeoutMs: 300 }), [0, 1, 2]);
    expect(ends).toMatchObject(Array(3).fill(rejection('EP_PEER_LOST', { lost: [3] })));
    const entered = [...table.entered];
    await world.all(sumOf, [0, 1, 2]);
    expect(table.entered).toEqual(entered);
  });

  it('no rank says a word in a round where one cannot take them', async () => {
    const table = new Table(ways);
    table.refusing = 2;
    await using world = await World.open({ size: SIZE, stagingBytes: SMALL_STAGING, wrap: table.wrap });
    for (let i = 0; i < 50; i++) {
      await world.all(() => ({ kind: 'barrier' }));
      if (i % 10 === 0) await pause(1);
    }
    expect(table.entered).toEqual(Array(SIZE).fill(0));
    for (const engine of world.engines) {
      expect(engine.trace().barrier).toMatchObject({ calls: 50, signals: 50 * (SIZE - 1) });
    }
  });

  it('a call behind one that a rank gave up ends so, though all have said their words', async () => {
    const table = new Table(ways);
    await using world = await inRounds(table);
    const before = table.entered[LAST];
    const abort = new AbortController();
    const early = [0, 1, 2].map((rank) =>
      world.run(rank, { ...sumOf(rank), ...(rank === 0 && { signal: abort.signal }) }),
    );
    abort.abort(new Error('no longer'));
    const ends = await Promise.allSettled(early);
    expect(ends.slice(1)).toMatchObject(Array(2).fill(rejection('EP_ABORTED')));
    // From here on a rank that only looked at the round would find it whole. What rank 0 says of its end is there by then.
    table.hears = () => true;
    await pause(20);
    const late = await world.settled(sumOf, [LAST]);
    expect(late).toMatchObject([rejection('EP_ABORTED')]);
    expect(table.entered[LAST]).toBe(before);
  });

  it('a call of which all hear at once ends where it is made', async () => {
    const table = new Table(ways);
    await using world = await inRounds(table);
    const quick = table.quick;
    const calls = Array.from({ length: SIZE }, (_, rank) => sumOf(rank));
    await nested(world, table, (rank) => calls[rank]!);
    expect(table.quick - quick).toBe(ways === 'exchanged' ? 1 : 0);
  });
});
