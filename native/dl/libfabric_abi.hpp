// The part of libfabric's interface that is used, by layout: what stands here is read or written at the offsets of the installed library. Layouts are those of 1.17 and up: later
// versions append. tests/dl/libfabric_abi_test.cpp compares them with the system's headers where these are installed. Source: fabric.h, fi_domain.h, fi_endpoint.h, fi_eq.h, fi_cm.h,
// fi_ext_efa.h of libfabric.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ep::dl::fabric {

struct fid;
struct fid_fabric;
struct fid_domain;
struct fid_av;
struct fid_cq;
struct fid_cntr;
struct fid_ep;
struct fid_mr;
using address = uint64_t; // fi_addr_t

constexpr uint32_t version_of(uint32_t major, uint32_t minor) { return major << 16 | minor; }
inline constexpr uint64_t cap_msg = 1ull << 1;
inline constexpr uint64_t cap_rma = 1ull << 2;
inline constexpr uint64_t cap_atomic = 1ull << 4;
inline constexpr uint64_t cap_hmem = 1ull << 47;
inline constexpr uint64_t right_read = 1ull << 8;
inline constexpr uint64_t right_write = 1ull << 9;
inline constexpr uint64_t right_recv = 1ull << 10;
inline constexpr uint64_t right_send = 1ull << 11;
inline constexpr uint64_t right_remote_read = 1ull << 12;
inline constexpr uint64_t right_remote_write = 1ull << 13;
inline constexpr uint64_t flag_mr_dmabuf = 1ull << 40; // HAZARD: what older libraries do with it is nobody's promise
inline constexpr uint32_t dmabuf_since = version_of(1, 20);
inline constexpr int mr_local = 1 << 2;
inline constexpr int mr_virtual_address = 1 << 4;
inline constexpr int mr_allocated = 1 << 5;
inline constexpr int mr_provider_key = 1 << 6;
inline constexpr int mr_hmem = 1 << 10;
inline constexpr uint32_t endpoint_rdm = 3;
inline constexpr uint32_t av_table = 2;
inline constexpr uint32_t cq_format_context = 1;
inline constexpr uint32_t memory_system = 0;
inline constexpr uint32_t memory_cuda = 1;
inline constexpr int command_get_wait = 5;
inline constexpr int command_enable = 6;
inline constexpr int error_no_data = 61;

struct ops_base {
  size_t size;
  int (*close)(fid*);
  int (*bind)(fid*, fid* to, uint64_t flags);
  int (*control)(fid*, int command, void* argument);
  int (*ops_open)(fid*, const char* name, uint64_t flags, void** ops, void* context);
};
struct fid {
  size_t kind;
  void* context;
  ops_base* ops;
};

struct device_attr {
  char* name;
};
struct fid_nic {
  fid base;
  device_attr* device;
};
struct fabric_attr {
  fid_fabric* fabric;
  char* name;
  char* provider;
};
struct domain_attr {
  fid_domain* domain;
  char* name;
  uint32_t threading;
  uint32_t control_progress;
  uint32_t data_progress;
  uint32_t resource_mgmt;
  uint32_t av_type;
  int mr_mode;
  size_t mr_key_size;
  size_t cq_data_size;
  size_t cq_count;
  size_t ep_count;
  size_t tx_context_count;
  size_t rx_context_count;
  size_t max_ep_tx_context;
  size_t max_ep_rx_context;
  size_t max_ep_stx_context;
  size_t max_ep_srx_context;
  size_t cntr_count;
};
struct endpoint_attr {
  uint32_t type;
  uint32_t protocol;
  uint32_t protocol_version;
  size_t max_message;
};
struct transmit_attr {
  uint64_t caps;
  uint64_t mode;
  uint64_t op_flags;
  uint64_t message_order;
  uint64_t completion_order;
  size_t inject_size;
  size_t size;
  size_t vector_limit;
  size_t place_limit; // of a write: rma_iov_limit
};
struct info {
  info* next;
  uint64_t caps;
  uint64_t mode;
  uint32_t address_format;
  size_t source_length;
  size_t target_length;
  void* source;
  void* target;
  fid* handle;
  transmit_attr* tx;
  void* rx;
  endpoint_attr* ep;
  domain_attr* domain;
  fabric_attr* fabric;
  fid_nic* nic;
};

struct ops_fabric {
  size_t size;
  int (*domain)(fid_fabric*, info*, fid_domain** made, void* context);
  void* passive_ep;
  void* eq_open;
  void* wait_open;
  int (*trywait)(fid_fabric*, fid** of, int count);
};
struct fid_fabric {
  fid base;
  ops_fabric* ops;
};

struct av_attr {
  uint32_t type;
  int rx_context_bits;
  size_t count;
  size_t endpoints_per_node;
  const char* name;
  void* map_address;
  uint64_t flags;
};
struct ops_av {
  size_t size;
  int (*insert)(fid_av*, const void* addresses, size_t count, address* made, uint64_t flags, void* context);
  void* insert_service;
  void* insert_symmetric;
  int (*remove)(fid_av*, address* of, size_t count, uint64_t flags);
};
struct fid_av {
  fid base;
  ops_av* ops;
};

struct cq_attr {
  size_t size;
  uint64_t flags;
  uint32_t format;
  uint32_t wait_object;
  int vector;
  uint32_t wait_condition;
  void* wait_set;
};
struct ops_cq; // libfabric_rdm_abi.hpp, like those of messages and RMA
struct fid_cq {
  fid base;
  ops_cq* ops;
};
struct cntr_attr {
  uint32_t events;
  uint32_t wait_object;
  void* wait_set;
  uint64_t flags;
};
struct fid_cntr {
  fid base;
};

struct mr_dmabuf {
  int fd;
  uint64_t offset;
  size_t length;
  void* base;
};
struct io_vector {
  void* base;
  size_t length;
};
struct mr_attr {
  union {
    const io_vector* vector;
    const mr_dmabuf* dmabuf;
  };
  size_t count;
  uint64_t rights;
  uint64_t offset;
  uint64_t requested_key;
  void* context;
  size_t auth_key_size;
  uint8_t* auth_key;
  uint32_t memory; // memory_system, memory_cuda
  uint64_t device;
  void* reserved[4]; // what later versions append is zero
};
struct fid_mr {
  fid base;
  void* descriptor;
  uint64_t key;
};
struct ops_mr {
  size_t size;
  void* reg;
  void* regv;
  int (*regattr)(fid*, const mr_attr* attributes, uint64_t flags, fid_mr** made);
};

struct ops_domain {
  size_t size;
  int (*av_open)(fid_domain*, av_attr*, fid_av** made, void* context);
  int (*cq_open)(fid_domain*, cq_attr*, fid_cq** made, void* context);
  int (*endpoint)(fid_domain*, info*, fid_ep** made, void* context);
};
struct fid_domain {
  fid base;
  ops_domain* ops;
  ops_mr* mr;
};

struct ops_cm {
  size_t size;
  void* set_name;
  int (*get_name)(fid*, void* address, size_t* length);
};
struct ops_msg;
struct ops_rma;
struct ops_atomic;
struct fid_ep {
  fid base;
  void* ops;
  ops_cm* cm;
  ops_msg* msg;
  ops_rma* rma;
  // HAZARD: an endpoint that was asked for without tagged messages or atomics may end before them.
  void* tagged;
  ops_atomic* atomic;
};

// fi_ext_efa.h: what GPU-posted requests need. `cntr_open_ext` is there since 2.5: HAZARD: an older library's table ends before it.
inline constexpr const char* gda_ops_name = "efa gda ops";
inline constexpr uint32_t gda_since = version_of(2, 5);

struct gda_wq_attr {
  uint8_t* buffer;
  uint32_t entry_size;
  uint32_t num_entries;
  uint32_t* doorbell;
  uint32_t max_batch;
  uint16_t caps;
};
inline constexpr uint16_t gda_wide_ids = 1;
struct gda_cq_attr {
  uint8_t* buffer;
  uint32_t entry_size;
  uint32_t num_entries;
};
struct gda_cq_init {
  uint64_t flags; // gda_cq_dmabuf
  struct {
    uint8_t* buffer;
    uint64_t length;
    uint64_t offset;
    uint32_t fd;
  } memory;
};
inline constexpr uint64_t gda_cq_dmabuf = 1;
struct gda_location {
  uint8_t* address;
  struct {
    uint64_t offset;
    int32_t fd;
    uint32_t reserved;
  } dmabuf;
  uint8_t type; // 0: address, 1: dmabuf
  uint8_t reserved[7];
};
struct gda_counter_init {
  uint64_t comp_mask;
  uint32_t flags; // gda_counter_*
  uint32_t reserved;
  gda_location completed;
  gda_location failed;
};
inline constexpr uint32_t gda_counter_completed = 1;
inline constexpr uint32_t gda_counter_failed = 2;
struct gda_ops {
  int (*query_addr)(fid_ep*, address, uint16_t* ahn, uint16_t* qpn, uint32_t* qkey);
  int (*query_qp_wqs)(fid_ep*, gda_wq_attr* sq, gda_wq_attr* rq);
  int (*query_cq)(fid_cq*, gda_cq_attr*);
  int (*cq_open_ext)(fid_domain*, cq_attr*, gda_cq_init*, fid_cq** made, void* context);
  uint64_t (*get_mr_lkey)(fid_mr*);
  int (*cntr_open_ext)(fid_domain*, cntr_attr*, fid_cntr** made, void* context, gda_counter_init*);
};

} // namespace ep::dl::fabric
