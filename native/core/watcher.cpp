#include "watcher.hpp"

#include <algorithm>

#include "thread.hpp"

namespace ep {

watcher::watcher(std::shared_ptr<rank_context> context, completion_sink& sink) : context_(std::move(context)), sink_(sink) {}

watcher::~watcher() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  nudge();
  if (thread_.joinable()) thread_.join();
}

void watcher::submit(watch item) {
  if (!thread_.joinable()) {
    auto started = thread_start("ep-watcher", [this] { run(); }, "thread that watches for rank " + std::to_string(context_->rank()) + "; raise the limit on tasks");
    if (!started.ok()) {
      outcome end;
      end.status = started.why().status;
      end.message = started.why().message;
      sink_.complete(item.operation_id, end);
      return;
    }
    thread_ = std::move(started.value());
  }
  {
    const std::lock_guard lock(mutex_);
    arriving_.push_back(std::move(item));
  }
  changed_.notify_all();
  nudge();
}

void watcher::nudge() { wake_notify(context_->wake()); }

bool watcher::look(watch& item, outcome& end) const {
  if (item.ready(end)) {
    end.status = EP_STATUS_OK;
    return true;
  }
  const wait_scope scope = context_->waits(&item.cancel->value, item.deadline_ns);
  int32_t lost = any_rank;
  uint32_t status = EP_STATUS_OK;
  if (item.awaited.empty()) {
    status = wait_scope_check(scope, any_rank, &lost);
  } else {
    for (const int32_t rank : item.awaited) {
      status = wait_scope_check(scope, rank, &lost);
      if (status != EP_STATUS_OK) break;
    }
  }
  if (status == EP_STATUS_OK) return false;
  // The peer may have delivered between the first look and its death.
  context_->progress().run();
  if (item.ready(end)) {
    end.status = EP_STATUS_OK;
    return true;
  }
  end.status = status;
  end.rank = lost;
  return true;
}

void watcher::run() {
  // Deaths wake nobody: they are looked for. The longer nothing has happened, the more rarely, so that a rank that waits for the next job costs nothing; the bound
  // is a tenth of what a death may take to be seen. Words that hardware writes wake nobody either, and are seen as late: an eighth of how long they have been awaited.
  constexpr int64_t longest_slice_ns = 50'000'000;
  constexpr int64_t slices_of_quiet = 8;
  int64_t quiet_since = clock_now_ns();
  std::vector<watch> watched;
  for (;;) {
    bool stopping = false;
    {
      std::unique_lock lock(mutex_);
      // Hazard: an idle watcher must not be counted in the eventcount's waiters, or every signal of every peer pays a system call to wake nobody.
      if (watched.empty()) changed_.wait(lock, [this] { return stopping_ || !arriving_.empty(); });
      stopping = stopping_;
      if (!arriving_.empty()) quiet_since = clock_now_ns();
      for (watch& item : arriving_) watched.push_back(std::move(item));
      arriving_.clear();
    }
    ep_wake_word* wake = context_->wake();
    const uint32_t epoch = wake_prepare(wake);
    context_->progress().run();
    int64_t nearest = no_deadline;
    const auto finished = [&](watch& item) {
      outcome end;
      if (!look(item, end)) {
        if (!stopping) {
          nearest = std::min(nearest, item.deadline_ns);
          return false;
        }
        end.status = EP_STATUS_CLOSED;
      }
      sink_.complete(item.operation_id, end);
      return true;
    };
    if (std::erase_if(watched, finished) > 0) quiet_since = clock_now_ns();
    bool more = false;
    {
      const std::lock_guard lock(mutex_);
      more = !arriving_.empty() || stopping_;
    }
    if (watched.empty() || more) {
      wake_cancel(wake);
      if (stopping && watched.empty()) return;
      continue;
    }
    const int64_t now = clock_now_ns();
    int64_t slice = std::clamp<int64_t>((now - quiet_since) / slices_of_quiet, context_->policy().slice_ns, longest_slice_ns);
    if (nearest != no_deadline) slice = std::clamp<int64_t>(nearest - now, 1, slice);
    context_->progress().rest();
    const auto holds = [](const void* self) {
      const auto& items = *static_cast<const std::vector<watch>*>(self);
      outcome found;
      return std::any_of(items.begin(), items.end(), [&](const watch& item) { return item.ready(found); });
    };
    context_->sleepers().commit(wake, epoch, slice, {holds, &watched});
  }
}

} // namespace ep
