/* Calls of the GIN facade as data: what a host writes down and a kernel carries out, one after the other (device/gin_program.h). */
#ifndef EP_ABI_GIN_PROGRAM_H
#define EP_ABI_GIN_PROGRAM_H

#include "version.h"

/* ep_gin_step.op */
#define EP_GIN_PUT 1u            /* `bytes` from one's own part at `from` to the peer's at `to` */
#define EP_GIN_PUT_VALUE 2u      /* the first 1, 2, 4 or 8 `bytes` of `value` to the peer's part at `to` */
#define EP_GIN_GET 3u            /* `bytes` from the peer's part at `from` to one's own at `to` */
#define EP_GIN_SIGNAL 4u         /* no bytes */
#define EP_GIN_FLUSH 5u
#define EP_GIN_WAIT_SIGNAL 6u    /* until the signal is at least `value` */
#define EP_GIN_WAIT_COUNTER 7u
#define EP_GIN_READ_SIGNAL 8u    /* into `found` */
#define EP_GIN_READ_COUNTER 9u
#define EP_GIN_LOOK_SIGNAL 10u   /* into `found`, through the address that the facade gives: 31 bits */
#define EP_GIN_LOOK_COUNTER 11u
#define EP_GIN_RESET_SIGNAL 12u
#define EP_GIN_RESET_COUNTER 13u

/* ep_gin_step.flags */
#define EP_GIN_AGGREGATE 1u /* the doorbell may be left to a later step */
#define EP_GIN_COUNTED 2u   /* of a put: `counter` ticks when its source may be reused */
#define EP_GIN_ENDED 4u     /* by the kernel: this step has been carried out */

typedef struct ep_gin_step {
  uint32_t op;
  int32_t peer;
  uint64_t to;
  uint64_t from;
  uint64_t bytes;
  uint64_t value;
  uint64_t found;   /* by the kernel */
  uint32_t signal;
  uint32_t add;     /* of what is put, got or signalled: arrivals at `signal`; 0: none */
  uint32_t counter;
  uint32_t flags;   /* EP_GIN_* */
} ep_gin_step;
EP_STATIC_ASSERT(sizeof(ep_gin_step) == 64, "one cache line");

#endif
