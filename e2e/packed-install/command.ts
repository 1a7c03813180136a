import { execFile } from 'node:child_process';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

export const repository = join(dirname(fileURLToPath(import.meta.url)), '../..');

export interface Ended {
  readonly status: number | string;
  readonly output: string;
}

/** Runs a command to its end; a failure is a result with its output, so that a test can show both. */
export function command(
  file: string,
  args: readonly string[],
  options: { readonly cwd?: string; readonly env?: NodeJS.ProcessEnv } = {},
): Promise<Ended> {
  return new Promise((resolve) => {
    execFile(file, args, { ...options, timeout: 240_000, maxBuffer: 64 << 20 }, (error, stdout, stderr) => {
      resolve({ status: error ? (error.code ?? error.signal ?? 'unknown') : 0, output: `${stdout}${stderr}` });
    });
  });
}

/** Like `command`, for steps of the test itself, whose failure is no finding about the packages. */
export async function mustRun(file: string, args: readonly string[], cwd = repository): Promise<string> {
  const { status, output } = await command(file, args, { cwd });
  if (status !== 0) throw new Error(`${file} ${args.join(' ')} ended with status ${status}:\n${output}`);
  return output;
}
