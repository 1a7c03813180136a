#include "stream.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "thread.hpp"

namespace ep::gpu {

result<std::shared_ptr<event>> event::create(library_ref of, int device, bool timed) {
  std::shared_ptr<event> made(new event(std::move(of)));
  if (const int error = made->of_->table().event_create(device, timed ? 1 : 0, &made->native_); error != 0) {
    return made->of_->error(error, "making an event of GPU " + std::to_string(device));
  }
  return made;
}

result<bool> event::reached() const {
  int reached = 0;
  if (const int error = of_->table().event_query(native_, &reached); error != 0) return of_->error(error, "looking at an event");
  return reached != 0;
}

// Slots outlive their stream: a graph may hold some.
struct stream::slots {
  std::mutex mutex;
  std::vector<std::shared_ptr<const pinned_block>> blocks;
  std::vector<launch_slot*> free;

  result<nothing> more(const library_ref& of, int device) {
    constexpr size_t together = 256;
    auto block = pinned_block::allocate(of, device, together * sizeof(launch_slot));
    if (!block.ok()) return block.why();
    blocks.push_back(block.value());
    for (size_t i = together; i-- > 0;) free.push_back(reinterpret_cast<launch_slot*>(block.value()->data()) + i);
    return nothing{};
  }
};

result<std::shared_ptr<stream>> stream::create(library_ref of, int device, bool high_priority, completion_sink& sink) {
  std::shared_ptr<stream> made(new stream(std::move(of), device, sink));
  made->slots_ = std::make_shared<slots>();
  const ep_cuda_table& table = made->of_->table();
  if (const int error = table.stream_create(device, high_priority ? 1 : 0, &made->native_); error != 0) {
    return made->of_->error(error, "making a stream of GPU " + std::to_string(device));
  }
  // HAZARD: now, not at the first launch: page-locking memory may wait for kernels that run, and a peer's may wait for this rank's launch.
  if (auto first = made->slots_->more(made->of_, device); !first.ok()) return first.why();
  auto started = thread_start("ep-gpu-stream", [self = made.get()] { self->run(); }, "thread that watches a stream of a GPU; close streams or raise the limit on tasks");
  if (!started.ok()) return started.why();
  made->thread_ = std::move(started.value());
  return made;
}

void stream::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
}

void stream::abandon() {
  abandoned_ = true;
  stop();
}

stream::~stream() {
  stop();
  if (thread_.joinable()) thread_.join();
  if (native_ != nullptr && !abandoned_) of_->table().stream_destroy(native_);
}

ep_cuda_launch stream::launch(uint32_t blocks, uint32_t lanes, uint64_t wait_cycles, const slot_ref& slot, uint64_t lost) const {
  return {native_, blocks, lanes, wait_cycles, slot ? reinterpret_cast<uint64_t>(&slot->cancel) : 0, lost};
}

result<slot_ref> stream::slot() {
  const std::lock_guard lock(slots_->mutex);
  if (slots_->free.empty()) {
    if (auto made = slots_->more(of_, device_); !made.ok()) return made.why();
  }
  launch_slot* taken = slots_->free.back();
  slots_->free.pop_back();
  std::memset(taken, 0, sizeof *taken);
  return slot_ref(taken, [owner = slots_](launch_slot* done) {
    const std::lock_guard back(owner->mutex);
    owner->free.push_back(done);
  });
}

result<nothing> stream::follow(uint64_t operation, cancel_ref cancel, watch how) {
  auto next = std::make_unique<entry>();
  next->operation = operation;
  next->cancel = std::move(cancel);
  next->how = std::move(how);
  {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      next->point = std::move(spare_.back());
      spare_.pop_back();
    }
  }
  // HAZARD: what was launched runs on, and reads and writes what this watch holds: status words that were handed to another call would tell it of a failure that is not
  // its own. So all of it stays until the stream is gone, which waits for what runs.
  const auto give_up_on = [&](failure why) {
    const std::lock_guard lock(mutex_);
    unfollowed_.push_back(std::move(next->how));
    return why;
  };
  if (!next->point) {
    auto made = event::create(of_, device_, false);
    if (!made.ok()) return give_up_on(made.why());
    next->point = made.value();
  }
  if (const int error = of_->table().event_record(next->point->native(), native_); error != 0) return give_up_on(of_->error(error, "recording on a stream"));
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(next));
  }
  changed_.notify_one();
  return nothing{};
}

uint64_t stream::depth() const {
  const std::lock_guard lock(mutex_);
  return queue_.size();
}

namespace {

// As wait_scope_check of any rank, among some of them.
uint32_t check_members(const rank_context& context, const std::vector<int32_t>& ranks, int32_t* lost) {
  size_t closed = 0;
  int32_t someone = -1;
  for (const int32_t rank : ranks) {
    if (rank == context.rank()) continue;
    const uint32_t state = context.life(rank);
    if (state == EP_LIFE_DEAD) {
      *lost = rank;
      return EP_STATUS_PEER_LOST;
    }
    if (state != EP_LIFE_CLOSED) continue;
    ++closed;
    someone = rank;
  }
  if (closed == 0 || closed + 1 < ranks.size()) return EP_STATUS_OK;
  *lost = someone;
  return EP_STATUS_PEER_LOST;
}

uint32_t check_peers(const rank_context& context, const std::vector<launched_kernel>& kernels, int32_t* lost) {
  wait_scope scope = context.waits(nullptr, no_deadline);
  const bool all = std::any_of(kernels.begin(), kernels.end(), [](const launched_kernel& one) { return one.ranks == nullptr; });
  if (!all && !kernels.empty()) scope.peers = nullptr;
  uint32_t why = wait_scope_check(scope, any_rank, lost);
  const std::vector<int32_t>* before = nullptr;
  for (size_t i = 0; i < kernels.size() && why == EP_STATUS_OK && !all; ++i) {
    if (kernels[i].ranks.get() == before) continue;
    before = kernels[i].ranks.get();
    why = check_members(context, *before, lost);
  }
  return why;
}

}

bool stream::give_up(entry& of, bool stopping) {
  for (const auto& each : of.how.losses) each->look();
  if (of.cancelled) return false;
  int32_t lost = -1;
  uint32_t why = EP_STATUS_OK;
  if (stopping || of.cancel->value.load(std::memory_order_acquire) != 0) {
    why = EP_STATUS_ABORTED;
  } else if (clock_now_ns() >= of.how.deadline_ns) {
    why = EP_STATUS_TIMEOUT;
  } else if (of.how.context) {
    why = check_peers(*of.how.context, of.how.kernels, &lost);
    // HAZARD: peers that have closed may have sent all that this call awaits of them, while its own blocks still copy, which are told to give up with the others.
    if (why == EP_STATUS_PEER_LOST && of.how.context->life(lost) == EP_LIFE_CLOSED) {
      of.left_ns = std::min(of.left_ns, clock_now_ns());
      if (clock_now_ns() - of.left_ns < closed_peers_grace_ns) why = EP_STATUS_OK;
    }
  }
  if (why == EP_STATUS_OK) return false;
  of.cancelled = true;
  of.ended.status = why;
  of.ended.rank = lost;
  // Its waits end soon; its copies go on, and its operands are not free before.
  for (const launched_kernel& one : of.how.kernels) std::atomic_ref<uint32_t>(one.slot->cancel).store(1, std::memory_order_release);
  return of.how.kernels.empty();
}

namespace {

const launched_kernel* first_failure(const std::vector<launched_kernel>& kernels) {
  for (const launched_kernel& one : kernels) {
    if (std::atomic_ref<uint32_t>(one.slot->status.status).load(std::memory_order_acquire) != EP_STATUS_OK) return &one;
  }
  return nullptr;
}

int32_t in_world(const rank_list& ranks, int32_t rank) {
  if (!ranks || rank < 0 || static_cast<size_t>(rank) >= ranks->size()) return rank;
  return (*ranks)[static_cast<size_t>(rank)];
}

} // namespace

void stream::complete(entry& of, int error) {
  outcome end;
  if (error != 0) {
    end.status = EP_STATUS_SYSTEM;
    end.message = of_->error(error, "the work of a stream of GPU " + std::to_string(device_)).message;
  } else if (!of.how.failed.empty()) {
    end.status = EP_STATUS_SYSTEM;
    end.message = of.how.failed;
  } else if (const launched_kernel* failed = first_failure(of.how.kernels); failed != nullptr) {
    const ep_kernel_status& status = failed->slot->status;
    end.status = status.status;
    end.rank = in_world(failed->ranks, status.rank);
    end.stage = status.stage;
    end.expected = status.expected;
    end.found = status.found;
    // The kernel knows only that it was told to stop, and whom it awaited then; here is why.
    if (end.status == EP_STATUS_ABORTED && of.cancelled) {
      end.status = of.ended.status;
      if (of.ended.rank >= 0) end.rank = of.ended.rank;
    }
  } else if (of.cancelled && of.how.kernels.empty()) {
    end = of.ended;
  }
  const uint64_t operation = of.operation;
  // What it kept may go before anyone hears of its end.
  if (abandoned_) new watch(std::move(of.how)); // leaked on purpose: the device may use it for ever
  else of.how = {};
  sink_.complete(operation, end);
}

// Looks often at first, then every 50 µs, and every 100 µs behind 10 ms: nothing wakes a host thread when a GPU gets somewhere. The times are far below a deadline's and a death's.
void stream::run() {
  constexpr uint32_t eager_looks = 64;
  constexpr uint32_t early_looks = eager_looks + 200;
  thread_sleeps_exactly();
  uint32_t looks = 0;
  for (;;) {
    std::vector<std::unique_ptr<entry>> over;
    std::unique_ptr<entry>* front = nullptr;
    bool stopping = false;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      stopping = stopping_;
      for (auto& each : queue_) {
        if (give_up(*each, stopping)) over.push_back(std::move(each));
      }
      std::erase_if(queue_, [](const std::unique_ptr<entry>& each) { return !each; });
      // Only this thread takes entries away, and a deque's elements stay where they are when others are added behind.
      if (!queue_.empty()) front = &queue_.front();
    }
    for (const auto& each : over) complete(*each, 0);
    if (front == nullptr) continue;
    int reached = 0;
    const int error = of_->table().event_query((*front)->point->native(), &reached);
    if (reached == 0 && error == 0) {
      ++looks;
      if (looks < eager_looks) std::this_thread::yield();
      else std::this_thread::sleep_for(std::chrono::microseconds(looks < early_looks ? 50 : 100));
      continue;
    }
    looks = 0;
    std::unique_ptr<entry> done;
    {
      const std::lock_guard lock(mutex_);
      done = std::move(*front);
      queue_.pop_front();
      if (error == 0) spare_.push_back(done->point);
    }
    complete(*done, error);
  }
}

} // namespace ep::gpu
