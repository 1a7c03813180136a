// Ways to use EFA that are known to be wrong. Each differs from ours in one step, and the scheduler must find it out; ours pass under the same seeds. If one of these
// stops failing, the executor or the software NIC has lost its teeth.
#include "../check.hpp"
#include "efa_cases.hpp"

using namespace ep;
using namespace ep::test;

namespace {

const uint64_t samples = seeds_of(100);

template <class Bad> void expect_caught(const char* name, const Bad& bad) { EP_CHECK(found_out(name, samples, 50, bad)); }
template <class Bad> void expect_right(const Bad& bad) {
  uint64_t count = 0;
  for (uint64_t seed = 0; seed < samples; ++seed) count += bad(seed) ? 1 : 0;
  EP_CHECK_EQ(count, 0u);
}

efa_world_options seeded_world(uint64_t seed) {
  efa_world_options wanted;
  wanted.seed = seed;
  return wanted;
}

// T4. A call's places begin at the producer counter, though earlier WQEs there wait for their doorbell.
struct zero_based : efa_pr_rules {
  EP_HD static uint32_t base(const ep_efa_pr_wq&, uint32_t) { return 0; }
};

template <class Way> uint64_t t4_lost_of_eight(uint64_t seed) {
  efa_world_options wanted = seeded_world(seed);
  wanted.inline_write = false;
  efa_world world(wanted);
  world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) {
    if (rank != 0) return true;
    const auto gin = Way::gin(world, 0);
    for (uint64_t i = 0; i < 8; ++i) {
      gin.put_value(ctx, thread_coop<efa_context>{ctx}, world.team(), 1, Way::part(world, 0), i * 8, i + 1, gin_no_action{}, aggregated<Way>(i != 7), nullptr);
    }
    return true;
  });
  uint64_t lost = 0;
  for (uint64_t i = 0; i < 8; ++i) lost += word_at(world, 1, i * 8) != i + 1 ? 1 : 0;
  return lost;
}

// T14. The signal is a request of its own behind its data.
bool t14_signal_apart(uint64_t seed, bool apart) {
  constexpr uint64_t bytes = 512;
  efa_world world(seeded_world(seed));
  std::memset(world.data(0) + 2048, 0x5a, bytes);
  bool corrupt = false;
  const simt_result outcome = world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) {
    const auto gin = our_way::gin(world, rank);
    const thread_coop<efa_context> coop{ctx};
    const ep_efa_memory& part = world.part(0);
    if (rank == 1) {
      if (!gin.wait_signal(ctx, coop, 0, 1, nullptr)) return false;
      for (uint64_t i = 0; i < bytes; ++i) corrupt = corrupt || world.data(1)[i] != 0x5a;
      return true;
    }
    if (!apart) return gin.put(ctx, coop, world.team(), 1, part, 0, part, 2048, bytes, gin_signal_inc{0}, gin_no_action{}, {}, nullptr);
    return gin.put(ctx, coop, world.team(), 1, part, 0, part, 2048, bytes, gin_no_action{}, gin_no_action{}, {}, nullptr) &&
           gin.signal(ctx, coop, world.team(), 1, gin_signal_inc{0}, {}, nullptr);
  });
  return !outcome.ok || corrupt;
}

// A lane puts, flushes and uses its source for something else; another one goes on posting on the same queue pair meanwhile.
template <class Flush> bool t25_source_reused(uint64_t seed, const Flush& flush) {
  efa_world_options wanted = seeded_world(seed);
  wanted.depth = 32;
  efa_world world(wanted);
  std::memset(world.data(0) + 2048, 0x5a, 1024);
  const simt_result outcome = world.run(shape(1, 2, 1), [&](efa_context& ctx, int32_t rank) {
    if (rank != 0) return true;
    const auto gin = our_way::gin(world, 0);
    const thread_coop<efa_context> coop{ctx};
    const ep_efa_memory& part = world.part(0);
    if (ctx.lane() == 1) {
      for (uint64_t i = 0; i < 12; ++i) {
        if (!gin.put_value(ctx, coop, world.team(), 1, part, 1024 + i * 8, i, gin_no_action{}, {}, nullptr)) return false;
      }
      return true;
    }
    if (!gin.put(ctx, coop, world.team(), 1, part, 0, part, 2048, 512, gin_no_action{}, gin_no_action{}, {}, nullptr)) return false;
    if (!flush(ctx, world.at(0).device)) return false;
    std::memset(world.data(0) + 2048, 0xa5, 512);
    return true;
  });
  bool corrupt = false;
  for (uint64_t i = 0; i < 512; ++i) corrupt = corrupt || world.data(1)[i] != 0x5a;
  return !outcome.ok || corrupt;
}

struct our_flush {
  bool operator()(efa_context& ctx, ep_efa_device& device) const { return efa_gin<>{device}.flush(ctx, thread_coop<efa_context>{ctx}, nullptr); }
};

// T25. As many completions as were posted: of later ones, perhaps.
struct count_flush {
  bool operator()(efa_context& ctx, ep_efa_device& device) const {
    const ep_efa_qp& qp = efa_qp_of(device, 0);
    const uint64_t posted = load_acquire(ctx, &qp.ready);
    return ctx.wait(reinterpret_cast<const uint64_t*>(qp.written), posted, -1, EP_STAGE_COMPLETION, nullptr);
  }
};

// T31. A lane puts and flushes while another one's values, all of them with deferred doorbells, are written on the same queue pair: the flush has to end, though whatever it looked at moves.
template <class Flush> bool t31_flush_ends(uint64_t seed, const Flush& flush) {
  efa_world_options wanted = seeded_world(seed);
  wanted.depth = 32;
  efa_world world(wanted);
  return world.run(shape(1, 2, 1), [&](efa_context& ctx, int32_t rank) {
    if (rank != 0) return true;
    const auto gin = our_way::gin(world, 0);
    const thread_coop<efa_context> coop{ctx};
    const ep_efa_memory& part = world.part(0);
    if (ctx.lane() == 0) {
      return gin.put(ctx, coop, world.team(), 1, part, 0, part, 2048, 64, gin_no_action{}, gin_no_action{}, aggregated<our_way>(true), nullptr) && flush(ctx, world.at(0).device);
    }
    for (uint64_t i = 0; i < 6; ++i) {
      if (!gin.put_value(ctx, coop, world.team(), 1, part, 1024 + i * 8, i, gin_no_action{}, aggregated<our_way>(true), nullptr)) return false;
    }
    return true;
  }).ok;
}

// Ours, but for the comparison: the number of those that have completed may step over the one that is waited for.
struct equal_flush {
  bool operator()(efa_context& ctx, ep_efa_device& device) const {
    ep_efa_qp& qp = efa_qp_of(device, 0);
    const uint64_t posted = load_acquire(ctx, &qp.ready);
    if (!efa_ring_tail<EP_EFA_SHARE_DEVICE>(ctx, qp, posted, nullptr)) return false;
    for (;;) {
      if (efa_poll<EP_EFA_SHARE_DEVICE>(ctx, qp) == posted) return true;
      const auto look = [&](uint64_t* found) {
        *found = qp.prefix;
        return qp.prefix == posted || efa_has_completion(qp);
      };
      if (!ctx.wait_for(look, posted, -1, EP_STAGE_COMPLETION, nullptr)) return false;
    }
  }
};

// Ours, but that it looks once: if somebody has published behind the number that it saw, it leaves what is deferred to him.
struct one_shot_flush {
  bool operator()(efa_context& ctx, ep_efa_device& device) const {
    ep_efa_qp& qp = efa_qp_of(device, 0);
    const uint64_t posted = load_acquire(ctx, &qp.ready);
    ctx.point();
    if (load_acquire(ctx, &qp.ready) == posted) efa_ring_left<EP_EFA_SHARE_DEVICE>(ctx, qp);
    return efa_wait_done<EP_EFA_SHARE_DEVICE>(ctx, qp, posted, -1, nullptr);
  }
};

// T28. Eight lanes write WQEs, one of them rings; those of the others are in their own buffers.
struct released : efa_pr_rules {
  template <class Ctx> EP_HD static void release(Ctx& ctx) { register_fence(ctx); }
};
template <class Way> bool t28_lanes(uint64_t seed, const char* faults) {
  efa_world_options wanted = seeded_world(seed);
  wanted.inline_write = false;
  efa_world world(wanted);
  expect(world.at(0).nic->set_faults(faults));
  for (uint64_t i = 0; i < 8; ++i) std::memcpy(world.data(0) + 2048 + i * 8, &i, 8);
  const simt_result outcome = world.run(shape(1, 8, 8), [&](efa_context& ctx, int32_t rank) {
    const uint64_t at = ctx.lane() * 8;
    if (rank != 0) return true;
    const auto& part = Way::part(world, 0);
    return Way::gin(world, 0).put_lanes(ctx, true, world.team(), 1, part, at, part, 2048 + at, 8, gin_no_action{}, gin_no_action{}, {}, nullptr);
  });
  bool corrupt = false;
  for (uint64_t i = 0; i < 8; ++i) corrupt = corrupt || word_at(world, 1, i * 8) != i;
  return !outcome.ok || corrupt || !world.violations().empty();
}

// T28. One lane leaves its WQEs to the doorbell of another, and passes the turn on without having held it. True where one of them was lost.
bool t28_left_to_others(uint64_t seed, const char* faults) {
  efa_world world(seeded_world(seed));
  expect(world.at(0).nic->set_faults(faults));
  const simt_result outcome = world.run(shape(1, 2, 1), [&](efa_context& ctx, int32_t rank) {
    if (rank != 0) return true;
    const auto gin = our_way::gin(world, 0);
    const thread_coop<efa_context> coop{ctx};
    const auto put = [&](uint64_t i, bool left) {
      return gin.put_value(ctx, coop, world.team(), 1, world.part(0), i * 8, i + 1, gin_no_action{}, aggregated<our_way>(left), nullptr);
    };
    const bool ok = ctx.lane() == 0 ? put(0, true) && put(1, true) && put(2, true) : put(3, true);
    ctx.sync_block();
    return ok && (ctx.lane() == 0 || our_flush{}(ctx, world.at(0).device));
  });
  bool lost = false;
  for (uint64_t i = 0; i < 4; ++i) lost = lost || word_at(world, 1, i * 8) != i + 1;
  return !outcome.ok || lost || !world.violations().empty();
}

using words = poster_words<EP_EFA_SHARE_DEVICE>;

struct our_quiet {
  bool operator()(efa_context& ctx, ep_efa_qp& qp) const { return efa_quiet<EP_EFA_SHARE_DEVICE>(ctx, qp, nullptr); }
};

// T12. Ours but for one step. One lane waits for the end of every second post of its own, and so rings what the others leave.
// post(ctx, qp, build, deferred) and quiet(ctx, qp).
template <class Post, class Quiet> bool t12_steps(uint64_t seed, const Post& post, const Quiet& quiet, uint32_t depth) {
  efa_world_options wanted = seeded_world(seed);
  wanted.depth = depth;
  wanted.max_batch = depth;
  efa_world world(wanted);
  const simt_result outcome = world.run(shape(1, 3, 1), [&](efa_context& ctx, int32_t rank) {
    if (rank != 0) return true;
    ep_efa_qp& qp = world.qp(0, 0);
    for (uint64_t i = 0; i < 6; ++i) {
      const uint64_t at = (ctx.lane() * 6 + i) * 8;
      const auto build = [&](const efa_writer<efa_context>& writer) {
        const efa_place to{world.at(0).remotes[1].address + at, world.at(0).remotes[1].rkey};
        writer.write_value(efa_target_of(world.at(0).device, qp, 0, 1), to, at + 1, 8);
        return ep_efa_request{to.address, 1, 0};
      };
      if (!post(ctx, qp, build, i % 3 != 2)) return false;
      if (ctx.lane() == 0 && i % 2 == 1 && !quiet(ctx, qp)) return false;
    }
    return quiet(ctx, qp);
  });
  bool lost = false;
  for (uint64_t i = 0; i < 18; ++i) lost = lost || word_at(world, 1, i * 8) != i * 8 + 1;
  return !outcome.ok || lost || !world.violations().empty();
}

struct our_post {
  template <class Ctx, class Build> bool operator()(Ctx& ctx, ep_efa_qp& qp, const Build& build, bool) const {
    return efa_post_one<EP_EFA_SHARE_DEVICE>(ctx, qp, build, {1, false}, nullptr);
  }
};
struct our_batch {
  template <class Ctx, class Build> bool operator()(Ctx& ctx, ep_efa_qp& qp, const Build& build, bool) const {
    const auto each = [&](uint64_t, const efa_writer<Ctx>& writer) { return build(writer); };
    return efa_post<EP_EFA_SHARE_DEVICE>(ctx, lone_poster<Ctx>{ctx}, qp, 1, each, {1, false}, nullptr) != efa_refused;
  }
};
struct our_runs {
  template <class Ctx, class Build> bool operator()(Ctx& ctx, ep_efa_qp& qp, const Build& build, bool deferred) const {
    return efa_post_one<EP_EFA_SHARE_DEVICE>(ctx, qp, build, {1, deferred}, nullptr);
  }
};

// Has the turn, and rings though somebody else may be ringing what was left.
struct ringer_ignored {
  template <class Ctx, class Build> bool operator()(Ctx& ctx, ep_efa_qp& qp, const Build& build, bool deferred) const {
    efa_taken taken;
    if (!efa_take<EP_EFA_SHARE_DEVICE>(ctx, qp, 1, 1, &taken, nullptr)) return false;
    efa_write(ctx, qp, taken.first, build);
    if (!efa_wait_turn<EP_EFA_SHARE_DEVICE>(ctx, qp, taken.first, 1, nullptr)) return false;
    if (deferred && taken.end - words::load(ctx, &qp.rung) < qp.max_batch) {
      register_fence(ctx);
    } else {
      efa_ring(ctx, qp, taken.end);
    }
    words::store(ctx, &qp.ready, taken.end);
    return true;
  }
};

// Ours, that asks for the ringer's flag in any case.
struct eager_quiet {
  bool operator()(efa_context& ctx, ep_efa_qp& qp) const {
    const uint64_t posted = words::load(ctx, &qp.ready);
    do {
      efa_ring_left<EP_EFA_SHARE_DEVICE>(ctx, qp);
    } while (words::load(ctx, &qp.rung) < posted);
    return efa_wait_done<EP_EFA_SHARE_DEVICE>(ctx, qp, posted, -1, nullptr);
  }
};

// As that, but loads what is rung before what is published.
struct old_rung {
  bool operator()(efa_context& ctx, ep_efa_qp& qp) const {
    const uint64_t posted = words::load(ctx, &qp.ready);
    do {
      if (!words::flag_take(ctx, &qp.ringer)) continue;
      const uint64_t rung = words::load(ctx, &qp.rung);
      const uint64_t ready = words::load(ctx, &qp.ready);
      if (rung < ready) efa_ring(ctx, qp, ready);
      words::store(ctx, &qp.ringer, 0);
    } while (words::load(ctx, &qp.rung) < posted);
    return efa_wait_done<EP_EFA_SHARE_DEVICE>(ctx, qp, posted, -1, nullptr);
  }
};

// Rings and passes the turn on as soon as its own WQE is written.
struct out_of_turn {
  template <class Ctx, class Build> bool operator()(Ctx& ctx, ep_efa_qp& qp, const Build& build, bool) const {
    const uint64_t first = words::add(ctx, &qp.taken, 1);
    if (!efa_wait_room<EP_EFA_SHARE_DEVICE>(ctx, qp, first, 1, 1, nullptr)) return false;
    efa_write(ctx, qp, first, build);
    efa_ring(ctx, qp, first + 1);
    words::add(ctx, &qp.ready, 1);
    return true;
  }
};

// Asks for room, then takes a number.
struct room_first {
  template <class Ctx, class Build> bool operator()(Ctx& ctx, ep_efa_qp& qp, const Build& build, bool) const {
    if (!efa_wait_room<EP_EFA_SHARE_DEVICE>(ctx, qp, words::load(ctx, &qp.taken), 1, 1, nullptr)) return false;
    const uint64_t first = words::add(ctx, &qp.taken, 1);
    efa_write(ctx, qp, first, build);
    if (!efa_wait_turn<EP_EFA_SHARE_DEVICE>(ctx, qp, first, 1, nullptr)) return false;
    efa_ring(ctx, qp, first + 1);
    words::store(ctx, &qp.ready, first + 1);
    return true;
  }
};

} // namespace

int main() {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    EP_CHECK_EQ((t4_lost_of_eight<pr_way_of<zero_based>>(seed)), 7u);
    EP_CHECK_EQ(t4_lost_of_eight<pr_way>(seed), 0u);
    EP_CHECK_EQ(t4_lost_of_eight<our_way>(seed), 0u);
  }
  expect_caught("T14 a signal in a request of its own", [](uint64_t seed) { return t14_signal_apart(seed, true); });
  expect_right([](uint64_t seed) { return t14_signal_apart(seed, false); });
  expect_caught("T25 flush by count", [](uint64_t seed) { return t25_source_reused(seed, count_flush{}); });
  expect_right([](uint64_t seed) { return t25_source_reused(seed, our_flush{}); });
  expect_caught("T31 flush until an equal number", [](uint64_t seed) { return !t31_flush_ends(seed, equal_flush{}); });
  expect_caught("T31 flush that looks once", [](uint64_t seed) { return !t31_flush_ends(seed, one_shot_flush{}); });
  expect_right([](uint64_t seed) { return !t31_flush_ends(seed, our_flush{}); });
  expect_caught("T28 lanes that do not release what they wrote", [](uint64_t seed) { return t28_lanes<pr_way>(seed, ""); });
  expect_right([](uint64_t seed) { return t28_lanes<pr_way_of<released>>(seed, ""); });
  expect_right([](uint64_t seed) { return t28_lanes<our_way>(seed, ""); });
  const auto lane3 = "drop-fence writer=" + std::to_string(1 + 3);
  expect_caught("T28 a lane's fence that does nothing", [&](uint64_t seed) { return t28_lanes<our_way>(seed, lane3.c_str()); });
  const auto lane0 = "drop-fence writer=" + std::to_string(1);
  expect_right([](uint64_t seed) { return t28_left_to_others(seed, ""); });
  expect_caught("T28 a fence that does nothing before the turn is passed on", [&](uint64_t seed) { return t28_left_to_others(seed, lane0.c_str()); });
  // T21. A way of sharing that is narrower than the use, whoever meets; the use itself is right by the way that says so. Between a block and a device there is a difference on GPUs
  // only, of the scope of words (tests/compile/cuda_second.cu).
  for (const uint32_t run : {1u, 3u}) {
    const auto lanes = [=](auto way, uint64_t seed, uint32_t blocks) {
      efa_world world(seeded_world(seed));
      traffic_options of;
      of.blocks = blocks;
      of.lanes = 4 / blocks;
      of.run = run;
      return !traffic<decltype(way)>(world, of).right();
    };
    using alone = our_way_of<EP_EFA_SHARE_THREAD>;
    expect_caught("T21 lanes of a block that meet without saying so", [&](uint64_t seed) { return lanes(alone{}, seed, 1); });
    expect_caught("T21 blocks that meet without saying so", [&](uint64_t seed) { return lanes(alone{}, seed, 4); });
    expect_right([&](uint64_t seed) { return lanes(our_way_of<EP_EFA_SHARE_BLOCK>{}, seed, 1); });
    expect_right([&](uint64_t seed) { return lanes(our_way{}, seed, 4); });
  }
  const auto tight = [](const auto& post) { return [=](uint64_t seed) { return t12_steps(seed, post, our_quiet{}, 4); }; };
  expect_caught("T12 publishing out of turn", tight(out_of_turn{}));
  expect_caught("T12 room before the number", tight(room_first{}));
  expect_right(tight(our_post{}));
  expect_right(tight(our_batch{}));
  expect_right(tight(our_runs{}));
  expect_caught("T12 ringing beside who rings what was left", [](uint64_t seed) { return t12_steps(seed, ringer_ignored{}, our_quiet{}, 32); });
  expect_caught("T12 ringing what was left by an old count", [](uint64_t seed) { return t12_steps(seed, our_runs{}, old_rung{}, 32); });
  expect_right([](uint64_t seed) { return t12_steps(seed, our_runs{}, our_quiet{}, 32); });
  expect_right([](uint64_t seed) { return t12_steps(seed, our_runs{}, eager_quiet{}, 32); });
  return ep::check::finish();
}
