#include "post_bench.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <sched.h>

#include "device/fast.hpp"
#include "ep/device/efa_gin.h"
#include "ep/device/efa_pr_gin.h"

namespace ep::efa {
namespace {

constexpr uint32_t depth = 1024;
constexpr uint32_t max_batch = 16;
constexpr uint32_t cqe_bytes = 16;
constexpr uint64_t put_bytes = 64;
constexpr uint64_t part_bytes = depth * put_bytes;

template <class T> uint64_t address_of(const T* at) { return reinterpret_cast<uint64_t>(at); }

// A context of one data queue pair without a NIC, in both protocols' structs. Rank 0 of two.
struct drained_context_memory {
  drained_context_memory() {
    qp.header = {EP_MAGIC_EFA_QP, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof qp};
    qp.sq = address_of(sq.data());
    qp.doorbell = address_of(&doorbell);
    qp.cq = address_of(cq.data());
    qp.written = address_of(&written);
    qp.finished = address_of(finished.data());
    qp.targets = address_of(targets);
    qp.target_slots = 1;
    qp.depth = depth;
    qp.wqe_bytes = EP_EFA_WQE_BYTES;
    qp.max_batch = max_batch;
    qp.cq_depth = depth;
    qp.cq_entry_bytes = cqe_bytes;
    qp.qpn = 0x123;
    qp.requests = address_of(requests.data());
    device.header = {EP_MAGIC_EFA, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof device};
    device.world_size = 2;
    device.qps = address_of(&qp);
    device.qp_count = 1;
    device.max_message = uint64_t{1} << 30;
    device.scratch_remotes = address_of(remotes);
    memory.remotes = address_of(remotes);
    memory.address = 0x2000;
    memory.byte_length = part_bytes;
    memory.lkey = 2;

    ep_efa_pr_wq& wq = pr_qp.sq.wq;
    wq.queue_mask = depth - 1;
    wq.queue_size_shift = static_cast<uint32_t>(__builtin_ctz(depth));
    wq.max_batch = max_batch;
    wq.buf = qp.sq;
    wq.db = qp.doorbell;
    pr.data.qp = address_of(&pr_qp);
    pr.data.address_handles = address_of(pr_handles);
    pr.data.remote_qpns = address_of(pr_qpns);
    pr.data.qkey = address_of(pr_qkeys);
    pr.data.local_cntr_value = qp.written;
    pr.data.sq_size = depth;
    pr.nranks = 2;
    pr_part.head = {2, 2, 0x2000};
    pr_part.peers[1] = {0x1000, 1, 0};
  }
  drained_context_memory(const drained_context_memory&) = delete;

  // Completes all that the doorbell tells of, as a NIC does for either protocol: every WQE asks for an entry of the CQ, which only ours takes out, and is counted. By one thread at a
  // time.
  void drain() {
    if (draining.exchange(1, std::memory_order_acquire) != 0) return;
    const uint32_t told = std::atomic_ref<uint32_t>(doorbell).load(std::memory_order_acquire);
    const uint64_t end = done + (told - static_cast<uint32_t>(done));
    uint64_t* const entries = cq.data();
    for (uint64_t number = done; number != end; ++number) {
      const uint64_t flags = 0x22u | ((number & depth) == 0 ? 1u : 0u);
      std::atomic_ref<uint64_t>(entries[(number & (depth - 1)) * (cqe_bytes / 8)]).store((number & 0xffffu) | flags << 24 | uint64_t{0x123} << 32, std::memory_order_release);
    }
    done = end;
    std::atomic_ref<uint64_t>(written).store(end, std::memory_order_release);
    draining.store(0, std::memory_order_release);
  }

  // Whether the ring holds the last `puts` of them: each in its place with the phase of its round, whole.
  bool holds(uint64_t puts) const {
    if (doorbell != static_cast<uint32_t>(puts)) return false;
    for (uint64_t number = puts > depth ? puts - depth : 0; number < puts; ++number) {
      const uint64_t* wqe = &sq[(number & (depth - 1)) * (EP_EFA_WQE_BYTES / 8)];
      const uint64_t phase = (number & depth) != 0 ? 1 : 0;
      if ((wqe[0] >> 24 & 1) != phase || (wqe[4] & 0xffffffff) != put_bytes || (wqe[6] & 0xffffffff) != put_bytes) return false;
      if (wqe[5] - 0x1000 != wqe[7] - 0x2000 || wqe[5] - 0x1000 >= part_bytes) return false;
    }
    return true;
  }

  std::vector<uint64_t> sq = std::vector<uint64_t>(depth * EP_EFA_WQE_BYTES / 8);
  std::vector<uint64_t> cq = std::vector<uint64_t>(depth * cqe_bytes / 8);
  std::vector<uint64_t> finished = std::vector<uint64_t>(depth / 64);
  std::vector<ep_efa_request> requests = std::vector<ep_efa_request>(depth);
  ep_efa_target targets[2] = {{1, 2, 3}, {4, 5, 6}};
  ep_efa_remote remotes[2] = {{0x3000, 3, 0}, {0x1000, 1, 0}};
  uint16_t pr_handles[2] = {1, 4};
  uint16_t pr_qpns[2] = {2, 5};
  uint32_t pr_qkeys[2] = {3, 6};
  struct {
    ep_efa_pr_mr head;
    ep_efa_pr_mr_peer peers[2];
  } pr_part{};
  alignas(64) uint32_t doorbell = 0;
  alignas(64) uint64_t written = 0;
  alignas(64) std::atomic<uint32_t> draining{0};
  uint64_t done = 0;
  alignas(64) ep_efa_qp qp{};
  alignas(64) ep_efa_device device{};
  ep_efa_memory memory{};
  alignas(64) ep_efa_pr_device pr{};
  alignas(64) ep_efa_pr_qp pr_qp{};
};

struct drained_context {
  drained_context_memory& own;
  uint32_t lane() const { return 0; }
  void point() const {}
  template <class Look> bool wait_for(const Look& look, uint64_t, int32_t, uint32_t stage, ep_kernel_status*) const {
    uint64_t found = 0;
    for (uint32_t looks = 1; !look(&found); ++looks) {
      if (stage == EP_STAGE_ROOM) own.drain();
      cpu_relax();
      if (looks % 64 == 0) sched_yield();
    }
    return true;
  }
  void fail(ep_kernel_status*, uint32_t, int32_t, uint32_t, uint64_t, uint64_t) const {}
  void wake(uint64_t) const {}
};

// The same, counting what goes to the device and what is fenced.
struct counting_context : drained_context {
  put_counts& counts;
  void register_store64(uint64_t address, uint64_t value) const {
    ++counts.words;
    *reinterpret_cast<uint64_t*>(address) = value;
  }
  void register_store32(uint64_t address, uint32_t value) const {
    ++counts.doorbells;
    *reinterpret_cast<uint32_t*>(address) = value;
  }
  void register_fence() const { ++counts.register_fences; }
  void system_fence() const { ++counts.system_fences; }
};

template <uint32_t Sharing> struct free_way {
  template <class Ctx> static bool put(Ctx& ctx, drained_context_memory& own, uint64_t at, bool aggregate) {
    gin_options options;
    options.aggregate = aggregate;
    return efa_gin<Sharing>{own.device}.put(ctx, thread_coop<Ctx>{ctx}, {nullptr, 2}, 1, own.memory, at, own.memory, at, put_bytes, gin_no_action{}, gin_no_action{}, options, nullptr);
  }
  static bool holds(const drained_context_memory& own, uint64_t puts) {
    const ep_efa_qp& qp = own.qp;
    return qp.taken == puts && qp.ready == puts && qp.rung == puts && qp.broken == EP_EFA_SOUND && own.holds(puts);
  }
};

struct lock_way {
  template <class Ctx> static bool put(Ctx& ctx, drained_context_memory& own, uint64_t at, bool aggregate) {
    efa_pr_options options;
    options.aggregate = aggregate;
    const ep_efa_pr_mr& part = own.pr_part.head;
    return efa_pr_gin{own.pr}.put(ctx, thread_coop<Ctx>{ctx}, {nullptr, 2}, 1, part, at, part, at, put_bytes, gin_no_action{}, gin_no_action{}, options, nullptr);
  }
  static bool holds(const drained_context_memory& own, uint64_t puts) {
    return own.pr.data.submitted_count == puts && own.pr_qp.sq.wq.wqes_pending == 0 && own.pr.data.sq_lock == 0 && own.holds(puts);
  }
};

template <class Way, class Ctx> bool put_all(Ctx& ctx, drained_context_memory& own, uint32_t run, uint64_t puts) {
  uint32_t left = run;
  for (uint64_t i = 0; i < puts; ++i) {
    const bool last = --left == 0;
    if (last) left = run;
    if (!Way::put(ctx, own, i % depth * put_bytes, !last)) return false;
  }
  return true;
}

struct put_job {
  bool (*plain)(drained_context_memory&, uint32_t run, uint64_t puts);
  bool (*counted)(drained_context_memory&, uint32_t run, uint64_t puts, put_counts&);
  bool (*holds)(const drained_context_memory&, uint64_t puts);
};

template <class Way> constexpr put_job job_of() {
  return {[](drained_context_memory& own, uint32_t run, uint64_t puts) {
            drained_context ctx{own};
            return put_all<Way>(ctx, own, run, puts);
          },
          [](drained_context_memory& own, uint32_t run, uint64_t puts, put_counts& counts) {
            counting_context ctx{{own}, counts};
            return put_all<Way>(ctx, own, run, puts);
          },
          Way::holds};
}

constexpr put_way ways[] = {{"lock", "device", true}, {"lock-free", "device", true}, {"lock-free", "block", true}, {"lock-free", "thread", false}};
constexpr put_job jobs[] = {job_of<lock_way>(), job_of<free_way<EP_EFA_SHARE_DEVICE>>(), job_of<free_way<EP_EFA_SHARE_BLOCK>>(), job_of<free_way<EP_EFA_SHARE_THREAD>>()};
static_assert(std::size(ways) == std::size(jobs));

failure wrong(uint32_t way) {
  return {EP_STATUS_SYSTEM, EPROTO, std::string(ways[way].name) + ", shared by " + ways[way].sharing + ": the queue pair does not hold what was put"};
}

bool in_range(uint32_t way, uint32_t run) { return way < std::size(ways) && run >= 1 && run <= depth / 2; }

} // namespace

std::span<const put_way> put_ways() { return ways; }

result<double> drained_puts_per_second(const put_load& load) {
  if (!in_range(load.way, load.run) || load.posters < 1) return failure{EP_STATUS_INVALID, 0, "way, posters or run are out of range"};
  const bool together = ways[load.way].shared;
  std::vector<std::unique_ptr<drained_context_memory>> queues(together ? 1 : load.posters);
  for (auto& one : queues) one = std::make_unique<drained_context_memory>();
  std::atomic<uint32_t> waiting{load.posters};
  std::atomic<int64_t> begin{INT64_MAX};
  std::atomic<bool> right{true};
  const uint64_t each = load.puts / load.posters / load.run * load.run;
  const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
  std::vector<std::thread> workers;
  for (uint32_t i = 0; i < load.posters; ++i) {
    workers.emplace_back([&, i] {
      waiting.fetch_sub(1);
      while (waiting.load() != 0) sched_yield();
      const int64_t first = now();
      for (int64_t seen = begin.load(); first < seen && !begin.compare_exchange_weak(seen, first);) {}
      if (!jobs[load.way].plain(*queues[together ? 0 : i], load.run, each)) right.store(false);
    });
  }
  for (std::thread& worker : workers) worker.join();
  const auto seconds = static_cast<double>(now() - begin.load()) * 1e-9;
  for (const auto& one : queues) {
    if (!jobs[load.way].holds(*one, each * load.posters / queues.size())) right.store(false);
  }
  if (!right.load()) return wrong(load.way);
  return static_cast<double>(each * load.posters) / seconds;
}

result<nothing> put_only(const char* way, const char* sharing, uint32_t run, uint64_t puts) {
  for (uint32_t i = 0; i < std::size(ways); ++i) {
    if (std::strcmp(ways[i].name, way) != 0 || std::strcmp(ways[i].sharing, sharing) != 0 || !in_range(i, run)) continue;
    drained_context_memory one;
    if (!jobs[i].plain(one, run, puts) || !jobs[i].holds(one, puts)) return wrong(i);
    return nothing{};
  }
  return failure{EP_STATUS_INVALID, 0, std::string("no way to put is called ") + way + ", shared by " + sharing};
}

result<put_counts> count_puts(uint32_t way, uint32_t run, uint64_t puts) {
  if (!in_range(way, run)) return failure{EP_STATUS_INVALID, 0, "way or run is out of range"};
  puts = puts / run * run;
  drained_context_memory one;
  put_counts counts;
  if (!jobs[way].counted(one, run, puts, counts) || !jobs[way].holds(one, puts)) return wrong(way);
  counts.puts = puts;
  return counts;
}

} // namespace ep::efa
