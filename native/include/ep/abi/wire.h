/* Notation for formats that hardware defines: big-endian integers, and bits within words of either order. */
#ifndef EP_ABI_WIRE_H
#define EP_ABI_WIRE_H

#include "version.h"

/* An integer whose bytes lie in memory most significant first. Swap on load and store. */
typedef uint16_t ep_be16;
typedef uint32_t ep_be32;
typedef uint64_t ep_be64;

/* Bits high..low (31 is the first on the wire) of the big-endian dword at byte `offset`; with high > 31, of the qword there. The parts are
 * packed into one number: offset << 16 | high << 8 | low. Every EP_X_FIELD of this form belongs to the layout that EP_X_BYTES gives a size. */
#define EP_BITS(offset, high, low) ((offset) * 65536u + (high) * 256u + (low))

/* The same of the little-endian dword or qword at byte `offset`, bit 0 being the lowest of the first byte. The number 128 in `low` tells the orders
 * apart: HAZARD, what reads EP_BITS only would shift by 128 and more, so a format of one order is never handed to a reader of the other. */
#define EP_LE_BITS(offset, high, low) ((offset) * 65536u + (high) * 256u + (low) + 128u)

#endif
