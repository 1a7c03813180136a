// Dispatch and combine in low-latency form with many lanes and blocks, all ranks and engines interleaved under seeds.
#include "../check.hpp"
#include "moe_apart.hpp"

using namespace ep::test;

namespace {

constexpr uint32_t dtypes[] = {EP_MOE_BF16, EP_MOE_F16, EP_MOE_F32};
constexpr uint32_t casts[] = {EP_MOE_F8_F32, EP_MOE_F8_F32_POW2, EP_MOE_F8_UE8M0};

moe_options shape_of(int32_t size, uint64_t seed) {
  moe_options wanted;
  wanted.size = size;
  wanted.calls = 3;
  wanted.slots = 1 + static_cast<uint32_t>(seed % 3);
  wanted.dtype = dtypes[seed % 3];
  wanted.payload = seed % 4 == 1 ? casts[seed / 4 % 3] : wanted.dtype;
  wanted.result_payload = seed % 5 == 1 ? EP_MOE_LOGFMT10 : wanted.dtype;
  return wanted;
}

enum class route { stores, engine, nic };

world_options world_of(const moe_case& plan, int32_t size, route by, uint64_t seed) {
  world_options made{size, plan.bytes(), plan.signal_slots(), by == route::engine, uint64_t{1} << (seed % 3)};
  if (by == route::nic) made.qps = 1 + static_cast<uint32_t>(seed % 2);
  return made;
}

ep::simt_launch blocks_of(uint64_t seed) { return shape(1 + static_cast<uint32_t>(seed / 3 % 3), 8, seed % 2 != 0 ? 4 : 8); }

void calls(route by, int32_t size, uint64_t seed, const ep::simt_launch& blocks) {
  moe_case plan(shape_of(size, seed), seed);
  world ranks(world_of(plan, size, by, seed));
  plan.bind(ranks);
  std::atomic<uint32_t> wrong{0};
  const auto result = ranks.run_simt(blocks, seeded(seed), [&](auto& ctx, int32_t rank) {
    return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) { return run_moe(ctx, endpoint, plan, rank, wrong); });
  });
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  if (wrong.load() != 0) std::fprintf(stderr, "route %d, %d ranks, seed %llu: %u\n", static_cast<int>(by), size, static_cast<unsigned long long>(seed), wrong.load());
  EP_CHECK_EQ(wrong.load(), 0u);
  for (int32_t rank = 0; rank < size; ++rank) {
    for (uint32_t e = 0; e < plan.local(rank); ++e) EP_CHECK_EQ(plan.total(rank, e), plan.expected_total(rank, e));
  }
}

} // namespace

int main() {
  for (const route by : {route::stores, route::engine, route::nic}) {
    for (int32_t size = 1; size <= 4; ++size) {
      for (uint64_t seed = 0; seed < 60 / seed_share; ++seed) {
        const uint64_t mixed = seed * 7919 + static_cast<uint64_t>(size);
        calls(by, size, mixed, blocks_of(mixed));
      }
    }
  }
  // More experts than there are lanes: warps come to each of theirs, one batch after the other.
  for (uint64_t seed = 0; seed < 60 / seed_share; ++seed) calls(route::stores, 1 + static_cast<int32_t>(seed % 4), seed * 6007 + 5, shape(1, 2, 2));
  return ep::check::finish();
}
