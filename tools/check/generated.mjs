// Files that are made from another source of the same fact. Each generator takes --check: compare, change nothing.

/** @type {readonly { readonly files: string, readonly command: readonly string[] }[]} */
export const generators = [
  { files: 'native/js/abi.gen.ts, native/tests/abi/offsets.gen.c', command: ['node', 'tools/abi/main.mjs'] },
  { files: 'docs/errors.md', command: ['node', 'tools/docs/errors.mjs'] },
  { files: 'docs/environment.md', command: ['node', 'tools/docs/switches.mjs'] },
  { files: 'docs/transports.md', command: ['node', 'tools/docs/transports.mjs'] },
];
