/* What the plugin of the original pull request hands to its kernels, by offset: two repositories agree on it by comment only, with no magic and no
 * version. The compatibility mode takes and gives these. Addresses are 64-bit. */
#ifndef EP_ABI_EFA_PR_H
#define EP_ABI_EFA_PR_H

#include "version.h"

/* A send or a receive queue. */
typedef struct ep_efa_pr_wq {
  uint32_t max_sge;
  uint32_t max_wqes;
  uint32_t queue_mask;
  uint32_t queue_size_shift;
  uint32_t max_batch;
  uint32_t wqes_pending;
  uint32_t wqes_posted;
  uint32_t wqes_completed;
  uint32_t pc;   /* producer counter, moved by a doorbell */
  int32_t phase; /* at the start: 0 of a send queue, 1 of a receive queue */
  uint64_t buf;
  uint64_t db;
} ep_efa_pr_wq;
EP_STATIC_ASSERT(sizeof(ep_efa_pr_wq) == 56, "the pull request's");

typedef struct ep_efa_pr_sq {
  ep_efa_pr_wq wq;
  uint32_t max_inline_data;
  uint32_t max_rdma_sges;
} ep_efa_pr_sq;
EP_STATIC_ASSERT(sizeof(ep_efa_pr_sq) == 64, "the pull request's");

typedef struct ep_efa_pr_qp {
  uint64_t comp_mask; /* not 0: incompatible */
  ep_efa_pr_sq sq;
  ep_efa_pr_wq rq;
} ep_efa_pr_qp;
EP_STATIC_ASSERT(sizeof(ep_efa_pr_qp) == 128, "the pull request's");

typedef struct ep_efa_pr_cq {
  uint64_t comp_mask;
  uint32_t entry_size;
  uint32_t num_entries;
  uint32_t queue_mask;
  uint32_t queue_size_shift;
  uint32_t cc;   /* consumer counter */
  int32_t phase; /* at the start: 1 */
  uint64_t buf;
  uint64_t db;
} ep_efa_pr_cq;
EP_STATIC_ASSERT(sizeof(ep_efa_pr_cq) == 48, "the pull request's");

typedef struct ep_efa_pr_endpoint {
  uint64_t qp;              /* address of ep_efa_pr_qp */
  uint64_t cq;              /* address of ep_efa_pr_cq */
  uint64_t address_handles; /* address of uint16_t[nranks] */
  uint64_t remote_qpns;     /* address of uint16_t[nranks] */
  uint64_t qkey;            /* address of uint32_t[nranks] */
  uint32_t sq_lock;         /* 0: free, 1: held */
  uint32_t pad0;
  uint64_t local_cntr_value; /* address of the NIC's count of completed writes */
  uint64_t submitted_count;
  uint32_t sq_size;
  uint32_t pad1;
  uint64_t putvalue_slice_base; /* address of this endpoint's slots for values */
} ep_efa_pr_endpoint;
EP_STATIC_ASSERT(sizeof(ep_efa_pr_endpoint) == 80, "the pull request's");

/* Of a signal or a counter. */
typedef struct ep_efa_pr_counter {
  ep_efa_pr_endpoint base;
  uint64_t cntr_value; /* address of the NIC's count */
} ep_efa_pr_counter;
EP_STATIC_ASSERT(sizeof(ep_efa_pr_counter) == 88, "the pull request's");

typedef struct ep_efa_pr_device {
  ep_efa_pr_endpoint data;
  uint64_t counter_handles; /* address of addresses of ep_efa_pr_counter; 0 without counters */
  uint64_t signal_handles;  /* the same of signals */
  int32_t counter_count;
  int32_t signal_count;
  int32_t nranks;
  int32_t rank;
  uint32_t scratch_lkey;
  uint32_t pad0;
  uint64_t scratch_local_addr;
  uint64_t scratch_remote_addrs; /* address of uint64_t[nranks] */
  uint64_t scratch_remote_rkeys; /* address of uint32_t[nranks] */
  uint32_t putvalue_lkey;
  uint32_t putvalue_slot_size;
} ep_efa_pr_device;
EP_STATIC_ASSERT(sizeof(ep_efa_pr_device) == 152, "the pull request's");

typedef struct ep_efa_pr_mr_peer {
  uint64_t remote_addr;
  uint32_t rkey;
  uint32_t pad0;
} ep_efa_pr_mr_peer;
EP_STATIC_ASSERT(sizeof(ep_efa_pr_mr_peer) == 16, "the pull request's");

/* Followed by ep_efa_pr_mr_peer[nranks]. */
typedef struct ep_efa_pr_mr {
  uint32_t lkey;
  int32_t nranks;
  uint64_t local_addr;
} ep_efa_pr_mr;
EP_STATIC_ASSERT(sizeof(ep_efa_pr_mr) == 16, "peers follow");

#endif
