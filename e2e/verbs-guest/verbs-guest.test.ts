/**
 * The `verbs` backing against the kernel's own RDMA: a small guest boots with two soft-RoCE devices and runs the test of the backing over them, then the
 * conformance suite's data cases. Nothing is installed; the kernel is a package of the distribution, unpacked once into the cache.
 */
import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { compareOutcome, readExpected } from '@ep/conformance';
import { transportCases } from '@ep/conformance/cases';
import { expect, it, type TestContext } from 'vitest';

const here = (path: string): string => fileURLToPath(new URL(path, import.meta.url));
const cache = here('../.cache/guest');
const program = here('../../native/build/verbs_proxy_test');
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

interface Guest {
  readonly stdout: string;
  readonly status: number | null;
}

/** Boots, runs the program with the names of the devices behind its arguments, and powers off. Skips where something of that cannot be had. */
function inGuest(context: TestContext, command: readonly string[], seconds: number): Guest {
  const found = kernel();
  if (found === undefined) return context.skip('no kernel for a guest: apt-get download linux-image-amd64 failed');
  const run = spawnSync('sh', [script, found.image, found.modules, ...command], {
    encoding: 'utf8',
    timeout: (seconds + 60) * 1000,
    env: { ...process.env, EP_GUEST_SECONDS: String(seconds) },
  });
  if (run.status === missingTool) return context.skip(run.stderr.trim());
  return { stdout: run.stdout, status: run.status };
}

it('moves bytes and signals through soft-RoCE, and fails as the software NIC does', { timeout: 400_000 }, (context) => {
  if (!existsSync(program)) context.skip('verbs_proxy_test is not built: cmake --build --preset release in native/');
  const { stdout, status } = inGuest(context, [program], 300);
  expect(stdout).toMatch(/\b0 failed\b/);
  expect(Number(/(\d+) passed/.exec(stdout)?.[1])).toBeGreaterThan(500);
  expect(status).toBe(0);
});

/** The cases about data. Not the 100 000 puts around a ring: every instruction of the guest is emulated, and they alone would take minutes. */
const dataCases = '^(probe|put|signal|order|submit|flush|get|atomics|device)/(?!ring-wraps|max-message)';

interface CaseLine {
  readonly id: string;
  readonly outcome: 'pass' | 'fail' | 'not-applicable';
  readonly why?: string;
}

it('passes the data cases of the conformance suite, as committed', { timeout: 800_000 }, (context) => {
  const command = ['env', 'TMPDIR=/dev/shm', process.execPath, here('./conformance.mjs'), dataCases, '120'];
  const { stdout, status } = inGuest(context, command, 700);
  const lines = stdout.split('\n').filter((line) => line.startsWith('{"id"'));
  const outcomes = lines.map((line) => JSON.parse(line) as CaseLine);
  const expected = readExpected(here('../../packages/ibgda/test/conformance-verbs.expected.json'));
  for (const { id, outcome, why } of outcomes) compareOutcome(id, expected?.cases[id], outcome, new Error(why));
  const asked = transportCases.filter((one) => new RegExp(dataCases).test(one.id));
  expect(outcomes.map((one) => one.id)).toEqual(asked.map((one) => one.id));
  expect(outcomes.filter((one) => one.outcome === 'pass').length).toBeGreaterThan(20);
  expect(status).toBe(0);
});
