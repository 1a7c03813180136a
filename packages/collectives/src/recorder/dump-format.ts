/**
 * The file of a flight recorder: what one rank of one world did last, in all of its groups. JSON in UTF-8, one object, `TraceDump`; docs/flight-recorder.md
 * describes it for other programs. `version` grows when a field changes its meaning or goes; a reader of version 1 takes version 1 only.
 */
import { checkInteger, DTYPES, type DType, EpError, invalid } from '@ep/core';
import type { OpKind } from '../engine.js';
import { REDUCE_OPS, type ReduceOpName } from '../reduce-op.js';

export const TRACE_FORMAT = 'ep-flight-recorder';
export const TRACE_VERSION = 1;

/** What made a rank write: a call that timed out or failed, SIGUSR2, or `dump()`. */
export const DUMP_REASONS = ['timeout', 'failure', 'signal', 'call'] as const;
export type DumpReason = (typeof DUMP_REASONS)[number];

/** `queued`: behind an older collective call of the group. `started`: the oldest one, or a message under way. The others have ended. */
export const CALL_STATES = ['queued', 'started', 'done', 'failed', 'aborted'] as const;
export type CallState = (typeof CALL_STATES)[number];

export const CALL_KINDS = [
  'barrier',
  'broadcast',
  'all-reduce',
  'reduce',
  'all-gather',
  'gather',
  'scatter',
  'reduce-scatter',
  'all-to-all',
  'send',
  'recv',
  'membership',
] as const satisfies readonly (OpKind | 'send' | 'recv' | 'membership')[];
export type CallKind = (typeof CALL_KINDS)[number];

/**
 * One call. Times are microseconds of the machine's monotonic clock (CLOCK_MONOTONIC; ranks of one boot share it), null where nothing happened yet or the
 * clock was not read: calls that follow each other within microseconds carry their times only now and then, always on the same sequence numbers.
 */
export interface TraceEntry {
  /** `name` of one of the dump's groups. */
  readonly group: string;
  readonly kind: CallKind;
  /** The method that was called. */
  readonly op: string;
  /** Collectives: the same call has the same number on every rank. Messages: a number of this rank alone. */
  readonly sequence: number;
  readonly dtype: DType;
  /** Of all-to-all, what this rank sends; of a recv, the room. */
  readonly elements: number;
  readonly bytes: number;
  /** Root and peer are ranks of the group; absent where the call has none. `peer` -1: any. */
  readonly root?: number;
  readonly reduceOp?: ReduceOpName;
  readonly peer?: number;
  readonly tag?: number;
  /** Of the group when the call was made; absent where the clock was not read either. */
  readonly epoch?: number;
  readonly state: CallState;
  /** Of the error, when failed or aborted. */
  readonly code?: string;
  readonly queuedUs: number | null;
  readonly startedUs: number | null;
  readonly endedUs: number | null;
}

export interface TraceGroup {
  /** Unique in the dump: the second group of a name, made after the first was destroyed, is `name#2`. */
  readonly name: string;
  /** World ranks of the members; the place in the list is the rank in the group. */
  readonly ranks: readonly number[];
  /** This rank in the group. */
  readonly rank: number;
  /** Of the view when the dump was made. */
  readonly epoch: number;
  /** Ranks of the group that the view has. */
  readonly active: readonly number[];
  readonly closed: boolean;
  /** Highest sequence of a collective call that was made, and that ended; 0: none. They outlive the ring. */
  readonly entered: number;
  readonly ended: number;
}

export interface TraceDump {
  readonly format: typeof TRACE_FORMAT;
  readonly version: typeof TRACE_VERSION;
  readonly reason: DumpReason;
  /** Of the first call that ended badly since the last dump. */
  readonly cause?: { readonly code: string; readonly message: string };
  readonly world: string;
  readonly rank: number;
  readonly size: number;
  readonly process: { readonly pid: number; readonly thread: number; readonly host: string; readonly boot: string };
  /** The same moment by both clocks: when the dump was made. wall = monotonic + (wallUs - monotonicUs). */
  readonly clock: { readonly monotonicUs: number; readonly wallUs: number };
  /** Entries kept at most, and calls made so far. */
  readonly capacity: number;
  readonly recorded: number;
  readonly groups: readonly TraceGroup[];
  /** Oldest first, in the order of the calls. */
  readonly entries: readonly TraceEntry[];
}

const mostEntries = 2 ** 20;
const mostGroups = 2 ** 16;
const mostRanks = 2 ** 16;

type Fields = Readonly<Record<string, unknown>>;

/** Checks fields of one object: every message says which. */
class Reader {
  readonly #fields: Fields;
  readonly #at: string;
  readonly #where: string;

  constructor(value: unknown, at: string, where: string) {
    if (typeof value !== 'object' || value === null || Array.isArray(value))
      throw invalid(at === '' ? 'the file' : at, { where, expected: 'a JSON object', found: value });
    this.#fields = value as Fields;
    this.#at = at === '' ? '' : `${at}.`;
    this.#where = where;
  }

  has(name: string): boolean {
    return Object.hasOwn(this.#fields, name);
  }

  value(name: string): unknown {
    return this.has(name) ? this.#fields[name] : undefined;
  }

  integer(name: string, min: number, max?: number): number {
    return checkInteger(this.value(name), this.#at + name, this.#where, min, max);
  }

  text(name: string): string {
    const value = this.value(name);
    return typeof value === 'string' ? value : this.refuse(name, 'a string');
  }

  flag(name: string): boolean {
    const value = this.value(name);
    return typeof value === 'boolean' ? value : this.refuse(name, 'true or false');
  }

  oneOf<T extends string>(name: string, values: readonly T[]): T {
    const value = this.value(name);
    return values.find((one) => one === value) ?? this.refuse(name, `one of ${values.join(', ')}`);
  }

  time(name: string): number | null {
    const value = this.value(name);
    if (value === null) return null;
    return typeof value === 'number' && value >= 0 && value <= Number.MAX_SAFE_INTEGER
      ? value
      : this.refuse(name, 'microseconds or null');
  }

  list(name: string, most: number): readonly unknown[] {
    const value = this.value(name);
    if (Array.isArray(value) && value.length <= most) return value;
    return this.refuse(name, `a list of at most ${most}`);
  }

  ranks(name: string, below: number): number[] {
    const list = this.list(name, mostRanks);
    const ranks = list.map((rank, i) => checkInteger(rank, `${this.#at}${name}[${i}]`, this.#where, 0, below - 1));
    return new Set(ranks).size === ranks.length ? ranks : this.refuse(name, 'ranks that differ');
  }

  object(name: string): Reader {
    return new Reader(this.value(name), this.#at + name, this.#where);
  }

  refuse(name: string, expected: string): never {
    throw invalid(this.#at + name, { where: this.#where, expected, found: this.value(name) });
  }
}

function readGroup(value: unknown, at: string, where: string, dump: { rank: number; size: number }): TraceGroup {
  const fields = new Reader(value, at, where);
  const ranks = fields.ranks('ranks', dump.size);
  const rank = fields.integer('rank', 0, Math.max(0, ranks.length - 1));
  if (ranks[rank] !== dump.rank) fields.refuse('rank', `the place of world rank ${dump.rank} in ranks`);
  const entered = fields.integer('entered', 0);
  return {
    name: fields.text('name'),
    ranks,
    rank,
    epoch: fields.integer('epoch', 0),
    active: fields.ranks('active', ranks.length),
    closed: fields.flag('closed'),
    entered,
    ended: fields.integer('ended', 0, entered),
  };
}

function readEntry(value: unknown, at: string, where: string, groups: ReadonlyMap<string, TraceGroup>): TraceEntry {
  const fields = new Reader(value, at, where);
  const group = groups.get(fields.text('group')) ?? fields.refuse('group', "a name of the dump's groups");
  const kind = fields.oneOf('kind', CALL_KINDS);
  const message = kind === 'send' || kind === 'recv';
  const sequence = fields.integer('sequence', 1);
  if (!message && sequence > group.entered) fields.refuse('sequence', `at most entered of its group, ${group.entered}`);
  const last = group.ranks.length - 1;
  return {
    group: group.name,
    kind,
    op: fields.text('op'),
    sequence,
    dtype: fields.oneOf('dtype', DTYPES),
    elements: fields.integer('elements', 0),
    bytes: fields.integer('bytes', 0),
    ...(fields.has('root') ? { root: fields.integer('root', 0, last) } : {}),
    ...(fields.has('reduceOp') ? { reduceOp: fields.oneOf('reduceOp', REDUCE_OPS) } : {}),
    ...(message ? { peer: fields.integer('peer', -1, last), tag: fields.integer('tag', Number.MIN_SAFE_INTEGER) } : {}),
    ...(fields.has('epoch') ? { epoch: fields.integer('epoch', 0) } : {}),
    state: fields.oneOf('state', CALL_STATES),
    ...(fields.has('code') ? { code: fields.text('code') } : {}),
    queuedUs: fields.time('queuedUs'),
    startedUs: fields.time('startedUs'),
    endedUs: fields.time('endedUs'),
  };
}

/**
 * The dump that `value` (parsed JSON) is. Throws `EP_INVALID_ARGUMENT` naming `where`, the field, what was expected and found. Fields that version 1 does not
 * have are left out.
 */
export function readTraceDump(value: unknown, where: string): TraceDump {
  const fields = new Reader(value, '', where);
  if (fields.value('format') !== TRACE_FORMAT)
    fields.refuse('format', `"${TRACE_FORMAT}": a dump of a flight recorder`);
  if (fields.value('version') !== TRACE_VERSION) {
    throw new EpError(
      'EP_INVALID_ARGUMENT',
      `${where}: a dump of version ${JSON.stringify(fields.value('version'))?.slice(0, 40)}; this program reads version ${TRACE_VERSION}: use the ep of the release that wrote it`,
      { context: { where, expected: TRACE_VERSION } },
    );
  }
  const size = fields.integer('size', 1, mostRanks);
  const rank = fields.integer('rank', 0, size - 1);
  const groups = new Map<string, TraceGroup>();
  for (const [i, item] of fields.list('groups', mostGroups).entries()) {
    const group = readGroup(item, `groups[${i}]`, where, { rank, size });
    if (groups.has(group.name))
      throw invalid(`groups[${i}].name`, { where, expected: 'a name that no other group has', found: group.name });
    groups.set(group.name, group);
  }
  const capacity = fields.integer('capacity', 1, mostEntries);
  const entries = fields.list('entries', capacity).map((item, i) => readEntry(item, `entries[${i}]`, where, groups));
  const from = fields.object('process');
  const clock = fields.object('clock');
  const cause = fields.has('cause') ? fields.object('cause') : undefined;
  return {
    format: TRACE_FORMAT,
    version: TRACE_VERSION,
    reason: fields.oneOf('reason', DUMP_REASONS),
    ...(cause === undefined ? {} : { cause: { code: cause.text('code'), message: cause.text('message') } }),
    world: fields.text('world'),
    rank,
    size,
    process: {
      pid: from.integer('pid', 0),
      thread: from.integer('thread', 0),
      host: from.text('host'),
      boot: from.text('boot'),
    },
    clock: { monotonicUs: clock.integer('monotonicUs', 0), wallUs: clock.integer('wallUs', 0) },
    capacity,
    recorded: fields.integer('recorded', entries.length),
    groups: [...groups.values()],
    entries,
  };
}
