// A thread that sleeps on a word and on a descriptor wakes up for either, at once, and for nobody in vain for long.
#include "wake_descriptor.hpp"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include <sys/eventfd.h>
#include <unistd.h>

#include "check.hpp"
#include "waiting.hpp"

namespace {

using namespace ep;

constexpr int64_t ms = 1'000'000;
constexpr int64_t forever_ns = 20'000 * ms; // whoever is not woken cannot be mistaken for one that is

struct channel {
  int ends[2] = {-1, -1};
  channel() { EP_CHECK(pipe(ends) == 0); }
  ~channel() {
    close(ends[0]);
    close(ends[1]);
  }
  void fill() const { EP_CHECK(write(ends[1], "x", 1) == 1); }
};

struct fixture {
  ep_wake_word word{};
  std::unique_ptr<wake_descriptor> sleeper;
  fixture() {
    auto made = wake_descriptor::create(&word);
    EP_CHECK(made.ok());
    sleeper = std::move(made.value());
  }
};

bool asleep(const ep_wake_word& word) { return std::atomic_ref<uint32_t>(const_cast<uint32_t&>(word.waiters)).load() != 0; }

void test_word() {
  fixture f;
  channel quiet;
  for (int i = 0; i < 50; ++i) {
    std::thread notifier([&] {
      while (!asleep(f.word)) std::this_thread::yield();
      if (i % 2 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1)); // every second one finds it between prepare() and sleep(), or there
      wake_notify(&f.word);
    });
    const int64_t begin = clock_now_ns();
    f.sleeper->prepare();
    EP_CHECK(f.sleeper->sleep(quiet.ends[0], forever_ns));
    EP_CHECK(clock_now_ns() - begin < forever_ns / 2);
    notifier.join();
    EP_CHECK(!asleep(f.word));
  }
}

void test_descriptor() {
  fixture f;
  channel pipe;
  std::thread writer([&] {
    while (!asleep(f.word)) std::this_thread::yield();
    pipe.fill();
  });
  f.sleeper->prepare();
  EP_CHECK(f.sleeper->sleep(pipe.ends[0], forever_ns));
  writer.join();
  // It is readable still.
  f.sleeper->prepare();
  EP_CHECK(f.sleeper->sleep(pipe.ends[0], forever_ns));
}

void test_time() {
  fixture f;
  channel quiet;
  for (const int descriptor : {quiet.ends[0], -1}) {
    const int64_t begin = clock_now_ns();
    f.sleeper->prepare();
    EP_CHECK(!f.sleeper->sleep(descriptor, 3 * ms));
    EP_CHECK(clock_now_ns() - begin >= 3 * ms);
    EP_CHECK(!asleep(f.word));
  }
  f.sleeper->prepare();
  EP_CHECK(!f.sleeper->sleep(-1, -5));
}

// Nobody is told of what happened while nobody slept, and one who was told too late wakes the next sleep once, no more.
void test_late() {
  fixture f;
  wake_notify(&f.word);
  f.sleeper->prepare();
  EP_CHECK(!f.sleeper->sleep(-1, ms));
  f.sleeper->prepare();
  wake_notify(&f.word);
  f.sleeper->cancel();
  f.sleeper->prepare();
  EP_CHECK(f.sleeper->sleep(-1, forever_ns));
  f.sleeper->prepare();
  EP_CHECK(!f.sleeper->sleep(-1, ms));
}

// Who notifies when the sleeper goes writes to nothing that has its descriptor's number since.
void test_end() {
  fixture f;
  std::atomic<bool> over{false};
  std::vector<std::thread> notifiers;
  for (int i = 0; i < 3; ++i) {
    notifiers.emplace_back([&] {
      while (!over.load()) wake_notify(&f.word);
    });
  }
  for (int i = 0; i < 3'000; ++i) {
    f.sleeper->prepare();
    if (i % 3 == 0) (void)f.sleeper->sleep(-1, 1'000);
    f.sleeper.reset(); // also of one that still says that it sleeps
    const int next = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (i % 5 == 0) std::this_thread::yield();
    uint64_t told = 0;
    EP_CHECK(read(next, &told, sizeof told) < 0);
    close(next);
    auto made = wake_descriptor::create(&f.word);
    EP_CHECK(made.ok());
    f.sleeper = std::move(made.value());
  }
  over.store(true);
  for (std::thread& one : notifiers) one.join();
}

// The two halves of that one by one: whoever writes is counted for as long, and the end waits for whoever is counted.
void test_end_waits() {
  const auto counted = [](const ep_wake_word& word) { return std::atomic_ref<uint32_t>(const_cast<uint32_t&>(word.epoch)).load(); };
  channel full;
  const std::vector<char> bytes(1 << 16);
  EP_CHECK(write(full.ends[1], bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size())); // all that a pipe holds: the next write waits
  ep_wake_word word{0, EP_WAKE_BY_DESCRIPTOR | static_cast<uint32_t>(full.ends[1])};
  std::thread notifier([&] { wake_notify(&word); });
  const int64_t patience_ns = clock_now_ns() + 10'000 * ms;
  while (counted(word) == 0 && clock_now_ns() < patience_ns) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EP_CHECK_EQ(counted(word), 1u);
  std::vector<char> taken(bytes.size());
  EP_CHECK(read(full.ends[0], taken.data(), taken.size()) > 0);
  notifier.join();
  EP_CHECK_EQ(counted(word), 0u);

  fixture f;
  std::atomic_ref<uint32_t>(f.word.epoch).store(1);
  std::atomic<bool> ended{false};
  std::thread end([&] {
    f.sleeper.reset();
    ended.store(true);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EP_CHECK(!ended.load());
  std::atomic_ref<uint32_t>(f.word.epoch).store(0);
  end.join();
}

// As an engine and those that post: what is published before the notification is seen, or the sleeper is woken for it.
void test_nothing_is_missed() {
  fixture f;
  constexpr int posters = 3;
  constexpr uint64_t each = 20'000;
  std::atomic<uint64_t> posted{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < posters; ++i) {
    threads.emplace_back([&] {
      for (uint64_t n = 0; n < each; ++n) {
        posted.fetch_add(1, std::memory_order_seq_cst);
        wake_notify(&f.word);
        if (n % 64 == 0) std::this_thread::yield();
      }
    });
  }
  const int64_t begin = clock_now_ns();
  for (uint64_t seen = 0; seen < posters * each;) {
    f.sleeper->prepare();
    const uint64_t found = posted.load(std::memory_order_seq_cst);
    if (found != seen) {
      f.sleeper->cancel();
      seen = found;
      continue;
    }
    EP_CHECK(f.sleeper->sleep(-1, forever_ns));
  }
  EP_CHECK(clock_now_ns() - begin < forever_ns / 2);
  for (std::thread& one : threads) one.join();
}

} // namespace

int main() {
  test_word();
  test_descriptor();
  test_time();
  test_late();
  test_end();
  test_end_waits();
  test_nothing_is_missed();
  return ep::check::finish();
}
