#include "rank.hpp"

#include <algorithm>
#include <cerrno>

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cores.hpp"

namespace ep {
namespace {

// All threads of the process have ended. HAZARD: another process may have the number by now, which is then taken for the one that is asked for: the answer is late, never early.
bool process_ended(uint32_t pid) {
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0));
  if (fd < 0) return errno == ESRCH;
  pollfd one{fd, POLLIN, 0};
  const bool ended = poll(&one, 1, 0) == 1;
  close(fd);
  return ended;
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
  context->ranks_on_host_ = ranks_on_host;
  context->own_ = made.value();
  ep_rank_control& control = context->control();
  control.cores = cores_of_thread();
  context->policy_ = wait_policy_for(cores_suffice(control.cores, {}, ranks_on_host), cores_suffice(control.cores, {}, 2 * ranks_on_host));
  control.header = {EP_MAGIC_RANK, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof(ep_rank_control)};
  control.rank = rank;
  control.world_size = world_size;
  auto begun = context->life_.begin(control.life, made.value());
  if (!begun.ok()) return begun.why();
  return context;
}

result<nothing> rank_context::connect(const std::vector<ep_segment_handle>& handles, const std::vector<int32_t>& elsewhere) {
  if (handles.size() != static_cast<size_t>(world_size_)) {
    return failure{EP_STATUS_INVALID, 0,
                   std::to_string(handles.size()) + " handles for a world of " + std::to_string(world_size_) + " ranks"};
  }
  for (const int32_t rank : elsewhere) {
    if (rank < 0 || rank >= world_size_ || rank == rank_) return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(rank) + " cannot be on another host"};
  }
  std::vector<std::shared_ptr<segment>> peers;
  std::vector<ep_peer_view> views;
  apart_.assign(elsewhere.empty() ? 0 : static_cast<size_t>(world_size_), {});
  for (int32_t rank = 0; rank < world_size_; ++rank) {
    if (std::find(elsewhere.begin(), elsewhere.end(), rank) != elsewhere.end()) {
      ep_rank_control& known = apart_[static_cast<size_t>(rank)];
      known.life.state = EP_LIFE_ABSENT;
      ep_peer_view view{};
      view.wake = reinterpret_cast<uint64_t>(&known.wake);
      view.life = reinterpret_cast<uint64_t>(&known.life);
      views.push_back(view);
      peers.push_back(nullptr);
      continue;
    }
    auto opened = rank == rank_ ? result<std::shared_ptr<segment>>(own_) : control_segment(rank, handles[static_cast<size_t>(rank)]);
    if (!opened.ok()) return opened.why();
    auto* control = reinterpret_cast<ep_rank_control*>(opened.value()->data());
    ep_peer_view view{};
    view.wake = reinterpret_cast<uint64_t>(&control->wake);
    view.life = reinterpret_cast<uint64_t>(&control->life);
    views.push_back(view);
    peers.push_back(opened.value());
  }
  peers_ = std::move(peers);
  views_ = std::move(views);
  std::vector<ep_core_set> others;
  for (int32_t rank = 0; rank < world_size_; ++rank) {
    if (rank != rank_ && peers_[static_cast<size_t>(rank)] != nullptr && life(rank) != EP_LIFE_ABSENT) others.push_back(control_of(rank).cores);
  }
  // Whoever comes later in the place of another does not change it: threads read it.
  policy_ = wait_policy_for(cores_suffice(control().cores, others, ranks_on_host_), cores_suffice(control().cores, others, 2 * ranks_on_host_));
  return nothing{};
}

result<std::shared_ptr<segment>> rank_context::control_segment(int32_t rank, const ep_segment_handle& handle) const {
  const bool absent = handle.header.magic == 0;
  auto opened = absent ? segment::stand_in(sizeof(ep_rank_control)) : segment::open(handle);
  if (!opened.ok()) {
    failure why = opened.why();
    why.message = "rank " + std::to_string(rank) + ": " + why.message;
    return why;
  }
  auto* control = reinterpret_cast<ep_rank_control*>(opened.value()->data());
  if (absent) {
    control->life.state = EP_LIFE_ABSENT;
  } else if (opened.value()->data_bytes() != sizeof(ep_rank_control) || control->header.magic != EP_MAGIC_RANK || control->rank != rank ||
             control->world_size != world_size_) {
    return failure{EP_STATUS_MISMATCH, 0, "the handle for rank " + std::to_string(rank) + " is of rank " + std::to_string(control->rank) + " of " +
                                              std::to_string(control->world_size)};
  }
  return opened;
}

result<nothing> rank_context::replace(int32_t rank, const ep_segment_handle& handle) {
  segment* place = shared_place(rank);
  if (place == nullptr) return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(rank) + " is not a peer that shares memory with this one"};
  // In this order: once another rank of this process has done it, it is the newcomer who lives.
  const bool lives = life(rank) == EP_LIFE_ALIVE;
  if (place->shows(handle)) return nothing{};
  if (lives) return failure{EP_STATUS_BUSY, 0, "rank " + std::to_string(rank) + " lives: nobody can take its place"};
  auto sound = control_segment(rank, handle);
  if (!sound.ok()) return sound.why();
  sound = failure{}; // its mapping goes before the other is made
  return place->replace(handle);
}

result<nothing> rank_context::vacate(int32_t rank) {
  segment* place = shared_place(rank);
  if (place == nullptr) return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(rank) + " is not a peer that shares memory with this one"};
  if (life(rank) == EP_LIFE_ABSENT) return nothing{};
  auto empty = control_segment(rank, {});
  if (!empty.ok()) return empty.why();
  return place->vacate(*empty.value());
}

segment* rank_context::shared_place(int32_t rank) const {
  if (rank < 0 || rank >= world_size_ || rank == rank_ || peers_.empty()) return nullptr;
  return peers_[static_cast<size_t>(rank)].get();
}

bool rank_context::gone(int32_t rank) const {
  const segment* place = shared_place(rank);
  return place != nullptr && life(rank) != EP_LIFE_ALIVE && place->replaceable();
}

bool rank_context::ended(int32_t rank) const {
  if (rank < 0 || rank >= world_size_ || rank == rank_) return false;
  const segment* place = shared_place(rank);
  if (place == nullptr) return elsewhere(rank);
  const uint32_t state = life(rank);
  if (state == EP_LIFE_ALIVE || !place->replaceable()) return false;
  const uint32_t pid = control_of(rank).life.pid;
  // Whoever closed in order has no thread left that writes; of a rank of this process, what it made is gone.
  return state != EP_LIFE_DEAD || pid == static_cast<uint32_t>(getpid()) || process_ended(pid);
}

uint32_t rank_context::life_behind(const ep_segment_handle& handle) {
  auto opened = segment::open(handle);
  if (!opened.ok() || opened.value()->data_bytes() != sizeof(ep_rank_control)) return EP_LIFE_DEAD;
  return life_state(&reinterpret_cast<const ep_rank_control*>(opened.value()->data())->life);
}

void rank_context::connect_apart() {
  apart_.assign(static_cast<size_t>(world_size_), {});
  for (int32_t rank = 0; rank < world_size_; ++rank) {
    ep_rank_control& known = rank == rank_ ? control() : apart_[static_cast<size_t>(rank)];
    if (rank != rank_) known.life.state = EP_LIFE_ALIVE; // its mutex has no owner, so nothing but set_life() changes it
    ep_peer_view view{};
    view.wake = reinterpret_cast<uint64_t>(&known.wake);
    view.life = reinterpret_cast<uint64_t>(&known.life);
    views_.push_back(view);
  }
}

void rank_context::set_life(int32_t rank, uint32_t state) {
  std::atomic_ref<uint32_t>(apart_[static_cast<size_t>(rank)].life.state).store(state, std::memory_order_seq_cst);
  wake_notify(wake());
  const std::lock_guard lock(informed_mutex_);
  for (const auto& one : informed_) {
    if (const auto other = one.lock()) other->hear(rank, state);
  }
}

result<nothing> rank_context::inform(const std::shared_ptr<rank_context>& other) {
  if (other->rank_ != rank_ || other->world_size_ != world_size_) {
    return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(other->rank_) + " of " + std::to_string(other->world_size_) + " is not this rank, " + std::to_string(rank_) + " of " + std::to_string(world_size_)};
  }
  bool any = false;
  for (int32_t rank = 0; rank < world_size_; ++rank) any = any || other->elsewhere(rank);
  if (!any) return nothing{};
  if (apart_.empty() || !peers_.empty()) {
    return failure{EP_STATUS_INVALID, 0, "the ranks of other hosts are known to a transport that a network joins, and to no other one"};
  }
  const std::lock_guard lock(informed_mutex_);
  std::erase_if(informed_, [&](const auto& one) { return one.expired() || one.lock() == other; });
  informed_.push_back(other);
  // HAZARD: behind that: what set_life() is told meanwhile is seen here, or told by it.
  for (int32_t rank = 0; rank < world_size_; ++rank) other->hear(rank, life(rank));
  return nothing{};
}

// Who has been lost, by whichever way, stays so.
void rank_context::hear(int32_t rank, uint32_t state) {
  if (!elsewhere(rank)) return;
  const std::atomic_ref<uint32_t> word(apart_[static_cast<size_t>(rank)].life.state);
  uint32_t known = word.load(std::memory_order_seq_cst);
  do {
    if (known != EP_LIFE_ABSENT && !(known == EP_LIFE_ALIVE && state != EP_LIFE_ALIVE)) return;
  } while (!word.compare_exchange_weak(known, state, std::memory_order_seq_cst));
  wake_notify(wake());
}

uint32_t rank_context::life(int32_t rank) const {
  return life_state(reinterpret_cast<const ep_life_word*>(views_[static_cast<size_t>(rank)].life));
}

void rank_context::wait_for_networks() {
  constexpr int64_t yield_ns = 200'000; // several times what an answer takes where nobody sleeps
  if (policy_.spin_ns > 0) policy_.yield_ns = std::max(policy_.yield_ns, yield_ns);
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
  scope.progress = &progress_;
  scope.sleepers = &sleepers_;
  return scope;
}

void rank_context::leave(bool orderly) {
  if (left_) return;
  left_ = true;
  closing_.store(1, std::memory_order_seq_cst);
  wake_notify(wake());
  life_.end(orderly);
  for (int32_t rank = 0; rank < static_cast<int32_t>(views_.size()); ++rank) {
    if (rank != rank_) wake_rank(rank);
  }
}

rank_context::~rank_context() {
  leave(false);
  if (own_) own_->abandon();
}

} // namespace ep
