// Calls of experts, in both forms, where ranks store to those of their node and reach the others by an engine or a NIC: words that hold epochs stand beside counts.
#include "../check.hpp"
#include "moe_case.hpp"

using namespace ep::test;

namespace {

void calls(bool nic, bool compact, int32_t size, uint64_t seed) {
  moe_options wanted;
  wanted.size = size;
  wanted.calls = 4;
  wanted.slots = 1 + static_cast<uint32_t>(seed % 3);
  wanted.compact = compact;
  wanted.alignment = 1 + static_cast<uint32_t>(seed % 3);
  wanted.payload = seed % 4 == 1 ? EP_MOE_F8_F32 : EP_MOE_BF16;
  moe_case plan(wanted, seed);
  world_options options{size, plan.bytes(), plan.signal_slots(), !nic, uint64_t{1} << (seed % 3)};
  if (nic) options.qps = 1 + static_cast<uint32_t>(seed % 2);
  options.node = 2;
  world ranks(options);
  plan.bind(ranks);
  std::atomic<uint32_t> wrong{0};
  const auto result = ranks.run_simt(shape(1 + static_cast<uint32_t>(seed % 3), 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
    return ranks.with_mixed_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) { return run_moe(ctx, endpoint, plan, rank, wrong); });
  });
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  EP_CHECK_EQ(wrong.load(), 0u);
}

// The same where one of two that are near does not have the other mapped: one names epochs where the other counts.
void asymmetric() {
  uint32_t caught = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    moe_options wanted;
    wanted.calls = 3;
    wanted.slots = 1;
    wanted.overlap = false;
    moe_case plan(wanted, seed);
    world_options options{2, plan.bytes(), plan.signal_slots(), true, 4};
    options.node = 2;
    world ranks(options);
    plan.bind(ranks);
    ranks.forget(1, 0);
    std::atomic<uint32_t> wrong{0};
    const auto result = ranks.run_simt(shape(1, 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
      return ranks.with_mixed_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) { return run_moe(ctx, endpoint, plan, rank, wrong); });
    });
    caught += wrong.load() != 0 || result.outcome != ep::simt_outcome::finished ? 1 : 0;
  }
  EP_CHECK(caught > 3);
}

} // namespace

int main() {
  for (const bool nic : {false, true}) {
    for (const bool compact : {false, true}) {
      for (int32_t size = 2; size <= 5; ++size) {
        for (uint64_t seed = 0; seed < 25 / seed_share; ++seed) calls(nic, compact, size, seed * 7919 + static_cast<uint64_t>(size));
      }
    }
  }
  asymmetric();
  return ep::check::finish();
}
