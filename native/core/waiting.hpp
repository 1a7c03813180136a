// Waiting for a word that a peer or a NIC writes: spins a little, yields a little, then sleeps on the rank's eventcount. It always ends: by value, by
// cancellation, by a peer's death or by the deadline, and says which.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "ep/abi/memory.h"
#include "ep/abi/rank.h"
#include "ep/abi/status.h"

namespace ep {

int64_t clock_now_ns();              // CLOCK_MONOTONIC
constexpr int64_t no_deadline = INT64_MAX;
int64_t deadline_after(double timeout_ms); // negative or NaN: no_deadline

// How long to burn before sleeping. Spinning with more ranks than cores costs milliseconds per barrier: the awaited rank cannot run.
struct wait_policy {
  int64_t spin_ns;
  int64_t yield_ns;  // after spinning: sched_yield between looks
  int64_t slice_ns;  // then sleep at most this long between looks at life and deadline
  // A JS thread, before it hands the wait over to another thread: see wait_inline.
  int64_t inline_ns = 0;       // looks (spins, or yields where spin_ns is 0)
  int64_t inline_sleep_ns = 0; // then sleeps
  bool room_beside = false;    // a second thread of each rank has a core, too
};
// `room`: every rank of the host has a core while this one spins (cores.hpp).
wait_policy wait_policy_for(bool room, bool room_beside = false);

// Work that whoever waits does in passing: words that are made from what a NIC leaves elsewhere. HAZARD: a step runs on any thread that waits, so it neither waits nor calls
// back here, and what it does twice must be the same as once.
class progress_list {
 public:
  // A step says whether what is under way is left to another thread, and for so long that whoever waits had better give up its core for it. `rest`: whoever ran steps goes to sleep; those who stepped back
  // for it are to go on. It may be told for nothing.
  void add(const void* owner, std::function<bool()> step, std::function<void()> rest = {});
  // None of the owner's steps runs any more when it returns.
  void remove(const void* owner);
  // Whether some step says so.
  bool run() const { return count_.load(std::memory_order_acquire) != 0 && run_all(); }
  // HAZARD: after the look that finds nothing, so that what comes in between finds who sleeps.
  void rest() const {
    if (count_.load(std::memory_order_acquire) != 0) rest_all();
  }

 private:
  struct entry {
    const void* owner;
    std::function<bool()> step;
    std::function<void()> rest;
  };
  bool run_all() const;
  void rest_all() const;
  mutable std::mutex mutex_;
  std::vector<entry> steps_;
  std::atomic<size_t> count_{0};
};

// While it stands, the thread looks at `progress` so rarely, since it copies or folds between two looks, or gets no core where ranks outnumber them: those who stepped back for its looks stay away for so
// long. It looks again, rests, or ends; then they may be away for that long once more.
class rare_looks {
 public:
  explicit rare_looks(int64_t ns) : before_(std::exchange(apart(), ns)) {}
  ~rare_looks() { apart() = before_; }
  rare_looks(const rare_looks&) = delete;
  rare_looks& operator=(const rare_looks&) = delete;
  // Of the calling thread; 0: as often as it can.
  static int64_t apart_ns() { return apart(); }

 private:
  static int64_t& apart() {
    thread_local int64_t ns = 0;
    return ns;
  }
  int64_t before_;
};

// What ranks owe to whoever waits: by rank, a counter, and what it must reach (0: nothing).
struct wait_debts {
  const uint64_t* paid = nullptr;
  const uint64_t* owed = nullptr; // null: nobody is looked at
};

// Who of this process sleeps on an eventcount, and for what: whoever changes words for others wakes nobody for whom nothing has changed, since each such wake is a switch of threads. Who sleeps there
// without a word of it, or in another process, is always woken.
class sleeper_list {
 public:
  // `holds`: what it sleeps for has come, or may have. HAZARD: any thread calls it, with others' locks held: it loads words, and no more.
  struct sleeper {
    bool (*holds)(const void* self);
    const void* self;
  };
  // As wake_notify(). HAZARD: not where what has come is a death, a cancellation or an end, which no `holds` knows.
  void notify(ep_wake_word* wake);
  // As wake_commit().
  void commit(ep_wake_word* wake, uint32_t epoch, int64_t at_most_ns, const sleeper& own);

 private:
  std::mutex mutex_;
  std::vector<const sleeper*> asleep_;
};

// Everything besides its value that can end a wait. Plain data: copied into kernels' environments.
struct wait_scope {
  ep_wake_word* wake = nullptr;                    // eventcount to sleep on; null: sleep by the clock only
  const std::atomic<uint32_t>* cancel = nullptr;   // non-zero: EP_STATUS_ABORTED
  const std::atomic<uint32_t>* closing = nullptr;  // non-zero: EP_STATUS_CLOSED
  std::atomic<uint32_t>* stopped = nullptr;        // non-zero: EP_STATUS_ABORTED, by the kernel itself (kernel_environment::stop_waits)
  int64_t deadline_ns = no_deadline;
  const ep_peer_view* peers = nullptr;             // for looks at life; null: nobody is watched
  int32_t world_size = 0;
  int32_t self = -1;
  // HAZARD: who is dead in debt ends every wait, also one for somebody who lives: that one may have given up for want of the same, and then never comes.
  wait_debts debts{};
  wait_policy policy{};
  const progress_list* progress = nullptr;         // run before each look
  sleeper_list* sleepers = nullptr;                // of `wake`
};

enum class comparison : uint32_t { eq = 0, ne = 1, lt = 2, le = 3, gt = 4, ge = 5 };
bool comparison_holds(comparison cmp, uint64_t found, uint64_t value);

// Who is awaited: a rank, or `any_rank`: then the death of any rank ends the wait, and so does the orderly close of all others.
constexpr int32_t any_rank = -1;

struct wait_result {
  uint32_t status;  // EP_STATUS_OK, TIMEOUT, ABORTED, CLOSED, PEER_LOST
  int32_t rank;     // who was lost, or who was awaited
  uint64_t found;   // value of the word at the end
};
wait_result wait_word(const wait_scope& scope, const uint64_t* word, comparison cmp, uint64_t value, int32_t awaited);

// A look at more than one word, or at a word that is no count. True: the wait is over. `found` is for whoever reports that it ended otherwise.
struct wait_look {
  bool (*look)(const void* self, uint64_t* found);
  const void* self;
};
// For looks at what nobody wakes for (a NIC's completions, another poster's turn): naps by the clock after spinning and yielding.
wait_result wait_until(const wait_scope& scope, const wait_look& look, int32_t awaited);

// Building blocks, for executors and threads that watch many words at one time.

// EP_STATUS_OK while the wait should go on; `lost` names the dead rank. Look at the word once more after anything else: the peer may have
// delivered just before it died.
uint32_t wait_scope_check(const wait_scope& scope, int32_t awaited, int32_t* lost);

// Eventcount: announce, look at the words again, then commit (sleep) or cancel. The announcement ends in a sequentially consistent fence, so looks after it
// need no order of their own.
uint32_t wake_prepare(ep_wake_word* wake);
void wake_commit(ep_wake_word* wake, uint32_t epoch, int64_t at_most_ns);
void wake_cancel(ep_wake_word* wake);
// After a sequentially consistent update of a word that someone may be waiting for.
void wake_notify(ep_wake_word* wake);

// A peer's state as seen from here: EP_LIFE_*. Reads two words, no system call.
uint32_t life_state(const ep_life_word* life);

inline void cpu_relax();

// What a JS thread does before it hands a wait over. With a core for every rank it looks, and no more: sleeping here would
// hold up the JS that could run meanwhile. Otherwise the rank that it waits for may need its core, and so would the threads of a hand-over: it looks only briefly, then sleeps until a peer wakes it.
// HAZARD: nothing else runs on the thread meanwhile, and terminate() and process.exit() wait for it: the bounds are part of the promise.
struct inline_looks {
  int64_t end_ns = 0;
  int64_t alone_ns = 0; // in yields that gave the core to nobody
};
bool wait_inline_look(const wait_policy& policy, inline_looks* looks); // false: the time for looking is up
struct no_sleepers {};
// `progress`: what `ready` runs, if it runs that. `holds`, with the `sleepers` of `wake`: what `ready` looks for, as a sleeper may be asked for it.
template <class Ready, class Holds = no_sleepers>
bool wait_inline(const wait_policy& policy, ep_wake_word* wake, Ready&& ready, const progress_list* progress = nullptr, sleeper_list* sleepers = nullptr, const Holds& holds = {}) {
  inline_looks looks;
  do {
    if (ready()) return true;
  } while (wait_inline_look(policy, &looks));
  const int64_t end_ns = looks.end_ns + policy.inline_sleep_ns;
  while (policy.inline_sleep_ns > 0) {
    const uint32_t epoch = wake_prepare(wake);
    if (ready()) {
      wake_cancel(wake);
      return true;
    }
    const int64_t left = end_ns - clock_now_ns();
    if (progress != nullptr) progress->rest();
    if constexpr (std::is_same_v<Holds, no_sleepers>) {
      wake_commit(wake, epoch, left);
    } else {
      sleepers->commit(wake, epoch, left, {[](const void* self) { return (*static_cast<const Holds*>(self))(); }, &holds});
    }
    if (left <= 0) break;
  }
  return ready();
}

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

} // namespace ep
