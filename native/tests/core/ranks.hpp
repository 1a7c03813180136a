// Ranks as threads of a test, connected to each other as in a program.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "check.hpp"
#include "rank.hpp"
#include "team.hpp"

namespace ep::test {

// All ranks meet here; what one rank published before is visible to the others after.
class meeting {
 public:
  explicit meeting(int size) : size_(size) {}
  void arrive() {
    std::unique_lock lock(mutex_);
    const long turn = turn_;
    if (++here_ == size_) {
      here_ = 0;
      ++turn_;
      changed_.notify_all();
      return;
    }
    changed_.wait(lock, [&] { return turn_ != turn; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  const int size_;
  int here_ = 0;
  long turn_ = 0;
};

struct world {
  explicit world(int size) : size(size), meet(size), handles(static_cast<size_t>(size)) {}
  const int size;
  meeting meet;
  std::vector<ep_segment_handle> handles;     // control segments
  std::vector<ep_segment_handle> exchanged;   // for whatever the test hands round
  ep_segment_handle team_handle{};
};

struct member {
  world& in;
  int32_t rank;
  std::shared_ptr<rank_context> context;
  std::shared_ptr<team> everyone;

  // What a barrier of the program does, with a deadline that only a broken build reaches.
  wait_result pass(team& of, double timeout_ms = 30'000) const {
    const uint64_t target = of.barrier_enter();
    const wait_scope scope = context->waits(nullptr, deadline_after(timeout_ms));
    const wait_result end = wait_word(scope, of.barrier_word(), comparison::ge, target, any_rank);
    if (end.status == EP_STATUS_OK) of.barrier_leave();
    return end;
  }

  std::vector<ep_segment_handle> gather(const ep_segment_handle& own) const {
    in.meet.arrive();
    if (rank == 0) in.exchanged.assign(static_cast<size_t>(in.size), {});
    in.meet.arrive();
    in.exchanged[static_cast<size_t>(rank)] = own;
    in.meet.arrive();
    auto all = in.exchanged;
    in.meet.arrive();
    return all;
  }
};

inline void run_ranks(int size, const std::function<void(member&)>& body) {
  world shared(size);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&shared, &body, rank, size] {
      auto made = rank_context::create(rank, size, size);
      EP_CHECK(made.ok());
      member self{shared, rank, made.value(), nullptr};
      shared.handles[static_cast<size_t>(rank)] = self.context->handle();
      std::shared_ptr<segment> own_team;
      if (rank == 0) {
        auto created = team::segment_create(size);
        EP_CHECK(created.ok());
        own_team = created.value();
        shared.team_handle = own_team->handle();
      }
      shared.meet.arrive();
      EP_CHECK(self.context->connect(shared.handles).ok());
      std::vector<int32_t> ranks;
      for (int32_t r = 0; r < size; ++r) ranks.push_back(r);
      auto opened = segment::open(shared.team_handle);
      EP_CHECK(opened.ok());
      auto joined = team::join(self.context, opened.value(), ranks);
      EP_CHECK(joined.ok());
      self.everyone = joined.value();
      shared.meet.arrive();
      body(self);
      shared.meet.arrive();
      self.context->leave(true);
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace ep::test
