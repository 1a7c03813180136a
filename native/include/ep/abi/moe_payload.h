/* How the channels of a token travel (docs/moe.md, "Bytes"): codes first, channel 0 first, then the scales of its blocks of 128 channels. */
#ifndef EP_ABI_MOE_PAYLOAD_H
#define EP_ABI_MOE_PAYLOAD_H

#include "dispatch.h"

/* The first three are EP_DTYPE_*: what a tensor holds. The others are cast from one of them. */
#define EP_PAYLOAD_F32 EP_DTYPE_F32
#define EP_PAYLOAD_F16 EP_DTYPE_F16
#define EP_PAYLOAD_BF16 EP_DTYPE_BF16
#define EP_PAYLOAD_E4M3_F32 4u   /* an fp32 scale for each block */
#define EP_PAYLOAD_E4M3_POWER 5u /* the same, and it is a power of two */
#define EP_PAYLOAD_E4M3_UE8M0 6u /* a power of two as its exponent byte */
#define EP_PAYLOAD_LOGFMT10 7u   /* 10 bits a channel, channel c at bits 10 c .. 10 c + 9; for each block two bf16: largest magnitude, then smallest but 0 */

#define EP_PAYLOAD_BLOCK 128u /* channels that share a scale */
#define EP_MOE_ROW_ALIGN 16u  /* of messages and rows */

#endif
