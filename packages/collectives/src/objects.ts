/** Values instead of tensors: structured clones as `node:v8` writes them, their sizes ahead of them. */
import { deserialize, serialize } from 'node:v8';
import { EpError, invalid, type Rank, type Work } from '@ep/core';
import type { Elements } from './engine.js';
import type { CallLimits, Lane, RunInTurn } from './lane.js';

function toBytes(value: unknown, where: string): Uint8Array {
  try {
    return serialize(value);
  } catch (error) {
    const why = error instanceof Error ? error.message : String(error);
    throw new EpError('EP_INVALID_ARGUMENT', `${where}: the value cannot be cloned: ${why}`, {
      context: { where },
      cause: error,
    });
  }
}

function fromBytes<T>(bytes: Uint8Array, where: string, rank: Rank): T {
  try {
    return deserialize(bytes) as T;
  } catch (error) {
    throw new EpError(
      'EP_MISMATCH',
      `${where}: what rank ${rank} sent is not a value that this version of Node reads`,
      {
        context: { ranks: [rank] },
        cause: error,
      },
    );
  }
}

const NOTHING: readonly Elements[] = [];

/** Bytes that each rank has; -1 for one that does not take part. */
async function gatherSizes(run: RunInTurn, size: number, own: number, limits: CallLimits): Promise<readonly number[]> {
  const outputs = Array.from({ length: size }, () => new Float64Array(1));
  const call = {
    kind: 'all-gather',
    sequence: 0,
    dtype: 'f64',
    root: -1,
    inputs: [Float64Array.of(own)],
    outputs,
  } as const;
  const { contributors } = await run({ call: { ...call, ...limits }, elements: 1 });
  return outputs.map(([bytes], rank) => (contributors.includes(rank) ? bytes! : -1));
}

function valuesOf<T>(all: readonly Uint8Array[], sizes: readonly number[], where: string): readonly (T | undefined)[] {
  return all.map((bytes, rank) => {
    const size = sizes[rank]!;
    return size < 0 ? undefined : fromBytes<T>(bytes.subarray(0, size), where, rank);
  });
}

export function broadcastObject<T>(
  lane: Lane,
  op: string,
  value: T | undefined,
  root: Rank,
  limits: CallLimits,
): Work<T> {
  const isRoot = lane.engine.rank === root;
  if (!isRoot && value !== undefined) {
    throw invalid('value', { where: op, expected: `undefined but on the root, rank ${root}`, found: value });
  }
  const own = isRoot ? toBytes(value, op) : undefined;
  return lane.turn<T>(op, 2, limits.signal, async (run) => {
    const broadcast = async (elements: Elements, dtype: 'f64' | 'u8'): Promise<void> => {
      const [inputs, outputs] = isRoot ? [[elements], NOTHING] : [NOTHING, [elements]];
      const call = { kind: 'broadcast', sequence: 0, dtype, root, inputs, outputs } as const;
      await run({ call: { ...call, ...limits }, elements: elements.length });
    };
    const size = Float64Array.of(own?.byteLength ?? 0);
    await broadcast(size, 'f64');
    const bytes = own ?? new Uint8Array(size[0]!);
    await broadcast(bytes, 'u8');
    return isRoot ? (value as T) : fromBytes<T>(bytes, op, root);
  });
}

export function gatherObject<T>(
  lane: Lane,
  op: string,
  value: T,
  root: Rank,
  limits: CallLimits,
): Work<readonly (T | undefined)[] | undefined> {
  const { rank, size } = lane.engine;
  const own = toBytes(value, op);
  return lane.turn<readonly (T | undefined)[] | undefined>(op, 2, limits.signal, async (run) => {
    const sizes = await gatherSizes(run, size, own.byteLength, limits);
    // As an all-to-all, which alone takes parts of different lengths: everybody has something for the root only.
    const inputs = sizes.map((_, peer) => (peer === root ? own : new Uint8Array(0)));
    const outputs = sizes.map((bytes) => new Uint8Array(rank === root ? Math.max(bytes, 0) : 0));
    const call = { kind: 'all-to-all', sequence: 0, dtype: 'u8', root: -1, inputs, outputs } as const;
    await run({ call: { ...call, ...limits }, elements: own.byteLength });
    return rank === root ? valuesOf<T>(outputs, sizes, op) : undefined;
  });
}

export function allGatherObject<T>(
  lane: Lane,
  op: string,
  value: T,
  limits: CallLimits,
): Work<readonly (T | undefined)[]> {
  const { size } = lane.engine;
  const own = toBytes(value, op);
  return lane.turn<readonly (T | undefined)[]>(op, 2, limits.signal, async (run) => {
    const sizes = await gatherSizes(run, size, own.byteLength, limits);
    // All parts of an all-gather are as long as the longest.
    const room = Math.max(...sizes);
    const input = new Uint8Array(room);
    input.set(own);
    const outputs = sizes.map(() => new Uint8Array(room));
    const call = { kind: 'all-gather', sequence: 0, dtype: 'u8', root: -1, inputs: [input], outputs } as const;
    await run({ call: { ...call, ...limits }, elements: room });
    return valuesOf<T>(outputs, sizes, op);
  });
}
