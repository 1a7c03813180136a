/** Where a dispatcher keeps what in its symmetric memory and signal pad: the same on every rank. */
import { agreementBytes, agreementSlots } from './agreement.js';

export interface Layout {
  readonly worldSize: number;
  readonly leases: number;
  /** Of each lease; leases lie first, one after the other. */
  readonly leaseBytes: number;
  /** Of each of the two staging buffers, which lie last; 0: none. */
  readonly stagingBytes: number;
}

const PAGE = 4096;
export const roundToPage = (bytes: number): number => Math.ceil(bytes / PAGE) * PAGE;

/** First arrival counter of a lease; + source rank. Peers add to it. */
export const arrivalSlot = (layout: Layout, lease: number): number => 2 * lease * layout.worldSize;
/** First credit counter of a lease; + destination rank. Receivers add to it. */
export const creditSlot = (layout: Layout, lease: number): number => (2 * lease + 1) * layout.worldSize;

export const agreementPlace = (layout: Layout) => ({
  byteOffset: layout.leases * layout.leaseBytes,
  slot: 2 * layout.leases * layout.worldSize,
});

/** First byte of the send buffer; the receive buffer follows it. */
export const stagingPlace = (layout: Layout): number =>
  roundToPage(layout.leases * layout.leaseBytes + agreementBytes(layout.worldSize));

export const memoryBytes = (layout: Layout): number => stagingPlace(layout) + 2 * layout.stagingBytes;
export const signalSlots = (layout: Layout): number =>
  2 * layout.leases * layout.worldSize + agreementSlots(layout.worldSize);
