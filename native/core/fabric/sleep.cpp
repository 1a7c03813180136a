#include <algorithm>

#include <sched.h>

#include "engine.hpp"

// The part of the engine that says for how long its thread looks, and when it sleeps.
namespace ep::fabric {
namespace {

constexpr int64_t longest_sleep_ns = 50'000'000; // on the descriptor: life words wake nobody, and a provider may miss something
constexpr int64_t soon_ns = 5'000'000; // idle for less: the next request may come at any moment
constexpr int64_t longest_look_ns = 1'000'000; // for what comes at a pace, where each rank has a core

} // namespace

// Something that this rank awaits, or that it can do only later.
bool engine::outstanding() const {
  return messages_under_way_ != 0 || !receives_unposted_.empty() || leave_by_ns_ != 0 || awaits_peers();
}

bool engine::awaits_peers() const {
  return std::any_of(links_.begin(), links_.end(), [](const auto& at) {
    if (at->state != link_state::up) return at->state == link_state::left && !at->control.empty();
    return !at->control.empty() || !at->out.empty() || !at->in.empty() || !at->retiring.empty() || at->applied != at->told;
  });
}

bool engine::quiet() const {
  const std::lock_guard turn(turn_);
  return all_out() && !awaits_peers();
}

// How long until a peer has to hear of this rank, or has been silent for too long.
int64_t engine::until_due(int64_t now) const {
  // HAZARD: well below what watch_life() takes for an absence.
  int64_t least = std::min(longest_sleep_ns, options_.silence_ns / 16);
  for (int32_t peer = 0; peer < world_size_; ++peer) {
    const link& at = *links_[static_cast<size_t>(peer)];
    if (peer == context_->rank() || at.state != link_state::up) continue;
    least = std::min({least, at.spoke_ns + options_.heartbeat_ns - now, at.heard_ns + options_.silence_ns - now});
  }
  return std::max(least, shortest_nap_ns);
}

// The mean of the last few.
void engine::keep_pace(int64_t now) {
  const int64_t since = now - std::exchange(found_ns_, now);
  pace_ns_ = since > longest_look_ns ? since : (3 * std::min(pace_ns_, longest_look_ns) + since) / 4;
}

// For how long it looks before it sleeps. While long pieces come one behind the other, each takes longer than it would look otherwise, and to be woken in the middle of each costs the one who
// sends as much as the one who sleeps (measured: 0.6 to 0.7 of the bandwidth, where the core is a virtual one that halts).
int64_t engine::patience() const {
  const wait_policy& policy = context_->policy();
  const int64_t looks_ns = policy.spin_ns + policy.yield_ns;
  if (policy.spin_ns == 0 || pace_ns_ > longest_look_ns / 2) return looks_ns;
  return std::clamp(4 * pace_ns_, looks_ns, longest_look_ns);
}

// What takes long comes in bursts, between which a thread that sleeps would have to be woken each time: one that has a core of its own goes on looking.
bool engine::stays(int64_t now) {
  if (!context_->policy().room_beside) return false;
  if (heavy()) burdened_ns_ = now;
  return burdened_ns_ != 0 && now - burdened_ns_ < longest_look_ns;
}

// Others may have the turn meanwhile.
void engine::pause(std::unique_lock<std::mutex>& turn, bool yields) {
  turn.unlock();
  if (yields) {
    sched_yield();
  } else {
    cpu_relax();
  }
  turn.lock();
}

// As in a pause, others may have the turn.
void engine::nap(std::unique_lock<std::mutex>& turn, int64_t now, int64_t idle_ns) {
  const wait_policy& policy = context_->policy();
  if (idle_ns < patience()) return pause(turn, idle_ns >= policy.spin_ns);
  wake_descriptor& sleeper = *ring_->sleeper;
  sleeper.prepare();
  const ep_proxy_ring& ring = ring_->ring;
  const bool published = !ring_held_ && std::atomic_ref<uint64_t>(ring_->entries[ring.head & (ring.capacity - 1)].turn).load(std::memory_order_acquire) == ring.head + 1;
  const bool news = lines_ != nullptr && lines_->has_news();
  if (published || news || any_posted_.load(std::memory_order_seq_cst) || (stopping_.load(std::memory_order_seq_cst) != 0 && leave_by_ns_ == 0)) {
    sleeper.cancel();
    return;
  }
  const auto sleep = [&](int descriptor, int64_t at_most_ns) {
    dormant_.store(at_most_ns > longest_nap_ns, std::memory_order_seq_cst);
    turn.unlock();
    sleeper.sleep(descriptor, at_most_ns);
    turn.lock();
    dormant_.store(false, std::memory_order_seq_cst);
  };
  if (!listens_) {
    sleep(-1, idle_ns < soon_ns ? shortest_nap_ns : longest_nap_ns);
    return;
  }
  constexpr uint32_t patient_looks = 8;
  const bool asleep = port_->may_sleep();
  if (!asleep && ++looks_again_ < patient_looks) {
    sleeper.cancel(); // there is something to be polled for
    return;
  }
  looks_again_ = 0;
  const int64_t at_most = asleep && !outstanding() ? until_due(now) : asleep ? longest_nap_ns : shortest_nap_ns;
  sleep(asleep ? port_->descriptor() : -1, at_most);
  woken_ = !asleep || clock_now_ns() - now < at_most;
}

// HAZARD: `net` of 1.17 says at all times that there is something to be polled for: whoever believed it would never sleep. Events make up for what woke the thread beside them,
// and so does time: a descriptor that wakes for nothing less often than this thread would look without it, is still the better one. Connections that are made wake it so.
void engine::doubt_descriptor(bool any, int64_t now) {
  constexpr int64_t most_vain = 300;
  const int64_t looks = (now - doubted_ns_) / longest_nap_ns;
  doubted_ns_ += looks * longest_nap_ns;
  vain_ = std::max<int64_t>(0, vain_ - looks - 4 * static_cast<int64_t>(events_.size()));
  if (!std::exchange(woken_, false) || any || !events_.empty()) return;
  if (++vain_ > most_vain) listens_ = false;
}

} // namespace ep::fabric
