// What endpoints for messages, RMA and atomics need of libfabric besides libfabric_abi.hpp, by layout. Source: fi_endpoint.h, fi_rma.h, fi_atomic.h, fi_eq.h.
#pragma once

#include <sys/types.h>

#include "libfabric_abi.hpp"

namespace ep::dl::fabric {

// Layouts of 1.17 are what this build knows.
inline constexpr uint32_t rdm_since = version_of(1, 17);

inline constexpr uint64_t flag_remote_cq_data = 1ull << 17;
inline constexpr uint64_t flag_completion = 1ull << 24;
inline constexpr uint64_t flag_source = 1ull << 57;
inline constexpr uint64_t mode_context = 1ull << 59;
inline constexpr uint64_t mode_context2 = 1ull << 52;
inline constexpr uint64_t mode_receive_cq_data = 1ull << 56;
inline constexpr address address_unspecified = UINT64_MAX;
inline constexpr uint32_t threading_safe = 1;
inline constexpr uint32_t resources_managed = 2;
inline constexpr uint32_t cq_format_data = 3;
inline constexpr uint32_t wait_none = 0;
inline constexpr uint32_t wait_descriptor = 3;
inline constexpr int error_available = 259;

// What an operation's context points to: the provider's own while the operation is under way (FI_CONTEXT2).
struct context2 {
  void* internal[8];
};

struct cq_data_entry {
  void* context;
  uint64_t flags;
  size_t length;
  void* buffer;
  uint64_t data;
};
struct cq_error_entry {
  void* context;
  uint64_t flags;
  size_t length;
  void* buffer;
  uint64_t data;
  uint64_t tag;
  size_t overflow;
  int error;
  int provider_error;
  void* error_data;
  size_t error_data_size;
};
struct ops_cq {
  size_t size;
  ssize_t (*read)(fid_cq*, void* entries, size_t count);
  ssize_t (*readfrom)(fid_cq*, void* entries, size_t count, address* sources);
  ssize_t (*readerr)(fid_cq*, cq_error_entry*, uint64_t flags);
};

struct ops_msg {
  size_t size;
  ssize_t (*recv)(fid_ep*, void* buffer, size_t length, void* descriptor, address source, void* context);
  void* recvv;
  void* recvmsg;
  ssize_t (*send)(fid_ep*, const void* buffer, size_t length, void* descriptor, address target, void* context);
  void* sendv;
  void* sendmsg;
  ssize_t (*inject)(fid_ep*, const void* buffer, size_t length, address target);
};
struct rma_vector {
  uint64_t at;
  size_t length;
  uint64_t key;
};
struct rma_message {
  const io_vector* vectors;
  void** descriptors;
  size_t count;
  address target;
  const rma_vector* places;
  size_t place_count;
  void* context;
  uint64_t data;
};
struct ops_rma {
  size_t size;
  ssize_t (*read)(fid_ep*, void* buffer, size_t length, void* descriptor, address source, uint64_t at, uint64_t key, void* context);
  void* readv;
  void* readmsg;
  void* write;
  void* writev;
  ssize_t (*writemsg)(fid_ep*, const rma_message* message, uint64_t flags);
  void* inject;
  ssize_t (*writedata)(fid_ep*, const void* buffer, size_t length, void* descriptor, uint64_t data, address target, uint64_t at, uint64_t key, void* context);
};

// Of all types and operations, those that are used.
inline constexpr int type_u64 = 7;
inline constexpr int operation_sum = 2;
inline constexpr int operation_swap_if_equal = 12;
struct ops_atomic {
  size_t size;
  void* write;
  void* writev;
  void* writemsg;
  void* inject;
  ssize_t (*readwrite)(fid_ep*, const void* operand, size_t count, void* descriptor, void* result, void* result_descriptor, address target, uint64_t at, uint64_t key, int type,
                       int operation, void* context);
  void* readwritev;
  void* readwritemsg;
  ssize_t (*compwrite)(fid_ep*, const void* operand, size_t count, void* descriptor, const void* compare, void* compare_descriptor, void* result, void* result_descriptor,
                       address target, uint64_t at, uint64_t key, int type, int operation, void* context);
  void* compwritev;
  void* compwritemsg;
  void* writevalid;
  int (*readwritevalid)(fid_ep*, int type, int operation, size_t* count);
  int (*compwritevalid)(fid_ep*, int type, int operation, size_t* count);
};

} // namespace ep::dl::fabric
