// Dispatch and combine in high-throughput form with many lanes and blocks, all ranks and engines interleaved under seeds.
#include "../check.hpp"
#include "moe_apart.hpp"

using namespace ep::test;

namespace {

constexpr uint32_t dtypes[] = {EP_MOE_BF16, EP_MOE_F16, EP_MOE_F32};
constexpr uint32_t casts[] = {EP_MOE_F8_F32, EP_MOE_F8_F32_POW2, EP_MOE_F8_UE8M0};
constexpr uint32_t alignments[] = {1, 2, 8};

moe_options shape_of(int32_t size, uint64_t seed) {
  moe_options wanted;
  wanted.size = size;
  wanted.calls = 4;
  wanted.slots = 1 + static_cast<uint32_t>(seed % 3);
  wanted.dtype = dtypes[seed % 3];
  wanted.payload = seed % 4 == 1 ? casts[seed / 4 % 3] : wanted.dtype;
  wanted.result_payload = seed % 5 == 1 ? EP_MOE_LOGFMT10 : wanted.dtype;
  wanted.compact = true;
  wanted.alignment = alignments[seed / 3 % 3];
  wanted.cached = seed / 2 % 2 == 0;
  wanted.overlap = !wanted.cached;
  return wanted;
}

enum class route { stores, engine, nic };

world_options world_of(const moe_case& plan, int32_t size, route by, uint64_t seed) {
  world_options made{size, plan.bytes(), plan.signal_slots(), by == route::engine, uint64_t{1} << (seed % 3)};
  if (by == route::nic) made.qps = 1 + static_cast<uint32_t>(seed % 2);
  return made;
}

template <class Kernels = moe_kernels> ep::simt_result run(moe_case& plan, world& ranks, uint64_t seed, std::atomic<uint32_t>& wrong, uint32_t calls = UINT32_MAX) {
  return ranks.run_simt(shape(1 + static_cast<uint32_t>(seed / 3 % 3), 8, seed % 2 != 0 ? 4 : 8), seeded(seed), [&](auto& ctx, int32_t rank) {
    return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) { return run_moe<Kernels>(ctx, endpoint, plan, rank, wrong, 0, calls); });
  });
}

void calls(route by, const moe_options& wanted, uint64_t seed) {
  moe_case plan(wanted, seed);
  world ranks(world_of(plan, wanted.size, by, seed));
  plan.bind(ranks);
  std::atomic<uint32_t> wrong{0};
  const auto result = run(plan, ranks, seed, wrong);
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  if (wrong.load() != 0) std::fprintf(stderr, "route %d, %d ranks, seed %llu: %u\n", static_cast<int>(by), wanted.size, static_cast<unsigned long long>(seed), wrong.load());
  EP_CHECK_EQ(wrong.load(), 0u);
  for (int32_t rank = 0; rank < wanted.size; ++rank) {
    for (uint32_t e = 0; e < plan.local(rank); ++e) EP_CHECK_EQ(plan.total(rank, e), plan.expected_total(rank, e));
  }
}

// What users run: a thread for each block, one lane each.
void on_threads(route by, const moe_options& wanted, uint64_t seed) {
  moe_case plan(wanted, seed);
  world ranks(world_of(plan, wanted.size, by, seed));
  plan.bind(ranks);
  std::atomic<uint32_t> wrong{0};
  EP_CHECK(ranks.run_fast(1 + static_cast<uint32_t>(seed % 2), [&](auto& ctx, int32_t rank) {
    return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) { return run_moe(ctx, endpoint, plan, rank, wrong); });
  }));
  EP_CHECK_EQ(wrong.load(), 0u);
}

// The peers count rows of one pair of ranks and one expert up to 1024 or 2048 in one word.
void thousands_to_one_expert(route by) {
  moe_options wanted;
  wanted.calls = 2;
  wanted.compact = true;
  wanted.alignment = 128;
  wanted.tokens = 2500;
  wanted.cached = true;
  wanted.overlap = false;
  on_threads(by, wanted, 2);
  wanted.compact = false;
  wanted.cached = false;
  wanted.alignment = 1;
  on_threads(by, wanted, 2);
}

} // namespace

int main() {
  for (const route by : {route::stores, route::engine, route::nic}) {
    for (int32_t size = 1; size <= 4; ++size) {
      for (uint64_t seed = 0; seed < 6; ++seed) on_threads(by, shape_of(size, seed * 104729 + static_cast<uint64_t>(size)), seed);
    }
    thousands_to_one_expert(by);
  }
  for (const route by : {route::stores, route::engine, route::nic}) {
    for (int32_t size = 1; size <= 4; ++size) {
      for (uint64_t seed = 0; seed < 60 / seed_share; ++seed) {
        const uint64_t own = seed * 7919 + static_cast<uint64_t>(size);
        moe_options wanted = shape_of(size, own);
        if (seed % 5 == 4) wanted.spare = 0;
        calls(by, wanted, own);
      }
    }
  }
  return ep::check::finish();
}
