// Plain RC queue pairs as libibverbs has them; see verbs_abi.hpp. Of long structs only what is used has a name.
#pragma once

#include "verbs_abi.hpp"

namespace ep::dl::verbs {

struct cq;

struct qp {
  context* owner;
  void* qp_context;
  verbs::pd* pd;
  cq* send_cq;
  cq* recv_cq;
  void* srq;
  uint32_t handle;
  uint32_t qp_num;
};

struct qp_cap {
  uint32_t max_send_wr;
  uint32_t max_recv_wr;
  uint32_t max_send_sge;
  uint32_t max_recv_sge;
  uint32_t max_inline_data;
};
struct qp_init_attr {
  void* qp_context;
  cq* send_cq;
  cq* recv_cq;
  void* srq;
  qp_cap cap;
  uint32_t qp_type;
  int sq_sig_all;
};
static_assert(sizeof(qp_init_attr) == 64);
inline constexpr uint32_t qp_type_rc = 2;

struct qp_attr {
  uint32_t qp_state;
  uint32_t cur_qp_state;
  uint32_t path_mtu;
  uint32_t path_mig_state;
  uint32_t qkey;
  uint32_t rq_psn;
  uint32_t sq_psn;
  uint32_t dest_qp_num;
  unsigned qp_access_flags;
  qp_cap cap;
  verbs::ah_attr ah;
  verbs::ah_attr alternate_ah;
  uint16_t pkey_index;
  uint16_t alternate_pkey_index;
  uint8_t en_sqd_async_notify;
  uint8_t sq_draining;
  uint8_t max_rd_atomic;
  uint8_t max_dest_rd_atomic;
  uint8_t min_rnr_timer;
  uint8_t port_num;
  uint8_t timeout;
  uint8_t retry_cnt;
  uint8_t rnr_retry;
  uint8_t alternate_port_num;
  uint8_t alternate_timeout;
  uint32_t rate_limit;
};
static_assert(sizeof(qp_attr) == 144);
inline constexpr uint32_t qps_reset = 0;
inline constexpr uint32_t qps_init = 1;
inline constexpr uint32_t qps_rtr = 2;
inline constexpr uint32_t qps_rts = 3;
inline constexpr uint32_t qps_err = 6;
inline constexpr int attr_state = 1 << 0;
inline constexpr int attr_access = 1 << 3;
inline constexpr int attr_pkey_index = 1 << 4;
inline constexpr int attr_port = 1 << 5;
inline constexpr int attr_av = 1 << 7;
inline constexpr int attr_path_mtu = 1 << 8;
inline constexpr int attr_timeout = 1 << 9;
inline constexpr int attr_retry_cnt = 1 << 10;
inline constexpr int attr_rnr_retry = 1 << 11;
inline constexpr int attr_rq_psn = 1 << 12;
inline constexpr int attr_max_rd_atomic = 1 << 13;
inline constexpr int attr_min_rnr_timer = 1 << 15;
inline constexpr int attr_sq_psn = 1 << 16;
inline constexpr int attr_max_dest_rd_atomic = 1 << 17;
inline constexpr int attr_dest_qpn = 1 << 20;

struct sge {
  uint64_t addr;
  uint32_t length;
  uint32_t lkey;
};

struct send_wr {
  uint64_t wr_id;
  send_wr* next;
  sge* sg_list;
  int num_sge;
  uint32_t opcode;
  unsigned send_flags;
  uint32_t imm_data; // network order
  union {
    struct {
      uint64_t remote_addr;
      uint32_t rkey;
    } rdma;
    struct {
      uint64_t remote_addr;
      uint64_t compare_add;
      uint64_t swap;
      uint32_t rkey;
    } atomic;
  } wr;
  uint64_t rest[7]; // of other kinds of queue pairs and requests
};
static_assert(sizeof(send_wr) == 128);
inline constexpr uint32_t wr_write = 0;
inline constexpr uint32_t wr_write_imm = 1;
inline constexpr uint32_t wr_read = 4;
inline constexpr uint32_t wr_compare_swap = 5;
inline constexpr uint32_t wr_fetch_add = 6;
inline constexpr unsigned send_fence = 1;
inline constexpr unsigned send_signaled = 2;
inline constexpr unsigned send_solicited = 4;
inline constexpr unsigned send_inline = 8;

struct wc {
  uint64_t wr_id;
  uint32_t status;
  uint32_t opcode;
  uint32_t vendor_err;
  uint32_t byte_len;
  uint32_t imm_data;
  uint32_t qp_num;
  uint32_t src_qp;
  unsigned wc_flags;
  uint16_t pkey_index;
  uint16_t slid;
  uint8_t sl;
  uint8_t dlid_path_bits;
};
static_assert(sizeof(wc) == 48);

} // namespace ep::dl::verbs
