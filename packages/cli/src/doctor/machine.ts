/** What this machine gives a process, read without changing anything. */
import { execFile } from 'node:child_process';
import { accessSync, constants, readFileSync, statfsSync } from 'node:fs';
import { arch, cpus, platform, release } from 'node:os';
import { delimiter, join } from 'node:path';
import { promisify } from 'node:util';
import { isEpError } from '@ep/core';
import { type HostFacts, type NicTopology, native, openNccl, openNvshmem } from '@ep/native';

/** The addon that is loaded, or why none is. */
export type AddonState =
  | {
      readonly loaded: true;
      readonly path: string;
      readonly abi: string;
      readonly facts: HostFacts;
      readonly network: NicTopology;
    }
  | { readonly loaded: false; readonly code: string; readonly reason: string };

export function addonState(): AddonState {
  try {
    const { binding } = native();
    return {
      loaded: true,
      path: mappedAddon(),
      abi: binding.abi,
      facts: binding.hostFacts(),
      network: binding.nicTopology('/sys'),
    };
  } catch (error) {
    return {
      loaded: false,
      code: isEpError(error) ? error.code : 'EP_SYSTEM',
      reason: error instanceof Error ? error.message : String(error),
    };
  }
}

/** What is really mapped, not what a search order would say. */
function mappedAddon(): string {
  const paths = readFileSync('/proc/self/maps', 'utf8')
    .split('\n')
    .map((line) => line.slice(line.indexOf('/')))
    .filter((path) => path.endsWith('.node'));
  return paths.at(-1) ?? 'unknown';
}

export interface FileSystemSpace {
  readonly totalBytes: number;
  readonly freeBytes: number;
}

export function sharedMemorySpace(): FileSystemSpace | undefined {
  try {
    const { bsize, blocks, bavail } = statfsSync('/dev/shm');
    return { totalBytes: bsize * blocks, freeBytes: bsize * bavail };
  } catch {
    return undefined;
  }
}

export interface Tool {
  readonly name: string;
  /** First line of what it says about its version; undefined if it is not there. */
  readonly version?: string;
  readonly path?: string;
  /** What was looked for in vain, where that says more than its name. */
  readonly why?: string;
}

/** Finds a program on PATH without starting a shell. */
export function findProgram(name: string, path = process.env.PATH ?? ''): string | undefined {
  for (const folder of path.split(delimiter)) {
    if (folder === '') continue;
    const candidate = join(folder, name);
    try {
      accessSync(candidate, constants.X_OK);
      return candidate;
    } catch {
      // Not here: the next folder.
    }
  }
  return undefined;
}

export async function findTool(name: string, candidates: readonly string[]): Promise<Tool> {
  for (const candidate of candidates) {
    const path = candidate.includes('/') ? candidate : findProgram(candidate);
    if (path === undefined) continue;
    try {
      const { stdout } = await promisify(execFile)(path, ['--version'], { timeout: 10_000 });
      const lines = stdout.trim().split('\n');
      return { name, path, version: (lines.find((line) => /\d+\.\d+/.test(line)) ?? lines[0] ?? '').trim() };
    } catch {
      // It is there but does not run: as good as not there.
    }
  }
  return { name };
}

export function findTools(): Promise<Tool[]> {
  const cuda = process.env.CUDA_HOME ?? process.env.CUDA_PATH ?? '/usr/local/cuda';
  return Promise.all([
    findTool('C++ compiler', [...(process.env.CXX ? [process.env.CXX] : []), 'c++', 'g++', 'clang++']),
    findTool('nvcc', [...(process.env.CUDACXX ? [process.env.CUDACXX] : []), 'nvcc', join(cuda, 'bin', 'nvcc')]),
    findTool('mpirun', ['mpirun', 'mpiexec']),
    findLibrary('NCCL', openNccl),
    findLibrary('NVSHMEM', openNvshmem),
  ]);
}

/** Loads one of NVIDIA's, as what is opened over it does, and begins nothing. */
function findLibrary(name: string, open: () => { readonly version: string; readonly path: string }): Tool {
  try {
    const { version, path } = open();
    return { name, version, path };
  } catch (error) {
    // Without the addon nothing is looked for; the addon's own line says why.
    return isEpError(error) && error.code === 'EP_UNAVAILABLE' ? { name, why: error.message } : { name };
  }
}

/** One line that belongs under every measured number. */
export interface MachineDescription {
  readonly cpu: string;
  readonly onlineCores: number;
  /** By affinity and cgroup quota; undefined when the addon is not there to read them. */
  readonly usableCores?: number;
  readonly memoryBytes?: number;
  readonly kernel: string;
  readonly node: string;
}

export function describeMachine(): MachineDescription {
  const addon = addonState();
  const cpu = cpus()[0]?.model.trim() ?? arch();
  const base = { cpu, onlineCores: cpus().length, kernel: `${platform()} ${release()}`, node: process.version };
  if (!addon.loaded) return base;
  const { facts } = addon;
  return {
    ...base,
    usableCores: facts.usableCores,
    ...(facts.memoryTotal === null ? {} : { memoryBytes: facts.memoryTotal }),
  };
}

export function machineText(machine: MachineDescription): string {
  const cores =
    machine.usableCores === undefined || machine.usableCores === machine.onlineCores
      ? `${machine.onlineCores} cores`
      : `${machine.usableCores} of ${machine.onlineCores} cores usable`;
  const memory = machine.memoryBytes === undefined ? '' : `, ${formatBytes(machine.memoryBytes)}`;
  return `${machine.cpu}, ${cores}${memory}, ${machine.kernel}, node ${machine.node}`;
}

/** Binary units, three significant digits. */
export function formatBytes(bytes: number): string {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
  let value = bytes;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit++;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toPrecision(3)} ${units[unit]}`;
}
