// The toolchain stamp: what turbo cannot see by itself. turbo hashes files and variables, not the compiler, so a native
// build made by another compiler would be taken from its cache; the stamp is an input of build:native (turbo.json).
// HAZARD: it is rewritten only when its content changed and holds nothing that varies between runs.
import { existsSync, mkdirSync, readFileSync, renameSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { cacheDir } from '../workspace.mjs';
import { versionLine } from './system.mjs';

export const stampPath = join(cacheDir, 'toolchain.json');

/** @typedef {{ arch: string, glibc: string | null, cxx: string, cmake: string, ninja: string, nvcc: string | null }} Toolchain */

/** @returns {Toolchain | null} */
export function readStamp() {
  try {
    return JSON.parse(readFileSync(stampPath, 'utf8'));
  } catch {
    return null;
  }
}

/** The CUDA compiler that the native build would use; it need not exist. */
export function nvccCommand() {
  const { CUDACXX, CUDA_HOME } = process.env;
  if (CUDACXX) return CUDACXX;
  const inHome = CUDA_HOME ? join(CUDA_HOME, 'bin', 'nvcc') : '';
  return existsSync(inHome) ? inHome : 'nvcc';
}

/**
 * @returns {Promise<string | null>} null when there is none. nvcc's first line is its name; the last one names the build
 */
export const nvccVersion = () => versionLine('sh', ['-c', '"$0" --version | tail -n 1 | grep .', nvccCommand()]);

/** @returns {string | null} */
export function glibcVersion() {
  const { header } = /** @type {{ header: { glibcVersionRuntime?: string } }} */ (process.report.getReport());
  return header.glibcVersionRuntime ?? null;
}

/**
 * @param {string} path
 * @param {string} text
 * @returns {boolean} whether the file changed
 */
export function writeIfChanged(path, text) {
  if (existsSync(path) && readFileSync(path, 'utf8') === text) return false;
  mkdirSync(dirname(path), { recursive: true });
  // Renamed into place: an interrupt must not leave half a file that a later run would trust.
  writeFileSync(`${path}.${process.pid}`, text);
  renameSync(`${path}.${process.pid}`, path);
  return true;
}
