// Attention dispatch with many lanes and blocks, all ranks and proxy engines interleaved under seeds.
#include "../check.hpp"
#include "dispatch_case.hpp"

using namespace ep::test;

namespace {

void dispatches(bool proxy, int32_t size, uint64_t seed) {
  case_options wanted;
  wanted.size = size;
  wanted.calls = 4;
  wanted.leases = 1 + static_cast<uint32_t>(seed % 2);
  wanted.parts = 1 + static_cast<uint32_t>(seed % 3);
  dispatch_case plan(wanted, seed);
  world ranks({size, plan.bytes(), plan.slots(), proxy, uint64_t{1} << (seed % 3)});
  const auto args = all_args(plan, ranks);
  std::atomic<uint32_t> wrong{0};
  const auto result = ranks.run_simt(shape(1 + static_cast<uint32_t>(seed / 3 % 3), 8, seed % 2 != 0 ? 4 : 8), seeded(seed), [&](auto& ctx, int32_t rank) {
    const auto& own = args[static_cast<size_t>(rank)];
    return ranks.with_endpoint(own[0].memory, [&](const auto& endpoint) {
      return run_calls(ctx, endpoint, ranks, plan, rank, own, wrong,
                       [](auto& c, const auto& e, const ep_dispatch_args& a) { return ep::attention_dispatch(c, e, a); });
    });
  });
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  EP_CHECK_EQ(wrong.load(), 0u);
}

void dispatches_on_threads(int32_t size, uint64_t seed) {
  dispatch_case plan({size, 6, 2, 2, true, true}, seed);
  world ranks({size, plan.bytes(), plan.slots(), false, 1});
  const auto args = all_args(plan, ranks);
  std::atomic<uint32_t> wrong{0};
  EP_CHECK(ranks.run_simt_threads(shape(2, 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
    const auto& own = args[static_cast<size_t>(rank)];
    return run_calls(ctx, ep::load_store_endpoint{own[0].memory}, ranks, plan, rank, own, wrong,
                     [](auto& c, const auto& e, const ep_dispatch_args& a) { return ep::attention_dispatch(c, e, a); });
  }));
  EP_CHECK_EQ(wrong.load(), 0u);
}

// The same seed gives the same schedule, engines and all.
void repeats() {
  uint64_t fingerprints[2];
  for (uint64_t& fingerprint : fingerprints) {
    dispatch_case plan({3, 2, 1, 2, true, true}, 5);
    world ranks({3, plan.bytes(), plan.slots(), true, 2});
    const auto args = all_args(plan, ranks);
    std::atomic<uint32_t> wrong{0};
    fingerprint = ranks.run_simt(shape(2, 8, 4), seeded(5), [&](auto& ctx, int32_t rank) {
      const auto& own = args[static_cast<size_t>(rank)];
      return run_calls(ctx, ep::proxy_endpoint{own[0].memory}, ranks, plan, rank, own, wrong,
                       [](auto& c, const auto& e, const ep_dispatch_args& a) { return ep::attention_dispatch(c, e, a); });
    }).schedule;
  }
  EP_CHECK_EQ(fingerprints[0], fingerprints[1]);
}

// A rank that never sends: the others wait for its chunks, and the report says who waits for what.
void silence_is_named() {
  dispatch_case plan({2, 1, 1, 1, true, true}, 3);
  world ranks({2, plan.bytes(), plan.slots(), false, 1});
  ep_dispatch_args args = plan.args(ranks, 0, 0);
  uint64_t owed[2] = {0, 7};
  args.part_count = 0;
  args.arrivals = reinterpret_cast<uint64_t>(owed);
  const auto result = ranks.run_simt(shape(1, 4, 4), seeded(1), [&](auto& ctx, int32_t rank) {
    return rank == 1 || ep::attention_dispatch(ctx, ep::load_store_endpoint{args.memory}, args);
  });
  EP_CHECK(result.outcome == ep::simt_outcome::deadlock);
  EP_CHECK(result.report.find("rank 0 block 0 lane 1 waits for slot 1 (stage arrival, from rank 1): expected at least 7, found 0") != std::string::npos);
  EP_CHECK(result.report.find("rank 1 block 0 lanes 0-3 has returned") != std::string::npos);
}

// Cancelled in the middle: every wait ends, the status says which was first.
void cancelled() {
  dispatch_case plan({2, 1, 1, 1, true, true}, 3);
  for (const bool proxy : {false, true}) {
    world ranks({2, plan.bytes(), plan.slots(), proxy, 1});
    std::atomic<uint32_t> cancel{0};
    ranks.environment(0).waits.cancel = &cancel;
    ep_kernel_status status{};
    ep_dispatch_args args = plan.args(ranks, 0, 0);
    uint64_t owed[2] = {0, 7};
    args.part_count = 0;
    args.arrivals = reinterpret_cast<uint64_t>(owed);
    args.status = reinterpret_cast<uint64_t>(&status);
    const auto result = ranks.run_simt(shape(2, 4, 4), seeded(1), [&](auto& ctx, int32_t rank) {
      if (rank == 1) {
        if (ctx.lane() == 0) cancel.store(1);
        return true;
      }
      return ranks.with_endpoint(args.memory, [&](const auto& endpoint) { return ep::attention_dispatch(ctx, endpoint, args); });
    });
    EP_CHECK(result.outcome == ep::simt_outcome::finished);
    EP_CHECK(!result.ok);
    EP_CHECK_EQ(status.status, static_cast<uint32_t>(EP_STATUS_ABORTED));
    EP_CHECK_EQ(status.rank, 1);
    EP_CHECK_EQ(status.stage, EP_STAGE_ARRIVAL);
    EP_CHECK_EQ(status.expected, 7u);
  }
}

} // namespace

int main() {
  for (const bool proxy : {false, true}) {
    for (int32_t size = 1; size <= 4; ++size) {
      for (uint64_t seed = 0; seed < 250 / seed_share; ++seed) dispatches(proxy, size, seed * 7919 + static_cast<uint64_t>(size));
    }
  }
  for (int32_t size = 2; size <= 4; ++size) {
    for (uint64_t seed = 0; seed < 10; ++seed) dispatches_on_threads(size, seed);
  }
  repeats();
  silence_is_named();
  cancelled();
  return ep::check::finish();
}
