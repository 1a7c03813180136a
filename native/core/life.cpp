#include "life.hpp"

#include <atomic>
#include <mutex>
#include <vector>

#include <pthread.h>
#include <unistd.h>

namespace ep {
namespace {

pthread_mutex_t* life_mutex(ep_life_word& word) {
  static_assert(sizeof(pthread_mutex_t) <= sizeof word.mutex, "the robust mutex must fit into ep_life_word");
  return reinterpret_cast<pthread_mutex_t*>(word.mutex);
}

// Leaked on purpose: it must outlive every thread.
void keep_for_ever(std::shared_ptr<segment> mapping) {
  static auto* mutex = new std::mutex;
  static auto* kept = new std::vector<std::shared_ptr<segment>>;
  const std::lock_guard lock(*mutex);
  kept->push_back(std::move(mapping));
}

} // namespace

result<nothing> life_holder::begin(ep_life_word& word, std::shared_ptr<segment> mapping) {
  word.pid = static_cast<uint32_t>(getpid());
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int made = pthread_mutex_init(life_mutex(word), &attributes);
  pthread_mutexattr_destroy(&attributes);
  if (made != 0) return failure_errno("pthread_mutex_init", made, "robust mutex of a rank");
  pthread_mutex_lock(life_mutex(word));
  std::atomic_ref<uint32_t>(word.state).store(EP_LIFE_ALIVE, std::memory_order_release);
  word_ = &word;
  mapping_ = std::move(mapping);
  owner_ = std::this_thread::get_id();
  return nothing{};
}

void life_holder::end(bool orderly) {
  if (word_ == nullptr) return;
  std::atomic_ref<uint32_t>(word_->state).store(orderly ? EP_LIFE_CLOSED : EP_LIFE_DEAD, std::memory_order_seq_cst);
  // Hazard: a robust mutex must be unlocked before its memory is unmapped, by the thread that owns it, or that thread's robust list points into
  // nothing. Another thread cannot unlock it: then the mapping is kept for the rest of the process.
  if (std::this_thread::get_id() == owner_) {
    pthread_mutex_unlock(life_mutex(*word_));
  } else {
    keep_for_ever(mapping_);
  }
  word_ = nullptr;
  mapping_.reset();
}

} // namespace ep
