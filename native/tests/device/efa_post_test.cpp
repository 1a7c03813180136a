// Posting to EFA queue pairs, by the simt executor over the software NIC's stepper: rings, batches, deferred doorbells, room, posters that meet. The numbers are those
// of the list of tests in docs/efa-contract.md. Ways that are known to be wrong are in efa_naive_test.cpp.
#include "../check.hpp"
#include "efa_cases.hpp"

using namespace ep;
using namespace ep::test;

namespace {

const uint64_t samples = seeds_of(100);

// One lane posts, and every WQE has the phase and place that the NIC expects: it checks each, so a violation is all that could happen.
void t3_phase_over_four_wraps(uint32_t depth, bool inline_write, bool wide_ids) {
  efa_world_options wanted;
  wanted.depth = depth;
  wanted.max_batch = std::min<uint32_t>(depth, 16);
  wanted.inline_write = inline_write;
  wanted.wide_ids = wide_ids;
  wanted.fragment_bytes = 64;
  efa_world world(wanted);
  const uint64_t posts = 4ull * depth + 3;
  const simt_result outcome = world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) {
    return rank != 0 || post_values<our_way>(ctx, world, posts, depth > 64 ? 16 : 3);
  });
  EP_CHECK(outcome.ok);
  EP_CHECK(world.clean());
  EP_CHECK_EQ(world.qp(0, 0).prefix, posts);
  EP_CHECK_EQ(world.counted(0, 0).written, posts);
  EP_CHECK_EQ(world.counted(1, 0).arrived, posts);
}

// Aggregated puts take places one behind the other: eight sentinels, eight places, one doorbell.
void t4_cumulative_places(uint64_t seed) {
  efa_world_options wanted;
  wanted.seed = seed;
  efa_world world(wanted);
  EP_CHECK(world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) { return rank != 0 || post_values<our_way>(ctx, world, 8, 8); }).ok);
  for (uint64_t i = 0; i < 8; ++i) EP_CHECK_EQ(word_at(world, 1, i * 8), i + 1);
  EP_CHECK_EQ(world.doorbells(), 1u);
  EP_CHECK(world.clean());
}

// With max_batch WQEs written a doorbell rings by itself, and not before.
void t5_ring_at_max_batch() {
  for (const uint32_t count : {7u, 8u, 9u, 15u, 16u, 17u}) {
    efa_world_options wanted;
    wanted.max_batch = 8;
    wanted.depth = 32;
    efa_world world(wanted);
    const simt_result outcome = world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) {
      const auto gin = our_way::gin(world, rank);
      for (uint64_t i = 0; i < count && rank == 0; ++i) {
        if (!gin.put_value(ctx, thread_coop<efa_context>{ctx}, world.team(), 1, world.part(0), i * 8, i + 1, gin_no_action{}, aggregated<our_way>(true), nullptr)) return false;
      }
      return true;
    });
    EP_CHECK(outcome.ok);
    EP_CHECK_EQ(world.doorbells(), count / 8);
    EP_CHECK_EQ(world.qp(0, 0).rung, count / 8 * 8);
    EP_CHECK_EQ(world.counted(1, 0).arrived, count / 8 * 8);
    EP_CHECK(world.clean());
  }
  // One call of more than a batch is cut.
  efa_world_options wanted;
  wanted.max_batch = 4;
  efa_world world(wanted);
  const simt_result outcome = world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) {
    const auto gin = our_way::gin(world, rank);
    const thread_coop<efa_context> coop{ctx};
    return rank != 0 || (gin.signal(ctx, coop, world.team(), 1, gin_signal_add{0, 11}, {}, nullptr) && gin.flush(ctx, coop, nullptr));
  });
  EP_CHECK(outcome.ok && world.clean());
  EP_CHECK_EQ(world.counted(1, 1).arrived, 11u);
  EP_CHECK_EQ(world.doorbells(), 1u + 3u); // the first arrival, then ten in batches of four
}

void t6_flush_rings_the_tail(uint64_t seed) {
  efa_world_options wanted;
  wanted.seed = seed;
  efa_world world(wanted);
  uint64_t before = 1;
  const simt_result outcome = world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) {
    if (rank != 0) return true;
    const auto gin = our_way::gin(world, 0);
    const thread_coop<efa_context> coop{ctx};
    for (uint64_t i = 0; i < 3; ++i) gin.put_value(ctx, coop, world.team(), 1, world.part(0), i * 8, i + 1, gin_no_action{}, aggregated<our_way>(true), nullptr);
    before = world.qp(0, 0).rung;
    return gin.flush(ctx, coop, nullptr);
  });
  EP_CHECK(outcome.ok && world.clean());
  EP_CHECK_EQ(before, 0u);
  EP_CHECK_EQ(world.qp(0, 0).rung, 3u);
  EP_CHECK_EQ(world.counted(1, 0).arrived, 3u);
}

// A NIC that stands still fills the ring; the next poster waits until it goes on, and nothing is overwritten.
void t7_backpressure(uint64_t seed, bool inline_write) {
  efa_world_options wanted;
  wanted.seed = seed;
  wanted.depth = 4;
  wanted.max_batch = 4;
  wanted.inline_write = inline_write;
  efa_world world(wanted);
  world.held = true;
  uint64_t rung = 0;
  const simt_result outcome = world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) {
    if (rank == 0) return post_values<our_way>(ctx, world, 11, 1);
    if (!wait_word(ctx, &world.qp(0, 0).taken, 5)) return false;
    for (int i = 0; i < 200; ++i) ctx.point();
    rung = world.qp(0, 0).rung;
    world.held = false;
    return true;
  });
  EP_CHECK(outcome.ok && world.clean());
  EP_CHECK_EQ(rung, 4u);
  for (uint64_t i = 0; i < 11; ++i) EP_CHECK_EQ(word_at(world, 1, i * 8), i + 1);
}

// Several views of one queue pair keep one account: posters that meet lose nothing.
void t12_posters_meet(uint64_t seed) {
  efa_world_options wanted;
  wanted.seed = seed;
  wanted.depth = seed % 3 == 0 ? 4 : seed % 3 == 1 ? 8 : 32;
  wanted.max_batch = seed % 2 == 0 ? 4 : 2;
  wanted.inline_write = seed % 5 < 3;
  wanted.wide_ids = seed % 7 == 0;
  efa_world world(wanted);
  traffic_options of;
  of.run = 1 + static_cast<uint32_t>(seed % 4);
  of.counts = seed % 4 == 3;
  const traffic_outcome seen = traffic<our_way>(world, of);
  EP_CHECK(seen.right());
  if (!seen.right()) {
    std::fprintf(stderr, "seed %llu: %llu corrupt, %s\n", static_cast<unsigned long long>(seed), static_cast<unsigned long long>(seen.corrupt), seen.result.report.c_str());
    world.clean();
  }
  EP_CHECK_EQ(world.qp(0, of.counts ? 1 : 0).prefix, 16u);
}

// T21. Each way of sharing under the use that it allows, with and without aggregation.
void t21_sharing(uint64_t seed) {
  efa_world_options wanted;
  wanted.seed = seed;
  wanted.depth = 8;
  wanted.max_batch = 4;
  wanted.inline_write = seed % 2 == 0;
  for (const uint32_t run : {1u, 3u}) {
    traffic_options of;
    of.run = run;
    of.rounds = 12;
    of.blocks = of.lanes = 1;
    { efa_world world(wanted); EP_CHECK(traffic<our_way_of<EP_EFA_SHARE_THREAD>>(world, of).right()); }
    of.rounds = 4;
    of.lanes = 3;
    { efa_world world(wanted); EP_CHECK(traffic<our_way_of<EP_EFA_SHARE_BLOCK>>(world, of).right()); }
    of.blocks = 2;
    of.lanes = 2;
    { efa_world world(wanted); EP_CHECK(traffic<our_way_of<EP_EFA_SHARE_DEVICE>>(world, of).right()); }
  }
}

// n lanes with one queue pair: n WQEs and one doorbell.
void t33_lanes_post_together(uint64_t seed) {
  efa_world_options wanted;
  wanted.seed = seed;
  wanted.counters = 2;
  wanted.depth = 32;
  efa_world world(wanted);
  const auto put = [&](efa_context& ctx, bool on, uint32_t counter, uint64_t at) {
    const auto gin = our_way::gin(world, 0);
    const ep_efa_memory& part = world.part(0);
    return counter == 9 ? gin.put_lanes(ctx, on, world.team(), 1, part, at, part, 2048 + at, 8, gin_no_action{}, gin_no_action{}, {}, nullptr)
                        : gin.put_lanes(ctx, on, world.team(), 1, part, at, part, 2048 + at, 8, gin_no_action{}, gin_counter_inc{counter}, {}, nullptr);
  };
  for (uint64_t i = 0; i < 64; ++i) std::memcpy(world.data(0) + 2048 + i * 8, &i, 8);
  uint64_t after_first = 0;
  const simt_result outcome = world.run(shape(1, 8, 8), [&](efa_context& ctx, int32_t rank) {
    if (rank != 0) return true;
    const uint32_t lane = ctx.lane();
    bool ok = put(ctx, true, 9, lane * 8);
    ctx.sync_block();
    if (lane == 0) after_first = world.qp(0, 0).taken;
    // Six lanes by two queue pairs, two without a put.
    ok = put(ctx, lane < 6, lane % 2, 64 + lane * 8) && ok;
    return our_way::gin(world, 0).flush(ctx, block_coop<efa_context>{ctx}, nullptr) && ok;
  });
  EP_CHECK(outcome.ok && world.clean());
  EP_CHECK_EQ(after_first, 8u);
  EP_CHECK_EQ(world.qp(0, 0).rung, 8u);
  EP_CHECK_EQ(world.qp(0, 1).rung, 3u);
  EP_CHECK_EQ(world.qp(0, 2).rung, 3u);
  EP_CHECK_EQ(world.doorbells(), 3u);
  for (uint64_t i = 0; i < 14; ++i) EP_CHECK_EQ(word_at(world, 1, i * 8), i);
}

// Warps whose lanes' queue pairs cross, more lanes than a batch, and lanes whose puts are more than one WQE.
void t33_warps_cross(uint64_t seed) {
  efa_world_options wanted;
  wanted.seed = seed;
  wanted.counters = 2;
  wanted.depth = 8;
  wanted.max_batch = 2;
  wanted.max_message = 16;
  efa_world world(wanted);
  for (uint64_t i = 0; i < 2048; ++i) world.data(0)[2048 + i] = traffic_byte(i, 3);
  const simt_result outcome = world.run(shape(1, 8, 4), [&](efa_context& ctx, int32_t rank) {
    if (rank != 0) return true;
    const auto gin = our_way::gin(world, 0);
    const ep_efa_memory& part = world.part(0);
    bool ok = true;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t at = (round * 8 + ctx.lane()) * 40;
      const uint64_t bytes = (ctx.lane() + round) % 4 == 3 ? 40 : 16;
      ok = gin.put_lanes(ctx, true, world.team(), 1, part, at, part, 2048 + at, bytes, gin_signal_inc{0}, gin_counter_inc{(ctx.lane() + ctx.lane() / 4) % 2}, {}, nullptr) && ok;
    }
    return gin.flush(ctx, block_coop<efa_context>{ctx}, nullptr) && ok;
  });
  EP_CHECK(outcome.ok && world.clean());
  EP_CHECK_EQ(world.counted(1, 1).arrived, 32u);
  EP_CHECK_EQ(world.counted(0, 1).written + world.counted(0, 2).written, 32u);
  for (uint64_t i = 0; i < 32; ++i) EP_CHECK_EQ(world.data(1)[i * 40 + 15], traffic_byte(i * 40 + 15, 3));
}

// A block's value is one WQE, between two synchronisations.
void t33_block_value() {
  efa_world world({});
  uint64_t between = 0;
  const simt_result outcome = world.run(shape(1, 8, 4), [&](efa_context& ctx, int32_t rank) {
    if (rank != 0) return true;
    const auto gin = our_way::gin(world, 0);
    const block_coop<efa_context> coop{ctx};
    ctx.sync_block();
    const bool ok = gin.put_value(ctx, coop, world.team(), 1, world.part(0), 0, uint32_t{77}, gin_signal_inc{0}, {}, nullptr);
    if (ctx.lane() == 7) between = world.qp(0, 0).taken;
    return gin.flush(ctx, coop, nullptr) && ok;
  });
  EP_CHECK(outcome.ok && world.clean());
  EP_CHECK_EQ(between, 1u);
  EP_CHECK_EQ(world.counted(1, 1).arrived, 1u);
}

// Every order in which a peer can see the NIC's work on two small puts, one of them with a signal: whenever the signal shows, the bytes are there, and in the end all is as it must be.
void every_order() {
  nic::efa::enumerator all(50'000);
  uint64_t signalled_first = 0;
  while (all.begin()) {
    efa_world_options wanted;
    wanted.bytes = 64;
    wanted.depth = 4;
    wanted.max_batch = 4;
    wanted.fragment_bytes = 8;
    wanted.watched = false;
    efa_world world(wanted);
    std::memset(world.data(0) + 32, 0x5a, 16);
    const fast_context base{world.at(0).environment, 0, 1, nullptr};
    auto ctx = nic::efa::watched(base, world.steps, 1);
    const thread_coop<decltype(ctx)> coop{ctx};
    const our_gin gin{world.at(0).device};
    const ep_efa_memory& part = world.part(0);
    EP_CHECK(gin.put(ctx, coop, world.team(), 1, part, 0, part, 32, 16, gin_signal_inc{0}, gin_no_action{}, aggregated<our_way>(true), nullptr));
    EP_CHECK(gin.put_value(ctx, coop, world.team(), 1, part, 16, uint64_t{7}, gin_no_action{}, {}, nullptr));
    for (;;) {
      const auto& events = world.steps.pending();
      if (events.empty()) break;
      // What only the poster sees is done at once.
      const auto apart = [](nic::efa::stage what) { return what == nic::efa::stage::payload || what == nic::efa::stage::land || what == nic::efa::stage::tick; };
      size_t silent = 0;
      while (silent < events.size() && apart(events[silent].what.what)) ++silent;
      const nic::efa::device_event one = events[silent < events.size() ? silent : all.choose(events.size())];
      world.steps.run(one);
      if (world.counted(1, 1).arrived == 0) continue;
      const bool landed = word_at(world, 1, 0) == 0x5a5a5a5a5a5a5a5au && word_at(world, 1, 8) == 0x5a5a5a5a5a5a5a5au;
      if (!landed) EP_CHECK(landed);
      if (word_at(world, 1, 16) != 7) ++signalled_first;
    }
    if (gin.read_signal(ctx, 0) != 0 || efa_poll<EP_EFA_SHARE_DEVICE | efa_test_way>(ctx, world.qp(0, 0)) != 2 || word_at(world, 1, 16) != 7) EP_CHECK(!"both puts are over");
  }
  EP_CHECK(all.complete());
  EP_CHECK(signalled_first != 0);
  std::printf("two puts: %llu orders\n", static_cast<unsigned long long>(all.runs()));
}

// A flush waits, and holds nothing that posters need.
void t34_posts_beside_a_stalled_flush(uint64_t seed) {
  efa_world_options wanted;
  wanted.seed = seed;
  wanted.depth = 32;
  efa_world world(wanted);
  world.held = true;
  uint64_t posted = 0;
  bool flushed = false;
  bool early = false;
  const simt_result outcome = world.run(shape(1, 2, 1), [&](efa_context& ctx, int32_t rank) {
    if (rank != 0) return true;
    const auto gin = our_way::gin(world, 0);
    const thread_coop<efa_context> coop{ctx};
    if (ctx.lane() == 0) {
      gin.put_value(ctx, coop, world.team(), 1, world.part(0), 0, uint64_t{1}, gin_no_action{}, aggregated<our_way>(true), nullptr);
      fetch_add(ctx, &posted, 1);
      const bool ok = gin.flush(ctx, coop, nullptr);
      flushed = true;
      return ok;
    }
    wait_word(ctx, &posted, 1);
    for (uint64_t i = 0; i < 12; ++i) gin.put_value(ctx, coop, world.team(), 1, world.part(0), 8 + i * 8, i, gin_no_action{}, aggregated<our_way>(i % 2 == 0), nullptr);
    early = flushed;
    world.held = false;
    return gin.flush(ctx, coop, nullptr);
  });
  EP_CHECK(outcome.ok && world.clean());
  EP_CHECK(flushed && !early);
  EP_CHECK_EQ(world.qp(0, 0).prefix, 13u);
}

} // namespace

int main() {
  for (const bool inline_write : {true, false}) {
    t3_phase_over_four_wraps(4, inline_write, false);
    t3_phase_over_four_wraps(16, inline_write, true);
  }
  t3_phase_over_four_wraps(2048, true, false);
  t3_phase_over_four_wraps(4096, false, false);
  t5_ring_at_max_batch();
  every_order();
  t33_block_value();
  for (uint64_t seed = 0; seed < samples; ++seed) {
    t4_cumulative_places(seed);
    t6_flush_rings_the_tail(seed);
    t7_backpressure(seed, seed % 2 == 0);
    t12_posters_meet(seed);
    if (seed % 5 == 0) t21_sharing(seed);
    t33_lanes_post_together(seed);
    t33_warps_cross(seed);
    t34_posts_beside_a_stalled_flush(seed);
  }
  return ep::check::finish();
}
