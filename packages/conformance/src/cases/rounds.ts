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
      await refusals(rank, opened);
    },
  },
];
