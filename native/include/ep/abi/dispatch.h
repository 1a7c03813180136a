/* Arguments of the attention dispatch kernels: host code packs them from a plan, kernels read them. Offsets and lengths in rows (tokens)
 * unless a name says bytes. */
#ifndef EP_ABI_DISPATCH_H
#define EP_ABI_DISPATCH_H

#include "memory.h"

/* One shard on its way to one destination. */
typedef struct ep_dispatch_entry {
  uint64_t src_row; /* in the sender's tensor */
  uint64_t dst_row; /* in the receiver's tensor */
  uint64_t rows;
  int32_t dst_rank;
  uint32_t first_chunk; /* chunks of the entries before this one in the same part */
} ep_dispatch_entry;
EP_STATIC_ASSERT(sizeof(ep_dispatch_entry) == 32, "indexed by the kernel");

/* One tensor of a dispatch: the query, the key or the value. */
typedef struct ep_dispatch_part {
  uint64_t src;              /* address of row 0 */
  uint64_t src_stride_bytes; /* between rows */
  uint64_t row_bytes;
  uint64_t dst_offset_bytes; /* of row 0 of the receive tensor in every rank's memory */
  uint64_t entries;          /* address of ep_dispatch_entry[entry_count] */
  uint32_t entry_count;
  uint32_t chunk_rows;  /* rows of one put; max(1, chunk bytes / row bytes) */
  uint32_t chunk_count; /* of all entries */
  uint32_t reserved;
} ep_dispatch_part;
EP_STATIC_ASSERT(sizeof(ep_dispatch_part) == 56, "an array of parts follows ep_dispatch_args.parts");

/* How a kernel ended. Written once by whoever fails first. */
typedef struct ep_kernel_status {
  uint32_t status; /* EP_STATUS_* */
  int32_t rank;    /* who was awaited */
  uint32_t stage;  /* EP_STAGE_* */
  uint32_t reserved;
  uint64_t expected;
  uint64_t found;
} ep_kernel_status;
EP_STATIC_ASSERT(sizeof(ep_kernel_status) == 32, "read by the host after the kernel");

#define EP_STAGE_CREDIT 1u     /* waiting for the receiver to release its tensor */
#define EP_STAGE_ARRIVAL 2u    /* waiting for the sender's chunks */
#define EP_STAGE_ROOM 3u       /* waiting for room in a queue: of requests to this rank's own engine (the rank awaited is this one), or of WQEs to a peer */
#define EP_STAGE_TURN 4u       /* waiting for those who took earlier places in a send queue to publish them */
#define EP_STAGE_COMPLETION 5u /* waiting for a NIC to complete what was posted */
#define EP_STAGE_NIC 6u        /* a queue pair is broken: `expected` is the remote address of the WQE that failed, `found` holds EP_NIC_FOUND_*; `found` 0: this rank's own NIC reaches nobody */
#define EP_STAGE_SOURCE 7u     /* no registered range holds all of a put's source: `expected` is its address, `found` its bytes */
#define EP_STAGE_SHARING 8u    /* `found` blocks were launched over `expected` queue pairs to each peer that blocks may not share */
#define EP_STAGE_COUNT 9u      /* MoE: waiting for a source's counts; with EP_STATUS_INVALID: `found` rows were to go to one expert, `expected` is the most */
#define EP_STAGE_PLACE 11u     /* MoE: waiting for where rows go; with EP_STATUS_CAPACITY: `found` rows were to go to `rank`, `expected` is the most */
#define EP_STAGE_RESULT 10u    /* MoE: waiting for the results that a rank of experts owes */
#define EP_STAGE_RANGE 12u     /* an argument is out of its range: `found` where less than or as much as `expected` was allowed */

/* ep_kernel_status.found at EP_STAGE_NIC: shifts of the syndrome and the vendor's syndrome (8 bits each; 0: a poster gave up), of the WQE's index (16) and of the
 * queue pair's number (24). */
#define EP_NIC_FOUND_SYNDROME 0
#define EP_NIC_FOUND_VENDOR 8
#define EP_NIC_FOUND_INDEX 16
#define EP_NIC_FOUND_QPN 32

#define EP_DISPATCH_NON_TEMPORAL 1u /* rows go past the caches */

typedef struct ep_dispatch_args {
  ep_handle_header header; /* EP_MAGIC_DISPATCH */
  ep_memory_handle memory;
  uint64_t parts; /* address of ep_dispatch_part[part_count] */
  uint32_t part_count;
  uint32_t flags;        /* EP_DISPATCH_* */
  uint64_t arrival_slot; /* slot of rank 0's arrival counter; + source rank */
  uint64_t credit_slot;  /* slot of rank 0's credit counter; + destination rank */
  uint64_t arrivals;     /* address of uint64_t[world_size]: counter value to wait for per source; 0 = nothing awaited */
  uint64_t credits;      /* address of uint64_t[world_size]: counter value needed before the first write per destination; 0 = free */
  uint64_t status;       /* address of ep_kernel_status */
} ep_dispatch_args;
EP_STATIC_ASSERT(sizeof(ep_dispatch_args) == 136, "handed to kernels by value");

/* The element types that the reduction understands. */
#define EP_DTYPE_F32 1u
#define EP_DTYPE_F16 2u
#define EP_DTYPE_BF16 3u

/* Sums the replicas of each home shard in fp32, replica 0 first, and rounds once. Rows of shards without a replica become zero. */
typedef struct ep_replica_sum_args {
  uint64_t src;              /* compact receive tensor */
  uint64_t dst;              /* home tensor */
  uint64_t dst_stride_bytes; /* between rows */
  uint64_t row_elements;
  uint64_t shard_row;     /* address of uint64_t[shard_count]: first home row of a shard */
  uint64_t shard_rows;    /* address of uint64_t[shard_count] */
  uint64_t replica_begin; /* address of uint64_t[shard_count + 1]: CSR into replica_row */
  uint64_t replica_row;   /* address of uint64_t[]: first row of the replica in src */
  uint64_t shard_count;
  uint32_t dtype; /* EP_DTYPE_* */
  uint32_t reserved;
} ep_replica_sum_args;
EP_STATIC_ASSERT(sizeof(ep_replica_sum_args) == 80, "handed to kernels by value");

#endif
