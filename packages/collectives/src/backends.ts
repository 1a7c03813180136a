/** From what a caller names to an engine. */
import { EpError, invalid, prefixStore, type Rank, type Store, type Transport } from '@ep/core';
import type { GpuQueue } from '@ep/native';
import { type DeviceArena, openDeviceArena } from './device/arena.js';
import { openDeviceEngine } from './device/engine.js';
import type { GroupEngine } from './engine.js';
import { checkNcclOptions, openNcclEngine } from './nccl/open.js';
import type { Backend, DeviceOptions } from './options.js';
import { openPortableEngine } from './portable/engine.js';
import type { Placement } from './portable/placement.js';
import { openShmEngine, shmEngines } from './shm/engine.js';

/** A group about to exist on this rank. */
export interface EngineInit {
  /** Keys of this group only. */
  readonly store: Store;
  /** Of which that is a part: the caller's, for keys of all groups. */
  readonly root: Store;
  /** This rank, of the group. */
  readonly rank: Rank;
  readonly size: number;
  /** For each rank of the group its rank in the world. */
  readonly ranks: readonly Rank[];
  /** Unlike that of any other group that has used the store. */
  readonly name: string;
  readonly timeoutMs: number;
  readonly ranksOnHost?: number;
  readonly signal?: AbortSignal;
  /** Of a GPU: what calls on tensors there go on, instead of the stream of the first group. */
  readonly stream?: GpuQueue;
  /** Of a group whose ranks may change later: how. Absent: all of `ranks`, of which none comes later. */
  readonly elastic?: ElasticInit;
  /** Members that the group which this one is made from has lost: one that never opened this one is heard of nowhere else. */
  readonly lost?: (() => readonly Rank[]) | undefined;
}

export interface ElasticInit {
  /** Ranks that the group may grow to. */
  readonly capacity: number;
  /** Who takes part at first. */
  readonly active: readonly Rank[];
  /** This rank begins alone, and asks the others to take it in. */
  readonly joins: boolean;
  /** A call whose deadline passes goes on without those that have not come. */
  readonly evicts: boolean;
}

export type EngineFactory = (init: EngineInit) => GroupEngine | Promise<GroupEngine>;

export type GroupTransport = Transport<'bundled' | 'add'>;

export const isTransport = (backend: unknown): backend is GroupTransport =>
  typeof backend === 'object' && backend !== null && 'allocate' in backend && 'connect' in backend;

/** Nobody has come into this place of the transport. */
export const isEmptyPlace = ({ succession, rank }: GroupTransport, member: Rank): boolean =>
  member !== rank && succession?.lifeOf(member) === '';

/** The ranks of this host, of a group of several. Where shared memory does not join them, calls end by their time. */
export function openHost(
  { store, root, ranks, name, timeoutMs, signal }: EngineInit,
  { mates, host, local }: Placement,
): GroupEngine | Promise<GroupEngine> {
  return openShmEngine({
    root,
    store: prefixStore(store, `${name}/host/${host}`),
    rank: local,
    size: mates.length,
    ranks: mates.map((member) => ranks[member]!),
    name: `${name}/host/${host}`,
    timeoutMs,
    ranksOnHost: mates.length,
    ...(signal && { signal }),
  });
}

/** `hosts`: for each rank of the transport; as the transport knows it unless given. */
export function engineFactory(backend: Backend, device?: DeviceOptions, hosts?: readonly number[]): EngineFactory {
  const where = 'initProcessGroup';
  if (device?.nccl !== undefined) checkNcclOptions(device);
  if (isTransport(backend)) {
    const placed = hosts ?? backend.hosts;
    let arena: DeviceArena | undefined;
    return async (init) => {
      const { store, root, rank, size, name, timeoutMs, signal } = init;
      const { succession } = backend;
      // The ranks of a group that grows are those of the transport, in their order.
      const { capacity = size } = init.elastic ?? {};
      const ranks = capacity > size ? Array.from({ length: capacity }, (_, member) => member) : init.ranks;
      const engine = await openPortableEngine({
        transport: backend,
        store,
        // Whoever comes later may open any of the groups first.
        arenaStore: succession && prefixStore(root, `ep/arena/${succession.world}`),
        rank,
        ranks,
        size,
        name,
        timeoutMs,
        signal,
        hosts: placed && ranks.map((member) => placed[member]!),
        openHost: (placement) => openHost(init, placement),
        active: init.elastic?.active,
        joins: init.elastic?.joins,
        evicts: init.elastic?.evicts,
      });
      if (device === undefined) return engine;
      if (device.nccl !== undefined) {
        return await openNcclEngine(engine, { device, store, name: `${engine.name} and nccl`, timeoutMs, signal });
      }
      // Device memory is allocated by the whole world: by the group that all others are made from.
      const owns = arena === undefined || arena.closed;
      if (owns) {
        try {
          arena = await openDeviceArena({ ...device, transport: backend, store, timeoutMs, signal });
        } catch (error) {
          await engine.close();
          throw error;
        }
      }
      return await openDeviceEngine(engine, {
        ...{ transport: backend, store, ranks, name, timeoutMs, signal },
        arena: arena!,
        queue: init.stream ?? device.stream,
        owns,
      });
    };
  }
  if (hosts !== undefined) {
    throw invalid('hosts', { where, expected: 'absent: only a transport joins several hosts', found: hosts });
  }
  if (backend === 'nccl') {
    if (device === undefined) {
      throw invalid('device', { where, expected: 'a stream of a GPU for the backend nccl', found: device });
    }
    checkNcclOptions(device);
    return async (init) => {
      const { store, timeoutMs, signal } = init;
      return await openNcclEngine(await openShmEngine(init), { device, store, name: 'nccl', timeoutMs, signal });
    };
  }
  if (device !== undefined) {
    throw new EpError(
      'EP_UNSUPPORTED',
      `${where}: device: only a transport with device memory (nvshmem.cuda) and the backend nccl have one`,
      {
        context: { option: 'device' },
      },
    );
  }
  if (typeof backend === 'function') return backend;
  if (backend === 'shm') return shmEngines();
  const expected = "'shm', 'nccl', a transport or a function that opens an engine";
  throw invalid('backend', { where, expected, found: backend });
}
