/** What stands between this process and the GPUs of the machine, read without changing anything. */
import { accessSync, constants, existsSync, readdirSync, readFileSync } from 'node:fs';
import { release } from 'node:os';
import { join } from 'node:path';
import { isEpError } from '@ep/core';
import { type GpuDriverFacts, native } from '@ep/native';

/** Where the kernel tells of itself; tests have their own. */
export interface Roots {
  readonly dev: string;
  readonly proc: string;
  readonly sys: string;
}

export interface DeviceNode {
  readonly path: string;
  /** Code of the error that opening it for reading and writing would end with; undefined: it can be opened. */
  readonly refused?: string;
}

export type DriverLibrary =
  | ({ readonly loaded: true } & GpuDriverFacts)
  | { readonly loaded: false; readonly reason: string; readonly errno: number };

export interface GpuDriver {
  /** PCI addresses of the GPUs that sysfs lists, whether or not a driver has them. */
  readonly cards: readonly string[];
  /** Version of the kernel module; undefined where none is loaded. */
  readonly module?: string;
  /** Of the two kernel modules that NVIDIA has, the one with open source. */
  readonly open: boolean;
  /** `nvidiactl` and one for each GPU that this process is given. */
  readonly nodes: readonly DeviceNode[];
  readonly library: DriverLibrary;
  /** The kernel module nvidia-peermem is loaded. */
  readonly peermem: boolean;
  /** Of the kernel, "6.1.0". */
  readonly kernel: string;
  /** CUDA_VISIBLE_DEVICES, where it is set. */
  readonly visible?: string;
}

const LIBRARY = 'libcuda.so.1';

export function examineGpuDriver(
  cards: readonly string[],
  roots: Roots = { dev: '/dev', proc: '/proc', sys: '/sys' },
): GpuDriver {
  const text = textOf(join(roots.proc, 'driver/nvidia/version'));
  const module = moduleVersion(text) ?? textOf(join(roots.sys, 'module/nvidia/version')).trim();
  const visible = process.env.CUDA_VISIBLE_DEVICES;
  return {
    cards,
    ...(module === '' ? {} : { module }),
    open: /Open Kernel Module/i.test(text),
    nodes: nodesOf(roots.dev),
    library: driverLibrary(),
    // The module had two names.
    peermem: ['nvidia_peermem', 'nv_peer_mem'].some((name) => existsSync(join(roots.sys, 'module', name))),
    kernel: release(),
    ...(visible === undefined ? {} : { visible }),
  };
}

function textOf(path: string): string {
  try {
    return readFileSync(path, 'utf8');
  } catch {
    return '';
  }
}

/** "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build" */
const moduleVersion = (text: string): string | undefined => text.match(/Kernel Module.*?\s(\d+(?:\.\d+)+)\s/)?.[1];

function nodesOf(dev: string): readonly DeviceNode[] {
  let names: readonly string[];
  try {
    names = readdirSync(dev);
  } catch {
    return [];
  }
  return names
    .filter((name) => /^nvidia(ctl|\d+)$/.test(name))
    .sort()
    .map((name) => {
      const path = join(dev, name);
      try {
        accessSync(path, constants.R_OK | constants.W_OK);
        return { path };
      } catch (error) {
        return { path, refused: (error as NodeJS.ErrnoException).code ?? String(error) };
      }
    });
}

function driverLibrary(): DriverLibrary {
  try {
    return { loaded: true, ...native().binding.gpuDriver(LIBRARY) };
  } catch (error) {
    const reason = error instanceof Error ? error.message : String(error);
    return { loaded: false, reason, errno: isEpError(error) ? Number(error.context.errno ?? 0) : 0 };
  }
}
