/** Where ranks differ. Every finding says so in words, and holds the same as data. Ranks are world ranks; root and peer in a call are ranks of its group. */
import type { TraceEntry } from '@ep/collectives/trace';
import { type GroupTracks, isMessage, type RankDump, type Timed, type Track } from './tracks.js';
import { callText, countText, nameText, ranksText, stateText } from './words.js';

/** The same call or state of several ranks. */
export interface Camp {
  readonly ranks: readonly number[];
  readonly text: string;
}

export type Finding = { readonly text: string } & (
  | { readonly kind: 'missing'; readonly ranks: readonly number[] }
  | { readonly kind: 'gone'; readonly rank: number }
  | { readonly kind: 'members'; readonly group: string; readonly camps: readonly Camp[] }
  | { readonly kind: 'mismatch'; readonly group: string; readonly sequence: number; readonly camps: readonly Camp[] }
  | {
      readonly kind: 'behind';
      readonly group: string;
      readonly rank: number;
      readonly entered: number;
      readonly by: number;
    }
  | { readonly kind: 'waiting'; readonly group: string; readonly rank: number; readonly call: string }
  | { readonly kind: 'failed'; readonly group: string; readonly sequence: number; readonly camps: readonly Camp[] }
);

/** Those of most ranks first. */
function campsOf<T>(
  of: readonly T[],
  rank: (one: T) => number,
  key: (one: T) => string,
  text: (one: T) => string,
): Camp[] {
  const camps = new Map<string, { ranks: number[]; text: string }>();
  for (const one of of) {
    const camp = camps.get(key(one));
    if (camp === undefined) camps.set(key(one), { ranks: [rank(one)], text: text(one) });
    else camp.ranks.push(rank(one));
  }
  return [...camps.values()].sort((a, b) => b.ranks.length - a.ranks.length);
}

const callName = (sequence: number, group: string): string => `call ${sequence} of ${nameText(group)}`;

/** What a call must have in common with the same call of other ranks. All-to-all may send other lengths from each. */
function signature({ kind, dtype, elements, reduceOp, root }: TraceEntry): string {
  return [kind, kind === 'barrier' ? '' : dtype, kind === 'all-to-all' ? '' : elements, reduceOp, root].join(' ');
}

/** Ranks without a dump, and ranks that the others go on without. */
export function lostRanks(size: number, dumps: readonly RankDump[], groups: readonly GroupTracks[]): Finding[] {
  const findings: Finding[] = [];
  const missing: number[] = [];
  for (let rank = 0; rank < size; rank++) {
    const dump = dumps.find((one) => one.rank === rank);
    const without = groups.flatMap((group) => {
      const views = group.tracks.flatMap((track) => (track.group === undefined ? [] : [track.group]));
      const view = views.reduce<(typeof views)[number] | undefined>(
        (newest, one) => (newest === undefined || one.epoch > newest.epoch ? one : newest),
        undefined,
      );
      // A view without anybody is of a group that was coming down.
      const gone = view !== undefined && view.active.length > 0 && view.ranks.includes(rank);
      return gone && !view.active.includes(view.ranks.indexOf(rank))
        ? [`${nameText(group.name)} (epoch ${view.epoch})`]
        : [];
    });
    const left = dump === undefined ? 'it left no dump' : `its dump was made by ${dump.dump.reason}`;
    if (without.length > 0) {
      findings.push({
        kind: 'gone',
        rank,
        text: `rank ${rank} died or left: it is not among the active ranks of ${without.join(', ')}; ${left}`,
      });
    } else if (dump === undefined) missing.push(rank);
  }
  if (missing.length === 0) return findings;
  const [its, loop] = missing.length === 1 ? ['it was', 'its event loop does'] : ['they were', 'their event loops do'];
  const text = `${ranksText(missing)} left no dump: ${its} killed, ${loop} not turn, or the files are elsewhere`;
  return [...findings, { kind: 'missing', ranks: missing, text }];
}

/** The first call of a group that ranks made differently. Later ones follow from it. */
export function mismatches({ name, tracks }: GroupTracks): Finding[] {
  const made = tracks.filter((track) => track.group !== undefined);
  const lists = campsOf(
    made,
    (track) => track.rank,
    (track) => track.group!.ranks.join(),
    (track) => `[${track.group!.ranks.join(', ')}]`,
  );
  if (lists.length > 1) {
    const camps = lists.map((camp) => `${camp.text} on ${ranksText(camp.ranks)}`);
    return [
      {
        kind: 'members',
        group: name,
        camps: lists,
        text: `${nameText(name)} is not one group: it is ${camps.join(', ')}`,
      },
    ];
  }
  const sequences = new Set(made.flatMap((track) => [...track.calls.keys()]));
  for (const sequence of [...sequences].sort((a, b) => a - b)) {
    const camps = campsOf(
      made.filter((track) => track.calls.has(sequence)),
      (track) => track.rank,
      (track) => signature(track.calls.get(sequence)!.entry),
      (track) => callText(track.calls.get(sequence)!.entry),
    );
    if (camps.length < 2) continue;
    const [most, ...odd] = camps as [Camp, ...Camp[]];
    const called = ({ ranks, text }: Camp): string => `${ranksText(ranks)} called ${text}`;
    const clear = odd.every((camp) => camp.ranks.length < most.ranks.length);
    const text = clear ? `${odd.map(called).join(' and ')} where ${called(most)}` : camps.map(called).join(', ');
    return [{ kind: 'mismatch', group: name, sequence, camps, text: `${callName(sequence, name)} differs: ${text}` }];
  }
  return [];
}

/** Highest call that `track` had made by `us`, as far as is certain. */
function enteredBy(track: Track, us: number): number {
  let entered = 0;
  for (const [sequence, call] of track.calls) if (call.madeByUs <= us && sequence > entered) entered = sequence;
  const oldest = track.of.calls[0];
  // All calls of this group may have left the ring: they are older than whatever is in it.
  if (track.calls.size === 0 && oldest !== undefined && oldest.madeByUs <= us) return track.group?.entered ?? 0;
  return entered;
}

/** The collective call or message in which a rank is, the oldest first. */
export const underWay = (calls: readonly Timed[]): Timed | undefined =>
  calls.find(({ entry }) => entry.state === 'started' && !isMessage(entry)) ??
  calls.find(({ entry }) => entry.state === 'started');

/** Ranks that had not made calls which others had made before they dumped. */
export function behind({ name, tracks }: GroupTracks): Finding[] {
  return tracks.flatMap((track): Finding[] => {
    const entered = track.group?.entered ?? 0;
    const by = Math.max(0, ...tracks.map((other) => enteredBy(other, track.of.dumpedUs))) - entered;
    if (by <= 0) return [];
    const missed = entered + 1;
    const others = tracks.filter((other) => (other.group?.entered ?? 0) >= missed);
    const call = others.map((other) => other.calls.get(missed)).find((one) => one !== undefined);
    const what = call === undefined ? '' : `, ${callText(call.entry)},`;
    const last = track.calls.get(entered);
    const where =
      track.group === undefined
        ? 'it has not made the group'
        : entered === 0
          ? 'it has made no call there'
          : `its last there was call ${entered}${last === undefined ? '' : `, ${callText(last.entry)}, ${stateText(last.entry)}`}`;
    const now = underWay(track.of.calls.filter(({ entry }) => entry.group !== name));
    const elsewhere =
      now === undefined ? '' : `; it is in ${callName(now.entry.sequence, now.entry.group)}, ${callText(now.entry)}`;
    const destroyed = track.group?.closed === true ? '; it has destroyed the group' : '';
    return [
      {
        kind: 'behind',
        group: name,
        rank: track.rank,
        entered,
        by,
        text: `rank ${track.rank} never entered ${callName(missed, name)}${what} as ${ranksText(others.map((other) => other.rank))} did: it is ${countText(by, 'call')} behind; ${where}${elsewhere}${destroyed}`,
      },
    ];
  });
}

/** Messages under way whose other rank had nothing to match when it dumped, later. */
export function waiting({ name, tracks }: GroupTracks): Finding[] {
  return tracks.flatMap((track) =>
    track.messages.flatMap(({ entry, madeByUs }): Finding[] => {
      if (entry.state !== 'started') return [];
      const members = track.group!.ranks;
      const peers = tracks.filter(
        (other) =>
          other.group !== undefined && (entry.peer === -1 ? other !== track : other.rank === members[entry.peer!]),
      );
      const matches = (other: Track): boolean =>
        other.of.dumpedUs < madeByUs ||
        other.messages.some(
          (one) =>
            one.entry.state === 'started' &&
            one.entry.kind !== entry.kind &&
            one.entry.tag === entry.tag &&
            (one.entry.peer === -1 || members[one.entry.peer!] === track.rank),
        );
      const everyone = entry.peer === -1 ? peers.length === members.length - 1 : peers.length === 1;
      if (!everyone || peers.some(matches)) return [];
      const what = entry.kind === 'send' ? 'recv' : 'send';
      const who = entry.peer === -1 ? 'no other rank has' : `rank ${members[entry.peer!]} has no`;
      const call = callText(entry);
      return [
        {
          kind: 'waiting',
          group: name,
          rank: track.rank,
          call,
          text: `rank ${track.rank} waits in ${call} of ${nameText(name)}: ${who}${entry.peer === -1 ? ` a ${what}` : ` ${what}`} for it with tag ${entry.tag}`,
        },
      ];
    }),
  );
}

const isBad = (track: Track, { state }: TraceEntry): boolean =>
  // Closing a group cuts off what is under way.
  state === 'failed' || (state === 'aborted' && track.group?.closed !== true);

/** The first call of a group that failed, and how it ended on each rank; what fails because the group is poisoned follows from it. */
export function failures({ name, tracks }: GroupTracks): Finding[] {
  const bad = tracks.flatMap((track) =>
    [...track.calls.values()].filter(({ entry }) => isBad(track, entry)).map(({ entry }) => entry),
  );
  const causes = bad.filter((entry) => entry.code !== 'EP_POISONED');
  const sequence = Math.min(...(causes.length > 0 ? causes : bad).map((entry) => entry.sequence));
  const findings = tracks.flatMap((track): Finding[] => {
    const entry = track.messages.map((one) => one.entry).find((one) => isBad(track, one) && one.code !== 'EP_POISONED');
    if (entry === undefined) return [];
    const camps = [{ ranks: [track.rank], text: stateText(entry) }];
    const text = `${callText(entry)} of rank ${track.rank} in ${nameText(name)} ${stateText(entry)}`;
    return [{ kind: 'failed', group: name, sequence: entry.sequence, camps, text }];
  });
  if (!Number.isFinite(sequence)) return findings;
  const made = tracks.filter((track) => track.calls.has(sequence));
  const entryOf = (track: Track): TraceEntry => track.calls.get(sequence)!.entry;
  const camps = campsOf(
    made,
    (track) => track.rank,
    (track) => stateText(entryOf(track)),
    (track) => stateText(entryOf(track)),
  );
  const ends = camps.map(({ ranks, text }) => `${text} on ${ranksText(ranks)}`).join(', ');
  const what = callText(bad.find((entry) => entry.sequence === sequence)!);
  const text = `${callName(sequence, name)}, ${what}, ${ends}`;
  return [{ kind: 'failed', group: name, sequence, camps, text }, ...findings];
}
