/** Which GPU each rank of a demo has, and whether ranks are processes or threads there. */
import { EpError, formatRanks, invalid } from '@ep/core';
import { cudaDevices } from '@ep/cuda-kernels';
import { InvalidArgumentError } from 'commander';
import { misused } from '../failure.js';
import type { RankMode } from './ranks.js';
import type { DemoDevice } from './transports.js';

/** As chosen by `--device`: the host; all GPUs that the ranks need; or these, by ordinal. */
export interface DeviceChoice {
  readonly device: DemoDevice;
  readonly gpus?: readonly number[];
}

export const deviceHelp =
  'where tensors lie and kernels run: host; cuda, which is all GPUs; or some of them, as cuda:1 or cuda:0,1. Ranks take the GPUs in turn: a process for each GPU, in which all ranks of the GPU are streams';

/** Parses `host`, `cuda`, `cuda:1` or `cuda:0,1`, for commander. */
export function deviceOption(text: string): DeviceChoice {
  if (text === 'host' || text === 'cuda') return { device: text };
  const [, list] = /^cuda:(\d{1,4}(?:,\d{1,4})*)$/.exec(text) ?? [];
  if (list === undefined) throw new InvalidArgumentError('expected host, cuda, cuda:<GPU> or cuda:<GPU>,<GPU>,...');
  const gpus = list.split(',').map(Number);
  if (new Set(gpus).size < gpus.length) {
    throw new InvalidArgumentError('expected each GPU once: ranks take them in turn, over and over.');
  }
  return { device: 'cuda', gpus };
}

/** Where the ranks of a demo are. */
export interface Placement {
  readonly device: DemoDevice;
  readonly rankMode: RankMode;
  /** Ordinals; rank r has number r % length of them. None on the host. */
  readonly gpus: readonly number[];
}

/** What is asked of a GPU before ranks are put on it. */
export interface GpuOfMachine {
  readonly name: string;
  readonly ipc: boolean;
  readonly exclusive: boolean;
  /** Other GPUs whose memory it reaches. */
  readonly peers: readonly number[];
  readonly unusable?: string;
}

export const gpuOfRank = (gpus: readonly number[], rank: number): number => gpus[rank % gpus.length]!;

/** The most that one GPU has. */
export const ranksOfGpu = (gpus: readonly number[], worldSize: number): number => Math.ceil(worldSize / gpus.length);

interface Wanted extends DeviceChoice {
  readonly ranks: number;
  /** Worker threads were asked for. */
  readonly threads: boolean;
}

/**
 * Places ranks on GPUs of the machine. Throws `EP_INVALID_ARGUMENT` for GPUs that are not there or do not fit the ranks, `EP_UNAVAILABLE` for one that fails, `EP_UNSUPPORTED` where GPUs
 * do not reach each other's memory.
 */
export function placeRanks(
  where: string,
  wanted: Wanted,
  machine: () => readonly GpuOfMachine[] = cudaDevices,
): Placement {
  const { device, threads } = wanted;
  if (device === 'host') return { device, rankMode: threads ? 'threads' : 'processes', gpus: [] };
  const all = machine();
  const gpus = chosenGpus(where, wanted, all);
  const [first] = gpus as [number];
  if (gpus.length === 1) return { device, rankMode: 'threads', gpus: [first] };
  checkReach(where, gpus, all);
  checkProcesses(where, gpus, all);
  return { device, rankMode: wanted.ranks > gpus.length ? 'process-per-gpu' : 'processes', gpus };
}

function chosenGpus(where: string, { ranks, threads, gpus }: Wanted, all: readonly GpuOfMachine[]): readonly number[] {
  if (gpus === undefined) {
    const usable = [...all.keys()].filter((gpu) => all[gpu]!.unusable === undefined);
    return usable.slice(0, threads ? 1 : ranks);
  }
  for (const gpu of gpus) {
    const facts = all[gpu];
    if (facts === undefined) {
      const expected = `among GPUs 0 to ${all.length - 1}, which are here`;
      throw invalid('--device', { where, expected, found: `cuda:${gpu}` });
    }
    if (facts.unusable !== undefined)
      throw new EpError('EP_UNAVAILABLE', `${where}: --device cuda:${gpu}: ${facts.unusable}`);
  }
  const found = `cuda:${gpus.join(',')}`;
  if (gpus.length > ranks) {
    throw misused('--device', { where, expected: `of at most ${ranks} GPUs, one for each rank`, found });
  }
  if (threads && gpus.length > 1) {
    throw misused('--device', { where, expected: 'one GPU with --threads: several have a process each', found });
  }
  return gpus;
}

function checkReach(where: string, gpus: readonly number[], all: readonly GpuOfMachine[]): void {
  for (const gpu of gpus) {
    const far = gpus.filter((other) => other !== gpu && !all[gpu]!.peers.includes(other));
    if (far.length === 0) continue;
    throw new EpError(
      'EP_UNSUPPORTED',
      `${where}: --device cuda: GPU ${gpu} does not reach the memory of GPU ${far.join(', ')}: no peer access (nvidia-smi topo -p2p r shows it); choose GPUs that reach each other, or one for all ranks: --device cuda:${gpu}`,
      { context: { gpu, far } },
    );
  }
}

function checkProcesses(where: string, gpus: readonly number[], all: readonly GpuOfMachine[]): void {
  const closed = gpus.find((gpu) => !all[gpu]!.ipc);
  if (closed !== undefined) {
    throw new EpError(
      'EP_UNSUPPORTED',
      `${where}: --device cuda: GPU ${closed} shares no memory between processes (CUDA IPC), and each GPU has a process of its own; one GPU for all ranks: --device cuda:${closed}`,
      { context: { gpu: closed } },
    );
  }
}

/** A GPU, and the ranks that have it. */
export interface GpuShare {
  readonly gpu: number;
  readonly name: string;
  readonly ranks: readonly number[];
  /** The same by process, without those that died. */
  readonly processes: readonly (readonly number[])[];
}

/** By what ranks say that they had, and for those that say nothing, since they died, where they were placed. */
export function sharesOf(
  gpus: readonly number[],
  worldSize: number,
  results: readonly { readonly rank: number; readonly gpu?: number; readonly pid: number }[],
  machine: () => readonly GpuOfMachine[] = cudaDevices,
): readonly GpuShare[] {
  const had = new Map(results.map(({ rank, gpu }) => [rank, gpu]));
  const ranks = [...Array(worldSize).keys()];
  const sharing = (own: readonly number[]): readonly (readonly number[])[] => {
    const processes = new Map<number, number[]>();
    for (const { rank, pid } of results) {
      if (own.includes(rank)) processes.set(pid, [...(processes.get(pid) ?? []), rank]);
    }
    return [...processes.values()];
  };
  return gpus.map((gpu) => {
    const own = ranks.filter((rank) => (had.get(rank) ?? gpuOfRank(gpus, rank)) === gpu);
    return { gpu, name: machine()[gpu]!.name, ranks: own, processes: sharing(own) };
  });
}

/** Facts of a report: which ranks run where, which share a process, and how they reach each other. */
export function placementFacts(shares: readonly GpuShare[]): [string, string][] {
  const [first] = shares;
  if (first === undefined) return [];
  if (shares.length === 1) return [['kernels on', `cuda:${first.gpu}, ${first.name}, ranks as its streams`]];
  return [
    ...shares.map(({ gpu, name, ranks, processes }, i): [string, string] => {
      const how = ranks.length > 1 && processes.length === 1 ? ', as streams of one process' : '';
      return [i === 0 ? 'kernels on' : '', `cuda:${gpu}, ${name}: ${formatRanks(ranks)}${how}`];
    }),
    ['peers', 'by memory that each process maps of the others (CUDA IPC, peer access between GPUs)'],
  ];
}
