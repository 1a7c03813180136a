// node tools/pack/main.mjs --into DIR: packs every public package as a publish would and prints {name: tarball} as JSON.
// A platform package is packed when its addon is prebuilt (tools/prebuild); the others hold no machine code.
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { runMain, ToolError } from '../console.mjs';
import { publicPackages, root } from '../workspace.mjs';
import { pack, tarballProblems } from './pack.mjs';

await runMain(async () => {
  const [flag, into, ...rest] = process.argv.slice(2);
  if (flag !== '--into' || into === undefined || rest.length > 0)
    throw new ToolError('usage: pack/main.mjs --into DIR');
  /** @type {Record<string, string>} */
  const tarballs = {};
  for (const entry of publicPackages()) {
    const { directory } = entry.manifest.publishConfig ?? {};
    if (directory !== undefined && !existsSync(join(root, entry.dir, directory, 'package.json'))) continue;
    const packed = await pack(entry, into);
    const problems = tarballProblems(packed);
    if (problems.length > 0) throw new ToolError(problems.join('\n'));
    tarballs[entry.name] = packed.tarball;
  }
  process.stdout.write(`${JSON.stringify(tarballs, null, 2)}\n`);
  return 0;
});
