#include "board.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include <sched.h>

#include "../cores.hpp"
#include "views.hpp"

namespace ep {
namespace {

constexpr uint64_t page = 4096;
constexpr uint64_t round_up(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }
constexpr uint64_t slots_offset = round_up(sizeof(group_member), page);
constexpr uint64_t chunks_offset = round_up(slots_offset + group_ring * group_small_bytes, page);
constexpr uint64_t lanes_offset = chunks_offset + group_chunk_places * group_chunk_bytes;
uint64_t pool_offset(int32_t size) { return round_up(lanes_offset + static_cast<uint64_t>(size) * sizeof(message_lane), page); }
uint64_t member_bytes(int32_t size) { return pool_offset(size) + message_chunks * message_chunk_bytes; }

constexpr uint64_t epoch_of(uint64_t tick) { return tick >> 48; }
static_assert((group_ring & (group_ring - 1)) == 0 && group_ring >= 2);

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
  board->ranks_on_host_ = options.ranks_on_host;
  board->told_cores_ = options.cores_on_host;
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
  own->cores = cores_of_thread();
  board->choose_policy();
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

// HAZARD: a member that has yet to map this rank's segment finds there what became of it, and, where this is the first one, what the others decide.
bool group_board::is_mapped_by_all() const {
  const uint32_t incarnation = incarnations_[static_cast<size_t>(rank_)];
  return std::all_of(active_.begin(), active_.end(), [&](int32_t r) {
    if (r == rank_ || gone(r)) return true;
    const group_member* one = members_[static_cast<size_t>(r)];
    return one != nullptr && shared(one->attached[rank_]).load(std::memory_order_acquire) == incarnation;
  });
}

bool group_board::release() {
  const bool is_mapped = is_mapped_by_all();
  for (const int32_t r : active_) {
    if (gone(r)) unreachable_[static_cast<size_t>(r)] = true; // what surveys say stays as it is
  }
  pushers_.clear();
  former_.clear();
  for (candidate& one : candidates_) one = {};
  for (int32_t r = 0; r < capacity_; ++r) {
    if (r != rank_) install(r, nullptr);
  }
  if (!is_mapped) return false;
  install(rank_, nullptr);
  allocations_.clear();
  own_.reset();
  return true;
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
  shared(member(rank_).attached[rank]).store(incarnation, std::memory_order_release);
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
  if (members_[at] != nullptr) choose_policy();
}

std::vector<ep_core_set> group_board::cores_on_host() const {
  std::vector<ep_core_set> found;
  for (const group_member* one : members_) {
    if (one != nullptr && one->rank != rank_) found.push_back(one->cores);
  }
  return found.size() < told_cores_.size() ? told_cores_ : found;
}

void group_board::choose_policy() { policy_ = wait_policy_for(cores_suffice(member(rank_).cores, cores_on_host(), ranks_on_host_)); }

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
  // As few as stay in the caches, where lines that a peer has read are taken back fast; else as many as no cache of a core holds: a line is written fast again once its reader's has let it go. HAZARD:
  // two are the least, for a rank writes the next one while others read the last.
  const uint64_t places = takes_lines_back_slowly() ? group_chunk_places : 2;
  return peers_[static_cast<size_t>(rank)]->data() + chunks_offset + (step % places) * group_chunk_bytes;
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

bool group_board::awaits_elsewhere() {
  const auto core = static_cast<uint32_t>(sched_getcpu() + 1);
  const auto own = shared(member(rank_).core);
  if (own.load(std::memory_order_relaxed) != core) own.store(core, std::memory_order_relaxed);
  if (core == 0 || !connected_ || !ready_) return false;
  const uint64_t step = crowded_ ? compared_ + 1 : step_;
  return std::all_of(active_.begin(), active_.end(), [&](int32_t r) {
    if ((!crowded_ && awaited_ >= 0 && awaited_ != r) || has_entered(r, step)) return true;
    const uint32_t theirs = shared(member(r).core).load(std::memory_order_relaxed);
    return theirs != 0 && theirs != core;
  });
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

absence group_board::look(uint64_t sequence, int32_t* who, uint32_t* status) {
  // Also of those who have come: what they gave up while they waited for others, they do not carry on.
  for (const int32_t r : active_) {
    if (r == rank_ || members_[static_cast<size_t>(r)] == nullptr) continue;
    const uint64_t fault = shared(member(r).fault).load(std::memory_order_acquire);
    *who = r;
    // Of what was given up before the ranks agreed anew, or by one that was taken out since, nobody speaks any more.
    if (frozen(member(r))) continue;
    if (!group_fault_counts(fault, sequence, repaired_sequence_)) continue;
    *status = member(r).fault_status;
    const int32_t first = member(r).fault_rank;
    if (first >= 0 && first < size_ && first != rank_) *who = first;
    return absence::gave_up;
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

std::vector<std::shared_ptr<segment>> group_board::peers() const {
  std::vector<std::shared_ptr<segment>> attached;
  for (const auto& one : peers_) {
    if (one != nullptr && one != own_) attached.push_back(one);
  }
  return attached;
}

void group_board::give_up(uint64_t sequence, bool repairs, uint32_t status, int32_t first) {
  group_member& own = member(rank_);
  if (shared(own.fault).load(std::memory_order_relaxed) != 0) return;
  own.fault_status = status;
  own.fault_rank = first;
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
