// docs/environment.md says that it has every variable which is read: what the sources read is held against the table that it is made of.
import { execFileSync } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { expect, test } from 'vitest';
import { root } from '../workspace.mjs';

/** @type {{ SWITCHES: Record<string, unknown> }} */
const { SWITCHES } = await import(pathToFileURL(join(root, 'packages/core/dist/index.js')).href);

/** Set by a test for a program or library of its own; nobody else can. */
const ownOfTests = new Set([
  'EP_CUDA_HOST_BROKEN_DEVICE',
  'EP_CUDA_HOST_DEVICES',
  'EP_CUDA_HOST_DRIVER',
  'EP_CUDA_HOST_FAILING',
  'EP_CUDA_HOST_NO_PEERS',
  'EP_CUDA_HOST_REFUSED_DISPATCH',
  'EP_CUDA_HOST_REFUSED_EVENTS',
  'EP_CUDA_SLOW_COUNT',
  'EP_CUDA_SLOW_MS',
  'EP_CUDA_SLOW_OF',
  'EP_GUEST_DEVICES',
  'EP_NCCL_HOST_BROKEN',
  'EP_NCCL_HOST_LAUNCH_US',
  'EP_NCCL_HOST_VERSION',
  'EP_NVSHMEM_HOST_APART',
  'EP_NVSHMEM_HOST_TURNS',
  'EP_NVSHMEM_HOST_VERSION',
  'EP_RDM_SHIM',
  'EP_RDM_SHIM_LOG',
  'EP_TEST_RANK',
]);

const isSource =
  /^(?:packages|native|e2e|tools|\.ci)\/.*(?:\.(?:[cm]?[jt]s|[ch](?:pp)?|cu|inc|cmake|sh|py)|CMakeLists\.txt|\/run)$/;
const reads = [
  // of process.env, and of any other object of variables
  /\.(EP_[A-Z][A-Z0-9_]*)\b/g,
  /\b(?:env|environ(?:ment)?)(?:\.get\(|\[)\s*['"](EP_[A-Z][A-Z0-9_]*)['"]/g,
  // taken out of such an object, with what holds without it
  /[{,]\s*(EP_[A-Z][A-Z0-9_]*)(?:: \w+)? = ['"\d]/g,
  // std::getenv, what the fuzzers make of it, and what core/src/env.ts makes of such an object
  /\b(?:getenv|number_of|value)\(\s*['"](EP_[A-Z][A-Z0-9_]*)['"]/g,
  /\$ENV\{(EP_[A-Z][A-Z0-9_]*)\}/g,
];

/** @returns {Map<string, string>} each variable that is read, with a file that reads it */
function variablesRead() {
  const listed = execFileSync('git', ['ls-files', '-z', '--cached', '--others', '--exclude-standard'], { cwd: root });
  const files = listed.toString().split('\0');
  const found = new Map();
  for (const file of files.filter((name) => isSource.test(name) && existsSync(join(root, name)))) {
    const text = readFileSync(join(root, file), 'utf8');
    for (const pattern of reads) for (const [, name] of text.matchAll(pattern)) found.set(name, file);
  }
  return found;
}

test('every variable that is read is in the table, and every one of the table is read', () => {
  const read = variablesRead();
  const unlisted = [...read].filter(([name]) => !Object.hasOwn(SWITCHES, name) && !ownOfTests.has(name));
  expect(unlisted).toEqual([]);
  expect([...ownOfTests, ...Object.keys(SWITCHES)].filter((name) => !read.has(name))).toEqual([]);
});
