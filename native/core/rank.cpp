#include "rank.hpp"

#include <cerrno>
#include <cstring>
#include <mutex>

#include <pthread.h>
#include <unistd.h>

namespace ep {
namespace {

pthread_mutex_t* life_mutex(ep_life_word& life) {
  static_assert(sizeof(pthread_mutex_t) <= sizeof life.mutex, "the robust mutex must fit into ep_life_word");
  return reinterpret_cast<pthread_mutex_t*>(life.mutex);
}

// Leaked on purpose: it must outlive every thread.
void keep_for_ever(std::shared_ptr<segment> mapping) {
  static auto* mutex = new std::mutex;
  static auto* kept = new std::vector<std::shared_ptr<segment>>;
  const std::lock_guard lock(*mutex);
  kept->push_back(std::move(mapping));
}

} // namespace

result<std::shared_ptr<rank_context>> rank_context::create(int32_t rank, int32_t world_size, int32_t ranks_on_host) {
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(rank) + " is not in a world of " + std::to_string(world_size)};
  }
  auto made = segment::create(sizeof(ep_rank_control));
  if (!made.ok()) return made.why();
  std::shared_ptr<rank_context> context(new rank_context);
  context->rank_ = rank;
  context->world_size_ = world_size;
  context->policy_ = wait_policy_for(ranks_on_host);
  context->own_ = made.value();
  context->owner_ = std::this_thread::get_id();
  ep_rank_control& control = context->control();
  control.header = {EP_MAGIC_RANK, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof(ep_rank_control)};
  control.rank = rank;
  control.world_size = world_size;
  control.life.pid = static_cast<uint32_t>(getpid());
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int made_mutex = pthread_mutex_init(life_mutex(control.life), &attributes);
  pthread_mutexattr_destroy(&attributes);
  if (made_mutex != 0) return failure_errno("pthread_mutex_init", made_mutex, "robust mutex of a rank");
  pthread_mutex_lock(life_mutex(control.life));
  std::atomic_ref<uint32_t>(control.life.state).store(EP_LIFE_ALIVE, std::memory_order_release);
  return context;
}

result<nothing> rank_context::connect(const std::vector<ep_segment_handle>& handles) {
  if (handles.size() != static_cast<size_t>(world_size_)) {
    return failure{EP_STATUS_INVALID, 0,
                   std::to_string(handles.size()) + " handles for a world of " + std::to_string(world_size_) + " ranks"};
  }
  std::vector<std::shared_ptr<segment>> peers;
  std::vector<ep_peer_view> views;
  for (int32_t rank = 0; rank < world_size_; ++rank) {
    auto opened = rank == rank_ ? result<std::shared_ptr<segment>>(own_) : segment::open(handles[static_cast<size_t>(rank)]);
    if (!opened.ok()) {
      failure why = opened.why();
      why.message = "rank " + std::to_string(rank) + ": " + why.message;
      return why;
    }
    auto* control = reinterpret_cast<ep_rank_control*>(opened.value()->data());
    if (opened.value()->data_bytes() != sizeof(ep_rank_control) || control->header.magic != EP_MAGIC_RANK || control->rank != rank ||
        control->world_size != world_size_) {
      return failure{EP_STATUS_MISMATCH, 0, "the handle for rank " + std::to_string(rank) + " is of rank " + std::to_string(control->rank) + " of " +
                                                std::to_string(control->world_size)};
    }
    ep_peer_view view{};
    view.wake = reinterpret_cast<uint64_t>(&control->wake);
    view.life = reinterpret_cast<uint64_t>(&control->life);
    views.push_back(view);
    peers.push_back(opened.value());
  }
  peers_ = std::move(peers);
  views_ = std::move(views);
  return nothing{};
}

uint32_t rank_context::life(int32_t rank) const {
  return life_state(reinterpret_cast<const ep_life_word*>(views_[static_cast<size_t>(rank)].life));
}

wait_scope rank_context::waits(const std::atomic<uint32_t>* cancel, int64_t deadline_ns) const {
  wait_scope scope;
  scope.wake = wake();
  scope.cancel = cancel;
  scope.closing = &closing_;
  scope.deadline_ns = deadline_ns;
  scope.peers = views_.empty() ? nullptr : views_.data();
  scope.world_size = world_size_;
  scope.self = rank_;
  scope.policy = policy_;
  return scope;
}

void rank_context::leave(bool orderly) {
  if (left_) return;
  left_ = true;
  closing_.store(1, std::memory_order_seq_cst);
  wake_notify(wake());
  ep_rank_control& own = control();
  std::atomic_ref<uint32_t>(own.life.state).store(orderly ? EP_LIFE_CLOSED : EP_LIFE_DEAD, std::memory_order_seq_cst);
  // Hazard: a robust mutex must be unlocked before its memory is unmapped, by the thread that owns it, or that thread's robust list points into
  // nothing. Another thread cannot unlock it: then the mapping is kept for the rest of the process.
  if (std::this_thread::get_id() == owner_) {
    pthread_mutex_unlock(life_mutex(own.life));
  } else {
    keep_for_ever(own_);
  }
  for (int32_t rank = 0; rank < static_cast<int32_t>(views_.size()); ++rank) {
    if (rank != rank_) wake_rank(rank);
  }
}

rank_context::~rank_context() { leave(false); }

} // namespace ep
