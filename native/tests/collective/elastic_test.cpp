// Process groups whose members change: ranks that are evicted, replaced, taken in, that come back; groups that agree anew after a failure. Ranks are threads.
#include "collective/group.hpp"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <functional>
#include <map>
#include <thread>

#include "check.hpp"
#include "ends.hpp"

// A rank that has been taken out may still read what it was reading while the others write over it. It finds out before it returns any of that
// (collective_run::advance): a sequence lock, which this sanitizer does not know.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race:ep::group_board::enter\nrace:ep::collective_run::publish_call\nrace:ep::group_board::survey\n";
}

namespace {

using namespace ep;

constexpr uint64_t arena_bytes = 1u << 20;

// Where ranks find each other's segments: the latest process of each.
class meeting {
 public:
  struct entry {
    ep_segment_handle handle;
    uint32_t incarnation = 0;
  };
  explicit meeting(int32_t capacity) : entries_(static_cast<size_t>(capacity)) {}
  void publish(int32_t rank, const entry& one) {
    const std::lock_guard lock(mutex_);
    entries_[static_cast<size_t>(rank)] = one;
  }
  std::vector<entry> all() {
    const std::lock_guard lock(mutex_);
    return entries_;
  }

 private:
  std::mutex mutex_;
  std::vector<entry> entries_;
};

struct rank_side {
  meeting& place;
  group_options options;
  bool evicts = false;
  ends sink{};
  std::shared_ptr<collective_group> group{};
  uint64_t next_id = 1;
  uint64_t sequence = 0;
  double timeout_ms = 20'000;
  std::vector<uint32_t> seen{};

  void open() {
    auto made = collective_group::create(sink, options, evicts);
    EP_CHECK(made.ok());
    group = made.value();
    if (options.allocations.empty()) EP_CHECK(group->allocate(arena_bytes).ok());
    seen.assign(static_cast<size_t>(options.capacity), 0);
    place.publish(options.rank, {group->handle(), options.incarnation});
  }
  void look_for_peers() {
    const auto all = place.all();
    for (int32_t r = 0; r < options.capacity; ++r) {
      const auto at = static_cast<size_t>(r);
      if (r == options.rank || all[at].incarnation <= seen[at]) continue;
      seen[at] = all[at].incarnation;
      EP_CHECK(group->attach(r, all[at].handle, all[at].incarnation).ok());
    }
  }
  outcome submit(std::unique_ptr<queued_call> queued) {
    const uint64_t id = queued->operation_id = next_id++;
    group->submit(std::move(queued));
    const outcome end = sink.wait(id);
    last = id;
    return end;
  }
  uint64_t last = 0;

  outcome sum(int32_t* value) {
    auto queued = std::make_unique<queued_call>();
    queued->call.sequence = ++sequence;
    queued->call.kind = op_kind::all_reduce;
    queued->call.dtype = element_type::i32;
    queued->call.bytes = 4;
    queued->timeout_ms = timeout_ms;
    queued->borrowed = true;
    queued->call.inputs = queued->call.outputs = {{reinterpret_cast<uint8_t*>(value), 4, group_no_segment, 0}};
    const std::vector<call_block> targets = queued->call.outputs;
    const outcome end = submit(std::move(queued));
    if (end.status == EP_STATUS_OK) EP_CHECK(group->collect(last, targets));
    return end;
  }
  void sums_over(const std::vector<int32_t>& ranks) {
    const auto part = [](int32_t r) { return 1 << (r % 24); };
    int32_t value = part(options.rank);
    EP_CHECK_EQ(sum(&value).status, unsigned{EP_STATUS_OK});
    int32_t want = 0;
    for (const int32_t r : ranks) want += part(r);
    EP_CHECK_EQ(value, want);
    EP_CHECK(group->active() == ranks);
  }
  outcome change(membership_change wanted) {
    auto queued = std::make_unique<queued_call>();
    queued->call.sequence = ++sequence;
    queued->call.kind = op_kind::membership;
    queued->timeout_ms = timeout_ms;
    queued->call.change = std::make_unique<membership_change>(std::move(wanted));
    return submit(std::move(queued));
  }
  // Asks all until all say that `rank` waits to be taken in.
  void await_joining(const std::vector<int32_t>& ranks) {
    for (;;) {
      look_for_peers();
      EP_CHECK_EQ(change({}).status, unsigned{EP_STATUS_OK});
      const auto peers = group->membership_of(last).peers;
      bool all = true;
      for (const int32_t r : ranks) all = all && peers[static_cast<size_t>(r)].state == peer_state::joining;
      if (all) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  void take_in(const std::vector<int32_t>& ranks, int32_t size = 0) {
    await_joining(ranks);
    EP_CHECK_EQ(change({.admitted = ranks, .size = size}).status, unsigned{EP_STATUS_OK});
    EP_CHECK(group->membership_of(last).admitted);
  }
  void join(const std::vector<int32_t>& members) {
    for (;;) {
      look_for_peers();
      size_t found = 0;
      for (const int32_t r : members) found += seen[static_cast<size_t>(r)] != 0 ? 1 : 0;
      if (found == members.size()) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const uint64_t id = next_id++;
    group->join(id, nullptr, 20'000);
    const outcome end = sink.wait(id);
    EP_CHECK_EQ(end.status, unsigned{EP_STATUS_OK});
    sequence = end.expected;
  }
  // Comes back as another process would, with the memory that it had.
  void come_back(const std::vector<int32_t>& members) {
    options.allocations = group->own_memory();
    options.former = group->peers();
    options.joins = true;
    ++options.incarnation;
    group->close(true);
    open();
    join(members);
  }
  outcome send(int32_t peer, int32_t value) {
    auto message = std::make_unique<message_send>();
    const uint64_t id = message->operation_id = next_id++;
    message->timeout_ms = timeout_ms;
    message->peer = peer;
    message->bytes = 4;
    message->copy.resize(4);
    std::memcpy(message->copy.data(), &value, 4);
    message->data = message->copy.data();
    group->send(std::move(message));
    return sink.wait(id);
  }
  int32_t receive(int32_t peer) {
    auto message = std::make_unique<message_receive>();
    const uint64_t id = message->operation_id = next_id++;
    message->timeout_ms = timeout_ms;
    message->peer = peer;
    message->bytes = 4;
    group->receive(std::move(message));
    EP_CHECK_EQ(sink.wait(id).status, unsigned{EP_STATUS_OK});
    const auto bytes = group->take_received(id);
    int32_t value = 0;
    if (bytes.size() == 4) std::memcpy(&value, bytes.data(), 4);
    return value;
  }
  void messages_with(const std::vector<int32_t>& ranks) {
    for (const int32_t r : ranks) {
      if (r == options.rank) continue;
      // Both directions: the lower rank speaks first.
      if (options.rank < r) {
        EP_CHECK_EQ(send(r, 100 * options.rank + r).status, unsigned{EP_STATUS_OK});
        EP_CHECK_EQ(receive(r), 100 * r + options.rank);
      } else {
        EP_CHECK_EQ(receive(r), 100 * r + options.rank);
        EP_CHECK_EQ(send(r, 100 * options.rank + r).status, unsigned{EP_STATUS_OK});
      }
    }
  }
};

std::vector<int32_t> without(int32_t size, int32_t rank) {
  std::vector<int32_t> ranks;
  for (int32_t r = 0; r < size; ++r) {
    if (r != rank) ranks.push_back(r);
  }
  return ranks;
}

std::vector<int32_t> range(int32_t from, int32_t to) {
  std::vector<int32_t> ranks;
  for (int32_t r = from; r < to; ++r) ranks.push_back(r);
  return ranks;
}

using body = std::function<void(rank_side&, std::barrier<>&)>;

// `first` members of `capacity` ranks; the body runs on all.
void run_elastic(int32_t capacity, int32_t first, bool evicts, const body& run) {
  meeting place(capacity);
  std::barrier<> meet(capacity);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < capacity; ++rank) {
    threads.emplace_back([&, rank] {
      group_options options{.rank = rank, .size = first, .capacity = capacity, .nonce = 5, .ranks_on_host = capacity};
      if (rank >= first) options.incarnation = 2;
      options.joins = rank >= first;
      rank_side self{place, options, evicts};
      if (rank < first) self.open();
      meet.arrive_and_wait();
      if (rank < first) self.look_for_peers();
      run(self, meet);
      meet.arrive_and_wait();
      if (self.group != nullptr) self.group->close(true);
    });
  }
  for (auto& thread : threads) thread.join();
}

// Evicted in the middle of a row of calls, whoever it is; comes back, and all go on, four times.
void evicted_and_back(int32_t size, int32_t who) {
  const auto others = without(size, who);
  const auto all = without(size, -1);
  run_elastic(size, size, false, [&](rank_side& self, std::barrier<>& meet) {
    for (int round = 0; round < 4; ++round) {
      for (int i = 0; i < 5; ++i) self.sums_over(all);
      meet.arrive_and_wait();
      if (self.options.rank == who) {
        meet.arrive_and_wait();
        int32_t value = 1;
        EP_CHECK_EQ(self.sum(&value).status, unsigned{EP_STATUS_EVICTED});
        self.come_back(others);
      } else {
        EP_CHECK_EQ(self.change({.evicted = {who}}).status, unsigned{EP_STATUS_OK});
        EP_CHECK(self.group->active() == others);
        self.sums_over(others);
        EP_CHECK_EQ(self.send(who, 1).status, unsigned{EP_STATUS_PEER_LOST});
        meet.arrive_and_wait();
        self.take_in({who});
      }
      self.sums_over(all);
      self.messages_with(all);
    }
  });
}

// One after the other comes in the place of a rank that has died. Nobody who stays keeps anything of the dead.
void replaced(int32_t size, int32_t who) {
  const auto others = without(size, who);
  const auto all = without(size, -1);
  std::atomic<uint64_t> first{0};
  const uint64_t before = segment_count();
  run_elastic(size, size, false, [&](rank_side& self, std::barrier<>& meet) {
    const bool comes = self.options.rank == who;
    for (int round = 0; round < 4; ++round) {
      self.sums_over(all);
      if (comes) {
        self.group->close(false);
        self.group.reset();
        ++self.options.incarnation;
        self.options.joins = true;
        self.open();
        meet.arrive_and_wait();
        self.join(others);
      } else {
        meet.arrive_and_wait();
        int32_t value = 1;
        const uint32_t status = self.sum(&value).status;
        EP_CHECK(status == EP_STATUS_OK || status == EP_STATUS_PEER_LOST);
        self.sums_over(others);
        self.take_in({who});
      }
      self.sums_over(all);
      self.messages_with(all);
      meet.arrive_and_wait();
      if (comes && round == 0) first = segment_count();
      if (comes) EP_CHECK_EQ(segment_count(), first.load());
      meet.arrive_and_wait();
    }
  });
  EP_CHECK_EQ(segment_count(), before);
}

// While it makes another call, which may be anywhere.
void evicted_in_a_call(int32_t size, int32_t who) {
  const auto others = without(size, who);
  run_elastic(size, size, false, [&](rank_side& self, std::barrier<>&) {
    if (self.options.rank == who) {
      uint32_t status = EP_STATUS_OK;
      for (int32_t value; status == EP_STATUS_OK;) {
        value = 1 << who;
        status = self.sum(&value).status;
      }
      EP_CHECK_EQ(status, unsigned{EP_STATUS_EVICTED});
      self.come_back(others);
    } else {
      for (int i = 0; i < 3; ++i) self.sums_over(without(size, -1));
      EP_CHECK_EQ(self.change({.evicted = {who}}).status, unsigned{EP_STATUS_OK});
      self.sums_over(others);
      self.take_in({who});
    }
    self.sums_over(without(size, -1));
  });
}

// It takes part in being taken out, so that its calls before have ended, too.
void left_in_order(int32_t size, int32_t who) {
  const auto others = without(size, who);
  const auto all = without(size, -1);
  run_elastic(size, size, false, [&](rank_side& self, std::barrier<>&) {
    for (int round = 0; round < 8; ++round) {
      self.sums_over(all);
      const outcome end = self.change({.evicted = {who}, .repairs = round % 2 == 0});
      if (self.options.rank == who) {
        EP_CHECK_EQ(end.status, unsigned{EP_STATUS_EVICTED});
        self.come_back(others);
      } else {
        EP_CHECK_EQ(end.status, unsigned{EP_STATUS_OK});
        self.sums_over(others);
        self.take_in({who});
      }
      self.sums_over(all);
    }
  });
}

// HAZARD: what these tests show needs all but one rank to come before the first loses its patience. How soon they come is the machine's affair: where one
// was later, nothing has been shown, and they try again with twice the patience.
void with_patience(double least_ms, const std::function<bool(double)>& shown) {
  double patience_ms = least_ms;
  while (!shown(patience_ms) && patience_ms < 10'000) patience_ms *= 2;
  EP_CHECK(patience_ms < 10'000);
}

// Who does not come in time is left behind, if the group is so made: the call ends alike on the others. False: another one was late, too.
bool straggler(int32_t size, int32_t who, double patience_ms) {
  const auto others = without(size, who);
  std::vector<std::vector<uint32_t>> statuses(static_cast<size_t>(size));
  std::atomic<bool> alone{true};
  run_elastic(size, size, true, [&](rank_side& self, std::barrier<>& meet) {
    self.sums_over(without(size, -1));
    self.timeout_ms = patience_ms;
    int32_t value = 1;
    if (self.options.rank == who) {
      meet.arrive_and_wait();
      if (!alone) return;
      meet.arrive_and_wait();
      EP_CHECK_EQ(self.sum(&value).status, unsigned{EP_STATUS_EVICTED});
      return;
    }
    const outcome end = self.sum(&value);
    const auto lost = self.group->failure_of(self.last).lost;
    const auto active = self.group->active();
    if (end.status == EP_STATUS_EVICTED || active != others) alone = false;
    if (end.status != EP_STATUS_EVICTED) EP_CHECK(std::ranges::find(active, who) == active.end());
    meet.arrive_and_wait();
    if (!alone) return;
    statuses[static_cast<size_t>(self.options.rank)].push_back(end.status);
    if (end.status == EP_STATUS_PEER_LOST) EP_CHECK(lost == std::vector<int32_t>{who});
    self.timeout_ms = 20'000;
    self.sums_over(others);
    meet.arrive_and_wait();
  });
  if (!alone) return false;
  for (const int32_t r : others) EP_CHECK(statuses[static_cast<size_t>(r)] == statuses[static_cast<size_t>(others[0])]);
  return true;
}

// A call that timed out poisons the group until all take out who did not come.
void repaired(int32_t size, int32_t who) {
  const auto others = without(size, who);
  run_elastic(size, size, false, [&](rank_side& self, std::barrier<>& meet) {
    for (int i = 0; i < 3; ++i) self.sums_over(without(size, -1));
    int32_t value = 1;
    if (self.options.rank == who) {
      meet.arrive_and_wait();
      EP_CHECK_EQ(self.sum(&value).status, unsigned{EP_STATUS_EVICTED});
      return;
    }
    self.timeout_ms = 30 + 10 * self.options.rank;
    const outcome end = self.sum(&value);
    EP_CHECK(end.status == EP_STATUS_TIMEOUT || end.status == EP_STATUS_ABORTED);
    EP_CHECK_EQ(self.sum(&value).status, unsigned{EP_STATUS_BUSY});
    self.timeout_ms = 20'000;
    EP_CHECK_EQ(self.change({.evicted = {who}, .repairs = true}).status, unsigned{EP_STATUS_OK});
    for (int i = 0; i < 3; ++i) self.sums_over(others);
    meet.arrive_and_wait();
  });
}

// Without anybody leaving: all but one gave up, and that one has made fewer calls, or more.
void repaired_together(int32_t size) {
  run_elastic(size, size, false, [&](rank_side& self, std::barrier<>& meet) {
    const auto all = without(size, -1);
    self.sums_over(all);
    int32_t value = 1;
    if (self.options.rank == size - 1) {
      meet.arrive_and_wait(); // the others have given up
    } else {
      self.timeout_ms = 40;
      const outcome end = self.sum(&value);
      EP_CHECK(end.status == EP_STATUS_TIMEOUT || end.status == EP_STATUS_ABORTED);
      meet.arrive_and_wait();
    }
    self.timeout_ms = 20'000;
    // Whatever numbers of calls the ranks are at, as long as each has made its own.
    if (self.options.rank == size - 1 && size > 2) {
      // All had come to the one that they gave up: it may still find their parts.
      uint32_t status = self.sum(&value).status;
      if (status == EP_STATUS_OK) status = self.sum(&value).status;
      EP_CHECK_EQ(status, unsigned{EP_STATUS_ABORTED});
      EP_CHECK_EQ(self.sum(&value).status, unsigned{EP_STATUS_BUSY});
    }
    const outcome end = self.change({.repairs = true});
    EP_CHECK_EQ(end.status, unsigned{EP_STATUS_OK});
    EP_CHECK(end.expected >= self.sequence);
    self.sequence = end.expected;
    for (int i = 0; i < 3; ++i) self.sums_over(all);
  });
}

// The others agree anew under the number of a call that one has given up before it heard of that: it has not given up what they make now. False: not all of them came to the
// call that they gave up, and the last gave up the same.
bool repaired_at_a_call_given_up(int32_t size, double patience_ms) {
  const auto all = without(size, -1);
  const int32_t last = size - 1;
  std::atomic<bool> all_came{true};
  run_elastic(size, size, false, [&](rank_side& self, std::barrier<>& meet) {
    self.sums_over(all);
    int32_t value = 1;
    // Each but the last gives up its call, then the last its next one: the number that the others come to now.
    if (self.options.rank == last) {
      meet.arrive_and_wait();
      const uint32_t status = self.sum(&value).status;
      if (status == EP_STATUS_ABORTED) all_came = false;
      else EP_CHECK_EQ(status, unsigned{EP_STATUS_OK});
      EP_CHECK_EQ(self.sum(&value).status, all_came ? uint32_t{EP_STATUS_ABORTED} : uint32_t{EP_STATUS_BUSY});
      meet.arrive_and_wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(60)); // the others wait, and look why
    } else {
      self.timeout_ms = patience_ms;
      const outcome end = self.sum(&value);
      EP_CHECK(end.status == EP_STATUS_TIMEOUT || end.status == EP_STATUS_ABORTED);
      meet.arrive_and_wait();
      meet.arrive_and_wait();
    }
    self.timeout_ms = 20'000;
    const outcome end = self.change({.repairs = true});
    EP_CHECK_EQ(end.status, unsigned{EP_STATUS_OK});
    self.sequence = end.expected;
    self.sums_over(all);
  });
  return all_came;
}

// Ranks that were not there at first, one after the other or at once; the numbering of calls goes on where the group is.
void grows(int32_t first, int32_t capacity, bool at_once) {
  run_elastic(capacity, first, false, [&](rank_side& self, std::barrier<>& meet) {
    const int32_t rank = self.options.rank;
    int32_t size = first;
    if (rank < first) {
      self.sums_over(without(first, -1));
      EP_CHECK_EQ(self.change({.size = capacity}).status, unsigned{EP_STATUS_OK});
      EP_CHECK_EQ(self.group->size(), capacity);
      self.sums_over(without(first, -1));
    }
    for (int32_t step = at_once ? capacity : first + 1; step <= capacity; ++step) {
      std::vector<int32_t> added;
      for (int32_t r = size; r < step; ++r) added.push_back(r);
      if (rank < size) {
        self.take_in(added);
      } else if (rank < step) {
        self.open();
        // Until it is taken in, it is alone.
        self.sums_over({rank});
        self.join(without(step, rank));
      }
      size = step;
      if (rank < size) {
        self.sums_over(without(size, -1));
        // Between all pairs of many ranks they take longer than any limit where threads outnumber cores by far: the last few are old ones and new ones.
        if (rank >= size - 6) self.messages_with(range(std::max(size - 6, 0), size));
      }
      meet.arrive_and_wait();
    }
  });
}

// The most that a group may have, one of which leaves.
void as_many_as_there_may_be() {
  const int32_t last = group_ranks - 1;
  run_elastic(group_ranks, group_ranks, false, [&](rank_side& self, std::barrier<>& meet) {
    self.sums_over(without(group_ranks, -1));
    meet.arrive_and_wait(); // so many threads on few cores: the last may be later with its sum than those who take it out wait for it
    const outcome end = self.change({.evicted = {last}});
    if (self.options.rank == last) {
      EP_CHECK_EQ(end.status, unsigned{EP_STATUS_EVICTED});
      return;
    }
    EP_CHECK_EQ(end.status, unsigned{EP_STATUS_OK});
    self.sums_over(without(group_ranks, last));
  });
}

// One that does not ask is not taken in, and nothing changes.
void not_ready() {
  run_elastic(3, 2, false, [&](rank_side& self, std::barrier<>& meet) {
    if (self.options.rank == 2) self.open();
    meet.arrive_and_wait();
    self.look_for_peers();
    if (self.options.rank < 2) {
      EP_CHECK_EQ(self.change({.admitted = {2}, .size = 3}).status, unsigned{EP_STATUS_OK});
      const auto end = self.group->membership_of(self.last);
      EP_CHECK(!end.admitted);
      EP_CHECK(end.peers[2].state == peer_state::connected);
      EP_CHECK_EQ(self.group->size(), 2);
      self.sums_over({0, 1});
    }
  });
}

// Taken in and, because it did not come, out again: it hears of that while it waits, and may begin anew.
void taken_out_before_it_came() {
  run_elastic(2, 1, true, [&](rank_side& self, std::barrier<>& meet) {
    if (self.options.rank == 1) self.open();
    meet.arrive_and_wait();
    if (self.options.rank == 1) {
      // Does not know the member: it cannot follow.
      self.group->join(7, nullptr, 20'000);
      EP_CHECK_EQ(self.sink.wait(7).status, unsigned{EP_STATUS_EVICTED});
      self.next_id = 8;
      self.come_back({0});
    } else {
      self.take_in({1}, 2);
      self.timeout_ms = 50;
      int32_t value = 1;
      EP_CHECK_EQ(self.sum(&value).status, unsigned{EP_STATUS_OK});
      EP_CHECK(self.group->active() == std::vector<int32_t>{0});
      self.timeout_ms = 20'000;
      self.take_in({1});
    }
    self.sums_over({0, 1});
  });
}

} // namespace

int main() {
  taken_out_before_it_came();
  for (const int32_t size : {2, 3, 5}) {
    for (int32_t who = 0; who < size; ++who) {
      evicted_and_back(size, who);
      replaced(size, who);
      evicted_in_a_call(size, who);
      left_in_order(size, who);
      with_patience(60, [&](double patience_ms) { return straggler(size, who, patience_ms); });
      repaired(size, who);
    }
    repaired_together(size);
    with_patience(40, [&](double patience_ms) { return repaired_at_a_call_given_up(size, patience_ms); });
  }
  grows(1, 2, true);
  grows(2, 5, true);
  grows(2, 5, false);
  grows(62, 66, true); // masks of more than one word
  as_many_as_there_may_be();
  not_ready();
  return ep::check::finish();
}
