/** What each GPU can do for ranks, and which step fails on the way to it. */
import type { GpuFacts } from '@ep/native';
import type { Check, Verdict } from './checks.js';
import type { GpuDriver } from './gpu-driver.js';
import { formatBytes } from './machine.js';

export interface GpuState {
  readonly driver: GpuDriver;
  /** As `libep_cuda.so` finds them; none where it is not here, or finds none. */
  readonly devices: readonly GpuFacts[];
}

/** Of CUDA 13: what the kernels are built with, and the oldest driver that takes them. */
const CUDA_MAJOR = 13;
const OLDEST_DRIVER = '580';
/** The first in which network cards register DMA-BUFs. */
const DMABUF_KERNEL = [5, 12] as const;
const ELIBACC = 79;
const ELIBBAD = 80;

/** `nics`: there are network cards that could reach memory of GPUs. */
export function gpuChecks(state: GpuState, nics: boolean): readonly Check[] {
  const { driver, devices } = state;
  if (devices.length === 0) {
    const known = driver.library.loaded ? driver.library.gpus : [];
    return [
      driverCheck(state),
      ...known.flatMap(({ pci, gpudirect }, gpu) => [
        unknownCheck(gpu, pci),
        reachCheck(gpu, { pci, gpudirect, runsOn: 'cuda' }, driver, nics),
      ]),
    ];
  }
  return [
    driverCheck(state),
    ...devices.flatMap((facts, gpu) =>
      facts.unusable === undefined
        ? [
            deviceCheck(gpu, facts),
            sharingCheck(gpu, facts),
            peersCheck(gpu, devices),
            reachCheck(gpu, facts, driver, nics),
          ]
        : [unusableCheck(gpu, facts.unusable)],
    ),
  ];
}

const NEEDED = 'needed only to run kernels on a GPU';

/** A GPU that is there and cannot be used is worth a warning; that there is none is no fault. */
function driverCheck({ driver, devices }: GpuState): Check {
  const name = 'GPU driver';
  const missing = missingStep(driver);
  if (missing !== undefined) return { name, ...missing };
  const { library, module, open } = driver;
  if (!library.loaded) throw new Error('a driver that is not loaded was not explained');
  const { version, gpus } = library;
  const runtime = devices.find(({ runsOn, unusable }) => runsOn === 'cuda' && unusable === undefined)?.runtime;
  const kernelModule = module === undefined ? '' : ` (kernel module ${module}${open ? ', open' : ''})`;
  const count = `${gpus.length} GPU${gpus.length === 1 ? '' : 's'}`;
  const found = `CUDA ${version}${kernelModule}, ${count}${runtime === undefined ? '' : `; libep_cuda.so brings the runtime of CUDA ${runtime}`}`;
  const needed = runtime === undefined ? CUDA_MAJOR : majorOf(runtime);
  if (majorOf(version) < needed) {
    return {
      name,
      verdict: 'warn',
      found: `${found}${runtime === undefined ? `; libep_cuda.so needs CUDA ${CUDA_MAJOR}` : ''}, which this driver does not take`,
      remedy: updateDriver,
    };
  }
  const newer = runtime !== undefined && isNewer(runtime, version);
  return { name, verdict: 'ok', found: newer ? `${found}, newer, but of the same major version: it is taken` : found };
}

const updateDriver = `update the driver to ${OLDEST_DRIVER} or newer, which CUDA ${CUDA_MAJOR} needs`;

const majorOf = (version: string): number => Number(version.split('.')[0]);

function isNewer(one: string, other: string): boolean {
  const [a = 0, b = 0] = one.split('.').map(Number);
  const [c = 0, d = 0] = other.split('.').map(Number);
  return a > c || (a === c && b > d);
}

/** The first step that fails, in the order in which they need each other; undefined where the driver has GPUs for this process. */
function missingStep(driver: GpuDriver): Omit<Check, 'name'> | undefined {
  const { cards, module, nodes, library, visible } = driver;
  // Some systems have other ways to the driver than these nodes (WSL): if it works, all is there.
  if (library.loaded && library.gpus.length > 0) return undefined;
  if (module === undefined && nodes.length === 0) {
    if (cards.length === 0) {
      return {
        verdict: 'note',
        found: `no GPU: none of NVIDIA's is on the PCI bus, no kernel module nvidia is loaded, there is no device node (/dev/nvidiactl), and ${libraryText(driver)}`,
        remedy: `${NEEDED}: give a virtual machine or a container one (docker run --gpus all)`,
      };
    }
    return {
      verdict: 'warn',
      found: `the kernel module nvidia is not loaded, but a GPU is on the PCI bus at ${cards.join(', ')}`,
      remedy: `${NEEDED}: install the driver, ${OLDEST_DRIVER} or newer, and load it (modprobe nvidia, as root on the host; dmesg says why it does not load)`,
    };
  }
  const loaded = module === undefined ? '' : `the kernel module nvidia ${module} is loaded, but `;
  const hasControl = nodes.some(({ path }) => path.endsWith('ctl'));
  if (!hasControl || nodes.length < 2) {
    return {
      verdict: 'warn',
      found: `${loaded}there is no device node ${hasControl ? 'of a GPU (/dev/nvidia0)' : '/dev/nvidiactl'}`,
      remedy: `${NEEDED}: give the container the GPU (docker run --gpus all, with NVIDIA's container toolkit), or make the nodes (nvidia-modprobe -u -c 0, as root on the host)`,
    };
  }
  const refused = nodes.filter((node) => node.refused !== undefined);
  const every = refused.length === nodes.length - 1 && refused.every(({ path }) => !path.endsWith('ctl'));
  if (refused.some(({ path }) => path.endsWith('ctl')) || every) {
    return {
      verdict: 'warn',
      found: `this process may not open ${refused.map(({ path, refused: code }) => `${path} (${code})`).join(', ')}`,
      remedy: `${NEEDED}: give this user the device nodes (their group, or mode 0666), and the container their devices (docker run --gpus all)`,
    };
  }
  if (!library.loaded && library.errno === ELIBACC) {
    return {
      verdict: 'warn',
      found: `${loaded}the driver's library cannot be loaded: ${library.reason}`,
      remedy: `${NEEDED}: install the driver's libraries${module === undefined ? '' : ` of version ${module}, the module's`}; a container gets them with NVIDIA_DRIVER_CAPABILITIES=compute,utility`,
    };
  }
  if (!library.loaded && library.errno === ELIBBAD) {
    return { verdict: 'warn', found: library.reason, remedy: updateDriver };
  }
  const found = library.loaded ? 'the driver finds no GPU' : library.reason;
  if (visible !== undefined) {
    return {
      verdict: 'warn',
      found: `${found} (CUDA_VISIBLE_DEVICES is "${visible}")`,
      remedy: 'unset CUDA_VISIBLE_DEVICES, or let it name GPUs that are here (nvidia-smi -L lists them)',
    };
  }
  return {
    verdict: 'warn',
    found,
    remedy:
      'libcuda.so.1 and the kernel module must be of one version; nvidia-smi and dmesg (Xid) say what the GPU lacks; a module that was updated is loaded after a restart',
  };
}

const libraryText = ({ library }: GpuDriver): string =>
  library.loaded ? 'the driver finds none' : `the driver's library cannot be used (${library.reason})`;

const titled = (gpu: number, what = ''): string => `GPU ${gpu}${what === '' ? '' : ` ${what}`}`;

/** The driver sees it, but `libep_cuda.so` was not asked: the line of `nvshmem:cuda` says why. */
const unknownCheck = (gpu: number, pci: string): Check => ({
  name: titled(gpu),
  verdict: 'note',
  found: `at ${pci}; what else it can do is not known: nvshmem:cuda above says why`,
});

function unusableCheck(gpu: number, why: string): Check {
  return {
    name: titled(gpu),
    verdict: 'warn',
    found: `cannot be used: ${why}`,
    remedy: 'nvidia-smi and dmesg (Xid) say what it lacks; CUDA_VISIBLE_DEVICES without it leaves it out',
  };
}

function deviceCheck(gpu: number, facts: GpuFacts): Check {
  const { name, pci, compute, memoryBytes, runsOn, cooperative } = facts;
  const capability = compute === '0.0' ? '' : `, compute capability ${compute}`;
  const found = `${name} at ${pci}${capability}, ${formatBytes(memoryBytes)} of memory${runsOn === 'cuda' ? '' : `; kernels run on ${runsOn}, without a driver`}`;
  return cooperative
    ? { name: titled(gpu), verdict: 'ok', found }
    : {
        name: titled(gpu),
        verdict: 'warn',
        found: `${found}; its blocks cannot be made to run all at once (cooperative launch)`,
        remedy: 'dispatch and collectives need that: use another GPU, or tensors on the host',
      };
}

/** Between processes: CUDA IPC, and the compute mode. */
function sharingCheck(gpu: number, { ipc, exclusive, pci }: GpuFacts): Check {
  const shared = ipc
    ? 'processes map its memory (CUDA IPC)'
    : 'no memory shared between processes (no CUDA IPC): ranks of several processes cannot be on it';
  const mode = exclusive
    ? 'compute mode exclusive: one process at a time, another one is refused'
    : 'compute mode default: any number of processes';
  const remedies = [
    ...(ipc ? [] : ['run its ranks as threads of one process; WSL has no CUDA IPC, nor has MIG between its instances']),
    ...(exclusive
      ? [
          `nvidia-smi -i ${pci} -c DEFAULT, as root; or one process for each GPU, its ranks as threads (ep demo places them so)`,
        ]
      : []),
  ];
  return {
    name: titled(gpu, 'sharing'),
    verdict: remedies.length === 0 ? 'ok' : 'warn',
    found: `${shared}; ${mode}`,
    ...(remedies.length === 0 ? {} : { remedy: remedies.join('; ') }),
  };
}

function peersCheck(gpu: number, devices: readonly GpuFacts[]): Check {
  const name = titled(gpu, 'peers');
  const others = [...devices.keys()].filter((other) => other !== gpu && devices[other]!.unusable === undefined);
  if (others.length === 0) return { name, verdict: 'ok', found: 'no other GPU here' };
  const { peers } = devices[gpu]!;
  const far = others.filter((other) => !peers.includes(other));
  const maps = peers.length === 0 ? 'maps no memory of others' : `maps memory of GPU ${peers.join(', ')}`;
  if (far.length === 0) return { name, verdict: 'ok', found: maps };
  return {
    name,
    verdict: 'warn',
    found: peers.length === 0 ? `${maps}: not of GPU ${far.join(', ')}` : `${maps}, not of GPU ${far.join(', ')}`,
    remedy: 'no peer access (nvidia-smi topo -p2p r shows it); choose GPUs that reach each other, or one for all ranks',
  };
}

/** Whether network cards reach its memory, by which way, and what the others lack. */
function reachCheck(
  gpu: number,
  facts: Pick<GpuFacts, 'pci' | 'gpudirect' | 'runsOn'>,
  { library, peermem, kernel }: GpuDriver,
  nics: boolean,
): Check {
  const name = titled(gpu, 'NICs');
  const said = library.loaded ? library.gpus.find(({ pci }) => pci === facts.pci) : undefined;
  const [major = 0, minor = 0] = kernel.split('.').map((part) => Number.parseInt(part, 10));
  const takes = major > DMABUF_KERNEL[0] || (major === DMABUF_KERNEL[0] && minor >= DMABUF_KERNEL[1]);
  const since = DMABUF_KERNEL.join('.');
  const module = 'load nvidia-peermem (modprobe nvidia-peermem, as root on the host)';
  const ways = [
    {
      way: 'by DMA-BUF',
      lacks:
        said === undefined
          ? 'nobody could say whether this GPU exports DMA-BUFs'
          : !said.dmabuf
            ? 'this GPU, or its driver, exports no DMA-BUFs'
            : takes
              ? ''
              : `the kernel is ${kernel}, and ${since} is the first that takes them`,
      remedy:
        said?.dmabuf === true
          ? `update the kernel to ${since} or newer`
          : 'use the open GPU kernel modules, whose memory can be exported as DMA-BUF',
    },
    {
      way: 'by address',
      lacks: !(said?.gpudirect ?? facts.gpudirect)
        ? 'this GPU has no GPUDirect RDMA'
        : peermem
          ? ''
          : 'the kernel module nvidia-peermem is not loaded',
      remedy: (said?.gpudirect ?? facts.gpudirect) ? module : '',
    },
  ];
  const open = ways.filter(({ lacks }) => lacks === '').map(({ way }) => way);
  const closed = ways.filter(({ lacks }) => lacks !== '').map(({ way, lacks }) => `not ${way}: ${lacks}`);
  if (open.length > 0) {
    const found = [`network cards reach its memory ${open.join(' and ')}`, ...closed].join('; ');
    return { name, verdict: 'ok', found };
  }
  const remedies = ways.flatMap(({ remedy }) => (remedy === '' ? [] : [remedy])).join(', or ');
  // As everywhere: what no device asks for is a note.
  const verdict: Verdict = nics ? 'warn' : 'note';
  const found = `network cards do not reach its memory; ${closed.join('; ')}`;
  if (facts.runsOn !== 'cuda') return { name, verdict: 'note', found };
  return {
    name,
    verdict,
    found,
    remedy: `${remedies}; until then queues lie in host memory, and what goes to other hosts is copied through it${nics ? '' : ' (there is no network card here)'}`,
  };
}
