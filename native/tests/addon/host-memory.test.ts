/** Memory that native code owns: how much of it there may be, and which views say where it lies. */
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { allocateHost, nativePlaceOf } from '../../js/host-memory.js';
import { native } from '../../js/native.js';

const refusal = (code: string, message: string) =>
  expect.objectContaining({ code, message: expect.stringContaining(message) });

describe('allocateHost', () => {
  /** Takes the place of the addon's memory, so that a test which fails takes none either. */
  class NoMemory {
    constructor(byteLength: number) {
      throw new Error(`${byteLength} bytes were asked for`);
    }
  }
  beforeEach(() => {
    vi.spyOn(native().binding, 'HostMemory').mockImplementation(NoMemory as never);
  });
  afterEach(() => {
    vi.restoreAllMocks();
  });

  it.each([2 ** 32 + 1, 2 ** 40, Number.MAX_SAFE_INTEGER, 2 ** 64, -1, 1.5, Number.NaN, '8', null, undefined])(
    'refuses %s bytes before any page is taken',
    (byteLength) => {
      expect(() => allocateHost(byteLength as number)).toThrow(
        refusal('EP_INVALID_ARGUMENT', 'allocateHost: byteLength must be an integer from 0 to 4294967296'),
      );
      expect(native().binding.HostMemory).not.toHaveBeenCalled();
    },
  );

  it('asks the addon for all that an ArrayBuffer holds', () => {
    expect(() => allocateHost(2 ** 32)).toThrow('4294967296 bytes were asked for');
  });
});

describe('nativePlaceOf', () => {
  it('finds a view in its memory, and nothing for memory of JS', () => {
    const buffer = allocateHost(64);
    expect(nativePlaceOf(new Uint16Array(buffer, 6, 2))).toMatchObject({ byteOffset: 6 });
    expect(nativePlaceOf(new Uint8Array(8))).toBeUndefined();
  });

  it.each([null, undefined, 5, {}, new ArrayBuffer(4), new DataView(new ArrayBuffer(4))])('refuses %s', (view) => {
    expect(() => nativePlaceOf(view as never)).toThrow(refusal('EP_INVALID_ARGUMENT', 'must be a typed array'));
  });

  // The window of a memory that was closed: its views have lost their place, the native memory may be gone.
  it('refuses a view whose window was detached', () => {
    const view = new Uint8Array(allocateHost(64), 8);
    native().binding.detach(view.buffer as ArrayBuffer);
    expect(() => nativePlaceOf(view)).toThrow(refusal('EP_DETACHED', 'detached'));
  });
});
