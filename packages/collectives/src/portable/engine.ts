/**
 * A group engine over any transport that has puts with a counted signal: no order between puts, no atomics, no access to peers' memory is used.
 *
 * What is guaranteed, beside the contract of engine.ts:
 * - Calls. One runs at a time; each begins with an exchange of what is called, which carries all data of small ones (given.ts) and is then the whole call. Any other ends
 *   when every contributor has told that it has its data. Either way a call that completed on one survivor completes on all. Results are folded in one order
 *   (fold-order.ts) from the same elements everywhere: the same bits on all ranks.
 * - Hosts. Where the placement is even and nobody is lost, large calls go in two levels (two-levels.ts). The rest, and who calls what and has its data, goes in one.
 * - Death. Each loss of members is told by exactly one collective call, the same on all survivors: the first that none of them completed, also if it is
 *   made long after. It ends with EP_PEER_LOST; its outputs are undefined. A loss that is found while survivors still agree is part of the same agreement or of
 *   the next. Outputs for members that are gone are left as they are; a call whose root is gone ends with EP_PEER_LOST. A member that closes its engine has left, and
 *   is lost to later calls in the same way.
 * - A stopped rank is not dead: calls that need it end by their time limit and poison the group, or take it out where the group evicts. A poisoned group still carries messages between
 *   two ranks, and goes on once all who are left have come to a repair. A small call that one rank gives up after it has told all what it gives may end well on others; they hear of it
 *   in the next one.
 * - Who is taken out alive is decided in the store; who has died is not, and neither is what a repair agrees on. Ranks come through the store (admission.ts).
 * - Messages fail alone, on both sides, and never poison. A receive's array is not written after it has ended.
 * - What a lost rank still writes lands in slots that only it had, and is not read.
 * - Bounded memory: `stagingBytes` per group and rank (half to send from, half to receive), however much is in flight; offers that nobody takes cost
 *   an object each.
 */
import { checkInteger, formatRanks, invalid } from '@ep/core';
import { arenaOf } from './arena.js';
import { PortableEngine } from './group.js';
import { HostLevel } from './host-level.js';
import { layOut } from './layout.js';
import { agreeOnSection, readyKey, readyWord } from './meeting.js';
import { type PortableEngineOptions, WHERE } from './options.js';
import { Placement } from './placement.js';

export type { PortableEngineOptions } from './options.js';

function checkMembers({ transport, ranks, rank }: PortableEngineOptions): void {
  checkInteger(rank, 'rank', WHERE, 0, ranks.length - 1);
  for (const member of ranks) checkInteger(member, 'ranks', WHERE, 0, transport.worldSize - 1);
  if (new Set(ranks).size !== ranks.length) {
    throw invalid('ranks', { where: WHERE, expected: 'a list without repetition', found: ranks });
  }
  if (ranks[rank] !== transport.rank) {
    throw invalid('rank', {
      where: WHERE,
      expected: `the place of rank ${transport.rank} of ${transport.name} among ${formatRanks(ranks)}`,
      found: rank,
    });
  }
}

/**
 * Resolves when the members have agreed on a section of the arena, for which only the lowest of them is awaited; peers are connected to in the background. Rejects
 * with `EP_INVALID_ARGUMENT`, `EP_CAPACITY` (no section is free, or too little staging), `EP_TIMEOUT`, or what the transport or the store throw.
 */
export async function openPortableEngine(options: PortableEngineOptions): Promise<PortableEngine> {
  checkMembers(options);
  const { transport, store, name, rank, timeoutMs, signal, stagingBytes, maxGroups, joins = false } = options;
  const arena = await arenaOf({
    transport,
    store: options.arenaStore ?? store,
    timeoutMs,
    signal,
    stagingBytes,
    maxGroups,
    joins,
  });
  layOut(arena.sectionBytes, options.ranks.length);
  await arena.sections.sweep();
  const key = arena.keyOf(name, options.ranks);
  const section = await agreeOnSection(arena, key, options);
  const placement = new Placement(options.hosts ?? options.ranks.map(() => 0), rank);
  // An engine of a host has no empty places.
  const isWhole = section.members === options.ranks.length && !joins;
  const opened = placement.even && isWhole ? await options.openHost?.(placement) : undefined;
  const host = opened && new HostLevel(placement, opened);
  const engine = new PortableEngine({ options, arena, section, key, placement, host });
  // HAZARD: after the constructor, which reads the words that count from now on; nobody writes to this rank before.
  await store.set(readyKey(key, rank), readyWord(transport.succession?.lifeOf(transport.rank) ?? ''));
  engine.begin();
  return engine;
}
