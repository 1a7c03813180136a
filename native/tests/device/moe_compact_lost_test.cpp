// High-throughput dispatch when things go wrong: tensors that are too small, ranks that die before or after they were answered, silent ones, and protocols that lack a step.
#include "../check.hpp"
#include "moe_apart.hpp"

using namespace ep::test;

namespace {

enum class route { stores, engine, nic };
constexpr route routes[] = {route::stores, route::engine, route::nic};

world_options world_of(const moe_case& plan, int32_t size, route by) {
  world_options made{size, plan.bytes(), plan.signal_slots(), by == route::engine, 4};
  if (by == route::nic) made.qps = 2;
  return made;
}

struct lives {
  lives(world& ranks, int32_t size) : words(static_cast<size_t>(size)), views(static_cast<size_t>(size)) {
    for (size_t r = 0; r < words.size(); ++r) {
      words[r].state = EP_LIFE_ALIVE;
      views[r].life = reinterpret_cast<uint64_t>(&words[r]);
      ranks.environment(static_cast<int32_t>(r)).waits.peers = views.data();
    }
  }
  void set(int32_t rank, uint32_t state) { std::atomic_ref<uint32_t>(words[static_cast<size_t>(rank)].state).store(state); }
  std::vector<ep_life_word> words;
  std::vector<ep_peer_view> views;
};

moe_options compact(int32_t size, uint64_t seed) {
  moe_options wanted;
  wanted.size = size;
  wanted.compact = true;
  wanted.alignment = seed % 2 != 0 ? 4 : 1;
  return wanted;
}

void expect_culprits(moe_case& plan, const moe_options& wanted, uint64_t how) {
  for (uint32_t call = 0; call < wanted.calls; ++call) {
    for (int32_t rank = 0; rank < wanted.size; ++rank) {
      if (plan.is_gone(call, rank)) continue;
      const auto& found = plan.at(call, rank).ranks;
      for (int32_t other = 0; other < wanted.size; ++other) {
        const bool gone = plan.is_gone(call, other);
        EP_CHECK_EQ(found[static_cast<size_t>(other)], gone ? how : 0);
      }
    }
  }
}

// A call that needs one row more than there is fails on all ranks alike, moves nothing, and the calls after it go on.
void one_row_short(route by, int32_t size, uint64_t seed) {
  moe_options wanted = compact(size, seed);
  wanted.calls = 5;
  wanted.slots = 1 + static_cast<uint32_t>(seed % 3);
  wanted.spare = 1;
  moe_case plan(wanted, seed);
  world ranks(world_of(plan, size, by));
  plan.bind(ranks);
  std::vector<uint64_t> needed(wanted.calls);
  std::vector<int32_t> who(wanted.calls);
  uint32_t refused = 0;
  for (uint32_t call = 0; call < wanted.calls; ++call) {
    for (int32_t r = size - 1; r >= 0; --r) {
      const uint64_t rows = plan.block_begin(call, r, plan.local(r));
      if (rows <= plan.room()) continue;
      needed[call] = rows;
      who[call] = r;
    }
    refused += needed[call] != 0 ? 1 : 0;
  }
  std::atomic<uint32_t> wrong{0};
  const auto result = ranks.run_simt(shape(1 + static_cast<uint32_t>(seed % 2), 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
    return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
      const ep_moe_part& received = plan.buffer(rank).received;
      for (const moe_step& step : plan.halves()) {
        auto& own = plan.at(step.call, rank);
        if (needed[step.call] != 0 && step.half != 0) continue;
        const uint8_t* tensor = ranks.data(rank) + received.offset + step.call % wanted.slots * received.stride;
        const std::vector<uint8_t> before(tensor, tensor + received.stride);
        ctx.sync_grid();
        const bool ok = moe_kernels::run(ctx, endpoint, plan.buffer(rank), own, step.half);
        ctx.sync_grid();
        if (ctx.block() == 0 && ctx.lane() == 0) {
          if (ok != (needed[step.call] == 0)) wrong.fetch_add(1000);
          if (!ok) {
            const ep_kernel_status& status = own.status;
            wrong.fetch_add(status.status != EP_STATUS_CAPACITY || status.rank != who[step.call] || status.expected != plan.room() ||
                            status.found != needed[step.call] || status.stage != EP_STAGE_PLACE);
            wrong.fetch_add(!std::equal(before.begin(), before.end(), tensor));
          }
          if (step.half == 1) wrong.fetch_add(plan.wrong_dispatch(step.call, rank));
          if (step.half == 3) wrong.fetch_add(plan.wrong_combine(step.call, rank));
        }
        ctx.sync_grid();
      }
      return true;
    });
  });
  EP_CHECK_EQ(result.report, "");
  EP_CHECK_EQ(wrong.load(), 0u);
  if (plan.block_begin(0, 0, plan.local(0)) != 0) EP_CHECK(refused != 0);
}

// Rank 0 has no room. Rank 1 and it do not know of each other, so that rank 1 hears of it from rank 2 alone, which it has written rows to by then: that
// one awaits them before it places others. How many results are wrong, and whether the case had such rows. `late`: a rank that all have given up is behind, and passes on what it
// heard in a call of the past, just before rank 1 looks.
uint32_t full_for_others(route by, uint64_t seed, bool late, bool* tried) {
  moe_options wanted = compact(late ? 4 : 3, seed);
  if (late) wanted.dead = 3;
  wanted.masked = late;
  wanted.calls = 2;
  wanted.slots = 1;
  wanted.overlap = false;
  moe_case plan(wanted, seed);
  uint64_t needed = 0;
  for (uint32_t e = 0; e < plan.local(0); ++e) {
    const uint64_t rows = plan.count_of(0, 0, e, 0) + plan.count_of(0, 0, e, 2);
    needed += (rows + wanted.alignment - 1) / wanted.alignment * wanted.alignment;
  }
  *tried = needed != 0 && plan.sends_to(0, 1, 2) != 0 && plan.sends_to(1, 0, 2) + plan.sends_to(1, 1, 2) != 0;
  if (!*tried) return 0;
  world ranks(world_of(plan, wanted.size, by));
  plan.bind(ranks);
  ep_moe_buffer full = plan.buffer(0);
  full.recv_rows = needed - 1;
  std::atomic<uint32_t> wrong{0};
  std::atomic<bool> said{!late};
  const auto says_late = [&](auto& ctx, const auto& endpoint) {
    std::atomic_ref<uint64_t> heard(ranks.signals(1)[EP_MOE_SIGNAL_ARRIVED * 4 + 2]);
    while (heard.load() == 0) ctx.point();
    ep_moe_call call = plan.at(0, 3).dispatch.call;
    call.epoch -= 1;
    const ep::moe_view at{plan.buffer(3), call};
    const auto view = ep::detail::compact_view_of(endpoint, at);
    const ep::block_coop<std::decay_t<decltype(ctx)>> coop{ctx};
    ep::moe_layout(ctx, at);
    ctx.sync_grid();
    if (ctx.block() == 0) ep::moe_pass_on(ctx, coop, endpoint, at, 1, EP_MOE_SIGNAL_ARRIVED, view.puts_to(1));
    ctx.sync_grid();
    std::atomic_ref<uint64_t> landed(ranks.signals(1)[EP_MOE_SIGNAL_ARRIVED * 4 + 3]);
    while (by != route::stores && landed.load() == 0) ctx.point();
    return true;
  };
  const auto result = ranks.run_simt(shape(1 + static_cast<uint32_t>(seed % 2), 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
    return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
      if (rank == 3) {
        const bool ok = says_late(ctx, endpoint);
        said.store(true);
        return ok;
      }
      for (const moe_step& step : plan.halves()) {
        auto& own = plan.at(step.call, rank);
        const bool refused = own.status.status == EP_STATUS_CAPACITY;
        ctx.sync_grid();
        if (refused) continue;
        while (rank == 1 && step.half == 1 && !said.load()) ctx.point();
        if (rank != 2) own.ranks[static_cast<size_t>(1 - rank)] = EP_MOE_RANK_MASKED;
        const bool ok = moe_kernels::run(ctx, endpoint, rank == 0 && step.call == 0 ? full : plan.buffer(rank), own, step.half);
        ctx.sync_grid();
        if (ctx.block() != 0 || ctx.lane() != 0) continue;
        const ep_kernel_status& status = own.status;
        if (step.call == 0) {
          if (step.half > 1 || (step.half == 1 && rank != 1)) wrong.fetch_add(1);
          if (ok != (step.half == 0 && rank == 1)) wrong.fetch_add(1);
          if (!ok) wrong.fetch_add(status.status != EP_STATUS_CAPACITY || status.rank != 0 || status.stage != EP_STAGE_PLACE || status.found != (rank == 1 ? 0 : needed));
          for (int32_t other = 0; rank != 1 && other < 2; ++other) wrong.fetch_add((plan.peer(rank, 0, other).owed_rows != 0) != (rank == 2));
        } else {
          if (!ok) wrong.fetch_add(1);
          if (rank == 2 && step.half == 1) wrong.fetch_add(plan.wrong_dispatch(1, 2)); // of the others the plan does not know whom they do without
        }
      }
      return true;
    });
  });
  return wrong.load() + (result.ok && result.report.empty() ? 0 : 1);
}

void full_for_some(route by, uint64_t seeds, bool late) {
  uint32_t cases = 0;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    bool tried = false;
    EP_CHECK_EQ(full_for_others(by, seed, late, &tried), 0u);
    cases += tried ? 1 : 0;
  }
  EP_CHECK(cases > seeds / 20);
}

// Dead before it has said anything; or when it knows where its rows go, some of which it has written.
void dies(route by, int32_t size, uint64_t seed, bool answered) {
  moe_options wanted = compact(size, seed);
  wanted.calls = answered ? 1 : 3;
  wanted.slots = 1 + static_cast<uint32_t>(seed % 2);
  wanted.dead = static_cast<int32_t>(seed % static_cast<uint64_t>(size));
  wanted.answered = answered;
  moe_case plan(wanted, seed);
  world ranks(world_of(plan, size, by));
  plan.bind(ranks);
  lives life(ranks, size);
  if (!answered) life.set(wanted.dead, EP_LIFE_DEAD);
  std::atomic<uint32_t> wrong{0};
  const auto result = ranks.run_simt(shape(1 + static_cast<uint32_t>(seed % 2), 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
    return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
      if (rank != wanted.dead) return run_moe(ctx, endpoint, plan, rank, wrong);
      if (!answered) return true;
      auto& own = plan.at(0, rank);
      const ep::moe_view at{plan.buffer(rank), own.dispatch.call};
      const auto view = ep::detail::compact_view_of(endpoint, at);
      const ep::block_coop<std::decay_t<decltype(ctx)>> coop{ctx};
      ep::moe_layout(ctx, at);
      ctx.sync_grid();
      ep::detail::compact_agree(ctx, coop, endpoint, view);
      // What a NIC has taken over would land after the rank is dead, unless its way is ended (kernel_ways), which the NIC of this test cannot.
      if (by == route::stores) ep::detail::compact_send_rows(ctx, coop, endpoint, view, own.dispatch);
      ctx.sync_grid();
      if (ctx.block() == 0 && ctx.lane() == 0) life.set(wanted.dead, EP_LIFE_DEAD);
      return true;
    });
  });
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  EP_CHECK_EQ(wrong.load(), 0u);
  if (!answered) expect_culprits(plan, wanted, EP_STATUS_PEER_LOST);
}

// On threads: a rank is alive and silent. `limit_ms(rank)` is what each half of a rank has; `own_limits`: counts and answers have limits of their own. Living ranks that were given up.
template <class Limit> uint32_t is_silent(route by, int32_t size, uint64_t seed, bool own_limits, const Limit& limit_ms) {
  moe_options wanted = compact(size, seed);
  wanted.calls = 1;
  wanted.dead = static_cast<int32_t>(seed % static_cast<uint64_t>(size));
  moe_case plan(wanted, seed);
  world ranks(world_of(plan, size, by));
  plan.bind(ranks);
  std::atomic<uint32_t> wrong{0};
  std::atomic<uint32_t> accused{0};
  EP_CHECK(ranks.run_fast(1, [&](auto& ctx, int32_t rank) {
    if (rank == wanted.dead) return true;
    return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
      auto& own = plan.at(0, rank);
      const auto now = static_cast<uint64_t>(ep::clock_now_ns());
      if (own_limits) own.dispatch.call.counts_by_ns = now + 1'000'000'000;
      if (own_limits) own.dispatch.call.answers_by_ns = now + 4'000'000'000;
      for (uint32_t half = 0; half < 4; ++half) {
        ranks.environment(rank).waits.deadline_ns = ep::deadline_after(limit_ms(rank));
        if (!moe_kernels::run(ctx, endpoint, plan.buffer(rank), own, half)) return false;
      }
      for (int32_t other = 0; other < size; ++other) accused.fetch_add(other != wanted.dead && own.ranks[static_cast<size_t>(other)] != 0 ? 1 : 0);
      if (own_limits) wrong.fetch_add(plan.wrong_dispatch(0, rank) + plan.wrong_combine(0, rank));
      return true;
    });
  }));
  EP_CHECK_EQ(wrong.load(), 0u);
  if (own_limits) expect_culprits(plan, wanted, EP_STATUS_TIMEOUT);
  return accused.load();
}

// Counts, answers and rows each have their own limit, so only the silent rank is given up.
void is_late(route by, int32_t size, uint64_t seed) {
  EP_CHECK_EQ(is_silent(by, size, seed, true, [](int32_t) { return 10'000.0; }), 0u);
}

// One limit for all: who awaited the silent rank's counts to the end answers too late for those whose limit ends a little earlier. Ranks far apart show it at once, unless this
// machine stops one of them for as long: so again, until it shows.
void one_limit_accuses(int32_t size, uint64_t seed) {
  uint32_t accused = 0;
  for (int32_t attempt = 0; attempt < 50 && accused == 0; ++attempt) {
    accused = is_silent(route::stores, size, seed, false, [](int32_t rank) { return 50.0 + 100.0 * rank; });
  }
  EP_CHECK(accused != 0);
}

// Whoever was given up alive and knows where its rows go may still write them: nothing is placed before it has, or is dead.
void still_owes_rows() {
  moe_options wanted = compact(2, 0);
  wanted.calls = 1;
  wanted.slots = 1;
  moe_case plan(wanted, 3);
  world ranks(world_of(plan, 2, route::stores));
  plan.bind(ranks);
  plan.peer(0, 0, 1).owed_rows = 3;
  ranks.environment(0).waits.deadline_ns = ep::deadline_after(20);
  const auto send = [&] {
    plan.at(0, 0).status = {};
    plan.at(0, 0).ranks.assign(2, 0);
    const ep::kernel_environment& environment = ranks.environment(0);
    ep::fast_context ctx{environment, 0, 1, nullptr};
    return ep::moe_compact_send(ctx, ep::load_store_endpoint{plan.buffer(0).memory}, plan.buffer(0), plan.at(0, 0).dispatch);
  };
  EP_CHECK(!send());
  EP_CHECK_EQ(plan.at(0, 0).status.status, static_cast<uint32_t>(EP_STATUS_BUSY));
  EP_CHECK_EQ(plan.at(0, 0).status.stage, EP_STAGE_ARRIVAL);
  EP_CHECK_EQ(plan.at(0, 0).status.rank, 1);
  EP_CHECK_EQ(ranks.signals(1)[EP_MOE_SIGNAL_PLACED * 2], 0u);
  ranks.signals(0)[EP_MOE_SIGNAL_ARRIVED * 2 + 1] = 3;
  EP_CHECK(send());
  EP_CHECK_EQ(plan.peer(0, 0, 1).owed_rows, 0u);
}

// Rank 0 is owed rows, or results of both banks, by a rank that was given up alive. The debt costs that slot: its calls are refused on all ranks, cached ones, too; those of the other
// slot go on, and so does this one once the debt is paid.
void slot_in_debt(route by, uint64_t seed, bool rows, bool cached) {
  moe_options wanted = compact(3, seed);
  wanted.calls = 6;
  wanted.slots = 2;
  wanted.overlap = false;
  wanted.dead = 2;
  wanted.masked = true;
  wanted.cached = cached;
  moe_case plan(wanted, seed);
  world ranks(world_of(plan, 3, by));
  plan.bind(ranks);
  const uint32_t slot = cached ? 1 : 0; // every other call is a cached one
  const auto in_debt = [&](uint32_t call) { return call % 2 == slot && call < 4; };
  std::atomic<uint32_t> wrong{0};
  const auto result = ranks.run_simt(shape(1 + static_cast<uint32_t>(seed % 2), 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
    return rank == 2 || ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
      for (const moe_step& step : plan.halves()) {
        auto& own = plan.at(step.call, rank);
        const bool refused = own.status.status == EP_STATUS_BUSY;
        ctx.sync_grid();
        if (refused) continue;
        if (step.half == 0 && ctx.block() == 0 && ctx.lane() == 0) {
          // Only where the debt is to be found: elsewhere it would cost whoever is a call behind its place.
          if (in_debt(step.call)) own.dispatch.call.credits_by_ns = 1;
          ep_moe_peer& debtor = plan.peer(0, slot, 2);
          if (rank == 0 && step.call == slot) {
            if (rows) debtor.owed_rows = 9;
            else debtor.owed[0] = debtor.owed[1] = 9;
          }
          const uint32_t kind = rows ? EP_MOE_SIGNAL_ARRIVED : EP_MOE_SIGNAL_RETURNED;
          if (rank == 0 && step.call == slot + 4) ranks.signals(0)[(slot * EP_MOE_SIGNAL_KINDS + kind) * 3 + 2] = 9;
        }
        ctx.sync_grid();
        const bool ok = moe_kernels::run(ctx, endpoint, plan.buffer(rank), own, step.half);
        ctx.sync_grid();
        if (ctx.block() != 0 || ctx.lane() != 0) continue;
        const ep_kernel_status& status = own.status;
        if (in_debt(step.call)) {
          const uint32_t stage = rank != 0 ? EP_STAGE_PLACE : rows ? EP_STAGE_ARRIVAL : EP_STAGE_RESULT;
          // Whoever asks rank 0 for no places hears of it later.
          const bool asks = rank == 0 || (plan.local(0) != 0 && (!cached || plan.sends_to(step.call, 1, 0) != 0));
          if (ok && step.half == 0 && !asks) continue;
          wrong.fetch_add(ok || step.half != (asks ? 0 : 1) || status.status != EP_STATUS_BUSY || status.rank != (rank == 0 ? 2 : 0) ||
                          status.stage != stage);
        } else {
          if (!ok) wrong.fetch_add(100);
          if (step.half == 1) wrong.fetch_add(plan.wrong_dispatch(step.call, rank));
          if (step.half == 3) wrong.fetch_add(plan.wrong_combine(step.call, rank));
        }
      }
      return true;
    });
  });
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  EP_CHECK_EQ(wrong.load(), 0u);
}

// A rank that the others left out repeats its routing: what it was told then belongs to others by now. It awaits an answer that does not come, and writes nothing.
uint32_t repeats_alone(route by, uint64_t seed) {
  moe_options wanted = compact(2, seed);
  wanted.calls = 2;
  wanted.slots = 1;
  wanted.cached = true;
  wanted.overlap = false;
  moe_case plan(wanted, seed);
  if (plan.sends_to(1, 1, 0) == 0) return 0;
  world ranks(world_of(plan, 2, by));
  plan.bind(ranks);
  std::atomic<uint32_t> wrong{0};
  EP_CHECK(ranks.run_fast(1, [&](auto& ctx, int32_t rank) {
    return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) { return run_moe(ctx, endpoint, plan, rank, wrong, 0, 1); });
  }));
  EP_CHECK_EQ(wrong.load(), 0u);
  const ep_moe_part& tensor = plan.buffer(0).received;
  const uint8_t* rows = ranks.data(0) + tensor.offset;
  const std::vector<uint8_t> before(rows, rows + tensor.stride);
  ranks.environment(1).waits.deadline_ns = ep::deadline_after(20);
  EP_CHECK(ranks.run_fast(1, [&](auto& ctx, int32_t rank) {
    return rank == 0 || ranks.with_endpoint(plan.buffer(1).memory, [&](const auto& endpoint) {
      return moe_kernels::run(ctx, endpoint, plan.buffer(1), plan.at(1, 1), 0);
    });
  }));
  EP_CHECK_EQ(plan.at(1, 1).ranks[0], static_cast<uint64_t>(EP_STATUS_TIMEOUT));
  EP_CHECK(std::equal(before.begin(), before.end(), rows));
  return 1;
}

// Protocols that lack a step. Ours passes under the same seeds (moe_compact_test).
struct reads_before_arrival : moe_kernels {
  template <class Ctx, class Endpoint> static bool run(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, moe_case::one_rank& own, uint32_t half) {
    const ep::moe_view at{buffer, own.dispatch.call};
    for (int32_t rank = 0; half == 1 && ctx.block() == 0 && ctx.lane() == 0 && rank < at.world(); ++rank) {
      uint64_t puts = 0;
      ep::detail::compact_view_of(endpoint, at).expects(rank, &puts);
      at.peer(rank).arrived = -puts;
    }
    ctx.sync_grid();
    return moe_kernels::run(ctx, endpoint, buffer, own, half);
  }
};

// A cached call that awaits no answer.
struct writes_at_once : moe_kernels {
  template <class Ctx, class Endpoint> static bool run(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, moe_case::one_rank& own, uint32_t half) {
    if (half != 0 || (own.dispatch.call.flags & EP_MOE_CACHED) == 0) return moe_kernels::run(ctx, endpoint, buffer, own, half);
    const ep::moe_view at{buffer, own.dispatch.call};
    const auto view = ep::detail::compact_view_of(endpoint, at);
    const ep::block_coop<std::decay_t<decltype(ctx)>> coop{ctx};
    ep::detail::compact_send_rows(ctx, coop, endpoint, view, own.dispatch);
    ctx.sync_grid();
    for (int32_t rank = 0; ctx.block() == 0 && rank < at.world(); ++rank) {
      if (rank != at.self() && at.experts_of(rank) != 0) ep::detail::compact_finish_rank(ctx, coop, endpoint, view, rank);
    }
    return true;
  }
};

// Dispatches that nobody combines, so that nothing but answers holds a sender back.
template <class Kernels> uint32_t seeds_that_show(route by, bool cached) {
  uint32_t shown = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    moe_options wanted = compact(2, seed);
    wanted.calls = 4;
    wanted.slots = 1;
    wanted.cached = cached;
    wanted.overlap = false;
    moe_case plan(wanted, seed);
    world ranks(world_of(plan, 2, by));
    plan.bind(ranks);
    std::atomic<uint32_t> wrong{0};
    const auto all_calls = [&](auto& ctx, const auto& endpoint, int32_t rank) {
      for (uint32_t call = 0; call < wanted.calls; ++call) {
        auto& own = plan.at(call, rank);
        if (!Kernels::run(ctx, endpoint, plan.buffer(rank), own, 0) || !Kernels::run(ctx, endpoint, plan.buffer(rank), own, 1)) return false;
        for (uint32_t i = 0; rank == 0 && i < 300; ++i) ctx.point(); // a rank that takes its time before it looks
        ctx.sync_grid();
        if (ctx.block() == 0 && ctx.lane() == 0) wrong.fetch_add(plan.wrong_dispatch(call, rank));
        ctx.sync_grid();
        if (!ep::moe_release(ctx, endpoint, plan.buffer(rank), own.dispatch.call)) return false;
        ctx.sync_grid();
      }
      return true;
    };
    const auto result = ranks.run_simt(shape(1, 4, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
      return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) { return all_calls(ctx, endpoint, rank); });
    });
    shown += wrong.load() != 0 || !result.ok ? 1 : 0;
  }
  return shown;
}

} // namespace

int main() {
  for (const route by : routes) {
    for (int32_t size = 2; size <= 4; ++size) {
      for (uint64_t seed = 0; seed < 40 / seed_share; ++seed) {
        one_row_short(by, size, seed * 13 + static_cast<uint64_t>(size));
        dies(by, size, seed * 31 + static_cast<uint64_t>(size), false);
        dies(by, size, seed * 31 + static_cast<uint64_t>(size), true);
      }
    }
    is_late(by, 3, 7);
    full_for_some(by, 240 / seed_share, false);
    full_for_some(by, 240 / seed_share, true);
    for (uint64_t seed = 0; seed < 20 / seed_share; ++seed) {
      for (const bool cached : {false, true}) {
        slot_in_debt(by, seed, true, cached);
        slot_in_debt(by, seed, false, cached);
      }
    }
  }
  is_late(route::stores, 4, 7);
  one_limit_accuses(4, 7);
  still_owes_rows();
  for (const route by : routes) {
    uint32_t tried = 0;
    for (uint64_t seed = 0; seed < 12; ++seed) tried += repeats_alone(by, seed);
    EP_CHECK(tried > 3);
  }
  if constexpr (!shows_naive) return ep::check::finish();
  EP_CHECK_EQ(seeds_that_show<moe_kernels>(route::engine, false), 0u);
  EP_CHECK(seeds_that_show<reads_before_arrival>(route::engine, false) > 5);
  EP_CHECK_EQ(seeds_that_show<moe_kernels>(route::stores, true), 0u);
  EP_CHECK(seeds_that_show<writes_at_once>(route::stores, true) > 5);
  return ep::check::finish();
}
