// A host stream: a thread that runs kernels in the order in which they were launched.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "operation.hpp"
#include "status.hpp"

namespace ep {

// Marks a point of one stream for another to wait for.
class stream_event {
 public:
  void set();
  bool done() const { return done_.load(std::memory_order_acquire); }
  // False when cancelled first.
  bool wait(const std::atomic<uint32_t>& cancel);

 private:
  std::atomic<bool> done_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
};

class host_stream {
 public:
  using task = std::function<outcome(const std::atomic<uint32_t>& cancel)>;

  // The sink must outlive the stream. `spin_ns`: how long an idle stream looks for the next kernel before it sleeps. Fails where no thread can be started.
  static result<std::unique_ptr<host_stream>> create(completion_sink& sink, int64_t spin_ns);
  // Cancels what runs, drops what waits (EP_STATUS_ABORTED each), joins.
  ~host_stream();

  // Runs after everything launched before. The task's captures live until it has ended. A task that throws ends with EP_STATUS_SYSTEM.
  void launch(uint64_t operation_id, cancel_ref cancel, task work);
  // Launched but not ended.
  uint64_t depth() const { return depth_.load(std::memory_order_acquire); }

 private:
  struct entry {
    uint64_t operation_id;
    cancel_ref cancel;
    task work;
  };
  host_stream(completion_sink& sink, int64_t spin_ns) : sink_(sink), spin_ns_(spin_ns) {}
  void run();

  completion_sink& sink_;
  int64_t spin_ns_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<entry> queue_;
  cancel_ref running_;
  std::atomic<uint64_t> depth_{0};
  std::atomic<uint32_t> arrivals_{0}; // polled while spinning
  bool stopping_ = false;
  std::thread thread_;
};

} // namespace ep
