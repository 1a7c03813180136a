/** How the ranks of a world become the PEs of one world of NVSHMEM, which knows no failures: whatever can be found out before is found out by our own means. */
import { EpError, formatRanks, type Rank, type WaitOptions } from '@ep/core';
import {
  codeOfStatus,
  type NativeGpuLibrary,
  type NativeNvshmemWorld,
  type Nvshmem,
  type NvshmemPlace,
  native,
} from '@ep/native';
import { type JoinedRanks, nativeTimeout } from '@ep/native/ranks';
import type { ResolvedNvshmemConfig } from './config.js';

const WHERE = 'nvshmem:nvshmem';
const ID_BYTES = 128;

/** Between looks whether a rank has died, in milliseconds. */
const LOOK_MS = 20;

/** What a rank tells the others before any of them begins. */
const NOTHING = 0;
const HAS_WORLD = 1;
const HAS_FAILED = 2;
const CANNOT = 3;

interface Told {
  readonly state: number;
  readonly pid: number;
  /** Of the world that it is in; of the first rank that is in none, one for a new world. */
  readonly id: Uint8Array;
}

const encode = ({ state, pid, id }: Told): Uint8Array => {
  const bytes = new Uint8Array(16 + ID_BYTES);
  new Float64Array(bytes.buffer, 0, 2).set([state, pid]);
  bytes.set(id, 16);
  return bytes;
};

const decode = (bytes: Uint8Array): Told => {
  const [state = 0, pid = 0] = new Float64Array(bytes.slice(0, 16).buffer);
  return { state, pid, id: bytes.subarray(16) };
};

const isSame = (a: Uint8Array, b: Uint8Array): boolean => Buffer.compare(a, b) === 0;

export interface MeetingInit {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly joined: JoinedRanks;
  readonly nvshmem: Nvshmem;
  readonly library: NativeGpuLibrary;
  readonly config: ResolvedNvshmemConfig;
}

/**
 * Collective. A process stays a PE of the first world that it meets in: later ones of the same ranks use that. `EP_UNSUPPORTED` where ranks share a process, or are in other worlds already; `EP_UNAVAILABLE`
 * where one of them lost its world. All ranks hear of what one of them finds.
 */
export async function meetInNvshmem(init: MeetingInit, limits: WaitOptions): Promise<NativeNvshmemWorld> {
  const { rank, worldSize, joined, nvshmem, library, config } = init;
  const place = nvshmem.library.here();
  const id = agreedId(await tellAll(init, place, limits), place, init);
  let failure: { readonly reason: unknown } | undefined;
  let world: NativeNvshmemWorld | undefined;
  try {
    const { binding } = native();
    world = new binding.NvshmemWorld(nvshmem.library, library, config.device, rank, worldSize, id, config.heapBytes);
    await meet(world, joined, nativeTimeout(limits, config.timeoutMs, WHERE), limits.signal);
  } catch (reason) {
    failure = { reason };
  }
  const ends = await joined.world.allGather(new Uint8Array([failure === undefined ? 1 : 0]), limits);
  if (failure !== undefined) throw failure.reason;
  const ranks = ends.flatMap(([met], one) => (met === 1 ? [] : [one]));
  if (ranks.length > 0) {
    throw new EpError('EP_UNAVAILABLE', `${WHERE}: ${formatRanks(ranks)} did not begin with NVSHMEM`, {
      context: { ranks },
    });
  }
  return world!;
}

async function tellAll(
  { rank, joined, nvshmem }: MeetingInit,
  place: NvshmemPlace | undefined,
  limits: WaitOptions,
): Promise<readonly Told[]> {
  let own: Told = { state: NOTHING, pid: process.pid, id: new Uint8Array(ID_BYTES) };
  let failure: { readonly reason: unknown } | undefined;
  try {
    if (place !== undefined) own = { ...own, state: place.failed === '' ? HAS_WORLD : HAS_FAILED, id: place.id };
    else if (rank === 0) own = { ...own, id: nvshmem.library.uniqueId() };
  } catch (reason) {
    failure = { reason };
    own = { ...own, state: CANNOT };
  }
  const told = (await joined.world.allGather(encode(own), limits)).map(decode);
  if (failure !== undefined) throw failure.reason;
  return told;
}

function agreedId(told: readonly Told[], place: NvshmemPlace | undefined, init: MeetingInit): Uint8Array {
  const ranksWhere = (test: (one: Told, rank: number) => boolean): Rank[] =>
    told.flatMap((one, rank) => (test(one, rank) ? [rank] : []));
  const refuse = (code: 'EP_UNSUPPORTED' | 'EP_UNAVAILABLE', ranks: readonly Rank[], why: string): never => {
    throw new EpError(code, `${WHERE}: ${formatRanks(ranks)} ${why}`, { context: { ranks } });
  };
  const pids = told.map(({ pid }) => pid);
  const together = ranksWhere(({ pid }) => pids.indexOf(pid) !== pids.lastIndexOf(pid));
  if (together.length > 0) {
    return refuse(
      'EP_UNSUPPORTED',
      together,
      'share a process: NVSHMEM takes one PE of each; nvshmem.cuda has ranks as threads',
    );
  }
  const unable = ranksWhere(({ state }) => state === CANNOT);
  if (unable.length > 0) return refuse('EP_UNAVAILABLE', unable, 'could make no unique id of NVSHMEM');
  const failed = ranksWhere(({ state }) => state === HAS_FAILED);
  if (failed.length > 0) {
    const why = place?.failed ? ` (here: ${place.failed})` : '';
    return refuse(
      'EP_UNAVAILABLE',
      failed,
      `lost the world of NVSHMEM that the process was in${why}: it has no way back, start processes anew`,
    );
  }
  const first = told[0]!;
  const odd = ranksWhere(({ state, id }) => state !== first.state || (state === HAS_WORLD && !isSame(id, first.id)));
  if (odd.length > 0) {
    return refuse(
      'EP_UNSUPPORTED',
      odd,
      'are in another world of NVSHMEM than rank 0, or in none: a process is a PE of one world for as long as it lives',
    );
  }
  if (place === undefined) return first.id;
  const { rank, worldSize, config } = init;
  const { pe, pes, device, heapBytes } = place;
  if (pe !== rank || pes !== worldSize || device !== config.device || heapBytes !== config.heapBytes) {
    throw new EpError(
      'EP_UNSUPPORTED',
      `${WHERE}: this process is PE ${pe} of ${pes} on GPU ${device}, with a heap of ${heapBytes} bytes: it cannot become PE ${rank} of ${worldSize} on GPU ${config.device} with ${config.heapBytes}`,
      { context: { pe, pes, device, heapBytes } },
    );
  }
  return first.id;
}

/** NVSHMEM waits for all PEs for ever, on a thread of its own: here the wait ends. */
async function meet(
  world: NativeNvshmemWorld,
  { liveness }: JoinedRanks,
  timeoutMs: number,
  signal: AbortSignal | undefined,
): Promise<void> {
  const ended = new AbortController();
  const onAbort = (): void => ended.abort(signal?.reason);
  signal?.addEventListener('abort', onAbort, { once: true });
  const watch = setInterval(() => {
    const lost = liveness.lostRanks();
    if (lost.length === 0) return;
    const why = `${WHERE}: ${formatRanks(lost)} died while NVSHMEM began: this process cannot begin again`;
    ended.abort(new EpError('EP_PEER_LOST', why, { context: { lost } }));
  }, LOOK_MS);
  try {
    const outcome = await native().operations.run(() => world.meet(timeoutMs), ended.signal);
    if (outcome.status === 0) return;
    const code = codeOfStatus(outcome.status);
    const why =
      outcome.message ??
      `NVSHMEM did not begin on all ranks within ${timeoutMs} ms (NVSHMEM_DEBUG=INFO has it say what it does): this process cannot begin again`;
    throw new EpError(code === 'EP_SYSTEM' ? 'EP_UNAVAILABLE' : code, `${WHERE}: ${why}`, { context: { timeoutMs } });
  } finally {
    clearInterval(watch);
    signal?.removeEventListener('abort', onAbort);
  }
}
