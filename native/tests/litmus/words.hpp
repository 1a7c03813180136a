// The model checker's side of the seam: words, payload bytes and a futex of relacy, by the addresses that the product uses.
#pragma once

// HAZARD: relacy replaces the global operators new and delete and asks is_ctx() whose memory it is, with another answer for its own reports, which
// then end the process. Nothing here needs its heap, so the answer is always no.
#include <relacy/base.hpp>

#include <relacy/thread_local_ctx.hpp>

#include <relacy/context_base.hpp>
namespace rl {
inline bool litmus_never() { return false; }
} // namespace rl
#define is_ctx litmus_never
#include <relacy/relacy.hpp>
#undef is_ctx

// HAZARD: relacy renames these for code that is written for it; the product's headers are not.
#undef new
#undef delete
#undef malloc
#undef calloc
#undef realloc
#undef free
#undef assert
#undef errno
#undef memory_order_relaxed
#undef memory_order_consume
#undef memory_order_acquire
#undef memory_order_release
#undef memory_order_acq_rel
#undef memory_order_seq_cst

namespace litmus {

enum class access { load, store, update, fence };

// Orders of the product that a case weakens, to see that the checker finds it out: accesses of a kind to a word become relaxed, fences (of any word) nothing.
struct fault {
  access kind = access::load;
  const void* word = nullptr;
};

// What a running case declares. Made anew for each execution; there is one at a time.
class world {
 public:
  world();
  ~world();
  static world* running();
  static void forget(); // after a case that failed: nobody destroys its world

  void declare_word(const void* address, uint64_t value = 0);
  void declare_bytes(void* address); // eight bytes of payload, as one plain variable: races on it are found
  uint64_t read_bytes(const void* address);

  std::vector<fault> broken;
  bool lose_copy_fence = false;

  rl::atomic<uint64_t>* word_at(const void* address);
  rl::var<uint64_t>* bytes_at(const void* address);
  // The order of an access as the checker takes it. Also where two sequentially consistent accesses of a thread get their fence, see words.cpp.
  rl::memory_order access_order(const void* address, access kind, std::memory_order order, const rl::debug_info& info);
  bool fences_lost() const;
  long futex_wait(uint32_t* address, uint32_t value);
  void futex_wake();

  // Stores past the caches leave their processor when they like: `drain` is the thread that carries them out, `copy_fence` waits for it.
  void store_past_caches(void* address, uint64_t value);
  void copy_fence();
  void drain(size_t stores);

 private:
  static constexpr size_t most_words = 16;
  static constexpr size_t most_bytes = 8;
  struct late_store {
    rl::var<uint64_t>* target;
    uint64_t value;
  };
  const void* word_addresses_[most_words] = {};
  rl::atomic<uint64_t> words_[most_words];
  size_t word_count_ = 0;
  const void* byte_addresses_[most_bytes] = {};
  rl::var<uint64_t> bytes_[most_bytes];
  size_t byte_count_ = 0;
  bool stored_in_order_[4] = {}; // by thread: its last store was sequentially consistent
  late_store late_[most_bytes] = {};
  rl::atomic<uint64_t> late_posted_;
  rl::atomic<uint64_t> late_done_;
  rl::mutex futex_mutex_;
  rl::condition_variable futex_changed_;
};

void check(bool holds, const char* what, const where& at = where::current());

} // namespace litmus
