// Streams and events of the stand-in for a GPU: see host_device.cpp. Each stream is a thread that runs what is put on it, in order.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ep::shim {

class queue;

// All streams: freeing waits for them, as it does for a device.
struct all_queues {
  std::mutex mutex;
  std::vector<queue*> queues;
};
inline all_queues& queues() {
  static auto* made = new all_queues;
  return *made;
}

using task = std::function<void()>;

struct recorded {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t records = 0; // how often it was recorded, and up to which of these the streams have come
  uint64_t reached = 0;
  std::chrono::steady_clock::time_point when{};
};

class queue {
 public:
  queue() : thread_([this] { run(); }) {}
  ~queue() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void add(task next) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(next));
    }
    changed_.notify_all();
  }
  void finish() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return tasks_.empty() && !busy_; });
  }
  // Only the thread that launches touches it.
  std::unique_ptr<std::vector<task>> captured;

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const task next = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      lock.unlock();
      next();
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<task> tasks_;
  bool stopping_ = false;
  bool busy_ = false;
  std::thread thread_;
};

inline void finish_all() {
  const std::lock_guard lock(queues().mutex);
  for (queue* each : queues().queues) each->finish();
}

inline queue& queue_at(void* stream) { return *static_cast<queue*>(stream); }

// Always 0, CUDA's success.
inline int put_on(void* stream, task next) {
  queue& on = queue_at(stream);
  if (on.captured) on.captured->push_back(std::move(next));
  else on.add(std::move(next));
  return 0;
}

} // namespace ep::shim
