/** Parts of the symmetric heap: all ranks take the same bytes, though each frees its own when its GPU is through with them. */
import { checkInteger, EpError, formatRanks, type WaitOptions } from '@ep/core';
import type { NativeNvshmemPart, NativeNvshmemWorld, NativeRankContext } from '@ep/native';
import type { DeviceReach, Gathering } from '@ep/native/ranks';

const NONE = -1;

/** Collective. Each proposes the first place that is free there, behind the last one that somebody could not have; the highest is tried next. `EP_MEMORY_LIMIT` names who has none. */
export async function takeAlike(
  world: NativeNvshmemWorld,
  team: Gathering,
  size: { readonly byteLength: number; readonly signalSlots: number },
  heapBytes: number,
  limits: WaitOptions,
): Promise<NativeNvshmemPart> {
  for (let from = 0; ; ) {
    let part: NativeNvshmemPart | undefined;
    let failure: unknown;
    try {
      part = world.take(size.byteLength, size.signalSlots, from);
    } catch (reason) {
      failure = reason;
    }
    try {
      const mine = new Float64Array([part?.offset() ?? NONE]);
      const told = await team.allGather(new Uint8Array(mine.buffer), limits);
      const offsets = told.map((bytes) => new Float64Array(bytes.slice().buffer)[0] ?? NONE);
      const ranks = offsets.flatMap((offset, rank) => (offset === NONE ? [rank] : []));
      if (ranks.length > 0) {
        if (failure !== undefined) throw failure;
        throw new EpError(
          'EP_MEMORY_LIMIT',
          `allocate: ${formatRanks(ranks)} have no room for ${size.byteLength} bytes and ${size.signalSlots} signal slots in the symmetric heap of ${heapBytes} bytes (heapBytes)`,
          { context: { ranks } },
        );
      }
      from = Math.max(...offsets);
      if (part !== undefined && offsets.every((offset) => offset === from)) {
        const taken = part;
        part = undefined;
        return taken;
      }
    } finally {
      part?.release();
    }
  }
}

/** Memory in such a part, which every rank's kernels reach where NVSHMEM has mapped it. */
export function reachByNvshmem(
  world: NativeNvshmemWorld,
  context: NativeRankContext,
  part: NativeNvshmemPart,
): DeviceReach {
  return {
    byteLength: 8,
    make: (byteLength, signalSlots) => world.memory(context, part, byteLength, signalSlots),
    describe: () => new Uint8Array(new Float64Array([1 + part.offset()]).buffer),
    connect: (memory, handles, told) => {
      for (const [rank, bytes] of told.entries()) {
        const offset = (new Float64Array(bytes.slice().buffer)[0] ?? 0) - 1;
        checkInteger(offset, `offset of rank ${rank}`, 'allocate', part.offset(), part.offset());
      }
      world.connect(memory, handles, part);
    },
    release: () => part.release(),
  };
}
