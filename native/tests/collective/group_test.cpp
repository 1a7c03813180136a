// Process groups with ranks as threads: every operation by every path, chunk borders, mismatches, deaths, deadlines.
#include "collective/group.hpp"

#include <atomic>
#include <cstring>
#include <string>

#include "group_world.hpp"

namespace {

using namespace ep;
using namespace ep::group_world;

void fill(const memory& to, int32_t rank, int32_t blocks, uint64_t count, uint64_t salt) {
  auto* values = reinterpret_cast<int32_t*>(to.data);
  for (int32_t j = 0; j < blocks; ++j) {
    for (uint64_t i = 0; i < count; ++i) values[static_cast<uint64_t>(j) * count + i] = given(rank, j, i, salt);
  }
}

// One call of a kind with blocks of `count` i32; `of_group`: which of (inputs, outputs) lie in group memory.
void check_kind(member& self, op_kind kind, uint64_t count, bool group_in, bool group_out, bool in_place, bool attempt) {
  const int32_t size = self.in.size;
  const uint64_t bytes = 4 * count;
  const auto ranks = static_cast<uint64_t>(size);
  const uint64_t salt = self.sequence;
  const int32_t root = static_cast<int32_t>(self.sequence % ranks);
  const bool is_root = self.rank == root;
  const bool list = kind == op_kind::scatter || kind == op_kind::reduce_scatter || kind == op_kind::all_to_all;
  const bool gathers = kind == op_kind::gather || kind == op_kind::all_gather || kind == op_kind::all_to_all;
  const bool rooted = kind == op_kind::broadcast || kind == op_kind::reduce || kind == op_kind::gather || kind == op_kind::scatter;
  const bool gives = kind == op_kind::broadcast || kind == op_kind::scatter ? is_root : true;
  const bool takes = kind == op_kind::broadcast ? !is_root : kind == op_kind::reduce || kind == op_kind::gather ? is_root : true;
  self.used = 0;
  const memory in = self.make(list ? bytes * ranks : bytes, group_in);
  const memory out = in_place ? memory{{}, in.data, in.segment, in.offset} : self.make(gathers ? bytes * ranks : bytes, group_out);
  if (!in_place) std::memset(out.data, 0xee, gathers ? bytes * ranks : bytes);
  fill(in, self.rank, list ? size : 1, count, salt);
  auto queued = self.call(kind, element_type::i32, kind == op_kind::all_to_all ? 0 : bytes, rooted ? root : -1);
  if (gives) {
    for (uint64_t j = 0; j < (list ? ranks : 1); ++j) queued->call.inputs.push_back(in.block(j * bytes, bytes));
  }
  if (takes) {
    for (uint64_t j = 0; j < (gathers ? ranks : 1); ++j) queued->call.outputs.push_back(out.block(j * bytes, bytes));
  }
  const outcome end = self.run(std::move(queued), attempt);
  EP_CHECK_EQ(end.status, unsigned{EP_STATUS_OK});
  if (!takes || end.status != EP_STATUS_OK) return;
  const auto* got = reinterpret_cast<const int32_t*>(out.data);
  uint64_t wrong = 0;
  for (int32_t j = 0; j < (gathers ? size : 1); ++j) {
    for (uint64_t i = 0; i < count; ++i) {
      int32_t want = 0;
      switch (kind) {
        case op_kind::broadcast: want = given(root, 0, i, salt); break;
        case op_kind::all_reduce:
        case op_kind::reduce:
          for (int32_t r = 0; r < size; ++r) want += given(r, 0, i, salt);
          break;
        case op_kind::all_gather:
        case op_kind::gather: want = given(j, 0, i, salt); break;
        case op_kind::scatter: want = given(root, self.rank, i, salt); break;
        case op_kind::reduce_scatter:
          for (int32_t r = 0; r < size; ++r) want += given(r, self.rank, i, salt);
          break;
        case op_kind::all_to_all: want = given(j, self.rank, i, salt); break;
        case op_kind::barrier:
    case op_kind::membership: break;
      }
      wrong += got[static_cast<uint64_t>(j) * count + i] != want;
    }
  }
  if (wrong != 0) std::fprintf(stderr, "kind %u, %llu elements, in %d out %d place %d: %llu wrong\n", static_cast<unsigned>(kind), static_cast<unsigned long long>(count), group_in, group_out, in_place, static_cast<unsigned long long>(wrong));
  EP_CHECK_EQ(wrong, uint64_t{0});
}

void every_kind(int32_t size, const std::vector<uint64_t>& counts) {
  run_ranks(size, [&](member& self) {
    for (const uint64_t count : counts) {
      for (uint32_t kind = 1; kind < static_cast<uint32_t>(op_kind::membership); ++kind) {
        for (int memory = 0; memory < 4; ++memory) {
          check_kind(self, static_cast<op_kind>(kind), count, (memory & 1) != 0, (memory & 2) != 0, false, count % 2 == 0);
        }
        // Ranks need not agree where their memory lies.
        check_kind(self, static_cast<op_kind>(kind), count, self.rank % 2 == 0, self.rank % 2 != 0, false, true);
      }
      check_kind(self, op_kind::all_reduce, count, true, true, true, true);
      check_kind(self, op_kind::all_reduce, count, false, false, true, true);
      check_kind(self, op_kind::all_reduce, count, self.rank == 0, self.rank == 0, true, false);
      check_kind(self, op_kind::reduce, count, true, true, true, true);
      check_kind(self, op_kind::barrier, 0, false, false, true, true);
    }
  });
}

void uneven_all_to_all(int32_t size) {
  run_ranks(size, [&](member& self) {
    for (uint64_t scale : {uint64_t{0}, uint64_t{1}, uint64_t{3}, uint64_t{2000}, uint64_t{40000}}) {
      const auto length = [&](int32_t from, int32_t to) { return scale * static_cast<uint64_t>((from * 3 + to * 5) % 4); };
      uint64_t gives = 0;
      uint64_t takes = 0;
      for (int32_t r = 0; r < size; ++r) {
        gives += length(self.rank, r);
        takes += length(r, self.rank);
      }
      memory in = self.make(gives, false);
      memory out = self.make(takes, scale % 2 == 0);
      auto queued = self.call(op_kind::all_to_all, element_type::u8, 0);
      uint64_t at = 0;
      uint64_t to = 0;
      for (int32_t r = 0; r < size; ++r) {
        for (uint64_t i = 0; i < length(self.rank, r); ++i) in.data[at + i] = static_cast<uint8_t>(given(self.rank, r, i, scale));
        queued->call.inputs.push_back(in.block(at, length(self.rank, r)));
        queued->call.outputs.push_back(out.block(to, length(r, self.rank)));
        at += length(self.rank, r);
        to += length(r, self.rank);
      }
      EP_CHECK_EQ(self.run(std::move(queued)).status, unsigned{EP_STATUS_OK});
      to = 0;
      uint64_t wrong = 0;
      for (int32_t r = 0; r < size; ++r) {
        for (uint64_t i = 0; i < length(r, self.rank); ++i) wrong += out.data[to + i] != static_cast<uint8_t>(given(r, self.rank, i, scale));
        to += length(r, self.rank);
      }
      EP_CHECK_EQ(wrong, uint64_t{0});
    }
  });
}

void many_at_once(int32_t size, int calls) {
  run_ranks(size, [&](member& self) {
    std::vector<memory> values;
    std::vector<uint64_t> ids;
    for (int i = 0; i < calls; ++i) {
      values.push_back(self.make(4, false));
      auto queued = self.call(op_kind::all_reduce, element_type::i32, 4);
      const int32_t value = self.rank + i;
      std::memcpy(values.back().data, &value, 4);
      queued->call.inputs = queued->call.outputs = {values.back().block(0, 4)};
      queued->operation_id = self.next_id++;
      ids.push_back(queued->operation_id);
      self.group->submit(std::move(queued));
    }
    for (int i = 0; i < calls; ++i) {
      EP_CHECK_EQ(self.sink.wait(ids[static_cast<size_t>(i)]).status, unsigned{EP_STATUS_OK});
      const std::vector<call_block> target{values[static_cast<size_t>(i)].block(0, 4)};
      EP_CHECK(self.group->collect(ids[static_cast<size_t>(i)], target));
      int32_t sum = 0;
      std::memcpy(&sum, values[static_cast<size_t>(i)].data, 4);
      EP_CHECK_EQ(sum, size * (size - 1) / 2 + size * i);
    }
  });
}

// Calls tried at once and calls handed over come in the order in which they were made: another order would be a mismatch.
void tried_and_queued_keep_their_order(int32_t size, int calls) {
  run_ranks(size, [&](member& self) {
    const memory value = self.make(8, true);
    uint64_t last = 0;
    uint32_t random = static_cast<uint32_t>(self.rank) * 7919 + 1;
    for (int i = 0; i < calls; ++i) {
      auto queued = self.call(op_kind::all_reduce, element_type::i32, 8);
      queued->call.inputs = queued->call.outputs = {value.block(0, 8)};
      queued->borrowed = false;
      random = random * 1664525u + 1013904223u;
      if (random >> 24 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random >> 16 & 255));
      if (self.group->try_now(*queued)) continue;
      queued->operation_id = last = self.next_id++;
      self.group->submit(std::move(queued));
    }
    if (last != 0) EP_CHECK_EQ(self.sink.wait(last).status, unsigned{EP_STATUS_OK});
    EP_CHECK_EQ(self.run(self.call(op_kind::barrier, element_type::u8, 0)).status, unsigned{EP_STATUS_OK});
  });
}

void mismatch_is_named() {
  run_ranks(3, [](member& self) {
    const memory value = self.make(64, false);
    auto queued = self.call(self.rank == 1 ? op_kind::reduce : op_kind::all_reduce, element_type::f32, 64, self.rank == 1 ? 0 : -1);
    queued->call.inputs = {value.block(0, 64)};
    if (self.rank != 1) queued->call.outputs = {value.block(0, 64)};
    const uint64_t id = self.next_id;
    EP_CHECK_EQ(self.run(std::move(queued)).status, unsigned{EP_STATUS_MISMATCH});
    const call_failure why = self.group->failure_of(id);
    EP_CHECK_EQ(why.calls.size(), size_t{3});
    EP_CHECK_EQ(why.calls[1].kind, static_cast<uint32_t>(op_kind::reduce));
    EP_CHECK_EQ(why.calls[2].kind, static_cast<uint32_t>(op_kind::all_reduce));
    auto again = self.call(op_kind::barrier, element_type::u8, 0);
    EP_CHECK_EQ(self.run(std::move(again)).status, unsigned{EP_STATUS_BUSY});
  });
}

// False: of the two that are to wait, one was late itself.
bool a_late_rank_is_named(double patience_ms) {
  std::atomic<bool> alone{true};
  run_ranks(3, [&](member& self) {
    if (self.rank != 2) {
      auto queued = self.call(op_kind::barrier, element_type::u8, 0);
      queued->timeout_ms = patience_ms;
      const uint64_t id = self.next_id;
      const outcome end = self.run(std::move(queued));
      // Whose deadline comes first gives up; the other hears of it.
      EP_CHECK(end.status == EP_STATUS_TIMEOUT || end.status == EP_STATUS_ABORTED);
      const auto missing = self.group->failure_of(id).missing;
      if (end.status == EP_STATUS_TIMEOUT) {
        EP_CHECK(!missing.empty() && missing.back() == 2);
        if (missing.size() != 1) alone = false;
      }
      self.in.meet.arrive_and_wait();
    } else {
      self.in.meet.arrive_and_wait();
      auto queued = self.call(op_kind::barrier, element_type::u8, 0);
      const outcome end = self.run(std::move(queued));
      // The two have entered the barrier and gone: this rank may pass it, but not the next one.
      if (end.status == EP_STATUS_OK) EP_CHECK_EQ(self.run(self.call(op_kind::barrier, element_type::u8, 0)).status, unsigned{EP_STATUS_ABORTED});
    }
  });
  return alone;
}

// Rank `dies` leaves before its call `at`; the others' calls end alike, and the next ones work without it.
void a_death(int32_t size, int32_t dies, int at, uint64_t count, bool of_group) {
  std::vector<std::vector<uint32_t>> statuses(static_cast<size_t>(size));
  run_ranks(size, [&](member& self) {
    const memory value = self.make(4 * count, of_group);
    for (int i = 0; i < at + 4; ++i) {
      if (self.rank == dies && i == at) {
        self.group->close(false);
        return;
      }
      fill(value, self.rank, 1, count, static_cast<uint64_t>(i));
      auto queued = self.call(op_kind::all_reduce, element_type::i32, 4 * count);
      queued->call.inputs = queued->call.outputs = {value.block(0, 4 * count)};
      const uint64_t id = self.next_id;
      const outcome end = self.run(std::move(queued), i % 2 == 0);
      statuses[static_cast<size_t>(self.rank)].push_back(end.status);
      if (end.status == EP_STATUS_OK) {
        const auto active = self.group->active();
        const auto* got = reinterpret_cast<const int32_t*>(value.data);
        uint64_t wrong = 0;
        for (uint64_t k = 0; k < count; ++k) {
          int32_t want = 0;
          for (const int32_t r : active) want += given(r, 0, k, static_cast<uint64_t>(i));
          wrong += got[k] != want;
        }
        EP_CHECK_EQ(wrong, uint64_t{0});
      } else {
        EP_CHECK_EQ(end.status, unsigned{EP_STATUS_PEER_LOST});
        EP_CHECK(self.group->failure_of(id).lost == std::vector<int32_t>{dies});
      }
    }
    EP_CHECK_EQ(self.group->epoch(), uint64_t{2});
    EP_CHECK_EQ(self.group->active().size(), static_cast<size_t>(size - 1));
  });
  const size_t other = dies == 0 ? 1 : 0;
  for (int32_t r = 0; r < size; ++r) {
    if (r != dies) EP_CHECK(statuses[static_cast<size_t>(r)] == statuses[other]);
  }
}

// A broadcast (blocks of `count` i32) or scatter of what `given` says of call `number`.
std::unique_ptr<queued_call> rooted_call(member& self, op_kind kind, int32_t root, uint64_t count, const memory& from, const memory& into) {
  auto queued = self.call(kind, element_type::i32, 4 * count, root);
  const bool is_root = self.rank == root;
  const int32_t blocks = kind == op_kind::scatter ? self.in.size : 1;
  if (is_root) {
    fill(from, self.rank, blocks, count, self.sequence);
    for (int32_t j = 0; j < blocks; ++j) queued->call.inputs.push_back(from.block(static_cast<uint64_t>(j) * 4 * count, 4 * count));
  }
  if (kind == op_kind::scatter || !is_root) queued->call.outputs.push_back(into.block(0, 4 * count));
  return queued;
}

uint64_t wrong_values(member& self, op_kind kind, int32_t root, uint64_t count, uint64_t number, const memory& into) {
  if (kind == op_kind::broadcast && self.rank == root) return 0;
  const auto* got = reinterpret_cast<const int32_t*>(into.data);
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < count; ++i) wrong += got[i] != given(root, kind == op_kind::scatter ? self.rank : 0, i, number);
  return wrong;
}

// The root of small broadcasts and scatters goes on without the others, as far as the ring reaches; they get everything, in order and each at its own pace. Whether it
// closes the group or dies then, makes no difference to what it gave.
void a_root_runs_ahead(op_kind kind, uint64_t count, bool dies) {
  run_ranks(3, [&](member& self) {
    const memory from = self.make(3 * 4 * count, true);
    const memory into = self.make(4 * count, true);
    EP_CHECK_EQ(self.run(self.call(op_kind::barrier, element_type::u8, 0)).status, unsigned{EP_STATUS_OK});
    constexpr uint64_t ahead = group_ring - 1;
    if (self.rank == 0) {
      for (uint64_t i = 0; i < ahead; ++i) {
        auto queued = rooted_call(self, kind, 0, count, from, into);
        EP_CHECK(self.group->try_now(*queued));
      }
      if (!dies) {
        auto one_more = rooted_call(self, kind, 0, count, from, into);
        EP_CHECK(!self.group->try_now(*one_more));
        EP_CHECK_EQ(self.group->trace(static_cast<uint32_t>(kind)).signals, ahead);
        one_more->operation_id = self.next_id++;
        self.group->submit(std::move(one_more));
        self.in.meet.arrive_and_wait();
        EP_CHECK_EQ(self.sink.wait(self.next_id - 1).status, unsigned{EP_STATUS_OK});
      }
      self.group->close(!dies);
      if (dies) self.in.meet.arrive_and_wait();
      return;
    }
    self.in.meet.arrive_and_wait();
    if (self.rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    for (uint64_t i = 0; i < ahead + (dies ? 0 : 1); ++i) {
      const outcome end = self.run(rooted_call(self, kind, 0, count, from, into), i % 2 == 0);
      EP_CHECK_EQ(end.status, unsigned{EP_STATUS_OK});
      EP_CHECK_EQ(wrong_values(self, kind, 0, count, self.sequence, into), uint64_t{0});
    }
    EP_CHECK_EQ(self.group->epoch(), uint64_t{1});
    if (!dies) return;
    EP_CHECK_EQ(self.run(rooted_call(self, kind, 0, count, from, into)).status, unsigned{EP_STATUS_PEER_LOST});
    EP_CHECK_EQ(self.run(rooted_call(self, kind, 1, count, from, into)).status, unsigned{EP_STATUS_OK});
    EP_CHECK_EQ(wrong_values(self, kind, 1, count, self.sequence, into), uint64_t{0});
  });
}

// A rank dies while the root is ahead, and the root notices it first: whoever is left takes all that the root has given, in the epoch in which it gave it.
void others_catch_up(bool through_the_thread) {
  run_ranks(3, [&](member& self) {
    const memory from = self.make(64, true);
    const memory into = self.make(64, true);
    EP_CHECK_EQ(self.run(self.call(op_kind::barrier, element_type::u8, 0)).status, unsigned{EP_STATUS_OK});
    if (self.rank == 2) return self.in.meet.arrive_and_drop();
    if (self.rank == 1) self.in.meet.arrive_and_wait();
    for (int i = 0; i < 10; ++i) {
      EP_CHECK_EQ(self.run(rooted_call(self, op_kind::broadcast, 0, 2, from, into), !through_the_thread).status, unsigned{EP_STATUS_OK});
      EP_CHECK_EQ(wrong_values(self, op_kind::broadcast, 0, 2, self.sequence, into), uint64_t{0});
      EP_CHECK_EQ(self.group->epoch(), uint64_t{1});
    }
    auto queued = self.call(op_kind::all_reduce, element_type::i32, 8);
    queued->call.inputs = {from.block(0, 8)};
    queued->call.outputs = {into.block(0, 8)};
    if (self.rank == 0) {
      // It has decided the next epoch by then.
      EP_CHECK(!self.group->try_now(*queued));
      queued->operation_id = self.next_id++;
      self.group->submit(std::move(queued));
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      self.in.meet.arrive_and_wait();
      EP_CHECK_EQ(self.sink.wait(self.next_id - 1).status, unsigned{EP_STATUS_PEER_LOST});
    } else {
      EP_CHECK_EQ(self.run(std::move(queued)).status, unsigned{EP_STATUS_PEER_LOST});
    }
    EP_CHECK_EQ(self.run(rooted_call(self, op_kind::broadcast, 1, 2, from, into)).status, unsigned{EP_STATUS_OK});
    EP_CHECK_EQ(self.group->epoch(), uint64_t{2});
  });
}

// Ranks each of which thinks that it is the root: all go on, and are all told at the next call which of them differed in which one.
void a_mismatch_is_found_later() {
  run_ranks(3, [](member& self) {
    const memory from = self.make(64, true);
    const memory into = self.make(64, true);
    EP_CHECK_EQ(self.run(self.call(op_kind::barrier, element_type::u8, 0)).status, unsigned{EP_STATUS_OK});
    EP_CHECK_EQ(self.run(rooted_call(self, op_kind::broadcast, self.rank == 2 ? 2 : 0, 2, from, into)).status, unsigned{EP_STATUS_OK});
    const uint64_t id = self.next_id;
    EP_CHECK_EQ(self.run(self.call(op_kind::barrier, element_type::u8, 0)).status, unsigned{EP_STATUS_MISMATCH});
    const call_failure why = self.group->failure_of(id);
    EP_CHECK(why.active == (std::vector<int32_t>{0, 1, 2}) && why.calls.size() == 3);
    for (size_t r = 0; r < 3; ++r) {
      EP_CHECK_EQ(why.calls[r].sequence, uint64_t{2});
      EP_CHECK_EQ(why.calls[r].root, r == 2 ? 2 : 0);
    }
  });
}

// Mixed small calls with changing roots, ranks that are late, and one that dies somewhere: all survivors see the same ends, in the same epochs.
void a_death_among_small_ones(int32_t size, uint32_t seed) {
  constexpr int calls = 60;
  const auto random = [](uint32_t a, uint32_t b) { return (((a * 0x9e3779b1u) ^ (b * 0x85ebca6bu)) * 0xc2b2ae35u) >> 15; };
  const auto dies = static_cast<int32_t>(random(seed, 1) % static_cast<uint32_t>(size));
  const auto at = static_cast<int>(random(seed, 2) % calls);
  std::vector<std::vector<std::pair<uint32_t, uint64_t>>> ends(static_cast<size_t>(size));
  run_ranks(size, [&](member& self) {
    const memory from = self.make(4096, true);
    const memory into = self.make(4096, true);
    for (int i = 0; i < calls; ++i) {
      if (self.rank == dies && i == at) {
        self.group->close(false);
        return;
      }
      const uint32_t what = random(seed, 100 + static_cast<uint32_t>(i));
      if (random(seed * 31 + static_cast<uint32_t>(self.rank), static_cast<uint32_t>(i)) % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
      const auto root = static_cast<int32_t>(what % static_cast<uint32_t>(size));
      const op_kind kind = what / 8 % 8 == 0 ? op_kind::all_reduce : what / 8 % 2 == 0 ? op_kind::scatter : op_kind::broadcast;
      const uint64_t count = what / 64 % 4 == 0 ? 100 : 2;
      std::unique_ptr<queued_call> queued;
      if (kind == op_kind::all_reduce) {
        queued = self.call(kind, element_type::i32, 4 * count);
        queued->call.inputs = {from.block(0, 4 * count)};
        queued->call.outputs = {into.block(0, 4 * count)};
      } else {
        queued = rooted_call(self, kind, root, count, from, into);
      }
      const outcome end = self.run(std::move(queued), what / 256 % 4 != 0);
      ends[static_cast<size_t>(self.rank)].push_back({end.status, self.group->epoch()});
      if (end.status != EP_STATUS_OK) EP_CHECK_EQ(end.status, unsigned{EP_STATUS_PEER_LOST});
      else if (kind != op_kind::all_reduce) EP_CHECK_EQ(wrong_values(self, kind, root, count, self.sequence, into), uint64_t{0});
    }
  });
  const size_t other = dies == 0 ? 1 : 0;
  for (int32_t r = 0; r < size; ++r) {
    if (r == dies) continue;
    EP_CHECK_EQ(ends[static_cast<size_t>(r)].size(), size_t{calls});
    EP_CHECK(ends[static_cast<size_t>(r)] == ends[other]);
  }
}

// Sums that are too short for the kernels have their bits all the same: of NaNs, infinities of both signs, zeros and subnormals, too.
void short_sums_have_the_same_bits(int32_t size) {
  constexpr uint32_t some[] = {0x7fc12345, 0x7f800000, 0x80000000, 0x3f800000, 0x00000001, 0xff800000, 0x7f7fffff, 0xffa00001};
  constexpr uint64_t most = group_inline_bytes / sizeof(uint32_t);
  const auto ranks = static_cast<uint64_t>(size);
  const auto given_bits = [&](int32_t rank, uint64_t i) { return some[(i * 3 + static_cast<uint64_t>(rank) * (i / 8 + 5)) % 8]; };
  run_ranks(size, [&](member& self) {
    const memory from = self.make(4 * most * ranks, false);
    const memory into = self.make(4 * most, false);
    for (const op_kind kind : {op_kind::all_reduce, op_kind::reduce, op_kind::reduce_scatter}) {
      for (uint64_t width = 1; width <= most; ++width) {
        const uint64_t blocks = kind == op_kind::reduce_scatter ? ranks : 1;
        std::vector<std::vector<uint32_t>> inputs(ranks, std::vector<uint32_t>(width * blocks));
        std::vector<const void*> own_blocks;
        for (int32_t r = 0; r < size; ++r) {
          auto& values = inputs[static_cast<size_t>(r)];
          for (uint64_t i = 0; i < values.size(); ++i) values[i] = given_bits(r, i + width);
          own_blocks.push_back(values.data() + (blocks == 1 ? 0 : static_cast<uint64_t>(self.rank) * width));
        }
        std::vector<uint32_t> want(width);
        reduce_elements(want.data(), own_blocks.data(), size, width, element_type::f32, reduce_op::sum, 0, false);
        std::memcpy(from.data, inputs[static_cast<size_t>(self.rank)].data(), 4 * width * blocks);
        const bool takes = kind != op_kind::reduce || self.rank == 1;
        auto queued = self.call(kind, element_type::f32, 4 * width, kind == op_kind::reduce ? 1 : -1);
        for (uint64_t j = 0; j < blocks; ++j) queued->call.inputs.push_back(from.block(4 * width * j, 4 * width));
        if (takes) queued->call.outputs = {into.block(0, 4 * width)};
        EP_CHECK_EQ(self.run(std::move(queued), width % 4 != 0).status, unsigned{EP_STATUS_OK});
        if (takes) EP_CHECK_EQ(std::memcmp(into.data, want.data(), 4 * width), 0);
      }
    }
  });
}

void small_ones_are_measured() {
  run_ranks(2, [](member& self) {
    std::vector<double> samples(2000);
    EP_CHECK_EQ(self.group->measure(measured::all_reduce, 1, 1000, samples.data()), uint64_t{1000});
    EP_CHECK_EQ(self.group->measure(measured::barrier, 1001, 1000, samples.data()), uint64_t{1000});
    EP_CHECK_EQ(self.group->measure(measured::exchange, 0, 1000, samples.data()), uint64_t{1000});
  });
}

} // namespace

int main() {
  const std::vector<uint64_t> counts{0, 1, 11, 12, 13, 2048, 2049, 65536, 65537, 200000};
  for (const int32_t size : {1, 2, 3}) every_kind(size, counts);
  for (const int32_t size : {4, 5}) every_kind(size, {1, 12, 600, 70000});
  every_kind(33, {1, 30, 3000});
  for (const int32_t size : {1, 2, 5}) uneven_all_to_all(size);
  many_at_once(3, 1000);
  for (const int32_t size : {2, 3}) tried_and_queued_keep_their_order(size, 20'000);
  mismatch_is_named();
  // How soon the other one comes is the machine's affair: where it was late, this is tried again with twice the patience.
  double patience_ms = 50;
  while (!a_late_rank_is_named(patience_ms) && patience_ms < 10'000) patience_ms *= 2;
  EP_CHECK(patience_ms < 10'000);
  for (const int32_t size : {2, 3, 5}) {
    for (int32_t dies = 0; dies < size; ++dies) {
      for (const uint64_t count : {uint64_t{1}, uint64_t{5000}, uint64_t{300000}}) {
        a_death(size, dies, 0, count, false);
        a_death(size, dies, 3, count, true);
      }
    }
  }
  for (const op_kind kind : {op_kind::broadcast, op_kind::scatter}) {
    for (const uint64_t count : {uint64_t{1}, uint64_t{600}}) {
      for (const bool dies : {false, true}) a_root_runs_ahead(kind, count, dies);
    }
  }
  for (const bool through_the_thread : {false, true}) others_catch_up(through_the_thread);
  a_mismatch_is_found_later();
  for (const int32_t size : {2, 3}) short_sums_have_the_same_bits(size);
  for (uint32_t seed = 1; seed <= 60; ++seed) a_death_among_small_ones(2 + static_cast<int32_t>(seed % 4), seed);
  small_ones_are_measured();
  return ep::check::finish();
}
