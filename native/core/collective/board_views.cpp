// What the ranks of a group decide: who takes part from the next epoch on, and how each comes to it.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include <unistd.h>

#include "board.hpp"
#include "views.hpp"

namespace ep {
namespace {

// How long a rank that is taken out may go on with what it was writing before memory is moved away from it.
constexpr auto fence_patience = std::chrono::milliseconds(20);

} // namespace

// The next view, if it has been decided. Null also where it cannot be read yet: where this rank has never reached whoever keeps decisions, which may have died early, it hears of one from those that have adopted it.
const group_view* group_board::pending_view() const {
  const group_member* owner = members_[static_cast<size_t>(active_.front())];
  const uint64_t next = epoch_ + 1;
  if (owner != nullptr) {
    const uint64_t found = decided_in(*owner, next);
    if (found >> 16 != next) return nullptr;
    const group_member* proposer = members_[(found & 0xffff) - 1];
    if (proposer != nullptr) return &proposer->proposed[next % group_views];
  }
  for (const int32_t r : active_) {
    const group_member* one = members_[static_cast<size_t>(r)];
    if (one != nullptr && shared(one->adopted[next % 2].epoch).load(std::memory_order_seq_cst) == next) return &one->adopted[next % 2];
  }
  return nullptr;
}

group_view group_board::proposal(uint64_t failed_sequence) const {
  group_view view{};
  view.epoch = epoch_ + 1;
  view.failed_sequence = failed_sequence;
  view.repaired_sequence = repaired_sequence_;
  view.sequence = joined_sequence_;
  view.size = size_;
  for (const int32_t r : active_) {
    if (!gone(r)) put_in(view, r, incarnations_[static_cast<size_t>(r)]);
  }
  return view;
}

// Lets the next epoch be decided, by this rank or by another.
bool group_board::propose(const group_view& wanted) {
  group_member* owner = members_[static_cast<size_t>(active_.front())];
  if (owner == nullptr || !is_active(rank_)) return false; // its segment is where the decision is kept
  const uint64_t next = epoch_ + 1;
  const uint64_t at = next % group_views;
  uint64_t& decided = owner->decided[at];
  uint64_t found = decided_in(*owner, next);
  // HAZARD: below, not other than: one that slept through group_views changes must not undo the decision that has this place now.
  if (found >> 16 < next) {
    member(rank_).proposed[at] = wanted;
    const uint64_t proposal = next << 16 | static_cast<uint64_t>(rank_ + 1);
    // One compare-and-swap decides for everybody. HAZARD: the proposal must not change once it may have been chosen.
    while (found >> 16 < next && !shared(decided).compare_exchange_weak(found, proposal, std::memory_order_seq_cst)) {
    }
  }
  return true;
}

bool group_board::adopt_next() {
  const group_view* view = pending_view();
  if (view == nullptr) return false;
  adopt(*view);
  return is_active(rank_);
}

bool group_board::decide(const group_view& wanted) { return propose(wanted) && adopt_next(); }

bool group_board::decide_change(uint64_t failed_sequence) { return propose(proposal(failed_sequence)); }

bool group_board::drop(const std::vector<int32_t>& ranks) {
  for (const int32_t r : ranks) evict(r);
  while (std::any_of(ranks.begin(), ranks.end(), [this](int32_t r) { return is_active(r); })) {
    group_view wanted = proposal(0);
    // HAZARD: also this rank itself, which does not count as gone for itself: it would put itself back into one view after the other.
    for (const int32_t r : ranks) wanted.active[r / 64] &= ~(uint64_t{1} << (r % 64));
    if (!decide(wanted)) return false;
  }
  return true;
}

bool group_board::repair(uint64_t sequence) {
  shared(member(rank_).fault).store(0, std::memory_order_seq_cst);
  while (repaired_sequence_ < sequence) {
    group_view wanted = proposal(sequence - 1);
    wanted.repaired_sequence = sequence;
    if (!decide(wanted)) return false;
  }
  return true;
}

bool group_board::admit(const std::vector<int32_t>& added, const group_peer* peers, int32_t size, uint64_t sequence) {
  const auto there = [&](int32_t r) { return is_active(r) && incarnations_[static_cast<size_t>(r)] == peers[r].incarnation; };
  while (size_ < size || !std::all_of(added.begin(), added.end(), there)) {
    group_view wanted = proposal(0);
    for (const int32_t r : added) put_in(wanted, r, peers[r].incarnation);
    wanted.size = std::max(size_, size);
    wanted.sequence = sequence;
    if (!decide(wanted)) return false;
  }
  return true;
}

void group_board::survey(group_peer* peers) const {
  for (int32_t r = 0; r < capacity_; ++r) {
    const auto at = static_cast<size_t>(r);
    const group_member* waiting = candidates_[at].seen();
    if (is_active(r) && !gone(r)) peers[r] = {peer_state::active, incarnations_[at]};
    else if (waiting == nullptr || is_gone(*waiting)) peers[r] = {peer_state::absent, 0};
    else peers[r] = {shared(waiting->joining).load(std::memory_order_acquire) != 0 ? peer_state::joining : peer_state::connected, candidates_[at].incarnation};
  }
}

void group_board::ask_to_join(bool asks) {
  shared(member(rank_).joining).store(asks ? 1 : 0, std::memory_order_seq_cst);
  for (const candidate& one : candidates_) {
    if (one.mapping != nullptr) wake_notify(&one.seen()->wake);
  }
}

// The newest view of any peer that this rank is in.
bool group_board::find_view(group_view& view) const {
  view.epoch = 0;
  for (const candidate& one : candidates_) {
    if (one.mapping == nullptr) continue;
    for (const group_view& adopted : one.seen()->adopted) {
      group_view found{};
      if (!read_view(adopted, found) || found.epoch <= view.epoch) continue;
      if (is_in(found, rank_) && found.incarnation[rank_] == member(rank_).incarnation) view = found;
    }
  }
  return view.epoch != 0;
}

bool group_board::try_join() {
  group_view view;
  if (!find_view(view)) return false;
  for (int32_t r = 0; r < capacity_; ++r) {
    const candidate& one = candidates_[static_cast<size_t>(r)];
    if (r != rank_ && is_in(view, r) && (one.mapping == nullptr || one.incarnation != view.incarnation[r])) return false;
  }
  joined_sequence_ = view.sequence;
  // HAZARD: those that were taken out meanwhile are not among the members that this rank sees leave, and may be stopped in the middle of writing to its memory.
  for (const auto& mapping : former_) {
    const group_member& one = *member_in(mapping);
    if (!is_in(view, one.rank) || view.incarnation[one.rank] != one.incarnation) leave_behind(mapping);
  }
  former_.clear();
  adopt(view);
  ask_to_join(false);
  return true;
}

void group_board::adopt(const group_view& view) {
  const std::vector<int32_t> before = std::exchange(active_, {});
  const auto all = [&](int32_t r) { return is_in(view, r); };
  lost_.clear();
  for (const int32_t r : before) {
    if (all(r)) continue;
    lost_.push_back(r);
    const auto at = static_cast<size_t>(r);
    const group_member* one = members_[at];
    if (r == rank_ || one == nullptr) continue;
    evict(r);
    leave_behind(peers_[at]);
  }
  std::fill(place_.begin(), place_.end(), -1);
  size_ = std::max(size_, view.size);
  epoch_ = view.epoch;
  for (int32_t r = 0; r < capacity_; ++r) {
    if (!all(r)) continue;
    const auto at = static_cast<size_t>(r);
    place_[at] = static_cast<int32_t>(active_.size());
    active_.push_back(r);
    const bool stays = std::find(before.begin(), before.end(), r) != before.end() && incarnations_[at] == view.incarnation[r];
    if (stays) continue;
    joined_epoch_[at] = epoch_;
    incarnations_[at] = view.incarnation[r];
    if (r == rank_) continue;
    unreachable_[at] = false;
    candidate& comes = candidates_[at];
    install(r, comes.incarnation == view.incarnation[r] ? std::move(comes.mapping) : nullptr);
    if (comes.incarnation <= view.incarnation[r]) comes.mapping = nullptr;
    if (on_joined) on_joined(r);
  }
  views_[epoch_] = active_;
  // Who asks for one asks for that of a call which has just ended.
  if (views_.size() > group_views) views_.erase(views_.begin());
  failed_sequence_ = view.failed_sequence;
  repaired_sequence_ = view.repaired_sequence;
  step_ = 0;
  cursor_ = 0;
  compared_ = 0;
  awaited_ = -1;
  crowded_ = false;
  connected_ = false;
  ready_ = false;
  publish_view(member(rank_).adopted[epoch_ % 2], view);
  settle();
}

void group_board::leave_behind(const std::shared_ptr<segment>& mapping) {
  group_member* one = member_in(mapping);
  // HAZARD: before the look at what it does: it must not begin anything.
  freeze(*one);
  if (life_state(&one->life) == EP_LIFE_DEAD || shared(one->pushing).load(std::memory_order_seq_cst) == 0) return;
  pushers_.push_back({one, mapping});
}

// Nobody begins a step of the new epoch before all have left the old one: until then lines and chunks of the old one may still be read, and memory be written to.
void group_board::settle() {
  std::erase_if(pushers_, [](const pusher& one) {
    return shared(one.member->pushing).load(std::memory_order_seq_cst) == 0 || life_state(&one.member->life) == EP_LIFE_DEAD;
  });
  if (fencing()) return;
  shared(member(rank_).ready_epoch).store(epoch_, std::memory_order_seq_cst);
  wake_peers();
}

result<nothing> group_board::fence() {
  const auto until = std::chrono::steady_clock::now() + fence_patience;
  // HAZARD: a rank of this process writes at the addresses that the memory keeps: it cannot be left behind, but it is never stopped alone either.
  const auto beside = [](const pusher& one) { return one.member->life.pid == static_cast<uint32_t>(getpid()); };
  while (fencing() && (std::chrono::steady_clock::now() < until || std::any_of(pushers_.begin(), pushers_.end(), beside))) {
    settle();
    std::this_thread::yield();
  }
  if (!fencing()) return nothing{};
  group_member& own = member(rank_);
  for (size_t i = 0; i < allocations_.size(); ++i) {
    auto moved = allocations_[i]->move();
    if (!moved.ok()) return moved.why();
    own.allocation[i] = allocations_[i]->handle();
  }
  shared(own.moved).fetch_add(1, std::memory_order_seq_cst);
  pushers_.clear();
  settle();
  return nothing{};
}

std::vector<int32_t> group_board::active_in(uint64_t epoch) const {
  const auto found = views_.find(epoch);
  return found == views_.end() ? std::vector<int32_t>{} : found->second;
}

} // namespace ep
