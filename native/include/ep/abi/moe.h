/* A buffer for experts and one call of it, as the MoE kernels see them (docs/moe.md has the rules that they are held to). Plain data: host code fills it in,
 * kernels read it. A field that says "address" holds one; arrays of this rank unless a name says otherwise. 0 where a mode or a payload has no use for it.
 *
 * Ranks make the same calls in the same order. A call takes one of `calls` slots, and every part of the buffer exists once for each slot. Two calls of one slot are
 * told apart by the call's epoch, which is alike on all ranks and grows from one call of a slot to the next. */
#ifndef EP_ABI_MOE_H
#define EP_ABI_MOE_H

#include "memory.h"

#define EP_MOE_MAX_CALLS 4u
#define EP_MOE_ROW_ALIGNMENT 16u
#define EP_MOE_SCALED_CHANNELS 128u

/* ep_handle_header.kind of an ep_moe_buffer. */
#define EP_MOE_LOW_LATENCY 1u
#define EP_MOE_HIGH_THROUGHPUT 2u

/* How the channels of a token travel. The first three are also the types of tensors, with the numbers of EP_DTYPE_*. */
#define EP_MOE_F32 1u
#define EP_MOE_F16 2u
#define EP_MOE_BF16 3u
#define EP_MOE_F8_F32 4u      /* e4m3 codes, then one f32 scale for each 128 channels */
#define EP_MOE_F8_F32_POW2 5u /* the same, scales rounded up to a power of two */
#define EP_MOE_F8_UE8M0 6u    /* e4m3 codes, then one byte for each 128 channels: the exponent of such a scale */
#define EP_MOE_LOGFMT10 7u

/* A component of the buffer (bufferSizes in @ep/plan/moe): that of slot q begins at offset + q * stride, in bytes from the start of a rank's part. */
typedef struct ep_moe_part {
  uint64_t offset;
  uint64_t stride;
} ep_moe_part;
EP_STATIC_ASSERT(sizeof(ep_moe_part) == 16, "handed to kernels by value");

/* Where a dispatched row came from. */
typedef struct ep_moe_header {
  int32_t rank;
  uint32_t token;
  uint32_t choice; /* 0 .. top_k - 1 */
  uint32_t reserved;
} ep_moe_header;
EP_STATIC_ASSERT(sizeof(ep_moe_header) == 16, "travels");

/* A count word: the epoch of the call, in which bank its writer takes results, and how many rows it sends. Low latency: or that it takes none, and sends none therefore. */
#define EP_MOE_COUNT_EPOCH_SHIFT 32
#define EP_MOE_COUNT_BANK_SHIFT 31
#define EP_MOE_COUNT_REFUSES 0x40000000u
#define EP_MOE_COUNT_ROWS 0x3fffffffu

/* Places for the results of a slot's calls. Results of a rank that was given up alive may come as long as it lives: later calls of the slot take the other bank. */
#define EP_MOE_BANKS 2u

/* Signal slots, from ep_moe_buffer.first_signal: slot q of the calls, kind k, rank r at ((q * EP_MOE_SIGNAL_KINDS) + k) * world_size + r.
 * Where endpoints can store, a word holds the epoch of the last call for which the thing was said; otherwise it is a running count (ep_moe_peer). */
#define EP_MOE_SIGNAL_COUNTED 0u  /* by source r: its count words are here */
#define EP_MOE_SIGNAL_ARRIVED 1u  /* by source r: puts of rows and headers, counted; high throughput: or that there are none, or that a rank is full */
#define EP_MOE_SIGNAL_RETURNED 2u /* by the rank r of experts: its results are here (where counted: puts). Low latency: or that there are none, or that the call is refused */
#define EP_MOE_SIGNAL_CREDIT 3u   /* by destination r: its part of this slot may be written again */
#define EP_MOE_SIGNAL_PLACED 4u   /* high throughput, by destination r: its answer to the counts is here. Low latency on GPUs, of this rank itself: that one block has placed runs for all (moe_pull.h); of another, that one block has told it of results that stay here */
#define EP_MOE_SIGNAL_KINDS 5u

/* Which replica is where, and which of them this rank takes. Replicas are numbered rank-major. */
typedef struct ep_moe_experts {
  uint64_t replica_rank;    /* address of int32_t[replicas] */
  uint64_t replica_expert;  /* address of int32_t[replicas] */
  uint64_t rank_begin;      /* address of uint32_t[world_size + 1]: rank r holds replicas rank_begin[r] .. rank_begin[r + 1] */
  uint64_t candidate_begin; /* address of uint32_t[experts + 1]: CSR into candidates */
  uint64_t candidates;      /* address of uint32_t[]: replicas that this rank's choices of an expert take in turn, beginning with number (rank mod how many) */
  uint32_t experts;
  uint32_t replicas;
  uint32_t most_local; /* replicas of the rank that has most: how many a slot of `received` and `counts` has room for */
  uint32_t reserved;
} ep_moe_experts;
EP_STATIC_ASSERT(sizeof(ep_moe_experts) == 56, "handed to kernels by value");

/* What a rank remembers of a peer between the calls of one slot: kernels read and write it; whoever lets ranks in anew sets it. All 0 at first. */
typedef struct ep_moe_peer {
  uint64_t counted;  /* the counters as they stand when all calls so far are complete (where endpoints can store: unused) */
  uint64_t arrived; /* of this rank, low latency on GPUs: blocks that have ended the half under way, and in the upper half how many of them were not well; 0 between halves */
  uint64_t returned;
  uint64_t placed;  /* of this rank, where one launch has the blocks of several: their barrier (moe_blocks.h) */
  uint64_t credited; /* value that the peer's credit must have before the next call may write there; of this rank, low latency on GPUs: epoch of the last call of which the send half did not fail */
  uint64_t owed[EP_MOE_BANKS]; /* not 0: a rank that was given up may still write results of an earlier call into the bank, until EP_MOE_SIGNAL_RETURNED shows this value or it is dead */
  uint64_t owed_rows; /* the same for rows of a high-throughput dispatch, and EP_MOE_SIGNAL_ARRIVED */
  uint32_t told;      /* epoch of the last call whose counts were sent there; of this rank: see EP_MOE_DEVICE_EPOCH */
  uint32_t bank;      /* where it takes its results of the call under way; of this rank: where it takes those of the next call */
} ep_moe_peer;
EP_STATIC_ASSERT(sizeof(ep_moe_peer) == 72, "indexed by slot * world_size + rank");

/* ep_moe_buffer.flags: results may be read where experts write them, in staged_results, which then has room although nothing is cast. Where all peers are stored to. */
#define EP_MOE_ZERO_COPY 1u
/* The same: words and rows to some rank may go by a link to another GPU, one behind the other. Of time alone. */
#define EP_MOE_LINKED 2u

typedef struct ep_moe_buffer {
  ep_handle_header header; /* EP_MAGIC_MOE; kind EP_MOE_LOW_LATENCY or EP_MOE_HIGH_THROUGHPUT */
  ep_memory_handle memory;
  ep_moe_experts experts;
  /* Low latency: the run of local expert e and source s begins at (e * world_size + s) * max_tokens * (16 + row_bytes) of its slot: max_tokens headers
   * (ep_moe_header), then max_tokens rows of row_bytes, in the order of the source's tokens. Where all peers are stored to, rows stay with their source, by token, in the rows of its own run of its first expert.
   * High throughput: the receive tensor itself: recv_rows rows of row_bytes; behind them as many headers. */
  ep_moe_part received;
  ep_moe_part returned; /* EP_MOE_BANKS times: row (token * top_k + choice), of result_row_bytes */
  ep_moe_part staged_tokens;
  ep_moe_part staged_results;
  ep_moe_part counts; /* uint64_t[world_size][most_local]: count words, by source and local expert: one put for each pair of ranks */
  ep_moe_part starts; /* high throughput: uint64_t[replicas]: (epoch << 32 | first row), written by the ranks that hold the replicas */
  ep_moe_part refusals; /* uint64_t[world_size]: by rank, of which call it says that it is refused, and whom for (moe_wait.h) */
  uint64_t first_signal;
  uint64_t peers; /* address of ep_moe_peer[calls * world_size] */
  uint32_t calls;
  uint32_t max_tokens;
  uint32_t top_k;
  uint32_t hidden;
  uint32_t payload;          /* EP_MOE_*, of dispatched rows */
  uint32_t result_payload;   /* EP_MOE_*, of returned rows */
  uint64_t payload_bytes;    /* of one token, as it travels */
  uint64_t row_bytes;        /* the same, rounded up to 16 */
  uint64_t result_bytes;     /* of one returned row, as it travels */
  uint64_t result_row_bytes; /* the same, rounded up to 16 */
  uint64_t recv_rows;        /* of the receive tensor */
  uint32_t alignment;        /* of blocks, in rows; 1 in low-latency form */
  uint32_t flags;            /* EP_MOE_ZERO_COPY, alike on all ranks; EP_MOE_LINKED */
} ep_moe_buffer;
EP_STATIC_ASSERT(sizeof(ep_moe_buffer) == 336, "handed to kernels by value");

/* ep_moe_call.ranks[r]: 0 for a rank that takes part; otherwise it does not, and rows to and from it are left out. Kernels set it to the EP_STATUS_* that ended a wait for
 * the rank: TIMEOUT, PEER_LOST. */
#define EP_MOE_RANK_MASKED UINT64_MAX /* known before the call */
/* Set by whoever launches kernels: PEER_LOST, found when a half had ended and its requests drained. What came from the rank is in that half's result; later halves leave it out. */
#define EP_MOE_RANK_LEAVES 0x100000004

/* What one dispatch leaves behind for its combine, or for the next dispatch with the same routing. Owned by whoever owns the handle. Where a NIC sends for the
 * kernel, send_words, send_headers and topk lie in registered memory. */
typedef struct ep_moe_routing {
  uint64_t topk;           /* address of const int32_t[tokens * top_k]: experts; negative for none */
  uint64_t choice_replica; /* address of int32_t[tokens * top_k]: replica that serves the choice; -1 for none. Written by dispatch */
  uint64_t choice_slot;    /* address of int32_t[tokens * top_k]: its place among those of this rank to that replica, in token order */
  uint64_t send_words;     /* address of uint64_t[replicas]: count words */
  uint64_t send_headers;   /* address of ep_moe_header[tokens * top_k]: by replica, then by slot; used where endpoints cannot store */
  uint64_t send_first;     /* address of uint32_t[replicas + 1]: first of a replica's headers, the same */
  uint64_t recv_count;     /* address of int32_t[local experts]: rows of each */
  uint64_t block_start;    /* address of uint32_t[local experts + 1]: first row of each in the receive tensor; high throughput: then the rows of the tensor */
  uint64_t layout_range;   /* address of uint64_t[local experts * world_size]: begin << 32 | count, rows of a source in its block */
  uint64_t src_token;      /* address of int32_t[recv_rows]: token of a received row at its source */
  uint64_t src_choice;     /* address of int32_t[recv_rows]. High throughput: both are -1 for padding and for rows of lost ranks */
  uint64_t send_start;     /* high throughput: address of uint32_t[replicas]: row at its rank where this rank's first row to the replica goes */
  uint32_t tokens;
  uint32_t reserved;
} ep_moe_routing;
EP_STATIC_ASSERT(sizeof(ep_moe_routing) == 104, "handed to kernels by value");

#define EP_MOE_NON_TEMPORAL 1u /* rows to other ranks go past the caches */
#define EP_MOE_RENORMALISE 2u  /* combine: scale what is left of a token's weights to their sum */
#define EP_MOE_CACHED 4u       /* high throughput: routing holds the counts and places of an earlier call, which are true for this one */
#define EP_MOE_OFFERED 16u     /* combine, of a buffer with EP_MOE_ZERO_COPY: y is the call's slot of staged_results, in rows of result_row_bytes, and is read there by the ranks that rows came from */
#define EP_MOE_DEVICE_EPOCH 32u /* `epoch` is none: a dispatch's is one more than that of the slot's last call, anything else's that of the dispatch. Kept where `told` of this rank itself is */
#define EP_MOE_NON_TEMPORAL_OUT 8u /* so do received rows to the receive tensor: they are far larger than the caches */

/* What every half has. */
typedef struct ep_moe_call {
  ep_handle_header header; /* EP_MAGIC_MOE_CALL */
  uint32_t slot;
  uint32_t epoch; /* 1 .. 2^32 - 1 */
  uint32_t flags; /* EP_MOE_* */
  uint32_t reserved;
  ep_moe_routing routing;
  uint64_t ranks;   /* address of uint64_t[world_size]: see EP_MOE_RANK_MASKED. The same array for both halves of a call */
  uint64_t wait_ns; /* address of uint64_t[world_size]: time spent in waiting for each rank is added; or 0 */
  uint64_t status;  /* address of ep_kernel_status: why a half returned false, which a lost or late rank is no reason for */
  /* On the clock of clock_ns(); 0 for no limit but the context's. A rank awaits credit, then counts, then (high throughput) answers, then rows: were all of them awaited to one
   * deadline, those who awaited the first from a dead rank that long would send the next too late, and be given up by all. Counts and answers: of high throughput. */
  uint64_t credits_by_ns;
  uint64_t counts_by_ns;
  uint64_t answers_by_ns;
} ep_moe_call;
EP_STATIC_ASSERT(sizeof(ep_moe_call) == 184, "handed to kernels by value");

/* Dispatch. Both halves read x: it stays unchanged until the receive half has ended. */
typedef struct ep_moe_dispatch_args {
  ep_moe_call call;
  uint64_t x; /* address of row 0: [tokens, hidden] of `dtype` */
  uint64_t x_stride_bytes;
  uint32_t dtype; /* EP_MOE_F32, F16, BF16. Another payload than this: rows are cast into staged_tokens, once each */
  uint32_t scale_group; /* blocks whose scales lie side by side: 1, or 4 where UE8M0 bytes are packed into words */
  uint64_t out; /* address of row 0 of the receive tensor: [recv_rows, hidden] of the payload's codes */
  uint64_t out_stride_bytes;
  uint64_t out_scales; /* address of the scale of (row 0, block 0); or 0 */
  /* In scales; that of (row, block) is number row * scale_row_stride + block / scale_group * scale_block_stride + block % scale_group. */
  uint64_t scale_row_stride;
  uint64_t scale_block_stride;
  uint64_t totals; /* address of uint64_t[local experts]: rows of every call so far, added to; or 0 */
} ep_moe_dispatch_args;
EP_STATIC_ASSERT(sizeof(ep_moe_dispatch_args) == 256, "handed to kernels by value");

/* Combine. */
typedef struct ep_moe_combine_args {
  ep_moe_call call;
  uint64_t y; /* address of row 0 of what experts made of the receive tensor: [recv_rows, hidden] of `dtype` */
  uint64_t y_stride_bytes;
  uint64_t weights; /* address of float[tokens * top_k]; or 0: rows are summed as they are */
  uint64_t bias[2]; /* addresses of [tokens, hidden] of `dtype`, packed; or 0 */
  uint64_t out;     /* address of row 0: [tokens, hidden] of `dtype` */
  uint64_t out_stride_bytes;
  uint32_t dtype; /* EP_MOE_F32, F16, BF16. Another result payload than this: rows are cast into staged_results */
  uint32_t reserved;
} ep_moe_combine_args;
EP_STATIC_ASSERT(sizeof(ep_moe_combine_args) == 248, "handed to kernels by value");

/* The kernels, templates in ep/device/moe_*.h, over a context and an endpoint; every block calls them with the same arguments. False: *status says why, and neither
 * the slot nor the outputs hold anything to rely on. Low latency where warps take rows (moe_pull_combine.h): blocks that end before the last do not know, and say true; *status does. A rank that is late or dead is no failure: it is in `ranks` afterwards.
 *   bool moe_dispatch_send(ctx, endpoint, buffer, args)       layout, rows, counts                             low latency
 *   bool moe_dispatch_receive(ctx, endpoint, buffer, args)    waits, packs rows, grants credit                 low latency
 *   bool moe_compact_send(ctx, endpoint, buffer, args)        layout, counts, places, rows                      high throughput
 *   bool moe_compact_receive(ctx, endpoint, buffer, args)     waits, zeroes what is empty                       high throughput; `out` is where `received` is
 *   bool moe_combine_send(ctx, endpoint, buffer, args)        results back to their tokens                     both modes
 *   bool moe_combine_receive(ctx, endpoint, buffer, args)     waits, sums in the order of choices              both modes
 *   bool moe_release(ctx, endpoint, buffer, call)             grants the credit of a slot                      (the receive half of low latency does it)
 *   bool moe_release_uncombined(ctx, endpoint, buffer, call)  counts results of a call that has no combine     low latency
 *   void moe_layout(ctx, buffer, call)                        choice_replica, choice_slot, send_words; ends without a grid barrier */

#endif
