/** How commands fail: one line for people, one object for programs. */
import { constants } from 'node:os';
import { EpError, invalid, isEpError } from '@ep/core';

/** A command that has said what there is to say and ends with this status. */
export class CommandExit extends Error {
  readonly status: number;

  constructor(status: number) {
    super(`exit status ${status}`);
    this.status = status;
  }
}

/** The end of a command that a signal stopped, as a shell would report it. */
export function stoppedBy(command: string, signal: NodeJS.Signals): CommandExit {
  process.stderr.write(`ep ${command}: stopped by ${signal}\n`);
  return new CommandExit(128 + constants.signals[signal]);
}

export interface FailureReport {
  readonly error: {
    readonly code: string;
    readonly message: string;
    readonly context?: Readonly<Record<string, unknown>>;
  };
}

export function failureReport(error: unknown): FailureReport {
  if (isEpError(error)) return { error: { code: error.code, message: error.message, context: error.context } };
  return { error: { code: 'INTERNAL', message: error instanceof Error ? error.message : String(error) } };
}

const FILE_REASONS: Readonly<Record<string, string>> = {
  ENOENT: 'there is no such file or folder',
  EISDIR: 'it is a folder, not a file',
  ENOTDIR: 'a part of the path before the last is not a folder',
  EACCES: 'permission denied',
  EPERM: 'permission denied',
  EROFS: 'the file system is read-only',
  ENOSPC: 'the file system is full',
  ELOOP: 'its symbolic links go round in a circle',
  ENAMETOOLONG: 'the name is too long',
  ERR_INVALID_ARG_VALUE: 'the path holds a zero character',
  ERR_FS_FILE_TOO_LARGE: 'it is larger than 2 GiB',
};

/** A file that could not be read or written. */
export function fileError(action: 'read' | 'write', path: string, error: unknown): EpError<'EP_SYSTEM'> {
  const code = String((error as NodeJS.ErrnoException).code ?? error);
  const reason = Object.hasOwn(FILE_REASONS, code) ? `${FILE_REASONS[code]} (${code})` : code;
  return new EpError('EP_SYSTEM', `cannot ${action} ${path}: ${reason}`, {
    cause: error,
    context: { path, errno: code },
  });
}

/** Options that do not fit together, or that the command does not take: it ends as after any command line that was not understood. */
export class UsageError extends EpError<'EP_INVALID_ARGUMENT'> {
  constructor(message: string, context?: EpError['context']) {
    super('EP_INVALID_ARGUMENT', message, context && { context });
  }
}

/** As `invalid`, of an option. */
export function misused(option: string, details: Parameters<typeof invalid>[1]): UsageError {
  const { message, context } = invalid(option, details);
  return new UsageError(message, context);
}

/** A command line that was not understood; `usage` says what was wrong with it. */
export function usageReport(message: string, usage: string): FailureReport {
  return { error: { code: 'EP_INVALID_ARGUMENT', message, context: { usage: usage.replace(/^commander\./, '') } } };
}

/** What was not foreseen comes with its stack: it is a defect of this program. */
export function failureText(error: unknown): string {
  if (isEpError(error)) return `ep: ${error.message} [${error.code}]\n`;
  return `ep: internal error: ${error instanceof Error ? (error.stack ?? error.message) : String(error)}\n`;
}

/** JSON for programs: typed arrays as arrays, big integers as decimal strings, sets as arrays. */
export function jsonText(value: unknown): string {
  return JSON.stringify(value, (_, item: unknown) => {
    if (typeof item === 'bigint') return item.toString();
    if (item instanceof Set) return [...item];
    if (ArrayBuffer.isView(item) && !(item instanceof DataView))
      return Array.from(item as unknown as ArrayLike<number>);
    return item;
  });
}
