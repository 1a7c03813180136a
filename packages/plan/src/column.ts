/** What this needs of Node's Buffer; elsewhere there is none. */
interface UnsafeAllocator {
  allocUnsafeSlow(byteLength: number): { readonly buffer: ArrayBuffer };
}

/**
 * A column of a plan, whose every element the caller is about to write. HAZARD: where Node can leave it out, nothing zeroes the array first, which is a
 * tenth of planning; an element that stays unwritten holds whatever the memory held before. `test/unit/column.test.ts` plans over two different
 * fillings of fresh memory and compares.
 */
export function unwrittenColumn(length: number): Int32Array {
  const { Buffer } = globalThis as { readonly Buffer?: UnsafeAllocator };
  if (Buffer === undefined || length < smallest) return new Int32Array(length);
  return new Int32Array(Buffer.allocUnsafeSlow(4 * length).buffer);
}

/** Below this, making the array costs more than zeroing it. */
const smallest = 4096;
