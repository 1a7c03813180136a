// A low-latency combine whose blocks hear, sum and end each for itself: what they do not agree about, the last one settles for all of them. And when blocks of either half may read.
#include "../check.hpp"
#include "moe_apart.hpp"

using namespace ep::test;

namespace {

moe_options one_call(uint64_t seed) {
  moe_options wanted;
  wanted.size = 2;
  wanted.calls = wanted.slots = 1;
  wanted.payload = seed % 2 != 0 ? EP_MOE_F8_F32 : EP_MOE_BF16;
  return wanted;
}

// Waits for the other one of two ranks end where nobody can run any more. To be held as long as they run.
struct each_is_dead_to_the_other {
  ep_life_word life{};
  ep_peer_view others[2][2] = {};
  explicit each_is_dead_to_the_other(world& ranks) {
    life.state = EP_LIFE_DEAD;
    for (int32_t rank = 0; rank < 2; ++rank) {
      others[rank][1 - rank].life = reinterpret_cast<uint64_t>(&life);
      ranks.environment(rank).waits.peers = others[rank];
    }
  }
};

struct outcomes {
  uint32_t dropped = 0;
  uint32_t wrong = 0;     // sums that are of neither all rows nor those that are left
  uint32_t forgotten = 0; // results that may yet be written where the next call takes its own
};

// Rank 1 is taken for dead, by whichever blocks look before its results come. Waits end where nobody can run any more, so rank 1 and some blocks wait for nothing until then, and go on together.
outcomes late_results() {
  const uint64_t never = 0;
  outcomes seen;
  for (uint64_t seed = 0; seed < 600 / seed_share; ++seed) {
    moe_case plan(one_call(seed), seed);
    if (plan.sends_to(0, 0, 1) == 0) continue;
    world ranks({2, plan.bytes(), plan.signal_slots(), false, 1, 0});
    plan.bind(ranks);
    each_is_dead_to_the_other dead(ranks);
    const uint32_t bank = plan.peer(0, 0, 0).bank;
    const auto result = ranks.run_simt(shape(2 + static_cast<uint32_t>(seed % 2), 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
      return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
        moe_case::one_rank& own = plan.at(0, rank);
        bool ok = moe_kernels::run(ctx, endpoint, plan.buffer(rank), own, 0) && moe_kernels::run(ctx, endpoint, plan.buffer(rank), own, 1);
        ep_kernel_status ignored{};
        if (rank == 1) { // its results, and when others may go on that they are there
          const ep::block_coop<std::remove_reference_t<decltype(ctx)>> coop{ctx};
          const ep::moe_view at{plan.buffer(rank), own.combine.call};
          ep::detail::moe_return_runs(ctx, coop, endpoint, at, own.combine);
          ctx.sync_grid();
          ctx.wait(&never, 1, 0, EP_STAGE_TURN, &ignored);
          if (ctx.block() == 0) ep::moe_say(ctx, coop, endpoint, at, EP_MOE_SIGNAL_RETURNED, 0);
          return ok;
        }
        ok = moe_kernels::run(ctx, endpoint, plan.buffer(rank), own, 2) && ok;
        if (ctx.block() != 0) ctx.wait(&never, 1, 1, EP_STAGE_TURN, &ignored);
        return moe_kernels::run(ctx, endpoint, plan.buffer(rank), own, 3) && ok;
      });
    });
    EP_CHECK_EQ(result.report, "");
    const bool lost = plan.at(0, 0).ranks[1] != 0;
    seen.dropped += lost;
    seen.wrong += plan.wrong_combine(0, 0, lost ? 1 : -1) != 0;
    const bool remembered = plan.peer(0, 0, 1).owed[bank] != 0 && plan.peer(0, 0, 0).bank != bank;
    seen.forgotten += lost != remembered;
  }
  return seen;
}

// Rank 1 says, in the place of results, that it has refused the call.
void refused() {
  uint32_t heard = 0;
  for (uint64_t seed = 0; seed < 60 / seed_share; ++seed) {
    moe_case plan(one_call(seed), seed);
    if (plan.local(1) == 0) continue;
    world ranks({2, plan.bytes(), plan.signal_slots(), false, 1, 0});
    plan.bind(ranks);
    std::atomic<uint32_t> said_false{0};
    const auto result = ranks.run_simt(shape(1 + static_cast<uint32_t>(seed % 3), 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
      return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
        moe_case::one_rank& own = plan.at(0, rank);
        const ep_moe_buffer& buffer = plan.buffer(rank);
        if (!moe_kernels::run(ctx, endpoint, buffer, own, 0) || !moe_kernels::run(ctx, endpoint, buffer, own, 1)) return false;
        if (rank == 0) {
          if (!moe_kernels::run(ctx, endpoint, buffer, own, 2)) return false;
          if (!moe_kernels::run(ctx, endpoint, buffer, own, 3)) said_false.fetch_add(1);
          return true;
        }
        const ep::moe_view at{buffer, own.combine.call};
        if (ctx.block() == 0 && ctx.lane() == 0) ep::moe_write_refusal(ctx, endpoint, at, 1, true);
        ctx.sync_grid();
        if (ctx.block() == 0) ep::moe_pass_on(ctx, ep::block_coop<std::remove_reference_t<decltype(ctx)>>{ctx}, endpoint, at, 0, EP_MOE_SIGNAL_RETURNED, 1);
        return true;
      });
    });
    EP_CHECK_EQ(result.report, "");
    EP_CHECK(result.ok);
    EP_CHECK_EQ(plan.at(0, 0).status.status, static_cast<uint32_t>(EP_STATUS_BUSY));
    EP_CHECK_EQ(plan.at(0, 0).status.rank, 1);
    EP_CHECK_EQ(said_false.load(), 8u * (1 + static_cast<uint32_t>(seed % 3)));
    ++heard;
  }
  EP_CHECK(heard != 0);
}

// Results of rank 1 are here before the block of rank 0 that tells rank 1 of its own has begun: until then no other block asks for them.
void asks_behind_its_own_word() {
  const uint64_t never = 0;
  uint32_t held = 0;
  for (uint64_t seed = 0; seed < 120 / seed_share; ++seed) {
    moe_options wanted = one_call(0);
    wanted.zero_copy = true;
    moe_case plan(wanted, seed);
    if (plan.sends_to(0, 0, 1) == 0) continue;
    world ranks({2, plan.bytes(), plan.signal_slots(), false, 1, 0});
    plan.bind(ranks);
    each_is_dead_to_the_other dead(ranks);
    uint32_t early = 0;
    uint32_t wrong = 0;
    const auto result = ranks.run_simt(shape(2, 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
      return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
        moe_case::one_rank& own = plan.at(0, rank);
        const auto half = [&](uint32_t number) { return moe_kernels::run(ctx, endpoint, plan.buffer(rank), own, number); };
        ep_kernel_status ignored{};
        bool ok = half(0) && half(1);
        ctx.sync_grid();
        if (ctx.block() == 0 && ctx.lane() == 0) plan.offer(ranks, 0, rank);
        ctx.sync_grid();
        const std::vector<uint8_t> before(own.sum.get(), own.sum.get() + own.tokens * plan.row_bytes());
        if (rank == 0 && ctx.block() == 1) ctx.wait(&never, 1, 1, EP_STAGE_TURN, &ignored); // ends where nobody else can run: rank 1 has told, and block 0 waits, or is through
        if (rank == 0 && ctx.block() == 1 && ctx.lane() == 0) early += std::memcmp(before.data(), own.sum.get(), before.size()) != 0 ? 1 : 0;
        ok = half(2) && ok;
        if (rank == 1) ctx.wait(&never, 1, 0, EP_STAGE_TURN, &ignored);
        ok = half(3) && ok;
        ctx.sync_grid();
        if (ctx.block() == 0 && ctx.lane() == 0) wrong += plan.wrong_combine(0, rank);
        return ok;
      });
    });
    EP_CHECK_EQ(result.report, "");
    EP_CHECK(result.ok);
    EP_CHECK_EQ(early, 0u);
    EP_CHECK_EQ(wrong, 0u);
    ++held;
  }
  EP_CHECK(held != 0);
}

// Blocks of a rank read as soon as they find that it has sent: by then the other rank has its word, if a link may lie between them.
void tells_itself_last() {
  uint32_t looks = 0;
  for (uint64_t seed = 0; seed < 240 / seed_share; ++seed) {
    moe_case plan(one_call(seed), seed);
    if (plan.local(1) == 0) continue;
    world ranks({2, plan.bytes(), plan.signal_slots(), false, 1, 0});
    plan.bind(ranks);
    uint32_t early = 0;
    const auto result = ranks.run_simt(shape(2, 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
      return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
        moe_case::one_rank& own = plan.at(0, rank);
        ep_moe_buffer buffer = plan.buffer(rank);
        buffer.flags |= EP_MOE_LINKED;
        bool ok = moe_kernels::run(ctx, endpoint, buffer, own, 0);
        if (rank == 0 && ctx.lane() == 0) {
          const ep::moe_view at{buffer, own.dispatch.call};
          const uint64_t slot = at.signal_slot(EP_MOE_SIGNAL_COUNTED, 0);
          const auto said = [&](int32_t to) {
            const auto* words = reinterpret_cast<const uint64_t*>(reinterpret_cast<const ep_peer_view*>(endpoint.memory.peers)[to].signals);
            return ep::load_acquire(ctx, words + slot) >= at.call.epoch;
          };
          while (!said(0)) {}
          early += said(1) ? 0 : 1;
          ++looks;
        }
        ok = moe_kernels::run(ctx, endpoint, buffer, own, 1) && ok;
        return ok;
      });
    });
    EP_CHECK_EQ(result.report, "");
    EP_CHECK(result.ok);
    EP_CHECK_EQ(early, 0u);
  }
  EP_CHECK(looks != 0);
}

} // namespace

int main() {
  const outcomes seen = late_results();
  EP_CHECK(seen.dropped != 0);
  EP_CHECK_EQ(seen.wrong, 0u);
  EP_CHECK_EQ(seen.forgotten, 0u);
  refused();
  asks_behind_its_own_word();
  tells_itself_last();
  return ep::check::finish();
}
