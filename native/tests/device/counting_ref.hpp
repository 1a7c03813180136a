// A std::atomic_ref that tells `Counter` of what is done: load(), store(at), update(). For tests on one thread, before whose sources of the product
// `#define atomic_ref ep_counting_ref` stands.
#pragma once

#include <atomic>
#include <utility>

template <class T, class Counter> class counting_ref {
 public:
  explicit counting_ref(T& word) : word_(&word) {}
  T load(std::memory_order) const {
    Counter::load();
    return *word_;
  }
  void store(T value, std::memory_order) const {
    Counter::store(word_);
    *word_ = value;
  }
  T exchange(T value, std::memory_order) const {
    Counter::update();
    return std::exchange(*word_, value);
  }
  T fetch_add(T value, std::memory_order order) const { return exchange(static_cast<T>(*word_ + value), order); }
  T fetch_or(T value, std::memory_order order) const { return exchange(static_cast<T>(*word_ | value), order); }
  T fetch_xor(T value, std::memory_order order) const { return exchange(static_cast<T>(*word_ ^ value), order); }
  bool compare_exchange_strong(T& expected, T value, std::memory_order) const {
    Counter::update();
    if (*word_ != expected) {
      expected = *word_;
      return false;
    }
    *word_ = value;
    return true;
  }
  bool compare_exchange_strong(T& expected, T value, std::memory_order order, std::memory_order) const { return compare_exchange_strong(expected, value, order); }
  bool compare_exchange_weak(T& expected, T value, std::memory_order order) const { return compare_exchange_strong(expected, value, order); }

 private:
  T* word_;
};
