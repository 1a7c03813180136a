// Ways to exchange rows of experts that are known to be wrong. Each differs from ours in one thing, and the scheduler must find it out; ours passes under the same
// seeds. If one of these stops failing, the tests have lost their teeth.
#include <chrono>
#include <deque>
#include <mutex>

#include "../check.hpp"
#include "moe_case.hpp"

using namespace ep::test;

namespace {

// Counts go out before the rows that they count, of which some time passes before they follow.
struct counts_first {
  template <class Ctx, class Endpoint> static bool run(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, moe_case::one_rank& own, uint32_t half) {
    if (half != 0) return moe_kernels::run(ctx, endpoint, buffer, own, half);
    const ep::block_coop<Ctx> coop{ctx};
    const ep::moe_view at{buffer, own.dispatch.call};
    ep::moe_layout(ctx, at);
    ep::moe_await_credits(ctx, endpoint, at);
    ctx.sync_grid();
    for (int32_t rank = static_cast<int32_t>(ctx.block()); rank < at.world(); rank += static_cast<int32_t>(ctx.blocks())) {
      if (rank == at.self() || at.experts_of(rank) == 0) continue;
      ep::detail::moe_send_counts(ctx, coop, endpoint, at, rank);
      if (coop.lane() != 0) continue;
      at.peer(rank).credited = own.dispatch.call.epoch;
      at.peer(rank).told = own.dispatch.call.epoch;
    }
    ctx.sync_grid();
    for (uint32_t stall = 0; stall < 200; ++stall) ctx.point();
    ep::detail::moe_send_rows(ctx, coop, endpoint, at, own.dispatch);
    return true;
  }
};

// Writes into a slot without the credit of those who may still read it.
struct no_credit {
  template <class Ctx, class Endpoint> static bool run(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, moe_case::one_rank& own, uint32_t half) {
    const ep::moe_view at{buffer, own.dispatch.call};
    if (half == 0 && ctx.block() == 0 && ctx.lane() == 0) {
      for (int32_t rank = 0; rank < at.world(); ++rank) at.peer(rank).credited = 0;
    }
    ctx.sync_grid();
    return moe_kernels::run(ctx, endpoint, buffer, own, half);
  }
};

// Grants credit when it knows where rows go, and reads them where they are offered only then.
struct early_credit {
  template <class Ctx, class Endpoint> static bool run(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, moe_case::one_rank& own, uint32_t half) {
    if (half != 1) return moe_kernels::run(ctx, endpoint, buffer, own, half);
    const ep::moe_view at{buffer, own.dispatch.call};
    const uint32_t experts = at.experts_of(at.self());
    for (int32_t source = 0; experts != 0 && source < at.world(); ++source) {
      if (ctx.block() == 0 && ctx.lane() == 0 && source != at.self()) ep::detail::moe_await_source(ctx, endpoint, at, source);
    }
    ctx.sync_grid();
    for (uint32_t e = ep::detail::moe_warp(ctx); e < experts; e += ep::detail::moe_warps(ctx)) ep::detail::moe_place_runs(ctx, endpoint, at, own.dispatch.totals, e);
    ctx.sync_grid();
    const bool ok = ep::moe_release(ctx, endpoint, buffer, own.dispatch.call);
    for (uint32_t stall = 0; stall < 200; ++stall) ctx.point();
    const bool came = ep::detail::moe_pull_rows(ctx, endpoint, at, own.dispatch, {ctx.block(), ctx.blocks()}, [] { return true; });
    ctx.sync_grid();
    return ok && came;
  }
};

// Receives with another way to await a source.
template <class Ctx, class Endpoint, class Await>
bool receive_with(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, const ep_moe_dispatch_args& args, const Await& await) {
  const ep::block_coop<Ctx> coop{ctx};
  const ep::moe_view at{buffer, args.call};
  const uint32_t experts = at.experts_of(at.self());
  for (int32_t source = 0; experts != 0 && source < at.world(); ++source) {
    if (ctx.block() == 0 && ctx.lane() == 0 && source != at.self()) await(at, source);
  }
  ctx.sync_grid();
  for (uint32_t e = 0; e < experts; ++e) {
    if (ctx.block() == 0 && ctx.lane() < ctx.warp_lanes()) ep::detail::moe_place_runs(ctx, endpoint, at, args.totals, e);
  }
  ctx.sync_grid();
  for (uint32_t e = 0; e < experts; ++e) {
    for (int32_t source = 0; source < at.world(); ++source) {
      if (source != at.self()) ep::detail::moe_take_run(ctx, coop, endpoint, at, args, e, source);
    }
  }
  ep::detail::moe_take_own(ctx, coop, endpoint, at, args);
  ep::copy_rows_done(coop, false);
  ctx.sync_grid();
  return ep::moe_release(ctx, endpoint, buffer, args.call);
}

struct engine_endpoint : ep::proxy_endpoint {
  uint64_t local_data() const { return reinterpret_cast<const ep_peer_view*>(memory.peers)[memory.rank].data; }
};

uint64_t words_of(const ep::moe_view& at, const engine_endpoint& endpoint, int32_t source) {
  const auto* words = reinterpret_cast<const uint64_t*>(endpoint.local_data() + at.part(at.buffer.counts)) + static_cast<uint64_t>(source) * at.buffer.experts.most_local;
  uint64_t puts = 0;
  for (uint32_t e = 0; e < at.experts_of(at.self()); ++e) puts += static_cast<uint32_t>(words[e]) + (static_cast<uint32_t>(words[e]) != 0 ? 1 : 0);
  return puts;
}

// Reads rows once the counts are here, as if puts came in order.
struct no_total {
  template <class Ctx, class Endpoint> static bool run(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, moe_case::one_rank& own, uint32_t half) {
    if (half != 1) return moe_kernels::run(ctx, endpoint, buffer, own, half);
    return receive_with(ctx, endpoint, buffer, own.dispatch, [&](const ep::moe_view& at, int32_t source) {
      ep::moe_await(ctx, endpoint, at, EP_MOE_SIGNAL_COUNTED, ++at.peer(source).counted, source, EP_STAGE_COUNT);
    });
  }
};

// A network on which rows take a millisecond longer than anything else.
class slow_network {
 public:
  explicit slow_network(world& served) : ranks(served), carrier([this] { carry(); }) {}
  ~slow_network() {
    ended.store(true);
    carrier.join();
  }
  void later(std::function<void()> put) {
    const std::lock_guard<std::mutex> hold(guard);
    waiting.push_back({ep::clock_now_ns() + 1'000'000, std::move(put)});
  }
  void land(int32_t peer, uint64_t offset, const void* src, uint64_t bytes, uint64_t slot, uint64_t add) {
    if (bytes != 0) std::memcpy(ranks.data(peer) + offset, src, bytes);
    std::atomic_ref<uint64_t>(ranks.signals(peer)[slot]).fetch_add(add);
    ep::wake_notify(ranks.environment(peer).waits.wake);
  }

 private:
  struct held {
    int64_t due_ns;
    std::function<void()> put;
  };
  void carry() {
    while (!ended.load()) {
      std::vector<held> due;
      {
        const std::lock_guard<std::mutex> hold(guard);
        while (!waiting.empty() && waiting.front().due_ns <= ep::clock_now_ns()) {
          due.push_back(std::move(waiting.front()));
          waiting.pop_front();
        }
      }
      for (const held& one : due) one.put();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  world& ranks;
  std::mutex guard;
  std::deque<held> waiting;
  std::atomic<bool> ended{false};
  std::thread carrier;
};

struct slow_endpoint {
  const ep_memory_handle& memory;
  slow_network& network;

  const ep_peer_view& own() const { return reinterpret_cast<const ep_peer_view*>(memory.peers)[memory.rank]; }
  uint64_t local_data() const { return own().data; }
  const uint64_t* local_signal(uint64_t slot) const { return reinterpret_cast<const uint64_t*>(own().signals) + slot; }
  template <class Ctx, class Coop> bool signal(Ctx&, const Coop&, int32_t peer, uint64_t slot, uint64_t add, ep_kernel_status*) const {
    network.land(peer, 0, nullptr, 0, slot, add);
    return true;
  }
  template <class Ctx, class Coop>
  bool put_rows(Ctx&, const Coop&, int32_t peer, uint64_t dst_offset, const void* src, uint64_t, uint64_t row_bytes, uint64_t, bool, uint64_t slot, uint64_t add,
                ep_kernel_status*) const {
    const bool is_row = slot / static_cast<uint64_t>(memory.world_size) % EP_MOE_SIGNAL_KINDS == EP_MOE_SIGNAL_ARRIVED;
    const auto put = [=, over = &network] { over->land(peer, dst_offset, src, row_bytes, slot, add); };
    if (is_row) {
      network.later(put);
    } else {
      put();
    }
    return true;
  }
};

// Takes whatever counts are there once something was counted, whichever call's they are.
struct no_epoch {
  template <class Ctx> static bool run(Ctx& ctx, const engine_endpoint& endpoint, const ep_moe_buffer& buffer, moe_case::one_rank& own, uint32_t half) {
    if (half != 1) return moe_kernels::run(ctx, endpoint, buffer, own, half);
    return receive_with(ctx, endpoint, buffer, own.dispatch, [&](const ep::moe_view& at, int32_t source) {
      ep_moe_peer& peer = at.peer(source);
      if (!ep::moe_await(ctx, endpoint, at, EP_MOE_SIGNAL_COUNTED, ++peer.counted, source, EP_STAGE_COUNT)) return;
      peer.arrived += words_of(at, endpoint, source);
      ep::moe_await(ctx, endpoint, at, EP_MOE_SIGNAL_ARRIVED, peer.arrived, source, EP_STAGE_ARRIVAL);
    });
  }
};

struct stores_endpoint : ep::load_store_endpoint {};

struct outcome {
  uint32_t corrupt = 0;
  uint32_t stuck = 0;
};

// Dispatches alone: what combine waits for would hide that a slot is written too early.
template <class Kernels, class Endpoint> outcome sample(bool engine, uint64_t seeds = 60, bool runs_ahead = false) {
  outcome seen;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    moe_options wanted;
    wanted.calls = 6;
    wanted.slots = 1;
    wanted.overlap = false;
    moe_case plan(wanted, seed);
    if (runs_ahead && plan.local(0) != 0) continue; // only who receives nothing is held up by nothing else
    world ranks({2, plan.bytes(), plan.signal_slots(), engine, 4});
    plan.bind(ranks);
    std::atomic<uint32_t> wrong{0};
    const auto result = ranks.run_simt(shape(2, 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
      const Endpoint endpoint{{plan.buffer(rank).memory}};
      for (uint32_t call = 0; call < wanted.calls; ++call) {
        for (uint32_t half = 0; half < 2; ++half) {
          for (uint32_t stall = 0; runs_ahead && rank == 1 && half == 1 && stall < 200; ++stall) ctx.point();
          if (!Kernels::run(ctx, endpoint, plan.buffer(rank), plan.at(call, rank), half)) return false;
        }
        ctx.sync_grid();
        if (ctx.block() == 0 && ctx.lane() == 0) wrong.fetch_add(plan.wrong_dispatch(call, rank));
      }
      return true;
    });
    const bool stuck = result.outcome == ep::simt_outcome::deadlock;
    if (stuck) ++seen.stuck;
    if (!stuck && (wrong.load() != 0 || !result.ok)) ++seen.corrupt;
  }
  return seen;
}

template <class Kernels> outcome sample_slow() {
  outcome seen;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    moe_options wanted;
    wanted.calls = 1;
    moe_case plan(wanted, seed);
    world ranks({2, plan.bytes(), plan.signal_slots(), false, 4});
    plan.bind(ranks);
    std::atomic<uint32_t> wrong{0};
    slow_network network(ranks);
    const bool ok = ranks.run_fast(1, [&](auto& ctx, int32_t rank) {
      const slow_endpoint endpoint{plan.buffer(rank).memory, network};
      for (uint32_t half = 0; half < 2; ++half) {
        if (!Kernels::run(ctx, endpoint, plan.buffer(rank), plan.at(0, rank), half)) return false;
      }
      wrong.fetch_add(plan.wrong_dispatch(0, rank));
      return true;
    });
    if (wrong.load() != 0 || !ok) ++seen.corrupt;
  }
  return seen;
}

void expect_clean(const outcome& seen) {
  EP_CHECK_EQ(seen.corrupt, 0u);
  EP_CHECK_EQ(seen.stuck, 0u);
}

void expect_caught(const char* what, const outcome& seen) {
  if (seen.corrupt + seen.stuck <= 10) std::fprintf(stderr, "%s: found out under %u + %u seeds only\n", what, seen.corrupt, seen.stuck);
  EP_CHECK(seen.corrupt + seen.stuck > 10);
}

// The counts of a call in which rank 1 was given up come in the next one; its rows do not, as if fenced.
template <class Kernels> outcome sample_late() {
  outcome seen;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    moe_options wanted;
    wanted.calls = 2;
    wanted.slots = 1;
    wanted.overlap = false;
    wanted.dead = 1;
    wanted.back = 1;
    moe_case plan(wanted, seed);
    world ranks({2, plan.bytes(), plan.signal_slots(), true, 4});
    plan.bind(ranks);
    plan.at(0, 1).dispatch.call.routing.tokens = 0;
    std::atomic<uint32_t> wrong{0};
    const auto result = ranks.run_simt(shape(1, 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
      const engine_endpoint endpoint{{plan.buffer(rank).memory}};
      if (rank == 1) ep::moe_dispatch_send(ctx, endpoint, plan.buffer(1), plan.at(0, 1).dispatch);
      ctx.sync_block();
      if (ctx.lane() == 0) plan.peer(rank, 0, 1 - rank) = {};
      ctx.sync_block();
      return run_moe<Kernels>(ctx, endpoint, plan, rank, wrong, 1);
    });
    const bool stuck = result.outcome == ep::simt_outcome::deadlock;
    if (stuck) ++seen.stuck;
    if (!stuck && (wrong.load() != 0 || !result.ok)) ++seen.corrupt;
  }
  return seen;
}

} // namespace

int main() {
  expect_clean(sample_slow<moe_kernels>());
  if constexpr (!shows_naive) return ep::check::finish(); // the rest is of one thread, and ours runs so in other tests
  expect_clean(sample<moe_kernels, stores_endpoint>(false));
  expect_clean(sample<moe_kernels, engine_endpoint>(true));
  expect_clean(sample_late<moe_kernels>());
  expect_caught("counts_first", sample<counts_first, stores_endpoint>(false, 400));
  expect_clean(sample<moe_kernels, stores_endpoint>(false, 1000, true));
  expect_caught("no_credit", sample<no_credit, stores_endpoint>(false, 1000, true));
  expect_caught("early_credit", sample<early_credit, stores_endpoint>(false, 1000, true));
  expect_caught("no_total", sample_slow<no_total>());
  expect_caught("no_epoch", sample_late<no_epoch>());
  return ep::check::finish();
}
