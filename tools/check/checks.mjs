// The table of checks behind `pnpm check`. Each gives the problems it found; an empty list is a pass.
import { readFileSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { ToolError } from '../console.mjs';
import { findLinkProblems } from '../docs/links.mjs';
import { pack, packedDir, tarballProblems } from '../pack/pack.mjs';
import { run } from '../process.mjs';
import { publicPackages, root, toolEnvironment } from '../workspace.mjs';
import { generators } from './generated.mjs';
import { findTextProblems } from './text-rules.mjs';

/** @typedef {{ name: string, what: string, find: () => Promise<readonly string[]> }} Check */

/**
 * @param {string} command
 * @param {readonly string[]} args
 * @returns {Promise<string[]>} the command's output if it failed
 */
async function outputOnFailure(command, ...args) {
  const env = toolEnvironment({ NO_COLOR: '1', FORCE_COLOR: '0' });
  const result = await run(command, args, { cwd: root, env, limitMs: 5 * 60_000 });
  if (result.code === 0) return [];
  return [`${command} ${args.join(' ')} ended with status ${result.code}:\n${result.output.trim()}`];
}

/** @param {readonly (() => Promise<readonly string[]>)[]} parts one after the other: machines here are small */
async function inTurn(...parts) {
  const problems = [];
  for (const part of parts) problems.push(...(await part()));
  return problems;
}

/** Files of the repository: tracked ones, and new ones that git does not ignore. */
async function repositoryFiles() {
  const result = await run('git', ['ls-files', '-z', '--cached', '--others', '--exclude-standard'], { cwd: root });
  if (result.code !== 0) throw new ToolError(`git ls-files ended with status ${result.code}: ${result.output.trim()}`);
  return [...new Set(result.output.split('\0').filter(Boolean))];
}

async function textProblems() {
  /** @type {Map<string, string>} */
  const texts = new Map();
  for (const path of await repositoryFiles()) {
    try {
      texts.set(path, readFileSync(join(root, path), 'utf8'));
    } catch {
      // Deleted in the work tree, still in git's index: there is no text to judge.
    }
  }
  const ofEach = [...texts].flatMap(([path, text]) => (text.includes('\0') ? [] : findTextProblems(path, text)));
  return [...ofEach, ...findLinkProblems([...texts.keys()], (path) => texts.get(path) ?? '')];
}

/** What a publish would upload, judged by our rules, publint and attw. Platform packages hold one binary, no code. */
async function shapeProblems() {
  rmSync(packedDir, { recursive: true, force: true });
  /** @param {import('../workspace.mjs').WorkspacePackage} entry */
  const judge = async (entry) => {
    const packed = await pack(entry);
    return [
      ...tarballProblems(packed),
      ...(await outputOnFailure('publint', 'run', '--strict', packed.tarball)),
      ...(await outputOnFailure('attw', packed.tarball, '--profile', 'esm-only', '--no-emoji')),
    ];
  };
  const entries = publicPackages().filter((candidate) => !candidate.dir.startsWith('native/platforms/'));
  // Two beside each other: each mostly waits for a process that starts.
  const halves = [0, 1].map((half) => entries.filter((_, index) => index % 2 === half));
  const found = await Promise.all(halves.map((half) => inTurn(...half.map((entry) => () => judge(entry)))));
  return found.flat();
}

// All packages as one program, in half the time of one after the other: what they share, Node's types first, is read once. `typecheck` of a package is for those who work in it.
async function typeProblems() {
  const unbuilt = await outputOnFailure('turbo', 'run', 'build', '--output-logs=errors-only');
  if (unbuilt.length > 0) return unbuilt;
  const programs = ['tools/check/tsconfig.json', 'tools/tsconfig.json'];
  return (await Promise.all(programs.map((program) => outputOnFailure('tsc', '--noEmit', '-p', program)))).flat();
}

/** @type {readonly Check[]} */
export const checks = [
  {
    name: 'types',
    what: 'TypeScript, all packages and tools',
    find: typeProblems,
  },
  { name: 'lint', what: 'format and lint', find: () => outputOnFailure('biome', 'check', '--error-on-warnings', '.') },
  {
    name: 'layers',
    what: 'who may import whom',
    find: () =>
      outputOnFailure(
        'depcruise',
        '--config',
        '.dependency-cruiser.cjs',
        '--output-type',
        'err-long',
        'packages',
        'native/js',
        'native/tests',
        'tools',
        'e2e',
      ),
  },
  {
    name: 'unused',
    what: 'unused files, exports and dependencies',
    find: () => outputOnFailure('knip', '--no-progress', '--no-config-hints'),
  },
  { name: 'shape', what: 'what the packed packages hold', find: shapeProblems },
  {
    name: 'generated',
    what: 'generated files are up to date',
    find: () =>
      inTurn(
        ...generators.map(
          ({ command: [command = '', ...args] }) =>
            () =>
              outputOnFailure(command, ...args, '--check'),
        ),
      ),
  },
  { name: 'text', what: 'machine paths, registry hosts, disabled tests, header rules, dead links', find: textProblems },
];
