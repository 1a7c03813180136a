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
  for (const bool collapsed : {true, false}) refusals(collapsed);
  silence();
  return ep::check::finish();
}
