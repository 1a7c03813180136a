/** The heap's allocator against the plainest model there is: which bytes are taken. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { RangeAllocator, SMALLEST_ALIGNMENT } from '../src/shmem/allocator.js';

const HEAP = 64 * 64;

type Step = { readonly bytes: number; readonly alignment: number } | { readonly free: number };

const aStep: fc.Arbitrary<Step> = fc.oneof(
  fc.record({ bytes: fc.nat(HEAP / 4), alignment: fc.constantFrom(1, 8, 64, 128, 512, 1024) }),
  fc.record({ free: fc.nat(100) }),
);

it('never overlaps, aligns, joins what is freed, and refuses only what does not fit', () => {
  fc.assert(
    fc.property(fc.array(aStep, { maxLength: 60 }), (steps) => {
      const allocator = new RangeAllocator(HEAP);
      const taken = new Uint8Array(HEAP);
      const alive: { readonly offset: number; readonly end: number }[] = [];
      for (const step of steps) {
        if ('free' in step) {
          const [object] = alive.splice(step.free % Math.max(alive.length, 1), 1);
          if (object === undefined) continue;
          expect(allocator.free(object.offset)).toBe(true);
          expect(allocator.free(object.offset)).toBe(false);
          taken.fill(0, object.offset, object.end);
          continue;
        }
        const offset = allocator.allocate(step.bytes, step.alignment);
        const needed = Math.max(SMALLEST_ALIGNMENT, Math.ceil(step.bytes / SMALLEST_ALIGNMENT) * SMALLEST_ALIGNMENT);
        const stride = Math.max(step.alignment, SMALLEST_ALIGNMENT);
        const places = Array.from({ length: Math.floor((HEAP - needed) / stride) + 1 }, (_, i) => i * stride);
        const first = places.find((place) => taken.subarray(place, place + needed).every((byte) => byte === 0));
        expect(offset).toBe(first);
        if (offset === undefined) continue;
        taken.fill(1, offset, offset + needed);
        alive.push({ offset, end: offset + needed });
      }
      for (const { offset } of alive) allocator.free(offset);
      expect(allocator.largestFree).toBe(HEAP);
    }),
    { numRuns: 300 },
  );
});

it('has nothing to give without bytes', () => {
  const empty = new RangeAllocator(0);
  expect(empty.allocate(0)).toBeUndefined();
  expect(empty.largestFree).toBe(0);
  expect(empty.free(0)).toBe(false);
});
