// Host streams and the watcher: order, cancellation, ends that always come, and no completion twice.
#include "stream.hpp"
#include "watcher.hpp"

#include <chrono>
#include <condition_variable>
#include <map>
#include <stdexcept>
#include <thread>

#include "check.hpp"
#include "core/ranks.hpp"

namespace {

using namespace ep;
using namespace std::chrono_literals;

// Collects ends; every operation must end exactly once.
class collecting_sink final : public completion_sink {
 public:
  void complete(uint64_t operation_id, const outcome& end) override {
    {
      const std::lock_guard lock(mutex_);
      EP_CHECK(ends_.find(operation_id) == ends_.end());
      ends_[operation_id] = end;
    }
    changed_.notify_all();
  }
  outcome await(uint64_t operation_id) {
    std::unique_lock lock(mutex_);
    const bool came = changed_.wait_for(lock, 30s, [&] { return ends_.count(operation_id) != 0; });
    EP_CHECK(came);
    return came ? ends_[operation_id] : outcome{};
  }
  size_t count() {
    const std::lock_guard lock(mutex_);
    return ends_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, outcome> ends_;
};

cancel_ref flag() { return std::make_shared<cancel_flag>(); }

std::unique_ptr<host_stream> stream_of(completion_sink& sink, int64_t spin_ns) { return std::move(host_stream::create(sink, spin_ns).value()); }

void kernels_run_in_order(int64_t spin_ns) {
  collecting_sink sink;
  const auto stream = stream_of(sink, spin_ns);
  std::vector<uint64_t> order;
  for (uint64_t id = 1; id <= 500; ++id) {
    stream->launch(id, flag(), [&order, id](const std::atomic<uint32_t>&) {
      order.push_back(id);
      outcome end;
      end.found = id * 3;
      return end;
    });
  }
  EP_CHECK_EQ(sink.await(500).found, uint64_t{1500});
  EP_CHECK_EQ(order.size(), size_t{500});
  for (uint64_t id = 1; id <= order.size(); ++id) EP_CHECK_EQ(order[id - 1], id);
  EP_CHECK_EQ(stream->depth(), uint64_t{0});
}

void a_cancelled_kernel_never_starts() {
  collecting_sink sink;
  const auto stream = stream_of(sink, 0);
  std::atomic<bool> gate{false};
  std::atomic<bool> ran{false};
  stream->launch(1, flag(), [&](const std::atomic<uint32_t>&) {
    while (!gate.load()) std::this_thread::yield();
    return outcome{};
  });
  const cancel_ref cancel = flag();
  stream->launch(2, cancel, [&](const std::atomic<uint32_t>&) {
    ran = true;
    return outcome{};
  });
  cancel->value = 1;
  gate = true;
  EP_CHECK_EQ(sink.await(2).status, unsigned{EP_STATUS_ABORTED});
  EP_CHECK(!ran.load());
}

// The end of a stream cuts off what runs, drops what waits, and tells of every one of them.
void the_end_of_a_stream_ends_everything() {
  collecting_sink sink;
  auto held = std::make_shared<int>(1);
  {
    const auto stream = stream_of(sink, 0);
    std::atomic<bool> began{false};
    stream->launch(1, flag(), [&began, held](const std::atomic<uint32_t>& cancel) {
      began = true;
      while (cancel.load() == 0) std::this_thread::yield();
      outcome end;
      end.status = EP_STATUS_ABORTED;
      return end;
    });
    for (uint64_t id = 2; id <= 20; ++id) stream->launch(id, flag(), [held](const std::atomic<uint32_t>&) { return outcome{}; });
    while (!began.load()) std::this_thread::yield();
  }
  EP_CHECK_EQ(sink.count(), size_t{20});
  for (uint64_t id = 1; id <= 20; ++id) EP_CHECK_EQ(sink.await(id).status, unsigned{EP_STATUS_ABORTED});
  EP_CHECK_EQ(held.use_count(), 1L); // what tasks kept alive is free again
}

// What a task throws ends its operation, not the process.
void a_task_may_throw() {
  collecting_sink sink;
  const auto stream = stream_of(sink, 0);
  stream->launch(1, flag(), [](const std::atomic<uint32_t>&) -> outcome { throw std::runtime_error("no memory for stacks"); });
  stream->launch(2, flag(), [](const std::atomic<uint32_t>&) { return outcome{}; });
  const outcome thrown = sink.await(1);
  EP_CHECK_EQ(thrown.status, unsigned{EP_STATUS_SYSTEM});
  EP_CHECK_EQ(thrown.message, std::string("no memory for stacks"));
  EP_CHECK_EQ(sink.await(2).status, unsigned{EP_STATUS_OK});
}

void an_event_orders_two_streams() {
  collecting_sink sink;
  const auto first = stream_of(sink, 0);
  const auto second = stream_of(sink, 0);
  const auto event = std::make_shared<stream_event>();
  std::atomic<int> value{0};
  second->launch(1, flag(), [event](const std::atomic<uint32_t>& cancel) {
    outcome end;
    if (!event->wait(cancel)) end.status = EP_STATUS_ABORTED;
    return end;
  });
  second->launch(2, flag(), [&](const std::atomic<uint32_t>&) {
    outcome end;
    end.found = static_cast<uint64_t>(value.load());
    return end;
  });
  first->launch(3, flag(), [&](const std::atomic<uint32_t>&) {
    std::this_thread::sleep_for(20ms);
    value = 7;
    event->set();
    return outcome{};
  });
  EP_CHECK_EQ(sink.await(2).found, uint64_t{7});
  EP_CHECK(event->done());
  // A wait for an event that never comes ends by cancellation.
  const auto never = std::make_shared<stream_event>();
  const cancel_ref cancel = flag();
  second->launch(4, cancel, [never](const std::atomic<uint32_t>& cancelled) {
    outcome end;
    if (!never->wait(cancelled)) end.status = EP_STATUS_ABORTED;
    return end;
  });
  std::this_thread::sleep_for(5ms);
  cancel->value = 1;
  EP_CHECK_EQ(sink.await(4).status, unsigned{EP_STATUS_ABORTED});
}

// Watches end by value, by deadline, by cancellation, by the death of who is awaited, and by the watcher's own end.
void watches_end() {
  test::run_ranks(2, [](test::member& self) {
    collecting_sink sink;
    uint64_t word = 0;
    if (self.rank == 1) {
      EP_CHECK_EQ(self.pass(*self.everyone).status, unsigned{EP_STATUS_OK});
      self.context->leave(true);
      return;
    }
    auto watches = std::make_unique<watcher>(self.context, sink);
    const auto watch_word = [&](uint64_t id, uint64_t value, double timeout_ms, std::vector<int32_t> awaited) {
      const cancel_ref cancel = flag();
      watches->submit({id, cancel, deadline_after(timeout_ms), std::move(awaited), [&word, value](outcome& end) {
                         end.found = std::atomic_ref<uint64_t>(word).load(std::memory_order_acquire);
                         return end.found >= value;
                       }});
      return cancel;
    };
    watch_word(1, 1, 30'000, {});
    watch_word(2, 2, 20, {});
    const cancel_ref third = watch_word(3, 3, 30'000, {});
    std::atomic_ref<uint64_t>(word).store(1, std::memory_order_seq_cst);
    wake_notify(self.context->wake());
    EP_CHECK_EQ(sink.await(1).status, unsigned{EP_STATUS_OK});
    EP_CHECK_EQ(sink.await(2).status, unsigned{EP_STATUS_TIMEOUT});
    third->value = 1;
    watches->nudge();
    EP_CHECK_EQ(sink.await(3).status, unsigned{EP_STATUS_ABORTED});
    // Rank 1 leaves after this barrier: whoever names it as awaited is told.
    EP_CHECK_EQ(self.pass(*self.everyone).status, unsigned{EP_STATUS_OK});
    watch_word(4, 9, 30'000, {1});
    const outcome lost = sink.await(4);
    EP_CHECK_EQ(lost.status, unsigned{EP_STATUS_PEER_LOST});
    EP_CHECK_EQ(lost.rank, 1);
    watch_word(5, 9, -1, {0});
    watches.reset();
    EP_CHECK_EQ(sink.await(5).status, unsigned{EP_STATUS_CLOSED});
    EP_CHECK_EQ(sink.count(), size_t{5});
  });
}

} // namespace

int main() {
  kernels_run_in_order(0);
  kernels_run_in_order(50'000);
  a_cancelled_kernel_never_starts();
  the_end_of_a_stream_ends_everything();
  a_task_may_throw();
  an_event_orders_two_streams();
  watches_end();
  return ep::check::finish();
}
