#include "waiting.hpp"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <ctime>

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ep {

int64_t clock_now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

int64_t deadline_after(double timeout_ms) {
  if (!(timeout_ms >= 0) || timeout_ms > 9e12) return no_deadline;
  return clock_now_ns() + static_cast<int64_t>(std::llround(timeout_ms * 1e6));
}

wait_policy wait_policy_for(bool room, bool room_beside) {
  return room ? wait_policy{20'000, 30'000, 2'000'000, 50'000, 0, room_beside} : wait_policy{0, 50'000, 2'000'000, 100'000, 1'000'000, false};
}

bool comparison_holds(comparison cmp, uint64_t found, uint64_t value) {
  switch (cmp) {
    case comparison::eq: return found == value;
    case comparison::ne: return found != value;
    case comparison::lt: return found < value;
    case comparison::le: return found <= value;
    case comparison::gt: return found > value;
    case comparison::ge: return found >= value;
  }
  return false;
}

namespace {

// Where ranks outnumber cores, a yield may come back at once although the awaited rank wants the core: Linux shares cores between sessions (autogroup) and cgroups, and
// a yield gives way within one. Ranks that a launcher gave sessions of their own, or containers, are apart like that as soon as anything else wants the core, too. A yield
// that took less than two switches do has let nobody run; after some of those, sleeping is what does.
constexpr int64_t switches_ns = 1'000;
constexpr int64_t most_alone_ns = 10'000;

// HAZARD: a system call that does nothing takes 0.1 us on one machine, and 1 us in a virtual machine on another: there every yield would seem to have let somebody run.
int64_t least_of_others_ns() {
  static const int64_t least = [] {
    int64_t call_ns = INT64_MAX;
    for (int i = 0; i < 16; ++i) {
      const int64_t begin = clock_now_ns();
      getppid();
      call_ns = std::min(call_ns, clock_now_ns() - begin);
    }
    return call_ns + switches_ns;
  }();
  return least;
}

// The time behind the yield.
int64_t yield_core(int64_t now, int64_t* alone_ns) {
  sched_yield();
  const int64_t after = clock_now_ns();
  if (after - now < least_of_others_ns()) *alone_ns += after - now;
  return after;
}

} // namespace

bool wait_inline_look(const wait_policy& policy, inline_looks* looks) {
  const int64_t now = clock_now_ns();
  if (looks->end_ns == 0) looks->end_ns = now + policy.inline_ns;
  if (policy.spin_ns == 0) {
    yield_core(now, &looks->alone_ns);
    return now < looks->end_ns && (looks->alone_ns < most_alone_ns || policy.inline_sleep_ns == 0);
  }
  // Even with a core for each rank, two may find themselves on one: without a yield the awaited one gets it a scheduler's slice later (4 ms, measured).
  constexpr int64_t alone_ns = 10'000;
  if (now < looks->end_ns - policy.inline_ns + alone_ns) {
    cpu_relax();
  } else {
    sched_yield();
  }
  return now < looks->end_ns;
}

namespace {

std::atomic_ref<uint32_t> word32(uint32_t& word) { return std::atomic_ref<uint32_t>(word); }

uint64_t load(const uint64_t* word) {
  return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
}

} // namespace

uint32_t wake_prepare(ep_wake_word* wake) {
  word32(wake->waiters).fetch_add(1, std::memory_order_seq_cst);
  // The waiter's half of the eventcount: makes every look from here on, by whatever load, as good as a sequentially consistent one.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return word32(wake->epoch).load(std::memory_order_seq_cst);
}

void wake_cancel(ep_wake_word* wake) { word32(wake->waiters).fetch_sub(1, std::memory_order_seq_cst); }

namespace {

void wake_sleep(ep_wake_word* wake, uint32_t epoch, int64_t at_most_ns) {
  if (at_most_ns <= 0) return;
  timespec slice{at_most_ns / 1'000'000'000, at_most_ns % 1'000'000'000};
  // Not FUTEX_PRIVATE: the word is shared between processes. Any return is fine: the caller looks again.
  syscall(SYS_futex, &wake->epoch, FUTEX_WAIT, epoch, &slice, nullptr, 0);
}

} // namespace

void wake_commit(ep_wake_word* wake, uint32_t epoch, int64_t at_most_ns) {
  wake_sleep(wake, epoch, at_most_ns);
  wake_cancel(wake);
}

void sleeper_list::commit(ep_wake_word* wake, uint32_t epoch, int64_t at_most_ns, const sleeper& own) {
  // HAZARD: listed only while it is counted in the word (wake_prepare() came before, wake_cancel() comes behind): notify() takes as many listed as counted for all who sleep.
  {
    const std::lock_guard lock(mutex_);
    asleep_.push_back(&own);
  }
  wake_sleep(wake, epoch, at_most_ns);
  {
    const std::lock_guard lock(mutex_);
    asleep_.erase(std::find(asleep_.begin(), asleep_.end(), &own));
  }
  wake_cancel(wake);
}

void sleeper_list::notify(ep_wake_word* wake) {
  if (word32(wake->waiters).load(std::memory_order_seq_cst) == 0) return;
  {
    const std::lock_guard lock(mutex_);
    const bool in_vain = std::none_of(asleep_.begin(), asleep_.end(), [](const sleeper* one) { return one->holds(one->self); });
    // HAZARD: the count after the list, and with the list held still: whoever is counted and not listed may wait for anything.
    if (in_vain && word32(wake->waiters).load(std::memory_order_seq_cst) == asleep_.size()) return;
  }
  wake_notify(wake);
}

void wake_notify(ep_wake_word* wake) {
  if (wake == nullptr) return;
  const uint32_t waiters = word32(wake->waiters).load(std::memory_order_seq_cst);
  if (waiters == 0) return;
  if ((waiters & EP_WAKE_BY_DESCRIPTOR) != 0) {
    // HAZARD: the number may be another file's once the sleeper has gone, which waits for whoever counts itself first and finds it still there (~wake_descriptor).
    word32(wake->epoch).fetch_add(1, std::memory_order_seq_cst);
    const uint32_t still = word32(wake->waiters).load(std::memory_order_seq_cst);
    const uint64_t one = 1;
    if ((still & EP_WAKE_BY_DESCRIPTOR) != 0) (void)!write(static_cast<int>(still & ~EP_WAKE_BY_DESCRIPTOR), &one, sizeof one); // fails only where it is readable already
    word32(wake->epoch).fetch_sub(1, std::memory_order_seq_cst);
    return;
  }
  word32(wake->epoch).fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &wake->epoch, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

uint32_t life_state(const ep_life_word* life) {
  auto* word = const_cast<ep_life_word*>(life);
  const uint32_t state = word32(word->state).load(std::memory_order_acquire);
  if (state != EP_LIFE_ALIVE) return state;
  // The kernel sets FUTEX_OWNER_DIED in the lock word of a robust mutex when the thread that owns it ends for whatever reason.
  auto* mutex = reinterpret_cast<pthread_mutex_t*>(word->mutex);
  const int lock = std::atomic_ref<int>(mutex->__data.__lock).load(std::memory_order_acquire);
  if ((static_cast<uint32_t>(lock) & FUTEX_OWNER_DIED) == 0) return EP_LIFE_ALIVE;
  // An orderly close stores its state before it unlocks; look again so that it is not taken for a death.
  const uint32_t again = word32(word->state).load(std::memory_order_acquire);
  return again == EP_LIFE_ALIVE ? EP_LIFE_DEAD : again;
}

uint32_t wait_scope_check(const wait_scope& scope, int32_t awaited, int32_t* lost) {
  if (scope.cancel != nullptr && scope.cancel->load(std::memory_order_acquire) != 0) return EP_STATUS_ABORTED;
  if (scope.stopped != nullptr && scope.stopped->load(std::memory_order_acquire) != 0) return EP_STATUS_ABORTED;
  if (scope.closing != nullptr && scope.closing->load(std::memory_order_acquire) != 0) return EP_STATUS_CLOSED;
  if (scope.peers != nullptr) {
    int gone = 0;
    int absent = 0;
    int32_t someone = any_rank;
    const int32_t first = awaited == any_rank ? 0 : awaited;
    const int32_t last = awaited == any_rank ? scope.world_size : awaited + 1;
    for (int32_t rank = first; rank < last; ++rank) {
      if (rank == scope.self || scope.peers[rank].life == 0) continue;
      const uint32_t state = life_state(reinterpret_cast<const ep_life_word*>(scope.peers[rank].life));
      if (state == EP_LIFE_DEAD || ((state == EP_LIFE_CLOSED || state == EP_LIFE_ABSENT) && awaited != any_rank)) {
        *lost = rank;
        return EP_STATUS_PEER_LOST;
      }
      if (state == EP_LIFE_ABSENT) ++absent;
      if (state == EP_LIFE_CLOSED) {
        ++gone;
        someone = rank;
      }
    }
    if (gone > 0 && gone + absent == scope.world_size - 1) {
      *lost = someone;
      return EP_STATUS_PEER_LOST;
    }
    for (int32_t rank = 0; scope.debts.owed != nullptr && rank < scope.world_size; ++rank) {
      if (scope.debts.owed[rank] == 0 || rank == scope.self || scope.peers[rank].life == 0) continue;
      if (life_state(reinterpret_cast<const ep_life_word*>(scope.peers[rank].life)) != EP_LIFE_DEAD) continue;
      if (load(scope.debts.paid + rank) >= scope.debts.owed[rank]) continue; // whatever came of it has come
      *lost = rank;
      return EP_STATUS_PEER_LOST;
    }
  }
  if (scope.deadline_ns != no_deadline && clock_now_ns() >= scope.deadline_ns) return EP_STATUS_TIMEOUT;
  return EP_STATUS_OK;
}

void progress_list::add(const void* owner, std::function<bool()> step, std::function<void()> rest) {
  const std::lock_guard lock(mutex_);
  steps_.push_back({owner, std::move(step), std::move(rest)});
  count_.store(steps_.size(), std::memory_order_release);
}

void progress_list::remove(const void* owner) {
  const std::lock_guard lock(mutex_);
  std::erase_if(steps_, [owner](const auto& one) { return one.owner == owner; });
  count_.store(steps_.size(), std::memory_order_release);
}

// HAZARD: waits for another thread that runs them instead of passing by: what that one has looked at may be older than what this one is about to sleep on.
bool progress_list::run_all() const {
  const std::lock_guard lock(mutex_);
  bool left = false;
  for (const entry& one : steps_) left = one.step() || left;
  return left;
}

void progress_list::rest_all() const {
  const std::lock_guard lock(mutex_);
  for (const entry& one : steps_) {
    if (one.rest) one.rest();
  }
}

namespace {

struct awaited_word {
  const uint64_t* word;
  comparison cmp;
  uint64_t value;
  static bool holds(const void* self) {
    const auto& own = *static_cast<const awaited_word*>(self);
    return comparison_holds(own.cmp, load(own.word), own.value);
  }
};

} // namespace

wait_result wait_word(const wait_scope& scope, const uint64_t* word, comparison cmp, uint64_t value, int32_t awaited) {
  bool gives_way = false; // to the thread that carries what is awaited: where cores are few, looking on would only keep one from it
  const auto look = [&](const uint64_t* at) {
    if (scope.progress != nullptr) gives_way = scope.progress->run() && !scope.policy.room_beside;
    return load(at);
  };
  uint64_t found = look(word);
  if (comparison_holds(cmp, found, value)) return {EP_STATUS_OK, awaited, found};
  const int64_t start = clock_now_ns();
  int64_t elapsed = 0;
  while (elapsed < scope.policy.spin_ns && !gives_way) {
    for (int i = 0; i < 32 && !gives_way; ++i) {
      found = look(word);
      if (comparison_holds(cmp, found, value)) return {EP_STATUS_OK, awaited, found};
      cpu_relax();
    }
    elapsed = clock_now_ns() - start;
    if (scope.deadline_ns != no_deadline && start + elapsed >= scope.deadline_ns) break;
  }
  const int64_t yield_end = elapsed + scope.policy.yield_ns;
  int64_t alone_ns = scope.policy.spin_ns == 0 ? 0 : INT64_MIN;
  while (elapsed < yield_end && alone_ns < most_alone_ns && !gives_way) {
    elapsed = yield_core(start + elapsed, &alone_ns) - start;
    found = look(word);
    if (comparison_holds(cmp, found, value)) return {EP_STATUS_OK, awaited, found};
    if (scope.deadline_ns != no_deadline && start + elapsed >= scope.deadline_ns) break;
  }
  for (;;) {
    int32_t lost = awaited;
    const uint32_t status = wait_scope_check(scope, awaited, &lost);
    if (status != EP_STATUS_OK) {
      found = look(word);
      if (comparison_holds(cmp, found, value)) return {EP_STATUS_OK, awaited, found};
      return {status, lost, found};
    }
    int64_t slice = scope.policy.slice_ns;
    if (scope.deadline_ns != no_deadline) {
      const int64_t left = scope.deadline_ns - clock_now_ns();
      slice = left < slice ? (left > 1 ? left : 1) : slice;
    }
    if (scope.wake == nullptr) {
      if (scope.progress != nullptr) scope.progress->rest();
      timespec nap{slice / 1'000'000'000, slice % 1'000'000'000};
      nanosleep(&nap, nullptr);
      found = look(word);
      if (comparison_holds(cmp, found, value)) return {EP_STATUS_OK, awaited, found};
      continue;
    }
    const uint32_t epoch = wake_prepare(scope.wake);
    found = look(word);
    if (comparison_holds(cmp, found, value)) {
      wake_cancel(scope.wake);
      return {EP_STATUS_OK, awaited, found};
    }
    if (scope.progress != nullptr) scope.progress->rest();
    if (scope.sleepers != nullptr) {
      const awaited_word own{word, cmp, value};
      scope.sleepers->commit(scope.wake, epoch, slice, {awaited_word::holds, &own});
    } else {
      wake_commit(scope.wake, epoch, slice);
    }
    found = look(word);
    if (comparison_holds(cmp, found, value)) return {EP_STATUS_OK, awaited, found};
  }
}

wait_result wait_until(const wait_scope& scope, const wait_look& look, int32_t awaited) {
  constexpr int64_t clock_looks = 32;
  constexpr int64_t nap_ns = 50'000;
  uint64_t found = 0;
  const int64_t start = clock_now_ns();
  int64_t elapsed = 0;
  const auto looked = [&] {
    if (scope.progress != nullptr) scope.progress->run();
    return look.look(look.self, &found);
  };
  for (int64_t looks = 1;; ++looks) {
    if (looked()) return {EP_STATUS_OK, awaited, found};
    if (elapsed < scope.policy.spin_ns) {
      cpu_relax();
      if (looks % clock_looks == 0) elapsed = clock_now_ns() - start;
      continue;
    }
    int32_t lost = awaited;
    const uint32_t status = wait_scope_check(scope, awaited, &lost);
    if (status != EP_STATUS_OK) {
      if (looked()) return {EP_STATUS_OK, awaited, found};
      return {status, lost, found};
    }
    if (elapsed < scope.policy.spin_ns + scope.policy.yield_ns) {
      sched_yield();
    } else {
      if (scope.progress != nullptr) scope.progress->rest();
      const timespec nap{0, nap_ns};
      nanosleep(&nap, nullptr);
    }
    elapsed = clock_now_ns() - start;
  }
}

} // namespace ep
