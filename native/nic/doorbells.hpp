// How the thread of a software NIC waits for doorbells: it looks, then gives the core away between looks, then sleeps.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include <sched.h>

#include "limits.hpp"
#include "waiting.hpp"

namespace ep::nic {

// A sleep lasts as long as the pause before it, within these bounds. HAZARD: a doorbell of a GPU, or of a poster that knows no wake word, ends no sleep: the first one after
// a pause is seen as late as the pause was long, and at most this late. What it costs: a look, at every queue, each time.
constexpr int64_t shortest_sleep_ns = 50'000;
constexpr int64_t longest_sleep_ns = 32'000'000;

// Until `stopping`: calls poll(now_ns), which carries out what there is and says whether there was anything. next_due_ns() is when delayed work is due (INT64_MAX: none is).
template <class Poll, class Due> void serve_doorbells(ep_wake_word* wake, const std::atomic<bool>& stopping, const Poll& poll, const Due& next_due_ns) {
  constexpr int64_t look_ns = 20'000;
  constexpr int64_t yield_ns = 50'000;
  const int64_t spin_ns = usable_cores() > 2 ? look_ns : 0;
  int64_t idle_since = clock_now_ns();
  while (!stopping.load(std::memory_order_acquire)) {
    if (poll(clock_now_ns())) {
      idle_since = clock_now_ns();
      continue;
    }
    const int64_t idle = clock_now_ns() - idle_since;
    if (idle < spin_ns) {
      cpu_relax();
    } else if (idle < yield_ns) {
      sched_yield();
    } else {
      const uint32_t epoch = wake_prepare(wake);
      if (stopping.load(std::memory_order_acquire) || poll(clock_now_ns())) {
        wake_cancel(wake);
        idle_since = clock_now_ns();
        continue;
      }
      const int64_t due = next_due_ns();
      const int64_t now = clock_now_ns();
      const int64_t at_most = std::clamp(now - idle_since, shortest_sleep_ns, longest_sleep_ns);
      wake_commit(wake, epoch, due > now ? std::min(at_most, due - now) : 1);
    }
  }
}

} // namespace ep::nic
