/** Dumps as files: names, limits, and that no reader ever sees half of one. */
import { mkdirSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { type Environment, EpError } from '@ep/core';
import type { TraceDump } from './dump-format.js';
import { threadOfProcess } from './machine-clock.js';

/** Files of one rank in one folder: the first ones, which are nearest to the cause, and the last. */
export const MOST_FILES = 8;

/** Worlds made by this thread: one that is opened again must not overwrite what the first left. */
let lives = 0;

/** EP_TRACE_DIR. */
export function traceFolder(env: Environment = process.env): string | undefined {
  return env.EP_TRACE_DIR === '' ? undefined : env.EP_TRACE_DIR;
}

export class DumpFiles {
  readonly folder: string | undefined;
  readonly #stem: string;
  /** Folder -> files written there. */
  readonly #written = new Map<string, number>();

  constructor(of: { readonly world: string; readonly rank: number }, folder: string | undefined) {
    this.folder = folder;
    const world = of.world.replace(/[^\w.-]/g, '_').slice(0, 64);
    this.#stem = `ep-trace-${world}-rank${of.rank}-${process.pid}-${threadOfProcess}-${lives++}`;
  }

  /** Returns the path. Throws `EP_INVALID_ARGUMENT` without a folder, `EP_SYSTEM` if the file cannot be written. */
  write(dump: TraceDump, folder: string | undefined = this.folder): string {
    if (folder === undefined) {
      throw new EpError(
        'EP_INVALID_ARGUMENT',
        `flight recorder of rank ${dump.rank}: no folder to dump into: set EP_TRACE_DIR or name one in the call`,
        { context: { rank: dump.rank } },
      );
    }
    const written = this.#written.get(folder) ?? 0;
    const path = join(folder, `${this.#stem}-${Math.min(written, MOST_FILES - 1)}.json`);
    const temporary = `${path}.part`;
    try {
      mkdirSync(folder, { recursive: true });
      writeFileSync(temporary, `${JSON.stringify(dump)}\n`);
      renameSync(temporary, path);
    } catch (error) {
      remove(temporary);
      const { code } = error as NodeJS.ErrnoException;
      throw new EpError('EP_SYSTEM', `cannot write the dump ${path}: ${code ?? (error as Error).message}`, {
        cause: error,
        context: { path, errno: code },
      });
    }
    this.#written.set(folder, written + 1);
    return path;
  }
}

function remove(path: string): void {
  try {
    rmSync(path, { force: true });
  } catch {
    // It could not be made, and cannot be removed: the first error says why.
  }
}
