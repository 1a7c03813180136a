/**
 * The suites of several hosts, started as `turbo run e2e:multinode` does, on hosts that are given: two network namespaces stand for these, a command that enters them for ssh, and
 * stand-ins for srun and scontrol for an allocation of Slurm. What takes links of our own making is skipped there, and says so.
 */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { delimiter, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { nvshmem } from '@ep/nvshmem';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { givenHosts, placesOf, slotsOf } from './given.js';
import { makeNamespaces, type NamespaceHost, namespacesMissing } from './namespaces.js';

const probe = await nvshmem.fabric.probe();
const missing = namespacesMissing() || (probe.available ? '' : probe.reason);

const e2e = fileURLToPath(new URL('..', import.meta.url));
const vitest = fileURLToPath(new URL('../../node_modules/vitest/vitest.mjs', import.meta.url));
const standIn = (name: string): string => fileURLToPath(new URL(`stand-ins/${name}.mjs`, import.meta.url));

/** Variables of this run that are not for another one. */
const foreign = /^(VITEST|TINYPOOL|NODE_ENV|EP_HOSTS|EP_TEST_FULL|SLURM_)/;
const ownEnv = Object.fromEntries(Object.entries(process.env).filter(([name]) => !foreign.test(name)));

/** The rest makes hosts of its own elsewhere in this run, and takes as long again on given ones. */
const isFull = process.env.EP_TEST_FULL === '1';
const SAMPLE =
  'dispatch attention|half of the bytes cross|turn away|ep run on each|send tokens to experts|attention a rank is killed|the link is cut for 5 s';

interface Outcomes {
  readonly passed: readonly string[];
  readonly skipped: readonly string[];
}

/** What a run of those files, and of the cases of those names, says. */
async function outcomesOf(
  folder: string,
  env: NodeJS.ProcessEnv,
  files: readonly string[],
  names = '',
): Promise<Outcomes> {
  const report = join(folder, 'report.json');
  const args = [
    'run',
    ...files.map((file) => `multinode/${file}.test.ts`),
    '--reporter=json',
    `--outputFile=${report}`,
  ];
  const child = spawn(process.execPath, [vitest, ...args, ...(names === '' ? [] : ['-t', names])], {
    cwd: e2e,
    env: { ...ownEnv, ...env },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  let output = '';
  for (const stream of [child.stdout, child.stderr]) stream.on('data', (text) => (output += String(text)));
  const [code] = await once(child, 'close');
  const { testResults } = JSON.parse(readFileSync(report, 'utf8')) as {
    readonly testResults: readonly {
      readonly message?: string;
      readonly assertionResults: readonly { readonly status: string; readonly fullName: string }[];
    }[];
  };
  if (code !== 0) throw new Error(`${output}\n${testResults.map(({ message }) => message ?? '').join('\n')}`);
  const all = testResults.flatMap(({ assertionResults }) => assertionResults);
  const of = (...statuses: readonly string[]): string[] =>
    all.filter(({ status }) => statuses.includes(status)).map(({ fullName }) => fullName);
  return { passed: of('passed'), skipped: of('skipped', 'pending', 'todo') };
}

describe('what was given', () => {
  it('is a list, or an allocation', () => {
    expect(placesOf('a:2, b.c-d:16,e')).toEqual([
      { name: 'a', slots: 2 },
      { name: 'b.c-d', slots: 16 },
      { name: 'e', slots: 1 },
    ]);
    expect(slotsOf('2(x3),1')).toEqual([2, 2, 2, 1]);
    expect(givenHosts({})).toBeUndefined();
    expect(givenHosts({ EP_HOSTS: '', SLURM_JOB_ID: '' })).toBeUndefined();
    expect(givenHosts({ EP_HOSTS: 'a:2,b:2' })!.launcher('a', 'x y')).toEqual([
      'ssh',
      '-o',
      'BatchMode=yes',
      'a',
      'x y',
    ]);
    const own = givenHosts({ EP_HOSTS: 'a,b', EP_HOSTS_LAUNCHER: 'enter  -q' })!;
    expect(own.launcher('b', 'x')).toEqual(['enter', '-q', 'b', 'x']);
  });

  it.each([
    ['a:0,b', /EP_HOSTS must be a list of hosts and their slots/],
    ['a;b', /EP_HOSTS must be/],
    ['-v,b', /EP_HOSTS must be/],
    ['a:2', /need two, EP_HOSTS has a$/],
    ['a,a', /need two, EP_HOSTS has a,a$/],
  ])('is refused where it is %s', (list, message) => {
    expect(() => givenHosts({ EP_HOSTS: list })).toThrow(message);
  });
});

describe.skipIf(missing)(`hosts that were given${missing && ` (skipped: ${missing})`}`, { timeout: 240_000 }, () => {
  let hosts: readonly [NamespaceHost, NamespaceHost];
  let folder: string;
  const map = (): string => hosts.map(({ address, pid }) => `${address}=${pid}`).join();
  beforeAll(async () => {
    hosts = await makeNamespaces();
    folder = mkdtempSync(join(tmpdir(), 'ep-given-'));
  });
  afterAll(() => {
    for (const host of hosts ?? []) host.close();
    rmSync(folder, { recursive: true });
  });

  it('are reached by a command of ours, and nothing else is left there', async () => {
    const env = {
      EP_HOSTS: hosts.map(({ address }) => `${address}:2`).join(),
      EP_HOSTS_LAUNCHER: `${process.execPath} ${standIn('ssh')} ${map()}`,
    };
    const { passed, skipped } = await outcomesOf(folder, env, ['multinode', 'matrix', 'soak'], isFull ? '' : SAMPLE);
    for (const name of [
      'two hosts dispatch attention as the oracle says, with two ranks each',
      'two hosts reduce through the memory of each host first, so that half of the bytes cross',
      'two hosts turn away at once a host with another job secret',
      'two hosts run one job by ep run on each, which find themselves in a list of hosts',
      'two hosts by software NICs (ibgda) dispatch attention as the oracle says, with two ranks each',
      'two hosts by software NICs (efa) dispatch attention as the oracle says, with two ranks each',
      'two hosts by software NICs (ibgda) send tokens to experts and back as the oracle says, with two ranks each',
      'two hosts by software NICs (efa) send tokens to experts and back as the oracle says, with two ranks each',
      'two hosts under faults attention a rank is killed',
    ])
      expect(passed).toContain(name);
    const named = skipped.filter((name) => isFull || new RegExp(SAMPLE).test(name));
    expect(named.length).toBeGreaterThan(isFull ? 10 : 0);
    expect(named.filter((name) => !/\(skipped: .{10,}\)/.test(name))).toEqual([]);
    expect(skipped.find((name) => name.includes('the link is cut for 5 s'))).toMatch(/their links are not ours to cut/);
    await expect.poll(() => hosts.flatMap((host) => host.processes()), { timeout: 20_000 }).toEqual([]);
  });

  it('with room for one rank each are asked for no more', async () => {
    const env = {
      EP_HOSTS: hosts.map(({ address }) => address).join(),
      EP_HOSTS_LAUNCHER: `${process.execPath} ${standIn('ssh')} ${map()}`,
    };
    const { passed, skipped } = await outcomesOf(folder, env, ['multinode'], 'turn away|dispatch attention');
    expect(passed).toEqual(['two hosts turn away at once a host with another job secret']);
    expect(skipped.find((name) => name.includes('dispatch attention'))).toMatch(/room for 1 rank each, not 2/);
  });

  it('are those of an allocation of Slurm', async () => {
    for (const name of ['srun', 'scontrol']) {
      const args = name === 'srun' ? `'${map()}' ` : '';
      const script = `#!/bin/sh\nexec '${process.execPath}' '${standIn(name)}' ${args}"$@"\n`;
      writeFileSync(join(folder, name), script, { mode: 0o755 });
    }
    const env = {
      PATH: [folder, process.env.PATH].join(delimiter),
      SLURM_JOB_ID: '77',
      SLURM_JOB_NODELIST: '10.77.0.[1-2]',
      SLURM_TASKS_PER_NODE: '2(x2)',
    };
    const { passed } = await outcomesOf(folder, env, ['multinode'], 'srun|two hosts dispatch attention|ep run on each');
    expect(passed).toEqual([
      'two hosts dispatch attention as the oracle says, with two ranks each',
      'two hosts run one job by ep run on each, which find themselves in a list of hosts',
      'two hosts are started by srun, without a flag',
    ]);
    await expect.poll(() => hosts.flatMap((host) => host.processes()), { timeout: 20_000 }).toEqual([]);
  });

  it('that cannot be reached are told, not skipped', async () => {
    const env = {
      EP_HOSTS: '10.77.0.1,10.77.0.9',
      EP_HOSTS_LAUNCHER: `${process.execPath} ${standIn('ssh')} ${map()}`,
    };
    await expect(outcomesOf(folder, env, ['multinode'])).rejects.toThrow(/10\.77\.0\.9: .* ended with 255/);
  });
});
