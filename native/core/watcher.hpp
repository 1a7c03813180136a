// Watches conditions for JS, which must never wait natively itself: one thread per rank, asleep unless something is being watched.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "operation.hpp"
#include "rank.hpp"

namespace ep {

struct watch {
  uint64_t operation_id;
  cancel_ref cancel;
  int64_t deadline_ns;
  std::vector<int32_t> awaited;               // ranks whose death ends the watch; empty: any rank
  std::function<bool(outcome&)> ready;        // fills in what was found, also when it returns false. HAZARD: as sleeper_list::sleeper::holds
};

class watcher {
 public:
  // The sink must outlive the watcher.
  watcher(std::shared_ptr<rank_context> context, completion_sink& sink);
  ~watcher(); // ends what is still watched with EP_STATUS_CLOSED

  // Ends the watch with EP_STATUS_SYSTEM where the thread cannot be started.
  void submit(watch item);
  // After a cancel flag was set: look at once.
  void nudge();

 private:
  void run();
  bool look(watch& item, outcome& end) const;

  std::shared_ptr<rank_context> context_;
  completion_sink& sink_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<watch> arriving_;
  bool stopping_ = false;
  std::thread thread_;
};

} // namespace ep
