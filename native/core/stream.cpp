#include "stream.hpp"

#include <chrono>
#include <exception>

#include "thread.hpp"
#include "waiting.hpp"

namespace ep {

void stream_event::set() {
  {
    const std::lock_guard lock(mutex_);
    done_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

bool stream_event::wait(const std::atomic<uint32_t>& cancel) {
  std::unique_lock lock(mutex_);
  // Slices: a cancel flag has no way to notify this condition.
  while (!done()) {
    if (cancel.load(std::memory_order_acquire) != 0) return false;
    changed_.wait_for(lock, std::chrono::milliseconds(2));
  }
  return true;
}

namespace {

// HAZARD: an exception that leaves a thread ends the process.
outcome run_task(const host_stream::task& work, const std::atomic<uint32_t>& cancel) {
  try {
    return work(cancel);
  } catch (const std::exception& error) { // std::bad_alloc, or the simt executor without memory for its stacks
    outcome end;
    end.status = EP_STATUS_SYSTEM;
    end.message = error.what();
    return end;
  }
}

} // namespace

result<std::unique_ptr<host_stream>> host_stream::create(completion_sink& sink, int64_t spin_ns) {
  std::unique_ptr<host_stream> made(new host_stream(sink, spin_ns));
  auto started = thread_start("ep-stream", [stream = made.get()] { stream->run(); }, "thread of a host stream; close streams or raise the limit on tasks");
  if (!started.ok()) return started.why();
  made->thread_ = std::move(started.value());
  return made;
}

host_stream::~host_stream() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (running_) running_->value.store(1, std::memory_order_release);
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join(); // not of a stream whose thread could not be started
}

void host_stream::launch(uint64_t operation_id, cancel_ref cancel, task work) {
  depth_.fetch_add(1, std::memory_order_acq_rel);
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back({operation_id, std::move(cancel), std::move(work)});
  }
  arrivals_.fetch_add(1, std::memory_order_release);
  changed_.notify_one();
}

void host_stream::run() {
  uint32_t seen = 0;
  for (;;) {
    entry next;
    bool drop = false;
    {
      std::unique_lock lock(mutex_);
      if (queue_.empty() && !stopping_ && spin_ns_ > 0) {
        lock.unlock();
        const int64_t end = clock_now_ns() + spin_ns_;
        while (arrivals_.load(std::memory_order_acquire) == seen && clock_now_ns() < end) cpu_relax();
        lock.lock();
      }
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      next = std::move(queue_.front());
      queue_.pop_front();
      ++seen;
      drop = stopping_ || next.cancel->value.load(std::memory_order_acquire) != 0;
      if (!drop) running_ = next.cancel;
    }
    outcome end;
    if (drop) {
      end.status = EP_STATUS_ABORTED;
    } else {
      end = run_task(next.work, next.cancel->value);
    }
    next.work = nullptr; // releases what the task kept alive before anyone hears of its end
    {
      const std::lock_guard lock(mutex_);
      running_ = nullptr;
    }
    depth_.fetch_sub(1, std::memory_order_acq_rel);
    sink_.complete(next.operation_id, end);
  }
}

} // namespace ep
