// node tools/prebuild/main.mjs: makes the platform packages that carry the addon to machines without a compiler, in
// .cache/prebuilds/linux-<cpu>-gnu (a package.json and a stripped ep.node). This machine's own is taken from the release
// build; arm64 is cross-built where Debian's cross compiler is installed.
import { copyFileSync, existsSync, mkdirSync, mkdtempSync, renameSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { Progress, runMain, ToolError } from '../console.mjs';
import { exitOnSignals, run } from '../process.mjs';
import { onPath, versionLine } from '../setup/system.mjs';
import { cacheDir, root, toolEnvironment } from '../workspace.mjs';

const prebuilds = join(cacheDir, 'prebuilds');
const released = join(root, 'native/build/Release/ep.node');
const crossCompiler = 'aarch64-linux-gnu-g++';

/** Machine names as `readelf -h` prints them. */
const elfMachine = { x64: 'Advanced Micro Devices X86-64', arm64: 'AArch64' };

/**
 * @param {string} command
 * @param {readonly string[]} args
 * @param {string} [cwd]
 * @returns {Promise<string>} its output
 */
async function must(command, args, cwd = root) {
  const result = await run(command, args, { cwd, env: toolEnvironment(), limitMs: 15 * 60_000 });
  if (result.code !== 0) {
    throw new ToolError(
      `${command} ${args.join(' ')} ended with status ${result.code}:\n${result.output.slice(-6000)}`,
    );
  }
  return result.output;
}

/** @returns {Promise<string>} path of the addon for arm64 */
async function crossBuild() {
  const build = join(cacheDir, 'build-linux-arm64-gnu');
  // The last line is the answer; what precedes it are messages.
  const includes = (await must('pnpm', ['exec', 'cmake-js', 'print-cmakejs-include'], join(root, 'native')))
    .trim()
    .split('\n')
    .at(-1);
  await must('cmake', [
    ...['-S', 'native', '-B', build, '-G', 'Ninja', '-DCMAKE_BUILD_TYPE=Release'],
    `-DCMAKE_TOOLCHAIN_FILE=${join(root, 'tools/prebuild/aarch64-linux-gnu.cmake')}`,
    `-DCMAKE_JS_INC=${includes}`,
  ]);
  await must('cmake', ['--build', build, '--target', 'ep']);
  return join(build, 'ep.node');
}

/**
 * @param {keyof typeof elfMachine} cpu
 * @param {string} addon
 * @param {string} strip
 * @returns {Promise<string>} the newest glibc symbol version that it needs
 */
async function assemble(cpu, addon, strip) {
  const name = `linux-${cpu}-gnu`;
  mkdirSync(prebuilds, { recursive: true });
  // Renamed when whole: pnpm packs whatever lies in the final folder.
  const staging = mkdtempSync(join(prebuilds, 'staging-'));
  try {
    copyFileSync(join(root, 'native/platforms', name, 'package.json'), join(staging, 'package.json'));
    await must(strip, ['--strip-unneeded', '-o', join(staging, 'ep.node'), addon]);
    const header = await must('readelf', ['-h', addon]);
    if (!header.includes(elfMachine[cpu])) throw new ToolError(`${addon} is not for ${elfMachine[cpu]}:\n${header}`);
    const needs = await must('readelf', ['--dynamic', '--version-info', '--wide', join(staging, 'ep.node')]);
    // A sanitizer or a GPU driver as a dependency would keep the addon from loading on the machines this is made for.
    const stray = /\[lib(?:asan|tsan|ubsan|cuda|stdc\+\+)[^\]]*\]/.exec(needs)?.[0];
    if (stray)
      throw new ToolError(`the addon for ${cpu} needs ${stray}, which its users do not have: is it a release build?`);
    rmSync(join(prebuilds, name), { recursive: true, force: true });
    renameSync(staging, join(prebuilds, name));
    const versions = [...needs.matchAll(/GLIBC_2\.(\d+)/g)].map(([, minor]) => Number(minor));
    return `needs glibc 2.${Math.max(...versions)}`;
  } finally {
    rmSync(staging, { recursive: true, force: true });
  }
}

await runMain(async () => {
  if (process.argv.length > 2) throw new ToolError('usage: prebuild/main.mjs');
  exitOnSignals();
  const progress = new Progress();
  const own = process.arch;
  if (own !== 'x64' && own !== 'arm64') throw new ToolError(`there is no platform package for ${own}`);
  if (!existsSync(released)) throw new ToolError('there is no release build: run `turbo run build:native` first');
  await progress.step(`linux-${own}-gnu`, () => assemble(own, released, 'strip'));
  if (own === 'arm64') return 0;
  if (onPath(crossCompiler)) {
    await progress.step(`linux-arm64-gnu (${await versionLine(crossCompiler)})`, async () =>
      assemble('arm64', await crossBuild(), 'aarch64-linux-gnu-strip'),
    );
  } else
    progress.line(`linux-arm64-gnu is not built: ${crossCompiler} is not installed (Debian: g++-aarch64-linux-gnu)`);
  return 0;
});
