/**
 * Where things lie in a group's section of the arena, the same on every rank. For each member there is a receive area, which that member writes, and a
 * send area, from which this rank's puts to that member are read. An area has the slots of three lanes: records, payload of collectives, payload of
 * messages. Each slot has one bit for "filled" and one for "free again" in the signal word between the two ranks.
 */
import { EpError } from '@ep/core';
import { RECORD_BYTES } from './records.js';

export const LANES = ['control', 'collective', 'message'] as const;
export type LaneName = (typeof LANES)[number];

/** Slots of every lane: enough to keep a put under way while the one before is read. */
export const SLOTS_PER_LANE = 4;
const SLOT_BITS = LANES.length * SLOTS_PER_LANE;

/** Of a payload chunk: who, which, where. A multiple of the widest element, which the payload behind it is aligned to. */
export const CHUNK_HEADER_BYTES = 32;
const ALIGNMENT = 64;
const SMALLEST_SLOT = 2 * CHUNK_HEADER_BYTES;

export interface SectionLayout {
  /** Bytes of the slots of payload lanes, with header. */
  readonly slotBytes: number;
  readonly receiveOffset: (peer: number, lane: LaneName, slot: number) => number;
  readonly sendOffset: (peer: number, lane: LaneName, slot: number) => number;
}

const FIRST_BITS: Readonly<Record<LaneName, number>> = {
  control: 0,
  collective: SLOTS_PER_LANE,
  message: 2 * SLOTS_PER_LANE,
};
const ALL_OF_A_LANE = 2 ** SLOTS_PER_LANE - 1;

export const fullBit = (lane: LaneName, slot: number): number => FIRST_BITS[lane] + slot;
export const freeBit = (lane: LaneName, slot: number): number => SLOT_BITS + FIRST_BITS[lane] + slot;
/** Of a set of such bits, those of a lane: one for each slot. */
export const filledOf = (bits: number, lane: LaneName): number => (bits >> FIRST_BITS[lane]) & ALL_OF_A_LANE;
export const freedOf = (bits: number, lane: LaneName): number => filledOf(bits >> SLOT_BITS, lane);

const alignDown = (bytes: number): number => bytes - (bytes % ALIGNMENT);

/** Smallest section in which a group of this size has payload slots at all. */
export function smallestSection(size: number): number {
  return 2 * size * SLOTS_PER_LANE * (RECORD_BYTES + 2 * SMALLEST_SLOT);
}

/** Throws `EP_CAPACITY` if the section is too small for the group. */
export function layOut(sectionBytes: number, size: number): SectionLayout {
  const area = alignDown(Math.floor(sectionBytes / (2 * size)));
  const slotBytes = alignDown(Math.floor((area - SLOTS_PER_LANE * RECORD_BYTES) / (2 * SLOTS_PER_LANE)));
  if (slotBytes < SMALLEST_SLOT) {
    throw new EpError(
      'EP_CAPACITY',
      `portable engine: ${sectionBytes} bytes of staging are too few for ${size} ranks; stagingBytes must be at least ${smallestSection(size)}`,
      { context: { stagingBytes: sectionBytes, needed: smallestSection(size), size } },
    );
  }
  const offsetIn: { readonly [lane in LaneName]: (slot: number) => number } = {
    control: (slot) => slot * RECORD_BYTES,
    collective: (slot) => SLOTS_PER_LANE * RECORD_BYTES + slot * slotBytes,
    message: (slot) => SLOTS_PER_LANE * (RECORD_BYTES + slotBytes) + slot * slotBytes,
  };
  return {
    slotBytes,
    receiveOffset: (peer, lane, slot) => peer * area + offsetIn[lane](slot),
    sendOffset: (peer, lane, slot) => (size + peer) * area + offsetIn[lane](slot),
  };
}
