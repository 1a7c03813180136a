/* mlx5 queue pairs as kernels see them (device/mlx5_post.h, device/ibgda_endpoint.h). The control path fills these structs in, then kernels own the words
 * that are called counters. All of it lies where the posters of the queue pair read it: GPU memory, mapped host memory, or the process's own. */
#ifndef EP_ABI_IBGDA_H
#define EP_ABI_IBGDA_H

#include "memory.h"

/* Numbers of WQEs count WQEBBs of 64 bytes: almost every WQE that the post path writes is one. One of several takes as many numbers, and a NOP behind it
 * (device/mlx5_wqe.h says why). */
#define EP_IBGDA_WQE_BYTES 64
#define EP_IBGDA_MAX_DEPTH 32768 /* of a send queue: half the range of the 16-bit index that a CQE carries */
#define EP_IBGDA_MAX_INLINE 28   /* bytes that fit behind the control and the remote segment of one WQEBB */
#define EP_IBGDA_MAX_LONG_INLINE 220 /* of four */

/* Who may post to one queue pair at a time. A mode that is narrower than the use loses WQEs. */
#define EP_IBGDA_SHARE_DEVICE 0u /* any lane of any block of any launch on one machine */
#define EP_IBGDA_SHARE_BLOCK 1u  /* the lanes of one block; block b takes key b, so there are as many active_qps as blocks */
#define EP_IBGDA_SHARE_THREAD 2u /* one lane, or lanes that their caller has put in an order */

/* ep_ibgda_qp.flags */
#define EP_IBGDA_CQ_COLLAPSED 1u /* every CQE lands in entry 0, which needs no consumer index; otherwise the CQ is a ring */

/* ep_ibgda_qp.broken */
#define EP_IBGDA_SOUND 0u
#define EP_IBGDA_BREAKING 1u /* whoever found the failure writes the record */
#define EP_IBGDA_BROKEN 2u   /* the record is complete; nothing can be posted until the queue pair has been made anew */

/* One RC queue pair and its completion queue. Numbers of WQEs run from 0 and never wrap; the NIC sees their low 16 bits.
 * A poster takes numbers (`taken`), waits until the ring has room for them (`done`), writes WQEs, waits for its turn (`ready`) and publishes; or marks them as written
 * (`marks`), out of turn. All posters of a queue pair do the same.
 * HAZARD: a number that was taken must be published, or whoever took later ones waits for ever. A poster that gives up breaks the queue pair instead. */
typedef struct ep_ibgda_qp {
  ep_handle_header header; /* EP_MAGIC_IBGDA_QP */
  uint64_t sq;             /* address of WQEBB[depth] */
  uint64_t dbr;            /* address of the doorbell record: be32 receive counter, be32 send counter */
  uint64_t bf;             /* address of the doorbell register (UAR page + 0x800): two halves of 256 bytes */
  uint64_t cq;             /* address of CQE[cq_depth], 64 bytes each, filled with 0xff before the first post */
  uint64_t cq_dbr;         /* address of the CQ's doorbell record (be32, 24 bits); 0: nobody checks that the CQ has room */
  uint32_t qpn;
  uint32_t depth;          /* power of two, at most EP_IBGDA_MAX_DEPTH */

  uint32_t cq_depth;       /* power of two; 1 where collapsed, at least `depth` otherwise */
  uint32_t flags;          /* EP_IBGDA_CQ_* */
  int32_t peer;            /* rank at the other end */
  uint32_t index;          /* in ep_ibgda_device.qps */
  uint64_t response;       /* address of 8 bytes, registered: where atomics put old values that nobody reads */
  uint32_t response_lkey;
  uint32_t reserved0;
  uint64_t nic_wake;       /* address of the ep_wake_word of a software NIC that may sleep; 0: a doorbell is enough */
  uint64_t marks;          /* address of a bit for each of `depth` WQEBBs, 0 before the first post: its last round that is written; of posters out of turn */
  uint8_t pad0[16];

  uint64_t taken;          /* counter: numbers handed out */
  uint8_t pad1[56];
  uint64_t ready;          /* counter, of posters in turn: WQEs that are written, as are all before them; whose turn it is to publish */
  uint8_t pad2[56];
  uint64_t ringer;         /* of posters out of turn: twice the WQEs that the last doorbell told of, and 1 more while somebody rings, who will look at the marks again */
  uint8_t pad3[56];
  uint64_t done;           /* counter: WQEs known to have completed */
  uint64_t poller;         /* 1: somebody takes CQEs out of a CQ that is a ring, or looks at a collapsed one for all */
  uint64_t polled;         /* counter: CQEs taken out; belongs to the poller */
  uint8_t pad4[40];
  uint64_t lock;           /* of the spin-lock path, which is kept for comparison */
  uint64_t bf_offset;      /* 0 or 256: half of the register that it writes next; belongs to the lock's holder */
  uint8_t pad5[48];

  uint64_t broken;         /* EP_IBGDA_SOUND, _BREAKING, _BROKEN; what follows is complete when it is _BROKEN */
  uint32_t status;         /* EP_STATUS_* */
  uint32_t syndrome;       /* of the error CQE; 0: no CQE, the poster gave up waiting */
  uint32_t vendor_syndrome;
  uint32_t opcode;         /* of the WQE that failed */
  uint64_t wqe;            /* its number */
  uint64_t remote_address; /* that it named */
  uint32_t rkey;
  uint32_t reserved1;
  uint8_t pad6[16];
} ep_ibgda_qp;
EP_STATIC_ASSERT(sizeof(ep_ibgda_qp) == 512, "every group of counters has its cache line");

/* Registered memory of this process. */
typedef struct ep_ibgda_range {
  uint64_t begin; /* address */
  uint64_t end;   /* first address behind it */
  uint32_t lkey;
  uint32_t reserved;
} ep_ibgda_range;
EP_STATIC_ASSERT(sizeof(ep_ibgda_range) == 24, "searched by the kernel");

/* Followed by ep_ibgda_range[count], ascending and disjoint. Never changes once it is published: a registration makes a new table, and the old one is kept
 * while kernels may read it. */
typedef struct ep_ibgda_range_table {
  uint64_t count;
  uint64_t reserved;
} ep_ibgda_range_table;
EP_STATIC_ASSERT(sizeof(ep_ibgda_range_table) == 16, "ranges follow");

/* All queue pairs of a rank. There are some to the rank itself, too (loopback): its signals take them, because a NIC's atomics are not atomic against a
 * processor's. */
typedef struct ep_ibgda_device {
  ep_handle_header header; /* EP_MAGIC_IBGDA */
  int32_t rank;
  int32_t world_size;
  uint64_t qps;            /* address of ep_ibgda_qp[world_size * qps_per_peer]: those to rank 0 first */
  uint32_t qps_per_peer;
  uint32_t active_qps;     /* of them, used by keys: 1 to qps_per_peer */
  uint32_t sharing;        /* EP_IBGDA_SHARE_* */
  uint32_t reserved;
  uint64_t max_message;    /* bytes of one WRITE or READ, at most 2^30 */
  uint64_t ranges;         /* address of ep_ibgda_range_table; replaced as a whole, with release */
  uint64_t broken;         /* 1 + index of the queue pair that broke first; 0: none */
  uint8_t pad[56];
} ep_ibgda_device;
EP_STATIC_ASSERT(sizeof(ep_ibgda_device) == 128, "two cache lines");

/* Where a rank's part of one symmetric memory lies, as a NIC is told. */
typedef struct ep_ibgda_remote {
  uint64_t data;        /* in the address space of the rank's registration */
  uint64_t signals;
  uint32_t data_rkey;
  uint32_t signals_rkey;
} ep_ibgda_remote;
EP_STATIC_ASSERT(sizeof(ep_ibgda_remote) == 24, "indexed by rank");

/* What ep_memory_handle.proxy is the address of, for EP_MEMORY_IBGDA. */
typedef struct ep_ibgda_memory {
  ep_handle_header header; /* EP_MAGIC_IBGDA_MEMORY */
  uint64_t device;         /* address of ep_ibgda_device */
  uint64_t remotes;        /* address of ep_ibgda_remote[world_size] */
} ep_ibgda_memory;
EP_STATIC_ASSERT(sizeof(ep_ibgda_memory) == 32, "read once for each put");

#endif
