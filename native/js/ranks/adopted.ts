/** Memory of the caller that the NIC may read and write locally. */
import { type AdoptedMemory, checkInteger, EpError, invalid, Resource } from '@ep/core';
import type { NativeOperand } from '../binding.js';
import { checkPinnable } from './memory-limits.js';

/** Local bytes: a memory of the addon, or the number that `adopt` gave. */
export type NativeLocal = NativeOperand | number;

export interface NicMemories {
  adopt(address: bigint, byteLength: number): number;
  disown(adopted: number): void;
}

/** Throws `EP_INVALID_ARGUMENT` for what is no range, `EP_MEMORY_LIMIT` where the NIC pins memory and may not pin so much. HAZARD: the caller's memory must outlive it: the NIC reads addresses. */
export class AdoptedRange extends Resource implements AdoptedMemory {
  readonly address: bigint;
  readonly byteLength: number;
  readonly #nic: NicMemories;
  readonly #number: number;
  readonly #onRelease: (range: AdoptedRange) => void;

  constructor(
    nic: NicMemories,
    memory: { readonly address: bigint; readonly byteLength: number },
    onRelease: (range: AdoptedRange) => void,
    { pins }: { readonly pins: boolean },
  ) {
    super('adopted memory');
    const where = 'adopt';
    if (typeof memory?.address !== 'bigint' || memory.address < 1n || memory.address >= 2n ** 64n) {
      throw invalid('address', { where, expected: 'the address of bytes, a bigint', found: memory?.address ?? memory });
    }
    checkInteger(memory.byteLength, 'byteLength', where, 1);
    if (pins) checkPinnable(memory.byteLength, where);
    this.address = memory.address;
    this.byteLength = memory.byteLength;
    this.#nic = nic;
    this.#number = nic.adopt(memory.address, memory.byteLength);
    this.#onRelease = onRelease;
  }

  /** What the addon calls it. Throws `EP_INVALID_ARGUMENT` where another transport adopted it. */
  numberFor(nic: NicMemories): number {
    this.checkOpen('endpoint');
    if (nic === this.#nic) return this.#number;
    throw new EpError('EP_INVALID_ARGUMENT', 'the memory was adopted by another transport');
  }

  protected override release(): void {
    this.#nic.disown(this.#number);
    this.#onRelease(this);
  }
}
