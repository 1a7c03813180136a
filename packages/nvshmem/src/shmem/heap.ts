/** The symmetric heap: objects in one collective allocation, placed alike on every PE. */
import { checkInteger, type DType, EpError, elementBytes, invalid, isDType, type WaitOptions } from '@ep/core';
import { checkAgreement, type RankMemory, type RankTeam } from '@ep/native/ranks';
import { RangeAllocator, SMALLEST_ALIGNMENT } from './allocator.js';
import { type Block, SymmetricArray } from './symmetric.js';

const ALIGNMENTS: readonly number[] = Array.from({ length: 13 }, (_, power) => 2 ** power);

const CALLS = ['malloc', 'calloc', 'align', 'free'] as const;
type Call = (typeof CALLS)[number];

/** What PEs compare before they change their heaps. Offsets are compared too, so that heaps which have drifted apart are found out. */
function describe(bytes: Uint8Array): string {
  const [call, byteLength, alignment, offset] = new Float64Array(bytes.buffer, bytes.byteOffset, 4);
  const name = CALLS[call!];
  if (name === 'free') return `free of ${byteLength} bytes at heap offset ${offset}`;
  const at = offset! < 0 ? 'which do not fit' : `at heap offset ${offset}`;
  return `${name} of ${byteLength} bytes aligned to ${alignment}, ${at}`;
}

export function symmetricHeap(memory: RankMemory, world: RankTeam) {
  const allocator = new RangeAllocator(memory.byteLength);
  // Calls change the heap in the order in which they were made, as the others do.
  let tail: Promise<unknown> = Promise.resolve();

  function inOrder<T>(body: () => Promise<T>): Promise<T> {
    const run = tail.then(body);
    tail = run.catch(() => {});
    return run;
  }

  async function agree(call: Call, numbers: readonly [number, number, number], options?: WaitOptions): Promise<void> {
    const blob = new Uint8Array(new Float64Array([CALLS.indexOf(call), ...numbers]).buffer);
    checkAgreement(call, world, await world.allGather(blob, options), describe);
  }

  async function allocate<D extends DType>(
    call: Call,
    dtype: D,
    length: number,
    alignment: number,
    options?: WaitOptions,
  ): Promise<SymmetricArray<D>> {
    if (!isDType(dtype)) throw invalid('dtype', { where: call, expected: 'a dtype', found: dtype });
    const width = elementBytes(dtype);
    checkInteger(length, 'length', call, 0, Math.floor(Number.MAX_SAFE_INTEGER / width));
    const byteLength = length * width;
    return inOrder(async () => {
      const offset = allocator.allocate(byteLength, alignment);
      try {
        await agree(call, [byteLength, alignment, offset ?? -1], options);
      } catch (error) {
        if (offset !== undefined) allocator.free(offset);
        throw error;
      }
      if (offset === undefined) {
        throw new EpError(
          'EP_MEMORY_LIMIT',
          `${call}: ${byteLength} bytes do not fit the symmetric heap of ${memory.byteLength} bytes, whose largest free range has ${allocator.largestFree}; raise heapBytes`,
          { context: { byteLength, heapBytes: memory.byteLength, largestFree: allocator.largestFree } },
        );
      }
      const block: Block = { memory, byteOffset: offset, byteLength, freed: false };
      const array = new SymmetricArray(dtype, block, offset, length);
      if (call === 'calloc') {
        // Through bytes: for ue8m0 and the like a filled 0 would be a number.
        memory.view('u8', offset, byteLength).fill(0);
        await world.barrier(options);
      }
      return array;
    });
  }

  return {
    /**
     * Collective: `length` elements of `dtype` on every PE, uninitialised. Throws `EP_MISMATCH` on every PE, naming those that asked for something
     * else, and `EP_MEMORY_LIMIT` where the heap is full; in both cases nothing is allocated.
     */
    malloc<D extends DType>(dtype: D, length: number, options?: WaitOptions): Promise<SymmetricArray<D>> {
      return allocate('malloc', dtype, length, SMALLEST_ALIGNMENT, options);
    },
    /** As `malloc`, zeroed on every PE before it returns on any. */
    calloc<D extends DType>(dtype: D, length: number, options?: WaitOptions): Promise<SymmetricArray<D>> {
      return allocate('calloc', dtype, length, SMALLEST_ALIGNMENT, options);
    },
    /** As `malloc`, at an address that is a multiple of `alignment`: a power of two up to 4096. */
    async align<D extends DType>(
      alignment: number,
      dtype: D,
      length: number,
      options?: WaitOptions,
    ): Promise<SymmetricArray<D>> {
      // Parts begin at page borders, so an aligned offset is an aligned address up to there.
      if (!ALIGNMENTS.includes(alignment)) {
        throw invalid('alignment', { where: 'align', expected: 'a power of two from 1 to 4096', found: alignment });
      }
      return allocate('align', dtype, length, alignment, options);
    },
    /**
     * Collective: gives an object back. From the call on, its arrays throw `EP_CLOSED` in calls of this PE. Throws `EP_INVALID_ARGUMENT` for a part
     * of an object or another heap's, `EP_CLOSED` for one that was freed.
     */
    async free(array: SymmetricArray, options?: WaitOptions): Promise<void> {
      if (!(array instanceof SymmetricArray)) {
        throw invalid('array', { where: 'free', expected: 'a symmetric array', found: array });
      }
      array.check(memory, 'free');
      const { block } = array;
      if (block === undefined) {
        throw invalid('array', { where: 'free', expected: 'a whole object, not a part of one', found: array });
      }
      block.freed = true;
      await inOrder(async () => {
        try {
          await agree('free', [block.byteLength, 0, block.byteOffset], options);
        } catch (error) {
          block.freed = false;
          throw error;
        }
        allocator.free(block.byteOffset);
      });
    },
  };
}
