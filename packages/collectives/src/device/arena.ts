/**
 * The device memory of all groups that come from one `initProcessGroup`. Allocation is collective over the world, but a group is opened by its members only: so the first group
 * allocates sections, and each group has one, with staging memory for calls, rings for messages, and signal words.
 */
import { checkInteger, EpError, exchange, formatRanks, Resource, type Store } from '@ep/core';
import {
  EP_GROUP_MOST_BLOCKS,
  EP_GROUP_MOST_RANKS,
  type GpuQueue,
  type NativeGpuGroupArena,
  type NativeGpuStream,
  native,
} from '@ep/native';
import { DeviceMemory } from '@ep/native/ranks';
import type { GroupTransport } from '../backends.js';
import type { DeviceOptions } from '../options.js';
import { ringBytesOf } from './ring.js';
import { DeviceSections } from './sections.js';

export const WHERE = 'initProcessGroup: device';
const DEFAULT_STAGING_BYTES = 32 * 2 ** 20;
const DEFAULT_MAX_GROUPS = 4;
const MOST_GROUPS = 1024;
const DEFAULT_LANES = 512;
const ALIGNMENT = 256;

export interface DeviceArenaInit extends DeviceOptions {
  readonly transport: GroupTransport;
  /** Of the first group; needed for as long as others are opened. */
  readonly store: Store;
  readonly timeoutMs: number;
  readonly signal: AbortSignal | undefined;
}

interface Contents {
  readonly memory: DeviceMemory;
  readonly arena: NativeGpuGroupArena;
  readonly store: Store;
  readonly queue: GpuQueue;
  readonly stagingBytes: number;
  readonly ringsBytes: number;
  readonly maxGroups: number;
  /** That were asked for, of groups on any stream; or 0. */
  readonly blocks: number;
}

function checkQueue(queue: GpuQueue, memory: DeviceMemory): void {
  if (queue?.device?.index === memory.device) return;
  throw new EpError(
    'EP_INVALID_ARGUMENT',
    `${WHERE}: the stream is of GPU ${queue?.device?.index}, the transport was opened for GPU ${memory.device}`,
  );
}

export class DeviceArena extends Resource {
  readonly memory: DeviceMemory;
  readonly sections: DeviceSections;
  /** That calls are launched on of groups that have no stream of their own. */
  readonly queue: GpuQueue;
  /**
   * That messages of all groups are copied on: they go beside what was put on the queue after them. HAZARD: made before any kernel runs, since page-locking its words waits for those
   * that do.
   */
  readonly copies: NativeGpuStream;
  /** Of a section: slots of calls, and behind them rings of messages. */
  readonly stagingBytes: number;
  readonly ringsBytes: number;
  readonly #arena: NativeGpuGroupArena;
  readonly #blocks: number;
  /** Each with a share of the GPU, which its groups use one after the other. */
  readonly #beside = new Map<GpuQueue, { readonly native: NativeGpuGroupArena; groups: number }>();

  constructor({ memory, arena, store, queue, stagingBytes, ringsBytes, maxGroups, blocks }: Contents) {
    super(`device memory of groups on GPU ${memory.device}`);
    this.memory = memory;
    this.#arena = arena;
    this.#blocks = blocks;
    this.queue = queue;
    this.stagingBytes = stagingBytes;
    this.ringsBytes = ringsBytes;
    this.sections = new DeviceSections(store, maxGroups);
    this.copies = new (native().binding.GpuStream)(memory.library, memory.device, true);
  }

  /** For a group whose calls go on `queue`, which gives it back by `leave`. Throws `EP_INVALID_ARGUMENT` where its blocks do not fit beside those of others. */
  enter(queue: GpuQueue): NativeGpuGroupArena {
    if (queue === this.queue) return this.#arena;
    checkQueue(queue, this.memory);
    let beside = this.#beside.get(queue);
    if (beside === undefined) {
      beside = { native: this.#arena.beside(this.#blocks), groups: 0 };
      this.#beside.set(queue, beside);
    }
    beside.groups++;
    return beside.native;
  }

  leave(queue: GpuQueue): void {
    const beside = this.#beside.get(queue);
    if (beside === undefined || --beside.groups > 0) return;
    this.#beside.delete(queue);
    beside.native.release();
  }

  /** Where a section begins in everybody's part, and where its rings do. */
  byteOffset(index: number): number {
    return index * sectionBytes(this);
  }

  ringsOffset(index: number): number {
    return this.byteOffset(index) + alignedUp(this.stagingBytes);
  }

  protected override async release(): Promise<void> {
    this.copies.close();
    this.#arena.release();
    await this.memory.close();
  }
}

const alignedUp = (bytes: number): number => Math.ceil(bytes / ALIGNMENT) * ALIGNMENT;
const sectionBytes = ({ stagingBytes, ringsBytes }: { readonly stagingBytes: number; readonly ringsBytes: number }) =>
  alignedUp(stagingBytes) + alignedUp(ringsBytes);

async function allocate(
  transport: GroupTransport,
  size: Omit<Parameters<GroupTransport['allocate']>[0], 'space'>,
): Promise<DeviceMemory> {
  const made = await transport.allocate({ ...size, space: 'device' });
  if (made instanceof DeviceMemory) return made;
  await made.close();
  throw new EpError('EP_UNSUPPORTED', `${WHERE}: the device memory of ${transport.name} is not in native hands`);
}

interface Told {
  readonly stagingBytes?: number;
  readonly maxGroups?: number;
  readonly why?: string;
}

const shapeText = ({ stagingBytes, maxGroups }: Told): string => `stagingBytes ${stagingBytes}, maxGroups ${maxGroups}`;

/**
 * Collective over the world of the transport. `EP_UNSUPPORTED` where it has no device memory, `EP_MISMATCH` naming ranks with other options, `EP_INVALID_ARGUMENT` when the
 * kernels of the ranks on this GPU could not all run at once.
 */
export async function openDeviceArena(init: DeviceArenaInit): Promise<DeviceArena> {
  const { transport, store, stream, timeoutMs, signal } = init;
  const { rank, worldSize } = transport;
  const lanes = checkInteger(init.lanes ?? DEFAULT_LANES, 'lanes', WHERE, 32, DEFAULT_LANES);
  const blocks = checkInteger(init.blocks ?? 0, 'blocks', WHERE, 0, EP_GROUP_MOST_BLOCKS);
  const stagingBytes = checkInteger(init.stagingBytes ?? DEFAULT_STAGING_BYTES, 'stagingBytes', WHERE, 1);
  const maxGroups = checkInteger(init.maxGroups ?? DEFAULT_MAX_GROUPS, 'maxGroups', WHERE, 1, MOST_GROUPS);
  if (!transport.capabilities.spaces?.has('device') || worldSize > EP_GROUP_MOST_RANKS) {
    const why =
      worldSize > EP_GROUP_MOST_RANKS
        ? `takes at most ${EP_GROUP_MOST_RANKS} ranks`
        : 'needs a transport with device memory';
    throw new EpError('EP_UNSUPPORTED', `${WHERE}: ${why}, and this is ${transport.name} of ${worldSize} ranks`, {
      context: { option: 'device' },
    });
  }
  const limits = { timeoutMs, ...(signal && { signal }) };
  const ringsBytes = ringBytesOf(Math.ceil(stagingBytes / 4), worldSize) * worldSize;
  const memory = await allocate(transport, {
    byteLength: maxGroups * sectionBytes({ stagingBytes, ringsBytes }),
    signalSlots: maxGroups * EP_GROUP_MOST_BLOCKS * worldSize,
    ...limits,
  });
  let arena: NativeGpuGroupArena | undefined;
  try {
    let refused: unknown;
    try {
      checkQueue(stream, memory);
      const shape = { memory: memory.nativeMemory(WHERE), sections: maxGroups, blocks, lanes };
      arena = new (native().binding.GpuGroupArena)(shape);
    } catch (error) {
      refused = error;
    }
    // All hear of one that cannot: nobody waits for it.
    const own: Told = arena === undefined ? { why: String(refused) } : { stagingBytes, maxGroups };
    const bytes = new Uint8Array(Buffer.from(JSON.stringify(own)));
    const parts = await exchange(store, { key: 'device', rank, worldSize, bytes }, limits);
    const told = parts.map((part) => JSON.parse(Buffer.from(part).toString()) as Told);
    if (arena === undefined) throw refused;
    const odd = told.flatMap((one, at) =>
      one.stagingBytes === stagingBytes && one.maxGroups === maxGroups ? [] : [at],
    );
    if (odd.length > 0) {
      const found = odd.map((at) => told[at]!.why ?? shapeText(told[at]!)).join('; ');
      throw new EpError('EP_MISMATCH', `${WHERE}: ${formatRanks(odd)}: ${found}; here ${shapeText(own)}`, {
        context: { ranks: odd, expected: shapeText(own), found },
      });
    }
    return new DeviceArena({ memory, arena, store, queue: stream, stagingBytes, ringsBytes, maxGroups, blocks });
  } catch (error) {
    arena?.release();
    await memory.close();
    throw error;
  }
}
