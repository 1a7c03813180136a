// The kernels for experts on a real GPU, against the same calls and answers as tests/device: the ranks are streams of one device; the memory that they share lies in
// device memory or in pinned memory of the host; behind queue pairs is a NIC that is a thread of the host.
#include <cstdlib>

#include "gpu_arena.hpp"

#include "../check.hpp"
#include "../device/moe_case.hpp"
#include "moe_kernels.hpp"

using namespace ep::test;

namespace {

constexpr uint32_t dtypes[] = {EP_MOE_BF16, EP_MOE_F16, EP_MOE_F32};
constexpr uint32_t casts[] = {EP_MOE_F8_F32, EP_MOE_F8_F32_POW2, EP_MOE_F8_UE8M0};

enum class route { device, pinned, engine, nic };

// Every half of every call on its rank's stream, or of all ranks by one launch; then everything is looked at.
void calls(route by, bool compact, int32_t size, uint64_t seed, bool together = false) {
  moe_options wanted;
  wanted.size = size;
  wanted.slots = 1 + static_cast<uint32_t>(seed % 3);
  wanted.dtype = dtypes[seed % 3];
  wanted.payload = seed % 4 == 1 ? casts[seed / 4 % 3] : wanted.dtype;
  wanted.result_payload = seed % 5 == 1 ? EP_MOE_LOGFMT10 : wanted.dtype;
  wanted.zero_copy = seed % 3 == 0 && (by == route::device || by == route::pinned);
  if (wanted.zero_copy) wanted.result_payload = wanted.dtype;
  wanted.compact = compact;
  wanted.calls = compact ? wanted.slots : 3; // in place: looked at before the slot is used again
  wanted.alignment = 1 + static_cast<uint32_t>(seed % 2) * 7;
  moe_case plan(wanted, seed);
  world_options options{size, plan.bytes(), plan.signal_slots(), by == route::engine, 4};
  if (by == route::nic) options.qps = 4;
  world ranks(options);
  plan.bind(ranks);

  std::atomic<uint32_t> stop{0};
  std::vector<ep::kernel_environment> environments(static_cast<size_t>(size));
  std::vector<std::thread> servers;
  for (int32_t rank = 0; rank < size && (by == route::nic || by == route::engine); ++rank) {
    ep::kernel_environment& environment = environments[static_cast<size_t>(rank)];
    environment.waits.cancel = &stop;
    environment.waits.policy = ep::wait_policy{0, 20'000, 100'000}; // the GPU wakes nobody
    servers.emplace_back([&, rank] {
      ep::fast_context ctx{environments[static_cast<size_t>(rank)], 0, 1, nullptr};
      if (by == route::nic) ranks.nic(rank).serve_all(ctx);
      else ranks.serve(ctx, rank, seed);
    });
  }
  std::vector<ep_peer_view> views(static_cast<size_t>(size));
  std::vector<void*> streams;
  for (ep_peer_view& view : views) {
    streams.push_back(gpu_stream());
    if (by != route::device) continue;
    view.data = reinterpret_cast<uint64_t>(gpu_memory(plan.bytes() + 64));
    view.signals = reinterpret_cast<uint64_t>(gpu_memory(plan.signal_slots() * 8));
  }
  const auto blocks = 1 + static_cast<uint32_t>(seed % 4);
  const auto stream_of = [&](int32_t rank) { return streams[together ? 0 : static_cast<size_t>(rank)]; };
  for (const moe_step& step : plan.halves()) {
    std::vector<gpu_moe_rank> all;
    for (int32_t rank = 0; rank < size; ++rank) {
      moe_case::one_rank& own = plan.at(step.call, rank);
      if (step.half == 2 && plan.offers(step.call, rank)) {
        EP_CHECK_EQ(gpu_finish(stream_of(rank)), 0); /* its dispatch awaits halves that were launched before */
        plan.offer(ranks, step.call, rank);
        const uint64_t offset = own.combine.y - reinterpret_cast<uint64_t>(ranks.data(rank));
        if (by == route::device) {
          const auto* written = reinterpret_cast<const void*>(own.combine.y);
          own.combine.y = views[static_cast<size_t>(rank)].data + offset;
          EP_CHECK_EQ(gpu_copy(reinterpret_cast<void*>(own.combine.y), written, plan.offered_bytes()), 0);
        }
      }
      ep_moe_buffer buffer = plan.buffer(rank);
      if (by == route::device) buffer.memory.peers = reinterpret_cast<uint64_t>(views.data());
      if (together) all.push_back({buffer, &own.dispatch, &own.combine});
      else EP_CHECK_EQ(gpu_moe(stream_of(rank), blocks, 32u << seed % 4, buffer, own.dispatch, own.combine, step.half), 0);
    }
    if (together) EP_CHECK_EQ(gpu_moe_together(streams[0], blocks, 32u << seed % 4, all, step.half), 0);
  }
  for (void* stream : streams) EP_CHECK_EQ(gpu_finish(stream), 0);
  stop.store(1);
  for (std::thread& server : servers) server.join();
  for (uint32_t call = 0; call < wanted.calls; ++call) {
    for (int32_t rank = 0; rank < size; ++rank) {
      const ep_kernel_status& status = plan.at(call, rank).status;
      EP_CHECK_EQ(status.status, static_cast<uint32_t>(EP_STATUS_OK));
      const uint32_t dispatched = plan.wrong_dispatch(call, rank);
      const uint32_t combined = plan.wrong_combine(call, rank);
      if (dispatched + combined != 0) {
        std::fprintf(stderr, "route %d, %s, %d ranks, seed %llu, call %u, rank %d\n", static_cast<int>(by), compact ? "compact" : "low latency", size,
                     static_cast<unsigned long long>(seed), call, rank);
      }
      EP_CHECK_EQ(dispatched, 0u);
      EP_CHECK_EQ(combined, 0u);
      for (const uint64_t verdict : plan.at(call, rank).ranks) EP_CHECK_EQ(verdict, 0u);
    }
  }
  for (size_t rank = 0; rank < streams.size(); ++rank) {
    gpu_stream_free(streams[rank]);
    if (by != route::device) continue;
    gpu_free(reinterpret_cast<void*>(views[rank].data));
    gpu_free(reinterpret_cast<void*>(views[rank].signals));
  }
}

} // namespace

// moe_gpu_test [seeds, 100]
int main(int count, char** words) {
  const auto seeds = static_cast<uint64_t>(count > 1 ? std::atoi(words[1]) : 40);
  if (!arena::start(size_t{6} << 30)) {
    std::fprintf(stderr, "no GPU, or no pinned memory\n");
    return 2;
  }
  uint64_t wrong = 1;
  EP_CHECK_EQ(gpu_wrong_pairs(&wrong), 0);
  EP_CHECK_EQ(wrong, 0u);
  for (int32_t size = 1; size <= 4; ++size) {
    for (uint64_t seed = 0; seed < seeds; ++seed) {
      const uint64_t mixed = seed * 101 + static_cast<uint64_t>(size);
      calls(route::device, false, size, mixed);
      calls(route::device, false, size, mixed, true);
      calls(route::pinned, true, size, mixed);
      if (seed < 15) {
        calls(route::engine, seed % 2 != 0, size, mixed);
        calls(route::nic, seed % 2 != 0, size, mixed);
      }
    }
  }
  return ep::check::finish();
}
