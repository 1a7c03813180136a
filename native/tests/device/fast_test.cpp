// The kernels as users on CPUs run them: one lane per block, a thread per block and engine. The test that ThreadSanitizer has most to say about.
#include "../check.hpp"
#include "compat_case.hpp"
#include "dispatch_case.hpp"

using namespace ep::test;

namespace {

void dispatches(bool proxy, int32_t size, uint64_t seed) {
  case_options wanted;
  wanted.size = size;
  wanted.calls = 12;
  wanted.leases = 1 + static_cast<uint32_t>(seed % 2);
  wanted.parts = 1 + static_cast<uint32_t>(seed % 3);
  dispatch_case plan(wanted, seed);
  world ranks({size, plan.bytes(), plan.slots(), proxy, uint64_t{1} << (seed % 3)});
  const auto args = all_args(plan, ranks);
  std::atomic<uint32_t> wrong{0};
  const bool ok = ranks.run_fast(1 + static_cast<uint32_t>(seed % 2), [&](auto& ctx, int32_t rank) {
    const auto& own = args[static_cast<size_t>(rank)];
    return ranks.with_endpoint(own[0].memory, [&](const auto& endpoint) {
      return run_calls(ctx, endpoint, ranks, plan, rank, own, wrong,
                       [](auto& c, const auto& e, const ep_dispatch_args& a) { return ep::attention_dispatch(c, e, a); });
    });
  });
  EP_CHECK(ok);
  EP_CHECK_EQ(wrong.load(), 0u);
}

void compat(bool proxy, int32_t size, uint64_t seed) {
  const auto replicas = static_cast<uint32_t>(seed % 4);
  compat_case plan(size, replicas, seed);
  const auto blocks = 1 + static_cast<uint32_t>(seed % 2);
  const auto dispatch = [&](world& ranks, auto&& args_of) {
    std::vector<ep_compat_args> args;
    for (int32_t rank = 0; rank < size; ++rank) args.push_back(args_of(rank));
    EP_CHECK(ranks.run_fast(blocks, [&](auto& ctx, int32_t rank) {
      const ep_compat_args& own = args[static_cast<size_t>(rank)];
      return ranks.with_endpoint(own.memory, [&](const auto& endpoint) { return ep::compat_dispatch(ctx, endpoint, own); });
    }));
  };
  world there({size, plan.bytes(), plan.slots(), proxy, 4});
  dispatch(there, [&](int32_t rank) { return plan.forward_args(there, rank); });
  for (int32_t rank = 0; rank < size; ++rank) EP_CHECK(plan.forward_right(rank));
  if (replicas == 0) return;
  world back({size, plan.bytes(), plan.slots(), proxy, 4});
  dispatch(back, [&](int32_t rank) { return plan.gradient_args(back, rank); });
  for (int32_t rank = 0; rank < size; ++rank) EP_CHECK(plan.gradient_right(rank));
}

// A peer that never sends: the wait ends at its deadline, in every block, and one report is kept.
void late() {
  dispatch_case plan({2, 1, 1, 1, true, true}, 3);
  world ranks({2, plan.bytes(), plan.slots(), false, 1});
  ep_dispatch_args args = plan.args(ranks, 0, 0);
  uint64_t owed[2] = {0, 7};
  args.part_count = 0;
  args.arrivals = reinterpret_cast<uint64_t>(owed);
  ranks.environment(0).waits.deadline_ns = ep::deadline_after(20);
  EP_CHECK(!ranks.run_fast(2, [&](auto& ctx, int32_t rank) {
    return rank == 1 || ep::attention_dispatch(ctx, ep::load_store_endpoint{args.memory}, args);
  }));
  const ep_kernel_status& status = plan.status(0);
  EP_CHECK_EQ(status.status, static_cast<uint32_t>(EP_STATUS_TIMEOUT));
  EP_CHECK_EQ(status.rank, 1);
  EP_CHECK_EQ(status.stage, EP_STAGE_ARRIVAL);
  EP_CHECK_EQ(status.expected, 7u);
  EP_CHECK_EQ(status.found, 0u);
}

} // namespace

int main() {
  for (const bool proxy : {false, true}) {
    for (int32_t size = 1; size <= 4; ++size) {
      for (uint64_t seed = 0; seed < 12; ++seed) {
        dispatches(proxy, size, seed * 104729 + static_cast<uint64_t>(size));
        compat(proxy, size, seed * 31 + static_cast<uint64_t>(size));
      }
    }
  }
  late();
  return ep::check::finish();
}
