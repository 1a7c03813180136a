// Symmetric memory: bytes land where they should, signals come after them, and whoever sleeps is woken.
#include "memory.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.hpp"
#include "core/ranks.hpp"
#include "ep/device/copy.h"
#include "host_memory.hpp"

namespace {

using namespace ep;
using test::member;
using test::run_ranks;

std::shared_ptr<symmetric_memory> allocate(member& self, uint64_t bytes, uint64_t slots) {
  auto made = symmetric_memory::create(self.context, bytes, slots);
  EP_CHECK(made.ok());
  EP_CHECK(made.value()->connect(self.gather(made.value()->handle())).ok());
  self.in.meet.arrive();
  return made.value();
}

void puts_and_gets() {
  run_ranks(3, [](member& self) {
    constexpr uint64_t size = 12u << 20;
    auto memory = allocate(self, size, 8);
    const int32_t next = (self.rank + 1) % 3;
    std::mt19937 random(static_cast<unsigned>(self.rank));
    std::vector<uint8_t> source(size);
    for (uint64_t i = 0; i < size; i += 4) {
      const uint32_t word = static_cast<uint32_t>(random());
      std::memcpy(&source[i], &word, 4);
    }
    std::vector<uint8_t> back(size);
    // From nothing to beyond the size from which copies bypass the caches, at odd places.
    for (const auto& [offset, bytes] : std::vector<std::pair<uint64_t, uint64_t>>{
             {0, 0}, {5, 1}, {8, 8}, {3, 4097}, {64, 65536}, {1, 4u << 20}, {4099, (4u << 20) + 77}, {0, size}}) {
      memory->put(next, offset, source.data() + offset, bytes);
      memory->get(next, offset, back.data(), bytes);
      EP_CHECK(std::memcmp(back.data(), source.data() + offset, bytes) == 0);
    }
    self.in.meet.arrive();
    EP_CHECK(symmetric_memory::find(memory->device_handle().memory_id) == memory);
    const uint64_t id = memory->device_handle().memory_id;
    self.in.meet.arrive();
    memory.reset();
    EP_CHECK(symmetric_memory::find(id) == nullptr);
  });
}

// A memory over another, reached by nothing: what it shares with that one, and what kernels are told of it.
void lies_over_another() {
  struct no_route final : memory_route {
    result<nothing> prepare_source(uint64_t, uint64_t, const std::shared_ptr<const void>&) override { return nothing{}; }
  };
  run_ranks(3, [](member& self) {
    auto base = allocate(self, 4096, 4);
    const int32_t next = (self.rank + 1) % 3;
    const int32_t other = (self.rank + 2) % 3;
    EP_CHECK(!symmetric_memory::over(base, {3}).ok());
    auto made = symmetric_memory::over(base, {next});
    EP_CHECK(made.ok());
    const std::shared_ptr<symmetric_memory> over = made.value();
    EP_CHECK(!symmetric_memory::over(over, {next}).ok()); // not connected: it maps nobody yet
    EP_CHECK(over->own_data() == base->own_data() && over->own_signals() == base->own_signals());
    EP_CHECK(&over->context() == self.context.get());
    EP_CHECK(!over->connect_by_nic(std::make_shared<no_route>(), EP_MEMORY_LOAD_STORE, 0).ok());
    EP_CHECK(over->connect_by_nic(std::make_shared<no_route>(), EP_MEMORY_IBGDA, 77).ok());
    const ep_memory_handle handle = over->device_handle();
    EP_CHECK_EQ(handle.header.kind, EP_MEMORY_MIXED_IBGDA);
    EP_CHECK_EQ(handle.proxy, 77u);
    EP_CHECK(handle.memory_id != base->device_handle().memory_id);
    EP_CHECK(over->data(next) == base->data(next) && over->signal(next, 3) == base->signal(next, 3));
    EP_CHECK(over->data(self.rank) == base->own_data());
    EP_CHECK(!over->mapped(other) && over->mapped(next));
    EP_CHECK(over->mapping(next) == base->mapping(next));
    self.in.meet.arrive();
    // Its end is not that of the part; the end of the other is not its own.
    const std::weak_ptr<symmetric_memory> first = base;
    auto efa = symmetric_memory::over(base, {}).value();
    EP_CHECK(efa->connect_by_nic(std::make_shared<no_route>(), EP_MEMORY_EFA, 0).ok());
    EP_CHECK_EQ(efa->device_handle().header.kind, EP_MEMORY_MIXED_EFA);
    EP_CHECK(!efa->mapped(next));
    efa.reset();
    auto proxy = symmetric_memory::over(base, {next}).value();
    EP_CHECK(proxy->connect_by_nic(std::make_shared<no_route>(), EP_MEMORY_PROXY, 5).ok());
    EP_CHECK_EQ(proxy->device_handle().header.kind, EP_MEMORY_MIXED_PROXY);
    EP_CHECK(proxy->mapped(next) && !proxy->mapped(other));
    proxy.reset();
    auto own = segment::containing(base->own_data(), 1);
    EP_CHECK(own && !own->replaceable());
    base.reset();
    EP_CHECK(!first.expired());
    over->data(next)[self.rank] = 9;
    self.in.meet.arrive();
    EP_CHECK_EQ(over->own_data()[other], 9);
    made = failure{};
    self.in.meet.arrive();
  });
}

void refuses_different_sizes() {
  run_ranks(2, [](member& self) {
    auto made = symmetric_memory::create(self.context, self.rank == 0 ? 4096 : 8192, 1);
    EP_CHECK(made.ok());
    auto connected = made.value()->connect(self.gather(made.value()->handle()));
    EP_CHECK(!connected.ok() && connected.why().status == EP_STATUS_MISMATCH);
    EP_CHECK(connected.why().message.find("rank " + std::to_string(1 - self.rank)) != std::string::npos);
    EP_CHECK(!made.value()->connected());
    auto huge = symmetric_memory::create(self.context, uint64_t{1} << 47, 0);
    EP_CHECK(!huge.ok() && huge.why().status == EP_STATUS_MEMORY_LIMIT);
    auto slots = symmetric_memory::create(self.context, 0, uint64_t{1} << 33);
    EP_CHECK(!slots.ok() && slots.why().status == EP_STATUS_MEMORY_LIMIT);
    self.in.meet.arrive();
  });
}

template <class Word> void atomics_of(symmetric_memory& memory, int32_t peer, uint64_t offset) {
  constexpr auto width = static_cast<uint32_t>(sizeof(Word));
  std::mt19937_64 random(7);
  Word model = 0;
  for (int i = 0; i < 2000; ++i) {
    const auto op = static_cast<atomic_op>(random() % 8);
    const Word operand = static_cast<Word>(random());
    const Word expected = i % 2 == 0 ? model : static_cast<Word>(random());
    const Word before = model;
    switch (op) {
      case atomic_op::fetch: break;
      case atomic_op::set:
      case atomic_op::swap: model = operand; break;
      case atomic_op::add: model = static_cast<Word>(model + operand); break;
      case atomic_op::bit_and: model &= operand; break;
      case atomic_op::bit_or: model |= operand; break;
      case atomic_op::bit_xor: model ^= operand; break;
      case atomic_op::compare_swap: model = model == expected ? operand : model; break;
    }
    EP_CHECK_EQ(memory.atomic(peer, offset, width, op, operand, expected), uint64_t{before});
  }
  EP_CHECK_EQ(memory.atomic(peer, offset, width, atomic_op::fetch, 0, 0), uint64_t{model});
}

void atomics() {
  run_ranks(4, [](member& self) {
    auto memory = allocate(self, 4096, 1);
    atomics_of<uint32_t>(*memory, 2, 4u * static_cast<uint64_t>(self.rank));
    atomics_of<uint64_t>(*memory, 1, 64 + 8u * static_cast<uint64_t>(self.rank));
    for (int i = 0; i < 5000; ++i) memory->atomic(0, 512, 8, atomic_op::add, 1, 0);
    self.in.meet.arrive();
    EP_CHECK_EQ(memory->atomic(0, 512, 8, atomic_op::fetch, 0, 0), 20'000u);
  });
}

// Every way of writing wakes who sleeps on what was written: the slice alone would take far longer.
void wakes_the_target() {
  run_ranks(2, [](member& self) {
    auto memory = allocate(self, 4096, 2);
    const auto sleep_on = [&](const uint64_t* word, uint64_t value) {
      wait_scope scope = self.context->waits(nullptr, deadline_after(60'000));
      scope.policy = {0, 0, 40'000'000'000};
      const int64_t start = clock_now_ns();
      EP_CHECK_EQ(wait_word(scope, word, comparison::ge, value, any_rank).status, unsigned{EP_STATUS_OK});
      EP_CHECK(clock_now_ns() - start < 20'000'000'000);
    };
    const auto* data = reinterpret_cast<const uint64_t*>(memory->data(self.rank));
    for (uint64_t i = 1; i <= 60; ++i) {
      if (self.rank == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(300));
        switch (i % 5) {
          case 0: memory->put(1, 0, &i, sizeof i); break;
          case 1: memory->atomic(1, 0, 8, atomic_op::set, i, 0); break;
          case 2:
            std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(memory->data(1))).store(i, std::memory_order_relaxed);
            memory->fence();
            break;
          case 3: memory->signal_data(1, 0, signal_op::set, i); break;
          default:
            memory->signal_data(1, 0, signal_op::add, 1);
            break;
        }
      } else {
        sleep_on(data, i);
      }
      self.in.meet.arrive();
    }
    for (uint64_t i = 1; i <= 20; ++i) {
      if (self.rank == 0) memory->signal_update(1, 1, i % 2 == 0 ? signal_op::set : signal_op::add, i % 2 == 0 ? i : 1);
      else sleep_on(memory->signal(1, 1), i);
      self.in.meet.arrive();
    }
  });
}

// Whoever sees the signal sees the bytes, small ones through the caches and large ones past them.
void signals_come_after_bytes() {
  run_ranks(2, [](member& self) {
    constexpr uint64_t largest = (4u << 20) + 64;
    auto memory = allocate(self, largest + 4096, 2);
    uint64_t signals = 0; // that came so far: the words only grow
    for (const auto& [bytes, rounds] : std::vector<std::pair<uint64_t, int>>{{8, 20'000}, {4096, 3'000}, {largest, 30}}) {
      std::vector<uint64_t> source(bytes / 8);
      for (int round = 1; round <= rounds; ++round) {
        const auto mark = static_cast<uint64_t>(round);
        ++signals;
        wait_scope scope = self.context->waits(nullptr, deadline_after(60'000));
        if (self.rank == 0) {
          std::fill(source.begin(), source.end(), mark);
          memory->write(1, 0, source.data(), bytes);
          memory->signal_data(1, largest, signal_op::add, 1);
          // The answer keeps the next round from overtaking the reader.
          const auto* answer = reinterpret_cast<const uint64_t*>(memory->data(0) + largest);
          EP_CHECK_EQ(wait_word(scope, answer, comparison::ge, signals, any_rank).status, unsigned{EP_STATUS_OK});
        } else {
          const auto* words = reinterpret_cast<const uint64_t*>(memory->data(1));
          const auto* signal = reinterpret_cast<const uint64_t*>(memory->data(1) + largest);
          EP_CHECK_EQ(wait_word(scope, signal, comparison::ge, signals, any_rank).status, unsigned{EP_STATUS_OK});
          EP_CHECK(words[0] == mark && words[bytes / 8 - 1] == mark && words[bytes / 16] == mark);
          memory->signal_data(0, largest, signal_op::add, 1);
        }
      }
      self.in.meet.arrive();
    }
  });
}

// The n-th core that this process may use; -1 if there are fewer.
int core_of_process(int n) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(getpid(), sizeof allowed, &allowed);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed) && n-- == 0) return core;
  }
  return -1;
}

// Pages that come at the first touch would come as a kill where there are none left.
void host_memory_is_there_when_it_is_made() {
  constexpr uint64_t bytes = (8u << 20) + 12'345;
  const auto made = host_memory::create(bytes).value();
  std::vector<uint8_t> present((bytes + 4095) / 4096);
  EP_CHECK_EQ(mincore(made->data(), bytes, present.data()), 0);
  EP_CHECK(std::all_of(present.begin(), present.end(), [](uint8_t page) { return (page & 1) != 0; }));
  EP_CHECK(std::all_of(made->data(), made->data() + bytes, [](uint8_t byte) { return byte == 0; }));
}

void stay_on(int core) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  EP_CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
}

// Readers that saw the flag of a non-temporal copy before its last bytes.
long stale_reads(bool fenced, long rounds, const int (&cores)[2]) {
  constexpr uint64_t words = 512;
  struct alignas(64) shared {
    uint64_t data[words];
    alignas(64) uint64_t flag;
    alignas(64) uint64_t answer;
  };
  static shared there;
  there = {};
  std::atomic<bool> over{false};
  long stale = 0;
  std::thread reader([&] {
    if (cores[1] >= 0) stay_on(cores[1]);
    unsigned spins = 0;
    for (uint64_t round = 1;; ++round) {
      while (std::atomic_ref<uint64_t>(there.flag).load(std::memory_order_acquire) < round) {
        if (over.load(std::memory_order_relaxed)) return;
        if (++spins % 4096 == 0) std::this_thread::yield();
      }
      bool old = false;
      // What was written last may still be on its way: an Intel processor delivers whole lines soon.
      for (uint64_t i = words; i-- > 0;) old = old || std::atomic_ref<uint64_t>(there.data[i]).load(std::memory_order_relaxed) != round;
      stale += old ? 1 : 0;
      std::atomic_ref<uint64_t>(there.answer).store(round, std::memory_order_release);
    }
  });
  alignas(64) uint64_t source[words];
  unsigned spins = 0;
  for (long round = 1; round <= rounds; ++round) {
    std::fill(std::begin(source), std::end(source), static_cast<uint64_t>(round));
    ep_copy(there.data, source, sizeof source, 1);
    if (fenced) ep_copy_fence();
    std::atomic_ref<uint64_t>(there.flag).store(static_cast<uint64_t>(round), std::memory_order_release);
    while (std::atomic_ref<uint64_t>(there.answer).load(std::memory_order_acquire) < static_cast<uint64_t>(round)) {
      if (++spins % 4096 == 0) std::this_thread::yield();
    }
  }
  over = true;
  reader.join();
  return stale;
}

void non_temporal_copies_need_their_fence() {
  constexpr long rounds = 5'000;
  // Each thread on a core of its own: wherever the scheduler puts both on one, no read is ever stale.
  const int cores[2] = {core_of_process(0), core_of_process(1)};
  stay_on(cores[0]);
#if !defined(__x86_64__)
  std::printf("no non-temporal stores on this machine: what the fence is for cannot be shown\n");
  EP_CHECK_EQ(stale_reads(true, rounds, cores), 0);
#elif defined(__SANITIZE_THREAD__)
  EP_CHECK_EQ(stale_reads(true, rounds, cores), 0);
  std::printf("ThreadSanitizer orders everything itself: what the fence is for cannot be shown\n");
#else
  // One core runs one thread at a time, and a switch drains its buffers.
  if (cores[1] < 0) return void(std::printf("one core: what the fence is for cannot be shown\n"));
  // In turns, and on a busy machine, where the two threads rarely run at one time, until enough was seen without the fence to say that it would have
  // been seen with it.
  constexpr long enough = 100;
  long without = 0;
  long with = 0;
  long tried = 0;
  for (const int64_t end = clock_now_ns() + 20'000'000'000; without < enough && clock_now_ns() < end; tried += rounds) {
    without += stale_reads(false, rounds, cores);
    with += stale_reads(true, rounds, cores);
  }
  std::printf("stale reads of %ld: %ld without the fence, %ld with it\n", tried, without, with);
  // Intel's deliver whole lines so soon that on a busy machine none may be seen.
  EP_CHECK(without > 0 || !__builtin_cpu_is("amd"));
  EP_CHECK_EQ(with, 0);
#endif
}

} // namespace

int main() {
  puts_and_gets();
  host_memory_is_there_when_it_is_made();
  lies_over_another();
  refuses_different_sizes();
  atomics();
  wakes_the_target();
  signals_come_after_bytes();
  non_temporal_copies_need_their_fence();
  EP_CHECK_EQ(segment_count(), 0u);
  return ep::check::finish();
}
