// node tools/abi/main.mjs [--check]: native/include/ep/abi/*.h -> native/js/abi.gen.ts and native/tests/abi/offsets.gen.c.
// --check compares instead of writing and fails when a committed file differs.
import { mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { runMain, ToolError } from '../console.mjs';
import { root } from '../workspace.mjs';
import { emitOffsets, emitTypeScript } from './emit.mjs';
import { AbiError, emptyAbi, includedHeaders, parseHeader } from './parse.mjs';

const folder = 'native/include/ep/abi';

/** @param {string} file */
const readOrEmpty = (file) => {
  try {
    return readFileSync(join(root, file), 'utf8');
  } catch {
    return '';
  }
};

function readAbi() {
  const headers = readdirSync(join(root, folder))
    .filter((file) => file.endsWith('.h'))
    .sort();
  const abi = emptyAbi();
  /** @type {Set<string>} */
  const done = new Set();
  /** @param {string} header */
  const add = (header) => {
    if (done.has(header)) return;
    done.add(header);
    const text = readFileSync(join(root, folder, header), 'utf8');
    for (const included of includedHeaders(text)) add(included);
    parseHeader(abi, `${folder}/${header}`, text);
  };
  for (const header of headers) add(header);
  return { abi, headers };
}

await runMain(async () => {
  const [flag, ...rest] = process.argv.slice(2);
  if ((flag !== undefined && flag !== '--check') || rest.length > 0)
    throw new ToolError('usage: abi/main.mjs [--check]');
  try {
    const { abi, headers } = readAbi();
    const files = {
      'native/js/abi.gen.ts': emitTypeScript(abi),
      'native/tests/abi/offsets.gen.c': emitOffsets(abi, headers),
    };
    const stale = Object.entries(files).filter(([file, text]) => readOrEmpty(file) !== text);
    if (flag === '--check') {
      for (const [file] of stale) console.error(`${file} differs from ${folder}: run node tools/abi/main.mjs`);
      return stale.length === 0 ? 0 : 1;
    }
    for (const [file, text] of stale) {
      mkdirSync(dirname(join(root, file)), { recursive: true });
      writeFileSync(join(root, file), text);
      console.log(`wrote ${file}`);
    }
    return 0;
  } catch (error) {
    if (error instanceof AbiError) throw new ToolError(error.message);
    throw error;
  }
});
