/** Real text: Markdown and text files of a folder and of the packages installed under it. */
import { createHash } from 'node:crypto';
import { existsSync, readdirSync, readFileSync, realpathSync, statSync } from 'node:fs';
import { basename, dirname, extname, join, relative, resolve, sep } from 'node:path';
import { EpError, invalid } from '@ep/core';
import { fileError } from '../failure.js';

export interface TextFile {
  /** Path from the folder; for a file of a package, from the package's name on. */
  readonly name: string;
  readonly text: string;
  /** Of the content: what makes two files the same, and the order in which they are taken. */
  readonly hash: string;
}

const EXTENSIONS = new Set(['.md', '.markdown', '.txt']);
const smallestFile = 200;
const largestFile = 4 * 2 ** 20;
const deepest = 12;
const modules = 'node_modules';

/** The nearest folder upwards that looks like the root of a workspace or package, or `from` itself. */
export function findRoot(from: string): string {
  let found: string | undefined;
  for (let folder = resolve(from); ; folder = dirname(folder)) {
    if (existsSync(join(folder, 'pnpm-workspace.yaml')) || existsSync(join(folder, '.git'))) return folder;
    if (found === undefined && existsSync(join(folder, 'package.json'))) found = folder;
    if (dirname(folder) === folder) return found ?? resolve(from);
  }
}

/**
 * All files, each content once, in the order of their hashes: a mixture that does not depend on where they lie. Links are followed only into
 * installed packages, each by its real path and once, so that the cycles of a pnpm store end.
 */
export function collectDocuments(folder: string): TextFile[] {
  const root = realFolder(folder);
  const found = new Map<string, string>();
  const queue: string[] = [];
  walk(root, (path) => found.set(path, relative(root, path)), queue);
  const seen = new Set<string>();
  for (let next = queue.pop(); next !== undefined; next = queue.pop()) {
    if (seen.has(next)) continue;
    seen.add(next);
    for (const packageFolder of packagesIn(next)) {
      if (seen.has(packageFolder)) continue;
      seen.add(packageFolder);
      const name = packageFolder.slice(packageFolder.lastIndexOf(`${sep}${modules}${sep}`) + modules.length + 2);
      walk(packageFolder, (path) => found.set(path, join(name, relative(packageFolder, path))), queue);
      queue.push(packageFolder.slice(0, packageFolder.lastIndexOf(`${sep}${modules}${sep}`) + modules.length + 1));
    }
  }
  const byHash = new Map<string, TextFile>();
  for (const [path, name] of [...found].sort(([, a], [, b]) => (a < b ? -1 : a > b ? 1 : 0))) {
    const file = readText(path, name);
    if (file !== undefined && !byHash.has(file.hash)) byHash.set(file.hash, file);
  }
  return [...byHash.values()].sort((a, b) => (a.hash < b.hash ? -1 : 1));
}

function realFolder(folder: string): string {
  try {
    const root = realpathSync(folder);
    if (statSync(root).isDirectory()) return root;
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'ENOENT') throw fileError('read', folder, error);
  }
  throw invalid('--from', { where: 'demo', expected: 'an existing folder', found: folder });
}

/** Calls `take` for every text file below a folder, and puts the `node_modules` folders that it meets into `installed`. */
function walk(folder: string, take: (path: string) => void, installed: string[], depth = 0): void {
  for (const entry of listed(folder)) {
    const path = join(folder, entry.name);
    if (entry.isFile() && EXTENSIONS.has(extname(entry.name).toLowerCase())) take(path);
    if (!entry.isDirectory() || entry.name.startsWith('.') || entry.name === 'dist' || entry.name === 'build') continue;
    if (entry.name === modules) installed.push(path);
    else if (depth < deepest) walk(path, take, installed, depth + 1);
  }
}

/** Real paths of the packages in a `node_modules` folder. A package that is not installed but linked from a workspace is not among them. */
function packagesIn(folder: string): string[] {
  const names = listed(folder).flatMap((entry) => {
    if (entry.name.startsWith('.')) return [];
    if (!entry.name.startsWith('@')) return [entry.name];
    return listed(join(folder, entry.name)).map((scoped) => join(entry.name, scoped.name));
  });
  return names.flatMap((name) => {
    try {
      const path = realpathSync(join(folder, name));
      return path.includes(`${sep}${modules}${sep}`) && statSync(path).isDirectory() ? [path] : [];
    } catch {
      // A link to nowhere: an optional package that is not for this platform.
      return [];
    }
  });
}

function listed(folder: string) {
  try {
    return readdirSync(folder, { withFileTypes: true });
  } catch {
    return [];
  }
}

function readText(path: string, name: string): TextFile | undefined {
  try {
    const { size } = statSync(path);
    if (size < smallestFile || size > largestFile) return undefined;
    const text = readFileSync(path, 'utf8');
    return { name, text, hash: createHash('sha256').update(text).digest('hex') };
  } catch {
    // It went away, or may not be read: there are others.
    return undefined;
  }
}

export interface DemoDocument {
  readonly name: string;
  readonly tokens: Int32Array;
}

/** Which documents to take: at least so many, of at least so many tokens together, one of at least `longest`. */
export interface Selection {
  readonly documents: number;
  readonly tokens: number;
  readonly longest: number;
  /** Where the longest one, and the others, are cut. */
  readonly longestCut: number;
  readonly cut: number;
}

export const fullSelection: Selection = { documents: 24, tokens: 34_000, longest: 8192, longestCut: 10_240, cut: 2048 };
export const smallSelection: Selection = { documents: 8, tokens: 1500, longest: 400, longestCut: 500, cut: 160 };

/** No token has more characters in text that people wrote; cutting the text first saves tokenising a whole change log. */
const charactersPerToken = 16;

/** Takes files in order until the selection is satisfied. Throws `EP_INVALID_ARGUMENT` saying what is missing. */
export function selectDocuments(
  files: readonly TextFile[],
  wanted: Selection,
  encode: (text: string) => readonly number[],
): DemoDocument[] {
  const tokensOf = (file: TextFile, cut: number): Int32Array =>
    Int32Array.from(encode(file.text.slice(0, cut * charactersPerToken)).slice(0, cut));
  const documents: DemoDocument[] = [];
  let total = 0;
  let longFile: TextFile | undefined;
  for (const file of files) {
    if (file.text.length < wanted.longest * 2) continue;
    const tokens = tokensOf(file, wanted.longestCut);
    if (tokens.length < wanted.longest) continue;
    longFile = file;
    documents.push({ name: file.name, tokens });
    total += tokens.length;
    break;
  }
  for (const file of files) {
    if (documents.length >= wanted.documents && total >= wanted.tokens) break;
    if (file === longFile) continue;
    const tokens = tokensOf(file, wanted.cut);
    if (tokens.length === 0) continue;
    documents.push({ name: file.name, tokens });
    total += tokens.length;
  }
  if (longFile !== undefined && documents.length >= wanted.documents && total >= wanted.tokens) return documents;
  throw new EpError(
    'EP_INVALID_ARGUMENT',
    `demo: found ${documents.length} documents of ${total} tokens${longFile === undefined ? ', none long enough' : ''}; needed ${wanted.documents} of ${wanted.tokens} tokens, one of ${wanted.longest}: install the packages first, or name another folder with --from`,
    { context: { documents: documents.length, tokens: total, wanted } },
  );
}

/** `readme.md` says little in a report: the last folder goes with it. */
export function shortName(name: string): string {
  const parent = basename(dirname(name));
  return parent === '' || parent === '.' ? basename(name) : `${parent}/${basename(name)}`;
}
