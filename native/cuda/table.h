/* What a build for GPUs offers to the addon, as one table of C functions: libep_cuda.so, opened by name where it is, so that nothing of CUDA is linked into the
 * addon. The host build of the same kernels (dl/shim/host_device.cpp) fills the table, too: tests run every layer above it without a GPU.
 *
 * Functions return a CUDA error number, 0 for success; `error_text` explains it. None waits for a kernel unless it says so. Addresses are of memory that kernels
 * reach; streams, events and graphs are opaque. All may be called from any thread. */
#ifndef EP_CUDA_TABLE_H
#define EP_CUDA_TABLE_H

#include "ep/abi/compat.h"
#include "ep/abi/core_attention.h"
#include "ep/abi/device_call.h"
#include "ep/abi/expert_layer.h"
#include "ep/abi/group.h"
#include "ep/abi/moe.h"

#define EP_CUDA_TABLE_VERSION 13u
#define EP_CUDA_TABLE_SYMBOL "ep_cuda_table_of"

#define EP_CUDA_IPC_BYTES 64u

typedef struct ep_cuda_facts {
  char name[256];
  char pci[32];       /* "0000:84:00.0" */
  char runs_on[32];   /* "cuda", or what else executes the kernels */
  uint64_t memory_bytes;
  uint64_t l2_bytes;
  int32_t compute_major;
  int32_t compute_minor;
  int32_t multiprocessors;
  int32_t clock_khz;          /* what a wait's cycles are counted in */
  int32_t driver_version;     /* 13000: 13.0 */
  int32_t runtime_version;
  int32_t cooperative;        /* grids whose blocks all run at once */
  int32_t ipc;                /* memory can be shared with other processes */
  int32_t dmabuf;
  int32_t host_atomics;       /* of host memory, by the GPU */
  int32_t copy_engines;
  int32_t exclusive;          /* compute mode: only one process at a time */
} ep_cuda_facts;

typedef struct ep_cuda_launch {
  void* stream;
  uint32_t blocks;
  uint32_t lanes;       /* of a block; whole warps of 32 */
  uint64_t wait_cycles; /* that one wait may take; 0: no limit */
  uint64_t cancel;      /* address of a uint32_t in pinned memory that ends all waits when not 0, or 0 */
  uint64_t lost;        /* address of one for each rank there: not 0, EP_STATUS_*, it ends the waits for that rank; or 0 */
} ep_cuda_launch;

/* One rank of a launch that several share: exactly one of the two calls; wait_cycles, cancel and lost as in ep_cuda_launch, of this rank. */
typedef struct ep_cuda_moe_rank {
  const ep_moe_buffer* buffer;
  const ep_moe_dispatch_args* dispatch;
  const ep_moe_combine_args* combine;
  uint64_t wait_cycles;
  uint64_t cancel;
  uint64_t lost;
} ep_cuda_moe_rank;

#define EP_CUDA_MOST_MOE_RANKS 8u /* of one launch: their calls are parameters of the kernel */

/* Bytes to copy, a multiple of 4 as both addresses are. */
typedef struct ep_cuda_piece {
  uint64_t to;
  uint64_t from;
  uint64_t bytes;
} ep_cuda_piece;

#define EP_CUDA_MOST_PIECES 64u

/* Of `resident`. */
#define EP_CUDA_KERNEL_DISPATCH 0u
#define EP_CUDA_KERNEL_COMPAT 1u
#define EP_CUDA_KERNEL_MOE 2u
#define EP_CUDA_KERNEL_GROUP 3u

typedef struct ep_cuda_table {
  uint32_t version;     /* EP_CUDA_TABLE_VERSION of the library; the reader refuses another */
  uint32_t byte_length; /* of this struct */
  uint16_t abi_major;
  uint16_t abi_minor;
  uint32_t reserved;

  const char* (*error_text)(int error);
  int (*device_count)(int* count);
  int (*device_facts)(int device, ep_cuda_facts* facts); /* makes no context: looking at a GPU must not take memory on it, nor fail where it is another's alone */

  int (*memory_allocate)(int device, uint64_t bytes, uint64_t* address); /* zeroed */
  int (*memory_free)(int device, uint64_t address);                      /* waits for the device */
  int (*memory_export)(int device, uint64_t address, uint8_t handle[EP_CUDA_IPC_BYTES]);
  int (*memory_import)(int device, const uint8_t handle[EP_CUDA_IPC_BYTES], uint64_t* address); /* in another process than the one that exported it */
  int (*memory_unmap)(int device, uint64_t address);
  /* Of an allocation of whomever: whether it lies on this device. `end`: first address behind it. */
  int (*memory_find)(int device, uint64_t address, uint64_t* end);
  int (*pinned_allocate)(int device, uint64_t bytes, uint64_t* address); /* zeroed; the same address for host and device */
  int (*pinned_free)(int device, uint64_t address);

  int (*stream_create)(int device, int high_priority, void** stream);
  int (*stream_destroy)(void* stream); /* waits for what runs */
  int (*stream_finish)(void* stream);  /* waits */
  int (*event_create)(int device, int timed, void** event);
  int (*event_destroy)(void* event);
  int (*event_record)(void* event, void* stream);
  int (*event_query)(void* event, int* reached);
  int (*event_elapsed)(void* from, void* to, float* milliseconds); /* between timed events that were reached */
  int (*stream_wait)(void* stream, void* event);
  int (*copy)(void* stream, uint64_t to, uint64_t from, uint64_t bytes); /* either may lie in pinned or ordinary host memory */
  int (*fill)(void* stream, uint64_t at, uint8_t value, uint64_t bytes);

  int (*capture_begin)(void* stream);
  int (*capture_end)(void* stream, void** graph); /* ready to launch */
  int (*graph_launch)(void* graph, void* stream);
  int (*graph_destroy)(void* graph);

  /* Blocks of so many lanes that can run at once on the whole device. */
  int (*resident)(int device, uint32_t kernel, uint32_t lanes, uint32_t* blocks);
  int (*begin_call)(const ep_cuda_launch* launch, const ep_call_counts* counts);
  int (*dispatch)(const ep_cuda_launch* launch, const ep_device_call* call);
  int (*grant)(const ep_cuda_launch* launch, const ep_device_grant* grant);
  int (*compat)(const ep_cuda_launch* launch, const ep_compat_args* args);
  /* Blocks and lanes are theirs to choose. Without a shard, or key-value rows for the second, nothing is launched. */
  int (*attention_forward)(const ep_cuda_launch* launch, const ep_attention_args* args);
  int (*attention_backward)(const ep_cuda_launch* launch, const ep_attention_args* args);
  int (*experts_forward)(const ep_cuda_launch* launch, const ep_expert_args* args); /* likewise, without tiles */
  /* `halves`: 1 send, 2 receive, 3 both. wait_cycles are those of all waits of a half together; the call's times (credits_by_ns, …) count from the kernel's begin. A
   * combine of the high-throughput form also releases its slot. */
  int (*moe_dispatch)(const ep_cuda_launch* launch, const ep_moe_buffer* buffer, const ep_moe_dispatch_args* args, uint32_t halves);
  int (*moe_combine)(const ep_cuda_launch* launch, const ep_moe_buffer* buffer, const ep_moe_combine_args* args, uint32_t halves);
  int (*moe_release)(const ep_cuda_launch* launch, const ep_moe_buffer* buffer, const ep_moe_call* call);
  int (*group_call)(const ep_cuda_launch* launch, const ep_group_args* args);

  /* For libraries of CUDA that a thread calls with a stream of ours: the device of the calling thread, and the stream as they take it. */
  int (*device_use)(int device);
  void* (*stream_handle)(void* stream);

  /* Whether kernels and copies of a device reach memory of another one. Makes no context. */
  int (*peer_access)(int device, int peer, int* reaches);

  /* The same call, low latency, of several ranks of this process that share a device, as one launch: `launch->blocks` blocks of each rank, and all of them must fit on the device at once: more is an error
   * of the launch. launch->stream must be behind all that each rank's own stream would be behind; its times and words are not looked at. Kernels that are launched one by one begin up to 5 us after each other, and
   * the first waits for the last. A rank that is not in this launch may make its part of the call by another, as long as all of these fit at once. What fails of one rank is in its own status. Refused
   * as invalid: no ranks, more than EP_CUDA_MOST_MOE_RANKS, a rank that comes twice, ranks of worlds of different sizes, another form, and calls of both kinds in one launch. */
  int (*moe_together)(const ep_cuda_launch* launch, const ep_cuda_moe_rank* ranks, uint32_t count, uint32_t halves);
  /* Small pieces by one kernel, in no order among them: each lies in memory of the device or in pinned memory. At most EP_CUDA_MOST_PIECES. */
  int (*copy_pieces)(void* stream, const ep_cuda_piece* pieces, uint32_t count);
} ep_cuda_table;

/* The one exported symbol. Null where the library cannot serve this version; never fails for want of a GPU. */
typedef const ep_cuda_table* (*ep_cuda_table_function)(uint32_t version);

#endif
