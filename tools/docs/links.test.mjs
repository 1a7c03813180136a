import { expect, test } from 'vitest';
import { findLinkProblems } from './links.mjs';

/** @param {string} text of docs/page.md, in a repository with two more files */
function problemsOf(text) {
  /** @type {Record<string, string>} */
  const files = {
    'docs/page.md': text,
    'README.md':
      '# The whole\n\n## Try it, twice\n\n## `code` & more\n\n## Same\n\n## Same\n\n```sh\n# no heading\n```\n',
    'packages/a/src/a.ts': '',
  };
  return findLinkProblems(Object.keys(files), (path) => files[path] ?? '');
}

test.each([
  ['a file that is not there', 'see\n[x](gone.md)', 'docs/gone.md is no file'],
  ['another case', '[x](../readme.md)', 'readme.md is no file'],
  ['a heading that is not there', '[x](../README.md#try-it)', 'README.md has no heading #try-it'],
  ['a comment in code that looks like a heading', '[x](../README.md#no-heading)', 'has no heading'],
  ['a heading of its own', '# Here\n\n[x](#there)', 'docs/page.md has no heading #there'],
  ['a path beyond the repository', '[x](../../other/README.md)', 'leaves the repository'],
  ['an absolute path', '[x](/README.md)', 'leaves the repository'],
  ['an image', '![picture](plan.svg)', 'docs/plan.svg is no file'],
  ['a definition', 'see [x]\n\n[x]: gone.md', 'docs/gone.md is no file'],
  ['an escape that is none', '[x](100%.md)', 'docs/100%.md is no file'],
  ['a link after code', '```sh\ncd [x](y.md)\n```\n[x](gone.md)', 'docs/gone.md is no file'],
])('%s is refused', (_, text, why) => {
  const problems = problemsOf(text);
  expect(problems).toHaveLength(1);
  expect(problems[0]).toContain(why);
});

test('the line of a dead link is told', () => {
  expect(problemsOf('one\n\n```text\n[x](y.md)\n```\n\n[x](gone.md)')[0]).toMatch(/^docs\/page\.md:7: /);
});

test.each([
  [
    'files, folders and headings',
    '[a](../README.md) [b](../packages/a) [c](../packages/a/src/a.ts) [d](../README.md#try-it-twice)',
  ],
  [
    'headings with code or twice the same',
    '[a](../README.md#code--more) [b](../README.md#same) [c](../README.md#same-1)',
  ],
  ['hosts', '[a](https://host.example/x.md) [b](mailto:a@b.example)'],
  ['code', '```md\n[x](gone.md)\n```\n\nand `[x](gone.md)` and ``[`x`](gone.md)``'],
  ['titles and brackets', '[a](../README.md "the whole") [b](<../README.md>)'],
  ['brackets in prose', 'row [3] (see above)'],
])('%s pass', (_, text) => {
  expect(problemsOf(text)).toEqual([]);
});
