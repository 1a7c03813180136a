/** Short exchanges, where a transport has them. */
import assert from 'node:assert/strict';
import type { RoundMaker, Rounds, SymmetricMemory } from '@ep/core';
import type { CaseRank, TransportCase } from './case.js';

const GROUPS = 2;

interface Opened {
  readonly maker: RoundMaker;
  readonly memory: SymmetricMemory;
  readonly hosts: readonly number[];
  /** Rounds of these ranks, in this order, as the group with this number and token. */
  readonly among: (ranks: readonly number[], group: number, token: bigint) => Rounds;
}

/** Undefined where the transport has none, on any rank. */
async function openRounds(rank: CaseRank): Promise<Opened | undefined> {
  const transport = await rank.open();
  const maker = transport.rounds;
  const all = await rank.share(maker !== undefined);
  assert.equal(new Set(all).size, 1, 'some ranks have rounds, and others have none');
  if (maker === undefined) return undefined;
  const memory = await transport.allocate(maker.size(GROUPS));
  const hosts = transport.hosts ?? all.map(() => 0);
  const parts = await rank.share([...maker.part(memory)]);
  const among: Opened['among'] = (ranks, group, token) => {
    const leader = Uint8Array.from(parts[ranks.find((peer) => hosts[peer] === hosts[rank.rank])!]!);
    return maker.open({ memory, group, token, ranks, hosts: ranks.map((peer) => hosts[peer]!), leader });
  };
  return { maker, memory, hosts, among };
}

/** Bytes that no other rank says in any round, of a length that changes with both. */
const words = (rank: number, round: number, most: number): Uint8Array =>
  Uint8Array.from({ length: (round * 37 + rank * 11) % (round % 7 === 0 ? most + 1 : 60) }, (_, i) =>
    Number(BigInt(i * 31 + rank * 101 + round * 7) & 255n),
  );

/** However late somebody comes. The loop turns between two looks, for ranks that share its thread. */
async function heardLater(rank: CaseRank, rounds: Rounds, round: number): Promise<readonly Uint8Array[]> {
  for (;;) {
    const heard = rounds.look(round);
    if (heard !== undefined) return heard;
    rank.signal.throwIfAborted();
    await new Promise((resolve) => setImmediate(resolve));
  }
}

async function exchanged(rank: CaseRank, rounds: Rounds, round: number, said: Uint8Array, mostMs: number) {
  return rounds.enter(round, said, mostMs) ?? (await heardLater(rank, rounds, round));
}

async function allHear(rank: CaseRank, { maker, among }: Opened): Promise<void> {
  const everybody = [...Array(rank.worldSize).keys()];
  // Of two groups in one memory, in other orders, and in turns; the numbers of the first ones wrap.
  const groups = [everybody, everybody.toReversed()].map((ranks, group) => ({
    ranks,
    rounds: among(ranks, group, 2n ** 64n - 20n + BigInt(group)),
  }));
  for (let round = 1; round <= 40; round++) {
    for (const { ranks, rounds } of groups) {
      const heard = await exchanged(rank, rounds, round, words(rank.rank, round, maker.mostBytes), round % 2);
      for (const [place, peer] of ranks.entries()) {
        assert.deepEqual([...heard[place]!], [...words(peer, round, maker.mostBytes)], `round ${round}`);
      }
    }
  }
  // Words to peers, which live, land; whoever goes by what is put to itself alone ends as well.
  for (const peer of everybody) await maker.settle(peer, { timeoutMs: 10_000 });
  await rank.meet();
  for (const { rounds } of groups) await rounds.close();
}

async function someoneMissing(rank: CaseRank, { among }: Opened): Promise<void> {
  const everybody = [...Array(rank.worldSize).keys()];
  const rounds = among(everybody, 1, 77n);
  const late = rank.worldSize - 1;
  if (rank.rank !== late) {
    assert.equal(rounds.enter(1, Uint8Array.of(rank.rank), 2), undefined);
    for (let i = 0; i < 10; i++) assert.equal(rounds.look(1), undefined);
  }
  await rank.meet();
  const first = rank.rank === late ? rounds.enter(1, Uint8Array.of(late), 2) : undefined;
  const heard = first ?? (await heardLater(rank, rounds, 1));
  assert.deepEqual(
    heard.map((word) => [...word]),
    everybody.map((peer) => [peer]),
  );
  // In the places of the first one, but not it.
  assert.equal(rounds.look(3), undefined);
  await rank.meet();
  await rounds.close();
}

/** Numbers of the addon: sums of f32. */
const SUM = { type: 1, reduction: 0, factor: 0 };

/** Whole numbers of a width at which sums are rounded: another order gives another sum. */
const gives = (place: number, round: number): number => [1, 2 ** 24, 1, -(2 ** 24)][(place + round) % 4]!;

/** As `folds` says: those of each list, then what the lists have come to. */
function folded(folds: readonly (readonly number[])[], round: number): number {
  const add = (sum: number, next: number): number => Math.fround(sum + next);
  return folds.map((places) => places.map((place) => gives(place, round)).reduce(add)).reduce(add);
}

/** What is folded is right where the round comes at once; otherwise each hears what all have said, as of `enter`. No rank takes words for alike that are not. */
async function allExchange(rank: CaseRank, { maker, memory, hosts }: Opened): Promise<void> {
  const everybody = [...Array(rank.worldSize).keys()];
  const folds = [everybody.filter((place) => place % 2 === 0), everybody.filter((place) => place % 2 === 1)];
  const parts = await rank.share([...maker.part(memory)]);
  const leader = Uint8Array.from(parts[hosts.indexOf(hosts[rank.rank]!)]!);
  const rounds = maker.open({
    memory,
    group: 0,
    token: 99n,
    ranks: everybody,
    hosts,
    leader,
    folds: folds.filter(({ length }) => length > 0),
  });
  if (rounds.exchange === undefined || rounds.kept === undefined) return rounds.close();
  const last = rank.worldSize - 1;
  for (let round = 1; round <= 60; round++) {
    // Of every third the last rank says something else, of every fifth it gives more.
    const odd = last > 0 && round % 3 === 0;
    const longer = last > 0 && round % 5 === 0;
    const head = Uint8Array.of(round, odd && rank.rank === last ? 1 : 0, 0);
    const given = new Float32Array(longer && rank.rank === last ? 2 : 1).fill(gives(rank.rank, round));
    const output = given.slice();
    const end: 'late' | 'unlike' | 'alike' = rounds.exchange(round, head, given, round % 2, SUM, output);
    if (end === 'alike') {
      assert.ok(!odd && !longer, `round ${round}: words that are not alike`);
      assert.equal(
        output[0],
        folded(
          folds.filter(({ length }) => length > 0),
          round,
        ),
        `round ${round}`,
      );
    } else {
      assert.deepEqual(output, given, `round ${round}: folded all the same`);
    }
    const heard: readonly Uint8Array[] = end === 'late' ? await heardLater(rank, rounds, round) : rounds.kept(round)!;
    for (const [place, word] of heard.entries()) {
      assert.equal(word[1], odd && place === last ? 1 : 0, `round ${round}`);
      assert.equal(word.byteLength, head.byteLength + (longer && place === last ? 8 : 4), `round ${round}`);
    }
    assert.ok(rounds.kept(round) !== undefined && rounds.kept(round + 2) === undefined);
  }
  const invalid = { code: 'EP_INVALID_ARGUMENT' };
  const head = new Uint8Array(1);
  assert.throws(() => rounds.exchange!(61, head, new Uint8Array(maker.mostBytes), 0), invalid);
  assert.throws(() => rounds.exchange!(61, head, new Float32Array(1), 0, SUM, new Float32Array(2)), invalid);
  assert.throws(
    () => rounds.exchange!(61, head, new Float32Array(1), 0, { ...SUM, type: 99 }, new Float32Array(1)),
    invalid,
  );
  await rank.meet();
  await rounds.close();
  await rank.meet();
}

async function refusals(rank: CaseRank, { maker, memory, hosts, among }: Opened): Promise<void> {
  const everybody = [...Array(rank.worldSize).keys()];
  const leader = maker.part(memory);
  const open = (odd: object) => () => {
    maker.open({ memory, group: 0, token: 1n, ranks: everybody, hosts, leader, ...odd });
  };
  const invalid = { code: 'EP_INVALID_ARGUMENT' };
  assert.throws(open({ group: GROUPS }), invalid);
  assert.throws(open({ ranks: everybody.filter((peer) => peer !== rank.rank) }), invalid);
  assert.throws(open({ hosts: hosts.slice(1) }), invalid);
  assert.throws(open({ leader: leader.subarray(1) }), invalid);
  assert.throws(open({ memory: {} }), invalid);
  const rounds = among(everybody, 0, 5n);
  assert.throws(() => rounds.enter(1, new Uint8Array(maker.mostBytes + 1), 0), invalid);
  assert.throws(() => rounds.enter(1, new Uint8Array(1), 1000), invalid);
  await rank.meet();
  await rounds.close();
  assert.throws(() => rounds.look(1), { code: 'EP_CLOSED' });
  await rank.meet();
}

export const roundCases: readonly TransportCase[] = [
  {
    id: 'rounds/all-or-none',
    sentence:
      'rounds are there on all ranks or on none; in one, every rank hears what each says, or none does, and what does not fit is refused',
    async body(rank) {
      const opened = await openRounds(rank);
      if (opened === undefined) return;
      await allHear(rank, opened);
      await someoneMissing(rank, opened);
      await allExchange(rank, opened);
      await refusals(rank, opened);
    },
  },
];
