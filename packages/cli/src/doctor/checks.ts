/** From facts to advice: what is fine, what will hurt, what is missing, and what to do about it. */
import type { DeviceInfo } from '@ep/core';
import type { HostFacts } from '@ep/native';
import { type GpuState, gpuChecks } from './gpu-checks.js';
import { type AddonState, type FileSystemSpace, formatBytes, type Tool } from './machine.js';
import type { GpuReach, Probed } from './providers.js';

/** `note`: an optional thing that is absent. `warn`: works, but slowly or not for large jobs. `fail`: does not work. */
export type Verdict = 'ok' | 'note' | 'warn' | 'fail';

export interface Check {
  readonly name: string;
  readonly verdict: Verdict;
  readonly found: string;
  /** Stable code of a failure. */
  readonly code?: string;
  readonly remedy?: string;
}

export interface Examined {
  readonly node: string;
  readonly addon: AddonState;
  readonly probes: readonly Probed[];
  readonly shm: FileSystemSpace | undefined;
  readonly tools: readonly Tool[];
  readonly gpu: GpuState;
  /** A line for each GPU, where there are network cards. */
  readonly reach: readonly GpuReach[];
}

/** The oldest Node that the packages support, as `engines` in their manifests says. */
const oldestNode = [20, 19] as const;
const smallMemory = 512 * 2 ** 20;
const smallSharedMemory = 64 * 2 ** 20;
const smallMemlock = 64 * 2 ** 20;
const fewOpenFiles = 1024;
const fewMappings = 65_530;

export function checksOf(examined: Examined): readonly Check[] {
  const { addon } = examined;
  return [
    ...examined.probes.map((probed) => probeCheck(probed, addon)),
    nodeCheck(examined.node),
    addonCheck(addon),
    // Without the addon nobody has looked at GPUs; its own line says why.
    ...(addon.loaded ? gpuChecks(examined.gpu, addon.network.nics.length > 0) : []),
    ...(addon.loaded ? limitChecks(addon.facts, pinningOf(examined.probes)) : []),
    sharedMemoryCheck(examined.shm),
    ...examined.tools.map(toolCheck),
  ];
}

/** A network card with its port, a GPU that fails with the reason; a host is just there. */
function deviceText({ name, detail }: DeviceInfo): string {
  const { port, link, gid, unusable } = detail;
  if (unusable !== undefined) return `no use of another (${unusable})`;
  return port === undefined ? name : `${name} (port ${port}, ${link}, gid ${gid})`;
}

function probeCheck({ name, probe }: Probed, addon: AddonState): Check {
  if (probe.available) {
    const devices = probe.devices.map(deviceText).join(', ');
    return { name, verdict: 'ok', found: `available${devices === '' ? '' : ` on ${devices}`}` };
  }
  const { code, reason, remedy } = probe;
  // Without the addon every provider has the same long reason, which the addon's own line gives.
  if (!addon.loaded && addon.code === code && addon.reason === reason) {
    return { name, verdict: 'fail', code, found: 'not available without the native addon, see below' };
  }
  // A device that is not there is no fault of the machine.
  const verdict = code === 'EP_UNAVAILABLE' ? 'note' : 'fail';
  return { name, verdict, code, found: reason, ...(remedy === undefined ? {} : { remedy }) };
}

function nodeCheck(version: string): Check {
  const [major = 0, minor = 0] = version.replace(/^v/, '').split('.').map(Number);
  const recent = major > oldestNode[0] || (major === oldestNode[0] && minor >= oldestNode[1]);
  return recent
    ? { name: 'node', verdict: 'ok', found: version }
    : { name: 'node', verdict: 'fail', found: version, remedy: `install Node ${oldestNode.join('.')} or newer` };
}

function addonCheck(addon: AddonState): Check {
  return addon.loaded
    ? { name: 'native addon', verdict: 'ok', found: `ABI ${addon.abi} from ${addon.path}` }
    : {
        name: 'native addon',
        verdict: 'fail',
        code: addon.code,
        found: addon.reason,
        remedy: 'from a checkout: npm run setup; else install the platform package that the message names',
      };
}

/** Transports of this machine whose devices pin what they register. */
function pinningOf(probes: readonly Probed[]): readonly string[] {
  return probes
    .filter(
      ({ name, probe }) =>
        probe.available &&
        (/:(hardware|verbs)$/.test(name) || probe.devices.some(({ detail }) => detail.pins === true)),
    )
    .map(({ name }) => name);
}

function limitChecks(facts: HostFacts, pinning: readonly string[]): Check[] {
  return [
    coreCheck(facts),
    memoryCheck(facts),
    memlockCheck(facts, pinning),
    openFilesCheck(facts),
    mapCountCheck(facts),
  ];
}

function coreCheck(facts: HostFacts): Check {
  const quota = facts.quotaCores === null ? 'no quota' : `cgroup quota ${facts.quotaCores}`;
  const found = `${facts.usableCores} usable (${facts.onlineCores} online, affinity ${facts.affinityCores}, ${quota})`;
  if (facts.usableCores >= 2) return { name: 'cores', verdict: 'ok', found };
  const remedy =
    facts.quotaCores !== null && facts.quotaCores < 2
      ? 'raise the CPU quota of the container: ranks that wait for each other take turns on one core'
      : 'widen the affinity mask (taskset) or use a larger machine: ranks that wait for each other take turns on one core';
  return { name: 'cores', verdict: 'warn', found, remedy };
}

function memoryCheck(facts: HostFacts): Check {
  const parts = [
    ['MemAvailable', facts.memoryAvailable],
    ['cgroup limit', facts.cgroupLimit],
    ['cgroup used', facts.cgroupUsed],
    ['RLIMIT_AS', facts.addressSpaceLimit],
  ] as const;
  const details = parts.flatMap(([name, bytes]) => (bytes === null ? [] : [`${name} ${formatBytes(bytes)}`]));
  const { allocatable } = facts;
  if (allocatable === null) {
    return {
      name: 'memory',
      verdict: 'warn',
      found: 'no limit could be read',
      remedy: 'mount /proc and the cgroup files',
    };
  }
  const found = `${formatBytes(allocatable)} may be allocated, limited by ${facts.allocatableSource} (${details.join(', ')})`;
  return allocatable >= smallMemory
    ? { name: 'memory', verdict: 'ok', found }
    : { name: 'memory', verdict: 'warn', found, remedy: `free memory, or raise ${facts.allocatableSource}` };
}

function memlockCheck({ memlockLimit, pinnable }: HostFacts, pinning: readonly string[]): Check {
  const limit = memlockLimit === null ? 'unlimited' : formatBytes(memlockLimit);
  const found = memlockLimit !== null && pinnable === null ? `${limit}, which CAP_IPC_LOCK overrides` : limit;
  return pinnable === null || pinnable >= smallMemlock
    ? { name: 'locked memory', verdict: 'ok', found }
    : {
        name: 'locked memory',
        verdict: pinning.length > 0 ? 'warn' : 'note',
        found,
        remedy: `${pinning.length > 0 ? `${pinning.join(' and ')} pin what ranks allocate` : 'only RDMA hardware pins memory: for it'}, raise memlock (ulimit -l unlimited, docker --ulimit memlock=-1)`,
      };
}

function openFilesCheck({ openFilesLimit }: HostFacts): Check {
  const found = openFilesLimit === null ? 'unlimited' : String(openFilesLimit);
  return openFilesLimit === null || openFilesLimit >= fewOpenFiles
    ? { name: 'open files', verdict: 'ok', found }
    : {
        name: 'open files',
        verdict: 'warn',
        found,
        remedy: `raise it to ${fewOpenFiles} or more (ulimit -n): each mapped segment of a peer needs a descriptor`,
      };
}

function mapCountCheck({ mapCountLimit }: HostFacts): Check {
  const found = mapCountLimit === null ? 'unknown' : String(mapCountLimit);
  return mapCountLimit === null || mapCountLimit >= fewMappings
    ? { name: 'mappings', verdict: 'ok', found: `vm.max_map_count ${found}` }
    : {
        name: 'mappings',
        verdict: 'warn',
        found: `vm.max_map_count ${found}`,
        remedy: `sysctl vm.max_map_count=${fewMappings}: every rank maps the segments of all its peers`,
      };
}

function sharedMemoryCheck(shm: FileSystemSpace | undefined): Check {
  const remedy = 'only Open MPI, the peer of some benchmarks, needs it (docker --shm-size=1g); @ep uses memfd segments';
  if (shm === undefined) return { name: '/dev/shm', verdict: 'note', found: 'not mounted', remedy };
  const found = `${formatBytes(shm.freeBytes)} of ${formatBytes(shm.totalBytes)} free`;
  return shm.freeBytes > smallSharedMemory
    ? { name: '/dev/shm', verdict: 'ok', found }
    : { name: '/dev/shm', verdict: 'note', found, remedy };
}

const toolRemedies: Readonly<Record<string, string>> = {
  'C++ compiler': 'needed only to build the addon from source: apt-get install g++',
  nvcc: 'needed only to compile the kernels for GPUs: install the CUDA toolkit, or set CUDACXX',
  NCCL: 'needed only by process groups over it (backend nccl): install libnccl2 or the wheel nvidia-nccl-cu13, and set EP_NCCL_PATH to libnccl.so.2',
  NVSHMEM:
    'needed only by nvshmem.nvshmem: install the wheel nvidia-nvshmem-cu13, and set EP_NVSHMEM_PATH to its lib/libnvshmem_host.so.3; nvshmem.cuda does without',
  mpirun: 'needed only as a peer in benchmarks: apt-get install openmpi-bin',
};

function toolCheck(tool: Tool): Check {
  if (tool.version !== undefined) return { name: tool.name, verdict: 'ok', found: `${tool.version} (${tool.path})` };
  const remedy = toolRemedies[tool.name];
  return {
    name: tool.name,
    verdict: 'note',
    found: tool.why ?? 'not found',
    ...(remedy === undefined ? {} : { remedy }),
  };
}

/** Which network card is near which GPU and which memory; nothing where there is none. */
export function networkText({ addon, reach }: Pick<Examined, 'addon' | 'reach'>): string {
  if (!addon.loaded || addon.network.nics.length === 0) return '';
  const matrix = `\nnetwork cards by distance, nearest first: same, switch, bridges, root, node, system\n${addon.network.text}`;
  return `${matrix}${reach.map((one) => `${reachText(one)}\n`).join('')}`;
}

function reachText({ gpu, probe }: GpuReach): string {
  if (!probe.available) return `gpu ${gpu}: ${probe.reason}${probe.remedy === undefined ? '' : ` -> ${probe.remedy}`}`;
  return probe.devices
    .map(({ name, detail }) => {
      const { distance, placement, fallbacks, gpudirect } = detail;
      const instead = fallbacks === '' || fallbacks === undefined ? '' : ` (${fallbacks})`;
      const away = gpudirect === undefined ? '' : `; ${gpudirect}`;
      return `gpu ${gpu}: ${name} (${distance}), queues in ${placement}${instead}${away}`;
    })
    .join('\n');
}
