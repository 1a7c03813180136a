/** Where pieces of messages to one peer lie in this rank's staging memory: whole ranges, taken one behind the other, given back in any order. */

/** Of a range: copies of a device are at their best from and to such addresses. */
const ALIGNMENT = 256;

interface Range {
  readonly begin: number;
  readonly end: number;
  free: boolean;
}

const LEAST_BYTES = 2 * ALIGNMENT;

/** Of one of `count` rings in so many bytes. */
export function ringBytesOf(byteLength: number, count: number): number {
  const each = Math.floor(byteLength / count);
  return Math.max(each - (each % ALIGNMENT), LEAST_BYTES);
}

export class Ring {
  /** Longest range that can be asked for: another one fits beside it, so that one is filled while the other is read. */
  readonly most: number;
  readonly #bytes: number;
  /** In the order in which they were taken; the first of them is never free. */
  readonly #ranges: Range[] = [];
  #next = 0;

  /** `byteLength`: of `ringBytesOf`. */
  constructor(byteLength: number) {
    this.#bytes = byteLength - (byteLength % ALIGNMENT);
    this.most = this.#bytes / 2 - ((this.#bytes / 2) % ALIGNMENT);
  }

  /** Offset of a range of so many bytes, 1 .. `most`; undefined if there is no room now. */
  take(byteLength: number): number | undefined {
    const size = Math.ceil(byteLength / ALIGNMENT) * ALIGNMENT;
    const first = this.#ranges[0]?.begin;
    if (first === undefined) this.#next = 0;
    let begin = this.#next;
    let end = this.#bytes;
    if (first !== undefined && begin <= first) end = first;
    else if (end - begin < size) [begin, end] = [0, first ?? 0];
    if (end - begin < size) return undefined;
    this.#next = begin + size;
    this.#ranges.push({ begin, end: this.#next, free: false });
    return begin;
  }

  /** Of a range that was taken. */
  giveBack(begin: number): void {
    const range = this.#ranges.find((one) => one.begin === begin && !one.free);
    if (range === undefined) return;
    range.free = true;
    while (this.#ranges[0]?.free === true) this.#ranges.shift();
  }
}
