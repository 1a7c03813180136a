// node tools/pack/publish-dry-run.mjs: what `pnpm publish -r` would upload, without uploading it. Platform packages of
// other machines than this one are built elsewhere at a release; they are named here, not passed over in silence.
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { runMain, ToolError } from '../console.mjs';
import { run } from '../process.mjs';
import { publicPackages, root, toolEnvironment } from '../workspace.mjs';

await runMain(async () => {
  const packages = publicPackages();
  const missing = packages.filter(({ dir, manifest: { publishConfig } }) => {
    const directory = publishConfig?.directory;
    return directory !== undefined && !existsSync(join(root, dir, directory, 'package.json'));
  });
  for (const { name } of missing)
    process.stdout.write(`${name}: no addon is prebuilt here, not part of this dry run\n`);
  const included = packages.filter((entry) => !missing.includes(entry));
  const filters = included.map(({ name }) => `--filter=${name}`);
  const args = ['-r', ...filters, 'publish', '--dry-run', '--no-git-checks'];
  const result = await run('pnpm', args, { cwd: root, env: toolEnvironment({ NO_COLOR: '1' }), limitMs: 4 * 60_000 });
  process.stdout.write(result.output);
  const absent = included.filter(({ name }) => !result.output.includes(`${name}@`));
  if (result.code !== 0) throw new ToolError(`pnpm publish --dry-run ended with status ${result.code}`);
  if (absent.length > 0) throw new ToolError(`the dry run did not name ${absent.map(({ name }) => name).join(', ')}`);
  return 0;
});
