// A slot of a low-latency buffer of which a rank owes results of both banks: the calls that meet the debt are refused on all ranks, and those after it go on.
#include "../check.hpp"
#include "moe_apart.hpp"

using namespace ep::test;

namespace {

enum class route { stores, engine, nic };
constexpr route routes[] = {route::stores, route::engine, route::nic};
constexpr uint64_t owed = 9;

world_options world_of(const moe_case& plan, int32_t size, route by) {
  world_options made{size, plan.bytes(), plan.signal_slots(), by == route::engine, 4};
  if (by == route::nic) made.qps = 2;
  return made;
}

// The last rank is left out by all.
moe_options debts(int32_t size, uint64_t seed) {
  moe_options wanted;
  wanted.size = size;
  wanted.slots = 1 + static_cast<uint32_t>(seed % 2);
  wanted.calls = 4 * wanted.slots;
  wanted.overlap = seed % 3 == 0;
  wanted.dead = size - 1;
  wanted.masked = true;
  return wanted;
}

// A rank is owed results of both banks of slot 0.
void borrow(moe_case& plan, int32_t rank, int32_t debtor) { plan.peer(rank, 0, debtor).owed[0] = plan.peer(rank, 0, debtor).owed[1] = owed; }

// Before rank 0 sends: its credit is there, so that what is late by then is the debt alone.
template <class Ctx> void await_credits(Ctx& ctx, world& ranks, moe_case& plan, const moe_options& wanted, uint32_t call) {
  const uint32_t slot = call % wanted.slots;
  for (int32_t rank = 1; rank < wanted.size; ++rank) {
    if (plan.local(rank) == 0 || rank == wanted.dead) continue;
    const uint64_t at = (slot * EP_MOE_SIGNAL_KINDS + EP_MOE_SIGNAL_CREDIT) * static_cast<uint64_t>(wanted.size) + static_cast<uint64_t>(rank);
    std::atomic_ref<uint64_t> credit(ranks.signals(0)[at]);
    while (credit.load() < plan.peer(0, slot, rank).credited) ctx.point();
  }
}

// A context whose kernels may outlive their ranks, as those of a GPU do.
struct outliving_context : ep::simt_context {
  static constexpr bool outlives_ranks = true;
  explicit outliving_context(const ep::simt_context& of) : ep::simt_context(of) {}
};

bool is_refused(const ep_kernel_status& status, int32_t rank, uint32_t stage) { return status.status == EP_STATUS_BUSY && status.rank == rank && status.stage == stage; }

// Two calls of the slot meet the debt, then it is paid. Ranks of experts hear of it in dispatch, others in combine.
void on_all_ranks(route by, int32_t size, uint64_t seed) {
  const moe_options wanted = debts(size, seed);
  moe_case plan(wanted, seed);
  world ranks(world_of(plan, size, by));
  plan.bind(ranks);
  borrow(plan, 0, wanted.dead);
  const auto in_debt = [&](uint32_t call) { return call % wanted.slots == 0 && call / wanted.slots < 2; };
  const auto hears = [&](int32_t rank) {
    bool any = rank == 0 || plan.local(rank) != 0;
    for (int32_t other = 0; other < wanted.dead; ++other) any = any || plan.local(other) != 0;
    return any;
  };
  std::atomic<uint32_t> wrong{0};
  const auto result = ranks.run_simt(shape(1 + static_cast<uint32_t>(seed % 2), 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
    return rank == wanted.dead || ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
      for (const moe_step& step : plan.halves()) {
        auto& own = plan.at(step.call, rank);
        const bool refused = own.status.status == EP_STATUS_BUSY;
        const bool one = ctx.block() == 0 && ctx.lane() == 0;
        ctx.sync_grid();
        if (refused) continue;
        if (one && rank == 0 && step.half == 0 && step.call % wanted.slots == 0) {
          await_credits(ctx, ranks, plan, wanted, step.call);
          own.dispatch.call.credits_by_ns = 1;
          if (!in_debt(step.call)) ranks.signals(0)[EP_MOE_SIGNAL_RETURNED * static_cast<uint64_t>(size) + static_cast<uint64_t>(wanted.dead)] = owed;
        }
        ctx.sync_grid();
        const bool ok = moe_kernels::run(ctx, endpoint, plan.buffer(rank), own, step.half);
        ctx.sync_grid();
        if (!one) continue;
        if (in_debt(step.call) && hears(rank)) {
          const uint32_t half = rank == 0 || plan.local(rank) != 0 ? 1 : 3;
          if (ok != (step.half != half)) wrong.fetch_add(1000);
          if (!ok && !is_refused(own.status, rank == 0 ? wanted.dead : 0, rank == 0 ? EP_STAGE_RESULT : EP_STAGE_PLACE)) wrong.fetch_add(1);
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
  for (int32_t rank = 0; rank < wanted.dead; ++rank) {
    for (uint32_t e = 0; e < plan.local(rank); ++e) {
      uint64_t rows = 0;
      for (uint32_t call = 0; call < wanted.calls; ++call) {
        for (int32_t s = 0; !in_debt(call) && s < size; ++s) rows += plan.count_of(call, rank, e, s);
      }
      EP_CHECK_EQ(plan.total(rank, e), rows);
    }
  }
}

// Ranks 1 and 2 do not know of each other, and rank 1 refuses the first call: rank 2 goes on with it until it awaits what rank 0, which was refused by rank 1, returns. With `rows` it sends
// rows to rank 0, which has rows of it as well: what rank 2 returns by then must not come into rank 0's next call, in which rank 1 writes to the same place. Otherwise rank 2 sends rank 0
// none, and hears of it all the same. False where the plan is not such a one. (It knows of no rank but 0 whom it does without.)
bool second_hand(route by, uint64_t seed, bool rows) {
  moe_options wanted = debts(4, seed);
  wanted.slots = 1;
  wanted.calls = 3;
  wanted.overlap = false;
  moe_case plan(wanted, seed);
  if (plan.local(0) == 0 || (plan.sends_to(0, 2, 0) != 0) != rows) return false;
  world ranks(world_of(plan, 4, by));
  plan.bind(ranks);
  const auto serves = [&](uint32_t call, size_t place) {
    const std::vector<int32_t>& replicas = plan.at(call, 0).want_replica;
    if (place >= replicas.size() || replicas[place] < 0) return -1;
    return reinterpret_cast<const int32_t*>(plan.buffer(0).experts.replica_rank)[replicas[place]];
  };
  bool meet = !rows;
  for (size_t place = 0; place < plan.at(0, 0).want_replica.size(); ++place) meet = meet || (serves(0, place) == 2 && serves(1, place) == 1);
  if (!meet) return false;
  borrow(plan, 1, wanted.dead);
  std::atomic<uint32_t> wrong{0};
  const auto result = ranks.run_simt(shape(1 + static_cast<uint32_t>(seed % 2), 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
    return rank == wanted.dead || ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
      for (const moe_step& step : plan.halves()) {
        auto& own = plan.at(step.call, rank);
        const bool refused = own.status.status == EP_STATUS_BUSY;
        const bool one = ctx.block() == 0 && ctx.lane() == 0;
        ctx.sync_grid();
        if (refused) continue;
        if (one && rank != 0) own.ranks[static_cast<size_t>(3 - rank)] = EP_MOE_RANK_MASKED;
        for (uint32_t i = 0; rank == 2 && step.call == 0 && step.half == 2 && i < 1000; ++i) ctx.point(); // its experts take their time
        if (one && rank == 1 && step.call == 0) own.dispatch.call.credits_by_ns = 1;
        if (one && rank == 1 && step.call == 1) ranks.signals(1)[EP_MOE_SIGNAL_RETURNED * 4 + 3] = owed;
        ctx.sync_grid();
        const bool ok = moe_kernels::run(ctx, endpoint, plan.buffer(rank), own, step.half);
        ctx.sync_grid();
        if (!one) continue;
        if (step.call == 0) {
          if (ok != (step.half != (rank == 2 ? 3 : 1))) wrong.fetch_add(1000);
          if (!ok && !is_refused(own.status, rank == 1 ? 3 : 1, rank == 1 ? EP_STAGE_RESULT : EP_STAGE_PLACE)) wrong.fetch_add(1);
        } else {
          if (!ok) wrong.fetch_add(100);
          if (rank == 0 && step.half == 1) wrong.fetch_add(plan.wrong_dispatch(step.call, 0));
          if (rank == 0 && step.half == 3) wrong.fetch_add(plan.wrong_combine(step.call, 0));
        }
      }
      return true;
    });
  });
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  EP_CHECK_EQ(wrong.load(), 0u);
  return true;
}

// The debtor is dead. Where a NIC may still carry out what it sent, the debt ends with the way here, which is asked for once; where that cannot be ended the call is refused, and always where
// its kernels may run on.
template <class Ctx = ep::simt_context&> void of_the_dead(route by, uint64_t seed, bool ends) {
  constexpr bool outlives = !std::is_reference_v<Ctx>;
  struct way final : ep::kernel_ways {
    explicit way(bool can) : ends(can) {}
    bool end_way(int32_t lost) const override {
      EP_CHECK_EQ(lost, 2);
      ++asked;
      return ends;
    }
    bool own_fault(uint64_t) const override { return false; }
    bool ends;
    mutable uint32_t asked = 0;
  };
  moe_options wanted = debts(3, seed);
  wanted.slots = 1;
  wanted.calls = 1;
  wanted.overlap = false;
  moe_case plan(wanted, seed);
  world ranks(world_of(plan, 3, by));
  plan.bind(ranks);
  borrow(plan, 0, wanted.dead);
  const way here(ends);
  std::vector<ep_life_word> words(3);
  std::vector<ep_peer_view> views(3);
  for (int32_t rank = 0; rank < 3; ++rank) {
    words[static_cast<size_t>(rank)].state = rank == wanted.dead ? EP_LIFE_DEAD : EP_LIFE_ALIVE;
    views[static_cast<size_t>(rank)].life = reinterpret_cast<uint64_t>(&words[static_cast<size_t>(rank)]);
    ep::kernel_environment& environment = ranks.environment(rank);
    environment.waits.peers = views.data();
    environment.ways = &here;
  }
  const auto result = ranks.run_simt(shape(1, 8, 4), seeded(seed), [&](ep::simt_context& given, int32_t rank) {
    Ctx ctx(given);
    return rank == wanted.dead || ranks.with_endpoint(plan.buffer(rank).memory, [&](const auto& endpoint) {
      auto& own = plan.at(0, rank);
      for (uint32_t half = 0; half < 4; ++half) {
        const bool refused = own.status.status == EP_STATUS_BUSY;
        ctx.sync_grid();
        if (refused) break;
        moe_kernels::run(ctx, endpoint, plan.buffer(rank), own, half);
        ctx.sync_grid();
      }
      return true;
    });
  });
  EP_CHECK_EQ(result.report, "");
  EP_CHECK_EQ(here.asked, by == route::stores || outlives ? 0u : 1u);
  const bool goes_on = !outlives && (by == route::stores || ends);
  const ep_kernel_status& status = plan.at(0, 0).status;
  EP_CHECK(goes_on ? status.status == EP_STATUS_OK : is_refused(status, wanted.dead, EP_STAGE_RESULT));
  for (int32_t rank = 0; goes_on && rank < wanted.dead; ++rank) EP_CHECK_EQ(plan.wrong_dispatch(0, rank) + plan.wrong_combine(0, rank), 0u);
}

} // namespace

int main() {
  for (uint64_t seed = 0; seed < seeds_of(20); ++seed) of_the_dead<outliving_context>(route::stores, seed, true);
  for (const route by : routes) {
    for (uint64_t seed = 0; seed < seeds_of(20); ++seed) of_the_dead(by, seed, seed % 2 == 0);
    for (int32_t size = 2; size <= 5; ++size) {
      for (uint64_t seed = 0; seed < seeds_of(30); ++seed) on_all_ranks(by, size, seed * 31 + static_cast<uint64_t>(size));
    }
    for (const bool rows : {true, false}) {
      const uint64_t seeds = rows ? std::max<uint64_t>(seeds_of(800), 80) : std::max<uint64_t>(seeds_of(60), 6); // few of them try it
      uint64_t tried = 0;
      for (uint64_t seed = 0; seed < seeds; ++seed) tried += second_hand(by, seed, rows) ? 1 : 0;
      EP_CHECK(tried > seeds / 200);
    }
  }
  return ep::check::finish();
}
