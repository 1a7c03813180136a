/* Arguments of the core attention kernels (ep/device/core_attention.h): what one attention server computes between a dispatch and the way back. */
#ifndef EP_ABI_CORE_ATTENTION_H
#define EP_ABI_CORE_ATTENTION_H

#include "dispatch.h"

/* Rows of Q, and of K and V, that one block works on together. */
#define EP_ATTENTION_TILE 32u
#define EP_ATTENTION_MOST_HEAD_DIM 256u

/* A run of query rows and the run of key-value rows that they read: query t sees the first kv_length - q_length + t + 1 of them, none if that is not positive. Shards may
 * share key-value rows, never query rows. */
typedef struct ep_attention_shard {
  uint64_t q_row;
  uint64_t q_length;
  uint64_t kv_row;
  uint64_t kv_length;
  uint64_t first_tile; /* tiles of query rows of the shards before this one */
} ep_attention_shard;
EP_STATIC_ASSERT(sizeof(ep_attention_shard) == 40, "indexed by the kernel");

/* A row-strided tensor, [rows, heads * head_dim] of the call's dtype; `lse` is f32 [rows, heads]. */
typedef struct ep_attention_rows {
  uint64_t address; /* of row 0 */
  uint64_t stride_bytes;
} ep_attention_rows;
EP_STATIC_ASSERT(sizeof(ep_attention_rows) == 16, "handed to kernels by value");

typedef struct ep_attention_args {
  uint64_t shards; /* address of ep_attention_shard[shard_count] */
  uint64_t kv_rows;
  uint32_t shard_count;
  uint32_t dtype;    /* EP_DTYPE_F32 or EP_DTYPE_BF16 */
  uint32_t tiles;    /* of query rows, of all shards */
  uint32_t q_heads;  /* a multiple of kv_heads; query head h reads key-value head h / (q_heads / kv_heads) */
  uint32_t kv_heads;
  uint32_t head_dim; /* at most EP_ATTENTION_MOST_HEAD_DIM */
  uint32_t scale_bits; /* of an f32: what scores are multiplied by */
  uint32_t reserved;
  ep_attention_rows q;
  ep_attention_rows k;
  ep_attention_rows v;
  ep_attention_rows o;   /* written by the forward pass, read by the backward pass; so is lse */
  ep_attention_rows lse;
  ep_attention_rows d_o; /* from here on: of the backward pass */
  ep_attention_rows d_q;
  ep_attention_rows d_k;
  ep_attention_rows d_v;
} ep_attention_args;
EP_STATIC_ASSERT(sizeof(ep_attention_args) == 192, "handed to kernels by value");

#endif
