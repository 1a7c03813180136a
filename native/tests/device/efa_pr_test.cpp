// The pull request's way to post beside ours: what it passes, what both leave behind (T22), and where ours differs on purpose, each with the number of its defect
// (docs/efa-contract.md). A defect that is gone fails here, too: then the exhibit is no longer what it is said to be.
#include "../check.hpp"
#include "efa_cases.hpp"

using namespace ep;
using namespace ep::test;

namespace {

const uint64_t samples = seeds_of(50);

efa_world_options narrow(uint64_t seed) {
  efa_world_options wanted;
  wanted.seed = seed;
  wanted.inline_write = false; // its WQEs have 64 bytes
  return wanted;
}

template <class Way> struct call {
  efa_context& ctx;
  efa_world& world;
  thread_coop<efa_context> coop{ctx};
  template <class Remote, class Local> bool put(uint64_t to, uint64_t from, uint64_t bytes, Remote remote, Local local, bool aggregate = false, ep_kernel_status* status = nullptr) const {
    const auto& part = Way::part(world, 0);
    return Way::gin(world, 0).put(ctx, coop, world.team(), 1, part, to, part, from, bytes, remote, local, aggregated<Way>(aggregate), status);
  }
  template <class Remote> bool value(uint64_t to, uint64_t value, Remote remote, bool aggregate = false, ep_kernel_status* status = nullptr) const {
    return Way::gin(world, 0).put_value(ctx, coop, world.team(), 1, Way::part(world, 0), to, value, remote, aggregated<Way>(aggregate), status);
  }
  bool flush() const { return Way::gin(world, 0).flush(ctx, coop, nullptr); }
};

// `body(call)` by one lane of rank 0, `other(call)` by one of rank 1.
template <class Way, class Body, class Other> simt_result by_two(efa_world& world, const Body& body, const Other& other) {
  return world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) {
    const call<Way> own{ctx, world};
    return rank == 0 ? body(own) : other(own);
  });
}
template <class Way, class Body> simt_result by_one(efa_world& world, const Body& body) {
  return by_two<Way>(world, body, [](const call<Way>&) { return true; });
}

// ---- what it passes, as ours does

template <class Way> void passes(uint64_t seed) {
  { // T3, T4, T6, T15: values in runs over several rounds of the ring
    efa_world_options wanted = narrow(seed);
    wanted.depth = 8;
    wanted.max_batch = 4;
    efa_world world(wanted);
    EP_CHECK(world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) { return rank != 0 || post_values<Way>(ctx, world, 29, 1 + static_cast<uint32_t>(seed % 5)); }).ok);
    EP_CHECK(world.clean());
    EP_CHECK_EQ(world.counted(1, 0).arrived, 29u);
  }
  { // T7
    efa_world_options wanted = narrow(seed);
    wanted.depth = 4;
    wanted.max_batch = 4;
    efa_world world(wanted);
    world.held = true;
    EP_CHECK(by_two<Way>(world, [&](const call<Way>& own) {
      for (uint64_t i = 0; i < 9; ++i) {
        if (!own.put(i * 8, 2048, 8, gin_no_action{}, gin_no_action{})) return false;
      }
      return own.flush();
    }, [&](const call<Way>& own) {
      for (int i = 0; i < 200; ++i) own.ctx.point();
      world.held = false;
      return true;
    }).ok);
    EP_CHECK(world.clean());
    EP_CHECK_EQ(world.counted(1, 0).arrived, 9u);
  }
  { // T12: lanes of two blocks meet, by one view
    efa_world_options wanted = narrow(seed);
    wanted.counters = 0;
    efa_world world(wanted);
    EP_CHECK(traffic<Way>(world, {}).right());
  }
  { // T13
    efa_world world(narrow(seed));
    bool right = false;
    EP_CHECK(by_two<Way>(world, [&](const call<Way>& own) { return own.value(24, 0x43434343, gin_signal_inc{0}) && own.flush(); }, [&](const call<Way>& own) {
      if (!Way::gin(world, 1).wait_signal(own.ctx, own.coop, 0, 1, nullptr)) return false;
      right = word_at(world, 1, 24) == 0x43434343;
      return true;
    }).ok);
    EP_CHECK(right && world.clean());
  }
}

// T5: a call that would go over max_batch rings first; ours rings when it is reached.
template <class Way> void t5(uint64_t at_16, uint64_t at_17) {
  for (const uint64_t count : {16u, 17u}) {
    efa_world_options wanted = narrow(1);
    wanted.depth = 32;
    efa_world world(wanted);
    EP_CHECK(by_one<Way>(world, [&](const call<Way>& own) {
      bool ok = true;
      for (uint64_t i = 0; i < count; ++i) ok = ok && own.value(i * 8, i, gin_no_action{}, true);
      return ok;
    }).ok);
    EP_CHECK(world.clean());
    EP_CHECK_EQ(world.doorbells(), count == 16 ? at_16 : at_17);
  }
}

// ---- T22: the same memory, the same counts

template <class Way> std::vector<uint64_t> t22_left_behind(uint64_t seed) {
  efa_world_options wanted = narrow(seed);
  wanted.signals = 2;
  wanted.counters = 2;
  efa_world world(wanted);
  for (uint64_t i = 0; i < 1024; ++i) world.data(0)[2048 + i] = traffic_byte(seed, i);
  for (uint64_t i = 0; i < 1024; ++i) world.data(1)[2048 + i] = traffic_byte(seed + 1, i);
  EP_CHECK(world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) {
    const auto gin = Way::gin(world, rank);
    const auto& part = Way::part(world, rank);
    const thread_coop<efa_context> coop{ctx};
    bool ok = true;
    for (uint64_t i = 0; i < 8; ++i) {
      const uint64_t at = i * 128;
      const uint32_t id = static_cast<uint32_t>(i % 2);
      const auto later = aggregated<Way>(i % 4 != 3);
      ok = ok && gin.put(ctx, coop, world.team(), 1 - rank, part, at, part, 2048 + at, 40, gin_signal_inc{id}, gin_counter_inc{id}, later, nullptr) &&
           gin.put(ctx, coop, world.team(), 1 - rank, part, at + 40, part, 2048 + at + 40, 33, gin_no_action{}, gin_no_action{}, later, nullptr) &&
           gin.put_value(ctx, coop, world.team(), 1 - rank, part, at + 80, at, gin_no_action{}, later, nullptr);
    }
    return gin.flush(ctx, coop, nullptr) && ok && gin.wait_signal(ctx, coop, 0, 4, nullptr) && gin.wait_signal(ctx, coop, 1, 4, nullptr);
  }).ok);
  EP_CHECK(world.clean());
  std::vector<uint64_t> all(world.options.bytes / 4);
  for (const int32_t rank : {0, 1}) std::memcpy(all.data() + static_cast<uint64_t>(rank) * world.options.bytes / 8, world.data(rank), world.options.bytes);
  for (const int32_t rank : {0, 1}) {
    for (uint32_t i = 0; i < world.qp_count(); ++i) {
      const efa_world::counts& seen = world.counted(rank, i);
      all.insert(all.end(), {seen.written, seen.written_failed, seen.arrived, seen.arrived_failed});
    }
  }
  return all;
}

// ---- where they differ

// D1, T26: the plugin's views of counters do not name the count of completions.
template <class Way> bool d1(ep_kernel_status* status) {
  efa_world world(narrow(1));
  world.at(0).pr_counters[0].base.local_cntr_value = 0;
  return by_one<Way>(world, [&](const call<Way>& own) { return own.put(0, 2048, 8, gin_no_action{}, gin_counter_inc{0}, false, status) && own.flush(); }).ok &&
         world.counted(0, 1).written == 1;
}

// D2, T12: a signal's view and a counter's view of one queue pair keep accounts of their own. (A flush by the one rings what a lane has begun by the other, too.)
template <class Way> bool d2(uint64_t seed) {
  efa_world_options wanted = narrow(seed);
  wanted.depth = 4;
  wanted.max_batch = 4;
  efa_world world(wanted);
  const simt_result outcome = world.run(shape(1, 2, 1), [&](efa_context& ctx, int32_t rank) {
    if (rank != 0) return true;
    const call<Way> own{ctx, world};
    bool ok = true;
    for (uint64_t i = 0; i < 8; ++i) {
      ok = ok && (ctx.lane() == 0 ? own.put(i * 8, 2048, 8, gin_signal_inc{0}, gin_counter_inc{0}) : own.put(512 + i * 8, 2048, 8, gin_no_action{}, gin_counter_inc{0}));
    }
    return ok;
  });
  return outcome.ok && world.violations().empty() && world.counted(0, 1).written == 16;
}

// D3, T10, T11.
template <class Way> void d3(uint64_t ticked, uint64_t counted) {
  efa_world_options wanted = narrow(1);
  wanted.signals = 2;
  wanted.counters = 2;
  efa_world world(wanted);
  EP_CHECK(by_one<Way>(world, [&](const call<Way>& own) {
    return own.put(0, 2048, 8, gin_no_action{}, gin_counter_inc{0}) && own.put(0, 2048, 8, gin_signal_inc{1}, gin_counter_inc{0}) && own.flush();
  }).ok);
  EP_CHECK_EQ(world.counted(1, 1).arrived, ticked);
  EP_CHECK_EQ(world.counted(0, 1).written, counted);
}

// D4, T9.
template <class Way> uint64_t d4() {
  efa_world world(narrow(1));
  uint64_t go = 0;
  uint64_t read = 0;
  by_two<Way>(world, [&](const call<Way>& own) {
    bool ok = own.value(0, 1, gin_signal_inc{0}) && own.value(0, 1, gin_signal_inc{0}) && own.flush();
    wait_word(own.ctx, &go, 1);
    ok = ok && own.value(0, 1, gin_signal_inc{0}) && own.flush();
    fetch_add(own.ctx, &go, 1);
    return ok;
  }, [&](const call<Way>& own) {
    const auto gin = Way::gin(world, 1);
    if (!gin.wait_signal(own.ctx, own.coop, 0, 2, nullptr)) return false;
    gin.reset_signal(own.ctx, own.coop, 0);
    fetch_add(own.ctx, &go, 1);
    wait_word(own.ctx, &go, 2);
    const bool ok = gin.wait_signal(own.ctx, own.coop, 0, 1, nullptr);
    read = gin.read_signal(own.ctx, 0);
    return ok;
  });
  return read;
}

// D5, D17, T8, T32: a count of 31 bits, waited for as if it had 64.
template <class Way> simt_result d5() {
  efa_world world(narrow(1));
  for (const int32_t rank : {0, 1}) world.set_counts(rank, 0x7ffffffeu);
  for (ep_efa_pr_endpoint* one : {&world.at(0).pr.data, &world.at(0).pr_signals[0].base, &world.at(0).pr_counters[0].base}) one->submitted_count = 0x7ffffffeu;
  return by_two<Way>(world, [&](const call<Way>& own) {
    bool ok = true;
    for (uint64_t i = 0; i < 4; ++i) ok = ok && own.value(0, i, gin_signal_inc{0});
    return ok;
  }, [&](const call<Way>& own) {
    const auto gin = Way::gin(world, 1);
    const uint64_t before = std::is_same_v<Way, pr_way> ? 0x7ffffffeu : 0;
    return gin.wait_signal(own.ctx, own.coop, 0, before + 4, nullptr);
  });
}

// D8, T19.
template <class Way> uint64_t d8() {
  efa_world world(narrow(1));
  EP_CHECK(by_one<Way>(world, [&](const call<Way>& own) { return own.put(0, 2048, 8, gin_no_action{}, gin_no_action{}, true) && own.put(0, 0, 0, gin_no_action{}, gin_no_action{}); }).ok);
  return world.counted(1, 0).arrived;
}

// D9, D12, T18, T20: more than the device takes at once.
template <class Way> simt_result d9(bool faulty) {
  efa_world_options wanted = narrow(1);
  wanted.max_message = 64;
  efa_world world(wanted);
  if (faulty) expect(world.at(0).nic->set_faults("fail status=8 count=1"));
  return by_one<Way>(world, [&](const call<Way>& own) { return own.put(0, 2048, faulty ? 64 : 100, gin_signal_inc{0}, gin_no_action{}) && own.flush(); });
}

// D10, T27: nobody takes completions out.
template <class Way> bool t27_d10() {
  efa_world_options wanted = narrow(1);
  wanted.depth = 8;
  wanted.max_batch = 4;
  efa_world world(wanted);
  const uint64_t* taken = std::is_same_v<Way, pr_way> ? nullptr : &world.qp(0, 0).polled;
  expect(world.at(0).nic->cq_polled(world.at(0).cqs[0], taken));
  const simt_result outcome = by_one<Way>(world, [&](const call<Way>& own) {
    bool ok = true;
    for (uint64_t i = 0; i < 40 && ok; ++i) ok = own.put(0, 2048, 8, gin_no_action{}, gin_no_action{}) && (i % 4 != 3 || own.flush());
    return ok;
  });
  return outcome.ok && world.violations().empty();
}

// D11: what a lane has written and not rung, another lane rings.
template <class Way> bool d11(uint64_t seed) {
  efa_world_options wanted = narrow(seed);
  wanted.counters = 0;
  efa_world world(wanted);
  traffic_options of;
  of.run = 3;
  return traffic<Way>(world, of).right();
}

// D13, T29: of two requests under way, what tells their completions apart.
template <class Way> bool t29_d13() {
  efa_world world(narrow(1));
  EP_CHECK(by_one<Way>(world, [&](const call<Way>& own) {
    return own.put(0, 2048, 8, gin_no_action{}, gin_no_action{}, true) && own.put(8, 2048, 8, gin_no_action{}, gin_no_action{});
  }).ok);
  const uint64_t cq = world.qp(0, 0).cq;
  const auto id = [&](uint64_t i) { return *reinterpret_cast<const uint16_t*>(cq + i * world.qp(0, 0).cq_entry_bytes); };
  return id(0) != id(1);
}

// D15, T30: a value's place is used again because enough others have completed, while the NIC has yet to read it.
template <class Way> bool t30_d15(uint64_t seed) {
  efa_world_options wanted = narrow(seed);
  wanted.depth = 4;
  wanted.max_batch = 4;
  efa_world world(wanted);
  expect(world.at(0).nic->set_faults("hold stage=payload skip=" + std::to_string(seed % 4) + " count=1"));
  const simt_result outcome = by_two<Way>(world, [&](const call<Way>& own) {
    bool ok = true;
    for (uint64_t i = 0; i < 24; ++i) ok = ok && own.value(i * 8, i + 1, gin_no_action{});
    return ok && own.flush();
  }, [&](const call<Way>& own) {
    for (int i = 0; i < 3000; ++i) own.ctx.point();
    world.at(0).nic->release_held();
    return true;
  });
  bool right = outcome.ok;
  for (uint64_t i = 0; i < 24; ++i) right = right && word_at(world, 1, i * 8) == i + 1;
  return right;
}

// D18, T25: flush while another lane posts.
template <class Way> bool d18(uint64_t seed) {
  efa_world_options wanted = narrow(seed);
  wanted.depth = 32;
  efa_world world(wanted);
  std::memset(world.data(0) + 2048, 0x5a, 512);
  const simt_result outcome = world.run(shape(1, 2, 1), [&](efa_context& ctx, int32_t rank) {
    if (rank != 0) return true;
    const call<Way> own{ctx, world};
    bool ok = true;
    if (ctx.lane() == 1) {
      for (uint64_t i = 0; i < 12; ++i) ok = ok && own.value(1024 + i * 8, i, gin_no_action{});
      return ok;
    }
    ok = own.put(0, 2048, 512, gin_no_action{}, gin_no_action{}) && own.flush();
    std::memset(world.data(0) + 2048, 0xa5, 512);
    return ok;
  });
  bool right = outcome.ok;
  for (uint64_t i = 0; i < 512; ++i) right = right && world.data(1)[i] == 0x5a;
  return right;
}

// What its asserts refuse.
void refusals() {
  efa_world world(narrow(1));
  ep_kernel_status status{};
  EP_CHECK(!by_one<pr_way>(world, [&](const call<pr_way>& own) { return own.value(0, 1, gin_signal_add{0, 2}, false, &status); }).ok);
  EP_CHECK_EQ(status.status, static_cast<uint32_t>(EP_STATUS_INVALID));
  EP_CHECK_EQ(status.expected, EP_EFA_PR_VALUE_ADDS_ONE);
  EP_CHECK_EQ(status.found, 2u);
  status = {};
  EP_CHECK(!by_one<pr_way>(world, [&](const call<pr_way>& own) {
    efa_pr_options options;
    options.descriptor = &status;
    const ep_efa_pr_mr& part = world.pr_part(0);
    return pr_way::gin(world, 0).put(own.ctx, own.coop, world.team(), 1, part, 0, part, 8, 8, gin_no_action{}, gin_no_action{}, options, &status);
  }).ok);
  EP_CHECK_EQ(status.expected, EP_EFA_PR_NO_DESCRIPTOR);
  EP_CHECK_EQ(world.doorbells(), 0u);
}

template <class Right> void expect_caught(const char* name, const Right& right) {
  EP_CHECK(found_out(name, samples, 20, [&](uint64_t seed) { return !right(seed); }));
}
template <class Right> void expect_right(const Right& right) {
  uint64_t wrong = 0;
  for (uint64_t seed = 0; seed < samples; ++seed) wrong += right(seed) ? 0 : 1;
  EP_CHECK_EQ(wrong, 0u);
}

} // namespace

int main() {
  t5<pr_way>(0, 1);
  t5<our_way>(1, 1);
  refusals();
  for (uint64_t seed = 0; seed < samples; ++seed) {
    passes<pr_way>(seed);
    passes<our_way>(seed);
    EP_CHECK(t22_left_behind<pr_way>(seed) == t22_left_behind<our_way>(seed));
  }

  ep_kernel_status status{};
  EP_CHECK(!d1<pr_way>(&status));
  EP_CHECK_EQ(status.status, static_cast<uint32_t>(EP_STATUS_INVALID));
  EP_CHECK(d1<our_way>(nullptr));
  expect_caught("D2", d2<pr_way>);
  expect_right(d2<our_way>);
  d3<pr_way>(1, 1); // ticks the peer's signal 0, and misses the second put's counter 0
  d3<our_way>(0, 2);
  EP_CHECK_EQ(d4<pr_way>(), 3u);
  EP_CHECK_EQ(d4<our_way>(), 1u);
  EP_CHECK(d5<pr_way>().outcome == simt_outcome::deadlock);
  EP_CHECK(d5<our_way>().ok);
  EP_CHECK_EQ(d8<pr_way>(), 0u);
  EP_CHECK_EQ(d8<our_way>(), 2u);
  EP_CHECK(d9<pr_way>(false).outcome == simt_outcome::deadlock);
  EP_CHECK(d9<our_way>(false).ok);
  EP_CHECK(d9<pr_way>(true).outcome == simt_outcome::deadlock); // D12: an error is nobody's to see
  const simt_result reported = d9<our_way>(true);
  EP_CHECK(reported.outcome == simt_outcome::finished && !reported.ok);
  EP_CHECK(!t27_d10<pr_way>());
  EP_CHECK(t27_d10<our_way>());
  expect_caught("D11", d11<pr_way>);
  expect_right(d11<our_way>);
  EP_CHECK(!t29_d13<pr_way>());
  EP_CHECK(t29_d13<our_way>());
  expect_caught("D15", t30_d15<pr_way>);
  expect_right(t30_d15<our_way>);
  expect_caught("D18", d18<pr_way>);
  expect_right(d18<our_way>);
  return ep::check::finish();
}
