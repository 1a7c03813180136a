// Results that are read where experts have written them: in calls that follow each other, and by one that is late, which must not sum what a later call has written there.
#include "../check.hpp"
#include "ep/device/moe_launch.h"
#include "moe_apart.hpp"

using namespace ep::test;

namespace {

// As users do: garbage where results may be offered as soon as a dispatch has ended, then the results.
struct offering {
  world& ranks;
  moe_case& plan;

  template <class Ctx, class Endpoint> bool calls(Ctx& ctx, const Endpoint& endpoint, int32_t rank, std::atomic<uint32_t>& wrong) const {
    for (const moe_step& step : plan.halves()) {
      moe_case::one_rank& own = plan.at(step.call, rank);
      const bool first = ctx.block() == 0 && ctx.lane() == 0;
      if (first && step.half == 2 && plan.offers(step.call, rank)) plan.offer(ranks, step.call, rank);
      ctx.sync_grid();
      const bool ok = moe_kernels::run(ctx, endpoint, plan.buffer(rank), own, step.half);
      ctx.sync_grid();
      if (first) {
        if (!ok) wrong.fetch_add(1000);
        if (step.half == 1) std::memset(plan.offered(ranks, step.call, rank), 0x5a, plan.offered_bytes());
        if (step.half == 3) wrong.fetch_add(plan.wrong_combine(step.call, rank));
      }
      ctx.sync_grid();
    }
    return true;
  }
};

moe_options shape_of(int32_t size, uint64_t seed, bool compact) {
  moe_options wanted;
  wanted.size = size;
  wanted.calls = 6;
  wanted.slots = 1 + static_cast<uint32_t>(seed % 3);
  wanted.compact = compact;
  wanted.alignment = compact ? 1 + static_cast<uint32_t>(seed % 3) : 1;
  wanted.cached = compact && seed % 2 == 0;
  wanted.overlap = !wanted.cached;
  wanted.payload = seed % 4 == 1 ? EP_MOE_F8_F32 : EP_MOE_BF16;
  wanted.zero_copy = true;
  return wanted;
}

void calls(int32_t size, uint64_t seed, bool compact, bool fast) {
  moe_case plan(shape_of(size, seed, compact), seed);
  world ranks({size, plan.bytes(), plan.signal_slots(), false, 1, 0});
  plan.bind(ranks);
  std::atomic<uint32_t> wrong{0};
  const offering user{ranks, plan};
  const auto run = [&](auto& ctx, int32_t rank) {
    return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) { return user.calls(ctx, endpoint, rank, wrong); });
  };
  if (fast) {
    EP_CHECK(ranks.run_fast(1 + static_cast<uint32_t>(seed % 2), run));
  } else {
    const auto result = ranks.run_simt(shape(1 + static_cast<uint32_t>(seed % 3), 8, seed % 2 != 0 ? 4 : 8), seeded(seed), run);
    EP_CHECK_EQ(result.report, "");
    EP_CHECK(result.ok);
  }
  if (wrong.load() != 0) std::fprintf(stderr, "%d ranks, compact %d, seed %llu: %u\n", size, compact, static_cast<unsigned long long>(seed), wrong.load());
  EP_CHECK_EQ(wrong.load(), 0u);
}

struct whole_receive {
  template <class Ctx, class Endpoint> static bool run(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, const ep_moe_combine_args& args) {
    return ep::moe_combine_receive(ctx, endpoint, buffer, args);
  }
};

// Sums without a second look.
struct one_look {
  template <class Ctx, class Endpoint> static bool run(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, const ep_moe_combine_args& args) {
    const ep::block_coop<Ctx> coop{ctx};
    const ep::moe_view at{buffer, args.call};
    const uint32_t bank = at.peer(at.self()).bank;
    if (ctx.block() == 0 && ctx.lane() == 0) ep::detail::moe_await_results(ctx, endpoint, at, 1 - at.self());
    ctx.sync_grid();
    ep::detail::moe_sum_tokens(ctx, coop, endpoint, at, args, bank);
    return true;
  }
};

struct late_outcome {
  uint32_t kept = 0;
  uint32_t dropped = 0;
  uint32_t wrong = 0;
};

// Rank 1 offers its results, has given rank 0 up, and goes on: its experts write other results there while rank 0 sums.
template <class Receive> late_outcome late(bool compact) {
  late_outcome seen;
  for (uint64_t seed = 0; seed < 400 / seed_share; ++seed) {
    moe_options wanted = shape_of(2, seed, compact);
    wanted.calls = 1;
    wanted.slots = 1;
    wanted.cached = false;
    moe_case plan(wanted, seed);
    if (plan.sends_to(0, 0, 1) == 0) continue;
    world ranks({2, plan.bytes(), plan.signal_slots(), false, 1, 0});
    plan.bind(ranks);
    const auto result = ranks.run_simt(shape(1 + static_cast<uint32_t>(seed % 2), 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
      return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
        moe_case::one_rank& own = plan.at(0, rank);
        const ep_moe_buffer& buffer = plan.buffer(rank);
        const bool first = ctx.block() == 0 && ctx.lane() == 0;
        bool ok = moe_kernels::run(ctx, endpoint, buffer, own, 0) && moe_kernels::run(ctx, endpoint, buffer, own, 1);
        if (first && rank == 1) plan.offer(ranks, 0, 1);
        ctx.sync_grid();
        ok = moe_kernels::run(ctx, endpoint, buffer, own, 2) && ok;
        if constexpr (requires { ep::detail::moe_offered_result(ctx, endpoint, ep::moe_view{buffer, own.combine.call}, 0, 0u, 0u); }) {
          if (rank == 0) return Receive::run(ctx, endpoint, buffer, own.combine) && ok;
          for (uint64_t stall = 0; stall < (seed % 4 == 0 ? 3000 : seed % 41); ++stall) ctx.point();
          if (first) {
            ep::detail::moe_say_how(ctx, endpoint, ep::moe_view{buffer, own.combine.call}, ep::detail::moe_results_gone);
            for (uint64_t at = 0; at < plan.offered_bytes(); at += 16) {
              std::memset(plan.offered(ranks, 0, 1) + at, 0x5a, 16);
              if (at % 64 == 0) ctx.point();
            }
          }
        }
        return ok;
      });
    });
    EP_CHECK_EQ(result.report, "");
    const bool lost = plan.at(0, 0).ranks[1] != 0;
    if (lost) EP_CHECK_EQ(plan.at(0, 0).ranks[1], static_cast<uint64_t>(EP_STATUS_TIMEOUT));
    ++(lost ? seen.dropped : seen.kept);
    seen.wrong += plan.wrong_combine(0, 0, lost ? 1 : -1) != 0;
  }
  return seen;
}

// Of two ranks. Rank 1 combines, as a graph does, what a dispatch of its own has left that may have failed. How often it says to rank 0 that there are results.
uint32_t offers_after(bool compact, uint32_t status) {
  uint32_t said = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    moe_options wanted = shape_of(2, seed, compact);
    wanted.calls = wanted.slots = 1;
    wanted.cached = false;
    moe_case plan(wanted, seed);
    if (plan.sends_to(0, 0, 1) == 0) continue;
    world ranks({2, plan.bytes(), plan.signal_slots(), false, 1, 0});
    plan.bind(ranks);
    const auto result = ranks.run_simt(shape(1 + static_cast<uint32_t>(seed % 2), 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
      return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
        moe_case::one_rank& own = plan.at(0, rank);
        const ep_moe_buffer& buffer = plan.buffer(rank);
        bool ok = moe_kernels::run(ctx, endpoint, buffer, own, 0) && moe_kernels::run(ctx, endpoint, buffer, own, 1);
        if (rank == 0) return ok;
        const bool first = ctx.block() == 0 && ctx.lane() == 0;
        if (first) plan.offer(ranks, 0, 1);
        if (first) own.status.status = status;
        ctx.sync_grid();
        ok = ep::moe_combine_send(ctx, endpoint, buffer, own.combine) && ok;
        ctx.sync_grid();
        const ep::moe_view at{buffer, own.combine.call};
        const auto& source = reinterpret_cast<const ep_peer_view*>(buffer.memory.peers)[0];
        if (first && reinterpret_cast<const uint64_t*>(source.signals)[at.signal_slot(EP_MOE_SIGNAL_RETURNED, 1)] == at.call.epoch) ++said;
        return ok;
      });
    });
    EP_CHECK_EQ(result.report, "");
  }
  return said;
}

// A dispatch in one launch: blocks that are ahead hear from rank 1 what no rank may say, and fail, while others still send. None may leave before the last barrier.
void halves_in_one_launch() {
  uint32_t heard = 0;
  for (uint64_t seed = 0; seed < 200 / seed_share; ++seed) {
    moe_options wanted = shape_of(2, seed, false);
    wanted.calls = wanted.slots = 1;
    moe_case plan(wanted, seed);
    if (plan.local(0) == 0) continue;
    world ranks({2, plan.bytes(), plan.signal_slots(), false, 1, 0});
    plan.bind(ranks);
    const auto result = ranks.run_simt(shape(3, 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
      return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
        moe_case::one_rank& own = plan.at(0, rank);
        const ep_moe_buffer& buffer = plan.buffer(rank);
        if (rank == 0) {
          ep::moe_run_dispatch(ctx, endpoint, buffer, own.dispatch, ep::moe_send_half | ep::moe_receive_half);
        } else if (ctx.block() == 0) {
          const ep::block_coop coop{ctx};
          const ep::moe_view at{buffer, own.dispatch.call};
          uint64_t* words = ep::detail::moe_count_words(endpoint, at, 0, 1);
          for (uint32_t e = 0; coop.lane() == 0 && e < plan.local(0); ++e) words[e] = uint64_t{at.call.epoch} << EP_MOE_COUNT_EPOCH_SHIFT | (buffer.max_tokens + 1);
          coop.sync();
          ep::moe_say(ctx, coop, endpoint, at, EP_MOE_SIGNAL_COUNTED, 0);
        }
        return true;
      });
    });
    EP_CHECK_EQ(result.report, "");
    EP_CHECK_EQ(plan.at(0, 0).status.status, static_cast<uint32_t>(EP_STATUS_INVALID));
    ++heard;
  }
  EP_CHECK(heard > 10 / seed_share);
}

} // namespace

int main() {
  for (const bool compact : {false, true}) {
    EP_CHECK(offers_after(compact, EP_STATUS_OK) > 10);
    EP_CHECK_EQ(offers_after(compact, EP_STATUS_SYSTEM), 0u);
  }
  halves_in_one_launch();
  for (const bool compact : {false, true}) {
    for (int32_t size = 1; size <= 4; ++size) {
      for (uint64_t seed = 0; seed < 60 / seed_share; ++seed) calls(size, seed * 7919 + static_cast<uint64_t>(size), compact, false);
      for (uint64_t seed = 0; seed < std::max<uint64_t>(8 / seed_share, 2); ++seed) calls(size, seed * 104729 + static_cast<uint64_t>(size), compact, true);
    }
    const late_outcome seen = late<whole_receive>(compact);
    EP_CHECK_EQ(seen.wrong, 0u);
    EP_CHECK(seen.kept > 10 / seed_share);
    EP_CHECK(seen.dropped > 10 / seed_share);
    if constexpr (!shows_naive) continue;
    const late_outcome naive = late<one_look>(compact);
    if (naive.wrong <= 10) std::fprintf(stderr, "one_look: found out under %u seeds only\n", naive.wrong);
    EP_CHECK(naive.wrong > 10);
  }
  return ep::check::finish();
}
