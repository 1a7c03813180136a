// All that the control path may ask of an EFA NIC, in our own types. `dl/efa_libfabric.cpp` fills the table from libfabric's operations for GPU-posted
// requests (FI_EFA_GDA_OPS of fi_efa(7)), `nic/efa` implements it in software. Whoever drives a NIC sees this file only.
//
// Failures. `failure.status` is EP_STATUS_SYSTEM unless a call says otherwise, and `failure.sys_errno` is part of the contract:
//   ENODEV      no device of that name, or it has gone
//   EPERM       the kernel refuses the device to this user; EACCES likewise
//   EINVAL      an argument outside of what the call documents
//   ENOMEM      memory could not be pinned, or a table of the NIC (endpoints, counters, address handles) is full
//   EFAULT      the address is not mapped, or the driver cannot pin that kind of memory
//   EOPNOTSUPP  this backing cannot do that (a library, a kernel module or a device that is too old): the caller may try another way
//   EBUSY       the object is still used by another one
// `failure.message` names the call, the device and the cause.
//
// Threads. Calls on different objects may run at once, also on one device; whoever destroys an object sees to it that nobody uses it. poll_async is for one
// thread at a time.
//
// Lifetime. What a call hands out is given back with its counterpart: endpoints before their completion queue and counters, all before the device. close()
// refuses (EBUSY) while any of them lives.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "status.hpp"

namespace ep::dl {

// ---- devices

struct efa_device_info {
  std::string name;        // "rdmap85s0"; what open() takes
  bool supported = false;  // open() can succeed: requests can be posted by kernels there
  std::string unsupported; // if not: why
};

// What a device can do. A number is 0 where the backing does not tell: then only trying shows.
struct efa_capabilities {
  uint32_t max_depth = 0;      // WQEs of 64 bytes in a send queue; half of it of 128 bytes
  uint32_t max_batch = 0;      // WQEs of 64 bytes that may be written and not rung; half of it of 128. 0: as many as the queue has
  uint32_t max_inline_write = 0; // bytes that a WRITE may carry within the request, in WQEs of 128 bytes; 0: none may
  uint32_t max_cq_depth = 0;
  uint32_t max_endpoints = 0;
  uint32_t max_counters = 0;   // that live at one time
  uint32_t max_addresses = 0;
  uint64_t max_message = 0;    // bytes of one WRITE or READ
  bool counters = false;       // the NIC can count completions in memory of the caller
  bool wide_ids = false;       // request ids have 64 bits
  bool read = false;           // RDMA READ
};

// ---- memory

// Bytes that the NIC shall reach: addresses of this process, or a part of a DMA-BUF.
struct efa_memory {
  uint64_t address = 0;     // of this process; with a DMA-BUF: the address by which requests name the first byte
  uint64_t byte_length = 0; // > 0
  int dmabuf_fd = -1;       // -1: `address` is what is pinned. The caller keeps the fd; it may be closed after the call
  uint64_t dmabuf_offset = 0;
};

// Rights. Local read is always given.
// HAZARD: there is no right for relaxed ordering on purpose: with it a counter could tick before the bytes are there.
inline constexpr uint32_t EFA_ACCESS_LOCAL_WRITE = 1u << 0;
inline constexpr uint32_t EFA_ACCESS_REMOTE_WRITE = 1u << 1;
inline constexpr uint32_t EFA_ACCESS_REMOTE_READ = 1u << 2;

// ---- objects. `handle` belongs to the backing; nullptr: no object.

struct efa_mr {
  void* handle = nullptr;
  uint32_t lkey = 0; // 24 bits
  uint32_t rkey = 0; // valid if a remote right was asked for
};

struct efa_cq_spec {
  uint32_t depth = 0;        // at least this; a power of two
  uint32_t entry_bytes = 16; // 8 or 16 are of sends; the backing may make them longer
  efa_memory ring;           // byte_length 0: the backing finds memory of this process. Otherwise a DMA-BUF (EOPNOTSUPP: it cannot)
};

struct efa_cq {
  void* handle = nullptr;
  uint64_t buffer = 0; // address, as posters read it: of this process, or what the caller named
  uint32_t depth = 0;  // power of two
  uint32_t entry_bytes = 0;
};

// A number that the NIC keeps in memory of the caller: how many completed, and beside it how many failed. 8 bytes each, both zeroed by the caller before.
// HAZARD: nobody else may write there as long as the counter lives (abi/efa_cqe.h).
struct efa_counter_spec {
  efa_memory completed;
  efa_memory failed;
};

struct efa_counter {
  void* handle = nullptr;
};

struct efa_endpoint_spec {
  uint32_t depth = 0;        // of the send queue, in WQEs; a power of two
  bool inline_write = false; // WQEs of 128 bytes, so that values travel within a request
  efa_cq cq;
  efa_counter written;       // its own WRITEs that completed; none: not counted
  efa_counter arrived;       // WRITEs of peers that landed whole at it
  efa_counter read;          // its own READs that completed
};

// The words that posters use: abi/efa_gda.h's ep_efa_qp is made from them.
struct efa_queue {
  uint64_t buffer = 0;   // address of WQE[depth] in this process: registers of the device, write-only and write-combining
  uint64_t doorbell = 0; // address of 4 bytes
  uint32_t depth = 0;    // power of two
  uint32_t wqe_bytes = 0; // 64 or 128
  uint32_t max_batch = 0; // WQEs of this size that may be written and not rung; at least 1
  bool wide_ids = false;
};

// How peers find an endpoint: opaque, 32 bytes at most.
struct efa_address {
  std::array<uint8_t, 32> bytes{};
  uint32_t length = 0;
};

struct efa_endpoint {
  void* handle = nullptr;
  uint32_t qpn = 0; // 16 bits
  efa_queue sq;
  efa_address address;
};

// A peer's endpoint as WQEs name it. HAZARD: a NIC carries out reads and writes of those only whom it has an address handle for, so both sides insert.
struct efa_peer {
  void* handle = nullptr;
  uint16_t ah = 0;
  uint16_t qpn = 0;
  uint32_t qkey = 0;
};

// ---- events

enum class efa_event_kind : uint8_t {
  device_fatal = 1, // nothing on this device works any more
  endpoint_error = 2,
  cq_error = 3,     // overrun: completions are lost
};

struct efa_event {
  efa_event_kind kind = efa_event_kind::device_fatal;
  uint32_t number = 0; // qpn of endpoint_error
  std::string text;
};

// ---- the table

// One opened device: a fabric domain and its address vector.
class efa_device {
 public:
  // Gives everything back that the backing still holds, without a word; close() is the one that tells.
  virtual ~efa_device() = default;
  virtual const std::string& name() const = 0;
  // Refuses (EBUSY) while objects of the device live. After it only the destructor may be called.
  virtual result<nothing> close() = 0;

  virtual const efa_capabilities& capabilities() const = 0;

  // `access`: EFA_ACCESS_*. EFAULT, ENOMEM, EOPNOTSUPP (DMA-BUF) as above; EINVAL: empty.
  virtual result<efa_mr> reg_mr(const efa_memory& memory, uint32_t access) = 0;
  // The keys are dead when it returns: a request that uses them later fails at whoever executes it.
  virtual result<nothing> dereg_mr(const efa_mr& mr) = 0;

  virtual result<efa_cq> create_cq(const efa_cq_spec& spec) = 0;
  virtual result<nothing> destroy_cq(const efa_cq& cq) = 0;

  // EOPNOTSUPP: no counters here. ENOMEM: no more of them.
  virtual result<efa_counter> open_counter(const efa_counter_spec& spec) = 0;
  virtual result<nothing> close_counter(const efa_counter& counter) = 0;

  // Ready to post and to be written to when it returns. There is no receive queue.
  virtual result<efa_endpoint> create_endpoint(const efa_endpoint_spec& spec) = 0;
  // No further access to memory by the NIC on its behalf once it returns; writes of peers that are under way fail.
  virtual result<nothing> destroy_endpoint(const efa_endpoint& endpoint) = 0;

  // The same answer for all endpoints of the device. EHOSTUNREACH: the address is of another network or another availability zone.
  virtual result<efa_peer> insert_address(const efa_endpoint& of, const efa_address& address) = 0;
  virtual result<nothing> remove_address(const efa_peer& peer) = 0;

  // Takes the next event, if there is one: true and `event`, or false at once. Never blocks.
  virtual result<bool> poll_async(efa_event& event) = 0;
};

// Where devices come from: a library that was opened, or the software NIC.
class efa_driver {
 public:
  virtual ~efa_driver() = default;
  // "hardware" or "soft": for reports.
  virtual const char* backing() const = 0;
  // All EFA devices that the driver sees. None is no error.
  virtual result<std::vector<efa_device_info>> list_devices() = 0;
  // ENODEV, EPERM as above. The device must not outlive its driver.
  virtual result<std::unique_ptr<efa_device>> open(const std::string& name) = 0;
};

} // namespace ep::dl
