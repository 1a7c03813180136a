/**
 * All ranks meet at a key of a store.
 *
 * Each rank puts its part under `key/<rank>`; the lowest rank, 0 unless others come, collects the parts and publishes all of them, or why that is impossible, under
 * `key/verdict`, which is written once. So every rank ends with the same verdict, and the whole costs one set and one get for each rank and one get
 * for each part at the lowest.
 */
import { randomBytes } from 'node:crypto';
import { checkAttached } from './buffers.js';
import { defaultTimeoutMs } from './env.js';
import { checkInteger, checkObject, type EpCode, EpError, ERROR_TABLE, invalid, isEpError } from './errors.js';
import { formatRanks, MOST_WORLD_SIZE } from './ranks.js';
import type { AbortOptions } from './scope.js';
import type { Store } from './store.js';
import type { Rank } from './transport.js';
import { checkSignal, linkSignals } from './waiting.js';

export interface MeetingOptions extends AbortOptions {
  /** How long to wait for the other ranks; EP_TIMEOUT_MS unless given. */
  readonly timeoutMs?: number;
}

/** A meeting of ranks. A key serves once: what it collected stays in the store. */
export interface Meeting {
  readonly key: string;
  readonly rank: Rank;
  readonly worldSize: number;
  /** Who comes, ascending, the same on all of them; all ranks of the world unless given. The lowest collects. */
  readonly ranks?: readonly Rank[];
}

/** Who comes to a meeting, ascending. */
export const comersOf = ({ worldSize, ranks }: Meeting): readonly Rank[] =>
  ranks ?? Array.from({ length: worldSize }, (_, rank) => rank);

/** How a kind of meeting speaks of itself. */
export interface MeetingKind {
  readonly name: string;
  readonly missing: EpCode;
  readonly conflict: EpCode;
  /** Says who published a part, for the message about two that claim one rank. */
  readonly author: (part: Uint8Array) => string;
}

type Verdict =
  | { readonly parts: readonly Uint8Array[] }
  | { readonly code: EpCode; readonly message: string; readonly context: Readonly<Record<string, unknown>> };

const NONCE_BYTES = 8;
const NOTHING = new Uint8Array(0);
const ALL = 1;
const FAILURE = 2;

export function formatVerdict(verdict: Verdict): Uint8Array {
  if ('code' in verdict) return Buffer.concat([Uint8Array.of(FAILURE), Buffer.from(JSON.stringify(verdict))]);
  const lengths = Buffer.alloc(5 + 4 * verdict.parts.length);
  lengths.writeUInt8(ALL, 0);
  lengths.writeUInt32LE(verdict.parts.length, 1);
  verdict.parts.forEach((part, rank) => {
    lengths.writeUInt32LE(part.byteLength, 5 + 4 * rank);
  });
  return Buffer.concat([lengths, ...verdict.parts]);
}

function parseFailure(text: string): Verdict | undefined {
  try {
    const { code, message, context } = JSON.parse(text) as Record<string, unknown>;
    if (typeof code !== 'string' || !Object.hasOwn(ERROR_TABLE, code) || typeof message !== 'string') return undefined;
    if (typeof context !== 'object' || context === null) return undefined;
    return { code: code as EpCode, message, context: context as Record<string, unknown> };
  } catch {
    return undefined;
  }
}

function parseParts(bytes: Buffer): Verdict | undefined {
  if (bytes.byteLength < 5) return undefined;
  const count = bytes.readUInt32LE(1);
  let at = 5 + 4 * count;
  if (at > bytes.byteLength) return undefined;
  const parts: Uint8Array[] = [];
  for (let i = 0; i < count; i++) {
    const end = at + bytes.readUInt32LE(5 + 4 * i);
    if (end > bytes.byteLength) return undefined;
    parts.push(Uint8Array.from(bytes.subarray(at, end)));
    at = end;
  }
  return at === bytes.byteLength ? { parts } : undefined;
}

/** Throws `EP_RENDEZVOUS` for bytes that no rank of this version writes. */
export function parseVerdict(value: Uint8Array): Verdict {
  const bytes = Buffer.from(value.buffer, value.byteOffset, value.byteLength);
  const verdict =
    bytes[0] === ALL ? parseParts(bytes) : bytes[0] === FAILURE ? parseFailure(bytes.toString('utf8', 1)) : undefined;
  if (verdict !== undefined) return verdict;
  throw new EpError(
    'EP_RENDEZVOUS',
    `meeting: the verdict of ${bytes.byteLength} bytes was written by another version`,
    {
      context: { byteLength: bytes.byteLength },
    },
  );
}

class Gathering {
  readonly #store: Store;
  readonly #meeting: Meeting;
  readonly #comers: readonly Rank[];
  readonly #kind: MeetingKind;
  readonly #timeoutMs: number;

  constructor(store: Store, meeting: Meeting, kind: MeetingKind, timeoutMs: number) {
    this.#store = store;
    this.#meeting = meeting;
    this.#comers = comersOf(meeting);
    this.#kind = kind;
    this.#timeoutMs = timeoutMs;
  }

  /** The parts of all ranks that the collector saw. */
  async gather(part: Uint8Array, fetchParts: boolean, signal: AbortSignal | undefined): Promise<readonly Uint8Array[]> {
    const { rank } = this.#meeting;
    signal?.throwIfAborted();
    const mine = Buffer.concat([randomBytes(NONCE_BYTES), part]);
    const held = await this.#store.compareSet(this.#partKey(rank), NOTHING, mine);
    let verdict: Verdict;
    if (Buffer.compare(held, mine) !== 0) {
      // Also where the others have met already: this process is one too many.
      verdict = this.#claimedTwice(held, mine);
      await this.#decide(verdict);
    } else {
      try {
        verdict = rank === this.#comers[0] ? await this.#collect(fetchParts, signal) : await this.#await(signal);
      } catch (error) {
        verdict = await this.#giveUp(error, signal);
      }
    }
    if ('parts' in verdict) return verdict.parts;
    throw new EpError(verdict.code, verdict.message, { context: verdict.context });
  }

  #partKey(rank: number): string {
    return `${this.#meeting.key}/${rank}`;
  }

  get #verdictKey(): string {
    return `${this.#meeting.key}/verdict`;
  }

  get #partKeys(): readonly string[] {
    return this.#comers.map((rank) => this.#partKey(rank));
  }

  async #await(signal: AbortSignal | undefined): Promise<Verdict> {
    return parseVerdict(
      await this.#store.get(this.#verdictKey, { timeoutMs: this.#timeoutMs, ...(signal && { signal }) }),
    );
  }

  /** The lowest rank: all parts, unless somebody publishes a failure before they have come. */
  async #collect(fetchParts: boolean, signal: AbortSignal | undefined): Promise<Verdict> {
    const over = new AbortController();
    const linked = linkSignals(signal, over.signal);
    const options = { timeoutMs: this.#timeoutMs, signal: linked.signal };
    const parts = this.#store.wait(this.#partKeys, options).then(() => undefined);
    const failure = this.#store.get(this.#verdictKey, options).then(parseVerdict);
    try {
      const early = await Promise.race([parts, failure]);
      if (early !== undefined) return early;
    } finally {
      over.abort();
      linked.unlink();
      // The one that lost the race ends with the abort, which is no news to anybody.
      await Promise.allSettled([parts, failure]);
    }
    const values = fetchParts
      ? await Promise.all(this.#partKeys.map((key) => this.#store.get(key, { timeoutMs: this.#timeoutMs })))
      : this.#partKeys.map(() => new Uint8Array(NONCE_BYTES));
    return this.#decide({ parts: values.map((value) => value.subarray(NONCE_BYTES)) });
  }

  /** Publishes a verdict unless there is one already; returns the one that counts. */
  async #decide(verdict: Verdict): Promise<Verdict> {
    return parseVerdict(await this.#store.compareSet(this.#verdictKey, NOTHING, formatVerdict(verdict)));
  }

  async #giveUp(error: unknown, signal: AbortSignal | undefined): Promise<Verdict> {
    const { rank, worldSize } = this.#meeting;
    const { name } = this.#kind;
    if (signal?.aborted === true) {
      // The others must not take this rank for one that stayed. Not awaited: the caller asked to be let go.
      this.#decide({
        code: this.#kind.missing,
        message: `${name}: rank ${rank} was aborted while it waited for the others`,
        context: { ranks: [rank], worldSize },
      }).catch(() => {});
      throw error;
    }
    if (!isEpError(error) || error.code !== 'EP_TIMEOUT') throw error;
    const ranks = await this.#missingRanks();
    const who =
      ranks.length > 0
        ? `${formatRanks(ranks)} of ${this.#comers.length} did not come`
        : `all ranks came, but rank ${this.#comers[0]} did not publish what it collected`;
    return this.#decide({
      code: this.#kind.missing,
      message: `${name}: ${who} within the ${this.#timeoutMs} ms of rank ${rank}`,
      context: {
        ranks: ranks.length > 0 ? ranks : [this.#comers[0]],
        worldSize,
        timeoutMs: this.#timeoutMs,
        gaveUp: rank,
      },
    });
  }

  async #missingRanks(): Promise<readonly number[]> {
    try {
      await this.#store.wait(this.#partKeys, { timeoutMs: 0 });
      return [];
    } catch (error) {
      const missing = isEpError(error) && error.code === 'EP_TIMEOUT' ? error.context.missing : undefined;
      if (!Array.isArray(missing)) throw error;
      return missing.map((key) => Number(String(key).slice(String(key).lastIndexOf('/') + 1)));
    }
  }

  #claimedTwice(held: Uint8Array, mine: Uint8Array): Verdict {
    const { rank, worldSize, key } = this.#meeting;
    const [first, second] = [held, mine].map((value) => this.#kind.author(value.subarray(NONCE_BYTES)));
    const by = first === '' ? '' : ` by ${first} and by ${second}`;
    return {
      code: this.#kind.conflict,
      message: `${this.#kind.name}: rank ${rank} was claimed twice${by}: two processes run as one rank, or the key ${JSON.stringify(key)} is used a second time`,
      context: { ranks: [rank], worldSize, key },
    };
  }
}

function checkComers({ rank, worldSize, ranks }: Meeting, where: string): void {
  if (ranks === undefined) return;
  const isAscending = Array.isArray(ranks) && ranks.every((one, i) => i === 0 || one > ranks[i - 1]);
  if (isAscending) for (const one of ranks) checkInteger(one, 'ranks', where, 0, worldSize - 1);
  if (isAscending && ranks.includes(rank)) return;
  throw invalid('ranks', { where, expected: `ranks in ascending order, ${rank} among them`, found: ranks });
}

/** Collects one part of each rank that comes, in their order; the kind says how failures are worded. */
export async function gather(
  store: Store,
  meeting: Meeting & { readonly part: Uint8Array; readonly fetchParts: boolean },
  kind: MeetingKind,
  options: MeetingOptions,
): Promise<readonly Uint8Array[]> {
  const where = kind.name;
  if (typeof store?.compareSet !== 'function') throw invalid('store', { where, expected: 'a store', found: store });
  checkObject(options, 'options', 'an object with timeoutMs and signal', where);
  checkSignal(options.signal, where);
  if (typeof meeting.key !== 'string') throw invalid('key', { where, expected: 'a text', found: meeting.key });
  if (!(meeting.part instanceof Uint8Array)) {
    throw invalid('bytes', { where, expected: 'a Uint8Array', found: meeting.part });
  }
  checkAttached(meeting.part, where);
  checkInteger(meeting.worldSize, 'worldSize', kind.name, 1, MOST_WORLD_SIZE);
  checkInteger(meeting.rank, 'rank', kind.name, 0, meeting.worldSize - 1);
  checkComers(meeting, where);
  const gathering = new Gathering(store, meeting, kind, options.timeoutMs ?? defaultTimeoutMs());
  return gathering.gather(meeting.part, meeting.fetchParts, options.signal);
}

const EXCHANGE: MeetingKind = { name: 'exchange', missing: 'EP_TIMEOUT', conflict: 'EP_MISMATCH', author: () => '' };
const BARRIER: MeetingKind = { ...EXCHANGE, name: 'barrier' };

function checkCount(count: number, meeting: Meeting, { name, conflict }: MeetingKind): void {
  const { rank, worldSize } = meeting;
  const comers = comersOf(meeting);
  if (count === comers.length) return;
  const [first] = comers;
  throw new EpError(
    conflict,
    `${name}: rank ${first} collected ${count} ranks, rank ${rank} expects ${comers.length}`,
    {
      context: { ranks: [first, rank], worldSize, found: count },
    },
  );
}

/**
 * All-gather of small byte strings: returns the bytes of every rank that comes, in their order. Throws `EP_TIMEOUT` naming the ranks that did not come, `EP_MISMATCH` if
 * ranks disagree about the world size or two claim one rank.
 */
export async function exchange(
  store: Store,
  meeting: Meeting & { readonly bytes: Uint8Array },
  options: MeetingOptions = {},
): Promise<readonly Uint8Array[]> {
  checkObject(meeting, 'meeting', 'an object with key, rank, worldSize and bytes', EXCHANGE.name);
  const parts = await gather(store, { ...meeting, part: meeting.bytes, fetchParts: true }, EXCHANGE, options);
  checkCount(parts.length, meeting, EXCHANGE);
  return parts;
}

/** Resolves when all ranks have called it with this key. Errors as those of `exchange`. */
export async function barrier(store: Store, meeting: Meeting, options: MeetingOptions = {}): Promise<void> {
  checkObject(meeting, 'meeting', 'an object with key, rank and worldSize', BARRIER.name);
  const parts = await gather(store, { ...meeting, part: NOTHING, fetchParts: false }, BARRIER, options);
  checkCount(parts.length, meeting, BARRIER);
}
