// Waits always end, and say how: by value, by cancellation, by closing, by the death of who is awaited, or by the deadline.
#include "waiting.hpp"

#include <atomic>
#include <csignal>
#include <chrono>
#include <ctime>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"
#include "rank.hpp"
#include "watcher.hpp"

namespace {

using namespace ep;

constexpr int64_t ms = 1'000'000;
// Long enough that a wait which is not woken cannot be mistaken for one that is.
constexpr int64_t slice_without_wake = 20'000 * ms;

// Words as they lie in shared memory, with everybody alive.
struct fixture {
  ep_wake_word wake{};
  uint64_t word = 0;
  std::atomic<uint32_t> cancel{0};
  std::atomic<uint32_t> closing{0};
  ep_life_word life[3]{};
  ep_peer_view peers[3]{};
  wait_scope scope;
  sleeper_list sleepers;

  // `listed`: notifiers ask those who sleep what they wait for.
  explicit fixture(bool listed = false) {
    for (int i = 0; i < 3; ++i) {
      life[i].state = EP_LIFE_ALIVE;
      peers[i].life = reinterpret_cast<uint64_t>(&life[i]);
    }
    scope.wake = &wake;
    scope.cancel = &cancel;
    scope.closing = &closing;
    scope.peers = peers;
    scope.world_size = 3;
    scope.self = 0;
    scope.policy = {0, 0, 2 * ms};
    if (listed) scope.sleepers = &sleepers;
  }
  void set(uint64_t value) {
    std::atomic_ref<uint64_t>(word).exchange(value, std::memory_order_seq_cst);
    if (scope.sleepers != nullptr) sleepers.notify(&wake);
    else wake_notify(&wake);
  }
  void die(int rank, uint32_t state) { std::atomic_ref<uint32_t>(life[rank].state).store(state, std::memory_order_seq_cst); }
  wait_result until(uint64_t value, int32_t awaited = any_rank) { return wait_word(scope, &word, comparison::ge, value, awaited); }
};

void compares() {
  const uint64_t top = UINT64_MAX;
  EP_CHECK(comparison_holds(comparison::eq, 5, 5) && !comparison_holds(comparison::eq, 5, 6));
  EP_CHECK(comparison_holds(comparison::ne, 5, 6) && !comparison_holds(comparison::ne, 5, 5));
  EP_CHECK(comparison_holds(comparison::lt, 5, top) && !comparison_holds(comparison::lt, top, 5) && !comparison_holds(comparison::lt, 5, 5));
  EP_CHECK(comparison_holds(comparison::le, 5, 5) && !comparison_holds(comparison::le, top, 5));
  EP_CHECK(comparison_holds(comparison::gt, top, 5) && !comparison_holds(comparison::gt, 5, 5));
  EP_CHECK(comparison_holds(comparison::ge, 5, 5) && !comparison_holds(comparison::ge, 5, top));
}

void ends_by_value() {
  fixture f;
  f.word = 9;
  EP_CHECK_EQ(f.until(9).status, unsigned{EP_STATUS_OK});
  // Whatever else is the case: what was delivered counts.
  f.die(1, EP_LIFE_DEAD);
  f.cancel = 1;
  f.scope.deadline_ns = 0;
  const wait_result end = f.until(9, 1);
  EP_CHECK(end.status == EP_STATUS_OK && end.found == 9);
}

void ends_by(uint32_t status, int32_t awaited, int32_t lost, const std::function<void(fixture&)>& cause, const wait_debts& debts = {}) {
  fixture f;
  f.scope.debts = debts;
  f.word = 4;
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    cause(f);
  });
  const int64_t start = clock_now_ns();
  const wait_result end = f.until(9, awaited);
  EP_CHECK_EQ(end.status, status);
  EP_CHECK_EQ(end.found, 4u);
  if (status == EP_STATUS_PEER_LOST) EP_CHECK_EQ(end.rank, lost);
  EP_CHECK(clock_now_ns() - start < 5'000 * ms);
  other.join();
}

void goes_on_while(const std::function<void(fixture&)>& cause, int32_t awaited, const wait_debts& debts = {}) {
  fixture f;
  f.scope.debts = debts;
  cause(f);
  f.scope.deadline_ns = deadline_after(20);
  EP_CHECK_EQ(f.until(9, awaited).status, unsigned{EP_STATUS_TIMEOUT});
}

void keeps_deadlines() {
  for (const double timeout : {0.0, 0.5, 15.0}) {
    fixture f;
    f.scope.policy = {20'000, 30'000, slice_without_wake};
    const int64_t start = clock_now_ns();
    f.scope.deadline_ns = deadline_after(timeout);
    EP_CHECK_EQ(f.until(1).status, unsigned{EP_STATUS_TIMEOUT});
    const auto took = static_cast<double>(clock_now_ns() - start) / ms;
    EP_CHECK(took >= timeout && took < timeout + 5'000);
  }
  EP_CHECK_EQ(deadline_after(-1), no_deadline);
  EP_CHECK_EQ(deadline_after(std::numeric_limits<double>::quiet_NaN()), no_deadline);
  EP_CHECK_EQ(deadline_after(std::numeric_limits<double>::infinity()), no_deadline);
}

// Two threads hand a word to and fro, each asleep until the other has written. A wake-up that is lost costs the whole slice.
void loses_no_wake_up(int rounds, bool listed) {
  fixture there(listed);
  fixture back(listed);
  for (fixture* f : {&there, &back}) f->scope.policy = {0, 0, slice_without_wake};
  int64_t longest = 0;
  std::thread other([&] {
    for (int i = 1; i <= rounds; ++i) {
      EP_CHECK_EQ(there.until(static_cast<uint64_t>(i)).status, unsigned{EP_STATUS_OK});
      back.set(static_cast<uint64_t>(i));
    }
  });
  for (int i = 1; i <= rounds; ++i) {
    const int64_t start = clock_now_ns();
    // Written anywhere in the other's way to sleep: the gap between its last look and the futex call is what has to be hit.
    for (int k = (i * 7) % 401; k > 0; --k) cpu_relax();
    there.set(static_cast<uint64_t>(i));
    EP_CHECK_EQ(back.until(static_cast<uint64_t>(i)).status, unsigned{EP_STATUS_OK});
    longest = std::max(longest, clock_now_ns() - start);
  }
  other.join();
  EP_CHECK(longest < slice_without_wake / 2);
  EP_CHECK_EQ(there.wake.waiters, 0u);
  EP_CHECK_EQ(back.wake.waiters, 0u);
}

// Many sleep on one word for different values; every one is woken, and the count of waiters comes back to none. Where notifiers ask, every second one has not said what it sleeps for.
void wakes_all(int threads, int rounds, bool listed) {
  fixture f(listed);
  f.scope.policy = {0, 0, slice_without_wake};
  std::atomic<int> done{0};
  std::vector<std::thread> waiting;
  for (int t = 0; t < threads; ++t) {
    waiting.emplace_back([&, t] {
      wait_scope own = f.scope;
      if (t % 2 == 1) own.sleepers = nullptr;
      for (int i = 1; i <= rounds; ++i) EP_CHECK_EQ(wait_word(own, &f.word, comparison::ge, static_cast<uint64_t>(i), any_rank).status, unsigned{EP_STATUS_OK});
      done.fetch_add(1);
    });
  }
  const int64_t start = clock_now_ns();
  for (int i = 1; i <= rounds; ++i) {
    f.set(static_cast<uint64_t>(i));
    if (i % 8 == 0) std::this_thread::yield();
  }
  for (auto& thread : waiting) thread.join();
  EP_CHECK_EQ(done.load(), threads);
  EP_CHECK(clock_now_ns() - start < slice_without_wake / 2);
  EP_CHECK_EQ(f.wake.waiters, 0u);
}

// Who sleeps for something else is left asleep, unless somebody is there who has not said what for.
void wakes_whom_it_concerns() {
  fixture f(true);
  f.scope.policy = {0, 0, slice_without_wake};
  uint64_t elsewhere = 0;
  const auto epoch = [&] { return std::atomic_ref<uint32_t>(f.wake.epoch).load(); };
  const auto asleep = [&](uint32_t count) {
    // Counted, and so far that a change in vain leaves all of them asleep.
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (;;) {
      const uint32_t before = epoch();
      std::atomic_ref<uint64_t>(elsewhere).fetch_add(1);
      f.sleepers.notify(&f.wake);
      if (std::atomic_ref<uint32_t>(f.wake.waiters).load() == count && epoch() == before) return true;
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  const int64_t begin = clock_now_ns();
  std::thread one([&] { EP_CHECK_EQ(f.until(1).status, unsigned{EP_STATUS_OK}); });
  std::thread two([&] { EP_CHECK_EQ(f.until(2).status, unsigned{EP_STATUS_OK}); });
  EP_CHECK(asleep(2));
  std::thread unlisted([&] {
    wait_scope own = f.scope;
    own.sleepers = nullptr;
    EP_CHECK_EQ(wait_word(own, &elsewhere, comparison::ge, uint64_t{1} << 32, any_rank).status, unsigned{EP_STATUS_OK});
  });
  while (std::atomic_ref<uint32_t>(f.wake.waiters).load() < 3) std::this_thread::yield();
  std::atomic_ref<uint64_t>(elsewhere).store(uint64_t{1} << 32);
  f.sleepers.notify(&f.wake);
  unlisted.join();
  EP_CHECK(asleep(2));
  f.set(1);
  one.join();
  EP_CHECK(asleep(1));
  f.set(2);
  two.join();
  EP_CHECK(clock_now_ns() - begin < slice_without_wake / 2);
  EP_CHECK_EQ(f.wake.waiters, 0u);
}

// What a JS thread does: ends by the value also while it sleeps, and by its bound otherwise; leaves nobody waiting behind.
void waits_inline(int rounds, bool listed) {
  const wait_policy asleep{0, 0, 2 * ms, 1, slice_without_wake};
  fixture f(listed);
  std::thread other([&] {
    for (int i = 1; i <= rounds; ++i) {
      while (std::atomic_ref<uint32_t>(f.wake.waiters).load() == 0 && i % 2 == 0) std::this_thread::yield(); // every second one is written to a sleeper
      f.set(static_cast<uint64_t>(i));
      while (std::atomic_ref<uint64_t>(f.word).load() != 0) std::this_thread::yield();
    }
  });
  int64_t longest = 0;
  for (int i = 1; i <= rounds; ++i) {
    const int64_t start = clock_now_ns();
    const auto there = [&] { return std::atomic_ref<uint64_t>(f.word).load() == static_cast<uint64_t>(i); };
    EP_CHECK(listed ? wait_inline(asleep, &f.wake, there, nullptr, &f.sleepers, there) : wait_inline(asleep, &f.wake, there));
    longest = std::max(longest, clock_now_ns() - start);
    std::atomic_ref<uint64_t>(f.word).store(0);
  }
  other.join();
  EP_CHECK(longest < slice_without_wake / 2);
  EP_CHECK_EQ(f.wake.waiters, 0u);
  for (const int64_t sleep : {int64_t{0}, 5 * ms}) {
    const int64_t begin = clock_now_ns();
    EP_CHECK(!wait_inline({0, 0, 2 * ms, ms, sleep}, &f.wake, [] { return false; }));
    const int64_t took = clock_now_ns() - begin;
    EP_CHECK(took >= ms + sleep && took < 5'000 * ms);
    EP_CHECK_EQ(f.wake.waiters, 0u);
  }
}

int64_t thread_cpu_ns() {
  timespec used{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return int64_t{used.tv_sec} * 1'000'000'000 + used.tv_nsec;
}

// Yields that pass to nobody are given up for sleep long before the time for looking is: the awaited rank may be one that only a sleep lets run. Where others do want the
// core, the time is theirs.
void looks_in_vain_give_way_to_sleep() {
  constexpr int64_t looking = 200 * ms;
  fixture f;
  const int64_t begin = clock_now_ns();
  const int64_t used = thread_cpu_ns();
  EP_CHECK(!wait_inline({0, 0, 2 * ms, looking, ms}, &f.wake, [] { return false; }));
  EP_CHECK(clock_now_ns() - begin >= looking);
  EP_CHECK(thread_cpu_ns() - used < looking / 2);
}

struct pair {
  std::shared_ptr<rank_context> here;
  std::vector<ep_segment_handle> handles;
};

pair beside(const ep_segment_handle& other) {
  auto here = rank_context::create(0, 2, 2).value();
  std::vector<ep_segment_handle> handles{here->handle(), other};
  EP_CHECK(here->connect(handles).ok());
  return {here, handles};
}

// A thread that ends without leave() still holds its robust mutex: the kernel marks it.
void sees_a_thread_die() {
  std::shared_ptr<rank_context> theirs;
  std::atomic<bool> ready{false};
  std::atomic<bool> die{false};
  std::thread victim([&] {
    theirs = rank_context::create(1, 2, 2).value();
    ready = true;
    while (!die) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  while (!ready) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const pair two = beside(theirs->handle());
  EP_CHECK_EQ(two.here->life(1), unsigned{EP_LIFE_ALIVE});
  const uint64_t word = 0;
  wait_scope scope = two.here->waits(nullptr, deadline_after(30'000));
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    die = true;
  });
  const wait_result end = wait_word(scope, &word, comparison::ne, 0, 1);
  EP_CHECK(end.status == EP_STATUS_PEER_LOST && end.rank == 1);
  EP_CHECK_EQ(two.here->life(1), unsigned{EP_LIFE_DEAD});
  killer.join();
  victim.join();
  two.here->leave(true);
}

void sees_a_process_die(bool orderly) {
  int pipes[2];
  int words[2]; // to the child: leave now; the end of them: go now
  EP_CHECK(pipe(pipes) == 0 && pipe(words) == 0);
  const pid_t child = fork();
  if (child == 0) {
    close(words[1]);
    auto theirs = rank_context::create(1, 2, 2).value();
    const ep_segment_handle handle = theirs->handle();
    if (write(pipes[1], &handle, sizeof handle) < 0) _exit(1);
    char word = 0;
    if (read(words[0], &word, 1) != 1) _exit(1);
    if (orderly) {
      theirs->leave(true);
      // The state is what counts, not the end of the process.
      _exit(read(words[0], &word, 1) == 0 ? 0 : 1);
    }
    for (;;) pause();
  }
  close(words[0]);
  ep_segment_handle handle{};
  EP_CHECK(read(pipes[0], &handle, sizeof handle) == static_cast<ssize_t>(sizeof handle));
  const pair two = beside(handle);
  EP_CHECK_EQ(two.here->life(1), unsigned{EP_LIFE_ALIVE});
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EP_CHECK(write(words[1], "l", 1) == 1);
    if (!orderly) kill(child, SIGKILL);
  });
  const uint64_t word = 0;
  const wait_result end = wait_word(two.here->waits(nullptr, deadline_after(30'000)), &word, comparison::ne, 0, any_rank);
  // The orderly close of all others ends a wait too: nobody is left who could write.
  EP_CHECK(end.status == EP_STATUS_PEER_LOST && end.rank == 1);
  EP_CHECK_EQ(two.here->life(1), orderly ? unsigned{EP_LIFE_CLOSED} : unsigned{EP_LIFE_DEAD});
  killer.join();
  close(words[1]);
  int status = 0;
  EP_CHECK_EQ(waitpid(child, &status, 0), child);
  EP_CHECK(orderly ? WIFEXITED(status) && WEXITSTATUS(status) == 0 : WIFSIGNALED(status));
  close(pipes[0]);
  close(pipes[1]);
  two.here->leave(true);
}

// Where another thread carries what is awaited, and wants a core, a wait sleeps at once; with a core for that one, too, it looks on.
void gives_way(bool room_beside) {
  fixture f;
  progress_list progress;
  std::atomic<int> looks{0};
  progress.add(&f, [&] {
    ++looks;
    return true;
  });
  f.scope.progress = &progress;
  f.scope.policy = {slice_without_wake, slice_without_wake, slice_without_wake, 0, 0, room_beside};
  std::thread setter([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    f.set(1);
  });
  EP_CHECK_EQ(wait_word(f.scope, &f.word, comparison::eq, 1, 1).status, unsigned{EP_STATUS_OK});
  setter.join();
  EP_CHECK(room_beside ? looks > 100 : looks <= 5);
}

// The thread that watches for JS: several at one time, each ends for its own reason.
void watches() {
  struct sink final : completion_sink {
    std::mutex mutex;
    std::map<uint64_t, outcome> ends;
    void complete(uint64_t id, const outcome& end) override {
      const std::lock_guard lock(mutex);
      EP_CHECK(ends.emplace(id, end).second);
    }
    size_t count() {
      const std::lock_guard lock(mutex);
      return ends.size();
    }
  } ended;
  auto context = rank_context::create(0, 1, 1).value();
  EP_CHECK(context->connect({context->handle()}).ok());
  uint64_t words[4]{};
  {
    watcher watching(context, ended);
    const auto item = [&](uint64_t id, int64_t deadline, cancel_ref cancel) {
      return watch{id, std::move(cancel), deadline, {}, [word = &words[id]](outcome& end) {
                     end.found = std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire);
                     return end.found != 0;
                   }};
    };
    const auto wait_for = [&](size_t count) {
      for (int i = 0; i < 5'000 && ended.count() < count; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EP_CHECK_EQ(ended.count(), count);
    };
    const auto cancel = std::make_shared<cancel_flag>();
    watching.submit(item(0, no_deadline, std::make_shared<cancel_flag>()));
    watching.submit(item(1, deadline_after(10), std::make_shared<cancel_flag>()));
    watching.submit(item(2, no_deadline, cancel));
    watching.submit(item(3, no_deadline, std::make_shared<cancel_flag>()));
    wait_for(1);
    EP_CHECK_EQ(ended.ends[1].status, unsigned{EP_STATUS_TIMEOUT});
    cancel->value.store(1);
    watching.nudge();
    wait_for(2);
    EP_CHECK_EQ(ended.ends[2].status, unsigned{EP_STATUS_ABORTED});
    std::atomic_ref<uint64_t>(words[0]).store(7, std::memory_order_seq_cst);
    wake_notify(context->wake());
    wait_for(3);
    EP_CHECK(ended.ends[0].status == EP_STATUS_OK && ended.ends[0].found == 7);
  }
  // What was still watched ended with the watcher.
  EP_CHECK_EQ(ended.ends.size(), 4u);
  EP_CHECK_EQ(ended.ends[3].status, unsigned{EP_STATUS_CLOSED});
  context->leave(true);
}

} // namespace

int main() {
  // Processes first: a fork of a program with threads may not do much.
  sees_a_process_die(false);
  sees_a_process_die(true);
  compares();
  ends_by_value();
  gives_way(false);
  gives_way(true);
  ends_by(EP_STATUS_ABORTED, any_rank, 0, [](fixture& f) { f.cancel = 1; });
  ends_by(EP_STATUS_CLOSED, any_rank, 0, [](fixture& f) { f.closing = 1; });
  ends_by(EP_STATUS_PEER_LOST, any_rank, 2, [](fixture& f) { f.die(2, EP_LIFE_DEAD); });
  ends_by(EP_STATUS_PEER_LOST, 1, 1, [](fixture& f) { f.die(1, EP_LIFE_DEAD); });
  ends_by(EP_STATUS_PEER_LOST, 1, 1, [](fixture& f) { f.die(1, EP_LIFE_CLOSED); });
  ends_by(EP_STATUS_PEER_LOST, any_rank, 2, [](fixture& f) {
    f.die(1, EP_LIFE_CLOSED);
    f.die(2, EP_LIFE_CLOSED);
  });
  goes_on_while([](fixture& f) { f.die(2, EP_LIFE_DEAD); }, 1);
  // Who is dead and owes something, while somebody else is awaited, who may have given up.
  const uint64_t owed[3] = {0, 7, 7};
  const uint64_t paid[3] = {0, 6, 7};
  const wait_debts debts{paid, owed};
  ends_by(EP_STATUS_PEER_LOST, 2, 1, [](fixture& f) { f.die(1, EP_LIFE_DEAD); }, debts);
  goes_on_while([](fixture& f) { f.die(2, EP_LIFE_DEAD); }, 1, debts);
  goes_on_while([](fixture& f) { f.die(1, EP_LIFE_CLOSED); }, 2, debts);
  goes_on_while([](fixture& f) { f.die(2, EP_LIFE_CLOSED); }, any_rank);
  // Places in which nobody is: nobody is lost there, but nobody comes from there either.
  ends_by(EP_STATUS_PEER_LOST, 1, 1, [](fixture& f) { f.die(1, EP_LIFE_ABSENT); });
  ends_by(EP_STATUS_PEER_LOST, any_rank, 2, [](fixture& f) {
    f.die(1, EP_LIFE_ABSENT);
    f.die(2, EP_LIFE_CLOSED);
  });
  goes_on_while([](fixture& f) { f.die(2, EP_LIFE_ABSENT); }, any_rank);
  goes_on_while(
      [](fixture& f) {
        f.die(1, EP_LIFE_ABSENT);
        f.die(2, EP_LIFE_ABSENT);
      },
      any_rank);
  goes_on_while([](fixture& f) { f.die(0, EP_LIFE_DEAD); }, any_rank);
  keeps_deadlines();
  for (const bool listed : {false, true}) {
    loses_no_wake_up(60'000, listed);
    wakes_all(4, 5'000, listed);
    waits_inline(5'000, listed);
  }
  wakes_whom_it_concerns();
  looks_in_vain_give_way_to_sleep();
  sees_a_thread_die();
  watches();
  return ep::check::finish();
}
