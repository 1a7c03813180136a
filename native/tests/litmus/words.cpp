#include "words.hpp"

#include <linux/futex.h>

namespace litmus {
namespace {

world* current = nullptr;

rl::debug_info info_of(const where& at) { return rl::debug_info(at.function_name(), at.file_name(), at.line()); }

rl::memory_order to_rl(std::memory_order order) {
  switch (order) {
    case std::memory_order_relaxed: return rl::mo_relaxed;
    case std::memory_order_consume: return rl::mo_consume;
    case std::memory_order_acquire: return rl::mo_acquire;
    case std::memory_order_release: return rl::mo_release;
    case std::memory_order_acq_rel: return rl::mo_acq_rel;
    case std::memory_order_seq_cst: return rl::mo_seq_cst;
  }
  return rl::mo_seq_cst;
}

rl::atomic<uint64_t>* model_of(const void* word) { return current == nullptr ? nullptr : current->word_at(word); }

// Words that no case has declared, and all words outside of a case.
template <class T> uint64_t memory_update(void* word, update kind, uint64_t value) {
  auto* plain = static_cast<T*>(word);
  switch (kind) {
    case update::add: return __atomic_fetch_add(plain, static_cast<T>(value), __ATOMIC_SEQ_CST);
    case update::sub: return __atomic_fetch_sub(plain, static_cast<T>(value), __ATOMIC_SEQ_CST);
    case update::swap: return __atomic_exchange_n(plain, static_cast<T>(value), __ATOMIC_SEQ_CST);
    case update::set: return __atomic_fetch_or(plain, static_cast<T>(value), __ATOMIC_SEQ_CST);
    case update::flip: return __atomic_fetch_xor(plain, static_cast<T>(value), __ATOMIC_SEQ_CST);
  }
  return 0;
}

} // namespace

uint64_t word_load(const void* word, uint32_t bytes, std::memory_order order, const where& at) {
  if (auto* model = model_of(word)) return model->load(current->access_order(word, access::load, order, info_of(at)), info_of(at));
  return bytes == 4 ? __atomic_load_n(static_cast<const uint32_t*>(word), __ATOMIC_SEQ_CST) : __atomic_load_n(static_cast<const uint64_t*>(word), __ATOMIC_SEQ_CST);
}

void word_store(void* word, uint32_t bytes, uint64_t value, std::memory_order order, const where& at) {
  if (auto* model = model_of(word)) return model->store(value, current->access_order(word, access::store, order, info_of(at)), info_of(at));
  word_update(word, bytes, update::swap, value, order, at);
}

uint64_t word_update(void* word, uint32_t bytes, update kind, uint64_t value, std::memory_order order, const where& at) {
  if (auto* model = model_of(word)) {
    const rl::memory_order chosen = current->access_order(word, access::update, order, info_of(at));
    switch (kind) {
      case update::add: return model->fetch_add(value, chosen, info_of(at));
      case update::sub: return model->fetch_sub(value, chosen, info_of(at));
      case update::swap: return model->exchange(value, chosen, info_of(at));
      case update::set: return model->fetch_or(value, chosen, info_of(at));
      case update::flip: return model->fetch_xor(value, chosen, info_of(at));
    }
  }
  return bytes == 4 ? memory_update<uint32_t>(word, kind, value) : memory_update<uint64_t>(word, kind, value);
}

bool word_exchange_if(void* word, uint32_t bytes, uint64_t& expected, uint64_t value, std::memory_order order, const where& at) {
  if (auto* model = model_of(word)) return model->compare_exchange_strong(expected, value, current->access_order(word, access::update, order, info_of(at)), info_of(at));
  if (bytes == 8) {
    return __atomic_compare_exchange_n(static_cast<uint64_t*>(word), &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  }
  auto found = static_cast<uint32_t>(expected);
  const bool done = __atomic_compare_exchange_n(static_cast<uint32_t*>(word), &found, static_cast<uint32_t>(value), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  expected = found;
  return done;
}

void fence(std::memory_order order, const where& at) {
  if (current == nullptr) return __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (current->fences_lost()) return;
  rl::atomic_thread_fence(to_rl(order), info_of(at));
}

void wait_a_turn(const where& at) {
  if (current != nullptr) rl::yield(1, info_of(at));
}

long futex_call(uint32_t* word, int operation, uint32_t value, const void*, const void*, int) {
  if (current == nullptr) return 0; // nobody sleeps outside of a case
  if (operation == FUTEX_WAIT) return current->futex_wait(word, value);
  current->futex_wake();
  return 0;
}

void check(bool holds, const char* what, const where& at) {
  if (!holds) rl::ctx().fail_test(what, rl::test_result_user_assert_failed, info_of(at));
}

world::world() {
  current = this;
  late_posted_.store(0, rl::mo_relaxed, $);
  late_done_.store(0, rl::mo_relaxed, $);
}
world::~world() { current = nullptr; }
world* world::running() { return current; }
void world::forget() { current = nullptr; }

void world::declare_word(const void* address, uint64_t value) {
  RL_VERIFY(word_count_ < most_words);
  word_addresses_[word_count_] = address;
  words_[word_count_++].store(value, rl::mo_relaxed, $);
}

void world::declare_bytes(void* address) {
  RL_VERIFY(byte_count_ < most_bytes);
  byte_addresses_[byte_count_] = address;
  bytes_[byte_count_++]($) = 0;
}

rl::atomic<uint64_t>* world::word_at(const void* address) {
  for (size_t i = 0; i < word_count_; ++i) {
    if (word_addresses_[i] == address) return &words_[i];
  }
  return nullptr;
}

rl::var<uint64_t>* world::bytes_at(const void* address) {
  for (size_t i = 0; i < byte_count_; ++i) {
    if (byte_addresses_[i] == address) return &bytes_[i];
  }
  return nullptr;
}

uint64_t world::read_bytes(const void* address) { return (*bytes_at(address))($); }

bool world::fences_lost() const {
  return std::any_of(broken.begin(), broken.end(), [](const fault& one) { return one.kind == access::fence; });
}

// Sequentially consistent accesses of C++ are in one order with the fences: whoever has passed a fence sees all such stores before it. Relacy knows this of fences
// only. So a fence stands between such a store of a thread and its next such load. That is more than C++ says of what stands around them, and so a fence
// of the product right after such a pair cannot be seen to be needed.
rl::memory_order world::access_order(const void* address, access kind, std::memory_order order, const rl::debug_info& info) {
  const bool weakened = std::any_of(broken.begin(), broken.end(), [&](const fault& one) { return one.word == address && one.kind == kind; });
  const rl::memory_order chosen = weakened ? rl::mo_relaxed : to_rl(order);
  bool& stored = stored_in_order_[rl::ctx().current_thread()];
  if (kind == access::load) {
    if (chosen == rl::mo_seq_cst && stored) rl::atomic_thread_fence(rl::mo_seq_cst, info);
  } else {
    stored = chosen == rl::mo_seq_cst;
  }
  return chosen;
}

// The kernel compares and sleeps under a lock that the waker takes, too. No timeout: in the product a slice of 2 ms hides a lost wake-up; here it is a deadlock.
long world::futex_wait(uint32_t* address, uint32_t value) {
  futex_mutex_.lock($);
  if (static_cast<uint32_t>(word_at(address)->load(rl::mo_relaxed, $)) == value) futex_changed_.wait(futex_mutex_, $);
  futex_mutex_.unlock($);
  return 0;
}

void world::futex_wake() {
  futex_mutex_.lock($);
  futex_changed_.notify_all($);
  futex_mutex_.unlock($);
}

void world::store_past_caches(void* address, uint64_t value) {
  const uint64_t number = late_posted_.load(rl::mo_relaxed, $);
  late_[number] = {bytes_at(address), value};
  late_posted_.store(number + 1, rl::mo_release, $);
}

void world::copy_fence() {
  if (lose_copy_fence) return;
  rl::linear_backoff wait;
  while (late_done_.load(rl::mo_acquire, $) < late_posted_.load(rl::mo_relaxed, $)) wait.yield($);
}

void world::drain(size_t stores) {
  for (uint64_t done = 0; done < stores; ++done) {
    rl::linear_backoff wait;
    while (late_posted_.load(rl::mo_acquire, $) <= done) wait.yield($);
    (*late_[done].target)($) = late_[done].value;
    late_done_.store(done + 1, rl::mo_release, $);
  }
}

} // namespace litmus

// In place of core/copy.cpp: payload becomes the checker's variables, eight bytes each.
extern "C" void ep_copy(void* dst, const void* src, uint64_t bytes, int non_temporal) {
  litmus::world& world = *litmus::world::running();
  for (uint64_t at = 0; at < bytes; at += sizeof(uint64_t)) {
    uint64_t value = 0;
    std::memcpy(&value, static_cast<const uint8_t*>(src) + at, sizeof value);
    uint8_t* to = static_cast<uint8_t*>(dst) + at;
    if (non_temporal != 0) {
      world.store_past_caches(to, value);
    } else {
      (*world.bytes_at(to))($) = value;
    }
  }
}
extern "C" void ep_copy_fence(void) { litmus::world::running()->copy_fence(); }
