// The kernels on a real GPU against the same plans and answers as tests/device: the ranks are streams of one device, their memory and signals
// lie in device memory, and behind the proxy ring runs an engine on the host, behind queue pairs a NIC. Built and run by run.mjs, on machines with a GPU.
#include <cmath>
#include <cstdlib>
#include <new>

#include "../../core/device/compat.hpp"
#include "../../cuda/kernels.hpp"
#include "../check.hpp"
#include "../device/compat_case.hpp"
#include "../device/dispatch_case.hpp"
#include "../device/expert_case.hpp"
#include "gpu_memory.hpp"

namespace {

// Everything that this program allocates after `begin` is reachable from the device at the same address, so the host's plans are usable there
// as they are. Nothing is given back: the program is short.
struct arena {
  uint8_t* begin = nullptr;
  uint8_t* end = nullptr;
  std::atomic<uint8_t*> next{nullptr};
} pinned;

void* take(size_t bytes, size_t align) {
  if (pinned.begin == nullptr) return std::aligned_alloc(align, (bytes + align - 1) / align * align);
  uint8_t* at = pinned.next.fetch_add(static_cast<ptrdiff_t>((bytes + 127) / 64 * 64));
  if (at + bytes > pinned.end) std::abort();
  return at;
}

void give(void* at) noexcept {
  if (pinned.begin == nullptr || at < pinned.begin || at >= pinned.end) std::free(at);
}

} // namespace

void* operator new(size_t bytes) { return take(bytes, 64); }
void* operator new[](size_t bytes) { return take(bytes, 64); }
void* operator new(size_t bytes, std::align_val_t) { return take(bytes, 64); }
void* operator new[](size_t bytes, std::align_val_t) { return take(bytes, 64); }
void operator delete(void* at) noexcept { give(at); }
void operator delete[](void* at) noexcept { give(at); }
void operator delete(void* at, size_t) noexcept { give(at); }
void operator delete[](void* at, size_t) noexcept { give(at); }
void operator delete(void* at, std::align_val_t) noexcept { give(at); }
void operator delete[](void* at, std::align_val_t) noexcept { give(at); }
void operator delete(void* at, size_t, std::align_val_t) noexcept { give(at); }
void operator delete[](void* at, size_t, std::align_val_t) noexcept { give(at); }

extern "C" const ep_cuda_table* ep_cuda_table_of(uint32_t version);

using namespace ep::test;

namespace {

constexpr uint64_t generous_cycles = 20'000'000'000; // some ten seconds

// The device's counterpart of a world: the same handles, but data and signals in device memory.
class gpu_world {
 public:
  gpu_world(world& there, uint64_t data_bytes, uint64_t slot_count) : host(there), bytes(data_bytes) {
    for (int32_t rank = 0; rank < host.size(); ++rank) {
      data.push_back(gpu_memory(bytes + 64));
      signals.push_back(gpu_memory(slot_count * 8));
      views.push_back({reinterpret_cast<uint64_t>(data.back()), reinterpret_cast<uint64_t>(signals.back()), 0, 0});
      streams.push_back(gpu_stream());
      EP_CHECK(data.back() != nullptr && signals.back() != nullptr && streams.back() != nullptr);
    }
  }
  ~gpu_world() {
    for (size_t i = 0; i < data.size(); ++i) {
      gpu_free(data[i]);
      gpu_free(signals[i]);
      gpu_stream_free(streams[i]);
    }
  }
  gpu_world(const gpu_world&) = delete;
  gpu_world& operator=(const gpu_world&) = delete;

  ep_memory_handle on_device(ep_memory_handle memory) const {
    memory.peers = reinterpret_cast<uint64_t>(views.data());
    return memory;
  }
  ep_cuda_launch launch(int32_t rank, uint32_t blocks, uint32_t lanes) const {
    return {streams[static_cast<size_t>(rank)], blocks, lanes, generous_cycles, 0, 0};
  }
  void finish() const {
    for (void* stream : streams) EP_CHECK_EQ(gpu_finish(stream), 0);
  }
  void fetch() {
    for (int32_t rank = 0; rank < host.size(); ++rank) {
      EP_CHECK_EQ(gpu_copy(host.data(rank), data[static_cast<size_t>(rank)], bytes), 0);
    }
  }

 private:
  world& host;
  uint64_t bytes;
  std::vector<void*> data;
  std::vector<void*> signals;
  std::vector<ep_peer_view> views;
  std::vector<void*> streams;
};

void dispatches(int32_t size, uint64_t seed) {
  const uint32_t call_count = 3;
  dispatch_case plan({size, call_count, call_count, 1 + static_cast<uint32_t>(seed % 3), false, true}, seed);
  world ranks({size, plan.bytes(), plan.slots(), false, 1});
  gpu_world device(ranks, plan.bytes(), plan.slots());
  auto args = all_args(plan, ranks);
  for (uint32_t call = 0; call < call_count; ++call) {
    for (int32_t rank = 0; rank < size; ++rank) {
      ep_dispatch_args& own = args[static_cast<size_t>(rank)][call];
      own.memory = device.on_device(own.memory);
      EP_CHECK_EQ(ep::cuda_gradient(device.launch(rank, 1 + static_cast<uint32_t>(seed % 4), 32u << (seed % 5)), own, nullptr, 0), 0);
    }
  }
  device.finish();
  device.fetch();
  for (int32_t rank = 0; rank < size; ++rank) {
    EP_CHECK_EQ(plan.status(rank).status, static_cast<uint32_t>(EP_STATUS_OK));
    for (uint32_t call = 0; call < call_count; ++call) EP_CHECK(plan.arrived(ranks, rank, call));
  }
}

// Requests of the GPU, performed by an engine thread of the host; data and signals stay in pinned host memory.
void dispatches_by_proxy(int32_t size, uint64_t seed) {
  dispatch_case plan({size, 1, 1, 2, true, true}, seed);
  world ranks({size, plan.bytes(), plan.slots(), true, 4});
  gpu_world streams(ranks, 64, 1);
  auto args = all_args(plan, ranks);
  std::atomic<uint32_t> stop{0};
  std::vector<ep::kernel_environment> environments(static_cast<size_t>(size));
  std::vector<std::thread> engines;
  for (int32_t rank = 0; rank < size; ++rank) {
    ep::kernel_environment& environment = environments[static_cast<size_t>(rank)];
    environment.waits.cancel = &stop;
    environment.waits.policy = ep::wait_policy{0, 20'000, 100'000}; // the GPU wakes nobody
    engines.emplace_back([&, rank] {
      ep::fast_context ctx{environments[static_cast<size_t>(rank)], 0, 1, nullptr};
      ranks.serve(ctx, rank, seed);
    });
  }
  for (int32_t rank = 0; rank < size; ++rank) {
    EP_CHECK_EQ(ep::cuda_gradient(streams.launch(rank, 2, 64), args[static_cast<size_t>(rank)][0], nullptr, 0), 0);
  }
  streams.finish();
  stop.store(1);
  for (std::thread& engine : engines) engine.join();
  for (int32_t rank = 0; rank < size; ++rank) {
    EP_CHECK_EQ(plan.status(rank).status, static_cast<uint32_t>(EP_STATUS_OK));
    EP_CHECK(plan.arrived(ranks, rank, 0));
  }
}

// WQEs of the GPU, checked and executed by a NIC that is a thread of the host: what it reads of rings, records and registers was written across the bus.
void dispatches_by_nic(int32_t size, uint64_t seed) {
  const uint32_t call_count = 2;
  dispatch_case plan({size, call_count, call_count, 1 + static_cast<uint32_t>(seed % 2), false, true}, seed);
  const auto blocks = 1 + static_cast<uint32_t>(seed % 3);
  world_options options;
  options.size = size;
  options.bytes = plan.bytes();
  options.slots = plan.slots();
  options.qps = 1 + static_cast<uint32_t>(seed / 2 % 3);
  options.depth = 2u << seed % 4;
  options.collapsed = seed % 3 != 0;
  options.max_message = seed % 4 == 0 ? 64 : uint64_t{1} << 30;
  if (blocks <= options.qps) options.sharing = static_cast<uint32_t>(seed / 3 % 3);
  world ranks(options);
  gpu_world streams(ranks, 64, 1);
  auto args = all_args(plan, ranks);
  std::atomic<uint32_t> stop{0};
  std::vector<ep::kernel_environment> environments(static_cast<size_t>(size));
  std::vector<std::thread> nics;
  for (int32_t rank = 0; rank < size; ++rank) {
    ep::kernel_environment& environment = environments[static_cast<size_t>(rank)];
    environment.waits.cancel = &stop;
    environment.waits.policy = ep::wait_policy{0, 20'000, 100'000};
    nics.emplace_back([&, rank] {
      ep::fast_context ctx{environments[static_cast<size_t>(rank)], 0, 1, nullptr};
      ranks.nic(rank).serve_all(ctx);
    });
  }
  for (uint32_t call = 0; call < call_count; ++call) {
    for (int32_t rank = 0; rank < size; ++rank) {
      EP_CHECK_EQ(ep::cuda_gradient(streams.launch(rank, blocks, 32u << seed % 3), args[static_cast<size_t>(rank)][call], nullptr, 0), 0);
    }
  }
  streams.finish();
  stop.store(1);
  for (std::thread& nic : nics) nic.join();
  for (int32_t rank = 0; rank < size; ++rank) {
    EP_CHECK_EQ(plan.status(rank).status, static_cast<uint32_t>(EP_STATUS_OK));
    for (const std::string& violation : ranks.nic(rank).violations) EP_CHECK_EQ(violation, "");
    for (int32_t peer = 0; peer < size; ++peer) {
      for (uint32_t key = 0; key < options.qps; ++key) EP_CHECK_EQ(ranks.qp(rank, peer, key).done, ranks.qp(rank, peer, key).taken);
    }
    for (uint32_t call = 0; call < call_count; ++call) EP_CHECK(plan.arrived(ranks, rank, call));
  }
}

void compat(int32_t size, uint64_t seed) {
  const auto replicas = static_cast<uint32_t>(seed % 10);
  compat_case plan(size, replicas, seed);
  for (const bool back : {false, true}) {
    if (back && replicas == 0) continue;
    world ranks({size, plan.bytes(), plan.slots(), false, 4});
    gpu_world device(ranks, plan.bytes(), plan.slots());
    bool launched = true;
    std::vector<ep_compat_args> all;
    for (int32_t rank = 0; rank < size; ++rank) {
      all.push_back(back ? plan.gradient_args(ranks, rank) : plan.forward_args(ranks, rank));
      all.back().memory = device.on_device(all.back().memory);
      // The kept defect: a rank without rows to send cannot take part. Such a plan is left alone as a whole.
      launched = launched && ep::compat_refusal(all.back()) == nullptr;
    }
    if (!launched) {
      EP_CHECK(back);
      continue;
    }
    for (int32_t rank = 0; rank < size; ++rank) {
      const ep_compat_args& own = all[static_cast<size_t>(rank)];
      const auto blocks = static_cast<uint32_t>(ep::compat_blocks(20, own.tokens));
      EP_CHECK_EQ(ep::cuda_compat(device.launch(rank, blocks, ep::compat_block_lanes), own), 0);
    }
    device.finish();
    for (int32_t rank = 0; rank < size; ++rank) EP_CHECK(back ? plan.gradient_right(rank) : plan.forward_right(rank));
  }
}

// -0.0 alone, an order that shows in the rounding, and a shard without replicas.
void sums() {
  std::vector<float> src = {-0.0f, 16777216.0f, 1.0f, 1.0f};
  std::vector<float> dst(3, 7.0f);
  std::vector<uint64_t> shard_row = {0, 1, 2};
  std::vector<uint64_t> shard_rows = {1, 1, 1};
  std::vector<uint64_t> begin = {0, 1, 4, 4};
  std::vector<uint64_t> replica = {0, 1, 2, 3};
  const ep_replica_sum_args args{reinterpret_cast<uint64_t>(src.data()), reinterpret_cast<uint64_t>(dst.data()), 4, 1,
                                 reinterpret_cast<uint64_t>(shard_row.data()), reinterpret_cast<uint64_t>(shard_rows.data()),
                                 reinterpret_cast<uint64_t>(begin.data()), reinterpret_cast<uint64_t>(replica.data()), 3, EP_DTYPE_F32, 0};
  void* stream = gpu_stream();
  EP_CHECK_EQ(ep::cuda_replica_sum({stream, 2, 64, generous_cycles, 0, 0}, args), 0);
  EP_CHECK_EQ(gpu_finish(stream), 0);
  gpu_stream_free(stream);
  EP_CHECK(dst[0] == 0.0f && std::signbit(dst[0]));
  EP_CHECK_EQ(dst[1], 16777216.0f);
  EP_CHECK_EQ(dst[2], 0.0f);
}

// Shapes of the host's test, and one whose rows and weights go around all lanes.
void experts() {
  void* stream = gpu_stream();
  for (const expert_formats& pair : expert_pairs) {
    for (const uint32_t hidden : {130u, 1024u}) {
      expert_case given(pair.payload, pair.dtype, hidden, hidden / 10, expert_runs, pair.payload);
      EP_CHECK_EQ(ep::cuda_experts_forward({stream, 1, 32, 0, 0, 0}, given.args), 0);
      EP_CHECK_EQ(gpu_finish(stream), 0);
      given.check(pair.bound);
      const std::vector<uint8_t> wanted = given.result();
      given.clear();
      EP_CHECK_EQ(ep::cuda_experts_forward({stream, 1, 32, 0, 0, 0}, given.counted(18)), 0);
      EP_CHECK_EQ(gpu_finish(stream), 0);
      EP_CHECK(given.result() == wanted);
    }
  }
  expert_case many(EP_MOE_F32, EP_MOE_F32, 32, 8, expert_runs, 1);
  many.args.experts = EP_EXPERT_MOST + 1;
  EP_CHECK(ep::cuda_experts_forward({stream, 1, 32, 0, 0, 0}, many.args) != 0);
  gpu_stream_free(stream);
}

// A peer that never sends: the wait ends by its budget, or at once when the host cancels it or says that this peer, not another one, is lost.
enum class ending { time, cancel, loss };
void ends(ending how) {
  dispatch_case plan({2, 1, 1, 1, true, true}, 3);
  world ranks({2, plan.bytes(), plan.slots(), false, 1});
  gpu_world device(ranks, plan.bytes(), plan.slots());
  std::vector<uint64_t> owed = {0, 7};
  ep_dispatch_args args = plan.args(ranks, 0, 0);
  args.memory = device.on_device(args.memory);
  args.part_count = 0;
  args.arrivals = reinterpret_cast<uint64_t>(owed.data());
  auto cancel = std::make_unique<std::atomic<uint32_t>>(0);
  std::vector<uint32_t> lost = {EP_STATUS_PEER_LOST, EP_STATUS_OK};
  ep_cuda_launch launch = device.launch(0, 3, 64);
  launch.wait_cycles = how == ending::time ? 2'000'000 : 0;
  launch.cancel = reinterpret_cast<uint64_t>(cancel.get());
  launch.lost = reinterpret_cast<uint64_t>(lost.data());
  EP_CHECK_EQ(ep::cuda_gradient(launch, args, nullptr, 0), 0);
  if (how == ending::cancel) cancel->store(1);
  if (how == ending::loss) std::atomic_ref<uint32_t>(lost[1]).store(EP_STATUS_PEER_LOST);
  device.finish();
  const ep_kernel_status& status = plan.status(0);
  const uint32_t wanted = how == ending::time ? EP_STATUS_TIMEOUT : how == ending::cancel ? EP_STATUS_ABORTED : EP_STATUS_PEER_LOST;
  EP_CHECK_EQ(status.status, wanted);
  EP_CHECK_EQ(status.rank, 1);
  EP_CHECK_EQ(status.stage, EP_STAGE_ARRIVAL);
  EP_CHECK_EQ(status.expected, 7u);
  EP_CHECK_EQ(status.found, 0u);
}

} // namespace

int main() {
  int devices = 0;
  const ep_cuda_table* table = ep_cuda_table_of(EP_CUDA_TABLE_VERSION);
  const int error = table->device_count(&devices);
  if (error != 0 || devices == 0) {
    std::fprintf(stderr, "no GPU: %s\n", table->error_text(error));
    return 2;
  }
  constexpr size_t arena_bytes = size_t{1} << 30;
  auto* memory = static_cast<uint8_t*>(gpu_pinned(arena_bytes));
  if (memory == nullptr) {
    std::fprintf(stderr, "no pinned memory of %zu bytes\n", arena_bytes);
    return 2;
  }
  pinned.end = memory + arena_bytes;
  pinned.next = memory;
  pinned.begin = memory;
  for (int32_t size = 1; size <= 4; ++size) {
    for (uint64_t seed = 0; seed < 40; ++seed) {
      dispatches(size, seed * 101 + static_cast<uint64_t>(size));
      compat(size, seed * 31 + static_cast<uint64_t>(size));
    }
    for (uint64_t seed = 0; seed < 10; ++seed) dispatches_by_proxy(size, seed);
    for (uint64_t seed = 0; seed < 30; ++seed) dispatches_by_nic(size, seed * 37 + static_cast<uint64_t>(size));
  }
  sums();
  experts();
  for (const ending how : {ending::time, ending::cancel, ending::loss}) ends(how);
  return ep::check::finish();
}
