// The per-token kernel: right where the original is right, and each kept defect on exhibit.
#include <stdexcept>

#include "../../core/device/compat.hpp"
#include "../check.hpp"
#include "compat_case.hpp"

using namespace ep::test;

namespace {

bool says(const ep::simt_result& result, const std::string& text) { return result.report.find(text) != std::string::npos; }

std::vector<ep_compat_args> forward(compat_case& plan, const world& ranks) {
  std::vector<ep_compat_args> args;
  for (int32_t rank = 0; rank < ranks.size(); ++rank) args.push_back(plan.forward_args(ranks, rank));
  return args;
}

ep::simt_result run(world& ranks, const ep::simt_launch& shape, const ep::simt_schedule& schedule, const std::vector<ep_compat_args>& args) {
  return ranks.run_simt(shape, schedule, [&](auto& ctx, int32_t rank) {
    const ep_compat_args& own = args[static_cast<size_t>(rank)];
    return ranks.with_endpoint(own.memory, [&](const auto& endpoint) { return ep::compat_dispatch(ctx, endpoint, own); });
  });
}

void right_where_the_original_is(bool proxy, int32_t size, uint64_t seed) {
  const auto replicas = static_cast<uint32_t>(seed % 4);
  compat_case plan(size, replicas, seed);
  // One warp per role, and sometimes idle ones.
  const uint32_t warps = 1 + replicas + static_cast<uint32_t>(seed % 3);
  const ep::simt_launch grid = shape(1 + static_cast<uint32_t>(seed % 3), 4 * warps, 4);
  {
    world ranks({size, plan.bytes(), plan.slots(), proxy, 4});
    const auto result = run(ranks, grid, seeded(seed), forward(plan, ranks));
    EP_CHECK_EQ(result.report, "");
    EP_CHECK(result.ok);
    for (int32_t rank = 0; rank < size; ++rank) EP_CHECK(plan.forward_right(rank));
  }
  if (replicas == 0) return;
  world ranks({size, plan.bytes(), plan.slots(), proxy, 4});
  std::vector<ep_compat_args> args;
  for (int32_t rank = 0; rank < size; ++rank) args.push_back(plan.gradient_args(ranks, rank));
  const auto result = run(ranks, grid, seeded(seed), args);
  EP_CHECK_EQ(result.report, "");
  for (int32_t rank = 0; rank < size; ++rank) EP_CHECK(plan.gradient_right(rank));
}

void no_rows_no_launch() {
  EP_CHECK_EQ(ep::compat_blocks(20, 4), 4u);
  EP_CHECK_EQ(ep::compat_blocks(20, 0), 0u);
  compat_case plan(1, 0, 1);
  world ranks({1, plan.bytes(), plan.slots(), false, 4});
  auto args = forward(plan, ranks);
  EP_CHECK(ep::compat_refusal(args[0]) == nullptr);
  args[0].tokens = 0;
  EP_CHECK(ep::compat_refusal(args[0]) != nullptr);
  bool refused = false;
  try {
    run(ranks, shape(static_cast<uint32_t>(ep::compat_blocks(20, 0)), 8, 4), seeded(1), args);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  EP_CHECK(refused);
}

// Ten warps have nine roles for replicas; the tenth replica's rows are never sent.
void replicas_beyond_the_warps() {
  for (const uint32_t replicas : {9u, 10u}) {
    compat_case plan(1, replicas, 4);
    world ranks({1, plan.bytes(), plan.slots(), false, 4});
    const auto args = forward(plan, ranks);
    EP_CHECK_EQ(ep::compat_refusal(args[0]) != nullptr, replicas > 9);
    const auto result = run(ranks, shape(1, 4 * ep::compat_block_warps, 4), seeded(1), args);
    EP_CHECK_EQ(result.ok, replicas <= 9);
    if (replicas <= 9) {
      EP_CHECK(plan.forward_right(0));
    } else {
      EP_CHECK(result.outcome == ep::simt_outcome::deadlock);
      EP_CHECK(says(result, "rank 0 block 0 lane 0 waits for slot 1 (stage arrival, from rank 0): expected exactly "));
    }
  }
  // The same on one lane per block, where roles are turns of a loop: the wait ends by its deadline.
  compat_case plan(1, 10, 4);
  world ranks({1, plan.bytes(), plan.slots(), false, 4});
  const auto args = forward(plan, ranks);
  ranks.environment(0).waits.deadline_ns = ep::deadline_after(30);
  ep::fast_context ctx{ranks.environment(0), 0, 1, nullptr};
  EP_CHECK(!ep::compat_dispatch(ctx, ep::load_store_endpoint{args[0].memory}, args[0]));
  EP_CHECK_EQ(plan.status(0).status, static_cast<uint32_t>(EP_STATUS_TIMEOUT));
  EP_CHECK_EQ(plan.status(0).stage, EP_STAGE_ARRIVAL);
  EP_CHECK(plan.status(0).found < plan.status(0).expected);
}

// One signal more than the plan says, as from a peer that is a call ahead: >= would go on; == either misses its value and waits for ever, or
// sees it one row too early.
void one_signal_too_many() {
  uint32_t stuck = 0;
  uint32_t early = 0;
  uint32_t named = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    compat_case plan(2, 0, 8);
    world ranks({2, plan.bytes(), plan.slots(), false, 4});
    const auto args = forward(plan, ranks);
    const uint64_t owed = reinterpret_cast<const uint64_t*>(args[1].query.num_recv_tokens)[0];
    EP_CHECK(owed > 1);
    ranks.signals(1)[0] = 1;
    const auto result = run(ranks, shape(2, 8, 4), seeded(seed), args);
    if (result.ok && !plan.forward_right(1)) ++early;
    if (result.outcome != ep::simt_outcome::deadlock) continue;
    ++stuck;
    named += says(result, "waits for slot 0 (stage arrival, from rank 0): expected exactly " + std::to_string(owed) + ", found " +
                              std::to_string(owed + 1));
  }
  EP_CHECK(stuck > 10);
  EP_CHECK_EQ(named, stuck);
  EP_CHECK(early > 0);
}

// The cursor takes the end of an empty first shard for the end of a replica, again and again.
void empty_first_shard_of_a_gradient() {
  const uint32_t lengths[2] = {0, 3};
  EP_CHECK(ep::compat_gradient_refusal(lengths, 2) != nullptr);
  EP_CHECK(ep::compat_gradient_refusal(lengths + 1, 1) == nullptr);
  world ranks({1, 1024, 2, false, 4});
  const uint64_t counts[2] = {0, 0};
  const uint32_t mask[2] = {0, 0};
  uint8_t row[48] = {};
  ep_compat_args args{};
  args.memory = ranks.memory(0);
  args.query.src = args.query.dst = reinterpret_cast<uint64_t>(row);
  args.query.row_bytes = 16;
  args.query.num_recv_tokens = reinterpret_cast<uint64_t>(counts);
  args.query.replicas = 1;
  args.recv_mask = reinterpret_cast<uint64_t>(mask);
  args.recv_seq_len = reinterpret_cast<uint64_t>(lengths);
  args.recv_tokens = 3;
  args.recv_seqs = 2;
  args.recv_replicas = 1;
  ep::simt_schedule bounded = seeded(1);
  bounded.point_limit = 10'000;
  EP_CHECK(run(ranks, shape(1, 4, 4), bounded, {args}).outcome == ep::simt_outcome::runaway);
}

void rows_are_vectors() {
  compat_case plan(1, 0, 1);
  world ranks({1, plan.bytes(), plan.slots(), false, 4});
  auto args = forward(plan, ranks);
  args[0].query.row_bytes = 24;
  EP_CHECK(ep::compat_refusal(args[0]) != nullptr);
}

// A request per row, even to oneself; the chunked kernel would need one per shard.
void one_request_per_row() {
  compat_case plan(1, 0, 12);
  world ranks({1, plan.bytes(), plan.slots(), true, 4});
  const auto args = forward(plan, ranks);
  EP_CHECK(run(ranks, shape(2, 8, 4), seeded(1), args).ok);
  EP_CHECK_EQ(reinterpret_cast<const ep_proxy_ring*>(args[0].memory.proxy)->tail, plan.tokens(0));
}

} // namespace

int main() {
  for (const bool proxy : {false, true}) {
    for (int32_t size = 1; size <= 4; ++size) {
      for (uint64_t seed = 0; seed < 60 / seed_share; ++seed) right_where_the_original_is(proxy, size, seed * 31 + static_cast<uint64_t>(size));
    }
  }
  no_rows_no_launch();
  replicas_beyond_the_warps();
  one_signal_too_many();
  empty_first_shard_of_a_gradient();
  rows_are_vectors();
  one_request_per_row();
  return ep::check::finish();
}
