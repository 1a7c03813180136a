// What the posts of post_bytes_test are made to: rings in memory of one address, and a NIC that keeps every WQE.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "../check.hpp"
#include "../device/efa_world.hpp"
#include "post_kernels.hpp"
#include "post_script.h"

namespace ep::test {

inline uint64_t address_of(const void* at) { return reinterpret_cast<uint64_t>(at); }

struct post_shape {
  post_way way = post_way::ringer_device;
  uint32_t lanes = 1;
  uint32_t depth = 16;
  uint32_t sharing = 0;          // of the device, for endpoints
  bool collapsed = true;         // mlx5
  uint32_t max_batch = 16;       // EFA
  bool inline_write = false;
  bool wide_ids = false;
  uint64_t max_message = 64;
  uint64_t seed = 0;

  std::string text() const {
    return "way " + std::to_string(static_cast<uint32_t>(way)) + ", " + std::to_string(lanes) + " lanes, depth " + std::to_string(depth) + ", sharing " + std::to_string(sharing) + ", seed " + std::to_string(seed);
  }
};

// The memory of all runs, at one address.
struct post_memory {
  mlx5_rig mlx5;
  efa_rig efa;
  post_log log;
  uint64_t steps[64 * 1024];
};
inline post_memory* memory = nullptr;

inline void pattern(uint8_t* bytes, size_t count, uint32_t from) {
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(from + i * 37 + (i >> 8));
}

template <size_t Count> void watch(post_log& log, const uint64_t (&addresses)[Count], uint64_t bytes) {
  for (const uint64_t address : addresses) log.watch[log.watched++] = {address, bytes, 0};
}

inline void set_up(mlx5_rig& rig, post_log& log, const post_shape& shape) {
  pattern(rig.source, sizeof rig.source, 3);
  pattern(rig.loose, sizeof rig.loose, 5);
  for (uint32_t i = 0; i < 2; ++i) {
    mlx5_lines& lines = rig.lines[i];
    std::memset(lines.cq, 0xff, sizeof lines.cq);
    ep_ibgda_qp& qp = rig.qps[i];
    qp.header = {EP_MAGIC_IBGDA_QP, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof qp};
    qp.sq = address_of(lines.sq);
    qp.dbr = address_of(&lines.dbr);
    qp.bf = address_of(lines.bf);
    qp.cq = address_of(lines.cq);
    qp.cq_dbr = shape.collapsed ? 0 : address_of(&lines.cq_dbr);
    qp.qpn = 0x4321 + i;
    qp.depth = shape.depth;
    qp.cq_depth = shape.collapsed ? 1 : shape.depth;
    qp.flags = shape.collapsed ? EP_IBGDA_CQ_COLLAPSED : 0;
    qp.peer = static_cast<int32_t>(i);
    qp.index = i;
    qp.response = address_of(&lines.response);
    qp.response_lkey = mlx5_response_key;
    qp.marks = address_of(lines.marks);
    rig.remotes[i] = {mlx5_remote + (uint64_t{i} << 36), mlx5_remote + (uint64_t{i + 2} << 36), mlx5_remote_key + i, mlx5_remote_key + 2 + i};
    watch(log, {address_of(&lines.dbr) + 4}, 4);
    watch(log, {address_of(lines.bf), address_of(lines.bf) + EP_MLX5_BF_HALF_BYTES}, 8);
  }
  rig.device.header = {EP_MAGIC_IBGDA, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof rig.device};
  rig.device.world_size = 2;
  rig.device.qps = address_of(rig.qps);
  rig.device.qps_per_peer = rig.device.active_qps = 1;
  rig.device.sharing = shape.sharing;
  rig.device.max_message = shape.max_message;
  rig.device.ranges = address_of(&rig.table);
  rig.table = {{1, 0}, {address_of(rig.source), address_of(rig.source) + sizeof rig.source, mlx5_local_key, 0}};
  rig.route.header = {EP_MAGIC_IBGDA_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof rig.route};
  rig.route.device = address_of(&rig.device);
  rig.route.remotes = address_of(rig.remotes);
  rig.memory.header = {EP_MAGIC_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, EP_MEMORY_IBGDA, sizeof rig.memory};
  rig.memory.world_size = 2;
  rig.memory.byte_length = uint64_t{1} << 30;
  rig.memory.signal_slots = 16;
  rig.memory.peers = address_of(rig.views);
  rig.memory.proxy = address_of(&rig.route);
}

inline void set_up(efa_rig& rig, const post_shape& shape) {
  pattern(rig.source, sizeof rig.source, 7);
  for (uint32_t i = 0; i < efa_rig_qps; ++i) {
    efa_lines& lines = rig.lines[i];
    ep_efa_qp& qp = rig.qps[i];
    qp.header = {EP_MAGIC_EFA_QP, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof qp};
    qp.sq = address_of(lines.sq);
    qp.doorbell = address_of(&lines.doorbell);
    qp.cq = address_of(lines.cq);
    qp.written = address_of(&lines.written);
    qp.failed = address_of(&lines.written_failed);
    qp.finished = address_of(lines.finished);
    qp.requests = address_of(lines.requests);
    qp.marks = address_of(lines.marks);
    qp.targets = address_of(rig.targets);
    qp.values = shape.inline_write ? 0 : address_of(lines.values);
    qp.values_lkey = 0x51;
    qp.target_slots = efa_rig_qps;
    qp.depth = shape.depth;
    qp.wqe_bytes = shape.inline_write ? EP_EFA_WIDE_WQE_BYTES : EP_EFA_WQE_BYTES;
    qp.max_batch = shape.max_batch;
    qp.cq_depth = shape.depth;
    qp.cq_entry_bytes = shape.wide_ids ? 16 : EP_EFA_CQE_BYTES;
    qp.qpn = 0x60 + i;
    qp.index = i;
    qp.flags = shape.wide_ids ? EP_EFA_QP_WIDE_ID : 0;
    for (uint16_t peer = 0; peer < 2; ++peer) {
      const ep_efa_target target{static_cast<uint16_t>(0x100 + peer), static_cast<uint16_t>(0x200 + i * 2 + peer), 0x1111'0000u + i * 2 + peer};
      const uint32_t at = i * 2 + peer;
      rig.targets[at] = target;
      rig.pr_handles[at] = target.ah;
      rig.pr_qpns[at] = target.qpn;
      rig.pr_qkeys[at] = target.qkey;
    }
    ep_efa_pr_wq& wq = rig.pr_qps[i].sq.wq;
    wq.max_sge = 1;
    wq.max_wqes = shape.depth;
    wq.queue_mask = shape.depth - 1;
    wq.queue_size_shift = static_cast<uint32_t>(__builtin_ctz(shape.depth));
    wq.max_batch = shape.max_batch;
    wq.buf = qp.sq;
    wq.db = qp.doorbell;
  }
  for (uint32_t i = 0; i < 2; ++i) {
    rig.remotes[i] = {efa_remote_part + (uint64_t{i} << 36), 0x31 + i, 0};
    rig.scratch_remotes[i] = {efa_remote_scratch + (uint64_t{i} << 36), 0x41 + i, 0};
    rig.pr_scratch_addresses[i] = rig.scratch_remotes[i].address;
    rig.pr_scratch_rkeys[i] = rig.scratch_remotes[i].rkey;
    rig.pr_part.peers[i] = {rig.remotes[i].address, rig.remotes[i].rkey, 0};
    efa_lines& lines = rig.lines[1 + i];
    rig.signals[i] = {address_of(&lines.arrived), address_of(&lines.arrived_failed), 0, 0, 1 + i, 0, {}};
    rig.counters[i] = {address_of(&lines.written), address_of(&lines.written_failed), 0, 0, 1 + i, 0, {}};
  }
  ep_efa_device& device = rig.device;
  device.header = {EP_MAGIC_EFA, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof device};
  device.world_size = 2;
  device.qps = address_of(rig.qps);
  device.signals = address_of(rig.signals);
  device.counters = address_of(rig.counters);
  device.qp_count = efa_rig_qps;
  device.signal_count = device.counter_count = 2;
  device.sharing = shape.sharing;
  device.max_message = shape.max_message;
  device.scratch = address_of(&rig.scratch);
  device.scratch_remotes = address_of(rig.scratch_remotes);
  device.scratch_lkey = 0x52;
  device.ranges = address_of(&rig.table);
  rig.table = {{1, 0}, {address_of(rig.source), address_of(rig.source) + sizeof rig.source, 0x53, 0}};
  rig.part.header = {EP_MAGIC_EFA_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof rig.part};
  rig.part.device = address_of(&device);
  rig.part.remotes = address_of(rig.remotes);
  rig.part.address = address_of(rig.source);
  rig.part.byte_length = sizeof rig.source;
  rig.part.targets = address_of(rig.targets);
  rig.part.lkey = 0x53;
  rig.memory.header = {EP_MAGIC_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, EP_MEMORY_EFA, sizeof rig.memory};
  rig.memory.world_size = 2;
  rig.memory.byte_length = sizeof rig.source;
  rig.memory.signal_slots = 2;
  rig.memory.peers = address_of(rig.views);
  rig.memory.proxy = address_of(&rig.part);
  const auto endpoint = [&](uint32_t i) {
    ep_efa_pr_endpoint made{};
    made.qp = address_of(&rig.pr_qps[i]);
    made.address_handles = address_of(rig.pr_handles + i * 2);
    made.remote_qpns = address_of(rig.pr_qpns + i * 2);
    made.qkey = address_of(rig.pr_qkeys + i * 2);
    made.local_cntr_value = address_of(&rig.lines[i].written);
    made.sq_size = shape.depth;
    made.putvalue_slice_base = address_of(rig.lines[i].values);
    return made;
  };
  rig.pr_signals[0] = {endpoint(1), address_of(&rig.lines[1].arrived)};
  rig.pr_counters[0] = {endpoint(2), address_of(&rig.lines[2].written)};
  rig.pr_signal_views[0] = address_of(&rig.pr_signals[0]);
  rig.pr_counter_views[0] = address_of(&rig.pr_counters[0]);
  rig.pr.data = endpoint(0);
  rig.pr.signal_handles = address_of(rig.pr_signal_views);
  rig.pr.counter_handles = address_of(rig.pr_counter_views);
  rig.pr.signal_count = rig.pr.counter_count = 1;
  rig.pr.nranks = 2;
  rig.pr.scratch_lkey = device.scratch_lkey;
  rig.pr.scratch_local_addr = device.scratch;
  rig.pr.scratch_remote_addrs = address_of(rig.pr_scratch_addresses);
  rig.pr.scratch_remote_rkeys = address_of(rig.pr_scratch_rkeys);
  rig.pr.putvalue_lkey = 0x51;
  rig.pr.putvalue_slot_size = 8;
  rig.pr_part.head = {0x53, 2, rig.part.address};
}

// The NIC of these runs: keeps a copy of every WQE that a doorbell told of, and completes it.
struct server {
  post_shape shape;
  std::vector<uint8_t> wqes[efa_rig_qps]; // of each queue pair, in their order
  uint64_t completed[efa_rig_qps] = {};
  uint64_t cqes[efa_rig_qps] = {};
  uint32_t turns = 0;

  void serve() {
    if (is_mlx5(shape.way)) {
      for (uint32_t i = 0; i < 2; ++i) serve_mlx5(i);
    } else {
      for (uint32_t i = 0; i < efa_rig_qps; ++i) serve_efa(i);
    }
  }

 private:
  void keep(uint32_t index, const uint8_t* wqe, uint64_t bytes) { wqes[index].insert(wqes[index].end(), wqe, wqe + bytes); }

  void serve_mlx5(uint32_t index) {
    mlx5_lines& lines = memory->mlx5.lines[index];
    const uint32_t record = __builtin_bswap32(std::atomic_ref<uint32_t>(reinterpret_cast<uint32_t*>(&lines.dbr)[1]).load(std::memory_order_acquire));
    const uint16_t fresh = static_cast<uint16_t>(record - static_cast<uint32_t>(completed[index]));
    if (fresh == 0) return;
    EP_CHECK(fresh <= shape.depth);
    const uint64_t end = completed[index] + std::min<uint64_t>(fresh, shape.depth);
    while (completed[index] < end) {
      const uint64_t number = completed[index];
      const uint8_t* wqe = lines.sq + number % shape.depth * 64;
      const uint32_t segments = wqe[7] & 0x3f;
      const uint64_t blocks = std::max<uint64_t>(1, (segments * 16 + 63) / 64);
      for (uint64_t i = 0; i < blocks; ++i) keep(index, lines.sq + (number + i) % shape.depth * 64, 64);
      completed[index] += blocks;
      if (wqe[11] != EP_MLX5_CQ_UPDATE) continue;
      const uint64_t size = shape.collapsed ? 1 : shape.depth;
      const uint64_t owner = shape.collapsed ? 0 : cqes[index] / size & 1;
      const uint64_t counter = __builtin_bswap16(static_cast<uint16_t>(number));
      const uint64_t tail = owner << 56 | counter << 32 | __builtin_bswap32(memory->mlx5.qps[index].qpn);
      auto* entry = reinterpret_cast<uint64_t*>(lines.cq + cqes[index]++ % size * 64);
      std::atomic_ref<uint64_t>(entry[7]).store(tail, std::memory_order_release);
    }
    EP_CHECK_EQ(completed[index], end);
  }

  // Every other time the completions of a doorbell come last to first.
  void serve_efa(uint32_t index) {
    efa_lines& lines = memory->efa.lines[index];
    const ep_efa_qp& qp = memory->efa.qps[index];
    const bool pr = shape.way == post_way::pr || shape.way == post_way::pr_lanes;
    const uint64_t bytes = pr ? EP_EFA_WQE_BYTES : qp.wqe_bytes;
    const uint32_t told = std::atomic_ref<uint32_t>(lines.doorbell).load(std::memory_order_acquire);
    const uint32_t fresh = told - static_cast<uint32_t>(completed[index]);
    if (fresh == 0) return;
    EP_CHECK(fresh <= shape.depth);
    if (fresh > shape.depth) return;
    const uint64_t begin = completed[index];
    for (uint64_t i = 0; i < fresh; ++i) keep(index, reinterpret_cast<const uint8_t*>(lines.sq) + (begin + i) % shape.depth * bytes, bytes);
    completed[index] += fresh;
    const bool backwards = ++turns % 2 == 0;
    for (uint64_t i = 0; i < fresh; ++i) complete(lines, qp, cqes[index]++, backwards ? begin + fresh - 1 - i : begin + i);
    std::atomic_ref<uint64_t>(lines.written).store(completed[index], std::memory_order_release);
  }
  void complete(efa_lines& lines, const ep_efa_qp& qp, uint64_t at, uint64_t number) const {
    const uint64_t phase = (at & shape.depth) == 0 ? 1 : 0;
    const uint64_t flags = phase | EP_EFA_QUEUE_SEND << 1 | EP_EFA_OPCODE_RDMA_WRITE << 4;
    uint64_t head = (number & 0xffff) | flags << 24 | static_cast<uint64_t>(qp.qpn) << 32;
    uint64_t* entry = lines.cq + at % shape.depth * (qp.cq_entry_bytes / 8);
    if (shape.wide_ids) {
      head |= (number >> 16 & 0xffff) << 48;
      std::atomic_ref<uint64_t>(entry[1]).store(number >> 32, std::memory_order_relaxed);
    }
    std::atomic_ref<uint64_t>(*entry).store(head, std::memory_order_release);
  }
};

inline server* serving = nullptr;

inline void post_serve(post_log&) { serving->serve(); }

} // namespace ep::test
