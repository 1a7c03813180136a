// Ranks that are dead, late or masked: named, all of their rows dropped, and nothing of theirs in anybody's sums; also what comes from them afterwards.
#include "../check.hpp"
#include "moe_apart.hpp"

using namespace ep::test;

namespace {

enum class route { stores, engine, nic };

world_options world_of(const moe_case& plan, int32_t size, route by) {
  world_options made{size, plan.bytes(), plan.signal_slots(), by == route::engine, 4};
  if (by == route::nic) made.qps = 2;
  return made;
}

// Life words as the waits of all ranks see them.
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

void expect_culprits(moe_case& plan, const moe_options& wanted, uint64_t how) {
  for (uint32_t call = 0; call < wanted.calls; ++call) {
    for (int32_t rank = 0; rank < wanted.size; ++rank) {
      if (plan.is_gone(call, rank)) continue;
      const auto& found = plan.at(call, rank).ranks;
      for (int32_t other = 0; other < wanted.size; ++other) {
        const bool gone = plan.is_gone(call, other);
        const bool met = plan.local(rank) != 0 || plan.local(other) != 0;
        if (!gone || met) EP_CHECK_EQ(found[static_cast<size_t>(other)], gone ? how : 0);
      }
    }
  }
}

// Under seeds. The dead rank has sent rows, but not the counts, of its first call.
void dies(route by, int32_t size, uint64_t seed, bool masked) {
  moe_options wanted;
  wanted.size = size;
  wanted.slots = 1 + static_cast<uint32_t>(seed % 2);
  wanted.dead = static_cast<int32_t>(seed % static_cast<uint64_t>(size));
  wanted.masked = masked;
  moe_case plan(wanted, seed);
  world ranks(world_of(plan, size, by));
  plan.bind(ranks);
  lives life(ranks, size);
  if (!masked) life.set(wanted.dead, EP_LIFE_DEAD);
  std::atomic<uint32_t> wrong{0};
  const auto result = ranks.run_simt(shape(1 + static_cast<uint32_t>(seed % 2), 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
    return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
      if (rank != wanted.dead) return run_moe(ctx, endpoint, plan, rank, wrong);
      if (masked) return true;
      auto& own = plan.at(0, rank);
      const ep::moe_view at{plan.buffer(rank), own.dispatch.call};
      ep::moe_layout(ctx, at);
      ctx.sync_grid();
      ep::detail::moe_send_rows(ctx, ep::block_coop<std::decay_t<decltype(ctx)>>{ctx}, endpoint, at, own.dispatch);
      return true;
    });
  });
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  EP_CHECK_EQ(wrong.load(), 0u);
  expect_culprits(plan, wanted, masked ? EP_MOE_RANK_MASKED : EP_STATUS_PEER_LOST);
}

// Block 0 has placed what a rank has told, when another block gives that rank up: none of its rows are taken then, for any expert. The number of runs that were placed, and should not be.
uint32_t is_left_out_behind_its_counts(uint64_t seed) {
  moe_options wanted;
  wanted.size = 2;
  wanted.calls = 1;
  wanted.slots = 1;
  wanted.dead = 1;
  moe_case plan(wanted, seed);
  world ranks(world_of(plan, 2, route::stores));
  plan.bind(ranks);
  std::atomic<uint32_t> wrong{0};
  std::atomic<uint32_t> placed{0};
  const auto result = ranks.run_simt(shape(2, 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
    const ep::load_store_endpoint endpoint{plan.buffer(rank).memory};
    auto& own = plan.at(0, rank);
    const ep::moe_view at{plan.buffer(rank), own.dispatch.call};
    const ep::block_coop<std::decay_t<decltype(ctx)>> coop{ctx};
    const bool sent = ep::moe_dispatch_send(ctx, endpoint, plan.buffer(rank), own.dispatch);
    if (rank == 1) return sent;
    if (ctx.block() == 1) {
      const bool told = ep::detail::moe_hear_placed(ctx, coop, endpoint, at);
      if (!told) wrong.fetch_add(1);
      for (uint32_t e = coop.lane(); e < plan.local(0); e += coop.lanes()) placed.fetch_add(static_cast<uint32_t>(*at.range(e, 1)) != 0 ? 1 : 0);
      if (coop.lane() == 0) ep::store_release(ctx, &at.ranks()[1], uint64_t{EP_STATUS_TIMEOUT});
      coop.sync();
    }
    const bool received = moe_kernels::run(ctx, endpoint, plan.buffer(rank), own, 1);
    ctx.sync_grid();
    if (ctx.block() == 0 && coop.lane() == 0) wrong.fetch_add(plan.wrong_dispatch(0, 0) + (received ? 0 : 1000));
    return sent && received;
  });
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  EP_CHECK_EQ(wrong.load(), 0u);
  return placed.load();
}

// On threads: alive and silent until the deadline, which every half has anew; `patience` times what suffices on a machine that has nothing else to do. False: a rank that came was
// late, too, in another's eyes, and nothing has been shown.
bool only_that_one_is_late(route by, int32_t size, uint64_t seed, double patience) {
  moe_options wanted;
  wanted.size = size;
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
      for (uint32_t half = 0; half < 4; ++half) {
        // A rank without experts waits for nobody in dispatch: its combine must outlast the others' wait for the silent one.
        ranks.environment(rank).waits.deadline_ns = ep::deadline_after(patience * (half < 2 ? 300 : 1500));
        if (!moe_kernels::run(ctx, endpoint, plan.buffer(rank), own, half)) return false;
      }
      for (int32_t other = 0; other < size; ++other) accused.fetch_add(other != wanted.dead && own.ranks[static_cast<size_t>(other)] == EP_STATUS_TIMEOUT ? 1 : 0);
      wrong.fetch_add(plan.wrong_dispatch(0, rank) + plan.wrong_combine(0, rank));
      return true;
    });
  }));
  if (accused.load() != 0) return false;
  EP_CHECK_EQ(wrong.load(), 0u);
  expect_culprits(plan, wanted, EP_STATUS_TIMEOUT);
  return true;
}

void is_late(route by, int32_t size, uint64_t seed) {
  double patience = 1;
  while (patience < 16 && !only_that_one_is_late(by, size, seed, patience)) patience *= 2;
  EP_CHECK(patience < 16);
}

// What a straggler sends of a call in which it was given up comes in the next call of the same slot, in which it takes part again.
void comes_late(route by, int32_t size, uint64_t seed) {
  moe_options wanted;
  wanted.size = size;
  wanted.calls = 2;
  wanted.slots = 1;
  wanted.dead = static_cast<int32_t>(seed % static_cast<uint64_t>(size));
  wanted.back = 1;
  moe_case plan(wanted, seed);
  world ranks(world_of(plan, size, by));
  plan.bind(ranks);
  lives life(ranks, size);
  life.set(wanted.dead, EP_LIFE_DEAD);
  /* Rows that are counted have no identity: late ones need a fence. What has one are count words. */
  if (by != route::stores) plan.at(0, wanted.dead).dispatch.call.routing.tokens = 0;
  uint64_t done = 0;
  const uint64_t others = static_cast<uint64_t>(size) - 1;
  std::atomic<uint32_t> wrong{0};
  const auto result = ranks.run_simt(shape(1, 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
    return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
      const bool straggles = rank == wanted.dead;
      if (!straggles) run_moe(ctx, endpoint, plan, rank, wrong, 0, 1);
      if (ctx.lane() == 0 && !straggles) {
        plan.peer(rank, 0, wanted.dead) = {};
        if (ep::fetch_add(ctx, &done, 1) + 1 == others) life.set(wanted.dead, EP_LIFE_ALIVE);
      }
      if (!ctx.sync_block_and(ctx.lane() != 0 || ctx.wait(&done, others, rank, EP_STAGE_TURN, nullptr))) return false;
      if (straggles) {
        if (!ep::moe_dispatch_send(ctx, endpoint, plan.buffer(rank), plan.at(0, rank).dispatch)) wrong.fetch_add(1000);
        ctx.sync_block();
        for (int32_t peer = 0; ctx.lane() == 0 && peer < size; ++peer) plan.peer(rank, 0, peer) = {};
        ctx.sync_block();
      }
      return run_moe(ctx, endpoint, plan, rank, wrong, 1);
    });
  });
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  EP_CHECK_EQ(wrong.load(), 0u);
}

// A rank that was given up in a combine writes its results in the middle of the slot's next call, which has not waited for it and takes nothing of them. False where nothing
// would be written over.
enum class form { low_latency, compact, cached };
bool pays_late(route by, form how, uint64_t seed) {
  moe_options wanted;
  wanted.size = 3;
  wanted.calls = 2;
  wanted.slots = 1;
  wanted.overlap = false;
  wanted.dead = static_cast<int32_t>(seed % 3);
  wanted.compact = how != form::low_latency;
  wanted.cached = how == form::cached;
  wanted.answered = how == form::cached;
  moe_case plan(wanted, seed);
  const int32_t late = wanted.dead;
  const int32_t first = (late + 1) % 3;
  const int32_t second = (late + 2) % 3;
  if (plan.sends_to(0, first, late) * plan.sends_to(1, first, second) + plan.sends_to(0, second, late) * plan.sends_to(1, second, first) == 0) return false;
  world ranks(world_of(plan, 3, by));
  plan.bind(ranks);
  const auto half = [&](uint32_t call, uint32_t which, bool of_late, bool of_others) {
    std::atomic<uint32_t> failed{0};
    const bool ran = ranks.run_fast(1, [&](auto& ctx, int32_t rank) {
      if (!(rank == late ? of_late : of_others)) return true;
      return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
        if (!moe_kernels::run(ctx, endpoint, plan.buffer(rank), plan.at(call, rank), which)) failed.fetch_add(1);
        return true;
      });
    });
    EP_CHECK(ran);
    EP_CHECK_EQ(failed.load(), 0u);
    return failed.load() == 0;
  };
  half(0, 0, true, true);
  half(0, 1, true, true);
  half(0, 2, false, true);
  for (const int32_t rank : {first, second}) plan.at(0, rank).ranks[static_cast<size_t>(late)] = EP_STATUS_TIMEOUT;
  half(0, 3, false, true);
  for (const int32_t rank : {first, second}) plan.at(1, rank).ranks[static_cast<size_t>(late)] = EP_MOE_RANK_MASKED;
  for (const int32_t rank : {first, second}) ranks.environment(rank).waits.deadline_ns = ep::deadline_after(2000);
  if (!half(1, 0, false, true)) return true;
  half(1, 1, false, true);
  for (const int32_t rank : {first, second}) EP_CHECK_EQ(plan.wrong_dispatch(1, rank), 0u);
  half(1, 2, false, true);
  half(0, 2, true, false);
  half(1, 3, false, true);
  for (const int32_t rank : {first, second}) EP_CHECK_EQ(plan.wrong_combine(1, rank), 0u);
  return true;
}

// What whoever drives the NIC says of it.
struct told_ways final : ep::kernel_ways {
  explicit told_ways(bool is_down) : down(is_down) {}
  bool end_way(int32_t) const override { return true; }
  bool own_fault(uint64_t found) const override {
    asked.store(static_cast<uint32_t>(found >> EP_NIC_FOUND_SYNDROME) & 0xffu);
    return down;
  }
  bool down;
  mutable std::atomic<uint32_t> asked{0}; // the syndrome
};

// A NIC that refuses what this rank asks of it ends the call, and one whose port is down; one that does not reach a peer loses that peer.
void own_nic_fails(bool own, bool down) {
  moe_options wanted;
  wanted.calls = 1;
  wanted.slots = 1;
  wanted.tokens = 40; // more than the queue takes, so that the kernel sees what becomes of them
  uint64_t seed = 0;
  while (moe_case(wanted, seed).sends_to(0, 0, 1) == 0) ++seed;
  moe_case plan(wanted, seed);
  world_options options{2, plan.bytes(), plan.signal_slots(), false, 4};
  options.qps = 1;
  options.collapsed = false;
  world ranks(options);
  plan.bind(ranks);
  (own ? ranks.nic(0).queue(1).refused_from : ranks.nic(0).queue(1).silent_from) = 2;
  const told_ways told(down);
  ranks.environment(0).ways = &told;
  std::atomic<uint32_t> ended{0};
  EP_CHECK(ranks.run_fast(1, [&](auto& ctx, int32_t rank) {
    return rank == 1 || ranks.with_endpoint(plan.buffer(0).memory, [&](const auto& endpoint) {
      if (!moe_kernels::run(ctx, endpoint, plan.buffer(0), plan.at(0, 0), 0)) ended.fetch_add(1);
      return true;
    });
  }));
  const ep_kernel_status& status = plan.at(0, 0).status;
  EP_CHECK_EQ(ended.load(), own || down ? 1u : 0u);
  EP_CHECK_EQ(status.status, static_cast<uint32_t>(own || down ? EP_STATUS_SYSTEM : EP_STATUS_OK));
  if (own || down) EP_CHECK_EQ(status.stage, static_cast<uint32_t>(EP_STAGE_NIC));
  else EP_CHECK_EQ(plan.at(0, 0).ranks[1], static_cast<uint64_t>(EP_STATUS_PEER_LOST));
  EP_CHECK_EQ(told.asked.load(), static_cast<uint32_t>(own ? 0 : EP_MLX5_SYNDROME_RETRY_EXCEEDED));
  if (down && !own) EP_CHECK_EQ(status.found, 0u);
}

// One's own port is down: whoever is awaited by it and does not come is not to blame. Who is stored to is, and who is dead.
void nobody_comes(route by, bool dead) {
  moe_options wanted;
  wanted.calls = 1;
  wanted.slots = 1;
  uint64_t seed = 0;
  while (moe_case(wanted, seed).local(0) == 0) ++seed;
  moe_case plan(wanted, seed);
  world ranks(world_of(plan, 2, by));
  plan.bind(ranks);
  lives life(ranks, 2);
  if (dead) life.set(1, EP_LIFE_DEAD);
  const told_ways told(true);
  ranks.environment(0).ways = &told;
  ranks.environment(0).waits.deadline_ns = ep::deadline_after(300);
  EP_CHECK(ranks.run_fast(1, [&](auto& ctx, int32_t rank) {
    return rank == 1 || ranks.with_endpoint(plan.buffer(0).memory, [&](const auto& endpoint) {
      for (uint32_t half = 0; half < 2; ++half) moe_kernels::run(ctx, endpoint, plan.buffer(0), plan.at(0, 0), half);
      return true;
    });
  }));
  const bool own = by != route::stores && !dead;
  const ep_kernel_status& status = plan.at(0, 0).status;
  EP_CHECK_EQ(status.status, static_cast<uint32_t>(own ? EP_STATUS_SYSTEM : EP_STATUS_OK));
  EP_CHECK_EQ(status.stage, static_cast<uint32_t>(own ? EP_STAGE_NIC : 0));
  EP_CHECK_EQ(plan.at(0, 0).ranks[1], static_cast<uint64_t>(dead ? EP_STATUS_PEER_LOST : EP_STATUS_TIMEOUT));
}

// A rank that is silent from its credit on: the others await that to a limit of its own, and have time left for each other's counts. Living ranks that were given up.
uint32_t gives_no_credit(route by, bool compact, bool own_limit, uint64_t seed) {
  moe_options wanted;
  wanted.size = 3;
  wanted.calls = 2;
  wanted.slots = 1;
  wanted.overlap = false;
  wanted.compact = compact;
  moe_case plan(wanted, seed);
  int32_t silent = 2;
  while (silent > 0 && plan.local(silent) == 0) --silent;
  world ranks(world_of(plan, 3, by));
  plan.bind(ranks);
  const auto halves = [&](uint32_t call, uint32_t first, uint32_t last, const auto& takes_part) {
    EP_CHECK(ranks.run_fast(1, [&](auto& ctx, int32_t rank) {
      return !takes_part(rank) || ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
        bool ok = true;
        for (uint32_t half = first; half < last; ++half) ok = ok && moe_kernels::run(ctx, endpoint, plan.buffer(rank), plan.at(call, rank), half);
        return ok;
      });
    }));
  };
  halves(0, 0, 1, [](int32_t) { return true; });
  const auto speaks = [&](int32_t rank) { return rank != silent; };
  halves(0, 1, 3, speaks);
  for (int32_t rank = 0; rank < 3; ++rank) plan.at(0, rank).ranks[static_cast<size_t>(silent)] = EP_STATUS_TIMEOUT;
  halves(0, 3, 4, speaks);
  uint32_t accused = 0;
  const auto now = static_cast<uint64_t>(ep::clock_now_ns());
  for (int32_t rank = 0; rank < 3; ++rank) {
    ranks.environment(rank).waits.deadline_ns = ep::deadline_after(own_limit ? 20'000 : 60 + 60 * rank);
    if (own_limit) plan.at(1, rank).dispatch.call.credits_by_ns = now + 100'000'000;
    if (own_limit && compact) plan.at(1, rank).dispatch.call.counts_by_ns = now + 8'000'000'000;
  }
  halves(1, 0, 2, speaks);
  for (int32_t rank = 0; rank < 3; ++rank) {
    for (int32_t other = 0; other < 3; ++other) accused += rank != silent && other != silent && plan.at(1, rank).ranks[static_cast<size_t>(other)] != 0 ? 1 : 0;
  }
  return accused;
}

// Cancelled in the middle, every half says false, and every block comes to its end.
void cancelled(route by, uint64_t seed) {
  moe_options wanted;
  wanted.calls = 1;
  moe_case plan(wanted, seed);
  world ranks(world_of(plan, 2, by));
  plan.bind(ranks);
  std::atomic<uint32_t> cancel{1};
  ranks.environment(0).waits.cancel = &cancel;
  std::atomic<uint32_t> said_false{0};
  const auto result = ranks.run_simt(shape(2, 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
    if (rank == 1) return true;
    return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
      auto& own = plan.at(0, rank);
      bool ok = true;
      for (uint32_t half = 0; half < 4; ++half) ok = moe_kernels::run(ctx, endpoint, plan.buffer(rank), own, half);
      if (!ok) said_false.fetch_add(1);
      return true;
    });
  });
  EP_CHECK_EQ(result.report, "");
  if (plan.local(0) == 0 && plan.sends_to(0, 0, 1) == 0) return; // it had nothing to wait for
  EP_CHECK_EQ(said_false.load(), 16u);
  EP_CHECK_EQ(plan.at(0, 0).status.status, static_cast<uint32_t>(EP_STATUS_ABORTED));
}

// A block finds out that the call has failed, here by counts that cannot be; another one, which awaits a rank that sends nothing, does not wait for that any more.
void one_block_fails(route by, bool stops) {
  moe_options wanted;
  wanted.size = 3;
  wanted.calls = 1;
  wanted.slots = 1;
  uint64_t seed = 0;
  while (moe_case(wanted, seed).local(0) == 0) ++seed;
  moe_case plan(wanted, seed);
  world ranks(world_of(plan, 3, by));
  plan.bind(ranks);
  std::atomic<uint32_t> stopped{0};
  if (stops) ranks.environment(0).waits.stopped = &stopped;
  const std::vector<uint64_t> odd(plan.local(0), uint64_t{plan.at(0, 1).dispatch.call.epoch} << EP_MOE_COUNT_EPOCH_SHIFT | 1000);
  const auto result = ranks.run_simt(shape(2, 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
    if (rank == 2) return true;
    return ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
      auto& own = plan.at(0, rank);
      const ep::moe_view at{plan.buffer(rank), own.dispatch.call};
      const ep::block_coop<std::decay_t<decltype(ctx)>> coop{ctx};
      if (rank == 0) {
        if (by == route::stores) moe_kernels::run(ctx, endpoint, plan.buffer(0), own, 0); // whose end the other half awaits as it does the others'
        return moe_kernels::run(ctx, endpoint, plan.buffer(0), own, 1);
      }
      if (ctx.block() != 0) return true;
      const uint64_t to = at.part(at.buffer.counts) + at.buffer.experts.most_local * sizeof(uint64_t);
      std::copy(odd.begin(), odd.end(), reinterpret_cast<uint64_t*>(own.dispatch.call.routing.send_words));
      coop.sync();
      ep::moe_put_words(ctx, coop, endpoint, at, 0, to, at.send_words(), plan.local(0), EP_MOE_SIGNAL_COUNTED);
      return true;
    });
  });
  EP_CHECK_EQ(result.outcome == ep::simt_outcome::deadlock, !stops);
  if (stops) EP_CHECK_EQ(plan.at(0, 0).status.status, static_cast<uint32_t>(EP_STATUS_INVALID));
}

} // namespace

int main() {
  for (const route by : {route::stores, route::engine, route::nic}) {
    for (const bool stops : {false, true}) one_block_fails(by, stops);
  }
  for (const route by : {route::stores, route::engine, route::nic}) {
    for (int32_t size = 2; size <= 4; ++size) {
      for (uint64_t seed = 0; seed < 40 / seed_share; ++seed) {
        dies(by, size, seed * 31 + static_cast<uint64_t>(size), false);
        dies(by, size, seed * 31 + static_cast<uint64_t>(size), true);
        comes_late(by, size, seed * 17 + static_cast<uint64_t>(size));
      }
      is_late(by, size, static_cast<uint64_t>(size) * 5 + 1);
    }
    for (uint64_t seed = 0; seed < 10; ++seed) cancelled(by, seed);
  }
  uint32_t placed = 0;
  for (uint64_t seed = 0; seed < 40 / seed_share || (seed < 40 && placed == 0); ++seed) placed += is_left_out_behind_its_counts(seed);
  EP_CHECK(placed != 0);
  for (const bool compact : {false, true}) {
    for (const route by : {route::stores, route::engine, route::nic}) {
      for (uint64_t seed = 0; seed < 3; ++seed) EP_CHECK_EQ(gives_no_credit(by, compact, true, seed), 0u);
    }
    uint32_t accused = 0;
    for (uint64_t seed = 0; seed < 50 && accused == 0; ++seed) accused = gives_no_credit(route::stores, compact, false, seed);
    EP_CHECK(accused != 0);
  }
  own_nic_fails(true, false);
  own_nic_fails(false, true);
  own_nic_fails(false, false);
  for (const route by : {route::stores, route::engine, route::nic}) {
    for (const bool dead : {false, true}) nobody_comes(by, dead);
  }
  for (const route by : {route::stores, route::engine, route::nic}) {
    for (const form how : {form::low_latency, form::compact, form::cached}) {
      uint32_t tried = 0;
      for (uint64_t seed = 0; seed < 12; ++seed) tried += pays_late(by, how, seed) ? 1 : 0;
      EP_CHECK(tried > 2);
    }
  }
  return ep::check::finish();
}
