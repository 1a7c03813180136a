#include "board.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include <unistd.h>

namespace ep {
namespace {

constexpr uint64_t page = 4096;
constexpr uint64_t round_up(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }
constexpr uint64_t slots_offset = round_up(sizeof(group_member), page);
constexpr uint64_t chunks_offset = round_up(slots_offset + group_ring * group_small_bytes, page);
constexpr uint64_t lanes_offset = chunks_offset + 2 * group_chunk_bytes;
uint64_t pool_offset(int32_t size) { return round_up(lanes_offset + static_cast<uint64_t>(size) * sizeof(message_lane), page); }
uint64_t member_bytes(int32_t size) { return pool_offset(size) + message_chunks * message_chunk_bytes; }

constexpr uint64_t epoch_of(uint64_t tick) { return tick >> 48; }
static_assert((group_ring & (group_ring - 1)) == 0 && group_ring >= 2);

template <class T> std::atomic_ref<T> shared(const T& word) { return std::atomic_ref<T>(const_cast<T&>(word)); }

constexpr size_t view_words = sizeof(group_view) / sizeof(uint64_t);

bool is_in(const group_view& view, int32_t rank) { return (view.active[rank / 64] >> (rank % 64) & 1) != 0; }
void put_in(group_view& view, int32_t rank, uint32_t incarnation) {
  view.active[rank / 64] |= uint64_t{1} << (rank % 64);
  view.incarnation[rank] = incarnation;
}

// A view that somebody may be reading.
void publish_view(group_view& to, const group_view& view) {
  auto* words = reinterpret_cast<uint64_t*>(&to);
  const auto* from = reinterpret_cast<const uint64_t*>(&view);
  shared(words[0]).store(0, std::memory_order_seq_cst);
  for (size_t i = 1; i < view_words; ++i) shared(words[i]).store(from[i], std::memory_order_release);
  shared(words[0]).store(view.epoch, std::memory_order_seq_cst);
}

bool read_view(const group_view& from, group_view& view) {
  const auto* words = reinterpret_cast<const uint64_t*>(&from);
  auto* to = reinterpret_cast<uint64_t*>(&view);
  to[0] = shared(words[0]).load(std::memory_order_seq_cst);
  if (to[0] == 0) return false;
  for (size_t i = 1; i < view_words; ++i) to[i] = shared(words[i]).load(std::memory_order_acquire);
  return shared(words[0]).load(std::memory_order_seq_cst) == to[0];
}

group_member* member_in(const std::shared_ptr<segment>& mapping) { return reinterpret_cast<group_member*>(mapping->data()); }

// How long a rank that is taken out may go on with what it was writing before memory is moved away from it.
constexpr auto fence_patience = std::chrono::milliseconds(20);

} // namespace

result<std::unique_ptr<group_board>> group_board::create(const group_options& options) {
  const int32_t rank = options.rank;
  const int32_t size = options.size;
  const int32_t capacity = options.capacity;
  const auto listed = [&](int32_t r) { return options.active.empty() || std::find(options.active.begin(), options.active.end(), r) != options.active.end(); };
  const bool known = std::all_of(options.active.begin(), options.active.end(), [size](int32_t r) { return r >= 0 && r < size; }) && (options.joins || listed(rank));
  if (size < 1 || capacity < size || capacity > group_ranks || rank < 0 || rank >= (options.joins ? capacity : size) || !known || options.incarnation == 0) {
    return failure{EP_STATUS_INVALID, 0,
                   "rank " + std::to_string(rank) + " of a group of " + std::to_string(size) + " that may grow to " + std::to_string(capacity) + ": groups have 1 to " +
                       std::to_string(group_ranks) + " ranks"};
  }
  if (options.allocations.size() > group_allocations) return failure{EP_STATUS_INVALID, 0, "too much group memory"};
  auto made = segment::create(member_bytes(capacity));
  if (!made.ok()) return made.why();
  std::unique_ptr<group_board> board(new group_board);
  const auto ranks = static_cast<size_t>(capacity);
  board->rank_ = rank;
  board->size_ = std::max(size, rank + 1);
  board->capacity_ = capacity;
  board->nonce_ = options.nonce;
  board->policy_ = wait_policy_for(options.ranks_on_host);
  board->own_ = made.value();
  board->peers_.resize(ranks);
  board->members_.resize(ranks);
  board->candidates_.resize(ranks);
  board->incarnations_.resize(ranks);
  board->joined_epoch_.resize(ranks);
  board->unreachable_.resize(ranks);
  board->peer_allocations_.resize(ranks);
  board->peer_moved_.resize(ranks);
  board->place_.assign(ranks, -1);
  group_member* own = member_in(made.value());
  board->members_[static_cast<size_t>(rank)] = own;
  board->peers_[static_cast<size_t>(rank)] = made.value();
  own->header = {EP_MAGIC_GROUP, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof(group_member)};
  own->rank = rank;
  own->capacity = capacity;
  own->group_nonce = options.nonce;
  own->incarnation = options.incarnation;
  board->allocations_ = options.allocations;
  board->former_ = options.former;
  for (size_t i = 0; i < options.allocations.size(); ++i) own->allocation[i] = options.allocations[i]->handle();
  own->allocations = options.allocations.size();
  // All of a group begin with the same view; one that joins it later is alone until then.
  group_view first{};
  first.epoch = group_first_epoch;
  first.size = board->size_;
  if (options.joins) {
    put_in(first, rank, options.incarnation);
  } else {
    for (int32_t r = 0; r < size; ++r) {
      if (listed(r)) put_in(first, r, 1);
    }
    first.incarnation[rank] = options.incarnation;
  }
  board->incarnations_[static_cast<size_t>(rank)] = options.incarnation;
  auto begun = board->life_.begin(own->life, made.value());
  if (!begun.ok()) return begun.why();
  board->adopt(first);
  return board;
}

group_board::~group_board() { leave(false); }

void group_board::leave(bool orderly) {
  if (left_) return;
  left_ = true;
  life_.end(orderly);
  wake_peers();
}

result<nothing> group_board::attach(int32_t rank, const ep_segment_handle& handle, uint32_t incarnation) {
  if (rank < 0 || rank >= capacity_ || rank == rank_) return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(rank) + " is no peer in a group of " + std::to_string(capacity_)};
  const auto at = static_cast<size_t>(rank);
  const bool wanted = incarnation == incarnations_[at];
  if (wanted && members_[at] != nullptr) return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(rank) + " is attached already"};
  auto opened = segment::open(handle);
  if (!opened.ok()) {
    failure why = opened.why();
    why.message = "rank " + std::to_string(rank) + ": " + why.message;
    return why;
  }
  const group_member* found = member_in(opened.value());
  if (opened.value()->data_bytes() != member_bytes(capacity_) || found->header.magic != EP_MAGIC_GROUP || found->header.abi_major != EP_ABI_MAJOR ||
      found->rank != rank || found->capacity != capacity_ || found->group_nonce != nonce_ || found->incarnation != incarnation) {
    return failure{EP_STATUS_MISMATCH, 0,
                   "the handle for rank " + std::to_string(rank) + " of at most " + std::to_string(capacity_) + " is of rank " + std::to_string(found->rank) + " of at most " +
                       std::to_string(found->capacity) + ", of another group, build or process"};
  }
  if (wanted) {
    install(rank, opened.value());
  } else if (incarnation > candidates_[at].incarnation) {
    candidates_[at] = {opened.value(), incarnation};
  }
  return nothing{};
}

void group_board::lose(int32_t rank, uint32_t incarnation) {
  const auto at = static_cast<size_t>(rank);
  if (incarnation == incarnations_[at]) unreachable_[at] = true;
  else if (incarnation > candidates_[at].incarnation) candidates_[at] = {nullptr, incarnation};
}

void group_board::install(int32_t rank, std::shared_ptr<segment> mapping) {
  const auto at = static_cast<size_t>(rank);
  members_[at] = mapping == nullptr ? nullptr : member_in(mapping);
  peers_[at] = std::move(mapping);
  peer_allocations_[at].clear();
  peer_moved_[at] = 0;
}

bool group_board::all_attached() {
  return connected_ = std::all_of(active_.begin(), active_.end(), [this](int32_t r) { return members_[static_cast<size_t>(r)] != nullptr; });
}

bool group_board::all_ready() {
  if (fencing()) settle();
  for (const int32_t r : active_) {
    if (members_[static_cast<size_t>(r)] == nullptr) return false;
    if (shared(member(r).ready_epoch).load(std::memory_order_acquire) < epoch_) return false;
  }
  ready_ = true;
  return true;
}

bool group_board::current(int32_t rank) const {
  const auto at = static_cast<size_t>(rank);
  return rank == rank_ || (members_[at] != nullptr && shared(member(rank).ready_epoch).load(std::memory_order_acquire) >= joined_epoch_[at]);
}

uint8_t* group_board::slot(int32_t rank, uint64_t step) const {
  return peers_[static_cast<size_t>(rank)]->data() + slots_offset + at(step) * group_small_bytes;
}
uint8_t* group_board::chunk(int32_t rank, uint64_t step) const {
  return peers_[static_cast<size_t>(rank)]->data() + chunks_offset + (step & 1) * group_chunk_bytes;
}

message_lane& group_board::lane(int32_t owner, int32_t peer) const {
  return reinterpret_cast<message_lane*>(peers_[static_cast<size_t>(owner)]->data() + lanes_offset)[peer];
}
uint8_t* group_board::pool(int32_t owner, uint32_t chunk) const {
  return peers_[static_cast<size_t>(owner)]->data() + pool_offset(capacity_) + chunk * message_chunk_bytes;
}

void group_board::wake_peers() const {
  for (const int32_t r : active_) {
    if (r != rank_ && members_[static_cast<size_t>(r)] != nullptr) wake_notify(&member(r).wake);
  }
}

bool group_board::make_room() {
  // As many as there are, not only as many as it takes: lines of others come from their caches, several of them in the time of one.
  while (compared_ < step_ && compare(compared_ + 1)) ++compared_;
  crowded_ = compared_ + group_ring < step_ + 2;
  return !crowded_;
}

bool group_board::compare_earlier() {
  for (; compared_ + 1 < step_; ++compared_) {
    if (!compare(compared_ + 1)) return false;
  }
  return true;
}

// Whether all members have entered the step, and with the same call.
bool group_board::compare(uint64_t step) {
  return std::all_of(active_.begin(), active_.end(), [&](int32_t r) { return has_entered(r, step) && !differs(r, step); });
}

// HAZARD: a member that is ahead writes its line anew, but only once it has found this rank's step equal to its own: of a line that holds a later step nothing has to be
// compared, and one that is being written is told by the step before the one to come. A member that found another call stops, and its line stays.
bool group_board::differs(int32_t rank, uint64_t step) const {
  const group_line& theirs = line(rank, step);
  if (signature_of(rank, step) == signature_of(rank_, step)) return false;
  return (shared(theirs.tick).load(std::memory_order_acquire) & ~group_marks) == tick(step) && !has_entered(rank, step + group_ring - 1);
}

uint64_t group_board::differs_at(bool* all) const {
  for (uint64_t step = compared_ + 1; step <= step_; ++step) {
    bool differ = false;
    *all = true;
    for (const int32_t r : active_) {
      if (members_[static_cast<size_t>(r)] == nullptr || !has_entered(r, step)) *all = false;
      else differ = differ || differs(r, step);
    }
    if (differ) return step;
  }
  return 0;
}

entry group_board::enter(uint32_t signature, uint32_t flags) {
  group_line& next = next_line();
  if (signature == 0) compared_ = step_; // a call goes on only when all have made it
  shared(next.signature).store(signature, std::memory_order_release);
  next.flags = flags;
  uint64_t& tick_of_line = ticks_[at(step_ + 1)];
  uint64_t known = tick_of_line;
  // A compare-and-swap, so that a rank that was taken out cannot enter. Sequentially consistent: the eventcount needs it before the look at who sleeps.
  while (!shared(next.tick).compare_exchange_strong(known, tick(step_ + 1), std::memory_order_seq_cst)) {
    if ((known & group_frozen) != 0) {
      freeze(member(rank_)); // whoever does so may have died in the middle
      return entry::evicted;
    }
    if (epoch_of(known) == epoch_of(tick(0)) && (known & group_cut) != 0) return entry::cut; // of an earlier epoch it means nothing any more
  }
  tick_of_line = tick(++step_);
  cursor_ = 0;
  awaited_ = -1;
  wake_peers();
  return entry::made;
}

void group_board::skip() {
  ++step_;
  cursor_ = 0;
  awaited_ = -1;
}

bool group_board::entered_or_cut(int32_t rank, uint64_t step) {
  auto word = shared(line(rank, step).tick);
  const uint64_t cut = tick(0) | group_cut;
  uint64_t found = word.load(std::memory_order_seq_cst);
  while (!has_entered(rank, step)) {
    // HAZARD: one of a later epoch is of a time at which this rank is no member any more.
    if ((found & group_frozen) != 0 || found == cut || (epoch_of(found) > epoch_of(cut))) return false;
    if (word.compare_exchange_weak(found, cut, std::memory_order_seq_cst)) return false;
  }
  return true;
}

void group_board::freeze(group_member& member) {
  for (auto& step : member.steps) shared(step.line.tick).fetch_or(group_frozen, std::memory_order_seq_cst);
  shared(member.frozen).store(1, std::memory_order_seq_cst);
}

void group_board::evict(int32_t rank) {
  const auto at = static_cast<size_t>(rank);
  if (rank == rank_) return;
  if (members_[at] == nullptr) {
    unreachable_[at] = true;
    return;
  }
  freeze(member(rank));
  wake_notify(&member(rank).wake);
  wake_peers();
}

bool group_board::begin_push() {
  shared(member(rank_).pushing).store(1, std::memory_order_seq_cst);
  // HAZARD: after the store: who takes this rank out looks the other way round, and one of the two sees the other.
  if (!evicted()) return true;
  end_push();
  return false;
}

void group_board::end_push() { shared(member(rank_).pushing).store(0, std::memory_order_release); }

bool group_board::entered_by_living() {
  for (const int32_t r : active_) {
    // Gone first, then the look at the line: what it wrote before it died is there for good.
    if (!has_entered(r) && !(gone(r) || has_entered(r))) return false;
  }
  return true;
}

std::vector<int32_t> group_board::missing() const {
  std::vector<int32_t> ranks;
  for (const int32_t r : active_) {
    const bool there = members_[static_cast<size_t>(r)] != nullptr;
    if (there && ready_ && !crowded_ && awaited_ >= 0 && awaited_ != r) continue;
    const uint64_t step = crowded_ ? compared_ + 1 : step_;
    if (!there || (ready_ ? !has_entered(r, step) : shared(member(r).ready_epoch).load(std::memory_order_acquire) < epoch_)) ranks.push_back(r);
  }
  return ranks;
}

bool group_board::is_gone(const group_member& member) {
  const uint32_t state = life_state(&member.life);
  return state == EP_LIFE_DEAD || state == EP_LIFE_CLOSED || frozen(member);
}

bool group_board::gone(int32_t rank) const {
  if (rank == rank_) return false;
  const auto at = static_cast<size_t>(rank);
  if (!is_active(rank) || unreachable_[at]) return true;
  return members_[at] != nullptr && is_gone(member(rank));
}

// The next view, if it has been decided. Null also where it cannot be read yet.
const group_view* group_board::pending_view() const {
  const group_member* owner = members_[static_cast<size_t>(active_.front())];
  if (owner == nullptr) return nullptr;
  const uint64_t next = epoch_ + 1;
  const uint64_t found = decided_in(*owner, next);
  if (found >> 16 != next) return nullptr;
  const group_member* proposer = members_[(found & 0xffff) - 1];
  if (proposer != nullptr) return &proposer->proposed[next % group_views];
  for (const int32_t r : active_) {
    const group_member* one = members_[static_cast<size_t>(r)];
    if (one != nullptr && shared(one->adopted[next % 2].epoch).load(std::memory_order_seq_cst) == next) return &one->adopted[next % 2];
  }
  return nullptr;
}

absence group_board::look(uint64_t sequence, int32_t* who) {
  // Also of those who have come: what they gave up while they waited for others, they do not carry on.
  for (const int32_t r : active_) {
    if (r == rank_ || members_[static_cast<size_t>(r)] == nullptr) continue;
    const uint64_t fault = shared(member(r).fault).load(std::memory_order_acquire);
    *who = r;
    // Of what was given up before the ranks agreed anew, or by one that was taken out since, nobody speaks any more.
    if (frozen(member(r))) continue;
    if (group_fault_counts(fault, sequence, repaired_sequence_)) return absence::gave_up;
  }
  for (const int32_t r : missing()) {
    *who = r;
    if (!gone(r)) continue;
    // It may have come just before it died.
    const std::vector<int32_t> still = missing();
    if (std::find(still.begin(), still.end(), r) != still.end()) return absence::lost;
  }
  // HAZARD: in this order. Whoever decided it may have gone on from this step: then all had entered it, and this rank goes on, too.
  return view_pending() && !missing().empty() ? absence::view_changed : absence::none;
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

std::vector<std::shared_ptr<segment>> group_board::peers() const {
  std::vector<std::shared_ptr<segment>> attached;
  for (const auto& one : peers_) {
    if (one != nullptr && one != own_) attached.push_back(one);
  }
  return attached;
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

void group_board::give_up(uint64_t sequence, bool repairs, uint32_t status) {
  group_member& own = member(rank_);
  if (shared(own.fault).load(std::memory_order_relaxed) != 0) return;
  own.fault_status = status;
  shared(own.fault).store(group_fault(sequence, repairs), std::memory_order_seq_cst);
  wake_peers();
}

result<uint32_t> group_board::allocate(uint64_t byte_length) {
  if (allocations_.size() == group_allocations) {
    return failure{EP_STATUS_MEMORY_LIMIT, 0,
                   "a group has at most " + std::to_string(group_allocations) + " allocations on each rank: allocate larger ones and take parts of them"};
  }
  auto made = segment::create(byte_length);
  if (!made.ok()) return made.why();
  group_member& own = member(rank_);
  const auto index = static_cast<uint32_t>(allocations_.size());
  own.allocation[index] = made.value()->handle();
  allocations_.push_back(made.value());
  shared(own.allocations).store(allocations_.size(), std::memory_order_release);
  return index;
}

uint8_t* group_board::memory_of(int32_t rank, uint32_t index, uint64_t offset, uint64_t bytes) {
  const auto in_bounds = [&](const segment& memory) { return offset <= memory.data_bytes() && bytes <= memory.data_bytes() - offset; };
  if (rank == rank_) return index < allocations_.size() && in_bounds(*allocations_[index]) ? allocations_[index]->data() + offset : nullptr;
  const group_member& peer = member(rank);
  const auto at = static_cast<size_t>(rank);
  if (const uint64_t moved = shared(peer.moved).load(std::memory_order_acquire); moved != peer_moved_[at]) {
    peer_moved_[at] = moved;
    peer_allocations_[at].clear();
  }
  if (index >= shared(peer.allocations).load(std::memory_order_acquire)) return nullptr;
  auto& known = peer_allocations_[at];
  if (known.size() <= index) known.resize(index + 1);
  if (known[index] == nullptr) {
    auto opened = segment::open(peer.allocation[index]);
    if (!opened.ok()) return nullptr;
    known[index] = opened.value();
  }
  return in_bounds(*known[index]) ? known[index]->data() + offset : nullptr;
}

} // namespace ep
