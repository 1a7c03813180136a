/** Device memory of others, for copies between it and JS. */
import { type AdoptedMemory, checkInteger, EpError, invalid, type Region, Resource } from '@ep/core';
import type { NativeGpuLibrary } from '../gpu.js';

export class AdoptedDeviceMemory extends Resource implements AdoptedMemory {
  readonly address: bigint;
  readonly byteLength: number;
  /** Ordinal of the GPU. */
  readonly device: number;
  readonly #onRelease: () => void;

  /** Throws `EP_UNSUPPORTED` for what is no memory of this GPU, `EP_INVALID_ARGUMENT` for a run that exceeds its allocation. */
  constructor(
    memory: { readonly address: bigint; readonly byteLength: number },
    library: NativeGpuLibrary,
    device: number,
    onRelease: () => void,
  ) {
    super('adopted device memory');
    const where = 'adopt';
    if (typeof memory?.address !== 'bigint') {
      throw invalid('address', { where, expected: 'a bigint', found: memory?.address });
    }
    const { address } = memory;
    const byteLength = checkInteger(memory.byteLength, 'byteLength', where, 1);
    const { bytes, why } = library.find(device, address);
    if (bytes === undefined) {
      throw new EpError(
        'EP_UNSUPPORTED',
        `adopt: ${why}; peers cannot map memory of the host that was not allocated for it: allocate() symmetric memory`,
        { context: { address, device } },
      );
    }
    if (byteLength > bytes) {
      throw invalid('byteLength', {
        where,
        expected: `at most the ${bytes} bytes to the end of it`,
        found: byteLength,
      });
    }
    this.address = address;
    this.byteLength = byteLength;
    this.device = device;
    this.#onRelease = onRelease;
  }

  /** Bounds-checked. */
  region(byteOffset: number, byteLength: number): Region {
    this.checkOpen('region');
    checkInteger(byteOffset, 'byteOffset', 'region', 0, this.byteLength);
    checkInteger(byteLength, 'byteLength', 'region', 0, this.byteLength - byteOffset);
    return Object.freeze({ memory: this, byteOffset, byteLength });
  }

  protected override release(): void {
    this.#onRelease();
  }
}
