// Calls of experts in low-latency form as users on CPUs run them: a thread for each block and engine. The test that ThreadSanitizer has most to say about.
#include "../check.hpp"
#include "moe_apart.hpp"

using namespace ep::test;

namespace {

enum class route { stores, engine, nic };

void calls(route by, int32_t size, uint64_t seed) {
  moe_options wanted;
  wanted.size = size;
  wanted.calls = 8;
  wanted.slots = 1 + static_cast<uint32_t>(seed % 4);
  wanted.payload = seed % 3 == 0 ? EP_MOE_F8_UE8M0 : EP_MOE_BF16;
  moe_case plan(wanted, seed);
  world ranks({size, plan.bytes(), plan.signal_slots(), by == route::engine, uint64_t{1} << (seed % 3), by == route::nic ? 2u : 0u});
  plan.bind(ranks);
  std::atomic<uint32_t> wrong{0};
  EP_CHECK(ranks.run_fast(1 + static_cast<uint32_t>(seed % 2), [&](auto& ctx, int32_t rank) {
    return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) { return run_moe(ctx, endpoint, plan, rank, wrong); });
  }));
  EP_CHECK_EQ(wrong.load(), 0u);
}

// A rank sleeps while it awaits another by a limit of its own, and does not look again every 50 us: in high throughput rank 0 awaits, for 300 ms, counts of rank 1, which does not come.
void sleeps_until_counts() {
  moe_options wanted;
  wanted.calls = 1;
  wanted.compact = true;
  wanted.dead = 1;
  uint64_t seed = 0;
  while (moe_case(wanted, seed).local(0) == 0) ++seed;
  moe_case plan(wanted, seed);
  world ranks({2, plan.bytes(), plan.signal_slots(), false, 1, 0});
  plan.bind(ranks);
  ep::progress_list looks;
  uint32_t looked = 0;
  looks.add(&looked, [&] { ++looked; return false; });
  ep::wait_scope& waits = ranks.environment(0).waits;
  waits.policy = ep::wait_policy{0, 0, 2'000'000, 0, 0};
  waits.progress = &looks;
  auto& own = plan.at(0, 0);
  own.dispatch.call.counts_by_ns = static_cast<uint64_t>(ep::deadline_after(300));
  EP_CHECK(ranks.run_fast(1, [&](auto& ctx, int32_t rank) {
    return rank == 1 || ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) { return moe_kernels::run(ctx, endpoint, plan.buffer(0), own, 0); });
  }));
  EP_CHECK_EQ(own.ranks[1], static_cast<uint64_t>(EP_STATUS_TIMEOUT));
  EP_CHECK(looked != 0);
  EP_CHECK(looked < 2 * 300 / 2 + 50); // two for each time that it wakes to see who is alive
}

} // namespace

int main() {
  sleeps_until_counts();
  for (const route by : {route::stores, route::engine, route::nic}) {
    for (int32_t size = 1; size <= 4; ++size) {
      for (uint64_t seed = 0; seed < 8; ++seed) calls(by, size, seed * 104729 + static_cast<uint64_t>(size));
    }
  }
  return ep::check::finish();
}
