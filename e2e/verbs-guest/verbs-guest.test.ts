/**
 * Backings against the kernel's own RDMA: a small guest boots with two soft-RoCE devices and runs the tests of the backing `verbs` and of `fabric` over `verbs;ofi_rxm` over them, then the
 * conformance suite's cases about data. Nothing is installed; the kernel is a package of the distribution, unpacked once into the cache.
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
const built = (name: string): string => here(`../../native/build/${name}`);
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
  // Before a kernel is fetched for nothing.
  const tools = spawnSync('sh', [script], { encoding: 'utf8' });
  if (tools.status === missingTool) return context.skip(tools.stderr.trim());
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

/** HAZARD: ofi_rxm makes room for the completions of 256 connections by default, which is more than a completion queue of soft-RoCE holds. */
const fewConnections = 'FI_UNIVERSE_SIZE=32';

/** Of a program of C++: all checks passed, and not less than so many. */
function checksPass(context: TestContext, name: string, run: readonly string[], least: number): void {
  if (!existsSync(built(name))) context.skip(`${name} is not built: cmake --build --preset release in native/`);
  const { stdout, status } = inGuest(context, ['env', fewConnections, built(name), ...run], 300);
  const last = [...stdout.matchAll(/(\d+) passed, (\d+) failed/g)].at(-1);
  expect(last?.[2], stdout).toBe('0');
  expect(Number(last?.[1])).toBeGreaterThan(least);
  expect(status, stdout).toBe(0);
}

it('moves bytes and signals through soft-RoCE, and fails as the software NIC does', { timeout: 400_000 }, (context) =>
  checksPass(context, 'verbs_proxy_test', [], 500),
);

it(
  'fabric: the engine of libfabric over soft-RoCE, also when a peer is killed, and a stranger comes',
  {
    timeout: 400_000,
  },
  (context) => checksPass(context, 'fabric_libfabric_test', ['verbs', '10.0.0.1'], 15_000),
);

/** The cases about data. Not the 100 000 puts around a ring: every instruction of the guest is emulated, and they alone would take minutes. */
const dataCases = '^(probe|put|signal|order|submit|flush|get|atomics|device)/(?!ring-wraps|max-message)';

interface CaseLine {
  readonly id: string;
  readonly outcome: 'pass' | 'fail' | 'not-applicable';
  readonly why?: string;
}

/** The two suites share the cases between them, unless EP_TEST_FULL=1: pairs of them, since the first one's backings have them in turn. */
const shares = process.env.EP_TEST_FULL === '1' ? 1 : 2;

/** The cases in the guest over these names of providers.mjs, against the committed outcomes. */
function casesPass(context: TestContext, backings: string, part: number, committed: string): void {
  const share = part % shares;
  const program = [process.execPath, here('./conformance.mjs'), backings, dataCases, `${share}/${shares}`, '120'];
  const { stdout, status } = inGuest(context, ['env', fewConnections, 'TMPDIR=/dev/shm', ...program], 700);
  const lines = stdout.split('\n').filter((line) => line.startsWith('{"id"'));
  const outcomes = lines.map((line) => JSON.parse(line) as CaseLine);
  const expected = readExpected(here(committed));
  for (const { id, outcome, why } of outcomes) compareOutcome(id, expected?.cases[id], outcome, new Error(why));
  const shared = transportCases.filter((_one, index) => Math.floor(index / 2) % shares === share);
  const asked = shared.filter((one) => new RegExp(dataCases).test(one.id));
  expect(outcomes.map((one) => one.id)).toEqual(asked.map((one) => one.id));
  expect(outcomes.filter((one) => one.outcome === 'pass').length).toBeGreaterThan(20 / shares);
  expect(status).toBe(0);
}

// Ranks meet by a store and by an exchange of their own, in turn.
it('passes the data cases of the conformance suite, as committed', { timeout: 800_000 }, (context) =>
  casesPass(context, 'verbs,verbsByExchange', 0, '../../packages/ibgda/test/conformance-verbs.expected.json'),
);

it(
  'fabric: passes the data cases of the conformance suite, with the outcomes of TCP',
  { timeout: 800_000 },
  (context) => casesPass(context, 'fabric', 1, '../../packages/nvshmem/test/fabric-conformance.expected.json'),
);

it('fabric: attention, experts and process groups of four ranks over soft-RoCE', { timeout: 400_000 }, (context) => {
  const program = [process.execPath, here('./work.mjs'), '4', '8'];
  const { stdout, status } = inGuest(context, ['env', fewConnections, 'TMPDIR=/dev/shm', ...program], 300);
  // Behind what the firmware writes to the same line.
  const lines = [...stdout.matchAll(/\{"done".*\}/g)].map(([line]) => JSON.parse(line));
  const done = ['attention', 'experts', 'groups'].map((name) => ({ done: name, ranks: 4, provider: 'verbs;ofi_rxm' }));
  expect(lines, stdout).toEqual(done);
  expect(status).toBe(0);
});
