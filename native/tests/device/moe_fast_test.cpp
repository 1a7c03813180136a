// Calls of experts in low-latency form as users on CPUs run them: a thread for each block and engine. The test that ThreadSanitizer has most to say about.
#include "../check.hpp"
#include "moe_case.hpp"

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

} // namespace

int main() {
  for (const route by : {route::stores, route::engine, route::nic}) {
    for (int32_t size = 1; size <= 4; ++size) {
      for (uint64_t seed = 0; seed < 8; ++seed) calls(by, size, seed * 104729 + static_cast<uint64_t>(size));
    }
  }
  return ep::check::finish();
}
