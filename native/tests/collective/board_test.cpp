// What the members of a group decide through a board: epochs, who is taken out, whose memory is moved. All ranks are boards of this thread.
#include "collective/board.hpp"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"

namespace {

using namespace ep;

std::vector<std::unique_ptr<group_board>> boards(int32_t size) {
  std::vector<std::unique_ptr<group_board>> all;
  for (int32_t rank = 0; rank < size; ++rank) {
    auto made = group_board::create({.rank = rank, .size = size, .capacity = size, .nonce = 6, .ranks_on_host = size});
    EP_CHECK(made.ok());
    all.push_back(std::move(made.value()));
  }
  for (const auto& one : all) {
    for (const auto& other : all) {
      if (other != one) EP_CHECK(one->attach(other->rank(), other->handle(), 1).ok());
    }
  }
  return all;
}

// A step of an epoch that is to end is entered, or it is not, for everybody; marks of former epochs mean nothing.
void a_step_is_entered_or_cut() {
  const auto all = boards(3);
  const auto enter = [&](int32_t rank) { return all[static_cast<size_t>(rank)]->enter(1, 0); };
  for (const auto& one : all) EP_CHECK(one->ready() && one->room() && one->enter(1, 0) == entry::made);
  EP_CHECK(enter(0) == entry::made);
  EP_CHECK(all[1]->decide_change(0));
  EP_CHECK(all[1]->entered_or_cut(0, 2));
  EP_CHECK(!all[1]->entered_or_cut(2, 2) && !all[0]->entered_or_cut(2, 2));
  EP_CHECK(enter(2) == entry::cut && enter(2) == entry::cut);
  EP_CHECK(!all[2]->evicted());
  for (const auto& one : all) EP_CHECK(one->view_pending() && one->adopt_next());
  for (const auto& one : all) {
    EP_CHECK(one->ready());
    for (uint64_t step = 1; step <= 2; ++step) EP_CHECK(one->room() && one->enter(1, 0) == entry::made);
  }
  // A rank that was taken out and is told of it late does not hold up those that went on.
  all[0]->evict(1);
  EP_CHECK(all[0]->decide_change(0) && all[0]->adopt_next() && all[2]->adopt_next());
  EP_CHECK(!all[1]->entered_or_cut(2, 3));
  EP_CHECK(all[0]->ready() && all[2]->ready() && enter(2) == entry::made);
  EP_CHECK(enter(1) == entry::evicted);
}

bool changes_view(group_board& board, uint64_t failed_sequence) { return board.decide_change(failed_sequence) && board.adopt_next(); }

// Who keeps decisions died before one of the others had its memory: that one hears of the next view from those that have adopted it, and goes on.
void decisions_out_of_reach() {
  std::vector<std::unique_ptr<group_board>> all;
  for (int32_t rank = 0; rank < 3; ++rank) {
    auto made = group_board::create({.rank = rank, .size = 3, .capacity = 3, .nonce = 6, .ranks_on_host = 3});
    EP_CHECK(made.ok());
    all.push_back(std::move(made.value()));
  }
  for (const auto& one : all) {
    for (const auto& other : all) {
      const bool out_of_reach = one == all[2] && other == all[0];
      if (other != one && !out_of_reach) EP_CHECK(one->attach(other->rank(), other->handle(), 1).ok());
    }
  }
  EP_CHECK(all[1]->reaches_decisions() && !all[2]->reaches_decisions());
  all[1]->evict(0);
  EP_CHECK(!all[2]->decide_change(0) && !all[2]->view_pending());
  EP_CHECK(all[1]->decide_change(0));
  EP_CHECK(!all[2]->view_pending());
  EP_CHECK(all[1]->adopt_next());
  EP_CHECK(all[2]->view_pending() && all[2]->adopt_next() && all[2]->reaches_decisions());
  EP_CHECK(!all[2]->is_active(0) && all[2]->is_active(1));
  for (const int32_t rank : {1, 2}) EP_CHECK(all[static_cast<size_t>(rank)]->ready());
  for (const int32_t rank : {1, 2}) EP_CHECK(all[static_cast<size_t>(rank)]->room() && all[static_cast<size_t>(rank)]->enter(1, 0) == entry::made);
}

// A rank of the same process that is in the middle of writing is awaited: moved memory would be where it writes.
void fenced_beside() {
  const auto all = boards(2);
  EP_CHECK(all[0]->allocate(4096).ok());
  const uint64_t before = all[0]->allocation(0)->handle().nonce;
  EP_CHECK(all[1]->begin_push());
  all[0]->evict(1);
  EP_CHECK(changes_view(*all[0], 0));
  EP_CHECK(all[0]->fencing());
  std::atomic<bool> writes{true};
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(80));
    writes = false;
    all[1]->end_push();
  });
  EP_CHECK(all[0]->fence().ok());
  EP_CHECK(!writes);
  EP_CHECK(!all[0]->fencing());
  EP_CHECK_EQ(all[0]->allocation(0)->handle().nonce, before);
  late.join();
}

// One that comes back looks also for those that were taken out while it was away.
void fenced_after_coming_back() {
  const auto all = boards(3);
  EP_CHECK(all[1]->allocate(4096).ok());
  EP_CHECK(all[2]->begin_push());
  all[0]->evict(1);
  all[0]->evict(2);
  EP_CHECK(changes_view(*all[0], 0));
  auto made = group_board::create({.rank = 1, .size = 3, .capacity = 3, .nonce = 6, .joins = true, .incarnation = 2, .allocations = all[1]->own_memory(), .former = all[1]->peers()});
  EP_CHECK(made.ok());
  group_board& back = *made.value();
  EP_CHECK(back.attach(0, all[0]->handle(), 1).ok());
  EP_CHECK(all[0]->attach(1, back.handle(), 2).ok());
  back.ask_to_join(true);
  group_peer peers[3];
  all[0]->survey(peers);
  EP_CHECK(all[0]->admit({1}, peers, 3, 9));
  EP_CHECK(back.try_join());
  EP_CHECK(back.fencing());
  all[2]->end_push();
  EP_CHECK(back.fence().ok());
  EP_CHECK(!back.fencing());
}

// One that was taken out and wakes up when its place in the table of decisions has another one.
void slept_for_long() {
  const auto all = boards(3);
  all[0]->evict(2);
  EP_CHECK(changes_view(*all[0], 0));
  EP_CHECK(changes_view(*all[1], 0));
  uint64_t sequence = 0;
  while (all[0]->epoch() < 2 + group_views - 1) {
    EP_CHECK(all[0]->repair(++sequence));
    EP_CHECK(all[1]->repair(sequence));
  }
  EP_CHECK(all[0]->repair(++sequence));
  EP_CHECK_EQ(all[0]->epoch(), 2 + group_views);
  EP_CHECK(!changes_view(*all[2], 1'000'000));
  EP_CHECK(changes_view(*all[1], 0));
  EP_CHECK_EQ(all[1]->epoch(), 2 + group_views);
  EP_CHECK_EQ(all[1]->repaired_sequence(), sequence);
  EP_CHECK(all[1]->active() == (std::vector<int32_t>{0, 1}));
}

// Ticks hold 16 bits of the epoch.
void many_views() {
  const auto all = boards(2);
  for (uint64_t sequence = 1; sequence <= 66'000; ++sequence) {
    for (const auto& one : all) {
      if (!one->repair(sequence)) {
        EP_CHECK(false);
        return;
      }
    }
    if (sequence % 1000 != 0) continue;
    for (const auto& one : all) EP_CHECK(one->ready() && one->enter(1, 0) == entry::made);
    for (const auto& one : all) EP_CHECK(one->entered());
  }
}

// Who leaves gives back what it has mapped of others, and its own memory too, but where a member has yet to map it: that one is to find there what became of it.
void gives_back_what_it_mapped() {
  const uint64_t before = segment_count();
  {
    auto all = boards(3);
    EP_CHECK(all[1]->allocate(4096).ok());
    EP_CHECK(all[0]->memory_of(1, 0, 0, 4096) != nullptr);
    const std::weak_ptr<segment> own = all[1]->own_memory().front();
    EP_CHECK_EQ(segment_count(), before + 4);
    all[1]->leave(true);
    EP_CHECK(all[1]->release());
    EP_CHECK(!own.expired()); // of rank 0, which reads what it read
    EP_CHECK_EQ(all[0]->memory_of(1, 0, 0, 4096)[0], 0);
    EP_CHECK(all[0]->gone(1) && !all[0]->gone(2));
    // One that is to come in its place can.
    EP_CHECK(changes_view(*all[0], 0) && all[2]->adopt_next());
    all[0]->leave(true);
    EP_CHECK(all[0]->release());
    EP_CHECK(own.expired());
    EP_CHECK(all[2]->gone(0));
    EP_CHECK(changes_view(*all[2], 0));
    EP_CHECK(all[2]->active() == std::vector<int32_t>{2});
    all[2]->leave(true);
    EP_CHECK(all[2]->release());
    EP_CHECK_EQ(segment_count(), before);
  }
  // Rank 2 comes late.
  auto make = [](int32_t rank) {
    auto made = group_board::create({.rank = rank, .size = 3, .capacity = 3, .nonce = 6, .ranks_on_host = 3});
    EP_CHECK(made.ok());
    return std::move(made.value());
  };
  const auto first = make(0);
  const auto second = make(1);
  const auto late = make(2);
  EP_CHECK(first->attach(1, second->handle(), 1).ok() && second->attach(0, first->handle(), 1).ok());
  const ep_segment_handle handle = first->handle();
  first->leave(true);
  EP_CHECK(!first->release());
  EP_CHECK(late->attach(1, second->handle(), 1).ok() && late->attach(0, handle, 1).ok());
  EP_CHECK(second->attach(2, late->handle(), 1).ok());
  EP_CHECK(late->gone(0) && changes_view(*late, 0) && second->adopt_next());
  EP_CHECK(late->active() == (std::vector<int32_t>{1, 2}));
  // Nobody waits for one that is dead, or out of reach.
  late->lose(1, 1);
  second->leave(false);
  EP_CHECK(second->release());
  late->leave(true);
  EP_CHECK(late->release());
}

} // namespace

int main() {
  gives_back_what_it_mapped();
  a_step_is_entered_or_cut();
  decisions_out_of_reach();
  fenced_beside();
  fenced_after_coming_back();
  slept_for_long();
  many_views();
  return ep::check::finish();
}
