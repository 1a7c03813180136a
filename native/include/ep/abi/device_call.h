/* Calls whose counts live where the kernels run: nothing of a call comes from the host but its launch, so that a CUDA graph can be replayed. */
#ifndef EP_ABI_DEVICE_CALL_H
#define EP_ABI_DEVICE_CALL_H

#include "dispatch.h"

/* Tensors of one dispatch, at most. */
#define EP_CALL_PARTS 8

/* The counts of one lease at one rank. Only kernels of one stream touch them, or the host while none runs. */
typedef struct ep_lease_counts {
  uint64_t uses; /* calls of this epoch that have used the lease */
  uint64_t arrived; /* address of uint64_t[world_size]: what has been awaited of each source so far, as a value of its counter */
  uint64_t granted; /* address of uint64_t[world_size]: values of the credit words when the epoch began */
} ep_lease_counts;
EP_STATIC_ASSERT(sizeof(ep_lease_counts) == 24, "an array, by lease");

/* What one call adds to a lease's counts, and what it waits for in turn. */
typedef struct ep_call_counts {
  uint64_t lease;    /* address of ep_lease_counts */
  uint64_t chunks;   /* address of uint64_t[world_size]: chunks that each source owes */
  uint64_t arrivals; /* address of uint64_t[world_size], written: ep_dispatch_args.arrivals of this call */
  uint64_t credits;  /* address of uint64_t[world_size], written: ep_dispatch_args.credits of this call */
  int32_t world_size;
  uint32_t reserved;
} ep_call_counts;
EP_STATIC_ASSERT(sizeof(ep_call_counts) == 40, "handed to kernels by value");

/* A dispatch with its parts by value: their sources change from call to call, and a copy of them to the device would be one more thing to wait for. */
typedef struct ep_device_call {
  ep_dispatch_args args; /* `parts` is not used */
  ep_dispatch_part parts[EP_CALL_PARTS];
  uint64_t sums; /* address of ep_replica_sum_args[sum_count] */
  uint32_t sum_count;
  uint32_t reserved;
} ep_device_call;
EP_STATIC_ASSERT(sizeof(ep_device_call) == 600, "handed to kernels by value");

/* Grants a lease to all who send to it: adds 1 to this rank's credit word at every rank. */
typedef struct ep_device_grant {
  ep_memory_handle memory;
  uint64_t credit_slot; /* of rank 0 */
} ep_device_grant;
EP_STATIC_ASSERT(sizeof(ep_device_grant) == 72, "handed to kernels by value");

#endif
