/**
 * The `verbs` backing against the kernel's own RDMA: a small guest boots with two soft-RoCE devices and runs the test of the backing over them. Nothing is
 * installed; the kernel is a package of the distribution, unpacked once into the cache.
 */
import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { expect, it } from 'vitest';

const here = (path: string): string => fileURLToPath(new URL(path, import.meta.url));
const cache = here('../.cache/guest');
const program = here('../../native/build/release/verbs_proxy_test');
const script = here('../../native/tests/verbs-guest/run.sh');
const missingTool = 77;

interface Kernel {
  readonly image: string;
  readonly modules: string;
}

const output = (command: string, args: readonly string[], cwd?: string): string => {
  const { status, stdout } = spawnSync(command, args, { cwd, encoding: 'utf8' });
  return status === 0 ? stdout : '';
};

function unpackedKernel(): Kernel | undefined {
  const boot = join(cache, 'boot');
  const image = existsSync(boot) ? readdirSync(boot).find((file) => file.startsWith('vmlinuz-')) : undefined;
  if (image === undefined) return undefined;
  const modules = join(cache, 'lib/modules', image.slice('vmlinuz-'.length), 'kernel');
  return existsSync(modules) ? { image: join(boot, image), modules } : undefined;
}

/** Of the distribution's package; undefined where it cannot be had. */
function kernel(): Kernel | undefined {
  const there = unpackedKernel();
  if (there !== undefined) return there;
  const name = /Depends: (linux-image-\S+)/.exec(output('apt-cache', ['depends', 'linux-image-amd64']))?.[1];
  if (name === undefined) return undefined;
  mkdirSync(cache, { recursive: true });
  output('apt-get', ['download', name], cache);
  const archive = readdirSync(cache).find((file) => file.startsWith(name) && file.endsWith('.deb'));
  if (archive !== undefined) output('dpkg', ['-x', join(cache, archive), cache]);
  return unpackedKernel();
}

it('moves bytes and signals through soft-RoCE, and fails as the software NIC does', { timeout: 400_000 }, (context) => {
  if (!existsSync(program)) context.skip('verbs_proxy_test is not built: cmake --build --preset release in native/');
  const found = kernel();
  if (found === undefined) return context.skip('no kernel for a guest: apt-get download linux-image-amd64 failed');
  const run = spawnSync('sh', [script, found.image, found.modules, program], { encoding: 'utf8', timeout: 380_000 });
  if (run.status === missingTool) return context.skip(run.stderr.trim());
  expect(run.stdout).toMatch(/\b0 failed\b/);
  expect(Number(/(\d+) passed/.exec(run.stdout)?.[1])).toBeGreaterThan(500);
  expect(run.status).toBe(0);
});
