// What libibverbs and libmlx5 expect in memory, declared by us: their headers are not needed to build. Only what is used; layouts are those that rdma-core
// keeps stable (its symbol versions name them). tests/dl/verbs_abi_test.cpp compares with the system's headers where they are installed.
#pragma once

#include <cstddef>
#include <cstdint>

#include <pthread.h>
#include <sys/types.h>

namespace ep::dl::verbs {

struct device; // opaque: asked for by functions
struct context;

struct pd {
  context* owner;
  uint32_t handle;
};

struct mr {
  context* owner;
  verbs::pd* pd;
  void* addr;
  size_t length;
  uint32_t handle;
  uint32_t lkey;
  uint32_t rkey;
};

struct ah; // opaque

// Members in front of `cmd_fd` are calls of the provider; of them poll_cq and post_send have no symbol and are reached here.
struct send_wr;
struct wc;
struct cq;
struct qp;
struct context_ops {
  void* unused0[11];
  int (*poll_cq)(cq* from, int count, wc* out);
  void* unused1[13];
  int (*post_send)(qp* to, send_wr* wr, send_wr** bad);
  void* unused2[6];
};
static_assert(sizeof(context_ops) == 32 * sizeof(void*));

struct context {
  verbs::device* device;
  context_ops ops;
  int cmd_fd;
  int async_fd;
  int num_comp_vectors;
  pthread_mutex_t mutex;
  void* abi_compat;
};

struct port_attr {
  uint32_t state;
  uint32_t max_mtu;
  uint32_t active_mtu;
  int gid_tbl_len;
  uint32_t port_cap_flags;
  uint32_t max_msg_sz;
  uint32_t bad_pkey_cntr;
  uint32_t qkey_viol_cntr;
  uint16_t pkey_tbl_len;
  uint16_t lid;
  uint16_t sm_lid;
  uint8_t lmc;
  uint8_t max_vl_num;
  uint8_t sm_sl;
  uint8_t subnet_timeout;
  uint8_t init_type_reply;
  uint8_t active_width;
  uint8_t active_speed;
  uint8_t phys_state;
  uint8_t link_layer;
  uint8_t flags;
  uint16_t port_cap_flags2;
};
static_assert(sizeof(port_attr) == 52);

struct gid_entry {
  uint8_t gid[16];
  uint32_t gid_index;
  uint32_t port_num;
  uint32_t gid_type; // 0 InfiniBand, 1 RoCE v1, 2 RoCE v2
  uint32_t ndev_ifindex;
};
static_assert(sizeof(gid_entry) == 32);

struct ah_attr {
  struct {
    alignas(8) uint8_t dgid[16];
    uint32_t flow_label;
    uint8_t sgid_index;
    uint8_t hop_limit;
    uint8_t traffic_class;
  } grh;
  uint16_t dlid;
  uint8_t sl;
  uint8_t src_path_bits;
  uint8_t static_rate;
  uint8_t is_global;
  uint8_t port_num;
};
static_assert(sizeof(ah_attr) == 32);

struct async_event {
  union {
    void* object;
    int port_num;
  } element;
  uint32_t event_type;
};
static_assert(sizeof(async_event) == 16);

inline constexpr uint32_t event_device_fatal = 8;
inline constexpr uint32_t event_port_active = 9;
inline constexpr uint32_t event_port_err = 10;
inline constexpr uint32_t event_gid_change = 18;

// ---- mlx5dv

struct mlx5_context_attr {
  uint32_t flags; // 1: DevX
  uint64_t comp_mask;
};
inline constexpr uint32_t context_flags_devx = 1;

// The provider's address vector, of which the path is taken.
struct mlx5_av {
  uint64_t key;
  uint32_t dqp_dct;
  uint8_t stat_rate_sl;
  uint8_t fl_mlid;
  uint16_t rlid; // big endian
  uint8_t reserved0[4];
  uint8_t rmac[6];
  uint8_t tclass;
  uint8_t hop_limit;
  uint32_t grh_gid_fl;
  uint8_t rgid[16];
};
static_assert(sizeof(mlx5_av) == 48);

struct mlx5_ah_out {
  mlx5_av* av;
  uint64_t comp_mask;
};
struct mlx5_pd_out {
  uint32_t pdn;
  uint64_t comp_mask;
};
struct mlx5_obj {
  struct {
    void* in;
    void* out;
  } qp, cq, srq, rwq, dm, ah, pd;
};
static_assert(sizeof(mlx5_obj) == 14 * sizeof(void*));
inline constexpr uint64_t obj_ah = 1u << 5;
inline constexpr uint64_t obj_pd = 1u << 6;

struct devx_obj; // opaque

struct devx_umem {
  uint32_t umem_id;
};
struct devx_umem_in {
  void* addr;
  size_t size;
  uint32_t access;
  uint64_t pgsz_bitmap;
  uint64_t comp_mask; // 1: dmabuf_fd
  int dmabuf_fd;
};
inline constexpr uint64_t umem_mask_dmabuf = 1;

struct devx_uar {
  void* reg_addr;
  void* base_addr;
  uint32_t page_id;
  off_t mmap_off;
  uint64_t comp_mask;
};
inline constexpr uint32_t uar_blueflame = 0;
inline constexpr uint32_t uar_noncached = 1;

struct devx_event_channel {
  int fd;
};
inline constexpr int event_channel_omit_data = 1;
struct devx_event_header {
  uint64_t cookie;
};

} // namespace ep::dl::verbs
