// WQEs of a GPU beside those of the host: post_bytes_test [seeds of each kind, 12]. The same posts are made by the host and by a kernel into the same rings, which lie in pinned host memory, and all that
// either leaves behind is compared byte for byte: every WQE of every round of a ring, doorbells in their order, records, registers, accounts. Then blocks of a GPU put over the software EFA
// (post_traffic.cpp). Where there is no GPU, runs of the host alone are compared, and it ends with 2. Built and run by run.mjs.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "../../core/device/fast.hpp"
#include "../check.hpp"
#include "../device/efa_world.hpp"
#include "gpu_arena.hpp"
#include "post_kernels.hpp"
#include "post_script.h"
#include "post_traffic.hpp"

using namespace ep::test;

namespace {

uint64_t address_of(const void* at) { return reinterpret_cast<uint64_t>(at); }

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

// ---- the memory of all runs, at one address

struct post_memory {
  mlx5_rig mlx5;
  efa_rig efa;
  post_log log;
  uint64_t steps[64 * 1024];
};
post_memory* memory = nullptr;

void pattern(uint8_t* bytes, size_t count, uint32_t from) {
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(from + i * 37 + (i >> 8));
}

template <size_t Count> void watch(post_log& log, const uint64_t (&addresses)[Count], uint64_t bytes) {
  for (const uint64_t address : addresses) log.watch[log.watched++] = {address, bytes, 0};
}

void set_up(mlx5_rig& rig, post_log& log, const post_shape& shape) {
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

void set_up(efa_rig& rig, const post_shape& shape) {
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

// ---- the NIC of these runs: keeps a copy of every WQE that a doorbell told of, and completes it

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

server* serving = nullptr;

} // namespace

namespace ep::test {
void post_serve(post_log&) { serving->serve(); }
} // namespace ep::test

namespace {

// ---- one run, and what it leaves

struct post_outcome {
  bool ok = false;
  std::vector<uint8_t> wqes[efa_rig_qps];
  std::vector<std::pair<uint64_t, uint64_t>> rings;
  std::vector<uint8_t> rig;
  std::vector<uint8_t> steps;
};

// `run` of the arguments; a NIC serves before, while, and after.
template <class Run> post_outcome post(const post_shape& shape, const std::vector<uint8_t>& steps, uint32_t count, const Run& run) {
  std::memset(static_cast<void*>(memory), 0, sizeof *memory);
  std::memcpy(memory->steps, steps.data(), steps.size());
  post_log& log = memory->log;
  if (is_mlx5(shape.way)) set_up(memory->mlx5, log, shape);
  else set_up(memory->efa, shape);
  server nic;
  nic.shape = shape;
  serving = &nic;
  post_outcome seen;
  seen.ok = run(post_arguments{&memory->mlx5, &memory->efa, memory->steps, count, shape.lanes, &log});
  nic.serve();
  for (uint32_t i = 0; i < efa_rig_qps; ++i) seen.wqes[i] = std::move(nic.wqes[i]);
  EP_CHECK(log.rings <= post_most_rings);
  for (uint64_t i = 0; i < std::min<uint64_t>(log.rings, post_most_rings); ++i) seen.rings.emplace_back(log.ring[i].address, log.ring[i].value);
  const auto* rig = is_mlx5(shape.way) ? reinterpret_cast<const uint8_t*>(&memory->mlx5) : reinterpret_cast<const uint8_t*>(&memory->efa);
  seen.rig.assign(rig, rig + (is_mlx5(shape.way) ? sizeof(mlx5_rig) : sizeof(efa_rig)));
  const auto* after = reinterpret_cast<const uint8_t*>(memory->steps);
  seen.steps.assign(after, after + steps.size());
  return seen;
}

struct host_machine {
  bool (*fast)(const post_arguments&);
  bool (*simt)(const post_arguments&, uint64_t seed);
};
template <post_way Way, uint32_t Marks> bool on_fast(const post_arguments& given) {
  const ep::kernel_environment environment;
  const ep::fast_context base{environment, 0, 1, nullptr};
  ep::asking_context<ep::fast_context> ctx(base, *given.log);
  const bool ok = ep::post_run<Way, Marks>(ctx, given);
  ctx.look();
  return ok;
}
template <post_way Way, uint32_t Marks> bool on_simt(const post_arguments& given, uint64_t seed) {
  const ep::kernel_environment environment;
  ep::simt_schedule schedule = seeded(seed);
  schedule.point_limit = 20'000'000;
  ep::simt_launch launch = shape(1, given.lanes, given.lanes);
  launch.environment = &environment;
  launch.kernel = [&](ep::simt_context& base) {
    ep::asking_context<ep::simt_context> ctx(base, *given.log);
    const bool ok = ep::post_run<Way, Marks>(ctx, given);
    if (base.lane() == 0) ctx.look();
    return ok;
  };
  const ep::simt_result result = ep::simt_run_together(schedule, {launch});
  if (!result.ok) std::fprintf(stderr, "%s\n", result.report.c_str());
  return result.ok;
}
template <uint32_t Marks, post_way Way> constexpr host_machine machine_by() {
  constexpr uint32_t marks = is_mlx5(Way) ? 0 : Marks;
  return {on_fast<Way, marks>, on_simt<Way, marks>};
}
template <uint32_t Marks, size_t... Way> host_machine machine_of(post_way way, std::index_sequence<Way...>) {
  static constexpr host_machine all[] = {machine_by<Marks, static_cast<post_way>(Way)>()...};
  return all[static_cast<size_t>(way)];
}
// `marks`: of EFA, the way of a GPU.
host_machine machine_of(post_way way, bool marks) {
  return marks ? machine_of<ep::by_marks>(way, std::make_index_sequence<post_ways>()) : machine_of<0>(way, std::make_index_sequence<post_ways>());
}

void* stream = nullptr; // null: there is no GPU

// `asks`: the NIC serves when it is asked, otherwise all the time.
bool on_gpu(const post_arguments& given, post_way way, bool asks, uint32_t blocks = 1) {
  EP_CHECK_EQ(blocks == 1 ? gpu_post(stream, way, asks, given) : gpu_post_together(stream, way, blocks, given), 0);
  post_log& log = *given.log;
  int error = 0;
  while (!gpu_over(stream, &error)) {
    const uint64_t asked = std::atomic_ref<uint64_t>(log.asked).load(std::memory_order_acquire);
    if (asks && asked == log.answered) continue;
    serving->serve();
    if (asks) std::atomic_ref<uint64_t>(log.answered).store(asked, std::memory_order_release);
  }
  EP_CHECK_EQ(error, 0);
  const bool ok = log.ok == 1;
  log.ok = 0;
  return ok;
}

template <class Bytes> bool same_bytes(const char* what, const Bytes& left, const Bytes& right, uint64_t line) {
  if (left == right) return true;
  size_t at = 0;
  while (at < left.size() && at < right.size() && left[at] == right[at]) ++at;
  std::fprintf(stderr, "  %s: %zu and %zu bytes, the first that differs is byte %llu of %llu", what, left.size(), right.size(), static_cast<unsigned long long>(at % line), static_cast<unsigned long long>(at / line));
  if (at < left.size() && at < right.size()) std::fprintf(stderr, ": %02x and %02x", left[at], right[at]);
  std::fprintf(stderr, "\n");
  return false;
}

enum class compared { wqes, everything };

void compare(const char* who, const post_shape& shape, const post_outcome& left, const post_outcome& right, compared how) {
  bool same = left.ok && right.ok;
  if (!same) std::fprintf(stderr, "  %d and %d ended well\n", left.ok, right.ok);
  const uint64_t bytes = !is_mlx5(shape.way) && shape.inline_write ? EP_EFA_WIDE_WQE_BYTES : 64;
  for (uint32_t i = 0; i < efa_rig_qps; ++i) same = same_bytes("WQEs", left.wqes[i], right.wqes[i], bytes) && same;
  if (how == compared::everything && left.rings != right.rings) {
    size_t at = 0;
    while (at < left.rings.size() && at < right.rings.size() && left.rings[at] == right.rings[at]) ++at;
    std::fprintf(stderr, "  %zu and %zu doorbells, number %zu differs\n", left.rings.size(), right.rings.size(), at);
    same = false;
  }
  if (how == compared::everything) {
    same = same_bytes("memory", left.rig, right.rig, 64) && same;
    same = same_bytes("steps", left.steps, right.steps, 64) && same;
  }
  EP_CHECK(same);
  if (!same) std::fprintf(stderr, "%s: %s\n", who, shape.text().c_str());
}

// ---- the steps

template <class Step> std::vector<uint8_t> as_bytes(const std::vector<Step>& steps) {
  const auto* begin = reinterpret_cast<const uint8_t*>(steps.data());
  return {begin, begin + steps.size() * sizeof(Step)};
}

// Every kind of request alone and in batches, then any; WQEs enough for some rounds of the ring.
std::vector<mlx5_step> mlx5_posts_of(const post_shape& shape, bool whole, bool named) {
  ep::random_source random(shape.seed * 977 + 1);
  std::vector<mlx5_step> steps;
  const auto add = [&](mlx5_op op, uint32_t count) {
    mlx5_step step{};
    step.op = op;
    step.count = count;
    step.bytes = 1 + random.below(200);
    step.from = random.below(2048);
    step.to = steps.size() << 12;
    step.value = random.next();
    if (op == mlx5_op::long_inline) {
      step.bytes = EP_IBGDA_MAX_INLINE + 1 + random.below(EP_IBGDA_MAX_LONG_INLINE - EP_IBGDA_MAX_INLINE);
      step.count = ep::mlx5_inline_blocks(static_cast<uint32_t>(step.bytes)) + 1;
    }
    if (op == mlx5_op::masked_swap) step.count = ep::mlx5_masked_swap_blocks + 1;
    steps.push_back(step);
  };
  const auto ops = static_cast<uint32_t>(whole ? mlx5_op::masked_swap : mlx5_op::mixed) + 1;
  for (uint32_t i = 0; i < 3 * ops + 60; ++i) {
    const auto op = static_cast<mlx5_op>(i < 3 * ops ? i % ops : random.below(ops));
    if (named && (op == mlx5_op::nop || op >= mlx5_op::mixed)) continue;
    add(op, i < ops ? 1 : 1 + static_cast<uint32_t>(random.below(i % 7 == 0 ? shape.depth : shape.depth / 2)));
  }
  return steps;
}

std::vector<mlx5_step> mlx5_puts_of(const post_shape& shape, bool whole) {
  ep::random_source random(shape.seed * 991 + 2);
  std::vector<mlx5_step> steps;
  for (uint32_t i = 0; i < 100; ++i) {
    mlx5_step step{};
    step.value = random.below(1000);
    step.slot = random.below(4) == 0 ? EP_NO_SLOT : random.below(16);
    step.to = random.below(1 << 20);
    step.from = random.below(64);
    step.bytes = 1 + random.below(i % 3 == 0 ? EP_IBGDA_MAX_INLINE : 150);
    step.rows = random.below(8);
    step.stride = step.bytes + (i % 2 == 0 ? 0 : random.below(20));
    step.op = mlx5_op::put_rows;
    if (i % 5 == 1) {
      step.op = mlx5_op::signal;
      step.peer = static_cast<int32_t>(i / 5 % 2);
      step.slot = random.below(16);
    } else if (i % 5 == 2 && whole) {
      step.op = mlx5_op::put_loose;
      step.rows = 1;
      step.stride = step.bytes = EP_IBGDA_MAX_INLINE + 1 + random.below(EP_IBGDA_MAX_LONG_INLINE - EP_IBGDA_MAX_INLINE);
    }
    steps.push_back(step);
  }
  return steps;
}

std::vector<ep_gin_step> gin_steps_of(const post_shape& shape) {
  ep::random_source random(shape.seed * 1009 + 3);
  const bool pr = shape.way == post_way::pr;
  const uint32_t ours[] = {EP_GIN_PUT, EP_GIN_PUT_VALUE, EP_GIN_PUT, EP_GIN_GET, EP_GIN_SIGNAL, EP_GIN_PUT, EP_GIN_PUT_VALUE, EP_GIN_READ_COUNTER, EP_GIN_PUT_VALUE, EP_GIN_FLUSH, EP_GIN_LOOK_COUNTER, EP_GIN_RESET_COUNTER};
  const uint32_t theirs[] = {EP_GIN_PUT, EP_GIN_PUT_VALUE, EP_GIN_SIGNAL, EP_GIN_PUT, EP_GIN_PUT_VALUE, EP_GIN_PUT, EP_GIN_FLUSH};
  std::vector<ep_gin_step> steps;
  for (uint32_t i = 0; i < 160; ++i) {
    ep_gin_step step{};
    step.op = pr ? theirs[random.below(std::size(theirs))] : ours[random.below(std::size(ours))];
    step.peer = 1;
    step.bytes = step.op == EP_GIN_PUT_VALUE ? (pr ? (i % 2 == 0 ? 8 : 2) : 1u << random.below(4)) : 1 + random.below(std::min<uint64_t>(2000, i % 8 == 0 ? 3 * shape.max_message : shape.max_message));
    if (step.op == EP_GIN_PUT && random.below(10) == 0) step.bytes = 0;
    step.to = random.below(2048);
    step.from = random.below(2048);
    step.value = random.next();
    step.signal = static_cast<uint32_t>(random.below(2));
    step.add = static_cast<uint32_t>(random.below(3) == 0 ? random.below(6) : random.below(2));
    step.counter = static_cast<uint32_t>(random.below(2));
    step.flags = (random.below(3) != 0 ? EP_GIN_AGGREGATE : 0u) | (random.below(3) == 0 ? EP_GIN_COUNTED : 0u);
    steps.push_back(step);
  }
  steps.push_back({EP_GIN_FLUSH, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0});
  return steps;
}

std::vector<ep_gin_step> lane_steps_of(const post_shape& shape) {
  ep::random_source random(shape.seed * 1013 + 4);
  std::vector<ep_gin_step> steps;
  for (uint32_t i = 0; i < 40; ++i) {
    ep_gin_step step{};
    step.op = i % 9 == 8 ? EP_GIN_FLUSH : EP_GIN_PUT;
    step.bytes = 1 + random.below(std::min<uint64_t>(shape.max_message, 64));
    step.to = random.below(1024);
    step.from = random.below(1024);
    step.value = i % 3 == 0 ? UINT32_MAX : random.next() & random.next();
    step.signal = static_cast<uint32_t>(random.below(2));
    step.add = static_cast<uint32_t>(random.below(2));
    step.counter = static_cast<uint32_t>(random.below(2));
    step.flags = (random.below(2) != 0 ? EP_GIN_AGGREGATE : 0u) | (random.below(2) == 0 ? EP_GIN_COUNTED : 0u);
    steps.push_back(step);
  }
  steps.push_back({EP_GIN_FLUSH, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0});
  return steps;
}

std::vector<ep_gin_step> efa_rows_of(const post_shape& shape) {
  ep::random_source random(shape.seed * 1019 + 5);
  std::vector<ep_gin_step> steps;
  for (uint32_t i = 0; i < 100; ++i) {
    ep_gin_step step{};
    step.op = i % 5 == 1 ? EP_GIN_SIGNAL : EP_GIN_PUT;
    step.to = random.below(1024);
    step.from = random.below(64);
    step.bytes = 1 + random.below(150);
    step.value = random.below(8);
    step.found = step.bytes + (i % 2 == 0 ? 0 : random.below(20));
    step.signal = static_cast<uint32_t>(random.below(3)); // 2: none
    step.add = static_cast<uint32_t>(random.below(i % 8 == 0 ? 20 : 3));
    steps.push_back(step);
  }
  return steps;
}

// ---- the same posts by everyone

void everyone(const post_shape& shape) {
  const bool mlx5 = is_mlx5(shape.way);
  const bool lanes = shape.way == post_way::lanes_device || shape.way == post_way::lanes_block || shape.way == post_way::pr_lanes;
  const bool puts = shape.way >= post_way::put_in_turn && mlx5;
  const bool whole = shape.way != post_way::lock && shape.way != post_way::put_lock;
  std::vector<uint8_t> steps;
  uint32_t count = 0;
  const auto take = [&](const auto& made) {
    steps = as_bytes(made);
    count = static_cast<uint32_t>(made.size());
  };
  if (puts) take(mlx5_puts_of(shape, whole));
  else if (mlx5) take(mlx5_posts_of(shape, whole, false));
  else if (lanes) take(lane_steps_of(shape));
  else if (shape.way == post_way::efa_endpoint) take(efa_rows_of(shape));
  else take(gin_steps_of(shape));

  const auto host = [&](bool marks, uint64_t seed) {
    return post(shape, steps, count, [&](const post_arguments& given) {
      const host_machine machine = machine_of(shape.way, marks);
      return seed == 0 && given.lanes == 1 ? machine.fast(given) : machine.simt(given, seed + 1);
    });
  };
  const post_outcome wanted = host(true, 0);
  uint64_t bytes = 0;
  for (const std::vector<uint8_t>& each : wanted.wqes) bytes += each.size();
  EP_CHECK(bytes > 2 * shape.depth * uint64_t{64});
  EP_CHECK(!wanted.rings.empty());
  compare("two schedules", shape, wanted, host(true, shape.seed + 1), compared::everything);
  /* Where the ring is full, either way rings for what was left at another moment. */
  if (!mlx5) compare("in turn, by marks", shape, host(false, 0), wanted, compared::wqes);
  if (mlx5 && shape.lanes != 1) {
    post_shape alone = shape;
    alone.lanes = 1;
    compare("a lane, a warp", shape, post(alone, steps, count, [&](const post_arguments& given) { return machine_of(shape.way, true).fast(given); }), wanted, compared::everything);
  }
  if (stream == nullptr) return;
  const auto gpu = [&](bool asks) { return post(shape, steps, count, [&](const post_arguments& given) { return on_gpu(given, shape.way, asks); }); };
  compare("host, GPU", shape, wanted, gpu(true), compared::everything);
  const bool kept = shape.way == post_way::in_turn_device || shape.way == post_way::ringer_device || shape.way == post_way::lock || shape.way == post_way::put_ringer || shape.way == post_way::gin_device ||
                    shape.way == post_way::lanes_device || shape.way == post_way::efa_endpoint || shape.way == post_way::pr || shape.way == post_way::pr_lanes;
  if (!kept) return;
  /* Counts that steps read are then as far as the NIC has come. */
  compare("host, GPU beside a NIC", shape, wanted, gpu(false), compared::wqes);
}

// Blocks that share a queue pair: each WQE of the ring is, byte for byte, what the host writes for that place of that block's post, and none is missing.
void blocks_together(const post_shape& shape, uint32_t blocks) {
  const std::vector<mlx5_step> steps = mlx5_posts_of(shape, shape.way != post_way::lock, true);
  const post_outcome seen = post(shape, as_bytes(steps), static_cast<uint32_t>(steps.size()), [&](const post_arguments& given) { return on_gpu(given, shape.way, false, blocks); });
  EP_CHECK(seen.ok);
  const std::vector<uint8_t>& wqes = seen.wqes[1];
  uint64_t posted = 0;
  for (const mlx5_step& step : steps) posted += step.count;
  EP_CHECK_EQ(wqes.size(), posted * blocks * 64);
  std::vector<uint32_t> found(blocks * steps.size() * post_most_depth);
  uint64_t different = 0;
  for (uint64_t number = 0; number < wqes.size() / 64; ++number) {
    const uint8_t* wqe = wqes.data() + number * 64;
    uint64_t remote = 0;
    std::memcpy(&remote, wqe + 16, 8);
    const uint64_t away = __builtin_bswap64(remote) - mlx5_remote;
    const auto block = static_cast<uint32_t>(away >> 40);
    const auto i = static_cast<uint32_t>(away >> 32 & 0xff);
    const uint64_t index = (away & 0xffffffff) >> 12;
    if (block >= blocks || index >= steps.size() || i >= steps[index].count) {
      ++different;
      continue;
    }
    // A shorter request leaves the rest of its slot to who was there before.
    alignas(16) uint8_t own[64];
    if (number >= shape.depth) std::memcpy(own, wqe - uint64_t{shape.depth} * 64, 64);
    else std::memset(own, 0, 64);
    const bool signalled = shape.way == post_way::lock || i + 1 == steps[index].count;
    ep::mlx5_step_build{memory->mlx5, steps[index], block}(i, ep::mlx5_writer{reinterpret_cast<ep::vector16*>(own), memory->mlx5.qps[1].qpn, number, signalled});
    different += std::memcmp(own, wqe, 64) != 0 ? 1 : 0;
    ++found[(block * steps.size() + index) * post_most_depth + i];
  }
  EP_CHECK_EQ(different, 0u);
  for (uint32_t block = 0; block < blocks; ++block) {
    for (size_t index = 0; index < steps.size(); ++index) {
      for (uint32_t i = 0; i < steps[index].count; ++i) EP_CHECK_EQ(found[(block * steps.size() + index) * post_most_depth + i], 1u);
    }
  }
}

// The same of the facade over EFA: all blocks carry out the same list, in which every step has a place of its own.
void blocks_put_together(const post_shape& shape, uint32_t blocks) {
  constexpr uint64_t apart = 16;
  ep::random_source random(shape.seed * 1021 + 6);
  std::vector<ep_gin_step> steps;
  for (uint64_t i = 0; i < sizeof memory->efa.source / apart; ++i) {
    ep_gin_step step{};
    step.op = i % 4 == 1 ? EP_GIN_PUT_VALUE : i % 4 == 3 ? EP_GIN_GET : EP_GIN_PUT;
    step.peer = 1;
    step.to = step.from = i * apart;
    step.bytes = step.op == EP_GIN_PUT_VALUE ? 8 : 1 + random.below(apart);
    step.value = random.next();
    step.signal = static_cast<uint32_t>(random.below(2));
    step.add = step.op == EP_GIN_GET ? 0 : static_cast<uint32_t>(random.below(2));
    step.counter = static_cast<uint32_t>(random.below(2));
    step.flags = (random.below(3) != 0 ? EP_GIN_AGGREGATE : 0u) | (step.op == EP_GIN_PUT && random.below(3) == 0 ? EP_GIN_COUNTED : 0u);
    steps.push_back(step);
  }
  const auto puts = static_cast<uint32_t>(steps.size());
  steps.push_back({EP_GIN_FLUSH, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0});
  const post_outcome seen = post(shape, as_bytes(steps), puts + 1, [&](const post_arguments& given) { return on_gpu(given, shape.way, false, blocks); });
  EP_CHECK(seen.ok);
  const ep::kernel_environment environment;
  ep::fast_context ctx{environment, 0, 1, nullptr};
  efa_rig& rig = memory->efa;
  std::vector<uint32_t> found(puts);
  uint64_t different = 0;
  for (uint32_t q = 0; q < efa_rig_qps; ++q) {
    const ep_efa_qp& qp = rig.qps[q];
    EP_CHECK_EQ(seen.wqes[q].size(), qp.taken * qp.wqe_bytes);
    for (uint64_t number = 0; number < seen.wqes[q].size() / qp.wqe_bytes; ++number) {
      uint64_t words[EP_EFA_WIDE_WQE_BYTES / 8] = {};
      uint64_t own[EP_EFA_WIDE_WQE_BYTES / 8] = {};
      std::memcpy(words, seen.wqes[q].data() + number * qp.wqe_bytes, qp.wqe_bytes);
      const uint64_t index = (words[5] - rig.remotes[1].address) / apart;
      if (index >= puts) {
        ++different;
        continue;
      }
      const ep_gin_step& step = steps[index];
      ep::efa_put put;
      put.act(ep::gin_signal_add{step.signal, step.add});
      if ((step.flags & EP_GIN_COUNTED) != 0) put.act(ep::gin_counter_inc{step.counter});
      EP_CHECK(put.at(ctx, rig.device, {nullptr, 2}, 1, rig.part, step.to, rig.part, step.from, step.bytes, nullptr));
      const ep::efa_writer<ep::fast_context> writer{ctx, address_of(own), number, qp.wqe_bytes, (number & qp.depth) != 0 ? 1u : 0u, shape.wide_ids};
      if (step.op == EP_GIN_PUT_VALUE) {
        ep::efa_write_value(rig.device, qp, writer, put, step.value);
      } else if (step.op == EP_GIN_GET) {
        writer.read(ep::efa_target_of(rig.device, qp, 0, 1), put.remote, put.local, static_cast<uint32_t>(step.bytes));
      } else {
        ep::efa_write_piece(rig.device, qp, writer, put, put.slot, 0, static_cast<uint32_t>(step.bytes));
      }
      different += put.qp != q || std::memcmp(own, words, sizeof own) != 0 ? 1 : 0;
      ++found[index];
    }
  }
  EP_CHECK_EQ(different, 0u);
  for (const uint32_t times : found) EP_CHECK_EQ(times, blocks);
}

void all_posts(uint64_t seed) {
  for (uint32_t at = 0; at < post_ways; ++at) {
    post_shape shape;
    shape.way = static_cast<post_way>(at);
    shape.seed = seed;
    shape.depth = 16u << seed % 3;
    shape.collapsed = seed % 2 == 0;
    shape.max_message = seed % 3 == 0 ? 1024 : 64;
    shape.max_batch = seed % 4 == 0 ? 4 : 16;
    const bool pr = shape.way == post_way::pr || shape.way == post_way::pr_lanes;
    shape.inline_write = !pr && seed % 2 == 1;
    shape.wide_ids = !pr && seed % 4 >= 2;
    if (pr) {
      shape.max_message = 1024; // it cuts nothing
      // HAZARD: it waits for room before it rings for what was aggregated, so that a batch that was left and the next one have to fit the ring at once.
      shape.max_batch = std::min(shape.max_batch, shape.depth / 2);
    }
    const bool endpoint = (shape.way >= post_way::put_in_turn && is_mlx5(shape.way)) || shape.way == post_way::efa_endpoint;
    const bool lanes = shape.way == post_way::lanes_device || shape.way == post_way::lanes_block || shape.way == post_way::pr_lanes;
    const bool lone = !is_mlx5(shape.way) && !lanes && !endpoint;
    for (const uint32_t count : {1u, 32u}) {
      if ((count == 1 && lanes) || (count != 1 && lone)) continue;
      shape.lanes = count;
      for (uint32_t sharing = 0; sharing < (endpoint ? 3u : 1u); ++sharing) {
        shape.sharing = sharing;
        everyone(shape);
      }
    }
    if (stream == nullptr) continue;
    if (shape.way == post_way::in_turn_device || shape.way == post_way::ringer_device || shape.way == post_way::lock) {
      for (const uint32_t count : {1u, 32u}) {
        shape.lanes = count;
        blocks_together(shape, 2 + static_cast<uint32_t>(seed % 6));
      }
    }
    if (shape.way == post_way::gin_device) blocks_put_together(shape, 2 + static_cast<uint32_t>(seed % 6));
  }
}

} // namespace

int main(int count, char** words) {
  // HAZARD: before the first call of CUDA. A kernel that is launched for the first time would be loaded then, behind the receiver that waits for it.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  const auto seeds = static_cast<uint64_t>(count > 1 ? std::atoi(words[1]) : 12);
  const bool there = gpu_is_there() && arena::start(size_t{4} << 30);
  if (there) stream = gpu_stream();
  memory = new post_memory;
  for (uint64_t seed = 0; seed < seeds; ++seed) all_posts(seed);
  if (!there) {
    std::fprintf(stderr, "no GPU, or no pinned memory: only the host's runs were compared\n");
    return ep::check::finish() == 0 ? 2 : 1;
  }
  void* other = gpu_stream();
  for (uint64_t seed = 0; seed < 2 * seeds; ++seed) {
    for (const traffic_way way : {traffic_way::gin, traffic_way::gin_lanes, traffic_way::endpoint, traffic_way::pr, traffic_way::pr_lanes}) traffic(way, seed, stream, other);
    values(seed, stream);
  }
  return ep::check::finish();
}
