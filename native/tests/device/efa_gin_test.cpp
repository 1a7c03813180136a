// The GIN facade over EFA: what its calls promise, whatever order the NIC does things in. The numbers are those of the list of tests in docs/efa-contract.md.
#include "../check.hpp"
#include "efa_gin_cases.hpp"
#include "ep/device/gin_program.h"

using namespace ep;
using namespace ep::test;

namespace {

const uint64_t samples = seeds_of(100);

// Counts that begin close to their end, on both sides: T8 reads, T32 waits across it.
void t8_t32_counts_wrap(uint64_t seed) {
  efa_world world(seeded_world(seed));
  for (const int32_t rank : {0, 1}) world.set_counts(rank, 0x7ffffff0u);
  uint64_t seen = 0;
  uint64_t pointed = 0;
  const simt_result outcome = world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) {
    const auto gin = our_way::gin(world, rank);
    const thread_coop<efa_context> coop{ctx};
    if (rank == 1) {
      const bool ok = gin.wait_signal(ctx, coop, 0, 40, nullptr) && gin.wait_signal(ctx, coop, 0, 40, nullptr, 8);
      seen = gin.read_signal(ctx, 0);
      const efa_count_pointer at = gin.signal_pointer(ctx, 0);
      pointed = (*at.pointer - at.offset) & EP_EFA_COUNTER_MASK;
      return ok;
    }
    for (uint64_t i = 0; i < 40; ++i) {
      const ep_efa_memory& part = world.part(0);
      if (!gin.put(ctx, coop, world.team(), 1, part, 0, part, 2048, 8, gin_signal_inc{0}, gin_counter_inc{0}, {}, nullptr)) return false;
    }
    return gin.wait_counter(ctx, coop, 0, 40, nullptr) && gin.read_counter(ctx, 0) == 40 && gin.flush(ctx, coop, nullptr);
  });
  EP_CHECK(outcome.ok && world.clean());
  EP_CHECK_EQ(seen, 40u);
  EP_CHECK_EQ(pointed, 40u);
  EP_CHECK_EQ(world.counted(1, 1).arrived, (0x7ffffff0u + 40u) & EP_EFA_COUNTER_MASK);
}

void t32_widening() {
  EP_CHECK_EQ(efa_widen(0, 5), 5u);
  EP_CHECK_EQ(efa_widen(0x7fffffff, 0), 0x80000000u);
  EP_CHECK_EQ(efa_widen(0x1'8000'0001, 3), 0x1'8000'0003u);
  EP_CHECK_EQ(efa_widen(100, 90), 100u); // read before somebody else's look
  EP_CHECK_EQ(efa_widen(0x80000002, 0x7ffffffe), 0x80000002u);
  EP_CHECK(efa_reached(5, 5, 64) && efa_reached(6, 5, 64) && !efa_reached(4, 5, 64));
  EP_CHECK(efa_reached(1, 0xfe, 8) && !efa_reached(0xfe, 1, 8) && efa_reached(0x7f, 0, 8) && !efa_reached(0x80, 0, 8));
  EP_CHECK(efa_reached(0, 0, 1) && !efa_reached(1, 0, 1));
}

// A wait for more than half of what the NIC's count can tell: whoever waits has to keep up with it, since looks write nothing.
void t32_far_wait(uint64_t seed) {
  constexpr uint64_t step = uint64_t{1} << 28;
  constexpr uint64_t wanted = 13 * step; // beyond 2^31
  efa_world world(seeded_world(seed));
  uint64_t done = 0;
  const simt_result outcome = world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) {
    const auto gin = our_way::gin(world, rank);
    const thread_coop<efa_context> coop{ctx};
    if (rank == 1) {
      const bool ok = gin.wait_signal(ctx, coop, 0, wanted, nullptr) && gin.read_signal(ctx, 0) == wanted;
      fetch_add(ctx, &done, 1);
      return ok;
    }
    for (uint64_t count = step; count <= wanted; count += step) {
      if (load_acquire(ctx, &done) != 0) return false; // too early
      expect(world.at(1).nic->counter_set(world.at(1).kept[2 * 1 + 1], count & EP_EFA_COUNTER_MASK));
      for (int i = 0; i < 50; ++i) ctx.point();
    }
    return true;
  });
  EP_CHECK(outcome.ok);
  EP_CHECK_EQ(done, 1u);
}

// The NIC stores absolute numbers: a reset moves the zero, not the memory.
void t9_reset(uint64_t seed) {
  efa_world world(seeded_world(seed));
  uint64_t first = 0;
  uint64_t zero = 1;
  uint64_t second = 0;
  uint64_t go = 0;
  const simt_result outcome = world.run(shape(1, 2, 2), [&](efa_context& ctx, int32_t rank) {
    const auto gin = our_way::gin(world, rank);
    const warp_coop<efa_context> coop{ctx};
    if (rank == 1) {
      bool ok = gin.wait_signal(ctx, coop, 0, 3, nullptr);
      if (ctx.lane() == 0) first = gin.read_signal(ctx, 0);
      gin.reset_signal(ctx, coop, 0);
      if (ctx.lane() == 0) zero = gin.read_signal(ctx, 0);
      if (ctx.lane() == 0) fetch_add(ctx, &go, 1);
      ok = gin.wait_signal(ctx, coop, 0, 2, nullptr) && ok;
      if (ctx.lane() == 0) second = gin.read_signal(ctx, 0);
      return ok;
    }
    bool ok = true;
    for (int i = 0; i < 3; ++i) ok = gin.signal(ctx, coop, world.team(), 1, gin_signal_inc{0}, {}, nullptr) && ok;
    if (ctx.lane() == 0) wait_word(ctx, &go, 1);
    for (int i = 0; i < 2; ++i) ok = gin.signal(ctx, coop, world.team(), 1, gin_signal_inc{0}, {}, nullptr) && ok;
    return gin.flush(ctx, coop, nullptr) && ok;
  });
  EP_CHECK(outcome.ok && world.clean());
  EP_CHECK_EQ(first, 3u);
  EP_CHECK_EQ(zero, 0u);
  EP_CHECK_EQ(second, 2u);
}

// T10: a signal and a counter of different ids, of one put. T11: a counter alone ticks nothing at the peer. T26: counters that no signal shares a queue pair with.
void t10_t11_t26_ids(uint64_t seed) {
  efa_world_options wanted = seeded_world(seed);
  wanted.signals = 3;
  wanted.counters = 5;
  efa_world world(wanted);
  EP_CHECK(by_rank_0(world, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>& coop) {
    const ep_efa_memory& part = world.part(0);
    return gin.put(ctx, coop, world.team(), 1, part, 0, part, 2048, 100, gin_signal_inc{2}, gin_counter_inc{0}, {}, nullptr) &&
           gin.put(ctx, coop, world.team(), 1, part, 0, part, 2048, 100, gin_no_action{}, gin_counter_inc{1}, {}, nullptr) &&
           gin.put(ctx, coop, world.team(), 1, part, 0, part, 2048, 100, gin_no_action{}, gin_counter_inc{4}, {}, nullptr) && gin.wait_counter(ctx, coop, 4, 1, nullptr) &&
           gin.put(ctx, coop, world.team(), 1, part, 0, part, 2048, 100, gin_signal_inc{1}, gin_no_action{}, {}, nullptr);
  }));
  EP_CHECK(world.clean());
  const uint64_t arrived[] = {2, 0, 1, 1, 0, 0};
  const uint64_t written[] = {1, 1, 1, 0, 0, 1};
  for (uint32_t i = 0; i < 6; ++i) {
    EP_CHECK_EQ(world.counted(1, i).arrived, arrived[i]);
    EP_CHECK_EQ(world.counted(0, i).written, written[i]);
  }
}

template <class T> void t13_value(uint64_t seed, uint64_t offset, bool signalled, bool inline_write, uint32_t sharing) {
  efa_world_options wanted = seeded_world(seed);
  wanted.inline_write = inline_write;
  wanted.fragment_bytes = 8;
  wanted.sharing = sharing;
  efa_world world(wanted);
  const T value = static_cast<T>(0x8877665544332211u);
  bool right = false;
  std::memset(world.data(1), 0xcc, 64);
  const simt_result outcome = world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) {
    const auto gin = our_way::gin(world, rank);
    const thread_coop<efa_context> coop{ctx};
    if (rank == 1) {
      if (!signalled) return true;
      const bool ok = gin.wait_signal(ctx, coop, 0, 1, nullptr);
      right = std::memcmp(world.data(1) + offset, &value, sizeof(T)) == 0;
      return ok;
    }
    const bool ok = signalled ? gin.put_value(ctx, coop, world.team(), 1, world.part(0), offset, value, gin_signal_inc{0}, {}, nullptr)
                              : gin.put_value(ctx, coop, world.team(), 1, world.part(0), offset, value, gin_no_action{}, {}, nullptr);
    return gin.flush(ctx, coop, nullptr) && ok;
  });
  EP_CHECK(outcome.ok && world.clean());
  EP_CHECK(right || !signalled);
  EP_CHECK(std::memcmp(world.data(1) + offset, &value, sizeof(T)) == 0);
  EP_CHECK(world.data(1)[offset + sizeof(T)] == 0xcc && (offset == 0 || world.data(1)[offset - 1] == 0xcc));
}

void t13_values(uint64_t seed) {
  for (const bool inline_write : {true, false}) {
    const bool signalled = seed % 2 == 0;
    const uint64_t offset = seed % 9;
    const auto sharing = static_cast<uint32_t>(seed % 3);
    t13_value<uint8_t>(seed, offset, signalled, inline_write, sharing);
    t13_value<uint16_t>(seed, offset, signalled, inline_write, sharing);
    t13_value<uint32_t>(seed, offset, signalled, inline_write, sharing);
    t13_value<uint64_t>(seed, offset, signalled, inline_write, sharing);
  }
}

// The pull request's third phase: eight sentinels, the first seven aggregated. Whoever looks at all of them is right; the eighth says nothing of the others.
bool t15_burst(uint64_t seed) {
  efa_world world(seeded_world(seed));
  bool last_first = false;
  const simt_result outcome = world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) {
    const auto gin = our_way::gin(world, rank);
    const thread_coop<efa_context> coop{ctx};
    const auto* words = reinterpret_cast<const uint64_t*>(world.data(1));
    if (rank == 1) {
      if (!wait_word(ctx, words + 7, 0x44440007)) return false;
      for (uint64_t i = 0; i < 7; ++i) last_first = last_first || words[i] != 0x44440000 + i;
      for (uint64_t i = 0; i < 7; ++i) {
        if (!wait_word(ctx, words + i, 0x44440000 + i)) return false;
      }
      return true;
    }
    for (uint64_t i = 0; i < 8; ++i) {
      if (!gin.put_value(ctx, coop, world.team(), 1, world.part(0), i * 8, 0x44440000 + i, gin_no_action{}, aggregated<our_way>(i < 7), nullptr)) return false;
    }
    return true;
  });
  EP_CHECK(outcome.ok && world.clean());
  EP_CHECK_EQ(world.doorbells(), 1u);
  return last_first;
}

// Only all N arrivals say that the bytes have landed.
bool t16_add(uint64_t seed) {
  efa_world world(seeded_world(seed));
  std::memset(world.data(0) + 2048, 0x5a, 512);
  bool early = false;
  bool right = true;
  const simt_result outcome = world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) {
    const auto gin = our_way::gin(world, rank);
    const thread_coop<efa_context> coop{ctx};
    const ep_efa_memory& part = world.part(0);
    if (rank == 0) {
      return gin.put(ctx, coop, world.team(), 1, part, 0, part, 2048, 512, gin_signal_add{0, 5}, gin_no_action{}, {}, nullptr) &&
             gin.put(ctx, coop, world.team(), 1, part, 1024, part, 2048, 512, gin_signal_add{0, 0}, gin_no_action{}, {}, nullptr) && gin.flush(ctx, coop, nullptr);
    }
    const auto landed = [&] {
      bool all = true;
      for (uint64_t i = 0; i < 512; ++i) all = all && world.data(1)[i] == 0x5a;
      return all;
    };
    if (!gin.wait_signal(ctx, coop, 0, 1, nullptr)) return false;
    early = !landed();
    if (!gin.wait_signal(ctx, coop, 0, 5, nullptr)) return false;
    right = landed();
    return true;
  });
  EP_CHECK(outcome.ok && right && world.clean());
  EP_CHECK_EQ(world.counted(1, 1).arrived, 5u);
  EP_CHECK_EQ(world.data(1)[1024], 0x5a);
  return early;
}

// An empty put posts, and so ends an aggregated run.
void t19_empty_put() {
  efa_world world({});
  EP_CHECK(world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) {
    if (rank != 0) return true;
    const auto gin = our_way::gin(world, 0);
    const thread_coop<efa_context> coop{ctx};
    const ep_efa_memory& part = world.part(0);
    return gin.put(ctx, coop, world.team(), 1, part, 0, part, 2048, 8, gin_no_action{}, gin_no_action{}, aggregated<our_way>(true), nullptr) &&
           gin.put(ctx, coop, world.team(), 1, part, 0, part, 2048, 0, gin_no_action{}, gin_no_action{}, {}, nullptr);
  }).ok);
  EP_CHECK(world.clean());
  EP_CHECK_EQ(world.counted(1, 0).arrived, 2u);
}

// A put longer than the device takes: pieces, the last one with the signal and the counter, after the others have landed.
void t20_pieces(uint64_t seed) {
  for (const uint64_t bytes : {63u, 64u, 65u, 128u, 129u, 1000u}) {
    efa_world_options wanted = seeded_world(seed);
    wanted.max_message = 64;
    wanted.depth = 8;
    wanted.max_batch = 4;
    efa_world world(wanted);
    for (uint64_t i = 0; i < bytes; ++i) world.data(0)[2048 + i] = traffic_byte(7, i);
    bool right = true;
    const simt_result outcome = world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) {
      const auto gin = our_way::gin(world, rank);
      const thread_coop<efa_context> coop{ctx};
      const ep_efa_memory& part = world.part(0);
      if (rank == 0) {
        return gin.put(ctx, coop, world.team(), 1, part, 0, part, 2048, bytes, gin_signal_inc{0}, gin_counter_inc{0}, {}, nullptr) && gin.wait_counter(ctx, coop, 0, 1, nullptr);
      }
      if (!gin.wait_signal(ctx, coop, 0, 1, nullptr)) return false;
      for (uint64_t i = 0; i < bytes; ++i) right = right && world.data(1)[i] == traffic_byte(7, i);
      return true;
    });
    EP_CHECK(outcome.ok && right && world.clean());
    EP_CHECK_EQ(world.counted(1, 1).arrived, 1u);
    EP_CHECK_EQ(world.counted(0, 1).written, 1u);
    EP_CHECK_EQ(world.counted(0, 0).written, (bytes - 1) / 64);
  }
}

void gets(uint64_t seed) {
  efa_world_options wanted = seeded_world(seed);
  wanted.max_message = 64;
  efa_world world(wanted);
  for (uint64_t i = 0; i < 200; ++i) world.data(1)[100 + i] = traffic_byte(3, i);
  EP_CHECK(by_rank_0(world, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>& coop) {
    return gin.get(ctx, coop, world.team(), 1, world.part(0), 100, world.part(0), 1000, 200, aggregated<our_way>(seed % 2 == 0), nullptr);
  }));
  EP_CHECK(world.clean());
  EP_CHECK(std::memcmp(world.data(0) + 1000, world.data(1) + 100, 200) == 0);
  EP_CHECK_EQ(world.counted(0, 0).written, 0u);
}

void t23_scopes() {
  const gin_scope all[] = {gin_scope::system, gin_scope::device, gin_scope::block, gin_scope::thread};
  for (const gin_scope given : all) {
    for (const gin_scope required : all) {
      const bool wanted = required == gin_scope::system && given != gin_scope::system;
      EP_CHECK_EQ(gin_requires_system_fence(given, required), wanted);
    }
  }
}

// What a caller may get wrong is refused before anything is posted.
void refusals() {
  efa_world_options wanted;
  wanted.signals = 0;
  wanted.counters = 0;
  efa_world world(wanted);
  const auto refused = [&](uint64_t limit, uint64_t found, const auto& call) {
    world.at(0).status = {};
    EP_CHECK(!by_rank_0(world, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>& coop) { return call(ctx, gin, coop); }));
    EP_CHECK_EQ(world.at(0).status.status, static_cast<uint32_t>(EP_STATUS_INVALID));
    EP_CHECK_EQ(world.at(0).status.stage, EP_STAGE_RANGE);
    EP_CHECK_EQ(world.at(0).status.expected, limit);
    EP_CHECK_EQ(world.at(0).status.found, found);
    EP_CHECK_EQ(world.qp(0, 0).taken, 0u);
  };
  const ep_efa_memory& part = world.part(0);
  ep_kernel_status* status = &world.at(0).status;
  const auto put = [&](int32_t peer, uint64_t to, uint64_t from, uint64_t bytes) {
    return [=, &world, &part](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>& coop) {
      return gin.put(ctx, coop, world.team(), peer, part, to, part, from, bytes, gin_no_action{}, gin_no_action{}, {}, status);
    };
  };
  refused(1, 2, put(2, 0, 0, 8));
  refused(1, 0xffffffff, put(-1, 0, 0, 8));
  refused(4096, 4097, put(1, 0, 0, 4097));
  refused(4088, 4089, put(1, 4089, 0, 8));
  refused(4088, UINT64_MAX, put(1, UINT64_MAX, 0, 8));
  refused(4088, 4090, put(1, 0, 4090, 8));
  refused(0, 1, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>& coop) {
    return gin.signal(ctx, coop, world.team(), 1, gin_signal_inc{0}, {}, status);
  });
  refused(0, 4, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>& coop) {
    return gin.put(ctx, coop, world.team(), 1, part, 0, part, 0, 8, gin_no_action{}, gin_counter_inc{3}, {}, status);
  });
  refused(0, 0xffffffff, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>& coop) {
    return gin.signal(ctx, coop, world.team(), 1, gin_signal_inc{UINT32_MAX}, {}, status);
  });
  refused(0, 0xffffffff, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>& coop) {
    return gin.put(ctx, coop, world.team(), 1, part, 0, part, 0, 8, gin_signal_add{UINT32_MAX, 2}, gin_no_action{}, {}, status);
  });
  refused(0, 0xffffffff, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>& coop) {
    return gin.put(ctx, coop, world.team(), 1, part, 0, part, 0, 8, gin_no_action{}, gin_counter_inc{UINT32_MAX}, {}, status);
  });
  // Ids of one's own signals and counters.
  for (const uint32_t id : {0u, 7u, UINT32_MAX}) {
    const uint64_t found = id == UINT32_MAX ? id : id + 1;
    refused(0, found, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>& coop) { return gin.wait_signal(ctx, coop, id, 0, status); });
    refused(0, found, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>& coop) { return gin.wait_counter(ctx, coop, id, 0, status); });
    refused(0, found, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>& coop) { return gin.reset_signal(ctx, coop, id, status); });
    refused(0, found, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>& coop) { return gin.reset_counter(ctx, coop, id, status); });
    refused(0, found, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>&) { return gin.read_signal(ctx, id, status) != 0; });
    refused(0, found, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>&) { return gin.read_counter(ctx, id, status) != 0; });
    refused(0, found, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>&) { return gin.signal_pointer(ctx, id, status).pointer != nullptr; });
    refused(0, found, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>&) { return gin.counter_pointer(ctx, id, status).pointer != nullptr; });
  }
  // Teams that name no rank of the context, and one of nobody.
  const int32_t order[] = {0, 2, -1};
  const auto to_member = [&](int32_t member, int32_t size) {
    return [=, &part, &order](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>& coop) {
      return gin.put(ctx, coop, {order, size}, member, part, 0, part, 0, 8, gin_no_action{}, gin_no_action{}, {}, status);
    };
  };
  refused(1, 2, to_member(1, 3));
  refused(1, 0xffffffff, to_member(2, 3));
  refused(2, 3, to_member(3, 3));
  refused(0, 0, to_member(0, 0));
  // A context without signals and counters works.
  EP_CHECK(by_rank_0(world, put(1, 0, 2048, 8)));
  EP_CHECK_EQ(world.counted(1, 0).arrived, 1u);
  const auto checked = [&] { return by_rank_0(world, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>&) { return gin.check(ctx, status); }); };
  EP_CHECK(checked());
  *status = {};
  world.at(0).device.header.abi_major = EP_ABI_MAJOR + 1;
  EP_CHECK(!checked());
  EP_CHECK_EQ(status->status, static_cast<uint32_t>(EP_STATUS_ABI_MISMATCH));
  EP_CHECK_EQ(status->expected >> 16, static_cast<uint64_t>(EP_ABI_MAJOR));
  EP_CHECK_EQ(status->found >> 16, static_cast<uint64_t>(EP_ABI_MAJOR + 1));
}

// Team ranks that are not ranks.
void teams() {
  efa_world_options wanted;
  wanted.size = 3;
  efa_world world(wanted);
  const int32_t order[] = {2, 0};
  EP_CHECK(by_rank_0(world, [&](efa_context& ctx, const our_gin& gin, const thread_coop<efa_context>& coop) {
    return gin.put_value(ctx, coop, {order, 2}, 0, world.part(0), 8, uint64_t{5}, gin_signal_inc{0}, {}, nullptr) &&
           gin.put_value(ctx, coop, {order, 2}, 1, world.part(0), 8, uint64_t{6}, gin_signal_inc{0}, {}, nullptr);
  }));
  EP_CHECK_EQ(word_at(world, 2, 8), 5u);
  EP_CHECK_EQ(word_at(world, 0, 8), 6u);
  EP_CHECK_EQ(world.counted(1, 1).arrived, 0u);
}

// A list of calls by the lanes of a block: each is made once, and the first that fails ends it.
void programs(uint64_t seed) {
  efa_world world(seeded_world(seed));
  std::memset(world.data(0) + 2048, 0x5a, 64);
  const auto step = [](uint32_t op, uint64_t to, uint64_t from, uint64_t bytes, uint32_t flags) {
    ep_gin_step made{};
    made.op = op;
    made.peer = 1;
    made.to = to;
    made.from = from;
    made.bytes = bytes;
    made.flags = flags;
    return made;
  };
  std::vector<ep_gin_step> steps;
  steps.push_back(step(EP_GIN_PUT, 0, 2048, 64, EP_GIN_COUNTED | EP_GIN_AGGREGATE));
  steps.back().add = 1;
  steps.push_back(step(EP_GIN_PUT_VALUE, 128, 0, 2, 0));
  steps.back().value = 0x11223344;
  steps.push_back(step(EP_GIN_FLUSH, 0, 0, 0, 0));
  steps.push_back(step(EP_GIN_GET, 3072, 0, 64, 0));
  steps.push_back(step(EP_GIN_FLUSH, 0, 0, 0, 0));
  steps.push_back(step(EP_GIN_WAIT_COUNTER, 0, 0, 0, 0));
  steps.back().value = 1;
  for (const uint32_t op : {EP_GIN_READ_COUNTER, EP_GIN_LOOK_COUNTER, EP_GIN_RESET_COUNTER, EP_GIN_READ_COUNTER, EP_GIN_LOOK_COUNTER, EP_GIN_READ_SIGNAL}) steps.push_back(step(op, 0, 0, 0, 0));
  const size_t good = steps.size();
  steps.push_back(step(EP_GIN_PUT_VALUE, 0, 0, 3, 0)); // no value has three bytes
  steps.push_back(step(EP_GIN_FLUSH, 0, 0, 0, 0));
  ep_kernel_status status{};
  const simt_result outcome = world.run(shape(1, 4, 4), [&](efa_context& ctx, int32_t rank) {
    if (rank != 0) return true;
    return !gin_program(ctx, block_coop<efa_context>{ctx}, our_way::gin(world, 0), world.part(0), steps.data(), steps.size(), &status);
  });
  EP_CHECK(outcome.ok && world.clean());
  EP_CHECK_EQ(status.status, static_cast<uint32_t>(EP_STATUS_INVALID));
  EP_CHECK_EQ(status.found, 3u);
  for (size_t i = 0; i < steps.size(); ++i) EP_CHECK_EQ((steps[i].flags & EP_GIN_ENDED) != 0, i < good);
  const uint64_t found[] = {1, 1, 0, 0, 0, 0};
  for (size_t i = 0; i < 6; ++i) EP_CHECK_EQ(steps[good - 6 + i].found, found[i]);
  EP_CHECK(world.data(1)[63] == 0x5a && world.data(1)[128] == 0x44 && world.data(1)[129] == 0x33 && world.data(1)[130] == 0);
  EP_CHECK_EQ(std::memcmp(world.data(0) + 3072, world.data(0) + 2048, 64), 0);
  EP_CHECK_EQ(world.counted(1, 1).arrived, 1u);
}

} // namespace

int main() {
  t23_scopes();
  t32_widening();
  t19_empty_put();
  refusals();
  teams();
  uint64_t last_first = 0;
  uint64_t early = 0;
  for (uint64_t seed = 0; seed < samples; ++seed) {
    t8_t32_counts_wrap(seed);
    t9_reset(seed);
    programs(seed);
    if (seed % 10 == 0) t32_far_wait(seed);
    t10_t11_t26_ids(seed);
    t13_values(seed);
    last_first += t15_burst(seed) ? 1 : 0;
    early += t16_add(seed) ? 1 : 0;
    gets(seed);
    if (seed % 10 == 0) t20_pieces(seed);
  }
  std::printf("T15: in %llu of %llu seeds the eighth of a burst comes before another; T16: in %llu an addition is seen before its bytes\n",
              static_cast<unsigned long long>(last_first), static_cast<unsigned long long>(samples), static_cast<unsigned long long>(early));
  // A sanitizer's few seeds need not show what is rare.
  for (uint64_t seed = samples; seed < samples + 200 && last_first == 0; ++seed) last_first += t15_burst(seed) ? 1 : 0;
  for (uint64_t seed = samples; seed < samples + 200 && early == 0; ++seed) early += t16_add(seed) ? 1 : 0;
  EP_CHECK(last_first != 0);
  EP_CHECK(early != 0);
  return ep::check::finish();
}
