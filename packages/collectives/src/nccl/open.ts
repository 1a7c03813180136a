/** From NCCL and a GPU to an engine: what all members must have, and have alike. */
import { hostname } from 'node:os';
import { EpError, exchange, formatRanks, invalid, type Store } from '@ep/core';
import {
  codeOfStatus,
  type Gpus,
  type NativeNcclCommunicator,
  type Nccl,
  native,
  openGpus,
  openNccl,
} from '@ep/native';
import type { GroupEngine } from '../engine.js';
import type { DeviceOptions } from '../options.js';
import { NcclEngine } from './engine.js';

const WHERE = 'initProcessGroup: nccl';

interface NcclInit {
  readonly device: DeviceOptions;
  readonly store: Store;
  /** What the group is said to be over. */
  readonly name: string;
  readonly timeoutMs: number;
  readonly signal: AbortSignal | undefined;
}

/** What a member tells the others. */
interface Member {
  readonly version?: string;
  readonly host?: string;
  /** PCI address. */
  readonly gpu?: string;
  /** Of the first rank: what the communicator is made by. */
  readonly id?: string;
  /** It has no NCCL, or no GPU. */
  readonly why?: string;
}

/** Options that mean nothing to NCCL. */
const OTHERS = ['stagingBytes', 'maxGroups', 'blocks', 'lanes'] as const;

/** Throws for options of a device that do not go together. */
export function checkNcclOptions(device: DeviceOptions): void {
  const { nccl, stream } = device;
  if (nccl !== undefined && nccl !== true && (typeof nccl !== 'string' || nccl === '')) {
    throw invalid('device.nccl', { where: WHERE, expected: 'true, or the path of libnccl.so.2', found: nccl });
  }
  for (const option of OTHERS) {
    if (device[option] === undefined) continue;
    throw invalid(`device.${option}`, {
      where: WHERE,
      expected: 'absent: NCCL has its own memory and kernels',
      found: device[option],
    });
  }
  if (stream?.device?.kind !== 'cuda') {
    throw invalid('device.stream', {
      where: WHERE,
      expected: 'a stream of a GPU (CudaStream of @ep/cuda-kernels)',
      found: stream,
    });
  }
}

interface Here {
  readonly nccl: Nccl;
  readonly gpus: Gpus;
  readonly member: Member;
}

function lookHere({ device }: NcclInit, rank: number): Here {
  const nccl = openNccl(typeof device.nccl === 'string' ? device.nccl : undefined);
  const gpus = openGpus();
  const facts = gpus.devices[device.stream.device.index];
  const gpu = facts?.runsOn === 'cuda' ? facts.pci : `${facts?.pci} ${rank}`;
  const id = rank === 0 ? Buffer.from(nccl.library.uniqueId()).toString('base64') : undefined;
  return { nccl, gpus, member: { version: nccl.version, host: hostname(), gpu, ...(id !== undefined && { id }) } };
}

function checkMembers(members: readonly Member[], own: Member): void {
  const unable = members.flatMap(({ why }, rank) => (why === undefined ? [] : [rank]));
  if (unable.length > 0) {
    const reasons = unable.map((rank) => `${formatRanks([rank])}: ${members[rank]!.why}`).join('; ');
    throw new EpError('EP_UNAVAILABLE', `${WHERE}: ${reasons}`, { context: { ranks: unable } });
  }
  const odd = members.flatMap(({ version }, rank) => (version === own.version ? [] : [rank]));
  if (odd.length > 0) {
    const found = odd.map((rank) => `${formatRanks([rank])} has ${members[rank]!.version}`).join('; ');
    throw new EpError('EP_MISMATCH', `${WHERE}: NCCL is ${own.version} here, but ${found}`, {
      context: { ranks: odd, expected: own.version, found },
    });
  }
  // NCCL can be told to have it otherwise, at its own risk.
  if (process.env.NCCL_MULTI_RANK_GPU_ENABLE === '1') return;
  const places = members.map(({ host, gpu }) => `${host} ${gpu}`);
  const twice = places.flatMap((place, rank) => (places.indexOf(place) < rank ? [rank] : []));
  if (twice.length === 0) return;
  const [rank] = twice;
  const ranks = [places.indexOf(places[rank!]!), rank!];
  throw new EpError(
    'EP_INVALID_ARGUMENT',
    `${WHERE}: ${formatRanks(ranks)} have one GPU (${places[rank!]}): NCCL takes one rank of each`,
    {
      context: { ranks, gpu: members[rank!]!.gpu },
    },
  );
}

async function connect(made: NativeNcclCommunicator, { timeoutMs, signal }: NcclInit, size: number): Promise<void> {
  const limit = Number.isFinite(timeoutMs) ? timeoutMs : -1;
  const outcome = await native().operations.run(() => made.open(limit), signal);
  if (outcome.status === 0) return;
  const code = codeOfStatus(outcome.status);
  const why = outcome.message ?? `the ${size} ranks did not come together within ${timeoutMs} ms`;
  throw new EpError(code, `${WHERE}: ${why} (NCCL_DEBUG=INFO has NCCL say what it does)`, { context: { timeoutMs } });
}

/**
 * Collective over the members. `EP_UNAVAILABLE` on all where one has no NCCL or no GPU, naming it; `EP_MISMATCH` for versions that differ; `EP_INVALID_ARGUMENT` where two have one
 * GPU. `host` is closed with it, and when it fails.
 */
export async function openNcclEngine(host: GroupEngine, init: NcclInit): Promise<GroupEngine> {
  const { device, store, name, timeoutMs, signal } = init;
  const { rank, size } = host;
  let made: NativeNcclCommunicator | undefined;
  try {
    let here: Here | undefined;
    let member: Member;
    try {
      here = lookHere(init, rank);
      member = here.member;
    } catch (error) {
      // All hear of one that cannot: nobody waits for it.
      member = { why: error instanceof Error ? error.message : String(error) };
    }
    const bytes = new Uint8Array(Buffer.from(JSON.stringify(member)));
    const limits = { timeoutMs, ...(signal && { signal }) };
    const told = await exchange(store, { key: 'nccl', rank, worldSize: size, bytes }, limits);
    const members = told.map((one) => JSON.parse(Buffer.from(one).toString()) as Member);
    checkMembers(members, member);
    const { nccl, gpus } = here!;
    const { binding } = native();
    const { index } = device.stream.device;
    const id = new Uint8Array(Buffer.from(members[0]!.id!, 'base64'));
    made = new binding.NcclCommunicator(nccl.library, gpus.library, index, rank, size, id);
    await connect(made, init, size);
    const word = new binding.GpuMemory(gpus.library, index, 16);
    return new NcclEngine(host, { communicator: made, stream: device.stream, store, word, name });
  } catch (error) {
    made?.release();
    await host.close();
    throw error;
  }
}
