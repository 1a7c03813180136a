/** The last calls of a rank, in rows that are made once: recording a call like the one before allocates nothing, and writes one cache line. */
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

/** What calls have in common that are made again and again. Those in a row share one. */
interface Shape extends Omit<CallEntry, 'group' | 'rank' | 'sequence'> {
  readonly group: Progress;
}

/** A call as it is read. */
interface Row {
  readonly shape: Shape;
  readonly sequence: number;
  readonly state: 'pending' | CallOutcome;
  readonly code: string;
  readonly epoch: number;
  /** By `performance.now()`; NaN: not read. */
  readonly queued: number;
  readonly ended: number;
}

/** Numbers of a row, which has one cache line of them. */
const WORDS = 8;
const WORD = { token: 0, sequence: 1, state: 2, epoch: 3, queued: 4, ended: 5 } as const;
const STATES = ['pending', 'done', 'failed', 'aborted'] as const;

const isMessage = (kind: CallKind): boolean => kind === 'send' || kind === 'recv';

const shapeOf = (
  { kind, op, dtype, elements, bytes, root, reduceOp, peer, tag }: Omit<CallEntry, 'group' | 'rank' | 'sequence'>,
  group: Progress,
): Shape => ({ group, kind, op, dtype, elements, bytes, root, reduceOp, peer, tag });

const isOf = (shape: Shape, entry: CallEntry, group: Progress): boolean =>
  shape.op === entry.op &&
  shape.elements === entry.elements &&
  shape.bytes === entry.bytes &&
  shape.dtype === entry.dtype &&
  shape.kind === entry.kind &&
  shape.root === entry.root &&
  shape.reduceOp === entry.reduceOp &&
  shape.peer === entry.peer &&
  shape.tag === entry.tag &&
  shape.group === group;

const NO_SHAPE = shapeOf(
  { kind: 'barrier', op: '', dtype: 'u8', elements: 0, bytes: 0, root: -1, reduceOp: '', peer: -1, tag: -1 },
  { name: '', epoch: () => -1, entered: 0, ended: 0 },
);

export class CallRing {
  readonly #numbers = new Float64Array(RING_CALLS * WORDS).fill(-1);
  readonly #shapes: Shape[] = Array.from({ length: RING_CALLS }, () => NO_SHAPE);
  /** Of the calls that ended badly. */
  readonly #codes: string[] = Array.from({ length: RING_CALLS }, () => '');
  #last = NO_SHAPE;
  #next = 0;
  #turns = 0;
  #turn = 0;
  #credits = MOST_CREDITS;
  #clockRead = 0;

  /** Calls that were ever recorded. */
  get recorded(): number {
    return this.#turns * RING_CALLS + this.#next;
  }

  begin(entry: CallEntry, group: Progress): number {
    const next = this.#next;
    const sequence = entry.sequence;
    if (sequence > group.entered && !isMessage(entry.kind)) group.entered = sequence;
    if (!isOf(this.#last, entry, group)) this.#last = shapeOf(entry, group);
    if (this.#shapes[next] !== this.#last) this.#shapes[next] = this.#last;
    const timed = this.#credits >= 1 || isTimed(sequence);
    const token = (this.#turn << ROW_BITS) | next;
    const numbers = this.#numbers;
    const row = next * WORDS;
    numbers[row + WORD.token] = token;
    numbers[row + WORD.sequence] = sequence;
    numbers[row + WORD.state] = 0;
    numbers[row + WORD.epoch] = timed ? group.epoch() : -1;
    numbers[row + WORD.queued] = timed ? this.#time() : Number.NaN;
    numbers[row + WORD.ended] = Number.NaN;
    if (next + 1 < RING_CALLS) this.#next = next + 1;
    else {
      this.#next = 0;
      this.#turns++;
      this.#turn = this.#turns & TURN_MASK;
    }
    return token;
  }

  end(token: number, outcome: CallOutcome, error: unknown): void {
    const at = token & ROW_MASK;
    const row = at * WORDS;
    const numbers = this.#numbers;
    if (at >= RING_CALLS || numbers[row + WORD.token] !== token) return;
    const sequence = numbers[row + WORD.sequence]!;
    const { group, kind } = this.#shapes[at]!;
    if (sequence > group.ended && !isMessage(kind)) group.ended = sequence;
    numbers[row + WORD.state] = STATES.indexOf(outcome);
    if (outcome !== 'done') this.#codes[at] = codeOf(error);
    if (this.#credits >= 1 || outcome !== 'done' || isTimed(sequence)) numbers[row + WORD.ended] = this.#time();
  }

  /** The groups of the calls kept. */
  groups(): Set<Progress> {
    return new Set(this.#kept().map(({ shape }) => shape.group));
  }

  /** The calls kept, oldest first. */
  entries(): TraceEntry[] {
    const before = new Map<Progress, Row>();
    return this.#kept().map((row) => {
      const { group, kind } = row.shape;
      const entry = entryOf(row, before.get(group));
      if (!isMessage(kind)) before.set(group, row);
      return entry;
    });
  }

  #kept(): Row[] {
    const kept = this.#turns === 0 ? this.#next : RING_CALLS;
    return Array.from({ length: kept }, (_, i) => this.#row((this.#next + RING_CALLS - kept + i) % RING_CALLS));
  }

  #row(at: number): Row {
    const word = (name: keyof typeof WORD): number => this.#numbers[at * WORDS + WORD[name]]!;
    return {
      shape: this.#shapes[at]!,
      sequence: word('sequence'),
      state: STATES[word('state')]!,
      code: this.#codes[at]!,
      epoch: word('epoch'),
      queued: word('queued'),
      ended: word('ended'),
    };
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
  const { sequence, shape } = row;
  const { group, kind } = shape;
  const message = isMessage(kind);
  const started = row.state !== 'pending' || message || sequence <= group.ended + 1;
  return {
    group: group.name,
    kind,
    op: shape.op,
    sequence,
    dtype: shape.dtype,
    elements: shape.elements,
    bytes: shape.bytes,
    ...(shape.root < 0 ? {} : { root: shape.root }),
    ...(shape.reduceOp === '' ? {} : { reduceOp: shape.reduceOp }),
    ...(message ? { peer: shape.peer, tag: shape.tag } : {}),
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
