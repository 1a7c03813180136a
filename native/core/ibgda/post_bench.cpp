#include "post_bench.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <sched.h>

#include "device/fast.hpp"
#include "ep/device/mlx5_post.h"

namespace ep::ibgda {
namespace {

constexpr uint32_t depth = 1024;

// A queue pair without a NIC.
struct drained_queue {
  drained_queue() {
    std::memset(cqe, 0xff, sizeof cqe);
    sq.resize(depth * 8 + 8);
    qp.sq = (reinterpret_cast<uint64_t>(sq.data()) + 63) / 64 * 64;
    qp.dbr = reinterpret_cast<uint64_t>(dbr);
    qp.bf = reinterpret_cast<uint64_t>(bf);
    qp.cq = reinterpret_cast<uint64_t>(cqe);
    qp.marks = reinterpret_cast<uint64_t>(marks);
    qp.qpn = 0x1234;
    qp.depth = depth;
    qp.cq_depth = 1;
    qp.flags = EP_IBGDA_CQ_COLLAPSED;
  }
  // Completes all that the doorbell record tells of. HAZARD: by one thread at a time, or an older counter would follow a newer one.
  void drain() {
    if (draining.exchange(1, std::memory_order_acquire) != 0) return;
    const uint32_t posted = __builtin_bswap32(std::atomic_ref<uint32_t>(dbr[1]).load(std::memory_order_acquire));
    const uint64_t counter = __builtin_bswap16(static_cast<uint16_t>(posted - 1));
    if (posted != 0 || started) std::atomic_ref<uint64_t>(cqe[7]).store(counter << 32, std::memory_order_release);
    started = started || posted != 0;
    draining.store(0, std::memory_order_release);
  }
  std::vector<uint64_t> sq;
  alignas(64) uint64_t cqe[8];
  alignas(64) uint64_t bf[64] = {};
  alignas(64) uint64_t marks[depth / 64] = {};
  alignas(64) uint32_t dbr[2] = {};
  alignas(64) std::atomic<uint32_t> draining{0};
  bool started = false;
  alignas(64) ep_ibgda_qp qp{};
};

struct drained_context {
  drained_queue& own;
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

using job = bool (*)(drained_queue&, uint32_t batch, uint64_t posts);

// HAZARD: without `flatten` g++ takes two ways that are the same on the host for one function, and what is counted is a call.
template <class Post, uint32_t Sharing> [[gnu::flatten]] bool drained(drained_queue& own, uint32_t batch, uint64_t posts) {
  drained_context ctx{own};
  const lone_poster<drained_context> group{ctx};
  const auto build = [](uint32_t i, const mlx5_writer& writer) { writer.write({0x1000 + i * 64u, 1}, {0x2000 + i * 64u, 2}, 64); };
  for (uint64_t i = 0; i < posts; i += batch) {
    if (Post::template post<Sharing>(ctx, group, own.qp, batch, build, nullptr) == mlx5_refused) return false;
  }
  return true;
}

constexpr post_way ways[] = {{"lock", "device", true}, {"in-turn", "device", true}, {"ringer", "device", true}, {"in-turn", "block", true}, {"in-turn", "thread", false}};
constexpr job jobs[] = {drained<post_under_lock, EP_IBGDA_SHARE_DEVICE>, drained<post_in_turn, EP_IBGDA_SHARE_DEVICE>, drained<post_by_ringer, EP_IBGDA_SHARE_DEVICE>,
                        drained<post_in_turn, EP_IBGDA_SHARE_BLOCK>,     drained<post_in_turn, EP_IBGDA_SHARE_THREAD>};
static_assert(std::size(ways) == std::size(jobs));

} // namespace

std::span<const post_way> post_ways() { return ways; }

result<double> drained_posts_per_second(const post_load& load) {
  if (load.way >= std::size(ways) || load.posters < 1 || load.batch < 1 || load.batch > depth / 2) {
    return failure{EP_STATUS_INVALID, 0, "way, posters or batch are out of range"};
  }
  const bool together = ways[load.way].shared;
  std::vector<drained_queue> queues(together ? 1 : load.posters);
  std::atomic<uint32_t> waiting{load.posters};
  std::atomic<int64_t> begin{INT64_MAX};
  std::atomic<bool> right{true};
  const uint64_t each = load.posts / load.posters / load.batch * load.batch;
  const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
  std::vector<std::thread> workers;
  for (uint32_t i = 0; i < load.posters; ++i) {
    workers.emplace_back([&, i] {
      waiting.fetch_sub(1);
      while (waiting.load() != 0) sched_yield();
      const int64_t first = now();
      for (int64_t seen = begin.load(); first < seen && !begin.compare_exchange_weak(seen, first);) {}
      if (!jobs[load.way](queues[together ? 0 : i], load.batch, each)) right.store(false);
    });
  }
  for (std::thread& worker : workers) worker.join();
  const auto seconds = static_cast<double>(now() - begin.load()) * 1e-9;
  for (const drained_queue& one : queues) {
    if (one.qp.taken != each * load.posters / queues.size() || __builtin_bswap32(one.dbr[1]) != (one.qp.taken & EP_MLX5_DBR_COUNTER_MASK)) right.store(false);
  }
  if (!right.load()) return failure{EP_STATUS_SYSTEM, EPROTO, std::string(ways[load.way].name) + ": the queue pair does not hold what was posted"};
  return static_cast<double>(each * load.posters) / seconds;
}

result<nothing> post_only(const char* way, const char* sharing, uint32_t batch, uint64_t posts) {
  for (size_t i = 0; i < std::size(ways); ++i) {
    if (std::strcmp(ways[i].name, way) != 0 || std::strcmp(ways[i].sharing, sharing) != 0) continue;
    drained_queue one;
    if (jobs[i](one, batch, posts)) return nothing{};
  }
  return failure{EP_STATUS_INVALID, 0, std::string("no way to post is called ") + way + ", shared by " + sharing};
}

} // namespace ep::ibgda
