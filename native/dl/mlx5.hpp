// All that the control path may ask of an mlx5 NIC: 21 calls in our own types. `dl/mlx5_verbs.cpp` fills the table from libibverbs and libmlx5,
// `nic/mlx5` implements it in software. Whoever drives a NIC sees this file only, so that both execute the same commands, byte for byte.
//
// Failures. `failure.status` is EP_STATUS_SYSTEM unless a call says otherwise, and `failure.sys_errno` is part of the contract:
//   ENODEV      no device of that name, or it has gone
//   EPERM       the kernel refuses DevX (or the device file) to this user; EACCES likewise
//   EINVAL      an argument outside of what the call documents
//   ENOMEM      memory could not be pinned, or a table of the NIC is full
//   EFAULT      the address is not mapped, or the driver cannot pin that kind of memory (device memory without GPUDirect)
//   EOPNOTSUPP  this backing cannot do that (a DMA-BUF where the library or the kernel is too old): the caller may try another way
//   EREMOTEIO   the NIC itself refused a command: `out` holds its status (byte 0) and syndrome (bytes 4..7)
//   EBUSY       the object is still used by another one
// `failure.message` names the call, the device and the cause.
//
// Threads. Calls on different objects may run at once, also on one device; whoever destroys an object sees to it that nobody uses it. poll_async is
// for one thread at a time.
//
// Lifetime. What a call hands out is given back with its counterpart, children first: queue pairs, completion queues, umems, UARs, memory regions,
// protection domains. close() refuses (EBUSY) while any of them lives.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "status.hpp"

namespace ep::dl {

// ---- devices, ports, GIDs

struct mlx5_device_info {
  std::string name;        // "mlx5_0"; what open() takes
  std::string sysfs;       // folder of the RDMA device, "/sys/class/infiniband/mlx5_0"; empty: it has no PCI function (software)
  bool supported = false;  // open() can succeed: an mlx5 device whose driver speaks DevX
  std::string unsupported; // if not: why ("a device of another vendor")
};

enum class mlx5_link : uint8_t { unknown = 0, infiniband = 1, ethernet = 2 };

// Numbers as in the InfiniBand specification.
enum class mlx5_port_state : uint8_t { nop = 0, down = 1, init = 2, armed = 3, active = 4, active_defer = 5 };

struct mlx5_port {
  mlx5_port_state state = mlx5_port_state::nop;
  mlx5_link link = mlx5_link::unknown;
  uint8_t active_mtu = 0; // 1..5: 256, 512, 1024, 2048, 4096 bytes
  uint16_t lid = 0;       // InfiniBand; 0 on Ethernet
  uint32_t gid_count = 0; // valid arguments of query_gid: 0 .. gid_count - 1
  uint32_t max_message = 0; // bytes
};

enum class mlx5_gid_type : uint8_t { empty = 0, infiniband = 1, roce_v1 = 2, roce_v2 = 3 };

struct mlx5_gid {
  std::array<uint8_t, 16> raw{}; // as on the wire
  mlx5_gid_type type = mlx5_gid_type::empty;
};

// ---- memory

// Bytes that the NIC shall reach: addresses of this process (host memory, or a GPU's where the kernel can pin it), or a part of a DMA-BUF.
struct mlx5_memory {
  uint64_t address = 0;     // of this process; with a DMA-BUF: the address by which requests name the first byte (the IOVA)
  uint64_t byte_length = 0; // > 0
  int dmabuf_fd = -1;       // -1: `address` is what is pinned. The caller keeps the fd; it may be closed after the call
  uint64_t dmabuf_offset = 0;
};

// Rights, with the numbers of verbs. Remote write and atomic need local write. Local read is always given.
inline constexpr uint32_t MLX5_ACCESS_LOCAL_WRITE = 1u << 0;
inline constexpr uint32_t MLX5_ACCESS_REMOTE_WRITE = 1u << 1;
inline constexpr uint32_t MLX5_ACCESS_REMOTE_READ = 1u << 2;
inline constexpr uint32_t MLX5_ACCESS_REMOTE_ATOMIC = 1u << 3;
// Hazard: with it a write may land before earlier ones of the same queue pair, so data and signal of one request order no more.
inline constexpr uint32_t MLX5_ACCESS_RELAXED_ORDERING = 1u << 20;

// ---- objects. `handle` belongs to the backing; nullptr: no object.

struct mlx5_pd {
  void* handle = nullptr;
  uint32_t pdn = 0; // 24 bits, as commands name it
};

struct mlx5_mr {
  void* handle = nullptr;
  uint32_t lkey = 0; // for data segments of this process
  uint32_t rkey = 0; // for peers; valid if a remote right was asked for
};

enum class mlx5_uar_kind : uint8_t {
  blueflame = 0, // write-combining registers: a CPU that rings has to flush its write buffer
  noncached = 1, // no combining; EOPNOTSUPP on old kernels
};

struct mlx5_uar {
  void* handle = nullptr;
  uint32_t page_id = 0;   // 24 bits: `uar_page` of queue contexts
  uint64_t base_addr = 0; // of the 4 KiB page, in this process
  uint64_t reg_addr = 0;  // of its first doorbell register: two halves of 256 bytes follow
};

struct mlx5_umem {
  void* handle = nullptr;
  uint32_t id = 0; // `*_umem_id` of queue contexts; offsets there count from the first registered byte
};

// A queue pair or completion queue made by obj_create. Its number is in `out` of the command.
struct mlx5_object {
  void* handle = nullptr;
};

// ---- addresses of peers

// What is known of a peer's port. On InfiniBand a peer of the same subnet is reached by LID, and `global` is false; on Ethernet `global` is true.
struct mlx5_route {
  uint8_t port = 1;       // one's own
  uint8_t sgid_index = 0; // one's own
  bool global = false;    // with a global routing header
  uint8_t sl = 0;         // 0..15
  uint8_t traffic_class = 0;
  uint8_t hop_limit = 0;
  uint16_t dlid = 0;
  std::array<uint8_t, 16> dgid{};
};

// What a queue pair's address path needs beyond the route.
struct mlx5_path {
  std::array<uint8_t, 6> mac{}; // of the next hop; zero on InfiniBand
  std::array<uint8_t, 16> gid{};
  uint16_t rlid = 0;     // on Ethernet: what the driver put there (RoCE v2: the UDP source port where it chose one)
  uint8_t hop_limit = 0;
  uint8_t traffic_class = 0;
};

// ---- events

enum class mlx5_event_kind : uint8_t {
  port_up = 1,
  port_down = 2,
  gid_change = 3,
  device_fatal = 4, // nothing on this device works any more
  qp_error = 5,
  cq_error = 6,
};

struct mlx5_event {
  mlx5_event_kind kind = mlx5_event_kind::port_up;
  uint8_t port = 0;      // of port_up, port_down, gid_change
  uint32_t number = 0;   // qpn or cqn
  uint32_t syndrome = 0; // qp_error: what the NIC says of it; 0: nothing
};

// ---- the table

// One opened device.
class mlx5_device {
 public:
  // Gives everything back that the backing still holds, without a word; close() is the one that tells.
  virtual ~mlx5_device() = default;
  virtual const std::string& name() const = 0;
  // Refuses (EBUSY) while objects of the device live. After it only the destructor may be called.
  virtual result<nothing> close() = 0;

  // `port` counts from 1. EINVAL: the device has no such port.
  virtual result<mlx5_port> query_port(uint8_t port) = 0;
  // An entry without a GID is of type `empty`, no error. EINVAL: index >= gid_count.
  virtual result<mlx5_gid> query_gid(uint8_t port, uint32_t index) = 0;

  virtual result<mlx5_pd> alloc_pd() = 0;
  virtual result<nothing> dealloc_pd(const mlx5_pd& pd) = 0;

  // `access`: MLX5_ACCESS_*. EFAULT, ENOMEM, EOPNOTSUPP (DMA-BUF) as above; EINVAL: empty, or remote rights to write without the local one.
  virtual result<mlx5_mr> reg_mr(const mlx5_pd& pd, const mlx5_memory& memory, uint32_t access) = 0;
  // The keys are dead when it returns: a request that uses them later fails at whoever executes it.
  virtual result<nothing> dereg_mr(const mlx5_mr& mr) = 0;

  virtual result<mlx5_uar> alloc_uar(mlx5_uar_kind kind) = 0;
  virtual result<nothing> free_uar(const mlx5_uar& uar) = 0;

  // Memory that queues, doorbell records and completions live in. `access`: local write (the NIC writes completions). Errors as of reg_mr.
  virtual result<mlx5_umem> umem_reg(const mlx5_memory& memory, uint32_t access) = 0;
  virtual result<nothing> umem_dereg(const mlx5_umem& umem) = 0;

  // The event queue of a completion vector: `c_eqn` of completion queue contexts.
  virtual result<uint32_t> query_eqn(uint32_t vector) = 0;

  // Commands as in abi/mlx5_prm.h, big endian, whole. The NIC's answer is in `out` whether the call succeeds or fails with EREMOTEIO.
  // Commands without an object: QUERY_HCA_CAP. EINVAL: one that makes or changes an object.
  virtual result<nothing> general_cmd(std::span<const uint8_t> in, std::span<uint8_t> out) = 0;
  // CREATE_CQ, CREATE_QP. The `uid` field is the backing's to fill.
  virtual result<mlx5_object> obj_create(std::span<const uint8_t> in, std::span<uint8_t> out) = 0;
  // RST2INIT_QP, INIT2RTR_QP, RTR2RTS_QP, 2ERR_QP, 2RST_QP; `in` names the object's number, too. EINVAL: another object's number.
  virtual result<nothing> obj_modify(const mlx5_object& object, std::span<const uint8_t> in, std::span<uint8_t> out) = 0;
  // QUERY_QP, QUERY_CQ.
  virtual result<nothing> obj_query(const mlx5_object& object, std::span<const uint8_t> in, std::span<uint8_t> out) = 0;
  // No further access to the queue's memory by the NIC once it returns.
  virtual result<nothing> obj_destroy(const mlx5_object& object) = 0;

  // EHOSTUNREACH: no route to the peer's GID (address resolution failed). The control path writes the peer's GID into the queue pair's address path
  // on both link layers (InfiniBand hardware ignores it without a global header): that is by what the software NIC finds a peer's port.
  virtual result<mlx5_path> resolve_ah(const mlx5_pd& pd, const mlx5_route& route) = 0;

  // Takes the next event, if there is one: true and `event`, or false at once. Never blocks.
  virtual result<bool> poll_async(mlx5_event& event) = 0;
};

// Where devices come from: a library that was opened, or the software NIC.
class mlx5_driver {
 public:
  virtual ~mlx5_driver() = default;
  // "hardware" or "soft": for reports.
  virtual const char* backing() const = 0;
  // All RDMA devices that the driver sees, those of others included (supported = false). None is no error.
  virtual result<std::vector<mlx5_device_info>> list_devices() = 0;
  // ENODEV, EPERM as above. The device must not outlive its driver.
  virtual result<std::unique_ptr<mlx5_device>> open(const std::string& name) = 0;
};

} // namespace ep::dl
