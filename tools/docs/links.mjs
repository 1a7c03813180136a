// Relative links of Markdown files lead somewhere: to a file or folder of the repository, and to a heading where they name one.
import { posix } from 'node:path';

/** Text without what is code: nothing in it is a link. Line breaks stay, so that line numbers do. */
const withoutCode = (/** @type {string} */ text) =>
  text
    .replace(/^([ \t]*)(`{3,}|~{3,})[\s\S]*?(?:^[ \t]*\2[`~]*[ \t]*$|(?![\s\S]))/gm, (block) =>
      block.replace(/[^\n]/g, ''),
    )
    .replace(/(`+)(?!`)[^\n]*?[^`\n]\1(?!`)/g, '');

/** Inline links and images, and reference definitions; the target is group 1 or 2. A title may follow it. */
const links = /\]\(\s*<?([^()\s>]+)>?(?:\s+"[^"\n]*")?\s*\)|^ {0,3}\[[^\]\n]+\]:\s*<?(\S+?)>?(?:\s|$)/gm;

/** @param {string} text a part of a target; what is no valid escape stands for itself */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/**
 * The anchor that GitHub gives a heading.
 * @param {string} heading
 */
const anchorOf = (heading) =>
  heading
    .replace(/\[([^\]]*)\]\([^)]*\)/g, '$1')
    .toLowerCase()
    .replace(/[^\p{L}\p{N}\s_-]/gu, '')
    .trim()
    .replace(/\s/g, '-');

/** @param {string} text */
function anchorsOf(text) {
  /** @type {Map<string, number>} */
  const seen = new Map();
  const fences = text.replace(/^([ \t]*)(`{3,})[\s\S]*?^[ \t]*\2[ \t]*$/gm, '');
  return new Set(
    Array.from(fences.matchAll(/^#{1,6}\s+(.+?)\s*#*$/gm), ([, heading = '']) => {
      const anchor = anchorOf(heading);
      const times = seen.get(anchor) ?? 0;
      seen.set(anchor, times + 1);
      return times === 0 ? anchor : `${anchor}-${times}`;
    }),
  );
}

/** @param {readonly string[]} files */
function withFolders(files) {
  const known = new Set(['.', ...files]);
  for (const file of files) for (let up = posix.dirname(file); up !== '.'; up = posix.dirname(up)) known.add(up);
  return known;
}

/**
 * @param {readonly string[]} files every file of the repository, as paths from the root
 * @param {(path: string) => string} read
 * @returns {string[]} one line per link that leads nowhere: path:line: dead link: why
 */
export function findLinkProblems(files, read) {
  const known = withFolders(files);
  const problems = [];
  for (const path of files.filter((file) => file.endsWith('.md'))) {
    const text = withoutCode(read(path));
    for (const match of text.matchAll(links)) {
      const target = match[1] ?? match[2] ?? '';
      if (/^(?:[a-z][a-z+.-]*:|\/\/)/i.test(target)) continue;
      const [link = '', anchor] = target.split('#').map(decoded);
      const place = link === '' ? path : posix.normalize(posix.join(posix.dirname(path), link)).replace(/\/$/, '');
      const why =
        link.startsWith('/') || place.startsWith('..')
          ? 'it leaves the repository: write it relative to this file'
          : !known.has(place)
            ? `${place} is no file or folder of the repository`
            : anchor !== undefined && place.endsWith('.md') && !anchorsOf(read(place)).has(anchor)
              ? `${place} has no heading #${anchor}`
              : undefined;
      if (why === undefined) continue;
      const line = text.slice(0, match.index).split('\n').length;
      problems.push(`${path}:${line}: dead link: ${target}\n    ${why}`);
    }
  }
  return problems;
}
