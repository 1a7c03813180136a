import { mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { mustRun } from './command.js';
import { installNewestNode } from './newest-node.js';
import { Project, type Tarballs } from './project.js';

/** consumers/NAME.mts uses @ep/NAME the way its README shows. A public package without a consumer fails below. */
const consumers = readdirSync(join(import.meta.dirname, 'consumers')).map((file) => file.replace(/\.mts$/, ''));
const platforms = ['x64', 'arm64'].map((cpu) => `@ep/native-linux-${cpu}-gnu`);

const packed = mkdtempSync(join(tmpdir(), 'ep-packed-'));
let tarballs: Tarballs;
let newest: string;

beforeAll(async () => {
  await mustRun(process.execPath, ['tools/setup/pnpm.mjs', '--version']);
  await mustRun(process.execPath, ['tools/prebuild/main.mjs']);
  tarballs = JSON.parse(await mustRun(process.execPath, ['tools/pack/main.mjs', '--into', packed]));
  newest = await installNewestNode();
});
afterAll(() => rmSync(packed, { recursive: true, force: true }));

test('every public package has a consumer', () => {
  const packages = Object.keys(tarballs).filter((name) => !platforms.includes(name));
  expect(consumers.map((name) => `@ep/${name}`).sort()).toEqual(packages.sort());
});

test("this machine's platform package is packed", () => {
  expect(Object.keys(tarballs)).toContain(`@ep/native-linux-${process.arch}-gnu`);
});

describe.each(consumers)('@ep/%s, packed and installed alone', (name) => {
  let project: Project;
  beforeAll(async () => {
    project = new Project(join(import.meta.dirname, 'consumers', `${name}.mts`));
    const absent = platforms.filter((platform) => !(platform in tarballs));
    expect(await project.install(tarballs, absent)).toMatchObject({ status: 0 });
  });
  afterAll(() => project[Symbol.dispose]());

  test('there is no compiler where it was installed', async () => {
    // The control: what is on PATH is found.
    expect(await project.has('node')).toBe(true);
    for (const tool of ['cc', 'gcc', 'g++', 'c++', 'clang', 'make', 'ninja', 'cmake', 'node-gyp']) {
      expect([tool, await project.has(tool)]).toEqual([tool, false]);
    }
  });

  test("runs on this machine's Node", async () => {
    expect(await project.run(process.execPath)).toEqual({ status: 0, output: 'used\n' });
  });

  test('runs on the newest Node', async () => {
    expect(await project.run(newest)).toEqual({ status: 0, output: 'used\n' });
  });

  test.concurrent.each(['nodenext', 'bundler'] as const)('is typed under %s resolution', async (resolution) => {
    expect(await project.check(resolution)).toEqual({ status: 0, output: '' });
  });
});

test('without a platform package, what needs the addon names it, and what to do', async () => {
  using project = new Project(join(import.meta.dirname, 'without-addon.mts'));
  const ours = Object.entries(tarballs).filter(([name]) => !platforms.includes(name));
  expect(await project.install(Object.fromEntries(ours), platforms)).toMatchObject({ status: 0 });
  const { status, output } = await project.run(process.execPath);
  expect({ status, output }).toEqual({ status: 0, output: expect.stringMatching(/^\{.*\}\n$/) });
  const platform = `@ep/native-linux-${process.arch}-gnu`;
  expect(JSON.parse(output)).toEqual({
    code: 'EP_NATIVE_LOAD',
    message: expect.stringContaining(
      `remedies:\n1. install ${platform}, or build from the repository with \`npm run setup\`, or set EP_NATIVE_PATH to an ep.node`,
    ),
    context: {
      attempts: [
        { path: expect.stringMatching(/\/@ep\/native\/build\/Release\/ep\.node$/), error: 'not found' },
        { path: platform, error: 'not installed' },
      ],
    },
  });
});
