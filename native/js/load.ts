/**
 * Finds and loads the addon: `EP_NATIVE_PATH`, then this package's own build, then the prebuilt `@ep/native-<os>-<cpu>`.
 *
 * Anything but "not found" stops the search: a broken binary must never be masked by an older one behind it.
 */
import { existsSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { EpError } from '@ep/core';
import { abiVersion } from './abi.gen.js';
import type { Binding } from './binding.js';

export interface LoadAttempt {
  readonly path: string;
  readonly error: string;
}

function isMusl(): boolean {
  const report = process.report?.getReport() as { header?: { glibcVersionRuntime?: string } } | undefined;
  return process.platform === 'linux' && report?.header?.glibcVersionRuntime === undefined;
}

/** Name of the prebuilt package for this machine. */
export function platformPackage(): string {
  const libc = process.platform === 'linux' ? (isMusl() ? '-musl' : '-gnu') : '';
  return `@ep/native-${process.platform}-${process.arch}${libc}`;
}

function remedies(attempts: readonly LoadAttempt[]): string {
  const texts = attempts.map((attempt) => attempt.error).join('\n');
  const lines: string[] = [];
  if (/GLIBC(XX)?_/.test(texts))
    lines.push('the binary needs a newer glibc than this system has: build it here with `pnpm build:native`');
  if (/invalid ELF header|wrong ELF class|Exec format/.test(texts))
    lines.push('the binary is for another CPU: remove it and build it here');
  if (/abi/i.test(texts)) lines.push('install the same version of all @ep packages');
  lines.push(
    `install ${platformPackage()}, or build from the repository with \`npm run setup\`, or set EP_NATIVE_PATH to an ep.node`,
  );
  return lines.map((line, i) => `${i + 1}. ${line}`).join('\n');
}

function failure(attempts: readonly LoadAttempt[], cause: unknown): EpError<'EP_NATIVE_LOAD'> {
  const tried = attempts.map((attempt) => `  ${attempt.path}: ${attempt.error}`).join('\n');
  return new EpError(
    'EP_NATIVE_LOAD',
    `the native addon could not be loaded on ${process.platform}-${process.arch}\ntried:\n${tried}\nremedies:\n${remedies(attempts)}`,
    { context: { attempts }, cause },
  );
}

const messageOf = (error: unknown): string => (error instanceof Error ? error.message.split('\n')[0]! : String(error));

/** Loads the addon or throws `EP_NATIVE_LOAD` with every attempt, or `EP_ABI_MISMATCH`. */
export function loadBinding(env: NodeJS.ProcessEnv = process.env): Binding {
  const require = createRequire(import.meta.url);
  const attempts: LoadAttempt[] = [];
  const open = (path: string): Binding => {
    let binding: Binding;
    try {
      binding = require(path) as Binding;
    } catch (error) {
      attempts.push({ path, error: messageOf(error) });
      throw failure(attempts, error);
    }
    if (binding.abi !== abiVersion) {
      throw new EpError('EP_ABI_MISMATCH', `addon ${path} has ABI ${binding.abi}, this package needs ${abiVersion}`, {
        context: { path, found: binding.abi, expected: abiVersion },
      });
    }
    return binding;
  };
  const named = env.EP_NATIVE_PATH;
  if (named !== undefined && named !== '') return open(named);

  const own = join(dirname(fileURLToPath(import.meta.url)), '..', 'build', 'Release', 'ep.node');
  if (existsSync(own)) return open(own);
  attempts.push({ path: own, error: 'not found' });

  const prebuilt = platformPackage();
  let resolved: string;
  try {
    resolved = require.resolve(`${prebuilt}/ep.node`);
  } catch (error) {
    attempts.push({ path: prebuilt, error: 'not installed' });
    throw failure(attempts, error);
  }
  return open(resolved);
}
