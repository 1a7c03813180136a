import { existsSync, readdirSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import type { Need } from '@ep/core';
import type { HostFacts } from '@ep/native';
import { describe, expect, it } from 'vitest';
import { type Check, checksOf, type Examined, networkText } from '../src/doctor/checks.js';
import { findProgram, findTool, formatBytes } from '../src/doctor/machine.js';
import { runEp } from './ep.js';
import { gpuOf, workingDriver } from './gpu-state.js';

const facts: HostFacts = {
  onlineCores: 8,
  affinityCores: 8,
  quotaCores: null,
  usableCores: 8,
  memoryTotal: 16 * 2 ** 30,
  memoryAvailable: 8 * 2 ** 30,
  cgroupLimit: null,
  cgroupUsed: null,
  addressSpaceLimit: null,
  memlockLimit: null,
  pinnable: null,
  openFilesLimit: 4096,
  mapCountLimit: 65_530,
  allocatable: 8 * 2 ** 30,
  allocatableSource: 'MemAvailable',
  kernel: 'Linux',
  cpuModel: 'a processor',
};
const network = { nics: [], gpus: [], text: '' };
const good: Examined = {
  node: 'v20.19.0',
  addon: { loaded: true, path: 'ep.node', abi: '1.0', facts, network },
  probes: [],
  gpu: { driver: workingDriver, devices: [gpuOf()] },
  reach: [],
  shm: { totalBytes: 2 ** 30, freeBytes: 2 ** 30 },
  tools: [{ name: 'nvcc', path: 'nvcc', version: 'release 13.0' }],
};

const checkOf = (examined: Examined, name: string): Check => checksOf(examined).find((check) => check.name === name)!;
const withFacts = (changed: Partial<HostFacts>): Examined => ({
  ...good,
  addon: { loaded: true, path: 'ep.node', abi: '1.0', facts: { ...facts, ...changed }, network },
});

const isObject = (value: unknown): value is Readonly<Record<string, unknown>> =>
  typeof value === 'object' && value !== null;

/** Names of all providers among the exports of the packages beside this one. */
async function exportedProviders(): Promise<string[]> {
  const packages = new URL('../../', import.meta.url);
  const entries = readdirSync(packages)
    .map((name) => new URL(`${name}/dist/index.js`, packages))
    .filter((entry) => existsSync(entry));
  const modules = await Promise.all(entries.map((entry) => import(entry.href) as Promise<object>));
  return modules
    .flatMap((module) => Object.values(module))
    .filter(isObject)
    .flatMap((backings) => Object.values(backings))
    .filter(isObject)
    .flatMap(({ name, probe, open }) =>
      typeof name === 'string' && typeof probe === 'function' && typeof open === 'function' ? [name] : [],
    );
}

/** Kernels for GPUs that were built before the addon changed are a failure, rightly; whether some lie around is not what is tested. */
const withoutKernels = { EP_CUDA_PATH: './no-such-kernels.so' };

describe('ep doctor', () => {
  it('finds this machine healthy and says so in JSON', async () => {
    const { code, stdout, stderr } = await runEp(['doctor', '--json'], withoutKernels);
    expect({ code, stderr }).toEqual({ code: 0, stderr: '' });
    const report = JSON.parse(stdout) as Examined & { readonly healthy: boolean; readonly checks: readonly Check[] };
    expect(report.healthy).toBe(true);
    const available = report.probes.flatMap(({ name, probe }) => (probe.available ? [name] : []));
    expect(available).toEqual(expect.arrayContaining(['nvshmem:shm', 'ibgda:soft', 'efa-gda:soft']));
    expect(report.probes[0]?.probe).toHaveProperty('capabilities.needs', expect.arrayContaining(['bundled', 'prior']));
    expect(report.addon).toMatchObject({ loaded: true, path: expect.stringMatching(/\.node$/) });
    expect(report.checks.map((check) => check.name)).toEqual(
      expect.arrayContaining([
        'node',
        'cores',
        'memory',
        'locked memory',
        'open files',
        'mappings',
        '/dev/shm',
        'nvcc',
      ]),
    );
  });

  it('probes every provider that a package of this repository exports', async () => {
    const { probes } = JSON.parse((await runEp(['doctor', '--json'])).stdout) as Examined;
    const exported = await exportedProviders();
    expect(exported).toEqual(expect.arrayContaining(['nvshmem:cuda', 'ibgda:verbs', 'efa-gda:hardware']));
    expect(probes.map(({ name }) => name).sort()).toEqual(exported.sort());
  });

  it('says what GPUs lack, and shows one that fails beside the others', async () => {
    const { stdout } = await runEp(['doctor'], withoutKernels);
    expect(stdout.match(/^.*nvshmem:cuda.*\n.*/m)![0]).toMatch(
      /^note\s+nvshmem:cuda\s+no GPU can be used: .*no-such-kernels\.so.* \[EP_UNAVAILABLE\]\n\s+-> .*a driver for CUDA 13 .* and libep_cuda\.so/,
    );
    const capabilities = {
      needs: new Set<Need>(),
      maxMessageBytes: 1,
      maxSignalSlots: 1,
      initiators: new Set<'host'>(),
    };
    const devices = [
      { name: 'a GPU', detail: {} },
      { name: '', detail: { unusable: 'looking at GPU 1: it is broken' } },
    ];
    const probes = [{ name: 'nvshmem:cuda', probe: { available: true, capabilities, devices } as const }];
    expect(checkOf({ ...good, probes }, 'nvshmem:cuda').found).toBe(
      'available on a GPU, no use of another (looking at GPU 1: it is broken)',
    );
  });

  it('prints the same for people, without colours in a pipe', async () => {
    const { code, stdout } = await runEp(['doctor'], withoutKernels);
    expect(code).toBe(0);
    expect(stdout).toMatch(/^ok\s+nvshmem:shm\s+available/m);
    expect(stdout).not.toContain('\u001b');
  });

  it('says in its help what its status is, which a device that is absent does not change', async () => {
    const { stdout } = await runEp(['doctor', '--help']);
    expect(stdout.replace(/\s+/g, ' ')).toContain(
      'status 1 if a transport, Node or the addon fails, not if a device is absent',
    );
    const probe = { available: false, code: 'EP_UNAVAILABLE', reason: 'no such device' } as const;
    expect(checkOf({ ...good, probes: [{ name: 'ibgda:hardware', probe }] }, 'ibgda:hardware').verdict).toBe('note');
  });

  it('fails with code and reason when the addon is missing', async () => {
    const env = { EP_NATIVE_PATH: './no-such-addon.node' };
    const { code, stdout } = await runEp(['doctor', '--json'], env);
    expect(code).toBe(1);
    const report = JSON.parse(stdout) as Examined & { readonly healthy: boolean };
    expect(report.healthy).toBe(false);
    expect(report.addon).toMatchObject({ loaded: false, code: 'EP_NATIVE_LOAD' });
    expect(report.probes[0]?.probe).toMatchObject({ available: false, code: 'EP_NATIVE_LOAD' });
    const text = await runEp(['doctor'], env);
    expect(text.code).toBe(1);
    expect(text.stdout).toContain('[EP_NATIVE_LOAD]');
    expect(text.stdout.match(/EP_NATIVE_PATH/g)).toHaveLength(1);
    expect(text.stdout).toMatch(/^fail\s+nvshmem:shm\s+not available without the native addon, see below/m);
  });

  it('shows how far network cards are, where there are any', () => {
    const text = '           mlx5_0\ncpu node 0  node\n';
    const addon = {
      loaded: true,
      path: 'ep.node',
      abi: '1.0',
      facts,
      network: { nics: ['mlx5_0'], gpus: [], text },
    } as const;
    const matrix = `\nnetwork cards by distance, nearest first: same, switch, bridges, root, node, system\n${text}`;
    expect(networkText({ addon, reach: [] })).toBe(matrix);
    expect(networkText(good)).toBe('');

    const gpu = '0000:13:00.0';
    const detail = { distance: 'switch', placement: 'host memory', gpudirect: 'nvidia-peermem is not loaded; load it' };
    const capabilities = {
      needs: new Set<Need>(),
      maxMessageBytes: 1,
      maxSignalSlots: 1,
      initiators: new Set<'host'>(),
    };
    const near = { available: true, capabilities, devices: [{ name: 'mlx5_0', detail }] } as const;
    const down = { available: false, code: 'EP_UNAVAILABLE', reason: 'port 1 is down', remedy: 'bring it up' } as const;
    const reach = [
      { gpu, probe: near },
      { gpu, probe: down },
    ];
    expect(networkText({ addon, reach })).toBe(
      `${matrix}gpu ${gpu}: mlx5_0 (switch), queues in host memory; nvidia-peermem is not loaded; load it\n` +
        `gpu ${gpu}: port 1 is down -> bring it up\n`,
    );
  });

  it('passes a machine without limits', () => {
    expect(checksOf(good).filter((check) => check.verdict !== 'ok')).toEqual([]);
  });

  it('names the limit and the remedy', () => {
    expect(checkOf({ ...good, node: 'v20.18.3' }, 'node')).toMatchObject({
      verdict: 'fail',
      remedy: expect.stringContaining('20.19'),
    });
    expect(checkOf({ ...good, node: 'v26.0.0' }, 'node').verdict).toBe('ok');
    expect(checkOf(withFacts({ usableCores: 1, quotaCores: 0.5 }), 'cores')).toMatchObject({
      verdict: 'warn',
      found: '1 usable (8 online, affinity 8, cgroup quota 0.5)',
      remedy: expect.stringContaining('quota of the container'),
    });
    expect(checkOf(withFacts({ usableCores: 1, affinityCores: 1 }), 'cores').remedy).toContain('affinity');
    expect(
      checkOf(
        withFacts({ allocatable: 2 ** 20, allocatableSource: 'cgroup memory.max', cgroupLimit: 2 ** 28 }),
        'memory',
      ),
    ).toMatchObject({
      verdict: 'warn',
      found: expect.stringMatching(/1\.00 MiB .* limited by cgroup memory\.max .*256 MiB/),
    });
    expect(checkOf(withFacts({ memlockLimit: 65_536, pinnable: 65_536 }), 'locked memory')).toMatchObject({
      verdict: 'note',
      found: '64.0 KiB',
    });
    const pinning = (name: string, pins?: boolean): Examined => ({
      ...withFacts({ memlockLimit: 65_536, pinnable: 65_536 }),
      probes: [
        {
          name,
          probe: {
            available: true,
            capabilities: { needs: new Set(), maxMessageBytes: 1, maxSignalSlots: 1, initiators: new Set() },
            devices: [{ name: 'a device', detail: pins === undefined ? {} : { pins } }],
          },
        },
      ],
    });
    for (const examined of [pinning('nvshmem:fabric', true), pinning('ibgda:verbs'), pinning('efa-gda:hardware')])
      expect(checkOf(examined, 'locked memory')).toMatchObject({
        verdict: 'warn',
        remedy: expect.stringMatching(/^[\w:-]+ pin what ranks allocate, raise memlock \(ulimit -l/),
      });
    expect(checkOf(pinning('nvshmem:fabric', false), 'locked memory').verdict).toBe('note');
    expect(checkOf(withFacts({ memlockLimit: 65_536 }), 'locked memory')).toMatchObject({
      verdict: 'ok',
      found: '64.0 KiB, which CAP_IPC_LOCK overrides',
    });
    expect(checkOf(withFacts({ openFilesLimit: 256 }), 'open files').verdict).toBe('warn');
    expect(checkOf(withFacts({ mapCountLimit: 1000 }), 'mappings').remedy).toContain('vm.max_map_count');
    expect(checkOf({ ...good, shm: undefined }, '/dev/shm').verdict).toBe('note');
    expect(checkOf({ ...good, tools: [{ name: 'nvcc' }] }, 'nvcc')).toMatchObject({
      verdict: 'note',
      found: 'not found',
    });
  });

  it('says which NCCL is found, and why one is of no use', async () => {
    const nccl = async (env: Readonly<Record<string, string>>) => {
      const { checks } = JSON.parse((await runEp(['doctor', '--json'], env)).stdout) as { readonly checks: Check[] };
      return checks.find(({ name }) => name === 'NCCL')!;
    };
    const standIn = fileURLToPath(new URL('../../../native/build/Release/libep_nccl_host.so', import.meta.url));
    expect(await nccl({ EP_NCCL_PATH: standIn })).toMatchObject({ verdict: 'ok', found: `2.28.9 (${standIn})` });
    const old = await nccl({ EP_NCCL_PATH: standIn, EP_NCCL_HOST_VERSION: '2804' });
    expect(old).toMatchObject({ verdict: 'note', found: expect.stringContaining('version code 2804') });
    expect(old.remedy).toContain('EP_NCCL_PATH');
  });

  it('says which NVSHMEM is found, and why one is of no use', async () => {
    const nvshmem = async (env: Readonly<Record<string, string>>) => {
      const { checks } = JSON.parse((await runEp(['doctor', '--json'], env)).stdout) as { readonly checks: Check[] };
      return checks.find(({ name }) => name === 'NVSHMEM')!;
    };
    const standIn = fileURLToPath(new URL('../../../native/build/Release/libep_nvshmem_host.so', import.meta.url));
    expect(await nvshmem({ EP_NVSHMEM_PATH: standIn })).toMatchObject({ verdict: 'ok', found: `3.4.5 (${standIn})` });
    const old = await nvshmem({ EP_NVSHMEM_PATH: standIn, EP_NVSHMEM_HOST_VERSION: '20900' });
    expect(old).toMatchObject({ verdict: 'note', found: expect.stringContaining('is NVSHMEM 2.9.0') });
    expect(old.remedy).toContain('EP_NVSHMEM_PATH');
  });

  it('finds programs on PATH and reads their version', async () => {
    expect(findProgram('sh', '/bin')).toBe('/bin/sh');
    expect(findProgram('no-such-program-anywhere')).toBeUndefined();
    expect(await findTool('node', ['no-such-program-anywhere', process.execPath])).toEqual({
      name: 'node',
      path: process.execPath,
      version: process.version,
    });
    expect(await findTool('none', ['no-such-program-anywhere'])).toEqual({ name: 'none' });
  });

  it('writes bytes in binary units', () => {
    expect([0, 1023, 1024, 1536, 100 * 2 ** 20, 2 ** 40].map(formatBytes)).toEqual([
      '0 B',
      '1023 B',
      '1.00 KiB',
      '1.50 KiB',
      '100 MiB',
      '1.00 TiB',
    ]);
  });
});
