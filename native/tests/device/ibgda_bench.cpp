// How fast host threads post WQEs: ibgda_bench [thousands of posts of each row, 400]. Nobody executes the WQEs: whoever waits for room advances the completions
// itself, so that posting is all that is measured, and two posters have two cores. Every count is verified. The ways take turns, and the best of some rounds is
// shown, for a machine's speed changes from one moment to the next.
// ibgda_bench count WAY SHARING BATCH POSTS: one poster and nothing else, for counting instructions (ibgda_instructions.mjs).
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <sched.h>

#include "device/fast.hpp"
#include "ep/device/mlx5_post.h"

namespace {

constexpr uint32_t depth = 1024;
constexpr uint32_t rounds = 25;

struct queue {
  queue() {
    std::memset(cqe, 0xff, sizeof cqe);
    sq.resize(depth * 8 + 8);
    qp.sq = (reinterpret_cast<uint64_t>(sq.data()) + 63) / 64 * 64;
    qp.dbr = reinterpret_cast<uint64_t>(dbr);
    qp.bf = reinterpret_cast<uint64_t>(bf);
    qp.cq = reinterpret_cast<uint64_t>(cqe);
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
  alignas(64) uint32_t dbr[2] = {};
  alignas(64) std::atomic<uint32_t> draining{0};
  bool started = false;
  alignas(64) ep_ibgda_qp qp{};
};

struct bench_context {
  static constexpr bool single_lane = true;
  queue& own;
  void point() const {}
  template <class Look> bool wait_for(const Look& look, uint64_t, int32_t, uint32_t stage, ep_kernel_status*) const {
    uint64_t found = 0;
    for (uint32_t looks = 1; !look(&found); ++looks) {
      if (stage == EP_STAGE_ROOM) own.drain();
      ep::cpu_relax();
      if (looks % 64 == 0) sched_yield();
    }
    return true;
  }
  void fail(ep_kernel_status*, uint32_t, int32_t, uint32_t, uint64_t, uint64_t) const { std::abort(); }
  void wake(uint64_t) const {}
};

using job = void (*)(queue&, uint32_t batch, uint64_t posts);

template <class Post, uint32_t Sharing> void run(queue& own, uint32_t batch, uint64_t posts) {
  bench_context ctx{own};
  const ep::lone_poster<bench_context> group{ctx};
  const auto build = [](uint32_t i, const ep::mlx5_writer& writer) { writer.write({0x1000 + i * 64u, 1}, {0x2000 + i * 64u, 2}, 64); };
  for (uint64_t i = 0; i < posts; i += batch) {
    if (Post::template post<Sharing>(ctx, group, own.qp, batch, build, nullptr) == ep::mlx5_refused) std::abort();
  }
}

struct way {
  const char* name;
  const char* sharing;
  job post; // posts a multiple of 16 WQEs
  bool many; // may be shared by posters
};

constexpr way ways[] = {
    {"lock", "device", run<ep::post_under_lock, EP_IBGDA_SHARE_DEVICE>, true},
    {"in-turn", "device", run<ep::post_in_turn, EP_IBGDA_SHARE_DEVICE>, true},
    {"ringer", "device", run<ep::post_by_ringer, EP_IBGDA_SHARE_DEVICE>, true},
    {"in-turn", "thread", run<ep::post_in_turn, EP_IBGDA_SHARE_THREAD>, false},
    {"ringer", "thread", run<ep::post_by_ringer, EP_IBGDA_SHARE_THREAD>, false},
};

// Posts each second, in millions.
double rate(const way& how, uint32_t threads, bool together, uint32_t batch, uint64_t posts) {
  std::vector<queue> queues(together ? 1 : threads);
  std::atomic<uint32_t> waiting{threads};
  std::vector<std::thread> workers;
  std::atomic<int64_t> begin{INT64_MAX};
  const uint64_t each = posts / threads / 16 * 16;
  const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
  for (uint32_t i = 0; i < threads; ++i) {
    workers.emplace_back([&, i] {
      waiting.fetch_sub(1);
      while (waiting.load() != 0) sched_yield();
      int64_t first = now();
      for (int64_t seen = begin.load(); first < seen && !begin.compare_exchange_weak(seen, first);) {}
      how.post(queues[together ? 0 : i], batch, each);
    });
  }
  for (std::thread& worker : workers) worker.join();
  const auto seconds = static_cast<double>(now() - begin.load()) * 1e-9;
  for (const queue& one : queues) {
    if (one.qp.ready != each * threads / queues.size() || one.qp.taken != one.qp.ready) std::abort();
  }
  return static_cast<double>(each * threads) / seconds * 1e-6;
}

void table(uint64_t posts) {
  std::printf("millions of WQEs posted each second; in brackets: times the lock\n");
  for (const uint32_t threads : {1u, 2u}) {
    for (const uint32_t batch : {1u, 2u, 4u, 16u}) {
      double best[std::size(ways)] = {};
      for (uint32_t round = 0; round < rounds; ++round) {
        for (size_t i = 0; i < std::size(ways); ++i) best[i] = std::max(best[i], rate(ways[i], threads, ways[i].many, batch, posts));
      }
      std::printf("%u poster%s, batch %2u:", threads, threads == 1 ? " " : "s", batch);
      for (size_t i = 0; i < std::size(ways); ++i) std::printf("  %s/%s %.1f (%.2f)", ways[i].name, ways[i].sharing, best[i], best[i] / best[0]);
      std::printf("\n");
    }
  }
}

} // namespace

int main(int count, char** words) {
  if (count == 6 && std::strcmp(words[1], "count") == 0) {
    for (const way& how : ways) {
      if (std::strcmp(how.name, words[2]) != 0 || std::strcmp(how.sharing, words[3]) != 0) continue;
      queue one;
      how.post(one, static_cast<uint32_t>(std::atoi(words[4])), static_cast<uint64_t>(std::atoll(words[5])));
      return 0;
    }
  }
  if (count > 2) {
    std::fprintf(stderr, "usage: ibgda_bench [thousands of posts] | count lock|in-turn|ringer device|thread BATCH POSTS\n");
    return 2;
  }
  table(1000 * (count == 2 ? static_cast<uint64_t>(std::atoll(words[1])) : 400));
  return 0;
}
