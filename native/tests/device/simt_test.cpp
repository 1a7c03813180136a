// The simt executor itself: its collectives, that its schedules repeat, and that what cannot go on is reported with names.
#include <memory>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../../core/simt/simt.hpp"
#include "../check.hpp"
#include "ep/device/moe_blocks.h"
#include "ep/device/order.h"

namespace {

using ep::simt_context;
using ep::simt_options;
using ep::simt_outcome;

const ep::kernel_environment quiet{};

bool says(const ep::simt_result& result, const char* text) { return result.report.find(text) != std::string::npos; }

void collectives() {
  for (const uint32_t warp : {1u, 4u, 32u}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      uint32_t wrong = 0;
      const auto result = ep::simt_run(simt_options{2, 2 * warp, warp, seed, 0.5}, quiet, [&](simt_context& ctx) {
        const uint32_t me = ctx.lane() % ctx.warp_lanes();
        for (uint32_t round = 0; round < 5; ++round) {
          const uint32_t from = (me + round) % warp;
          if (ctx.shuffle(ctx.lane() * 100 + round, from) != (ctx.lane() - me + from) * 100 + round) ++wrong;
          const uint32_t everyone = warp == 32 ? ~0u : (1u << warp) - 1;
          uint32_t odd = 0;
          uint32_t same = 0;
          for (uint32_t i = 0; i < warp; ++i) {
            odd |= (i % 2) << i;
            same |= (i % 3 == me % 3 ? 1u : 0u) << i;
          }
          if (ctx.ballot(me % 2 == 1) != odd || ctx.ballot(true) != everyone) ++wrong;
          if (ctx.match_any(uint64_t{1} << 40 | (me % 3)) != same) ++wrong;
          if (ctx.sync_block_and(ctx.lane() != round % ctx.lanes()) || !ctx.sync_block_and(true)) ++wrong;
          ctx.sync_warp();
        }
      });
      EP_CHECK(result.ok);
      EP_CHECK_EQ(wrong, 0u);
    }
  }
}

// Everyone adds before the barrier; everyone must see all of it after.
void barriers() {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    std::vector<uint64_t> blocks(3);
    uint64_t grid = 0;
    uint64_t half = 0;
    uint32_t wrong = 0;
    const auto result = ep::simt_run(simt_options{3, 8, 4, seed, 0.5}, quiet, [&](simt_context& ctx) {
      for (uint64_t round = 1; round <= 3; ++round) {
        fetch_add(ctx, &blocks[ctx.block()], 1);
        ctx.sync_block();
        if (load_acquire(ctx, &blocks[ctx.block()]) != 8 * round) ++wrong;
        ctx.sync_block();
        fetch_add(ctx, &grid, 1);
        ctx.sync_grid();
        if (load_acquire(ctx, &grid) != 24 * round) ++wrong;
        ctx.sync_grid();
      }
      if (ctx.block() == 0 && ctx.lane() < 4) {
        fetch_add(ctx, &half, 1);
        ctx.sync_named(3, 4);
        if (load_acquire(ctx, &half) != 4) ++wrong;
      }
    });
    EP_CHECK(result.ok);
    EP_CHECK_EQ(wrong, 0u);
  }
}

// Two ranks of one launch, of which one comes by more barriers than the other: each rank's blocks see all that its own have added, and its word serves the next launch, of other blocks.
void barriers_of_ranks() {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    uint64_t words[2] = {0, 0};
    for (const uint32_t blocks : {3u, 2u}) {
      uint64_t added[2] = {0, 0};
      uint32_t wrong = 0;
      const auto result = ep::simt_run(simt_options{2 * blocks, 8, 4, seed, 0.5}, quiet, [&](simt_context& ctx) {
        struct of_rank {
          simt_context& all;
          uint32_t count;
          uint32_t blocks() const { return count; }
          uint32_t lane() const { return all.lane(); }
          void point() { all.point(); }
          void sync_block() { all.sync_block(); }
          bool wait(const uint64_t* word, uint64_t value, int32_t rank, uint32_t stage, ep_kernel_status* status) { return all.wait(word, value, rank, stage, status); }
        } own{ctx, blocks};
        const uint32_t rank = ctx.block() / blocks;
        for (uint64_t round = 1; round <= 2 + 3 * rank; ++round) {
          fetch_add(ctx, &added[rank], 1);
          ep::detail::moe_sync_blocks(own, &words[rank], static_cast<int32_t>(rank));
          if (ep::load_acquire(ctx, &added[rank]) < round * blocks * ctx.lanes()) ++wrong;
        }
      });
      EP_CHECK(result.ok);
      EP_CHECK_EQ(wrong, 0u);
    }
  }
}

// Without the barrier some schedule must show less than everything: the interleaver has teeth.
void missing_barrier_shows() {
  uint32_t seen = 0;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    uint64_t count = 0;
    bool complete = true;
    ep::simt_run(simt_options{1, 8, 8, seed, 0.5}, quiet, [&](simt_context& ctx) {
      fetch_add(ctx, &count, 1);
      if (load_acquire(ctx, &count) != 8) complete = false;
    });
    if (!complete) ++seen;
  }
  EP_CHECK(seen > 40);
}

void schedules_repeat() {
  std::set<uint64_t> different;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<uint32_t> order[2];
    ep::simt_result results[2];
    for (int i = 0; i < 2; ++i) {
      results[i] = ep::simt_run(simt_options{2, 4, 4, seed, 0.3}, quiet, [&](simt_context& ctx) {
        for (int step = 0; step < 5; ++step) {
          order[i].push_back(ctx.block() * 4 + ctx.lane());
          ctx.point();
        }
      });
    }
    EP_CHECK(order[0] == order[1]);
    EP_CHECK_EQ(results[0].schedule, results[1].schedule);
    EP_CHECK_EQ(results[0].switches, results[1].switches);
    different.insert(results[0].schedule);
  }
  EP_CHECK(different.size() >= 19);
}

void deadlocks_are_named() {
  auto held = std::make_shared<int>(7);
  const auto left = ep::simt_run(simt_options{2, 4, 4, 1, 0.5}, quiet, [held](simt_context& ctx) {
    const auto kept = held;  // destroyed when the lane is stopped
    if (ctx.block() == 1 && ctx.lane() == 2) return;
    ctx.sync_block();
  });
  EP_CHECK(left.outcome == simt_outcome::deadlock);
  EP_CHECK(!left.ok);
  EP_CHECK(says(left, "block 1 lanes 0-1 waits at the block barrier: 3 of 4 lanes came"));
  EP_CHECK(says(left, "block 1 lane 2 has returned"));
  EP_CHECK(says(left, "block 0 lanes 0-3 has returned"));
  EP_CHECK_EQ(held.use_count(), 1L);

  const auto grid = ep::simt_run(simt_options{2, 4, 4, 1, 0.5}, quiet, [](simt_context& ctx) {
    if (ctx.block() == 0) ctx.sync_grid();
  });
  EP_CHECK(grid.outcome == simt_outcome::deadlock);
  EP_CHECK(says(grid, "block 0 lanes 0-3 waits at the grid barrier: 4 of 8 lanes came"));

  const auto diverged = ep::simt_run(simt_options{1, 4, 4, 1, 0.5}, quiet, [](simt_context& ctx) {
    if (ctx.lane() == 0) {
      ctx.ballot(true);
    } else {
      ctx.sync_warp();
    }
  });
  EP_CHECK(diverged.outcome == simt_outcome::diverged);
  EP_CHECK(says(diverged, "a ballot"));

  ep::simt_schedule bounded;
  bounded.point_limit = 1000;
  ep::simt_launch polls;
  polls.lanes = polls.warp_lanes = 4;
  polls.environment = &quiet;
  polls.name = "rank 0";
  uint64_t never = 0;
  polls.kernel = ep::simt_kernel([&](simt_context& ctx) {
    while (load_acquire(ctx, &never) == 0) {
    }
  });
  EP_CHECK(ep::simt_run_launch(bounded, polls).outcome == simt_outcome::runaway);
}

void together_names_the_word() {
  uint64_t signals[2][4] = {};
  ep_peer_view views[2] = {};
  for (int rank = 0; rank < 2; ++rank) views[rank].signals = reinterpret_cast<uint64_t>(signals[rank]);
  ep_memory_handle memory[2] = {};
  std::vector<ep::simt_launch> launches(2);
  for (int32_t rank = 0; rank < 2; ++rank) {
    memory[rank].rank = rank;
    memory[rank].world_size = 2;
    memory[rank].signal_slots = 4;
    memory[rank].peers = reinterpret_cast<uint64_t>(views);
    launches[rank].lanes = launches[rank].warp_lanes = 2;
    launches[rank].environment = &quiet;
    launches[rank].memory = &memory[rank];
    launches[rank].name = "rank " + std::to_string(rank);
    launches[rank].kernel = ep::simt_kernel([&, rank](simt_context& ctx) {
      const int32_t peer = 1 - rank;
      if (ctx.lane() == 0) fetch_add(ctx, &signals[peer][2 + rank], 3);
      return ctx.wait(&signals[rank][2 + peer], rank == 0 ? 3 : 4, peer, EP_STAGE_ARRIVAL, nullptr);
    });
  }
  const auto result = ep::simt_run_together({}, launches);
  EP_CHECK(result.outcome == simt_outcome::deadlock);
  EP_CHECK(says(result, "rank 1 block 0 lanes 0-1 waits for slot 2 (stage arrival, from rank 0): expected at least 4, found 3"));
  EP_CHECK(says(result, "rank 0 block 0 lanes 0-1 has returned"));
}

void helpers_are_stopped() {
  uint64_t asked = 0;
  uint64_t served = 0;
  ep::simt_launch client;
  client.lanes = client.warp_lanes = 4;
  client.environment = &quiet;
  client.name = "client";
  client.kernel = ep::simt_kernel([&](simt_context& ctx) {
    const uint64_t turn = fetch_add(ctx, &asked, 1);
    return ctx.wait(&served, turn + 1, 0, EP_STAGE_ROOM, nullptr);
  });
  ep::simt_launch server = client;
  server.lanes = server.warp_lanes = 1;
  server.serves = true;
  server.name = "server";
  server.kernel = ep::simt_kernel([&](simt_context& ctx) {
    for (uint64_t next = 1;; ++next) {
      if (!ctx.wait(&asked, next, 0, EP_STAGE_ROOM, nullptr)) return;
      fetch_add(ctx, &served, 1);
    }
  });
  const auto result = ep::simt_run_together({}, {client, server});
  EP_CHECK(result.ok);
  EP_CHECK_EQ(served, 4u);
}

// Words that other threads write: the launch sleeps, and its waits end by value, deadline, cancellation or a peer's death.
void waits_of_a_launch_alone() {
  ep_wake_word wake{};
  uint64_t word = 0;
  ep::kernel_environment environment{};
  environment.waits.wake = &wake;
  environment.waits.policy = ep::wait_policy{0, 0, 2'000'000};
  environment.waits.deadline_ns = ep::deadline_after(20'000);
  std::thread peer([&] {
    while (std::atomic_ref<uint32_t>(wake.waiters).load() == 0) std::this_thread::yield();
    std::atomic_ref<uint64_t>(word).fetch_add(5);
    ep::wake_notify(&wake);
  });
  ep_kernel_status status{};
  const auto kernel = [&](simt_context& ctx) { return ctx.wait(&word, 5, 1, EP_STAGE_ARRIVAL, &status); };
  EP_CHECK(ep::simt_run(simt_options{2, 4, 4, 3, 0.5}, environment, kernel).ok);
  peer.join();

  environment.waits.deadline_ns = ep::deadline_after(5);
  const auto late = ep::simt_run(simt_options{1, 4, 4, 3, 0.5}, environment,
                                 [&](simt_context& ctx) { return ctx.wait(&word, 9, 1, EP_STAGE_CREDIT, &status); });
  EP_CHECK(late.outcome == simt_outcome::finished && !late.ok);
  EP_CHECK_EQ(status.status, static_cast<uint32_t>(EP_STATUS_TIMEOUT));
  EP_CHECK_EQ(status.rank, 1);
  EP_CHECK_EQ(status.stage, EP_STAGE_CREDIT);
  EP_CHECK_EQ(status.expected, 9u);
  EP_CHECK_EQ(status.found, 5u);

  std::atomic<uint32_t> cancel{1};
  status = {};
  environment.waits.deadline_ns = ep::no_deadline;
  environment.waits.cancel = &cancel;
  EP_CHECK(!ep::simt_run(simt_options{1, 4, 4, 3, 0.5}, environment, [&](simt_context& ctx) {
              return ctx.wait(&word, 9, 1, EP_STAGE_CREDIT, &status);
            }).ok);
  EP_CHECK_EQ(status.status, static_cast<uint32_t>(EP_STATUS_ABORTED));
}

void refusals() {
  int caught = 0;
  for (const simt_options& bad : {simt_options{0, 4, 4}, simt_options{1, 6, 4}, simt_options{1, 64, 64}, simt_options{1, 0, 1}}) {
    try {
      ep::simt_run(bad, quiet, [](simt_context&) {});
    } catch (const std::invalid_argument&) {
      ++caught;
    }
  }
  EP_CHECK_EQ(caught, 4);
  // A lane's exception comes out after the other lanes have been unwound.
  auto held = std::make_shared<int>(1);
  bool thrown = false;
  try {
    ep::simt_run(simt_options{2, 4, 4, 5, 0.5}, quiet, [held](simt_context& ctx) {
      const auto kept = held;
      ctx.sync_warp();
      if (ctx.block() == 0 && ctx.lane() == 3) throw std::runtime_error("lane 3");
      ctx.sync_grid();
    });
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  EP_CHECK(thrown);
  EP_CHECK_EQ(held.use_count(), 1L);
}

} // namespace

int main() {
  collectives();
  barriers();
  barriers_of_ranks();
  missing_barrier_shows();
  schedules_repeat();
  deadlocks_are_named();
  together_names_the_word();
  helpers_are_stopped();
  waits_of_a_launch_alone();
  refusals();
  return ep::check::finish();
}
