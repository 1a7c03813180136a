/**
 * The flight recorder of one rank: its last 1 000 calls in all groups of a world, at a cost that does not show beside a call of half a microsecond.
 *
 * Where EP_TRACE_DIR names a folder, the rank dumps into it when a call times out or fails, and when the process gets SIGUSR2; `dump()` does so at any time.
 * A dump that nobody called for never throws and never fails a call: what keeps it from being written becomes a warning of the process, once.
 */
import { hostname } from 'node:os';
import { invalid } from '@ep/core';
import type { GroupView } from '../engine.js';
import { DumpFiles, traceFolder } from './dump-file.js';
import {
  type DumpReason,
  TRACE_FORMAT,
  TRACE_VERSION,
  type TraceDump,
  type TraceEntry,
  type TraceGroup,
} from './dump-format.js';
import { bootId, monotonicUs, threadOfProcess, wallUs } from './machine-clock.js';
import { atExit, join, leave } from './registry.js';
import { CallRing, codeOf, NO_TOKEN, type Progress, RING_CALLS } from './ring.js';
import type { CallEntry, CallOutcome, CallRecorder } from './types.js';

/** Least time between two dumps that failures cause: a burst of failures is one dump that has them all. */
const DUMP_GAP_MS = 1000;

/** Closed groups that no call of the ring names are kept up to this many, for how far they had come. */
const KEPT_GROUPS = 256;

/** What a group tells of itself, once. */
export interface RecordedGroup {
  readonly name: string;
  /** World ranks of the members, in the order of the group. */
  readonly ranks: readonly number[];
  /** This rank in the group. */
  readonly rank: number;
  /** Asked when a dump is made, and now and then when a call is. */
  readonly view: () => GroupView;
}

interface GroupState extends Progress {
  readonly source: RecordedGroup;
  /** When it was destroyed. */
  lastView: GroupView | undefined;
}

export interface FlightRecorderOptions {
  /** Name of the world, the same on all its ranks. */
  readonly world: string;
  readonly rank: number;
  readonly size: number;
  /** Where dumps go that nobody called for; undefined: nowhere. Default: EP_TRACE_DIR. */
  readonly folder?: string | undefined;
}

export class FlightRecorder implements CallRecorder {
  readonly #options: FlightRecorderOptions;
  readonly #files: DumpFiles;
  readonly #ring = new CallRing();
  /** All that dumps tell of, by their names there. */
  readonly #groups = new Map<string, GroupState>();
  /** By the names that groups have among themselves: that of a closed group may be another's by now. */
  readonly #open = new Map<string, GroupState>();
  #lastGroup: GroupState | undefined;
  #cause: { readonly reason: 'timeout' | 'failure'; readonly code: string; readonly message: string } | undefined;
  #dumpDue: (() => void) | undefined;
  #dumpedAt = Number.NEGATIVE_INFINITY;
  #warned = false;

  constructor(options: FlightRecorderOptions) {
    this.#options = options;
    this.#files = new DumpFiles(options, 'folder' in options ? options.folder : traceFolder());
  }

  /** Where dumps go that nobody called for. */
  get folder(): string | undefined {
    return this.#files.folder;
  }

  /**
   * A group of this rank, before its first call: calls of groups that are not open are not recorded. The returned function says that it was destroyed. From
   * the first group to the last the rank listens for SIGUSR2. Throws `EP_INVALID_ARGUMENT` if an open group has the name.
   */
  openGroup(source: RecordedGroup): () => void {
    if (this.#open.has(source.name))
      throw invalid('name', { where: 'flight recorder', expected: 'one that no open group has', found: source.name });
    this.#forgetGroups();
    let name = source.name;
    for (let n = 2; this.#groups.has(name); n++) name = `${source.name}#${n}`;
    const group: GroupState = {
      name,
      source,
      epoch: () => viewOf(group).epoch,
      entered: 0,
      ended: 0,
      lastView: undefined,
    };
    this.#groups.set(name, group);
    this.#open.set(source.name, group);
    if (this.folder !== undefined) join(this);
    return () => {
      if (group.lastView !== undefined) return;
      group.lastView = viewOf(group);
      this.#open.delete(source.name);
      this.#lastGroup = undefined;
      if (this.#open.size > 0) return;
      this.#dumpDue?.();
      leave(this);
    };
  }

  begin(entry: CallEntry): number {
    let group = this.#lastGroup;
    if (group === undefined || entry.group !== group.source.name) {
      group = this.#open.get(entry.group);
      if (group === undefined) return NO_TOKEN;
      this.#lastGroup = group;
    }
    return this.#ring.begin(entry, group);
  }

  end(token: number, outcome: CallOutcome, error?: unknown): void {
    this.#ring.end(token, outcome, error);
    if (outcome !== 'done') this.#endedBadly(outcome, error);
  }

  /** The calls kept, of all groups, oldest first. */
  entries(): TraceEntry[] {
    return this.#ring.entries();
  }

  /**
   * Writes a dump and returns its path: into `folder`, or that of EP_TRACE_DIR. Throws `EP_INVALID_ARGUMENT` if there is neither, `EP_SYSTEM` if it cannot be
   * written. A rank has at most 8 files in a folder: beyond that, the newest takes the place of the one before.
   */
  dump(folder?: string): string {
    return this.#files.write(this.#describe('call'), folder);
  }

  /** A dump that nobody called for: does nothing without a folder, and does not throw. */
  dumpFor(reason: Exclude<DumpReason, 'call'>): void {
    if (this.folder === undefined) return;
    try {
      this.#files.write(this.#describe(reason));
    } catch (error) {
      if (this.#warned) return;
      this.#warned = true;
      process.emitWarning(`flight recorder of rank ${this.#options.rank}: ${(error as Error).message}`, 'EpWarning');
    }
  }

  #forgetGroups(): void {
    if (this.#groups.size < KEPT_GROUPS) return;
    const named = this.#ring.groups();
    for (const [name, group] of this.#groups)
      if (group.lastView !== undefined && !named.has(group)) this.#groups.delete(name);
  }

  #describe(reason: DumpReason): TraceDump {
    const { world, rank, size } = this.#options;
    const groups = [...this.#groups.values()].map(describeGroup);
    return {
      format: TRACE_FORMAT,
      version: TRACE_VERSION,
      reason,
      ...(this.#cause === undefined ? {} : { cause: { code: this.#cause.code, message: this.#cause.message } }),
      world,
      rank,
      size: groups.reduce((most, group) => group.ranks.reduce((a, b) => Math.max(a, b + 1), most), size),
      process: { pid: process.pid, thread: threadOfProcess, host: hostname(), boot: bootId() },
      clock: { monotonicUs: Math.round(monotonicUs(performance.now())), wallUs: wallUs() },
      capacity: RING_CALLS,
      recorded: this.#ring.recorded,
      groups,
      entries: this.entries(),
    };
  }

  /**
   * Dumps soon, not now: calls that fail together come together. A rank that ends before then dumps as it ends. That a group is poisoned is news only to
   * a rank that has not dumped: what poisoned it was elsewhere.
   */
  #endedBadly(outcome: CallOutcome, error: unknown): void {
    if (this.folder === undefined) return;
    const code = codeOf(error);
    const late = code === 'EP_TIMEOUT' || code === 'TimeoutError';
    if (code === 'EP_CLOSED' || (outcome === 'aborted' && !late)) return;
    if (code === 'EP_POISONED' && this.#dumpedAt > 0) return;
    const message = error instanceof Error ? error.message : String(error);
    this.#cause ??= { reason: late ? 'timeout' : 'failure', code, message };
    if (this.#dumpDue !== undefined) return;
    const dump = (): void => {
      this.#dumpDue = undefined;
      clearTimeout(timer);
      notAtExit();
      this.#dumpedAt = performance.now();
      this.dumpFor(this.#cause?.reason ?? 'failure');
      this.#cause = undefined;
    };
    const timer = setTimeout(dump, Math.max(0, this.#dumpedAt + DUMP_GAP_MS - performance.now()));
    // It must not keep alive a process that is done: that dumps as it ends.
    timer.unref();
    const notAtExit = atExit(dump);
    this.#dumpDue = dump;
  }
}

function viewOf(group: GroupState): GroupView {
  if (group.lastView !== undefined) return group.lastView;
  try {
    return group.source.view();
  } catch {
    // A group that is coming down has no view; what it did is wanted all the same.
    return { epoch: 0, active: [] };
  }
}

function describeGroup(group: GroupState): TraceGroup {
  const { epoch, active } = viewOf(group);
  const ranks = [...group.source.ranks];
  // A group that grows is that of the world, in which each rank has its own number.
  const size = Math.max(group.source.rank, ...active) + 1;
  while (ranks.length < size) ranks.push(ranks.length);
  return {
    name: group.name,
    ranks,
    rank: group.source.rank,
    epoch,
    active: [...active],
    closed: group.lastView !== undefined,
    entered: group.entered,
    ended: group.ended,
  };
}
