/** What ranks tell each other beside payload: small records, delivered in order between two ranks. */

import { EpError, isEpError } from '@ep/core';
import type { Found } from './admission.js';
import type { LaneSource } from './channel.js';

/** One rank's call, told to all others. */
export interface CallRecord {
  readonly kind: 'call';
  readonly sequence: number;
  /** All that must be the same on all ranks, readable. */
  readonly call: string;
  /** all-to-all: elements that the rank gives to each other one, and takes from it. A number where `given` is absent: to and from the reader. */
  readonly gives?: number | readonly number[];
  readonly takes?: number | readonly number[];
  /** The bytes of all that the rank gives, where they are few; see given.ts. */
  readonly given?: Uint8Array;
  /** Of a call that is not small, where this rank can carry it natively (carried-plan.ts): bytes of the longest array that it gives, or takes of a root. */
  readonly carry?: number;
  /** Whose call it is, where another rank passes on what this one had told it. */
  readonly of?: number;
  /** Of a question or change of who takes part: whom the sender has found beside the members. */
  readonly found?: Found;
}

export interface DoneRecord {
  readonly kind: 'done';
  readonly sequence: number;
}

/** From this call on the ranks no longer agree where they are. */
export interface PoisonRecord {
  readonly kind: 'poison';
  readonly sequence: number;
  readonly code: string;
  readonly text: string;
  readonly context: Readonly<Record<string, unknown>>;
}

/** Agreement on the next view: see membership.ts. `dead` as `formatSet` writes it. */
export interface StateRecord {
  readonly kind: 'state' | 'view';
  /** Which agreement of the group this is. */
  readonly epoch: number;
  readonly dead: string;
  readonly completed: number;
  /** Of a rank that repairs the group: the number of its call. Of a view: that behind which all go on. */
  readonly repair?: number;
  /** Of a view: who takes part from then on, too. */
  readonly admitted?: Found;
  /** Of such a view, where they become more: ranks of the group from then on. */
  readonly size?: number;
}

/** The reader was taken out of the group; `completed` and what came before is done nevertheless. */
export interface EvictedRecord {
  readonly kind: 'evicted';
  readonly completed: number;
}

/** Is the reader there? It is, and waits in a call, or has made none. */
export interface AskRecord {
  readonly kind: 'ask';
  readonly id: number;
}

export interface HereRecord {
  readonly kind: 'here';
  readonly id: number;
  readonly waits: boolean;
}

/** `completed`: a call that all have completed who were members then. */
export interface ByeRecord {
  readonly kind: 'bye';
  readonly completed: number;
}

/** Point to point: a message is there; its bytes may come; it will not come; it will not be taken. */
export interface OfferRecord {
  readonly kind: 'offer';
  readonly id: number;
  readonly tag: number;
  readonly dtype: string;
  readonly bytes: number;
}

export interface GrantRecord {
  readonly kind: 'grant';
  readonly id: number;
}

/** Of a granted message between tensors of GPUs: bytes of it lie in its sender's staging memory, at an offset into what it has for the reader. */
export interface PieceRecord {
  readonly kind: 'piece';
  readonly id: number;
  readonly at: number;
  readonly byteOffset: number;
  readonly bytes: number;
}

/** What lay there has been read. Sent for every piece, whatever has become of its message. */
export interface TakenRecord {
  readonly kind: 'taken';
  readonly at: number;
}

export interface RefusalRecord {
  readonly kind: 'cancel' | 'refuse';
  readonly id: number;
  readonly code: string;
  readonly text: string;
  readonly context: Readonly<Record<string, unknown>>;
}

export type ControlRecord =
  | CallRecord
  | DoneRecord
  | PoisonRecord
  | StateRecord
  | EvictedRecord
  | AskRecord
  | HereRecord
  | ByeRecord
  | OfferRecord
  | GrantRecord
  | PieceRecord
  | TakenRecord
  | RefusalRecord;

export const RECORD_BYTES = 1024;
/** Bytes of the text, and of what follows it; `NOTHING_GIVEN` where a call says nothing of that. Then a number, of a plain call. */
const LENGTH_BYTES = 16;
const SEQUENCE_AT = 8;
/** In the place of the text's bytes: it is what is called, and the record says nothing else but a number and what is given. */
const PLAIN = 2 ** 31;
const NOTHING_GIVEN = 2 ** 32 - 1;
const LONGEST_TEXT = 400;

/** What a record can carry of an error. */
export function describeError(error: unknown): {
  readonly code: string;
  readonly text: string;
  readonly context: Readonly<Record<string, unknown>>;
} {
  const text = (error instanceof Error ? error.message : String(error)).slice(0, LONGEST_TEXT);
  if (!isEpError(error)) return { code: 'EP_ABORTED', text, context: {} };
  return { code: error.code, text, context: error.context };
}

/** Most records are plain, and all ranks call the same again and again: its text is written once. */
let plainText: { readonly call: string; readonly bytes: Uint8Array } | undefined;

function plainTextOf(call: string): Uint8Array {
  if (plainText?.call !== call) plainText = { call, bytes: Buffer.from(call) };
  return plainText.bytes;
}

const isPlain = ({ gives, takes, carry, of, found }: CallRecord): boolean =>
  (gives ?? takes ?? carry ?? of ?? found) === undefined;

function textOf(record: ControlRecord): Uint8Array {
  if (record.kind !== 'call') return Buffer.from(JSON.stringify(record));
  return isPlain(record) ? plainTextOf(record.call) : Buffer.from(JSON.stringify({ ...record, given: undefined }));
}

const givenIn = (record: ControlRecord): Uint8Array | undefined => (record.kind === 'call' ? record.given : undefined);

/** What a record takes of a slot. */
export const recordBytes = (record: ControlRecord): number =>
  LENGTH_BYTES + textOf(record).byteLength + (givenIn(record)?.byteLength ?? 0);

const scratch = new Uint8Array(RECORD_BYTES);
const scratchView = new DataView(scratch.buffer);

/** Lengths, then JSON or what is called, then what a call gives. The context of an error goes if it does not fit. */
export function encodeRecord(record: ControlRecord): Uint8Array {
  const given = givenIn(record);
  const most = RECORD_BYTES - LENGTH_BYTES - (given?.byteLength ?? 0);
  let text = textOf(record);
  if (text.byteLength > most && 'context' in record) {
    text = textOf({ ...record, text: record.text.slice(0, LONGEST_TEXT / 4), context: {} });
  }
  if (text.byteLength > most) {
    throw new EpError(
      'EP_CAPACITY',
      `control record: ${record.kind} of ${recordBytes(record)} bytes exceeds ${RECORD_BYTES}`,
    );
  }
  const plain = record.kind === 'call' && isPlain(record);
  const end = LENGTH_BYTES + text.byteLength;
  scratchView.setUint32(0, text.byteLength + (plain ? PLAIN : 0), true);
  scratchView.setUint32(4, given?.byteLength ?? NOTHING_GIVEN, true);
  scratchView.setFloat64(SEQUENCE_AT, plain ? record.sequence : 0, true);
  scratch.set(text, LENGTH_BYTES);
  if (given !== undefined) scratch.set(given, end);
  return scratch.slice(0, end + (given?.byteLength ?? 0));
}

/** Copies: the slot may be filled again as soon as the record has been read. */
export function decodeRecord(slot: Uint8Array): ControlRecord {
  const bytes = Buffer.from(slot.buffer, slot.byteOffset, slot.byteLength);
  const view = new DataView(slot.buffer, slot.byteOffset, slot.byteLength);
  const length = view.getUint32(0, true);
  const end = LENGTH_BYTES + (length % PLAIN);
  const givenBytes = view.getUint32(4, true);
  const text = bytes.toString('utf8', LENGTH_BYTES, end);
  // In a buffer of its own: elements are read where they are aligned.
  const given = givenBytes === NOTHING_GIVEN ? undefined : new Uint8Array(slot.subarray(end, end + givenBytes));
  if (length >= PLAIN) {
    const plain = { kind: 'call', sequence: view.getFloat64(SEQUENCE_AT, true), call: text } as const;
    return given === undefined ? plain : { ...plain, given };
  }
  const record = JSON.parse(text) as ControlRecord;
  return record.kind !== 'call' || given === undefined ? record : { ...record, given };
}

/** A set of ranks as hexadecimal digits, 4 ranks each: short enough for a record at 1024 ranks. */
export function formatSet(ranks: Iterable<number>): string {
  let bits = 0n;
  for (const rank of ranks) bits |= 1n << BigInt(rank);
  return bits.toString(16);
}

export function parseSet(text: string): number[] {
  const ranks: number[] = [];
  let bits = BigInt(`0x${text}`);
  for (let rank = 0; bits !== 0n; rank++, bits >>= 1n) if ((bits & 1n) === 1n) ranks.push(rank);
  return ranks;
}

/** A record on its way. */
export class RecordSource implements LaneSource {
  finished = false;
  readonly #bytes: Uint8Array;

  constructor(bytes: Uint8Array) {
    this.#bytes = bytes;
  }

  readonly fill = (slot: Uint8Array): number => {
    slot.set(this.#bytes);
    this.finished = true;
    return this.#bytes.byteLength;
  };
}
