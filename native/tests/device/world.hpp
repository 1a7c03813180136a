// W ranks inside of one process: their symmetric memory, an engine behind each proxy ring, and both ways to run their kernels.
#pragma once

#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../core/device/fast.hpp"
#include "../../core/simt/simt.hpp"
#include "ep/device/endpoint.h"
#include "ep/device/ibgda_endpoint.h"
#include "ep/device/mixed_endpoint.h"
#include "ibgda_nic.hpp"

namespace ep::test {

using random_source = std::mt19937_64;

// 0 to below - 1; the same on every standard library, which std::uniform_int_distribution is not.
inline uint64_t below(random_source& random, uint64_t limit) { return random() % limit; }

// ThreadSanitizer needs a millisecond to make a fiber: there, one seed in twenty. AddressSanitizer is after paths, not after orders: a third.
#if defined(__SANITIZE_THREAD__)
constexpr uint64_t seed_share = 20;
#elif defined(__SANITIZE_ADDRESS__)
constexpr uint64_t seed_share = 3;
#else
constexpr uint64_t seed_share = 1;
#endif

// That the tests see what a naive protocol does wrong is shown once, without a sanitizer.
constexpr bool shows_naive = seed_share == 1;

// How many seeds a test tries: EP_TEST_SEEDS of them, if that is set.
inline uint64_t seeds_of(uint64_t usual) {
  const char* text = std::getenv("EP_TEST_SEEDS");
  const uint64_t wanted = text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
  return std::max<uint64_t>((wanted != 0 ? wanted : usual) / seed_share, 1);
}

// Whether `bad(seed)` is true for one seed in `one_in`, at least. The few seeds that a sanitizer has time for may all be kind ones: there it goes on until one is not.
template <class Bad> bool found_out(const char* name, uint64_t samples, uint64_t one_in, const Bad& bad) {
  const uint64_t most = seed_share > 1 ? samples * seed_share * 3 : samples;
  uint64_t count = 0;
  uint64_t seed = 0;
  for (; seed < samples || (count == 0 && seed < most); ++seed) count += bad(seed) ? 1 : 0;
  std::printf("%s: %llu of %llu seeds fail\n", name, static_cast<unsigned long long>(count), static_cast<unsigned long long>(seed));
  return count != 0 && (seed_share > 1 || count * one_in >= samples);
}

struct aligned_delete {
  void operator()(uint8_t* bytes) const { ::operator delete[](bytes, std::align_val_t{64}); }
};
using aligned_bytes = std::unique_ptr<uint8_t[], aligned_delete>;
inline aligned_bytes make_aligned(uint64_t bytes) {
  aligned_bytes made(new (std::align_val_t{64}) uint8_t[bytes + 1]);
  std::memset(made.get(), 0xee, bytes + 1);
  return made;
}

struct world_options {
  int32_t size = 1;
  uint64_t bytes = 0; // of each rank's part
  uint64_t slots = 0;
  bool proxy = false;
  uint64_t ring = 4;  // capacity of each rank's proxy ring
  uint32_t qps = 0;   // to each rank; not 0: kernels post to queue pairs (EP_MEMORY_IBGDA), of a NIC for each rank
  uint32_t depth = 8;
  bool collapsed = true;
  uint64_t max_message = uint64_t{1} << 30;
  uint32_t sharing = EP_IBGDA_SHARE_DEVICE;
  int32_t node = 1; // so many ranks in a row have each other's memory mapped, whatever else there is
};

class world {
 public:
  explicit world(const world_options& wanted) : options(wanted), ranks(static_cast<size_t>(wanted.size)) {
    for (rank_state& rank : ranks) {
      rank.data = make_aligned(wanted.bytes);
      rank.signals.resize(wanted.slots);
      rank.entries.resize(wanted.ring);
      rank.ring.entries = reinterpret_cast<uint64_t>(rank.entries.data());
      rank.ring.capacity = wanted.ring;
      rank.ring.wake = reinterpret_cast<uint64_t>(&rank.engine_wake);
    }
    for (int32_t i = 0; i < wanted.size; ++i) {
      rank_state& rank = at(i);
      for (int32_t j = 0; j < wanted.size; ++j) {
        // Behind a proxy or a NIC nothing of a peer is mapped, unless it is near.
        const bool near = i / wanted.node == j / wanted.node;
        rank.views.push_back((!wanted.proxy && wanted.qps == 0) || near ? view_of(at(j)) : ep_peer_view{});
      }
      ep_memory_handle& memory = rank.memory;
      memory.header = {EP_MAGIC_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, wanted.proxy ? EP_MEMORY_PROXY : EP_MEMORY_LOAD_STORE, sizeof memory};
      memory.rank = i;
      memory.world_size = wanted.size;
      memory.byte_length = wanted.bytes;
      memory.signal_slots = wanted.slots;
      memory.peers = reinterpret_cast<uint64_t>(rank.views.data());
      memory.proxy = wanted.proxy ? reinterpret_cast<uint64_t>(&rank.ring) : 0;
      if (wanted.qps != 0) connect(i);
      rank.environment.waits.wake = &rank.wake;
      rank.environment.waits.deadline_ns = deadline_after(200'000); // only a hang reaches it, and before CTest's limit, so that it is named
      rank.environment.waits.world_size = wanted.size;
      rank.environment.waits.self = i;
      rank.environment.waits.policy = wait_policy{0, 50'000, 2'000'000};
    }
  }

  int32_t size() const { return options.size; }
  bool proxy() const { return options.proxy; }
  const ep_memory_handle& memory(int32_t rank) const { return ranks[static_cast<size_t>(rank)].memory; }
  uint8_t* data(int32_t rank) { return at(rank).data.get(); }
  uint64_t* signals(int32_t rank) { return at(rank).signals.data(); }
  kernel_environment& environment(int32_t rank) { return at(rank).environment; }

  // A source of puts that is not in the rank's part, which is registered already.
  void adopt(int32_t rank, const void* begin, uint64_t bytes) {
    rank_state& own = at(rank);
    if (options.qps == 0 || bytes == 0) return;
    const uint64_t first = reinterpret_cast<uint64_t>(begin);
    const auto lkey = static_cast<uint32_t>(0x1000 + own.ranges.size());
    own.nic.allow(lkey, begin, bytes);
    own.ranges.push_back({first, first + bytes, lkey, 0});
    std::sort(own.ranges.begin(), own.ranges.end(), [](const ep_ibgda_range& a, const ep_ibgda_range& b) { return a.begin < b.begin; });
    own.table.resize(sizeof(ep_ibgda_range_table) + own.ranges.size() * sizeof(ep_ibgda_range));
    const ep_ibgda_range_table head{own.ranges.size(), 0};
    std::memcpy(own.table.data(), &head, sizeof head);
    std::memcpy(own.table.data() + sizeof head, own.ranges.data(), own.ranges.size() * sizeof(ep_ibgda_range));
    own.device.ranges = reinterpret_cast<uint64_t>(own.table.data());
  }
  test_nic& nic(int32_t rank) { return at(rank).nic; }
  ep_ibgda_device& device(int32_t rank) { return at(rank).device; }
  ep_ibgda_qp& qp(int32_t rank, int32_t peer, uint32_t key) { return at(rank).qps[static_cast<size_t>(peer) * options.qps + key]; }

  // Calls `use(endpoint)` with the endpoint of this world's kind.
  template <class Use> auto with_endpoint(const ep_memory_handle& memory, Use&& use) const {
    if (options.qps != 0) return use(ibgda_endpoint{memory});
    return options.proxy ? use(proxy_endpoint{memory}) : use(load_store_endpoint{memory});
  }

  // The same where peers of a node are stored to and others are not.
  template <class Use> auto with_mixed_endpoint(const ep_memory_handle& memory, Use&& use) const {
    if (options.qps != 0) return use(mixed_endpoint<ibgda_endpoint>{memory, {memory}});
    return use(mixed_endpoint<proxy_endpoint>{memory, {memory}});
  }

  // `peer` is not mapped to `rank` any more.
  void forget(int32_t rank, int32_t peer) { at(rank).views[static_cast<size_t>(peer)] = {}; }

  // The engine of one rank: takes requests over in order and performs them in any order, a put's bytes before its signal.
  template <class Ctx> void serve(Ctx& ctx, int32_t rank, uint64_t seed) {
    random_source random(seed);
    std::vector<ep_proxy_request> held;
    rank_state& own = at(rank);
    for (uint64_t& next = own.served;; ++next) {
      const ep_proxy_request& entry = own.entries[next & (options.ring - 1)];
      if (held.size() >= 4 || load_acquire(ctx, &entry.turn) != next + 1) {
        std::shuffle(held.begin(), held.end(), random);
        for (const ep_proxy_request& request : held) perform(ctx, request);
        held.clear();
      }
      if (!ctx.wait(&entry.turn, next + 1, rank, EP_STAGE_ROOM, nullptr)) return;
      held.push_back(entry);
      fetch_add(ctx, &own.ring.head, 1);
      ctx.wake(reinterpret_cast<uint64_t>(&own.wake));
    }
  }

  // kernel: bool(simt_context&, int32_t rank). All ranks and engines in this thread, under one seed.
  template <class Kernel> simt_result run_simt(const simt_launch& shape, const simt_schedule& schedule, Kernel&& kernel) {
    std::vector<simt_launch> launches;
    for (int32_t rank = 0; rank < options.size; ++rank) {
      simt_launch launch = shape;
      launch.environment = &at(rank).environment;
      launch.memory = &at(rank).memory;
      launch.name = "rank " + std::to_string(rank);
      launch.kernel = [&kernel, rank](simt_context& ctx) { return kernel(ctx, rank); };
      launches.push_back(launch);
      // Engines and NICs outlive what ends their ranks' waits.
      kernel_environment& engine = at(rank).engine_environment;
      engine = at(rank).environment;
      engine.waits.peers = nullptr;
      engine.waits.cancel = nullptr;
      engine.waits.stopped = nullptr;
      launch.environment = &engine;
      if (options.qps != 0) {
        launch.blocks = launch.warp_lanes = 1;
        launch.lanes = static_cast<uint32_t>(at(rank).nic.size());
        launch.memory = nullptr;
        launch.name = "nic of rank " + std::to_string(rank);
        launch.serves = true;
        launch.kernel = [this, rank](simt_context& ctx) {
          at(rank).nic.serve(ctx, at(rank).nic.queue(ctx.lane()));
          return true;
        };
        launches.push_back(launch);
      }
      if (!options.proxy) continue;
      launch.blocks = launch.lanes = launch.warp_lanes = 1;
      launch.memory = nullptr;
      launch.name = "engine of rank " + std::to_string(rank);
      launch.serves = true;
      launch.kernel = [this, rank, seed = schedule.seed](simt_context& ctx) {
        serve(ctx, rank, seed + static_cast<uint64_t>(rank));
        return true;
      };
      launches.push_back(launch);
    }
    return simt_run_together(schedule, launches);
  }

  // The same with a thread per rank: each rank is a launch of its own, whose words the other threads write. Load/store only.
  template <class Kernel> bool run_simt_threads(const simt_launch& shape, const simt_schedule& schedule, Kernel&& kernel) {
    std::atomic<uint32_t> bad{0};
    std::vector<std::thread> workers;
    for (int32_t rank = 0; rank < options.size; ++rank) {
      workers.emplace_back([&, rank] {
        simt_launch launch = shape;
        launch.environment = &at(rank).environment;
        launch.memory = &at(rank).memory;
        launch.name = "rank " + std::to_string(rank);
        launch.kernel = [&kernel, rank](simt_context& ctx) { return kernel(ctx, rank); };
        if (!simt_run_launch(schedule, launch).ok) bad.fetch_add(1);
      });
    }
    for (std::thread& worker : workers) worker.join();
    return bad.load() == 0;
  }

  // kernel: bool(fast_context&, int32_t rank). A thread per block and engine. True when every block returned true.
  template <class Kernel> bool run_fast(uint32_t blocks, Kernel&& kernel) {
    std::atomic<uint32_t> stop{0};
    std::atomic<uint32_t> bad{0};
    std::vector<kernel_environment> engines(static_cast<size_t>(options.size));
    std::vector<std::unique_ptr<std::barrier<>>> grids;
    std::vector<std::thread> workers;
    std::vector<std::thread> servers;
    for (int32_t rank = 0; rank < options.size; ++rank) {
      grids.push_back(std::make_unique<std::barrier<>>(blocks));
      for (uint32_t block = 0; block < blocks; ++block) {
        workers.emplace_back([&, rank, block, grid = grids.back().get()] {
          fast_context ctx{at(rank).environment, block, blocks, grid};
          if (!kernel(ctx, rank)) bad.fetch_add(1);
        });
      }
      if (!options.proxy && options.qps == 0) continue;
      kernel_environment& engine = engines[static_cast<size_t>(rank)];
      engine.waits.wake = &at(rank).engine_wake;
      engine.waits.cancel = &stop;
      engine.waits.policy = wait_policy{0, 20'000, 2'000'000};
      servers.emplace_back([&, rank] {
        fast_context ctx{engines[static_cast<size_t>(rank)], 0, 1, nullptr};
        if (options.qps != 0) return at(rank).nic.serve_all(ctx);
        serve(ctx, rank, static_cast<uint64_t>(rank) + 99);
      });
    }
    for (std::thread& worker : workers) worker.join();
    stop.store(1);
    for (std::thread& server : servers) server.join();
    return bad.load() == 0;
  }

 private:
  struct rank_state {
    aligned_bytes data;
    std::vector<uint64_t> signals;
    ep_wake_word wake{};
    ep_wake_word engine_wake{};
    ep_proxy_ring ring{};
    std::vector<ep_proxy_request> entries;
    uint64_t served = 0; // requests that the engine has taken over, in whatever launch
    std::vector<ep_peer_view> views;
    ep_memory_handle memory{};
    kernel_environment environment{};
    kernel_environment engine_environment{};
    test_nic nic;
    std::vector<ep_ibgda_qp> qps;
    ep_ibgda_device device{};
    std::vector<ep_ibgda_remote> remotes;
    ep_ibgda_memory route{};
    std::vector<ep_ibgda_range> ranges;
    std::vector<uint8_t> table;
  };

  rank_state& at(int32_t rank) { return ranks[static_cast<size_t>(rank)]; }

  static uint32_t data_rkey(int32_t rank) { return 0x100 + 2 * static_cast<uint32_t>(rank); }

  void connect(int32_t self) {
    rank_state& rank = at(self);
    rank.qps.reserve(static_cast<size_t>(options.size) * options.qps);
    for (int32_t peer = 0; peer < options.size; ++peer) {
      rank_state& there = at(peer);
      for (uint32_t i = 0; i < options.qps; ++i) {
        test_queue& queue = rank.nic.add({options.depth, options.collapsed, 0x800 + static_cast<uint32_t>(rank.nic.size()), peer});
        queue.wake = &there.wake;
        rank.qps.push_back(queue.qp);
      }
      rank.nic.allow(data_rkey(peer), there.data.get(), options.bytes);
      rank.nic.allow(data_rkey(peer) + 1, there.signals.data(), options.slots * 8);
      rank.remotes.push_back({reinterpret_cast<uint64_t>(there.data.get()), reinterpret_cast<uint64_t>(there.signals.data()), data_rkey(peer), data_rkey(peer) + 1});
    }
    rank.nic.max_message = options.max_message;
    rank.device.header = {EP_MAGIC_IBGDA, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof rank.device};
    rank.device.rank = self;
    rank.device.world_size = options.size;
    rank.device.qps = reinterpret_cast<uint64_t>(rank.qps.data());
    rank.device.qps_per_peer = rank.device.active_qps = options.qps;
    rank.device.sharing = options.sharing;
    rank.device.max_message = options.max_message;
    static constexpr ep_ibgda_range_table none{};
    rank.device.ranges = reinterpret_cast<uint64_t>(&none);
    rank.route.header = {EP_MAGIC_IBGDA_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof rank.route};
    rank.route.device = reinterpret_cast<uint64_t>(&rank.device);
    rank.route.remotes = reinterpret_cast<uint64_t>(rank.remotes.data());
    rank.memory.header.kind = EP_MEMORY_IBGDA;
    rank.memory.proxy = reinterpret_cast<uint64_t>(&rank.route);
    adopt(self, rank.data.get(), options.bytes);
  }

  static ep_peer_view view_of(rank_state& rank) {
    return {reinterpret_cast<uint64_t>(rank.data.get()), reinterpret_cast<uint64_t>(rank.signals.data()),
            reinterpret_cast<uint64_t>(&rank.wake), 0};
  }

  template <class Ctx> void perform(Ctx& ctx, const ep_proxy_request& request) {
    rank_state& peer = at(request.peer);
    if (request.op == EP_PROXY_PUT) {
      for (uint64_t row = 0; row < request.rows; ++row) {
        std::memcpy(peer.data.get() + request.dst_offset + row * request.row_bytes,
                    reinterpret_cast<const uint8_t*>(request.src) + row * request.src_stride, request.row_bytes);
        ctx.point();
      }
    }
    if (request.slot != EP_NO_SLOT) {
      fetch_add(ctx, &peer.signals[request.slot], request.add);
      ctx.wake(reinterpret_cast<uint64_t>(&peer.wake));
    }
  }

  world_options options;
  std::vector<rank_state> ranks;
};

inline simt_launch shape(uint32_t blocks, uint32_t lanes, uint32_t warp_lanes) {
  simt_launch launch;
  launch.blocks = blocks;
  launch.lanes = lanes;
  launch.warp_lanes = warp_lanes;
  return launch;
}

inline simt_schedule seeded(uint64_t seed) {
  simt_schedule schedule;
  schedule.seed = seed;
  schedule.switch_probability = 0.1 + 0.2 * static_cast<double>(seed % 4);
  return schedule;
}

} // namespace ep::test
