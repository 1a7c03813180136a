/* EFA queue pairs as kernels see them. The control path fills these structs in, then kernels own the words that are called counters. Unlike the pull
 * request's (efa_pr.h), each begins with a magic and an ABI version, and one object keeps the account of a queue pair for all who use it. */
#ifndef EP_ABI_EFA_GDA_H
#define EP_ABI_EFA_GDA_H

#include "efa_wqe.h"
#include "ibgda.h"

/* Who may post to one queue pair at a time. A mode that is narrower than the use loses WQEs. */
#define EP_EFA_SHARE_DEVICE 0u /* any lane of any block of any launch on one machine */
#define EP_EFA_SHARE_BLOCK 1u  /* the lanes of one block */
#define EP_EFA_SHARE_THREAD 2u /* one lane, or lanes that their caller has put in an order */

#define EP_EFA_MAX_DEPTH 32768 /* of a send queue: half the range of a request id of 16 bits */

/* ep_efa_qp.flags */
#define EP_EFA_QP_WIDE_ID 1u /* request ids have 64 bits, otherwise 16 */

/* ep_efa_qp.broken */
#define EP_EFA_SOUND 0u
#define EP_EFA_BREAKING 1u /* whoever found the failure writes the record */
#define EP_EFA_BROKEN 2u   /* the record is complete; nothing can be posted until the queue pair has been made anew */

/* Whom a WQE is for. Address handles belong to the poster's endpoint, so every queue pair has its own table. */
typedef struct ep_efa_target {
  uint16_t ah;
  uint16_t qpn;
  uint32_t qkey;
} ep_efa_target;
EP_STATIC_ASSERT(sizeof(ep_efa_target) == 8, "one load");

/* What a WQE was for. A send queue cannot be read back, so this is what an error says of it. */
typedef struct ep_efa_request {
  uint64_t remote_address;
  int32_t peer;
  uint32_t slot; /* of the targets */
} ep_efa_request;
EP_STATIC_ASSERT(sizeof(ep_efa_request) == 16, "one store of a vector");

/* A queue pair with its send queue, its completions, and the account that everyone who posts to it shares. Numbers of WQEs run from 0 and never wrap;
 * the NIC sees 16 bits of them in a doorbell and 31 in its counts. A poster takes numbers (`taken`), waits for room (`prefix`) and for the batch (`rung`),
 * writes WQEs, releases them itself, waits for its turn (`ready`), and rings or leaves that to a later one, or to a flush; or it marks them as written (`marks`), out of
 * turn, and rings, or leaves that, for all that are. All posters of a queue pair do the same: on the host the former, on a GPU the latter.
 * HAZARD: a doorbell never goes back. With the turn and all below it rung, nobody else has anything to ring; otherwise `ringer` is to be held.
 * Room is a place whose own WQE has completed, not a number of completions: so request ids of 16 bits name one WQE, and a value that waits in `values` is
 * not overwritten before the NIC has read it, in whatever order completions come.
 * HAZARD: a number that was taken must be published, or whoever took later ones waits for ever. A poster that gives up breaks the queue pair instead. */
typedef struct ep_efa_qp {
  ep_handle_header header; /* EP_MAGIC_EFA_QP */
  uint64_t sq;             /* address of WQE[depth], write-only, write-combined */
  uint64_t doorbell;       /* address of 4 bytes */
  uint64_t cq;             /* address of completions[cq_depth] */
  uint64_t written;        /* address of the NIC's count of completed writes */
  uint64_t failed;         /* address of the NIC's count of failed requests */
  uint64_t finished;       /* address of uint64_t[(depth + 63) / 64]: a bit for each slot whose completion came before an earlier one's */

  uint64_t targets;        /* address of ep_efa_target[target_slots * world_size]: slot 0 is a rank's data queue pair, 1 + s that of its signal s */
  uint64_t values;         /* address of uint64_t[depth], registered, for values that travel from memory; 0: they travel inline */
  uint64_t nic_wake;       /* address of the ep_wake_word of a software NIC that may sleep; 0: a doorbell is enough */
  uint32_t values_lkey;
  uint32_t target_slots;
  uint32_t depth;          /* power of two, at most EP_EFA_MAX_DEPTH */
  uint32_t wqe_bytes;      /* 64 or 128 */
  uint32_t max_batch;      /* WQEs that may be written and not rung */
  uint32_t cq_depth;       /* power of two, at least `depth`: then it cannot overrun */
  uint32_t cq_entry_bytes;
  uint32_t qpn;
  uint32_t index;          /* in ep_efa_device.qps */
  uint32_t flags;          /* EP_EFA_QP_* */

  uint64_t taken;          /* counter: numbers handed out */
  uint8_t pad0[56];
  uint64_t ready;          /* counter: WQEs that are written, as are all before them; whose turn it is */
  uint8_t pad1[56];
  uint64_t rung;           /* counter: WQEs that the last doorbell told of; belongs to whoever may ring */
  uint64_t ringer;         /* 1: somebody rings what was left unrung */
  uint64_t left;           /* of posters out of turn: 1 and the number whose poster rings, when it has written, what a ringer has left in front of it; 0: none yet */
  uint8_t pad2[40];
  uint64_t poller;         /* 1: somebody takes completions out of the CQ */
  uint64_t polled;         /* counter: completions taken out, in whatever order they came; belongs to the poller */
  uint64_t prefix;         /* counter: WQEs that have completed as have all before them: what room and a flush wait for */
  uint8_t pad3[40];

  uint64_t broken;         /* EP_EFA_SOUND, _BREAKING, _BROKEN; what follows is complete when it is _BROKEN */
  uint32_t status;         /* EP_STATUS_* */
  uint32_t efa_status;     /* EP_EFA_STATUS_* of the completion; 0: none, the poster gave up waiting */
  uint64_t wqe;            /* number of the WQE that failed */
  uint64_t remote_address; /* that it named */
  int32_t peer;            /* rank that it was for */
  uint32_t slot;           /* of `targets` */
  uint64_t requests;       /* address of ep_efa_request[depth] */
  uint64_t marks;          /* address of uint64_t[(depth + 63) / 64]: a bit for each slot, 0 before the first post: its last round that is written; of posters out of turn */
  uint8_t pad4[8];
} ep_efa_qp;
EP_STATIC_ASSERT(sizeof(ep_efa_qp) == 448, "every group of counters has its cache line");

/* A signal (how many writes have arrived at a queue pair) or a counter (how many of its own have completed). Its value is `widened - offset`. */
typedef struct ep_efa_count {
  uint64_t count;   /* address of the NIC's count, EP_EFA_COUNTER_MASK of which mean something */
  uint64_t failed;  /* address of the NIC's count of failures beside it */
  uint64_t widened; /* counter: the NIC's count, as if it had 64 bits, when it was last read */
  uint64_t offset;  /* counter: `widened` at the last reset */
  uint32_t qp;      /* in ep_efa_device.qps */
  uint32_t reserved;
  uint8_t pad[24];
} ep_efa_count;
EP_STATIC_ASSERT(sizeof(ep_efa_count) == 64, "one cache line");

/* Where a rank's part of one symmetric memory lies. */
typedef struct ep_efa_remote {
  uint64_t address; /* in the rank's address space */
  uint32_t rkey;
  uint32_t reserved;
} ep_efa_remote;
EP_STATIC_ASSERT(sizeof(ep_efa_remote) == 16, "indexed by rank");

/* One context: a data queue pair, and one for each signal or counter. Counter c posts on queue pair 1 + c, signal s arrives at the peer's queue pair
 * 1 + s: the two ids are independent of each other. */
typedef struct ep_efa_device {
  ep_handle_header header; /* EP_MAGIC_EFA */
  int32_t rank;
  int32_t world_size;
  uint64_t qps;            /* address of ep_efa_qp[qp_count]; 0 is the data queue pair */
  uint64_t signals;        /* address of ep_efa_count[signal_count] */
  uint64_t counters;       /* address of ep_efa_count[counter_count] */
  uint32_t qp_count;
  uint32_t signal_count;
  uint32_t counter_count;
  uint32_t sharing;        /* EP_EFA_SHARE_* */

  uint64_t max_message;    /* bytes of one write or read */
  uint64_t scratch;        /* address of 8 bytes, registered: source of requests without bytes */
  uint64_t scratch_remotes; /* address of ep_efa_remote[world_size]: their target */
  uint32_t scratch_lkey;
  uint32_t context;        /* index of this context */
  uint64_t broken;         /* 1 + index of the queue pair that broke first; 0: none */
  uint64_t ranges;         /* address of ep_ibgda_range_table of what is registered; replaced as a whole, with release */
  uint8_t pad[16];
} ep_efa_device;
EP_STATIC_ASSERT(sizeof(ep_efa_device) == 128, "two cache lines");

/* A symmetric memory: of the GIN facade, and what ep_memory_handle.proxy is the address of for EP_MEMORY_EFA. */
typedef struct ep_efa_memory {
  ep_handle_header header; /* EP_MAGIC_EFA_MEMORY */
  uint64_t device;         /* address of ep_efa_device */
  uint64_t remotes;        /* address of ep_efa_remote[world_size] */
  uint64_t address;        /* of this rank's part */
  uint64_t byte_length;    /* of each rank's part */
  uint64_t targets;        /* address of ep_efa_target[(1 + signal_slots) * world_size], 0 where only the facade uses it: slot 0 is a rank's data queue
                              pair, 1 + s the one whose arrivals are signal s of this memory */
  uint32_t lkey;
  uint32_t reserved;
} ep_efa_memory;
EP_STATIC_ASSERT(sizeof(ep_efa_memory) == 64, "one cache line");

#endif
