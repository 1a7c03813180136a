// What the machine itself must bring: a C++20 compiler, CMake and Ninja. Missing packages come from apt when
// this process may install them; otherwise the caller gets the one line to run.
import { accessSync, constants, existsSync } from 'node:fs';
import { delimiter, join } from 'node:path';
import { ToolError } from '../console.mjs';
import { run } from '../process.mjs';

/**
 * @typedef {{ what: string, apt?: string, probe: () => Promise<string | null> }} Requirement
 *   apt: Debian's package, absent when no package helps; probe gives what was found (one line), or null when it is
 *   missing or too old
 */

/** @param {string} name */
export const onPath = (name) =>
  (process.env.PATH ?? '').split(delimiter).some((dir) => {
    try {
      accessSync(join(dir, name), constants.X_OK);
      return dir !== '';
    } catch {
      return false;
    }
  });

/**
 * First line of `command ...args`, or null when it cannot be run.
 * @param {string} command
 * @param {readonly string[]} [args]
 */
export async function versionLine(command, args = ['--version']) {
  const result = await run(command, args, { limitMs: 20_000 });
  return result.code === 0 ? (result.output.split('\n')[0]?.trim() ?? null) : null;
}

// <version> tells the library, the rest are the C++20 parts the native code stands on.
const cxx20Probe = `
#include <atomic>
#include <bit>
#include <concepts>
#include <span>
template <std::unsigned_integral T> T load(T& word) { return std::atomic_ref<T>(word).load(std::memory_order_acquire); }
int main() { unsigned word = 1; return std::has_single_bit(load(word)) && std::span(&word, 1).size() == 1 ? 0 : 1; }
`;

export const compiler = () => process.env.CXX || 'g++';

/**
 * The compiler's version line if it compiles C++20 with its standard library.
 * @param {string | null} known a version line that has passed before, which need not be compiled again
 */
async function probeCompiler(known) {
  const version = await versionLine(compiler());
  if (version === null || version === known) return version;
  const args = ['-std=c++20', '-fsyntax-only', '-x', 'c++', '-'];
  return (await run(compiler(), args, { input: cxx20Probe, limitMs: 60_000 })).code === 0 ? version : null;
}

/** What native/CMakePresets.json (version 6) needs. */
const minimumCmake = [3, 25];

async function probeCmake() {
  const version = await versionLine('cmake');
  const [major = 0, minor = 0] = (/(\d+)\.(\d+)/.exec(version ?? '') ?? []).slice(1).map(Number);
  const [needMajor = 0, needMinor = 0] = minimumCmake;
  return major > needMajor || (major === needMajor && minor >= needMinor) ? version : null;
}

/**
 * @param {string | null} knownCompiler
 * @returns {Record<'cxx' | 'cmake' | 'ninja', Requirement>}
 */
export const requirements = (knownCompiler) => ({
  cxx: {
    ...(process.env.CXX
      ? { what: `a C++20 compiler: CXX is ${process.env.CXX}, which does not compile C++20 (unset it to use g++)` }
      : { what: 'a C++20 compiler (g++; CXX names another one)', apt: 'g++' }),
    probe: () => probeCompiler(knownCompiler),
  },
  cmake: { what: `cmake >= ${minimumCmake.join('.')}`, apt: 'cmake', probe: probeCmake },
  ninja: { what: 'ninja', apt: 'ninja-build', probe: () => versionLine('ninja') },
});

/**
 * Finds every requirement, installing what is missing when that is allowed.
 * @param {ReturnType<typeof requirements>} wanted
 * @param {(detail: string) => void} report
 * @returns {Promise<Record<keyof ReturnType<typeof requirements>, string>>} version lines
 * @throws {ToolError} with the line to run when something is missing and cannot be installed here
 */
export async function ensureSystem(wanted, report) {
  let found = await probeAll(wanted);
  let missing = found.filter((entry) => entry.version === null);
  const packages = missing.flatMap((entry) => entry.requirement.apt ?? []);
  if (packages.length > 0 && mayInstall()) {
    await aptInstall(packages, report);
    found = await probeAll(wanted);
    missing = found.filter((entry) => entry.version === null);
  }
  if (missing.length > 0) throw new ToolError(missingText(missing.map((entry) => entry.requirement)));
  return /** @type {any} */ (Object.fromEntries(found.map((entry) => [entry.name, entry.version])));
}

/** @param {ReturnType<typeof requirements>} wanted */
const probeAll = (wanted) =>
  Promise.all(
    Object.entries(wanted).map(async ([name, requirement]) => ({
      name,
      requirement,
      version: await requirement.probe(),
    })),
  );

export const mayInstall = () => process.getuid?.() === 0 && onPath('apt-get');

/** @param {readonly Requirement[]} missing */
export function missingText(missing) {
  const packages = missing.flatMap((entry) => entry.apt ?? []).join(' ');
  const how = existsSync('/etc/debian_version')
    ? `run: sudo apt-get update && sudo apt-get install -y --no-install-recommends ${packages}`
    : `install them with the system's package manager (Debian's names: ${packages})`;
  const lines = [`missing: ${missing.map((entry) => entry.what).join('; ')}`, ...(packages ? [how] : [])];
  return [...lines, 'then repeat this command'].join('\n');
}

/**
 * @param {readonly string[]} packages
 * @param {(detail: string) => void} report
 */
export async function aptInstall(packages, report) {
  const env = { ...process.env, DEBIAN_FRONTEND: 'noninteractive' };
  for (const args of [['update'], ['install', '-y', '--no-install-recommends', ...packages]]) {
    const result = await run('apt-get', args, { env, onLine: report, limitMs: 15 * 60_000 });
    if (result.code !== 0) {
      throw new ToolError(`apt-get ${args.join(' ')} ended with status ${result.code}:\n${result.output.slice(-3000)}`);
    }
  }
}
