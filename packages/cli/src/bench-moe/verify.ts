/** What `ep bench moe` moves, and whether all of it arrived: every channel of every row, and every number about it, against the plan and the cast oracle. */
import type { MoeReceived } from '@ep/cuda-kernels';
import { type MoePlan, rankReceives, scaledChannels } from '@ep/plan/moe';
import { castRow } from '@ep/plan/reference';

/** Tokens that differ have rows that differ, up to so many; casting each row on its own would take longer than the benchmark. */
const PATTERNS = 251;
const patternOf = (source: number, token: number, turn: number): number =>
  (source * 31 + token * 7 + (turn % 2) * 101) % PATTERNS;

/** bf16 between 1 and 4 in magnitude, signs mixed: the sum of topK equal ones, each times 1 / topK, is exactly itself for any power of two up to 2^16. */
function codeOf(pattern: number, channel: number): number {
  const sign = (pattern ^ channel) & 1;
  return (sign << 15) | (0x3f80 + ((pattern >> 7) << 7)) | ((pattern + 11 * channel) & 127);
}

const bytesOf = (of: ArrayBufferView): Buffer => Buffer.from(of.buffer, of.byteOffset, of.byteLength);

export class Verifier {
  readonly #rank: number;
  readonly #tokens: number;
  readonly #hidden: number;
  readonly #expected: ReturnType<typeof rankReceives>;
  /** Rows of the receive tensor that a token wrote, in order: expert by expert, source by source. */
  readonly #written: Int32Array;
  readonly #rows: Buffer;
  readonly #codes: Buffer;
  readonly #scales: Float32Array;

  constructor(plan: MoePlan, rank: number, tokens: number, hidden: number) {
    this.#rank = rank;
    this.#tokens = tokens;
    this.#hidden = hidden;
    this.#expected = rankReceives(plan, rank);
    this.#written = Int32Array.from(this.#expected.sourceRank.keys()).filter(
      (row) => this.#expected.sourceRank[row]! >= 0,
    );
    const rows = new Uint16Array(PATTERNS * hidden);
    const codes = new Uint8Array(PATTERNS * hidden);
    const blocks = Math.ceil(hidden / scaledChannels);
    this.#scales = new Float32Array(PATTERNS * blocks);
    const wide = new Uint32Array(hidden);
    for (let pattern = 0; pattern < PATTERNS; pattern++) {
      for (let h = 0; h < hidden; h++) {
        rows[pattern * hidden + h] = codeOf(pattern, h);
        wide[h] = codeOf(pattern, h) << 16;
      }
      const cast = castRow('f8e4m3+f32', new Float32Array(wide.buffer));
      codes.set(cast.subarray(0, hidden), pattern * hidden);
      this.#scales.set(new Float32Array(cast.slice(hidden).buffer), pattern * blocks);
    }
    this.#rows = bytesOf(rows);
    this.#codes = bytesOf(codes);
  }

  /** Rows that a dispatch brings here. */
  get rows(): number {
    return this.#written.length;
  }

  /** This rank's tokens. Calls of a buffer take turns 0 and 1, so that what an earlier one left behind passes for nothing. */
  fill(x: Uint16Array, turn: number): void {
    const bytes = 2 * this.#hidden;
    for (let t = 0; t < this.#tokens; t++) {
      const pattern = patternOf(this.#rank, t, turn);
      this.#rows.copy(bytesOf(x), t * bytes, pattern * bytes, (pattern + 1) * bytes);
    }
  }

  /** In bf16, or with scales in e4m3. */
  received({ x, scales, counts, blockStart, layoutRange, sourceToken, sourceChoice }: MoeReceived, turn: number): void {
    const expected = this.#expected;
    this.#same(counts, expected.recvCount, 'counts');
    this.#same(blockStart, expected.blockStart, 'block starts');
    this.#same(layoutRange, expected.layoutRange, 'layout ranges');
    const data = bytesOf(x.data);
    const width = x.data.BYTES_PER_ELEMENT;
    const stride = (x.strides?.at(-2) ?? this.#hidden) * width;
    const rows = scales === undefined ? this.#rows : this.#codes;
    for (const row of this.#written) {
      if (sourceToken[row] !== expected.sourceToken[row] || sourceChoice[row] !== expected.sourceChoice[row]) {
        this.#fail(`row ${row} is said to be another token's`);
      }
      this.#row(data, row * stride, rows, this.#patternOf(row, turn), width, `received row ${row}`);
      if (scales !== undefined) this.#scalesOf(scales.data as Float32Array, row, scales.strides!.at(-1)!, turn);
    }
  }

  /** Received rows without gaps, in bf16. */
  compact(found: Uint16Array, turn: number): void {
    const data = bytesOf(found);
    for (const [i, row] of this.#written.entries()) {
      const at = 2 * i * this.#hidden;
      this.#row(data, at, this.#rows, this.#patternOf(row, turn), 2, `packed row ${i}`);
    }
  }

  /** What combine makes of rows that experts return as they are. */
  mixed(result: Uint16Array, turn: number): void {
    const data = bytesOf(result);
    for (let t = 0; t < this.#tokens; t++) {
      const pattern = patternOf(this.#rank, t, turn);
      this.#row(data, 2 * t * this.#hidden, this.#rows, pattern, 2, `the mixture of token ${t}`);
    }
  }

  #patternOf(row: number, turn: number): number {
    return patternOf(this.#expected.sourceRank[row]!, this.#expected.sourceToken[row]!, turn);
  }

  #row(data: Buffer, at: number, patterns: Buffer, pattern: number, width: number, what: string): void {
    const bytes = this.#hidden * width;
    const differs = patterns.compare(data, at, at + bytes, pattern * bytes, (pattern + 1) * bytes) !== 0;
    if (differs) this.#fail(`${what} is not what was sent`);
  }

  #scalesOf(scales: Float32Array, row: number, perBlock: number, turn: number): void {
    const blocks = Math.ceil(this.#hidden / scaledChannels);
    const first = this.#patternOf(row, turn) * blocks;
    for (let b = 0; b < blocks; b++) {
      if (scales[row + b * perBlock] !== this.#scales[first + b]) this.#fail(`scale ${b} of row ${row} is another`);
    }
  }

  #same<T>(found: ArrayLike<T>, expected: ArrayLike<T>, what: string): void {
    const differs = Array.from(expected).some((value, i) => found[i] !== value);
    if (differs || found.length !== expected.length) this.#fail(`${what} are not those of the plan`);
  }

  #fail(what: string): never {
    throw new Error(`rank ${this.#rank}: ${what}`);
  }
}
