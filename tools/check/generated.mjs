// Files that are made from another source of the same fact. Each generator takes --check: compare, change nothing.

/** @type {readonly { readonly file: string, readonly command: readonly string[] }[]} */
export const generators = [
  { file: 'docs/errors.md', command: ['node', 'tools/docs/errors.mjs'] },
  { file: 'docs/environment.md', command: ['node', 'tools/docs/switches.mjs'] },
  { file: 'native/js/abi.gen.ts', command: ['node', 'tools/abi/main.mjs'] },
];
