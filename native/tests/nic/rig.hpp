// Two or more software NICs with queue pairs between them, driven by raw commands and raw WQEs: what stands between a test and the bytes is here.
#pragma once

#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <vector>

#include "check.hpp"
#include "nic/mlx5/bits.hpp"
#include "nic/mlx5/soft_device.hpp"
#include "nic/mlx5/stepper.hpp"
#include "waiting.hpp"
#include "wire/bits.hpp"

namespace ep::test {

using nic::be32;
using nic::be64;
using nic::soft_device;
using nic::soft_options;

using command_bytes = std::array<uint8_t, EP_MLX5_CREATE_QP_IN_BYTES>;
using answer_bytes = std::array<uint8_t, EP_MLX5_CMD_OUT_BYTES>;

inline void set(uint8_t* layout, uint32_t field, uint64_t value) { EP_CHECK(wire::put(layout, field, value)); }

inline uint8_t* qpc(command_bytes& command) { return command.data() + EP_MLX5_QPC_AT; }
inline uint8_t* ads(command_bytes& command) { return qpc(command) + EP_MLX5_ADS_AT; }

template <class Value> Value must(result<Value> got) {
  EP_CHECK(got.ok());
  if (!got.ok()) {
    std::fprintf(stderr, "%s\n", got.why().message.c_str());
    std::abort();
  }
  return std::move(got.value());
}

// Memory for queues: page-aligned and zeroed.
struct control_block {
  explicit control_block(uint64_t bytes) : bytes(bytes), data(static_cast<uint8_t*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096))) {
    std::memset(data, 0, bytes);
  }
  ~control_block() { std::free(data); }
  control_block(const control_block&) = delete;
  uint64_t bytes;
  uint8_t* data;
};

struct queue_options {
  uint32_t log_sq = 6;
  uint32_t log_cq = 6;
  bool collapsed = true;
  bool ignore_overrun = true;
  uint32_t log_msg_max = 30;
  uint32_t mtu = EP_MLX5_MTU_4096;
  uint32_t retry_count = 7;
  uint32_t rnr_retry = 7;
  uint32_t ack_timeout = 14;
  uint32_t log_rq = 0;
  bool has_rq = false;
  uint32_t send_psn = 0;
  uint32_t receive_psn = 0;
  bool rwe = true, rre = true, rae = true;
  uint32_t log_outstanding = 1; // reads and atomics under way, each way
  const class queue* page_of = nullptr; // shares that queue pair's doorbell page
};

class node;

// One queue pair with its completion queue, doorbell page and memory, as a poster sees it.
class queue {
 public:
  queue(node& of, const queue_options& options);
  ~queue();
  queue(const queue&) = delete;

  void connect(uint32_t remote_port, uint32_t remote_qpn);
  void connect(const nic::gid_bytes& remote, uint32_t remote_qpn); // of a NIC on a network, that the hub was told of
  void to_reset();
  void destroy();

  uint32_t depth() const { return 1u << options.log_sq; }
  uint8_t* slot(uint32_t index) { return sq + (index & (depth() - 1)) * EP_MLX5_WQEBB_BYTES; }

  // Puts whole segments into the ring at `tail`; returns the index of the WQE.
  uint16_t put(const std::vector<uint8_t>& wqe) {
    const uint16_t index = tail;
    for (size_t at = 0; at < wqe.size(); at += EP_MLX5_WQEBB_BYTES) {
      std::memcpy(slot(tail++), wqe.data() + at, std::min<size_t>(EP_MLX5_WQEBB_BYTES, wqe.size() - at));
    }
    last = index;
    return index;
  }
  void record() { std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(dbr + 4)).store(be32(tail), std::memory_order_release); }
  void bell() {
    const uint64_t value = nic::load_raw<uint64_t>(slot(last));
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(uar.reg_addr + bf_offset)).store(value, std::memory_order_release);
    bf_offset ^= EP_MLX5_BF_HALF_BYTES;
  }
  void ring() {
    record();
    bell();
  }
  uint16_t post(const std::vector<uint8_t>& wqe) {
    const uint16_t index = put(wqe);
    ring();
    return index;
  }

  // The completion entry's last 8 bytes, read at once.
  struct tail_words {
    uint8_t opcode, wqe_opcode, owner;
    uint16_t counter;
    uint32_t qpn;
  };
  tail_words completed(uint32_t entry = 0) const {
    const uint64_t word = nic::load_acquire(*reinterpret_cast<const uint64_t*>(cq + entry * EP_MLX5_CQE_SIZE + 56));
    const uint32_t first = be32(static_cast<uint32_t>(word));
    const uint32_t second = be32(static_cast<uint32_t>(word >> 32));
    return {static_cast<uint8_t>(second >> 4 & 15), static_cast<uint8_t>(first >> 24), static_cast<uint8_t>(second & 1), static_cast<uint16_t>(second >> 16), first & 0xffffff};
  }
  uint8_t syndrome(uint32_t entry = 0) const {
    const uint64_t word = nic::load_acquire(*reinterpret_cast<const uint64_t*>(cq + entry * EP_MLX5_CQE_SIZE + 48));
    return static_cast<uint8_t>(word >> 56);
  }
  uint64_t word(uint32_t entry, uint32_t at) const { return nic::load_acquire(*reinterpret_cast<const uint64_t*>(cq + entry * EP_MLX5_CQE_SIZE + at)); }

  node& of;
  queue_options options;
  std::unique_ptr<control_block> memory;
  dl::mlx5_umem umem;
  dl::mlx5_uar uar;
  dl::mlx5_object cq_object, qp_object;
  uint8_t *sq = nullptr, *cq = nullptr, *dbr = nullptr, *cq_dbr = nullptr;
  uint32_t qpn = 0, cqn = 0;
  uint16_t tail = 0, last = 0;
  uint32_t bf_offset = 0;
};

// A NIC with a protection domain and one registered segment.
class node {
 public:
  static constexpr uint32_t all_rights =
      dl::MLX5_ACCESS_LOCAL_WRITE | dl::MLX5_ACCESS_REMOTE_WRITE | dl::MLX5_ACCESS_REMOTE_READ | dl::MLX5_ACCESS_REMOTE_ATOMIC;
  explicit node(const soft_options& options, uint64_t bytes = 1 << 16) : device(must(soft_device::open("nic", options))) {
    pd = must(device->alloc_pd());
    memory = must(segment::create(bytes));
    mr = must(device->reg_mr(pd, {address(), bytes}, all_rights));
  }
  uint8_t* data() const { return memory->data(); }
  uint64_t address(uint64_t offset = 0) const { return reinterpret_cast<uint64_t>(memory->data()) + offset; } // may be one outside
  std::atomic_ref<uint64_t> word(uint64_t offset) const { return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(data() + offset)); }

  std::unique_ptr<soft_device> device;
  dl::mlx5_pd pd;
  std::shared_ptr<segment> memory;
  dl::mlx5_mr mr;
};

inline command_bytes create_cq_command(const queue& of, uint64_t ring_at, uint64_t dbr_at) {
  command_bytes in{};
  set(in.data(), EP_MLX5_CMD_IN_OPCODE, EP_MLX5_CMD_CREATE_CQ);
  uint8_t* context = in.data() + EP_MLX5_CQC_AT;
  set(context, EP_MLX5_CQC_DBR_UMEM_VALID, 1);
  set(context, EP_MLX5_CQC_COLLAPSED, of.options.collapsed);
  set(context, EP_MLX5_CQC_OVERRUN_IGNORE, of.options.ignore_overrun);
  set(context, EP_MLX5_CQC_DBR_UMEM_ID, of.umem.id);
  set(context, EP_MLX5_CQC_LOG_CQ_SIZE, of.options.log_cq);
  set(context, EP_MLX5_CQC_UAR_PAGE, of.uar.page_id);
  set(context, EP_MLX5_CQC_DBR_ADDR, dbr_at);
  set(in.data(), EP_MLX5_CREATE_CQ_IN_UMEM_OFFSET, ring_at);
  set(in.data(), EP_MLX5_CREATE_CQ_IN_UMEM_ID, of.umem.id);
  set(in.data(), EP_MLX5_CREATE_CQ_IN_UMEM_VALID, 1);
  return in;
}

inline command_bytes create_qp_command(const queue& of, uint32_t pdn, uint64_t wq_at, uint64_t dbr_at) {
  command_bytes in{};
  set(in.data(), EP_MLX5_CMD_IN_OPCODE, EP_MLX5_CMD_CREATE_QP);
  set(qpc(in), EP_MLX5_QPC_PM_STATE, EP_MLX5_PM_STATE_MIGRATED);
  set(qpc(in), EP_MLX5_QPC_PD, pdn);
  set(qpc(in), EP_MLX5_QPC_LOG_SQ_SIZE, of.options.log_sq);
  set(qpc(in), EP_MLX5_QPC_UAR_PAGE, of.uar.page_id);
  set(qpc(in), EP_MLX5_QPC_USER_INDEX, 0x1234);
  set(qpc(in), EP_MLX5_QPC_CQN_SND, of.cqn);
  set(qpc(in), EP_MLX5_QPC_CQN_RCV, of.cqn);
  set(qpc(in), EP_MLX5_QPC_RQ_TYPE, of.options.has_rq ? EP_MLX5_RQ_TYPE_REGULAR : EP_MLX5_RQ_TYPE_ZERO_SIZE);
  if (of.options.has_rq) set(qpc(in), EP_MLX5_QPC_LOG_RQ_SIZE, of.options.log_rq);
  set(qpc(in), EP_MLX5_QPC_DBR_ADDR, dbr_at);
  set(qpc(in), EP_MLX5_QPC_DBR_UMEM_VALID, 1);
  set(qpc(in), EP_MLX5_QPC_DBR_UMEM_ID, of.umem.id);
  set(in.data(), EP_MLX5_CREATE_QP_IN_WQ_UMEM_OFFSET, wq_at);
  set(in.data(), EP_MLX5_CREATE_QP_IN_WQ_UMEM_ID, of.umem.id);
  set(in.data(), EP_MLX5_CREATE_QP_IN_WQ_UMEM_VALID, 1);
  return in;
}

inline command_bytes init_command(const queue& of) {
  command_bytes in{};
  set(in.data(), EP_MLX5_CMD_IN_OPCODE, EP_MLX5_CMD_RST2INIT_QP);
  set(in.data(), EP_MLX5_CMD_IN_OBJECT, of.qpn);
  set(qpc(in), EP_MLX5_QPC_PM_STATE, EP_MLX5_PM_STATE_MIGRATED);
  set(qpc(in), EP_MLX5_QPC_RWE, of.options.rwe);
  set(qpc(in), EP_MLX5_QPC_RRE, of.options.rre);
  set(qpc(in), EP_MLX5_QPC_RAE, of.options.rae);
  set(qpc(in), EP_MLX5_QPC_ATOMIC_MODE, EP_MLX5_ATOMIC_MODE_UP_TO_8);
  set(ads(in), EP_MLX5_ADS_VHCA_PORT, 1);
  return in;
}

inline command_bytes receive_command(const queue& of, uint32_t remote_port, uint32_t remote_qpn, bool ethernet = false, const nic::gid_bytes* network = nullptr) {
  command_bytes in{};
  set(in.data(), EP_MLX5_CMD_IN_OPCODE, EP_MLX5_CMD_INIT2RTR_QP);
  set(in.data(), EP_MLX5_CMD_IN_OBJECT, of.qpn);
  set(qpc(in), EP_MLX5_QPC_MTU, of.options.mtu);
  set(qpc(in), EP_MLX5_QPC_LOG_MSG_MAX, of.options.log_msg_max);
  set(qpc(in), EP_MLX5_QPC_REMOTE_QPN, remote_qpn);
  set(qpc(in), EP_MLX5_QPC_MIN_RNR_NAK, 7);
  set(qpc(in), EP_MLX5_QPC_NEXT_RCV_PSN, of.options.receive_psn);
  set(qpc(in), EP_MLX5_QPC_LOG_RRA_MAX, of.options.log_outstanding);
  const auto gid = network != nullptr ? *network : ethernet ? nic::gid_ipv4(remote_port) : nic::gid_link_local(remote_port);
  std::memcpy(ads(in) + (EP_MLX5_ADS_RGID_HIGH >> 16), gid.data(), gid.size());
  if (ethernet) {
    const auto mac = nic::mac_of(remote_port);
    set(ads(in), EP_MLX5_ADS_RMAC_HIGH, mac[0] << 8 | mac[1]);
    set(ads(in), EP_MLX5_ADS_RMAC_LOW, static_cast<uint32_t>(mac[2]) << 24 | mac[3] << 16 | mac[4] << 8 | mac[5]);
  } else {
    set(ads(in), EP_MLX5_ADS_RLID, remote_port);
  }
  return in;
}

inline command_bytes send_command(const queue& of) {
  command_bytes in{};
  set(in.data(), EP_MLX5_CMD_IN_OPCODE, EP_MLX5_CMD_RTR2RTS_QP);
  set(in.data(), EP_MLX5_CMD_IN_OBJECT, of.qpn);
  set(qpc(in), EP_MLX5_QPC_LOG_SRA_MAX, of.options.log_outstanding);
  set(qpc(in), EP_MLX5_QPC_RETRY_COUNT, of.options.retry_count);
  set(qpc(in), EP_MLX5_QPC_RNR_RETRY, of.options.rnr_retry);
  set(qpc(in), EP_MLX5_QPC_NEXT_SEND_PSN, of.options.send_psn);
  set(ads(in), EP_MLX5_ADS_ACK_TIMEOUT, of.options.ack_timeout);
  return in;
}

inline queue::queue(node& of, const queue_options& chosen) : of(of), options(chosen) {
  const uint64_t sq_bytes = uint64_t{EP_MLX5_WQEBB_BYTES} << options.log_sq;
  const uint64_t rq_bytes = options.has_rq ? 16ull << options.log_rq : 0;
  const uint64_t rq_room = (rq_bytes + 63) / 64 * 64; // the send queue begins right behind the receive queue
  const uint64_t cq_bytes = uint64_t{EP_MLX5_CQE_SIZE} << options.log_cq;
  memory = std::make_unique<control_block>(rq_room + sq_bytes + cq_bytes + 128);
  uint8_t* wq = memory->data + (rq_room - rq_bytes);
  sq = wq + rq_bytes;
  cq = sq + sq_bytes;
  dbr = cq + cq_bytes;
  cq_dbr = dbr + 64;
  std::memset(cq, 0xff, cq_bytes);
  soft_device& device = *of.device;
  umem = must(device.umem_reg({reinterpret_cast<uint64_t>(memory->data), memory->bytes}, dl::MLX5_ACCESS_LOCAL_WRITE));
  uar = options.page_of != nullptr ? options.page_of->uar : must(device.alloc_uar(dl::mlx5_uar_kind::blueflame));
  const auto at = [&](const uint8_t* part) { return static_cast<uint64_t>(part - memory->data); };
  answer_bytes out{};
  cq_object = must(device.obj_create(create_cq_command(*this, at(cq), at(cq_dbr)), out));
  cqn = static_cast<uint32_t>(wire::get(out.data(), EP_MLX5_CMD_OUT_OBJECT));
  qp_object = must(device.obj_create(create_qp_command(*this, of.pd.pdn, at(wq), at(dbr)), out));
  qpn = static_cast<uint32_t>(wire::get(out.data(), EP_MLX5_CMD_OUT_OBJECT));
}

inline void queue::connect(uint32_t remote_port, uint32_t remote_qpn) {
  answer_bytes out{};
  must(of.device->obj_modify(qp_object, init_command(*this), out));
  must(of.device->obj_modify(qp_object, receive_command(*this, remote_port, remote_qpn), out));
  must(of.device->obj_modify(qp_object, send_command(*this), out));
}

inline void queue::connect(const nic::gid_bytes& remote, uint32_t remote_qpn) {
  answer_bytes out{};
  must(of.device->obj_modify(qp_object, init_command(*this), out));
  must(of.device->obj_modify(qp_object, receive_command(*this, uint32_t{remote[14]} << 8 | remote[15], remote_qpn, false, &remote), out));
  must(of.device->obj_modify(qp_object, send_command(*this), out));
}

inline void queue::to_reset() {
  std::array<uint8_t, EP_MLX5_CMD_IN_BYTES> in{};
  answer_bytes out{};
  set(in.data(), EP_MLX5_CMD_IN_OPCODE, EP_MLX5_CMD_2RST_QP);
  set(in.data(), EP_MLX5_CMD_IN_OBJECT, qpn);
  must(of.device->obj_modify(qp_object, in, out));
  tail = 0;
  std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(dbr + 4)).store(0);
}

inline void queue::destroy() {
  if (qp_object.handle == nullptr) return;
  must(of.device->obj_destroy(qp_object));
  must(of.device->obj_destroy(cq_object));
  if (options.page_of == nullptr) must(of.device->free_uar(uar));
  must(of.device->umem_dereg(umem));
  qp_object = {};
}

inline queue::~queue() { destroy(); }

// ---- WQEs

using wqe_bytes = std::vector<uint8_t>;

struct data_at {
  uint64_t address;
  uint32_t lkey;
  uint32_t bytes;
};

inline void add32(wqe_bytes& wqe, uint32_t word) {
  word = be32(word);
  wqe.resize(wqe.size() + 4);
  std::memcpy(wqe.data() + wqe.size() - 4, &word, 4);
}
inline void add64(wqe_bytes& wqe, uint64_t word) {
  add32(wqe, static_cast<uint32_t>(word >> 32));
  add32(wqe, static_cast<uint32_t>(word));
}

// Control and remote segment; finish() sets ds.
inline wqe_bytes begin_wqe(const queue& of, uint8_t opcode, uint8_t opmod, uint64_t raddr, uint32_t rkey, uint8_t fm_ce_se = EP_MLX5_CQ_UPDATE, uint32_t imm = 0) {
  wqe_bytes wqe;
  add32(wqe, uint32_t{opmod} << 24 | uint32_t{of.tail} << 8 | opcode);
  add32(wqe, of.qpn << 8);
  add32(wqe, fm_ce_se);
  add32(wqe, imm);
  add64(wqe, raddr);
  add32(wqe, rkey);
  add32(wqe, 0);
  return wqe;
}
inline wqe_bytes finish_wqe(wqe_bytes wqe) {
  while (wqe.size() % EP_MLX5_DS_BYTES != 0) wqe.push_back(0);
  wqe[7] = static_cast<uint8_t>(wqe.size() / EP_MLX5_DS_BYTES);
  return wqe;
}
inline void add_data(wqe_bytes& wqe, const data_at& data) {
  add32(wqe, data.bytes);
  add32(wqe, data.lkey);
  add64(wqe, data.address);
}
inline wqe_bytes rdma_wqe(const queue& of, uint8_t opcode, uint64_t raddr, uint32_t rkey, const std::vector<data_at>& data, uint8_t fm_ce_se = EP_MLX5_CQ_UPDATE,
                          uint32_t imm = 0) {
  wqe_bytes wqe = begin_wqe(of, opcode, 0, raddr, rkey, fm_ce_se, imm);
  for (const data_at& one : data) add_data(wqe, one);
  return finish_wqe(std::move(wqe));
}
inline wqe_bytes inline_wqe(const queue& of, uint64_t raddr, uint32_t rkey, const void* bytes, uint32_t length) {
  wqe_bytes wqe = begin_wqe(of, EP_MLX5_OPCODE_RDMA_WRITE, 0, raddr, rkey);
  add32(wqe, EP_MLX5_INLINE | length);
  wqe.insert(wqe.end(), static_cast<const uint8_t*>(bytes), static_cast<const uint8_t*>(bytes) + length);
  return finish_wqe(std::move(wqe));
}
inline wqe_bytes add8_wqe(const queue& of, uint64_t raddr, uint32_t rkey, const data_at& old, uint64_t add, uint64_t boundary = 0) {
  wqe_bytes wqe = begin_wqe(of, EP_MLX5_OPCODE_ATOMIC_MASKED_FA, EP_MLX5_OPMOD_ATOMIC_8, raddr, rkey);
  add64(wqe, add);
  add64(wqe, boundary);
  add_data(wqe, old);
  return finish_wqe(std::move(wqe));
}
inline wqe_bytes add4_wqe(const queue& of, uint64_t raddr, uint32_t rkey, const data_at& old, uint32_t add, uint32_t boundary = 0) {
  wqe_bytes wqe = begin_wqe(of, EP_MLX5_OPCODE_ATOMIC_MASKED_FA, EP_MLX5_OPMOD_ATOMIC_4, raddr, rkey);
  add32(wqe, add);
  add32(wqe, boundary);
  add64(wqe, 0);
  add_data(wqe, old);
  return finish_wqe(std::move(wqe));
}

// Two connected nodes without threads. `a` posts, `b` answers; both may.
struct pair_of_nics {
  explicit pair_of_nics(uint64_t seed = 1, const queue_options& options = {}, soft_options devices = stepped())
      : a_node(with_seed(devices, seed)), b_node(with_seed(devices, seed + 1)), a(a_node, options), b(b_node, options), steps(seed) {
    a.connect(b_node.device->port_number(), b.qpn);
    b.connect(a_node.device->port_number(), a.qpn);
    if (!devices.threaded) {
      steps.add(*a_node.device);
      steps.add(*b_node.device);
    }
  }
  static soft_options stepped() {
    soft_options options;
    options.threaded = false;
    options.engine.trace_events = 100'000;
    return options;
  }
  static soft_options with_seed(soft_options options, uint64_t seed) {
    options.engine.seed = seed;
    return options;
  }
  // Where a's bytes come from, and where at b they go.
  data_at local(uint64_t offset, uint32_t bytes) const { return {a_node.address(offset), a_node.mr.lkey, bytes}; }
  uint64_t remote(uint64_t offset) const { return b_node.address(offset); }
  uint32_t rkey() const { return b_node.mr.rkey; }

  node a_node, b_node;
  queue a, b;
  nic::stepper steps;
};

} // namespace ep::test
