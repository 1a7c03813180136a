// The kernels over the control path and the software NIC: queue pairs made by commands, WQEs executed under the NIC's own checks, in threads and by single
// steps under a seed.
#include <thread>

#include "../check.hpp"
#include "../device/dispatch_case.hpp"
#include "core/ibgda/queues.hpp"
#include "nic/mlx5/stepper.hpp"
#include "segment.hpp"

using namespace ep::test;

namespace {

template <class Value> Value must(ep::result<Value> got) {
  if (!got.ok()) {
    std::fprintf(stderr, "%s\n", got.why().message.c_str());
    std::abort();
  }
  return std::move(got.value());
}

constexpr uint32_t all_rights = ep::dl::MLX5_ACCESS_LOCAL_WRITE | ep::dl::MLX5_ACCESS_REMOTE_WRITE | ep::dl::MLX5_ACCESS_REMOTE_READ | ep::dl::MLX5_ACCESS_REMOTE_ATOMIC;

struct stack_options {
  int32_t size = 2;
  uint64_t bytes = 64;
  uint64_t slots = 1;
  bool threaded = false;
  uint32_t qps = 1;
  uint32_t depth = 16;
  bool collapsed = true;
  uint32_t sharing = EP_IBGDA_SHARE_DEVICE;
  uint64_t seed = 1;
  const char* faults = ""; // of every NIC
};

// Ranks of one process, each with its NIC.
class stack {
 public:
  explicit stack(const stack_options& wanted) : options(wanted), steps(wanted.seed), ranks(static_cast<size_t>(wanted.size)) {
    ep::nic::soft_options soft;
    soft.threaded = wanted.threaded;
    soft.engine.seed = wanted.seed;
    std::vector<std::vector<uint8_t>> connections;
    for (int32_t i = 0; i < wanted.size; ++i) {
      rank_state& rank = at(i);
      ep::nic::soft_driver driver(soft);
      ep::ibgda::open_port port = must(ep::ibgda::device_open(driver, {}));
      rank.nic = dynamic_cast<ep::nic::soft_device*>(port.device.get());
      if (!wanted.threaded) steps.add(*rank.nic);
      ep::ibgda::queue_options queues;
      queues.rank = i;
      queues.world_size = wanted.size;
      queues.qps_per_peer = wanted.qps;
      queues.depth = wanted.depth;
      queues.collapsed = wanted.collapsed;
      queues.sharing = wanted.sharing;
      if (wanted.threaded) queues.nic_wake = reinterpret_cast<uint64_t>(rank.nic->doorbell_wake());
      rank.control = ep::ibgda::host_control_memory();
      ep::ibgda::control_memory* const sources[] = {rank.control.get()};
      rank.queues = must(ep::ibgda::rank_queues::create(std::move(port), queues, sources));
      connections.push_back(rank.queues->connection());
      rank.memory = must(ep::segment::create(wake_offset() + sizeof(ep_wake_word)));
      rank.wake = reinterpret_cast<ep_wake_word*>(address(i) + wake_offset());
      const auto registered = must(rank.queues->register_memory({address(i), wake_offset()}, all_rights));
      EP_CHECK(rank.nic->region_wake(registered.mr, rank.wake).ok());
      EP_CHECK(rank.nic->set_faults(wanted.faults).ok());
      remotes.push_back({data_address(i), address(i), registered.mr.rkey, registered.mr.rkey});
    }
    for (int32_t i = 0; i < wanted.size; ++i) {
      rank_state& rank = at(i);
      const auto connected = rank.queues->connect(connections);
      if (!connected.ok()) std::fprintf(stderr, "%s\n", connected.why().message.c_str());
      EP_CHECK(connected.ok());
      rank.route = must(rank.queues->route_memory(remotes));
      rank.views.resize(static_cast<size_t>(wanted.size));
      rank.views[static_cast<size_t>(i)] = {data_address(i), address(i), reinterpret_cast<uint64_t>(rank.wake), 0};
      ep_memory_handle& handle = rank.handle;
      handle.header = {EP_MAGIC_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, EP_MEMORY_IBGDA, sizeof handle};
      handle.rank = i;
      handle.world_size = wanted.size;
      handle.byte_length = wanted.bytes;
      handle.signal_slots = wanted.slots;
      handle.peers = reinterpret_cast<uint64_t>(rank.views.data());
      handle.proxy = rank.route.address;
      rank.environment.waits.wake = rank.wake;
      rank.environment.waits.deadline_ns = ep::deadline_after(60'000);
      rank.environment.waits.policy = ep::wait_policy{0, 50'000, 100'000};
    }
  }

  int32_t size() const { return options.size; }
  const ep_memory_handle& memory(int32_t rank) const { return ranks[static_cast<size_t>(rank)].handle; }
  uint8_t* data(int32_t rank) { return reinterpret_cast<uint8_t*>(data_address(rank)); }
  uint64_t signal(int32_t rank, uint64_t slot) { return std::atomic_ref<uint64_t>(reinterpret_cast<uint64_t*>(address(rank))[slot]).load(); }
  void adopt(int32_t rank, const void* begin, uint64_t bytes) {
    if (bytes != 0) must(at(rank).queues->register_memory({reinterpret_cast<uint64_t>(begin), bytes}, ep::dl::MLX5_ACCESS_LOCAL_WRITE));
  }
  ep::nic::soft_device& nic(int32_t rank) { return *at(rank).nic; }

  // kernel: bool(simt_context&, int32_t rank). NICs take single steps between.
  template <class Kernel> ep::simt_result run_simt(const ep::simt_launch& shape, Kernel&& kernel) {
    std::vector<ep::simt_launch> launches;
    for (int32_t rank = 0; rank < options.size; ++rank) {
      ep::simt_launch launch = shape;
      launch.environment = &at(rank).environment;
      launch.memory = &at(rank).handle;
      launch.name = "rank " + std::to_string(rank);
      launch.kernel = [&kernel, rank](ep::simt_context& ctx) { return kernel(ctx, rank); };
      launches.push_back(launch);
    }
    ep::simt_launch nics = ep::test::shape(1, 1, 1);
    nics.name = "nics";
    nics.serves = true;
    nics.environment = &at(0).environment;
    nics.kernel = [this](ep::simt_context& ctx) {
      const auto step = [this](uint64_t*) { return steps.step(); };
      while (ctx.wait_for(step, 0, -1, 0, nullptr)) {}
      return true;
    };
    launches.push_back(nics);
    return ep::simt_run_together(seeded(options.seed), launches);
  }

  template <class Kernel> bool run_fast(uint32_t blocks, Kernel&& kernel) {
    std::atomic<uint32_t> bad{0};
    std::vector<std::unique_ptr<std::barrier<>>> grids;
    std::vector<std::thread> workers;
    for (int32_t rank = 0; rank < options.size; ++rank) {
      grids.push_back(std::make_unique<std::barrier<>>(blocks));
      for (uint32_t block = 0; block < blocks; ++block) {
        workers.emplace_back([&, rank, block, grid = grids.back().get()] {
          ep::fast_context ctx{at(rank).environment, block, blocks, grid};
          if (!kernel(ctx, rank)) bad.fetch_add(1);
        });
      }
    }
    for (std::thread& worker : workers) worker.join();
    return bad.load() == 0;
  }

  void expect_no_violations() {
    for (int32_t rank = 0; rank < options.size; ++rank) {
      for (const ep::nic::violation& what : nic(rank).violations()) EP_CHECK_EQ(ep::nic::violation_text(what), "");
    }
  }

 private:
  struct rank_state {
    std::unique_ptr<ep::ibgda::control_memory> control;
    std::shared_ptr<ep::segment> memory;
    ep::nic::soft_device* nic = nullptr;
    std::unique_ptr<ep::ibgda::rank_queues> queues;
    ep::ibgda::rank_queues::memory_route route;
    std::vector<ep_peer_view> views;
    ep_memory_handle handle{};
    ep_wake_word* wake = nullptr;
    ep::kernel_environment environment;
  };
  rank_state& at(int32_t rank) { return ranks[static_cast<size_t>(rank)]; }
  uint64_t address(int32_t rank) { return reinterpret_cast<uint64_t>(at(rank).memory->data()); }
  // A rank's segment: signals, data, its wake word.
  uint64_t data_offset() const { return (options.slots * 8 + 63) / 64 * 64; }
  uint64_t wake_offset() const { return data_offset() + (options.bytes + 63) / 64 * 64; }
  uint64_t data_address(int32_t rank) { return address(rank) + data_offset(); }

  stack_options options;
  ep::nic::stepper steps;
  std::vector<rank_state> ranks;
  std::vector<ep_ibgda_remote> remotes;
};

const auto ours = [](auto& ctx, const auto& endpoint, const ep_dispatch_args& args) { return ep::attention_dispatch(ctx, endpoint, args); };

stack_options options_for(const dispatch_case& plan, int32_t size, uint64_t seed) {
  stack_options made;
  made.size = size;
  made.bytes = plan.bytes();
  made.slots = plan.slots();
  made.qps = 1 + static_cast<uint32_t>(seed % 3);
  made.depth = 2u << seed % 3;
  made.collapsed = seed % 2 == 0;
  made.seed = seed;
  // What a NIC may do without anybody losing anything.
  static constexpr const char* faults[] = {"", "partial pieces=3\nreorder\n", "repeat-doorbell\n", "drop skip=2 count=3\n", "drop-ack skip=1 count=3\n", "reorder\ndelay ns=50000\n"};
  made.faults = faults[seed / 2 % 6];
  return made;
}

void dispatches(int32_t size, uint64_t seed) {
  dispatch_case plan({size, 3, 1 + static_cast<uint32_t>(seed % 2), 1 + static_cast<uint32_t>(seed % 3), true, true}, seed);
  stack ranks(options_for(plan, size, seed));
  const auto args = all_args(plan, ranks);
  std::atomic<uint32_t> wrong{0};
  const auto result = ranks.run_simt(shape(1 + static_cast<uint32_t>(seed % 2), 8, 4), [&](auto& ctx, int32_t rank) {
    const auto& own = args[static_cast<size_t>(rank)];
    const ep::ibgda_endpoint endpoint{own[0].memory};
    const ep::block_coop<ep::simt_context> coop{ctx};
    bool ok = run_calls(ctx, endpoint, ranks, plan, rank, own, wrong, ours);
    for (int32_t peer = 0; ok && peer < size; ++peer) ok = endpoint.quiet(ctx, coop, peer, nullptr);
    return ok;
  });
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  EP_CHECK_EQ(wrong.load(), 0u);
  ranks.expect_no_violations();
}

void dispatches_on_threads(int32_t size, uint64_t seed) {
  dispatch_case plan({size, 8, 2, 2, true, true}, seed);
  stack_options wanted = options_for(plan, size, seed);
  wanted.threaded = true;
  stack ranks(wanted);
  const auto args = all_args(plan, ranks);
  std::atomic<uint32_t> wrong{0};
  EP_CHECK(ranks.run_fast(2, [&](auto& ctx, int32_t rank) {
    const auto& own = args[static_cast<size_t>(rank)];
    return run_calls(ctx, ep::ibgda_endpoint{own[0].memory}, ranks, plan, rank, own, wrong, ours);
  }));
  EP_CHECK_EQ(wrong.load(), 0u);
  ranks.expect_no_violations();
}

// Every request of the post path under the NIC's checks, and 70000 signals: more than one pass of the 16-bit index.
void requests_and_wraps() {
  stack_options wanted;
  wanted.bytes = 4096;
  wanted.slots = 2;
  stack ranks(wanted);
  std::vector<uint64_t> local(64);
  for (size_t i = 0; i < local.size(); ++i) local[i] = i + 1;
  ranks.adopt(0, local.data(), local.size() * 8);
  constexpr uint64_t signals = 70'000 / seed_share;
  const auto result = ranks.run_simt(shape(1, 1, 1), [&](auto& ctx, int32_t rank) {
    if (rank != 0) return true;
    const ep::ibgda_endpoint endpoint{ranks.memory(0)};
    ep_ibgda_qp& qp = endpoint.qp_of(1, 0);
    const auto place = [&](size_t index) {
      uint32_t lkey = 0;
      EP_CHECK(endpoint.local_key(ctx, reinterpret_cast<uint64_t>(&local[index]), 8, &lkey));
      return ep::mlx5_place{reinterpret_cast<uint64_t>(&local[index]), lkey};
    };
    const auto there = [&](size_t index) { return reinterpret_cast<uint64_t*>(ranks.data(1))[index]; };
    const auto post = [&](auto&& write) {
      ep_kernel_status status{};
      EP_CHECK(endpoint.round_trip(ctx, qp, [&](uint64_t, const ep::mlx5_writer& writer) { write(writer); }, &status));
    };
    post([&](const ep::mlx5_writer& w) { w.write(endpoint.remote_data(1, 0), place(0), 80); });
    EP_CHECK_EQ(there(9), 10u);
    post([&](const ep::mlx5_writer& w) { w.write(endpoint.remote_data(1, 0), place(1), 0); });
    EP_CHECK_EQ(there(0), 1u);
    post([&](const ep::mlx5_writer& w) { w.write_inline(endpoint.remote_data(1, 80), &local[10], 24); });
    EP_CHECK_EQ(there(12), 13u);
    post([&](const ep::mlx5_writer& w) { w.read(endpoint.remote_data(1, 8), place(40), 16); });
    EP_CHECK_EQ(local[41], 3u);
    post([&](const ep::mlx5_writer& w) { w.fetch_add8(endpoint.remote_data(1, 8), 5, place(42)); });
    EP_CHECK_EQ(there(1), 7u);
    EP_CHECK_EQ(local[42], 2u);
    post([&](const ep::mlx5_writer& w) { w.fetch_add4(endpoint.remote_data(1, 8), static_cast<uint32_t>(-3), place(42)); });
    EP_CHECK_EQ(there(1), 4u);
    EP_CHECK_EQ(__builtin_bswap32(static_cast<uint32_t>(local[42])), 7u);
    post([&](const ep::mlx5_writer& w) { w.compare_swap8(endpoint.remote_data(1, 8), 4, 99, place(42)); });
    EP_CHECK_EQ(there(1), 99u);
    EP_CHECK_EQ(local[42], 4u);
    const ep::thread_coop<ep::simt_context> alone{ctx};
    for (uint64_t i = 0; i < signals; ++i) {
      if (!endpoint.signal(ctx, alone, 1, 0, 1, nullptr)) return false;
    }
    return endpoint.quiet(ctx, alone, 1, nullptr);
  });
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  EP_CHECK_EQ(ranks.signal(1, 0), signals);
  ranks.expect_no_violations();
}

// WQEs of several WQEBBs among others, around the ring, by lanes that share the queue pair.
void several_blocks(uint64_t seed) {
  stack_options wanted;
  wanted.bytes = 4096;
  wanted.depth = 8u << seed % 3;
  wanted.collapsed = seed % 2 == 0;
  wanted.seed = seed;
  stack ranks(wanted);
  uint64_t old[2] = {};
  ranks.adopt(0, old, sizeof old);
  static uint8_t unknown[EP_IBGDA_MAX_LONG_INLINE]; // to the NIC
  for (uint32_t i = 0; i < sizeof unknown; ++i) unknown[i] = static_cast<uint8_t>(i * 7 + 1);
  constexpr uint32_t rounds = 12;
  ep_kernel_status status{};
  uint32_t swapped = 0;
  std::memset(ranks.data(1) + 256, 0xee, 1024);
  const auto result = ranks.run_simt(shape(2, 4, 4), [&](auto& ctx, int32_t rank) {
    if (rank != 0) return true;
    const ep::ibgda_endpoint endpoint{ranks.memory(0)};
    ep_ibgda_qp& qp = endpoint.qp_of(1, 0);
    const ep::block_coop<ep::simt_context> coop{ctx};
    bool ok = true;
    for (uint32_t round = 0; round < rounds && ok; ++round) {
      if (ctx.lane() == 0) {
        uint32_t lkey = 0;
        const auto place = reinterpret_cast<uint64_t>(&old[ctx.block()]);
        ok = endpoint.local_key(ctx, place, 8, &lkey);
        // Each block counts in a byte of its own of one word.
        const uint32_t shift = 8 * ctx.block();
        const uint64_t mask = uint64_t{0xff} << shift;
        ok = ok && endpoint.masked_swap(ctx, qp, endpoint.remote_data(1, 8), uint64_t{round} << shift, mask, uint64_t{round + 1} << shift, mask, {place, lkey}, &status);
        if ((old[ctx.block()] >> shift & 0xff) == round) ++swapped;
      }
      ok = coop.sync_and(ok);
      // Of a source that the NIC does not know, with a signal and without.
      const uint32_t bytes = EP_IBGDA_MAX_INLINE + 1 + static_cast<uint32_t>((seed * 37 + round * 61) % 60);
      ok = ok && endpoint.put_rows(ctx, coop, 1, 256 + 256 * ctx.block(), unknown, bytes, bytes, 1, false, round % 2 == 0 ? ctx.block() : EP_NO_SLOT, 1, &status);
    }
    return ok && endpoint.quiet(ctx, coop, 1, &status);
  });
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  EP_CHECK_EQ(status.status, static_cast<uint32_t>(EP_STATUS_OK));
  EP_CHECK_EQ(swapped, 2 * rounds);
  EP_CHECK_EQ(reinterpret_cast<uint64_t*>(ranks.data(1))[1], uint64_t{rounds} << 8 | rounds);
  for (const uint64_t block : {0, 1}) {
    EP_CHECK_EQ(ranks.signal(1, block), rounds / 2);
    EP_CHECK_EQ(std::memcmp(ranks.data(1) + 256 + 256 * block, unknown, EP_IBGDA_MAX_INLINE + 1), 0);
    EP_CHECK_EQ(ranks.data(1)[256 + 256 * block + 89], 0xee); // one behind the longest
  }
  ranks.expect_no_violations();
}

// The longest, whole; and what a ring is too short for.
void longest_inline() {
  static uint8_t unknown[EP_IBGDA_MAX_LONG_INLINE + 1];
  for (uint32_t i = 0; i < sizeof unknown; ++i) unknown[i] = static_cast<uint8_t>(i * 5 + 3);
  for (const uint32_t depth : {8u, 16u}) {
    stack_options wanted;
    wanted.bytes = 4096;
    wanted.depth = depth;
    stack ranks(wanted);
    const auto put = [&](uint64_t to, uint32_t bytes) {
      ep_kernel_status status{};
      const auto result = ranks.run_simt(shape(1, 1, 1), [&](auto& ctx, int32_t rank) {
        if (rank != 0) return true;
        const ep::ibgda_endpoint endpoint{ranks.memory(0)};
        const ep::thread_coop<ep::simt_context> alone{ctx};
        return endpoint.put_rows(ctx, alone, 1, to, unknown, bytes, bytes, 1, false, EP_NO_SLOT, 0, &status) ? endpoint.quiet(ctx, alone, 1, &status) : status.stage == EP_STAGE_SOURCE;
      });
      EP_CHECK_EQ(result.report, "");
      EP_CHECK(result.ok);
      return status.status == EP_STATUS_OK && std::memcmp(ranks.data(1) + to, unknown, bytes) == 0;
    };
    for (const uint32_t bytes : {29u, 91u, 92u, 93u, 156u}) EP_CHECK(put(bytes, bytes));
    EP_CHECK_EQ(put(1001, EP_IBGDA_MAX_LONG_INLINE), depth == 16); // four WQEBBs and a NOP
    EP_CHECK(!put(2001, EP_IBGDA_MAX_LONG_INLINE + 1));
    ranks.expect_no_violations();
  }
}

// Known to be wrong: a CQE for the first block is all that its poster waits for, and a doorbell for each block.
struct without_nop {
  static constexpr uint32_t count = ep::mlx5_masked_swap_blocks;
  using endpoint = ep::ibgda_endpoint;
};
struct block_by_block {
  static constexpr uint32_t count = ep::mlx5_masked_swap_blocks + 1;
  using endpoint = ep::ibgda_endpoint_of<ep::post_under_lock>;
};
template <class Naive> uint64_t naive_swap() {
  stack_options wanted;
  wanted.bytes = 4096;
  wanted.depth = 8;
  stack ranks(wanted);
  uint64_t old = 0;
  ranks.adopt(0, &old, 8);
  const auto result = ranks.run_simt(shape(1, 1, 1), [&](auto& ctx, int32_t rank) {
    if (rank != 0) return true;
    const typename Naive::endpoint endpoint{ranks.memory(0)};
    ep_ibgda_qp& qp = endpoint.qp_of(1, 0);
    uint32_t lkey = 0;
    const auto place = reinterpret_cast<uint64_t>(&old);
    if (!endpoint.local_key(ctx, place, 8, &lkey)) return false;
    const auto build = [&](uint64_t i, ep::mlx5_writer writer) {
      writer.signalled = writer.signalled || i == 0;
      if (i == ep::mlx5_masked_swap_blocks) return writer.nop();
      writer.masked_swap8(static_cast<uint32_t>(i), endpoint.remote_data(1, 8), 0, 1, 1, 1, {place, lkey});
    };
    ep_kernel_status status{};
    return endpoint.post(ctx, ep::lone_poster<ep::simt_context>{ctx}, qp, Naive::count, build, &status) && endpoint.quiet_qp(ctx, qp, &status);
  });
  EP_CHECK(!result.ok);
  uint64_t violations = 0;
  for (int32_t rank = 0; rank < ranks.size(); ++rank) violations += ranks.nic(rank).violations().size();
  return violations;
}

// What the NIC refuses, as the kernel tells it.
void refusals(bool collapsed) {
  struct refusal {
    uint32_t syndrome;
    uint64_t offset; // of the remote address
    uint32_t rkey_change;
    uint32_t lkey_change;
  };
  for (const refusal& how : {refusal{EP_MLX5_SYNDROME_REMOTE_ACCESS, 0, 1u << 8, 0}, refusal{EP_MLX5_SYNDROME_REMOTE_ACCESS, 1 << 20, 0, 0},
                             refusal{EP_MLX5_SYNDROME_LOCAL_PROTECTION, 0, 0, 1u << 8}}) {
    stack_options wanted;
    wanted.bytes = 4096;
    wanted.collapsed = collapsed;
    stack ranks(wanted);
    uint64_t local = 7;
    ranks.adopt(0, &local, 8);
    ep_kernel_status status{};
    uint64_t wrong = 0;
    const auto result = ranks.run_simt(shape(1, 1, 1), [&](auto& ctx, int32_t rank) {
      if (rank != 0) return true;
      const ep::ibgda_endpoint endpoint{ranks.memory(0)};
      ep_ibgda_qp& qp = endpoint.qp_of(1, 0);
      uint32_t lkey = 0;
      if (!endpoint.local_key(ctx, reinterpret_cast<uint64_t>(&local), 8, &lkey)) return false;
      ep::mlx5_place to = endpoint.remote_data(1, how.offset);
      to.key += how.rkey_change;
      wrong = to.address;
      const auto build = [&](uint64_t, const ep::mlx5_writer& w) { w.write(to, {reinterpret_cast<uint64_t>(&local), lkey + how.lkey_change}, 8); };
      return !endpoint.round_trip(ctx, qp, build, &status);
    });
    EP_CHECK_EQ(result.report, "");
    EP_CHECK(result.ok);
    EP_CHECK_EQ(status.status, static_cast<uint32_t>(EP_STATUS_SYSTEM));
    EP_CHECK_EQ(status.stage, EP_STAGE_NIC);
    EP_CHECK_EQ(status.rank, 1);
    EP_CHECK_EQ(status.expected, wrong);
    EP_CHECK_EQ(status.found & 0xff, how.syndrome);
  }
}

// The peer's NIC does not answer: the kernel that sends to it ends, and names it.
void silence() {
  stack_options wanted;
  wanted.bytes = 4096;
  wanted.faults = "drop\n";
  stack ranks(wanted);
  ep_kernel_status status{};
  const auto result = ranks.run_simt(shape(1, 4, 4), [&](auto& ctx, int32_t rank) {
    if (rank != 0) return true;
    const ep::ibgda_endpoint endpoint{ranks.memory(0)};
    const ep::block_coop<ep::simt_context> coop{ctx};
    return endpoint.signal(ctx, coop, 1, 0, 1, &status) && !endpoint.quiet(ctx, coop, 1, &status);
  });
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  EP_CHECK_EQ(status.status, static_cast<uint32_t>(EP_STATUS_PEER_LOST));
  EP_CHECK_EQ(status.rank, 1);
  EP_CHECK_EQ(status.found & 0xff, static_cast<uint32_t>(EP_MLX5_SYNDROME_RETRY_EXCEEDED));
}

} // namespace

int main() {
  for (int32_t size = 1; size <= 3; ++size) {
    for (uint64_t seed = 0; seed < 30 / seed_share; ++seed) dispatches(size, seed * 31 + static_cast<uint64_t>(size));
  }
  for (int32_t size = 2; size <= 3; ++size) {
    for (uint64_t seed = 0; seed < 4; ++seed) dispatches_on_threads(size, seed);
  }
  requests_and_wraps();
  for (uint64_t seed = 0; seed < 60 / seed_share; ++seed) several_blocks(seed);
  longest_inline();
  EP_CHECK_EQ(naive_swap<without_nop>(), 0u); // nothing is wrong with its bytes, and its wait has no end
  EP_CHECK(naive_swap<block_by_block>() != 0);
  for (const bool collapsed : {true, false}) refusals(collapsed);
  silence();
  return ep::check::finish();
}
