// Barriers and small exchanges of a team, with ranks as threads.
#include "team.hpp"

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "check.hpp"
#include "core/ranks.hpp"

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
  exchanges_do_not_mix(4, 200);
  late_members_are_named();
  the_count_decides();
  wrong_teams_are_refused();
  EP_CHECK_EQ(segment_count(), 0u);
  return ep::check::finish();
}
