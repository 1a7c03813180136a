// Ways to post to an EFA queue pair without turns that are known to be wrong. Each differs from ours in one step, and the scheduler must find it out; ours passes under the same seeds.
#define EP_TEST_EFA_WAY ep::by_marks
#include "../check.hpp"
#include "efa_gin_cases.hpp"

using namespace ep;
using namespace ep::test;

namespace {

constexpr uint32_t way = EP_EFA_SHARE_DEVICE | by_marks;
using words = poster_words<way>;

const uint64_t samples = seeds_of(200);

// Lane 0 waits for the end of each of its posts, which it does not leave to others, and rings for nobody meanwhile; the other lanes leave theirs to others, and come back only when lane 0 has
// ended. `Steps` offers publish(ctx, qp, taken, deferred).
template <class Steps> bool fails(uint64_t seed, uint32_t depth) {
  constexpr uint64_t rounds = 6;
  constexpr uint64_t lanes = 4;
  efa_world_options wanted = seeded_world(seed);
  wanted.depth = depth;
  wanted.max_batch = depth;
  efa_world world(wanted);
  uint64_t ended = 0;
  const simt_result outcome = world.run(shape(1, lanes, 1), [&](efa_context& ctx, int32_t rank) {
    if (rank != 0) return true;
    ep_efa_qp& qp = world.qp(0, 0);
    const bool awaits = ctx.lane() == 0;
    for (uint64_t i = 0; i < rounds; ++i) {
      const uint64_t at = (ctx.lane() * rounds + i) * 8;
      efa_taken taken{};
      if (!efa_take<way>(ctx, qp, 1, 1, &taken, nullptr)) return false;
      efa_write(ctx, qp, taken.first, [&](const efa_writer<efa_context>& writer) {
        const efa_place to{world.at(0).remotes[1].address + at, world.at(0).remotes[1].rkey};
        writer.write_value(efa_target_of(world.at(0).device, qp, 0, 1), to, at + 1, 8);
        return ep_efa_request{to.address, 1, 0};
      });
      if (!Steps::publish(ctx, qp, taken, !awaits)) return false;
      if (awaits && !efa_wait_done<way>(ctx, qp, taken.end, 1, nullptr)) return false;
    }
    if (awaits) fetch_add(ctx, &ended, 1);
    if (!ctx.wait(&ended, 1, 0, EP_STAGE_ARRIVAL, nullptr)) return false;
    return efa_quiet<way>(ctx, qp, nullptr);
  });
  bool lost = false;
  for (uint64_t i = 0; i < lanes * rounds; ++i) lost = lost || word_at(world, 1, i * 8) != i * 8 + 1;
  return !outcome.ok || lost || !world.violations().empty();
}

struct ours {
  template <class Ctx> static bool publish(Ctx& ctx, ep_efa_qp& qp, const efa_taken& taken, bool deferred) {
    register_fence(ctx);
    return efa_publish<way>(ctx, qp, taken, {1, deferred}, nullptr);
  }
};

// Ours in steps, of which others replace one: mark(...), told(...), and what the ringer does with what is marked behind its doorbell.
struct steps {
  template <class Ctx> static void mark(Ctx& ctx, ep_efa_qp& qp, const efa_taken& taken) {
    register_fence(ctx);
    efa_marks(qp).mark<way>(ctx, taken.first, 1);
  }
  template <class Ctx> static bool told(Ctx& ctx, ep_efa_qp& qp, const efa_taken& taken) { return words::load(ctx, &qp.left) == taken.first + 1; }
  // Whether the ringer leaves to its poster what lies around number `marked`.
  template <class Ctx> static bool leaves(Ctx& ctx, ep_efa_qp& qp, uint64_t, uint64_t marked) {
    words::raise(ctx, &qp.left, marked + 1);
    return !efa_marks(qp).is_marked<way>(ctx, marked);
  }
};

template <class Steps> struct stepwise {
  template <class Ctx> static bool publish(Ctx& ctx, ep_efa_qp& qp, const efa_taken& taken, bool deferred) {
    Steps::mark(ctx, qp, taken);
    const bool may_leave = deferred && taken.end - words::load(ctx, &qp.rung) < qp.max_batch;
    if (may_leave && !Steps::told(ctx, qp, taken)) return true;
    const slot_marks marks = efa_marks(qp);
    while (words::flag_take(ctx, &qp.ringer)) {
      const uint64_t rung = words::load(ctx, &qp.rung);
      const uint64_t end = marks.first_unmarked<way>(ctx, rung);
      if (end != rung) efa_ring(ctx, qp, end);
      words::flag_drop(ctx, &qp.ringer);
      const uint64_t marked = marks.first_unmarked<way>(ctx, end);
      if (words::load(ctx, &qp.taken) == marked) {
        if (marked == end) return true;
        continue;
      }
      if (Steps::leaves(ctx, qp, end, marked)) return true;
    }
    return true;
  }
};

struct fenced_late : steps {
  template <class Ctx> static void mark(Ctx& ctx, ep_efa_qp& qp, const efa_taken& taken) {
    efa_marks(qp).mark<way>(ctx, taken.first, 1);
    register_fence(ctx);
  }
};
struct not_told : steps {
  template <class Ctx> static bool told(Ctx&, ep_efa_qp&, const efa_taken&) { return false; }
};
struct leaves_silently : steps {
  template <class Ctx> static bool leaves(Ctx&, ep_efa_qp&, uint64_t, uint64_t) { return true; }
};
struct told_behind_the_look : steps {
  template <class Ctx> static bool leaves(Ctx& ctx, ep_efa_qp& qp, uint64_t, uint64_t marked) {
    if (efa_marks(qp).is_marked<way>(ctx, marked)) return false;
    words::raise(ctx, &qp.left, marked + 1);
    return true;
  }
};
// Nothing is left where what it has rung for ends at an open number, it thinks: but its own may lie behind that.
struct tells_only_before : steps {
  template <class Ctx> static bool leaves(Ctx& ctx, ep_efa_qp& qp, uint64_t end, uint64_t marked) { return marked == end || steps::leaves(ctx, qp, end, marked); }
};
struct told_another : steps {
  template <class Ctx> static bool leaves(Ctx& ctx, ep_efa_qp& qp, uint64_t end, uint64_t marked) {
    words::raise(ctx, &qp.left, end + 1);
    return !efa_marks(qp).is_marked<way>(ctx, marked);
  }
};

template <class Steps> void expect_right(uint32_t depth) {
  uint64_t count = 0;
  for (uint64_t seed = 0; seed < samples; ++seed) count += fails<Steps>(seed, depth) ? 1 : 0;
  EP_CHECK_EQ(count, 0u);
}
template <class Steps> void expect_caught(const char* name) {
  EP_CHECK(found_out(name, samples, 200, [](uint64_t seed) { return fails<stepwise<Steps>>(seed, 32); }));
}

} // namespace

int main() {
  for (const uint32_t depth : {4u, 32u}) {
    expect_right<ours>(depth);
    expect_right<stepwise<steps>>(depth);
  }
  expect_caught<fenced_late>("T33 a fence behind the mark");
  expect_caught<not_told>("T33 a poster that does not look whether something was left to it");
  expect_caught<tells_only_before>("T33 a ringer that tells only of what is marked before an open number");
  expect_caught<leaves_silently>("T33 a ringer that does not tell to whom it leaves that");
  expect_caught<told_behind_the_look>("T33 a ringer that tells so behind its look");
  expect_caught<told_another>("T33 a ringer that tells another one");
  return ep::check::finish();
}
