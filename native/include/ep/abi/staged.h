/* Where a staged dispatch (device/staged_dispatch.h) keeps its copies. One per part, parallel to ep_dispatch_args.parts. */
#ifndef EP_ABI_STAGED_H
#define EP_ABI_STAGED_H

#include "dispatch.h"

typedef struct ep_staged_part {
  uint64_t send_offset_bytes; /* into this rank's memory: mirrors the sender's tensor, rows packed */
  uint64_t recv_offset_bytes; /* into every rank's memory: mirrors the receive tensor */
  uint64_t send_rows;         /* of this rank */
  uint64_t recv_rows;         /* of this rank */
} ep_staged_part;
EP_STATIC_ASSERT(sizeof(ep_staged_part) == 32, "an array parallel to the parts");

#endif
