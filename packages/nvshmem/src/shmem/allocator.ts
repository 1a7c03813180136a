/** First fit over one range of bytes. Every rank makes the same calls and so finds the same offsets: nothing of it is shared. */

/** Two objects never share a cache line, or ranks that write neighbours would slow each other down. */
export const SMALLEST_ALIGNMENT = 64;

interface Range {
  readonly begin: number;
  readonly end: number;
}

const roundUp = (value: number, to: number): number => Math.ceil(value / to) * to;

export class RangeAllocator {
  readonly byteLength: number;
  /** Sorted by offset, never adjacent. */
  #free: Range[];
  readonly #used = new Map<number, Range>();

  constructor(byteLength: number) {
    this.byteLength = byteLength;
    this.#free = byteLength > 0 ? [{ begin: 0, end: byteLength }] : [];
  }

  /** The largest object that would fit now. */
  get largestFree(): number {
    return this.#free.reduce((most, { begin, end }) => Math.max(most, end - begin), 0);
  }

  /** Offset of `byteLength` bytes, a multiple of `alignment` (a power of two); undefined if they do not fit. */
  allocate(byteLength: number, alignment: number = SMALLEST_ALIGNMENT): number | undefined {
    const step = Math.max(alignment, SMALLEST_ALIGNMENT);
    // An object without bytes has a place of its own too: offsets name objects.
    const needed = roundUp(Math.max(byteLength, 1), SMALLEST_ALIGNMENT);
    for (const [i, { begin, end }] of this.#free.entries()) {
      const offset = roundUp(begin, step);
      if (offset + needed > end) continue;
      const rest = [
        { begin, end: offset },
        { begin: offset + needed, end },
      ].filter((range) => range.end > range.begin);
      this.#free.splice(i, 1, ...rest);
      this.#used.set(offset, { begin: offset, end: offset + needed });
      return offset;
    }
    return undefined;
  }

  /** False if no object begins there. */
  free(offset: number): boolean {
    const range = this.#used.get(offset);
    if (range === undefined) return false;
    this.#used.delete(offset);
    const at = this.#free.findIndex(({ begin }) => begin > offset);
    const place = at < 0 ? this.#free.length : at;
    const before = this.#free[place - 1];
    const after = this.#free[place];
    const joinsBefore = before?.end === range.begin;
    const joinsAfter = after?.begin === range.end;
    const merged = {
      begin: joinsBefore ? before.begin : range.begin,
      end: joinsAfter ? after.end : range.end,
    };
    this.#free.splice(place - (joinsBefore ? 1 : 0), (joinsBefore ? 1 : 0) + (joinsAfter ? 1 : 0), merged);
    return true;
  }
}
