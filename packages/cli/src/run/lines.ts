/** Cuts a byte stream into lines, whatever the chunks are: ranks write at the same time, and their lines must not mix. */

const NEWLINE = 0x0a;

/** A line longer than this comes in pieces, so that a program which never writes a newline cannot fill the memory. */
export const longestLine = 1 << 20;

export class LineSplitter {
  readonly #emit: (line: string) => void;
  #held: Buffer[] = [];
  #heldBytes = 0;

  constructor(emit: (line: string) => void) {
    this.#emit = emit;
  }

  push(chunk: Buffer): void {
    let start = 0;
    for (let end = chunk.indexOf(NEWLINE); end >= 0; end = chunk.indexOf(NEWLINE, start)) {
      this.#hold(chunk.subarray(start, end));
      this.#flush();
      start = end + 1;
    }
    if (start < chunk.length) this.#hold(chunk.subarray(start));
    if (this.#heldBytes >= longestLine) this.#flush();
  }

  /** What was written without a newline at the end. */
  end(): void {
    if (this.#heldBytes > 0) this.#flush();
  }

  #hold(bytes: Buffer): void {
    this.#held.push(bytes);
    this.#heldBytes += bytes.length;
  }

  #flush(): void {
    // Decoded whole: a character may have arrived in two chunks.
    const line = Buffer.concat(this.#held, this.#heldBytes).toString('utf8');
    this.#held = [];
    this.#heldBytes = 0;
    this.#emit(line.endsWith('\r') ? line.slice(0, -1) : line);
  }
}
