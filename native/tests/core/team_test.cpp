// Barriers and small exchanges of a team, with ranks as threads.
#include "team.hpp"

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "check.hpp"
#include "core/ranks.hpp"
#include "round_marks.hpp"

namespace {

using namespace ep;
using test::member;
using test::run_ranks;

void barriers_hold(int size, int rounds) {
  std::atomic<long> entered{0};
  run_ranks(size, [&](member& self) {
    for (long round = 1; round <= rounds; ++round) {
      entered.fetch_add(1, std::memory_order_relaxed);
      EP_CHECK_EQ(self.pass(*self.everyone).status, unsigned{EP_STATUS_OK});
      // Everybody has entered this round, and nobody can be further than one ahead.
      const long seen = entered.load(std::memory_order_relaxed);
      EP_CHECK(seen >= round * size && seen < (round + 1) * size + size);
    }
    EP_CHECK_EQ(self.everyone->barrier_passed(), static_cast<uint64_t>(rounds));
    EP_CHECK(self.everyone->barrier_missing().empty());
  });
}

struct alignas(64) mark_line {
  uint64_t word = 0;
};

void timed_rounds_pass(int size, uint64_t rounds) {
  std::vector<mark_line> lines(static_cast<size_t>(size));
  run_ranks(size, [&](member& self) {
    round_marks marks{{}, &lines[static_cast<size_t>(self.rank)].word};
    for (int32_t rank = 0; rank < size; ++rank) marks.members.emplace_back(rank, &lines[static_cast<size_t>(rank)].word);
    std::vector<double> samples(rounds, -1);
    for (const uint64_t first : {uint64_t{0}, rounds}) {
      uint64_t reached = 0;
      const wait_result end = timed_rounds(marks, first, rounds, samples.data(), &reached, [&] { return self.pass(*self.everyone); });
      EP_CHECK_EQ(end.status, unsigned{EP_STATUS_OK});
      EP_CHECK_EQ(reached, first + rounds);
    }
    for (const double sample : samples) EP_CHECK(sample >= 0);
  });
}

// What is timed is a barrier only if nobody leaves it whom others have not joined: one that returns at once, and one that skips a round, are found in that round.
void no_barrier_is_found() {
  uint64_t own = 0;
  uint64_t other = 0;
  const round_marks marks{{{0, &own}, {5, &other}}, &own};
  double samples[4]{};
  uint64_t reached = 0;
  const auto run = [&](uint64_t skipped) {
    return timed_rounds(marks, 10, 4, samples, &reached, [&]() -> wait_result {
      if (reached != skipped) other = reached;
      return {EP_STATUS_OK, any_rank, 0};
    });
  };
  EP_CHECK_EQ(run(0).status, unsigned{EP_STATUS_OK});
  EP_CHECK_EQ(reached, 14u);
  other = 9;
  const wait_result end = run(11);
  EP_CHECK_EQ(end.status, unsigned{EP_STATUS_MISMATCH});
  EP_CHECK_EQ(end.rank, 5);
  EP_CHECK_EQ(end.found, 9u);
  EP_CHECK_EQ(reached, 11u);
  EP_CHECK_EQ(run(14).found, 13u);
  EP_CHECK_EQ(reached, 14u);
  // A barrier that ends early is told as it ended, and is no round.
  const wait_result late = timed_rounds(marks, 14, 4, samples, &reached, []() -> wait_result { return {EP_STATUS_TIMEOUT, 5, 3}; });
  EP_CHECK_EQ(late.status, unsigned{EP_STATUS_TIMEOUT});
  EP_CHECK_EQ(late.found, 3u);
  EP_CHECK_EQ(reached, 15u);
}

void exchanges_do_not_mix(int size, int rounds) {
  run_ranks(size, [&](member& self) {
    for (int round = 0; round < rounds; ++round) {
      uint8_t blob[EP_TEAM_EXCHANGE_BYTES];
      std::memset(blob, (self.rank * 7 + round) & 255, sizeof blob);
      self.everyone->exchange_put(blob, sizeof blob);
      EP_CHECK_EQ(self.pass(*self.everyone).status, unsigned{EP_STATUS_OK});
      for (int32_t other = 0; other < size; ++other) {
        const uint8_t* theirs = self.everyone->exchange_get(other);
        const auto want = static_cast<uint8_t>((other * 7 + round) & 255);
        EP_CHECK(theirs[0] == want && theirs[511] == want && theirs[EP_TEAM_EXCHANGE_BYTES - 1] == want);
      }
    }
  });
}

void late_members_are_named() {
  run_ranks(3, [](member& self) {
    if (self.rank == 2) {
      self.in.meet.arrive(); // the others have timed out
      EP_CHECK_EQ(self.pass(*self.everyone).status, unsigned{EP_STATUS_OK});
    } else {
      EP_CHECK_EQ(self.pass(*self.everyone, 20).status, unsigned{EP_STATUS_TIMEOUT});
      EP_CHECK(self.everyone->barrier_under_way());
      const auto missing = self.everyone->barrier_missing();
      EP_CHECK(!missing.empty() && missing.back() == 2);
      self.in.meet.arrive();
      // The same barrier goes on: entering again does not count twice.
      EP_CHECK_EQ(self.pass(*self.everyone).status, unsigned{EP_STATUS_OK});
    }
    EP_CHECK_EQ(self.everyone->barrier_passed(), 1u);
    EP_CHECK_EQ(self.pass(*self.everyone).status, unsigned{EP_STATUS_OK});
  });
}

// The last to arrive may be killed after it was counted and before it told the others: the count alone must let them pass.
void the_count_decides() {
  run_ranks(1, [](member& self) {
    auto made = team::segment_create(2);
    EP_CHECK(made.ok());
    // A world of one cannot hold two members: the other one is played by the test.
    auto lone = rank_context::create(0, 2, 2).value();
    auto joined = team::join(lone, made.value(), {0, 1});
    EP_CHECK(joined.ok());
    team& two = *joined.value();
    EP_CHECK_EQ(two.barrier_enter(), 1u);
    EP_CHECK_EQ(two.barrier_passed(), 0u);
    EP_CHECK(two.barrier_missing() == std::vector<int32_t>{1});
    auto* control = reinterpret_cast<ep_team_control*>(made.value()->data());
    std::atomic_ref<uint64_t>(control->arrived).fetch_add(1);
    EP_CHECK_EQ(two.barrier_passed(), 1u);
    EP_CHECK_EQ(*two.barrier_word(), 0u);
    lone->leave(true);
    (void)self;
  });
}

void wrong_teams_are_refused() {
  run_ranks(2, [](member& self) {
    auto made = team::segment_create(2);
    EP_CHECK(made.ok());
    const auto status = [&](std::vector<int32_t> ranks) {
      auto joined = team::join(self.context, made.value(), std::move(ranks));
      return joined.ok() ? 0u : joined.why().status;
    };
    EP_CHECK_EQ(status({0, 1}), 0u);
    EP_CHECK_EQ(status({1 - self.rank}), unsigned{EP_STATUS_INVALID});
    EP_CHECK_EQ(status({0, 1, 2}), unsigned{EP_STATUS_INVALID});
    EP_CHECK_EQ(status({self.rank}), unsigned{EP_STATUS_MISMATCH});
    auto other = segment::create(4096);
    EP_CHECK(other.ok());
    auto joined = team::join(self.context, other.value(), {0, 1});
    EP_CHECK(!joined.ok() && joined.why().status == EP_STATUS_MISMATCH);
  });
  EP_CHECK(!team::segment_create(0).ok());
  EP_CHECK(!team::segment_create(-3).ok());
}

} // namespace

int main() {
  barriers_hold(1, 100);
  barriers_hold(2, 3000);
  barriers_hold(7, 500);
  timed_rounds_pass(4, 500);
  no_barrier_is_found();
  exchanges_do_not_mix(4, 200);
  late_members_are_named();
  the_count_decides();
  wrong_teams_are_refused();
  EP_CHECK_EQ(segment_count(), 0u);
  return ep::check::finish();
}
