/* The version of every layout under ep/abi. Freestanding C11, also C++ and CUDA.
 *
 * Handles cross from one build into another (JS package -> addon -> kernel): a reader refuses a handle of another version and names both.
 * Raise MAJOR when a published offset moves, MINOR when a field is added in reserved space. */
#ifndef EP_ABI_VERSION_H
#define EP_ABI_VERSION_H

#include <stdint.h>

#define EP_ABI_MAJOR 1
#define EP_ABI_MINOR 0

#if defined(__cplusplus)
#define EP_STATIC_ASSERT(cond, text) static_assert(cond, text)
#else
#define EP_STATIC_ASSERT(cond, text) _Static_assert(cond, text)
#endif

/* First bytes of every struct that is handed from one layer to another. */
typedef struct ep_handle_header {
  uint32_t magic;       /* one of EP_MAGIC_* */
  uint16_t abi_major;   /* EP_ABI_MAJOR of the writer */
  uint16_t abi_minor;   /* EP_ABI_MINOR of the writer */
  uint32_t kind;        /* meaning depends on magic */
  uint32_t byte_length; /* of the whole struct, header included */
} ep_handle_header;
EP_STATIC_ASSERT(sizeof(ep_handle_header) == 16, "readers find the payload at byte 16");

#define EP_MAGIC_SEGMENT 0x31534745u  /* "EGS1" */
#define EP_MAGIC_RANK 0x31524745u     /* "EGR1" */
#define EP_MAGIC_TEAM 0x31544745u    /* "EGT1" */
#define EP_MAGIC_MEMORY 0x314d4745u   /* "EGM1" */
#define EP_MAGIC_DISPATCH 0x31444745u /* "EGD1" */
#define EP_MAGIC_GROUP 0x31504745u    /* "EGP1" */
#define EP_MAGIC_IBGDA 0x31424745u        /* "EGB1" */
#define EP_MAGIC_IBGDA_QP 0x31514745u     /* "EGQ1" */
#define EP_MAGIC_IBGDA_MEMORY 0x314b4745u /* "EGK1" */
#define EP_MAGIC_IBGDA_PEER 0x31434745u   /* "EGC1" */
#define EP_MAGIC_MOE 0x31584745u          /* "EGX1" */
#define EP_MAGIC_MOE_CALL 0x31594745u     /* "EGY1" */
#define EP_MAGIC_EFA 0x31454745u          /* "EGE1" */
#define EP_MAGIC_EFA_QP 0x31464745u       /* "EGF1" */
#define EP_MAGIC_EFA_MEMORY 0x314e4745u   /* "EGN1" */
#define EP_MAGIC_GPU_MEMORY 0x31564745u   /* "EGV1" */

#endif
