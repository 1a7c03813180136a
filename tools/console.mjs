// Progress: one live status line on a terminal, one plain line per finished step in a pipe.

const spinner = ['⠋', '⠙', '⠹', '⠸', '⠼', '⠴', '⠦', '⠧', '⠇', '⠏'];

/** @param {number} ms */
export const formatTime = (ms) => {
  if (ms < 60_000) return `${(ms / 1000).toFixed(1)} s`;
  const seconds = Math.round(ms / 1000);
  return `${Math.floor(seconds / 60)} min ${String(seconds % 60).padStart(2, '0')} s`;
};

/**
 * @typedef {(detail: string) => void} Report replaces the detail behind the step's name on a terminal
 * @typedef {{ isTTY?: boolean, columns?: number, write(text: string): unknown }} Output
 */

export class Progress {
  #out;
  #live = false;

  /** @param {Output} [out] */
  constructor(out = process.stdout) {
    this.#out = out;
  }

  /** @param {string} text */
  line(text) {
    this.clear();
    this.#out.write(`${text}\n`);
  }

  /** Removes the status line, so that whoever writes next starts on an empty one. */
  clear() {
    if (this.#live) this.#out.write('\r\x1b[K');
    this.#live = false;
  }

  /**
   * Runs `body`; what it returns as a string is printed behind the time. A failure is printed and thrown on.
   * @template T
   * @param {string} name
   * @param {(report: Report) => Promise<T>} body
   * @returns {Promise<T>}
   */
  async step(name, body) {
    const started = performance.now();
    const elapsed = () => performance.now() - started;
    let detail = '';
    let turn = 0;
    const draw = () => {
      const text = `${spinner[turn++ % spinner.length]} ${name}  ${formatTime(elapsed())}  ${detail}`;
      this.#out.write(`\r\x1b[K${text.slice(0, Math.max(20, (this.#out.columns ?? 80) - 1))}`);
      this.#live = true;
    };
    // In a pipe a long step says once a minute that it is alive; CI systems end jobs that are silent.
    const timer = this.#out.isTTY
      ? setInterval(draw, 100)
      : setInterval(() => this.line(`  ${name}: ${formatTime(elapsed())} so far`), 60_000);
    try {
      const result = await body((text) => {
        // biome-ignore lint/suspicious/noControlCharactersInRegex: colour codes of the child would break the line's width
        detail = text.replace(/\x1b\[[0-9;]*[A-Za-z]/g, '').trim();
      });
      this.line(`ok    ${name} (${formatTime(elapsed())})${typeof result === 'string' && result ? `: ${result}` : ''}`);
      return result;
    } catch (error) {
      this.line(`FAIL  ${name} (${formatTime(elapsed())})`);
      throw error;
    } finally {
      clearInterval(timer);
    }
  }
}

/** An expected failure: its message is all the user needs, a stack trace would hide it. */
export class ToolError extends Error {
  /** @override */
  name = 'ToolError';
}

/**
 * Runs a tool's main function and turns its outcome into the exit status.
 * @param {() => Promise<number>} main returns the exit status
 */
export async function runMain(main) {
  // The reader of a pipe (`| head`) may leave early: end like any other Unix tool, without a stack trace.
  process.stdout.on('error', () => process.exit(141));
  try {
    process.exitCode = await main();
  } catch (error) {
    process.stderr.write(
      `${error instanceof ToolError ? `error: ${error.message}` : error instanceof Error ? error.stack : error}\n`,
    );
    process.exitCode = 1;
  }
}
