/** What each rank did in each group, on one clock. */
import type { TraceDump, TraceEntry, TraceGroup } from '@ep/collectives/trace';
import type { DumpFile } from './dumps.js';

/** `machine`: all dumps are of one boot of one machine, whose clock they share. `wall`: the clocks of several machines, as they are set. */
export type ClockKind = 'machine' | 'wall';

/** Microseconds since 1970 by the clock of the machine, or of each machine. */
export interface Timed {
  readonly entry: TraceEntry;
  readonly queuedUs: number | null;
  readonly endedUs: number | null;
  /** When the call had been made at the latest: where the clock was not read, when a later one was, or the dump. */
  readonly madeByUs: number;
}

export interface RankDump extends DumpFile {
  readonly rank: number;
  readonly dumpedUs: number;
  readonly calls: readonly Timed[];
}

/** A member of a group, by its own dump. */
export interface Track {
  readonly rank: number;
  readonly of: RankDump;
  /** Undefined: this rank has not made the group. */
  readonly group: TraceGroup | undefined;
  /** Collective calls by sequence; those that the ring has lost are not there. */
  readonly calls: ReadonlyMap<number, Timed>;
  readonly messages: readonly Timed[];
}

export interface GroupTracks {
  readonly name: string;
  /** World ranks, as the first dump has them. */
  readonly ranks: readonly number[];
  /** Of the members that left a dump, by rank. */
  readonly tracks: readonly Track[];
}

export const isMessage = (entry: TraceEntry): boolean => entry.kind === 'send' || entry.kind === 'recv';

/** Groups that a rank never forgets: docs/flight-recorder.md. */
const rememberedGroups = 256;

export function clockOf(dumps: readonly TraceDump[]): ClockKind {
  const boots = new Set(dumps.map((dump) => dump.process.boot));
  return boots.size === 1 && !boots.has('') ? 'machine' : 'wall';
}

/** Puts dumps on one clock. On one machine they have one; what its wall clock says is taken from the first. */
export function timedDumps(files: readonly DumpFile[], clock: ClockKind): RankDump[] {
  const first = files[0]!.dump.clock;
  return files.map(({ path, dump }) => {
    const own = clock === 'machine' ? first : dump.clock;
    const shift = own.wallUs - own.monotonicUs;
    const on = (us: number | null): number | null => (us === null ? null : us + shift);
    const dumpedUs = dump.clock.monotonicUs + shift;
    const calls: Timed[] = [];
    let madeByUs = dumpedUs;
    for (const entry of [...dump.entries].reverse()) {
      // The clock may have been read for the end of a call and not for its beginning.
      madeByUs = Math.min(madeByUs, on(entry.queuedUs ?? entry.endedUs) ?? madeByUs);
      calls.push({ entry, queuedUs: on(entry.queuedUs), endedUs: on(entry.endedUs), madeByUs });
    }
    return { path, dump, rank: dump.rank, dumpedUs, calls: calls.reverse() };
  });
}

/** All groups of all dumps, in the order in which they appear. */
export function groupTracks(dumps: readonly RankDump[]): GroupTracks[] {
  const members = new Map<string, readonly number[]>();
  for (const { dump } of dumps)
    for (const group of dump.groups) if (!members.has(group.name)) members.set(group.name, group.ranks);
  return [...members].map(([name, ranks]) => ({
    name,
    ranks,
    tracks: dumps.flatMap((of) => {
      const group = of.dump.groups.find((one) => one.name === name);
      const forgotten = group === undefined && of.dump.groups.length >= rememberedGroups;
      if ((group === undefined && !ranks.includes(of.rank)) || forgotten) return [];
      const own = of.calls.filter(({ entry }) => entry.group === name);
      return {
        rank: of.rank,
        of,
        group,
        calls: new Map(own.filter(({ entry }) => !isMessage(entry)).map((call) => [call.entry.sequence, call])),
        messages: own.filter(({ entry }) => isMessage(entry)),
      };
    }),
  }));
}
