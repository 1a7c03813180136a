/* Arguments of the `compat` kernel (device/compat_dispatch.h): the per-token dispatch that ours is measured against. Its metadata has the
 * shapes and types of one rank's slice of the original's plan. Rows are packed. */
#ifndef EP_ABI_COMPAT_H
#define EP_ABI_COMPAT_H

#include "dispatch.h"

/* One tensor. Offsets are bytes into every rank's symmetric memory. */
typedef struct ep_compat_route {
  uint64_t src;             /* address of the tensor to send, ep_compat_args.tokens rows; 0: this tensor is not part of the call */
  uint64_t dst;             /* address of the output tensor */
  uint64_t row_bytes;       /* a multiple of 16 */
  uint64_t send_offset;     /* staging copy of src */
  uint64_t recv_offset;     /* where peers put rows */
  uint64_t signal_slot;     /* of rank 0's counter; + source rank */
  uint64_t dst_rank;        /* address of int32_t[num_seqs][replicas]; -1: none */
  uint64_t dst_offset;      /* address of uint32_t[num_seqs][replicas]: first row at the destination */
  uint64_t num_recv_tokens; /* address of uint64_t[world_size + 1]: rows from each rank, then all */
  uint32_t replicas;        /* C; 1 for the query */
  uint32_t reserved;
} ep_compat_route;
EP_STATIC_ASSERT(sizeof(ep_compat_route) == 80, "two of them lie in ep_compat_args");

typedef struct ep_compat_args {
  ep_memory_handle memory;
  ep_compat_route query;     /* or the key-value gradient, which travels on the query's buffers and counters */
  ep_compat_route key_value;
  uint64_t tokens;           /* rows of this rank */
  uint64_t seq_len;          /* address of uint32_t[num_seqs]; their sum is `tokens` */
  uint64_t recv_mask;        /* address of uint32_t[recv_seqs][recv_replicas]: replica exists; not 0: this is a key-value gradient */
  uint64_t recv_seq_len;     /* address of uint32_t[recv_seqs] */
  uint64_t recv_tokens;      /* of one replica: sum of recv_seq_len */
  uint32_t num_seqs;
  uint32_t recv_seqs;
  uint32_t recv_replicas;
  uint32_t reserved;
  uint64_t status;           /* address of ep_kernel_status */
} ep_compat_args;
EP_STATIC_ASSERT(sizeof(ep_compat_args) == 288, "handed to kernels by value");

#endif
