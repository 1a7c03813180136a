/** Put with signal. The signal is an ordinary element of type u64 in the symmetric heap; waiting for it is in wait.ts. */
import { type DType, invalid, type Rank } from '@ep/core';
import { encode64 } from './element.js';
import { checkFits, checkSymmetric, type LocalArray, localElements, type Space } from './space.js';
import type { SymmetricArray } from './symmetric.js';

/** SHMEM_SIGNAL_SET and SHMEM_SIGNAL_ADD. */
export type SignalOperation = 'set' | 'add';

const SIGNAL_OPS: Readonly<Record<SignalOperation, number>> = { add: 1, set: 2 };

export function signals(space: Space) {
  const { native } = space;

  /**
   * Copies `source` to the beginning of `dest` on `pe`, then updates the first element of `signal` there: whoever sees the signal sees the data,
   * and all earlier puts of this PE.
   */
  function putSignal<D extends DType>(
    dest: SymmetricArray<D>,
    source: LocalArray<D>,
    signal: SymmetricArray<'u64'>,
    value: bigint | number,
    operation: SignalOperation,
    pe: Rank,
  ): void {
    checkSymmetric(space, dest, 'putSignal');
    checkSymmetric(space, signal, 'putSignal');
    if (signal.dtype !== 'u64' || signal.length === 0) {
      const found = `${signal.length} of ${signal.dtype}`;
      throw invalid('signal', { where: 'putSignal', expected: 'an element of type u64', found });
    }
    const op = operation === 'add' || operation === 'set' ? SIGNAL_OPS[operation] : undefined;
    if (op === undefined) throw invalid('operation', { where: 'putSignal', expected: 'set or add', found: operation });
    const from = localElements(space, dest.dtype, source, 'putSignal');
    checkFits(from.length, dest.length, 'putSignal');
    const word =
      typeof value === 'number' && value >= 0 && Number.isSafeInteger(value) ? value : encode64(value, 'putSignal');
    native.putSignal(space.pe(pe, 'putSignal'), dest.byteOffset, from, signal.byteOffset, op, word);
  }

  return {
    putSignal,
    /** As `putSignal`. */
    putSignalNbi: putSignal,
  };
}
