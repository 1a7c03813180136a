// Shared by the documentation generators: load @ep/core's build, write the page or compare it.
import { existsSync, readFileSync } from 'node:fs';
import { join, relative } from 'node:path';
import { pathToFileURL } from 'node:url';
import { runMain, ToolError } from '../console.mjs';
import { writeIfChanged } from '../setup/toolchain.mjs';
import { root } from '../workspace.mjs';

/**
 * A cell of a Markdown table: one line, and no character that would end the cell.
 * @param {string} text
 */
export const cell = (text) => text.replace(/\s+/g, ' ').replace(/\|/g, '\\|').trim();

/**
 * @param {readonly string[]} head
 * @param {readonly (readonly string[])[]} rows
 */
export const table = (head, rows) =>
  [head, head.map(() => '---'), ...rows].map((row) => `| ${row.map(cell).join(' | ')} |`).join('\n');

/**
 * Writes a page, or with --check compares it and fails when it differs.
 * @param {string} page path from the root
 * @param {string} source the export of @ep/core that the page is made of
 * @param {(value: any) => string} render
 */
export const generatePage = (page, source, render) =>
  runMain(async () => {
    const flags = process.argv.slice(2);
    const check = flags[0] === '--check';
    if (flags.length > (check ? 1 : 0)) throw new ToolError(`expected nothing or --check, found ${flags.join(' ')}`);
    const entry = join(root, 'packages/core/dist/index.js');
    if (!existsSync(entry)) throw new ToolError('@ep/core is not built: run `turbo run build --filter @ep/core`');
    const value = (await import(pathToFileURL(entry).href))[source];
    if (typeof value !== 'object' || value === null) {
      throw new ToolError(`@ep/core exports no ${source}, which ${page} is made of`);
    }
    const path = join(root, page);
    const text = render(value);
    if (!check) {
      writeIfChanged(path, text);
      return 0;
    }
    if (existsSync(path) && readFileSync(path, 'utf8') === text) return 0;
    const command = `node ${relative(root, process.argv[1] ?? '')}`;
    throw new ToolError(`${page} does not fit ${source} of @ep/core: run \`${command}\` and commit the page`);
  });
