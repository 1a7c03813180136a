/** The dumps of a world's ranks, joined: where each rank was, where ranks differ, and who came late. */
import type { CallKind, DumpReason } from '@ep/collectives/trace';
import type { DumpFile } from './dumps.js';
import { behind, type Finding, failures, lostRanks, mismatches, underWay, waiting } from './findings.js';
import {
  type ClockKind,
  clockOf,
  type GroupTracks,
  groupTracks,
  type RankDump,
  type Timed,
  timedDumps,
} from './tracks.js';
import { callText } from './words.js';

/** A call as reports show it. Times are microseconds since 1970; null: not read, or not yet. */
export interface CallReport {
  readonly group: string;
  readonly kind: CallKind;
  readonly sequence: number;
  readonly call: string;
  readonly state: string;
  readonly code?: string;
  readonly queuedUs: number | null;
  readonly endedUs: number | null;
}

export type RankReport = { readonly rank: number } & (
  | { readonly dump: false }
  | {
      readonly dump: true;
      readonly path: string;
      readonly reason: DumpReason;
      readonly cause?: { readonly code: string; readonly message: string };
      readonly pid: number;
      readonly thread: number;
      readonly host: string;
      readonly dumpedUs: number;
      /** The call in which the rank is. */
      readonly underWay?: CallReport;
      /** The last that it made. */
      readonly last?: CallReport;
      /** The latest, oldest first. */
      readonly calls: readonly CallReport[];
    }
);

/** Of the calls that ended on all members and of which all know when they came: the one to which they came furthest apart. */
export interface Skew {
  readonly group: string;
  readonly sequence: number;
  readonly call: string;
  readonly us: number;
  readonly first: number;
  readonly last: number;
  /** How many calls were compared. */
  readonly calls: number;
}

export interface WorldReport {
  readonly world: string;
  readonly size: number;
  readonly clock: ClockKind;
  readonly ranks: readonly RankReport[];
  readonly findings: readonly Finding[];
  /** One for each group that has such calls. */
  readonly skews: readonly Skew[];
}

/** `files`: dumps of one world, of each rank at most one. `shown`: calls of each rank that the report lists. */
function mergeWorld(files: readonly DumpFile[], shown: number): WorldReport {
  const dumps = files.map((file) => file.dump);
  const clock = clockOf(dumps);
  const size = Math.max(...dumps.map((dump) => dump.size));
  const timed = timedDumps(files, clock);
  const groups = groupTracks(timed);
  return {
    world: dumps[0]!.world,
    size,
    clock,
    ranks: Array.from({ length: size }, (_, rank) => rankReport(rank, timed, shown)),
    findings: [
      ...lostRanks(size, timed, groups),
      ...groups.flatMap(mismatches),
      ...groups.flatMap(behind),
      ...groups.flatMap(waiting),
      ...groups.flatMap(failures),
    ],
    skews: groups.flatMap(skewOf),
  };
}

/** One report for each world. */
export function mergeDumps(files: readonly DumpFile[], shown: number): WorldReport[] {
  const worlds = new Map<string, DumpFile[]>();
  for (const file of files) worlds.set(file.dump.world, [...(worlds.get(file.dump.world) ?? []), file]);
  return [...worlds.values()].map((of) => mergeWorld(of, shown));
}

function callReport({ entry, queuedUs, endedUs }: Timed): CallReport {
  const { group, kind, sequence, state, code } = entry;
  return {
    group,
    kind,
    sequence,
    call: callText(entry),
    state,
    ...(code === undefined ? {} : { code }),
    queuedUs,
    endedUs,
  };
}

function rankReport(rank: number, dumps: readonly RankDump[], shown: number): RankReport {
  const found = dumps.find((one) => one.rank === rank);
  if (found === undefined) return { rank, dump: false };
  const { reason, cause, process } = found.dump;
  const now = underWay(found.calls);
  const last = found.calls.at(-1);
  return {
    rank,
    dump: true,
    path: found.path,
    reason,
    ...(cause === undefined ? {} : { cause }),
    pid: process.pid,
    thread: process.thread,
    host: process.host,
    dumpedUs: found.dumpedUs,
    ...(now === undefined ? {} : { underWay: callReport(now) }),
    ...(last === undefined ? {} : { last: callReport(last) }),
    calls: shown === 0 ? [] : found.calls.slice(-shown).map(callReport),
  };
}

function skewOf({ name, ranks, tracks }: GroupTracks): Skew[] {
  if (ranks.length < 2 || tracks.length !== ranks.length) return [];
  let widest: Omit<Skew, 'calls'> | undefined;
  let calls = 0;
  for (const [sequence, { entry }] of tracks[0]!.calls) {
    const came = tracks.flatMap((track) => {
      const call = track.calls.get(sequence);
      return call?.entry.state === 'done' && call.queuedUs !== null ? [{ rank: track.rank, us: call.queuedUs }] : [];
    });
    if (came.length < tracks.length) continue;
    calls++;
    came.sort((a, b) => a.us - b.us);
    const [first, last] = [came[0]!, came.at(-1)!];
    const us = last.us - first.us;
    if (widest === undefined || us > widest.us)
      widest = { group: name, sequence, call: callText(entry), us, first: first.rank, last: last.rank };
  }
  return widest === undefined ? [] : [{ ...widest, calls }];
}
