/* Arguments of the kernel that computes experts (ep/device/expert_layer.h): what a rank does between a dispatch of tokens and the combine of their results. */
#ifndef EP_ABI_EXPERT_LAYER_H
#define EP_ABI_EXPERT_LAYER_H

#include "moe.h"

/* Rows of one expert that a block works on together. */
#define EP_EXPERT_ROWS 4u
/* Experts of one launch, whose runs travel with it. */
#define EP_EXPERT_MOST 256u

/* Rows of x and y that are one expert's. */
typedef struct ep_expert_run {
  uint32_t row;
  uint32_t rows;
} ep_expert_run;
EP_STATIC_ASSERT(sizeof(ep_expert_run) == 8, "indexed by the kernel");

typedef struct ep_expert_args {
  uint64_t gate; /* addresses of f32 [experts, intermediate, hidden], packed; so is up */
  uint64_t up;
  uint64_t down; /* f32 [experts, hidden, intermediate] */
  uint64_t x;    /* address of row 0: numbers, or codes, of `payload` */
  uint64_t x_stride_bytes;
  uint64_t scales;     /* of codes: [ceil(hidden / 128), scale_room], of row r in column r; f32, or bytes of EP_MOE_F8_UE8M0. Otherwise 0 */
  uint64_t scale_room;
  uint64_t y; /* address of row 0, of `dtype`: written where runs are */
  uint64_t y_stride_bytes;
  uint32_t payload; /* EP_MOE_F32, F16, BF16 or one of EP_MOE_F8_* */
  uint32_t dtype;   /* EP_MOE_F32, F16, BF16 */
  uint32_t experts; /* at most EP_EXPERT_MOST */
  uint32_t hidden;
  uint32_t intermediate;
  uint32_t tiles; /* of EP_EXPERT_ROWS rows, of all runs; none has rows of two experts. As many as there may be, where `counts` is not 0 */
  /* Where each launch finds the runs, in place of those below: addresses of int32_t[experts], or 0 and 0. What is not within `rows` is left out. */
  uint64_t counts;
  uint64_t starts;
  uint64_t rows; /* of x and y */
  ep_expert_run runs[EP_EXPERT_MOST];
} ep_expert_args;
EP_STATIC_ASSERT(sizeof(ep_expert_args) == 120 + 8 * EP_EXPERT_MOST, "handed to kernels by value");

#endif
