/** The last calls of a rank, in rows that are made once: recording a call allocates nothing. */
import { isEpError } from '@ep/core';
import type { CallKind, TraceEntry } from './dump-format.js';
import { monotonicUs } from './machine-clock.js';
import type { CallEntry, CallOutcome } from './types.js';

/** Calls kept. */
export const RING_CALLS = 1000;

/** Bits of a token that are the row; above them the turn of the ring, so that the end of a call that was overwritten finds nothing. */
const ROW_BITS = 10;
const ROW_MASK = 2 ** ROW_BITS - 1;
/** Tokens stay small integers: turns wrap where a call that is still under way would have seen a thousand million others. */
const TURN_MASK = 2 ** 20 - 1;
/** Of a call that is not recorded: a row that the ring does not have. */
export const NO_TOKEN = ROW_MASK;

/**
 * Reading the clock takes 25 to 90 ns, more than all the rest of recording a call. A reading costs one credit; one comes back every 10 us, so that the
 * clock has at most 1 % of the time. Calls slower than that all get their times. In a loop of faster ones only those of certain sequence numbers ask, on
 * all ranks the same: a merge compares when ranks came to one call. What is asked of the engine is asked as rarely.
 */
const MOST_CREDITS = 64;
const CREDITS_PER_MS = 100;
const isTimed = (sequence: number): boolean => (sequence & 15) === 1;

/** How far a group has come in collective calls. Kept for each group, however many calls the ring has lost. */
export interface Progress {
  /** As in dumps. */
  readonly name: string;
  /** Of the view now. Asked as often as the clock. */
  readonly epoch: () => number;
  entered: number;
  ended: number;
}

interface Row {
  token: number;
  group: Progress;
  kind: CallKind;
  op: string;
  dtype: CallEntry['dtype'];
  reduceOp: CallEntry['reduceOp'];
  code: string;
  state: 'pending' | CallOutcome;
  root: number;
  peer: number;
  tag: number;
  sequence: number;
  elements: number;
  bytes: number;
  epoch: number;
  /** By `performance.now()`; NaN: not read. */
  queued: number;
  ended: number;
}

const isMessage = (kind: CallKind): boolean => kind === 'send' || kind === 'recv';

export class CallRing {
  readonly #rows: readonly Row[];
  #next = 0;
  #turns = 0;
  #turn = 0;
  #credits = MOST_CREDITS;
  #clockRead = 0;

  constructor() {
    const none: Progress = { name: '', epoch: () => -1, entered: 0, ended: 0 };
    this.#rows = Array.from({ length: RING_CALLS }, () => ({
      token: -1,
      group: none,
      kind: 'barrier',
      op: '',
      dtype: 'u8',
      reduceOp: '',
      code: '',
      state: 'pending',
      root: -1,
      peer: -1,
      tag: -1,
      sequence: 0,
      elements: 0,
      bytes: 0,
      epoch: -1,
      queued: Number.NaN,
      ended: Number.NaN,
    }));
  }

  /** Calls that were ever recorded. */
  get recorded(): number {
    return this.#turns * RING_CALLS + this.#next;
  }

  begin(entry: CallEntry, group: Progress): number {
    const next = this.#next;
    const row = this.#rows[next]!;
    const sequence = entry.sequence;
    const kind = entry.kind;
    if (sequence > group.entered && !isMessage(kind)) group.entered = sequence;
    row.group = group;
    row.kind = kind;
    row.op = entry.op;
    row.dtype = entry.dtype;
    row.reduceOp = entry.reduceOp;
    row.state = 'pending';
    row.root = entry.root;
    row.peer = entry.peer;
    row.tag = entry.tag;
    row.sequence = sequence;
    row.elements = entry.elements;
    row.bytes = entry.bytes;
    if (this.#credits >= 1 || isTimed(sequence)) {
      row.queued = this.#time();
      row.epoch = group.epoch();
    } else {
      row.queued = Number.NaN;
      row.epoch = -1;
    }
    row.ended = Number.NaN;
    const token = (this.#turn << ROW_BITS) | next;
    row.token = token;
    if (next + 1 < RING_CALLS) this.#next = next + 1;
    else {
      this.#next = 0;
      this.#turns++;
      this.#turn = this.#turns & TURN_MASK;
    }
    return token;
  }

  end(token: number, outcome: CallOutcome, error: unknown): void {
    const row = this.#rows[token & ROW_MASK];
    if (row === undefined || row.token !== token) return;
    const group = row.group;
    if (row.sequence > group.ended && !isMessage(row.kind)) group.ended = row.sequence;
    row.state = outcome;
    if (outcome !== 'done') row.code = codeOf(error);
    if (this.#credits >= 1 || outcome !== 'done' || isTimed(row.sequence)) row.ended = this.#time();
  }

  /** The groups of the calls kept. */
  groups(): Set<Progress> {
    return new Set(this.#kept().map((row) => row.group));
  }

  /** The calls kept, oldest first. */
  entries(): TraceEntry[] {
    const before = new Map<Progress, Row>();
    return this.#kept().map((row) => {
      const entry = entryOf(row, before.get(row.group));
      if (!isMessage(row.kind)) before.set(row.group, row);
      return entry;
    });
  }

  #kept(): Row[] {
    const newest = this.#rows.slice(0, this.#next);
    return this.#turns === 0 ? newest : [...this.#rows.slice(this.#next), ...newest];
  }

  #time(): number {
    const now = performance.now();
    const credits = this.#credits + (now - this.#clockRead) * CREDITS_PER_MS - 1;
    this.#credits = Math.min(MOST_CREDITS, Math.max(0, credits));
    this.#clockRead = now;
    return now;
  }
}

/** `before`: the collective call of the group that was made before this one, if the ring has it. */
function entryOf(row: Row, before: Row | undefined): TraceEntry {
  const { group, kind, sequence } = row;
  const message = isMessage(kind);
  const started = row.state !== 'pending' || message || sequence <= group.ended + 1;
  return {
    group: group.name,
    kind,
    op: row.op,
    sequence,
    dtype: row.dtype,
    elements: row.elements,
    bytes: row.bytes,
    ...(row.root < 0 ? {} : { root: row.root }),
    ...(row.reduceOp === '' ? {} : { reduceOp: row.reduceOp }),
    ...(message ? { peer: row.peer, tag: row.tag } : {}),
    ...(row.epoch < 0 ? {} : { epoch: row.epoch }),
    state: row.state !== 'pending' ? row.state : started ? 'started' : 'queued',
    ...(row.state === 'failed' || row.state === 'aborted' ? { code: row.code } : {}),
    queuedUs: timeOf(row.queued),
    startedUs: started ? timeOf(message ? row.queued : startOf(row, before)) : null,
    endedUs: timeOf(row.ended),
  };
}

/** A collective call starts when it was made and the one before it has ended. */
function startOf(row: Row, before: Row | undefined): number {
  if (row.sequence === 1) return row.queued;
  if (before === undefined || before.sequence !== row.sequence - 1) return Number.NaN;
  return Math.max(row.queued, before.ended);
}

const timeOf = (now: number): number | null => (Number.isNaN(now) ? null : Math.round(monotonicUs(now)));

export function codeOf(error: unknown): string {
  if (isEpError(error)) return error.code;
  return error instanceof Error ? error.name : 'Error';
}
