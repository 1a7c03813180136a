/** What `ep doctor` says of each GPU, of the driver, and of the first step that fails where there is none. */
import { mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import type { GpuFacts } from '@ep/native';
import { afterAll, describe, expect, it } from 'vitest';
import type { Check, Examined } from '../src/doctor/checks.js';
import { gpuChecks } from '../src/doctor/gpu-checks.js';
import { examineGpuDriver, type GpuDriver } from '../src/doctor/gpu-driver.js';
import { runEp } from './ep.js';
import { gpuOf, workingDriver } from './gpu-state.js';

const folder = mkdtempSync(join(tmpdir(), 'ep-doctor-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

const checksOf = (devices: readonly GpuFacts[], driver: Partial<GpuDriver> = {}, nics = false): readonly Check[] =>
  gpuChecks({ driver: { ...workingDriver, ...driver }, devices }, nics);
const named = (checks: readonly Check[], name: string): Check => checks.find((check) => check.name === name)!;
const withLibrary = (library: object): Partial<GpuDriver> => ({
  library: { ...(workingDriver.library as Extract<GpuDriver['library'], { loaded: true }>), ...library },
});

describe('a GPU', () => {
  it('of which nothing is missing has a line for what it is, for whom, for its peers and for network cards', () => {
    expect(checksOf([gpuOf()])).toEqual([
      {
        name: 'GPU driver',
        verdict: 'ok',
        found: 'CUDA 13.0 (kernel module 580.159.04, open), 1 GPU; libep_cuda.so brings the runtime of CUDA 13.0',
      },
      {
        name: 'GPU 0',
        verdict: 'ok',
        found: 'NVIDIA H200 at 0000:84:00.0, compute capability 9.0, 139 GiB of memory',
      },
      {
        name: 'GPU 0 sharing',
        verdict: 'ok',
        found: 'processes map its memory (CUDA IPC); compute mode default: any number of processes',
      },
      { name: 'GPU 0 peers', verdict: 'ok', found: 'no other GPU here' },
      { name: 'GPU 0 NICs', verdict: 'ok', found: 'network cards reach its memory by DMA-BUF and by address' },
    ]);
  });

  it('that processes cannot share says what that forbids, and what to do', () => {
    const closed = named(checksOf([gpuOf({ ipc: false })]), 'GPU 0 sharing');
    expect(closed).toMatchObject({ verdict: 'warn', found: expect.stringContaining('no CUDA IPC') });
    expect(closed.remedy).toContain('as threads of one process');
    const exclusive = named(checksOf([gpuOf({ exclusive: true })]), 'GPU 0 sharing');
    expect(exclusive).toMatchObject({
      verdict: 'warn',
      found: expect.stringContaining('exclusive: one process at a time, another one is refused'),
    });
    expect(exclusive.remedy).toMatch(/^nvidia-smi -i 0000:84:00\.0 -c DEFAULT/);
  });

  it('lists the peers that it maps and those that it does not', () => {
    const one = gpuOf({ peers: [1] });
    const broken = gpuOf({ unusable: 'looking at GPU 3: it is broken' });
    const checks = checksOf([one, gpuOf({ peers: [0, 2] }), gpuOf(), broken]);
    expect(named(checks, 'GPU 0 peers')).toMatchObject({
      verdict: 'warn',
      found: 'maps memory of GPU 1, not of GPU 2',
      remedy: expect.stringContaining('nvidia-smi topo -p2p r'),
    });
    expect(named(checks, 'GPU 1 peers')).toEqual({
      name: 'GPU 1 peers',
      verdict: 'ok',
      found: 'maps memory of GPU 0, 2',
    });
    expect(named(checks, 'GPU 2 peers').found).toBe('maps no memory of others: not of GPU 0, 1');
    expect(named(checks, 'GPU 3')).toMatchObject({
      verdict: 'warn',
      found: 'cannot be used: looking at GPU 3: it is broken',
    });
    expect(checks.filter(({ name }) => name.startsWith('GPU 3'))).toHaveLength(1);
  });

  it('without cooperative launches is warned of', () => {
    expect(named(checksOf([gpuOf({ cooperative: false })]), 'GPU 0')).toMatchObject({
      verdict: 'warn',
      found: expect.stringContaining('cooperative launch'),
    });
  });

  it.each([
    {
      lacks: 'nvidia-peermem',
      driver: { peermem: false },
      verdict: 'ok',
      found:
        'network cards reach its memory by DMA-BUF; not by address: the kernel module nvidia-peermem is not loaded',
    },
    {
      lacks: 'a kernel that takes DMA-BUFs',
      driver: { kernel: '5.4.0-150-generic' },
      verdict: 'ok',
      found: /by address; not by DMA-BUF: the kernel is 5\.4\.0-150-generic, and 5\.12 is the first that takes them$/,
    },
    {
      lacks: 'both ways',
      driver: { peermem: false, ...withLibrary({ gpus: [{ pci: '0000:84:00.0', dmabuf: false, gpudirect: true }] }) },
      verdict: 'warn',
      found: /do not reach its memory; not by DMA-BUF: this GPU, or its driver, exports no DMA-BUFs; not by address: /,
      remedy: /use the open GPU kernel modules.*, or load nvidia-peermem \(modprobe nvidia-peermem, as root/,
    },
    {
      lacks: 'the hardware',
      driver: withLibrary({ gpus: [{ pci: '0000:84:00.0', dmabuf: false, gpudirect: false }] }),
      verdict: 'warn',
      found: /not by address: this GPU has no GPUDirect RDMA$/,
    },
  ])('says which way of network cards to its memory lacks $lacks', ({ driver, verdict, found, remedy }) => {
    const check = named(checksOf([gpuOf()], driver, true), 'GPU 0 NICs');
    expect(check).toMatchObject({ verdict });
    expect(check.found).toMatch(found);
    if (remedy !== undefined) expect(check.remedy).toMatch(remedy);
    else if (verdict === 'ok') expect(check.remedy).toBeUndefined();
    // Where there is no card, nobody misses it.
    if (verdict === 'warn') expect(named(checksOf([gpuOf()], driver), 'GPU 0 NICs').verdict).toBe('note');
  });
});

describe('the driver of GPUs', () => {
  const driverCheck = (driver: Partial<GpuDriver>, devices: readonly GpuFacts[] = []) =>
    named(checksOf(devices, driver), 'GPU driver');
  const none: Partial<GpuDriver> = {
    library: { loaded: false, reason: 'cannot load libcuda.so.1: no such file', errno: 79 },
  };
  const { module: _, ...unloaded } = workingDriver;

  it('takes a newer runtime of its major version, and none of a newer one', () => {
    expect(driverCheck({}, [gpuOf({ runtime: '13.2' })])).toMatchObject({
      verdict: 'ok',
      found: expect.stringMatching(/runtime of CUDA 13\.2, newer, but of the same major version: it is taken$/),
    });
    expect(driverCheck({}, [gpuOf({ runtime: '14.0' })])).toMatchObject({
      verdict: 'warn',
      found: expect.stringMatching(/runtime of CUDA 14\.0, which this driver does not take$/),
    });
    expect(driverCheck(withLibrary({ version: '12.4' }))).toMatchObject({
      verdict: 'warn',
      found: expect.stringMatching(/^CUDA 12\.4 .* libep_cuda\.so needs CUDA 13, which this driver does not take$/),
      remedy: expect.stringContaining('580 or newer'),
    });
  });

  it('has its GPUs listed where the library of kernels is not here', () => {
    expect(checksOf([]).map(({ name, verdict }) => [name, verdict])).toEqual([
      ['GPU driver', 'ok'],
      ['GPU 0', 'note'],
      ['GPU 0 NICs', 'ok'],
    ]);
  });

  const refused = { path: '/dev/nvidiactl', refused: 'EACCES' };
  const changed = (facts: Partial<GpuDriver>): GpuDriver => ({ ...workingDriver, ...facts });
  const unusable = (reason: string, errno: number) => changed({ library: { loaded: false, reason, errno } });

  it.each([
    {
      lacks: 'a GPU',
      driver: { ...unloaded, ...none, cards: [], nodes: [] },
      found: /^no GPU: none of NVIDIA's is on the PCI bus/,
      remedy: /--gpus all/,
    },
    {
      lacks: 'the kernel module',
      driver: { ...unloaded, ...none, nodes: [] },
      found: /module nvidia is not loaded, .* at 0000:84:00\.0/,
      remedy: /modprobe nvidia/,
    },
    {
      lacks: 'device nodes',
      driver: changed({ ...none, nodes: [] }),
      found: /nvidia 580\.159\.04 is loaded, but there is no device node \/dev\/nvidiactl/,
      remedy: /nvidia-modprobe/,
    },
    {
      lacks: 'the node of a GPU',
      driver: changed({ ...none, nodes: [{ path: '/dev/nvidiactl' }] }),
      found: /no device node of a GPU \(\/dev\/nvidia0\)/,
      remedy: /--gpus all/,
    },
    {
      lacks: 'permission',
      driver: changed({ ...none, nodes: [{ path: '/dev/nvidia0' }, refused] }),
      found: /may not open \/dev\/nvidiactl \(EACCES\)/,
      remedy: /their group/,
    },
    {
      lacks: 'permission for every GPU',
      driver: changed({ ...none, nodes: [{ path: '/dev/nvidia0', refused: 'EPERM' }, { path: '/dev/nvidiactl' }] }),
      found: /may not open \/dev\/nvidia0 \(EPERM\)/,
      remedy: /their group/,
    },
    {
      lacks: "the driver's library",
      driver: changed(none),
      found: /library cannot be loaded: cannot load libcuda/,
      remedy: /version 580\.159\.04, .*NVIDIA_DRIVER_CAPABILITIES/,
    },
    {
      lacks: 'a recent library',
      driver: unusable('libcuda.so.1 lacks cuX', 80),
      found: /lacks cuX/,
      remedy: /update the driver to 580/,
    },
    {
      lacks: 'a GPU that is visible',
      driver: changed({ ...withLibrary({ gpus: [] }), visible: '7' }),
      found: /finds no GPU \(CUDA_VISIBLE_DEVICES is "7"\)/,
      remedy: /unset CUDA_VISIBLE_DEVICES/,
    },
    {
      lacks: 'a GPU that works',
      driver: unusable('cuInit failed: CUDA_ERROR_UNKNOWN', 19),
      found: /cuInit failed/,
      remedy: /dmesg/,
    },
  ])('says that the first step lacks $lacks', ({ lacks, driver, found, remedy }) => {
    const checks = gpuChecks({ driver, devices: [] }, false);
    expect(checks).toHaveLength(1);
    expect(checks[0]).toMatchObject({ name: 'GPU driver', verdict: lacks === 'a GPU' ? 'note' : 'warn' });
    expect(checks[0]!.found).toMatch(found);
    expect(checks[0]!.remedy).toMatch(remedy);
  });

  it('is read from the kernel', () => {
    const write = (path: string, text: string) => {
      mkdirSync(dirname(join(folder, path)), { recursive: true });
      writeFileSync(join(folder, path), text);
    };
    write(
      'proc/driver/nvidia/version',
      'NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@build)  Mon\nGCC version: 12\n',
    );
    for (const name of ['nvidiactl', 'nvidia0', 'nvidia-uvm']) write(`dev/${name}`, '');
    symlinkSync('nowhere', join(folder, 'dev/nvidia1'));
    write('sys/module/nvidia_peermem/version', '580.159.04\n');
    const roots = { dev: join(folder, 'dev'), proc: join(folder, 'proc'), sys: join(folder, 'sys') };
    expect(examineGpuDriver(['0000:84:00.0'], roots)).toMatchObject({
      cards: ['0000:84:00.0'],
      module: '580.159.04',
      open: true,
      nodes: [
        { path: join(folder, 'dev/nvidia0') },
        { path: join(folder, 'dev/nvidia1'), refused: 'ENOENT' },
        { path: join(folder, 'dev/nvidiactl') },
      ],
      peermem: true,
      kernel: expect.stringMatching(/^\d+\.\d+/),
    });
    const empty = { dev: join(folder, 'no'), proc: join(folder, 'no'), sys: join(folder, 'no') };
    const nothing = examineGpuDriver([], empty);
    expect(nothing).toMatchObject({ cards: [], open: false, nodes: [], peermem: false });
    expect(nothing).not.toHaveProperty('module');
    write(
      'old/driver/nvidia/version',
      'NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n',
    );
    expect(examineGpuDriver([], { ...empty, proc: join(folder, 'old') })).toMatchObject({
      module: '535.54.03',
      open: false,
    });
  });
});

describe('ep doctor', () => {
  const built = (name: string) => fileURLToPath(new URL(`../../../native/build/Release/${name}`, import.meta.url));
  /** With a driver that says that it is one for CUDA 13, found as the loader finds libraries. */
  const driver = join(folder, 'driver');
  mkdirSync(driver);
  symlinkSync(built('libep_cuda_driver.so'), join(driver, 'libcuda.so.1'));
  const env = { EP_CUDA_PATH: built('libep_cuda_host.so'), LD_LIBRARY_PATH: driver };

  it('says of each GPU what it can do, to people and in JSON alike', async () => {
    const two = { ...env, EP_CUDA_HOST_DEVICES: '2', EP_CUDA_HOST_NO_PEERS: '1', EP_CUDA_HOST_BROKEN_DEVICE: '1' };
    const { code, stdout } = await runEp(['doctor'], two);
    expect(code).toBe(0);
    expect(stdout).toMatch(/^ok +GPU driver +CUDA 13\.0.*, 1 GPU$/m);
    expect(stdout).toMatch(/^ok +GPU 0 +kernels on host threads.* at 0000:00:00\.0, 1\.00 GiB of memory; /m);
    expect(stdout).toMatch(/^ok +GPU 1 sharing +processes map its memory \(CUDA IPC\); compute mode default/m);
    expect(stdout).toMatch(/^warn +GPU 0 peers +maps no memory of others: not of GPU 1\n +-> .*topo -p2p/m);
    expect(stdout).toMatch(/^ok +GPU 0 NICs +network cards reach its memory by DMA-BUF/m);
    expect(stdout).toMatch(/^note +GPU 1 NICs +network cards do not reach its memory; .*nobody could say/m);
    expect(stdout).toMatch(/^warn +GPU 2 +cannot be used: looking at GPU 2/m);
    const report = JSON.parse((await runEp(['doctor', '--json'], two)).stdout) as Examined & { checks: Check[] };
    for (const { found } of report.checks.filter(({ name }) => name.startsWith('GPU'))) {
      expect(stdout).toContain(found);
    }
    expect(report.gpu.devices.map(({ peers, ipc }) => ({ peers, ipc }))).toEqual([
      { peers: [], ipc: true },
      { peers: [], ipc: true },
      { peers: [], ipc: false },
    ]);
    expect(report.gpu.driver.library).toEqual({
      loaded: true,
      version: '13.0',
      gpus: [{ pci: '0000:00:00.0', dmabuf: true, gpudirect: true }],
    });
  });

  it('says what a driver lacks', async () => {
    const old = { ...env, EP_CUDA_PATH: './no-such-kernels.so', EP_CUDA_HOST_DRIVER: '12040' };
    const { stdout } = await runEp(['doctor'], old);
    expect(stdout).toMatch(/^warn +GPU driver +CUDA 12\.4.* needs CUDA 13, which .*\n +-> update the driver to 580/m);
    const failing = { ...env, EP_CUDA_HOST_FAILING: 'dmabuf,gpudirect' };
    expect((await runEp(['doctor'], failing)).stdout).toMatch(
      /^note +GPU 0 NICs .*exports no DMA-BUFs; not by address: this GPU has no GPUDirect RDMA/m,
    );
    const { checks, gpu } = JSON.parse(
      (await runEp(['doctor', '--json'], { ...env, EP_CUDA_PATH: './no', EP_CUDA_HOST_FAILING: 'cuInit' })).stdout,
    ) as Examined & { checks: Check[] };
    expect(named(checks, 'GPU driver').found).toContain('cuInit failed: CUDA_ERROR_NOT_SUPPORTED');
    expect(gpu).toMatchObject({ devices: [], driver: { library: { loaded: false } } });
  });
});
