// Compiled into every source of the litmus tests before anything else (-include): the product's own sources and headers, unchanged, but with the words,
// fences and futexes of a model checker under them. What is checked is the code that ships; only what lies below std::atomic_ref, std::atomic_thread_fence
// and the futex system call is another.
//
// HAZARD: nothing that is compiled so may be linked with ep_core: inline functions would have two bodies under one name.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <source_location>
#include <sstream>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace litmus {

using where = std::source_location;

enum class update { add, sub, swap, set, flip };

// On a word that a running case has declared (words.hpp); otherwise on memory itself.
uint64_t word_load(const void* word, uint32_t bytes, std::memory_order order, const where& at);
void word_store(void* word, uint32_t bytes, uint64_t value, std::memory_order order, const where& at);
uint64_t word_update(void* word, uint32_t bytes, update kind, uint64_t value, std::memory_order order, const where& at);
bool word_exchange_if(void* word, uint32_t bytes, uint64_t& expected, uint64_t value, std::memory_order order, const where& at);
void fence(std::memory_order order, const where& at);
void wait_a_turn(const where& at); // of another thread of the case: waits that look again and again, without anybody to wake them
long futex_call(uint32_t* word, int operation, uint32_t value, const void* timeout, const void* other, int mask);

template <class T> class word_ref {
 public:
  explicit word_ref(T& word) : word_(&word) {}
  T load(std::memory_order order = std::memory_order_seq_cst, const where& at = where::current()) const {
    return static_cast<T>(word_load(word_, sizeof(T), order, at));
  }
  void store(T value, std::memory_order order = std::memory_order_seq_cst, const where& at = where::current()) const {
    word_store(word_, sizeof(T), static_cast<uint64_t>(value), order, at);
  }
  T fetch_add(T value, std::memory_order order = std::memory_order_seq_cst, const where& at = where::current()) const {
    return static_cast<T>(word_update(word_, sizeof(T), update::add, static_cast<uint64_t>(value), order, at));
  }
  T fetch_sub(T value, std::memory_order order = std::memory_order_seq_cst, const where& at = where::current()) const {
    return static_cast<T>(word_update(word_, sizeof(T), update::sub, static_cast<uint64_t>(value), order, at));
  }
  T exchange(T value, std::memory_order order = std::memory_order_seq_cst, const where& at = where::current()) const {
    return static_cast<T>(word_update(word_, sizeof(T), update::swap, static_cast<uint64_t>(value), order, at));
  }
  T fetch_or(T value, std::memory_order order = std::memory_order_seq_cst, const where& at = where::current()) const {
    return static_cast<T>(word_update(word_, sizeof(T), update::set, static_cast<uint64_t>(value), order, at));
  }
  T fetch_xor(T value, std::memory_order order = std::memory_order_seq_cst, const where& at = where::current()) const {
    return static_cast<T>(word_update(word_, sizeof(T), update::flip, static_cast<uint64_t>(value), order, at));
  }
  bool compare_exchange_strong(T& expected, T value, std::memory_order order = std::memory_order_seq_cst, const where& at = where::current()) const {
    auto found = static_cast<uint64_t>(expected);
    const bool done = word_exchange_if(word_, sizeof(T), found, static_cast<uint64_t>(value), order, at);
    expected = static_cast<T>(found);
    return done;
  }
  bool compare_exchange_weak(T& expected, T value, std::memory_order order = std::memory_order_seq_cst, const where& at = where::current()) const {
    return compare_exchange_strong(expected, value, order, at);
  }

 private:
  T* word_;
};

} // namespace litmus

// The seam itself: these names stand where the product writes std::atomic_ref and std::atomic_thread_fence.
namespace std {
template <class T> using litmus_ref = ::litmus::word_ref<T>;
inline void litmus_fence(memory_order order, const source_location& at = source_location::current()) { ::litmus::fence(order, at); }
} // namespace std

inline int litmus_nap(const timespec*, timespec*, const std::source_location& at = std::source_location::current()) {
  ::litmus::wait_a_turn(at);
  return 0;
}
inline int litmus_yield(const std::source_location& at = std::source_location::current()) {
  ::litmus::wait_a_turn(at);
  return 0;
}

template <class First, class... Rest> long litmus_syscall(long number, First first, Rest... rest) {
  if constexpr (std::is_same_v<First, uint32_t*>) return ::litmus::futex_call(first, rest...);
  return ::syscall(number, first, rest...);
}

#define atomic_ref litmus_ref
#define atomic_thread_fence litmus_fence
#define syscall litmus_syscall
#define nanosleep litmus_nap
#define sched_yield litmus_yield
