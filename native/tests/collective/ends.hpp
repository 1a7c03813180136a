// Where the calls of a rank of a test end.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>

#include "operation.hpp"

namespace ep {

class ends final : public completion_sink {
 public:
  void complete(uint64_t id, const outcome& end) override {
    const std::lock_guard lock(mutex_);
    ended_[id] = end;
    changed_.notify_all();
  }
  outcome wait(uint64_t id) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(60), [&] { return ended_.contains(id); })) {
      outcome end;
      end.status = EP_STATUS_PENDING;
      return end;
    }
    return ended_[id];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, outcome> ended_;
};

} // namespace ep
