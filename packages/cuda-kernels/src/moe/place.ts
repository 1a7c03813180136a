/** Where a buffer for experts keeps what in its symmetric memory and signal pad: the same on every rank. */
import { EP_MOE_SIGNAL_KINDS } from '@ep/native';
import { type AgreementPlace, agreementBytes, agreementSlots } from '../agreement.js';
import { roundToPage } from '../layout.js';
import type { ResolvedMoe } from './options.js';

/** Kind of the device handle of memory that kernels reach by loads and stores on all ranks. */
export const STORES_ONLY = 'memory:load-store';

/** Offset and bytes of a slot of each part, in the order of `MoeDescription.parts`. Absent parts have neither. */
export function moeParts({ sizes, calls }: ResolvedMoe): Float64Array {
  const component = (name: string): readonly [number, number] => {
    const found = sizes.components.find((one) => one.name === name);
    return found === undefined ? [0, 0] : [found.offset, found.bytes / calls];
  };
  return Float64Array.of(
    ...component('received tokens'),
    ...component('returned results'),
    ...component('staged tokens'),
    ...component('staged results'),
    ...component('counts'),
    ...component('row starts'),
    ...component('refusals'),
  );
}

const partsEnd = ({ sizes }: ResolvedMoe): number => roundToPage(sizes.totalBytes);

export const callSlots = ({ calls, worldSize }: ResolvedMoe): number => calls * EP_MOE_SIGNAL_KINDS * worldSize;

export const moeAgreementPlace = (resolved: ResolvedMoe): AgreementPlace => ({
  byteOffset: partsEnd(resolved),
  slot: callSlots(resolved),
});

export const moeMemoryBytes = (resolved: ResolvedMoe): number =>
  partsEnd(resolved) + agreementBytes(resolved.worldSize);

/** Of rank 0; + rank: counts 1 when that rank has ended its last call. */
export const farewellSlot = (resolved: ResolvedMoe): number => callSlots(resolved) + agreementSlots(resolved.worldSize);

export const moeSignalSlots = (resolved: ResolvedMoe): number => farewellSlot(resolved) + resolved.worldSize;
