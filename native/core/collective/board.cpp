#include "board.hpp"

#include <algorithm>
#include <cstring>

namespace ep {
namespace {

constexpr uint64_t page = 4096;
constexpr uint64_t round_up(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }
constexpr uint64_t slots_offset = round_up(sizeof(group_member), page);
constexpr uint64_t chunks_offset = round_up(slots_offset + 2 * group_small_bytes, page);
constexpr uint64_t lanes_offset = chunks_offset + 2 * group_chunk_bytes;
uint64_t pool_offset(int32_t size) { return round_up(lanes_offset + static_cast<uint64_t>(size) * sizeof(message_lane), page); }
uint64_t member_bytes(int32_t size) { return pool_offset(size) + message_chunks * message_chunk_bytes; }

constexpr uint64_t epoch_of(uint64_t tick) { return tick >> 48; }

template <class T> std::atomic_ref<T> shared(const T& word) { return std::atomic_ref<T>(const_cast<T&>(word)); }

} // namespace

result<std::unique_ptr<group_board>> group_board::create(int32_t rank, int32_t size, uint64_t nonce, int32_t ranks_on_host) {
  if (size < 1 || size > group_ranks || rank < 0 || rank >= size) {
    return failure{EP_STATUS_INVALID, 0,
                   "rank " + std::to_string(rank) + " of a group of " + std::to_string(size) + ": groups have 1 to " + std::to_string(group_ranks) + " ranks"};
  }
  auto made = segment::create(member_bytes(size));
  if (!made.ok()) return made.why();
  std::unique_ptr<group_board> board(new group_board);
  const auto ranks = static_cast<size_t>(size);
  board->rank_ = rank;
  board->size_ = size;
  board->nonce_ = nonce;
  board->policy_ = wait_policy_for(ranks_on_host);
  board->own_ = made.value();
  board->peers_.resize(ranks);
  board->members_.resize(ranks);
  board->unreachable_.resize(ranks);
  board->peer_allocations_.resize(ranks);
  for (int32_t r = 0; r < size; ++r) {
    board->active_.push_back(r);
    board->place_.push_back(r);
  }
  board->views_[board->epoch_] = board->active_;
  auto* own = reinterpret_cast<group_member*>(made.value()->data());
  board->members_[static_cast<size_t>(rank)] = own;
  board->peers_[static_cast<size_t>(rank)] = made.value();
  own->header = {EP_MAGIC_GROUP, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof(group_member)};
  own->rank = rank;
  own->size = size;
  own->group_nonce = nonce;
  shared(own->ready_epoch).store(board->epoch_, std::memory_order_seq_cst);
  auto begun = board->life_.begin(own->life, made.value());
  if (!begun.ok()) return begun.why();
  return board;
}

group_board::~group_board() { leave(false); }

void group_board::leave(bool orderly) {
  if (left_) return;
  left_ = true;
  life_.end(orderly);
  wake_peers();
}

result<nothing> group_board::attach(int32_t rank, const ep_segment_handle& handle) {
  if (rank < 0 || rank >= size_) return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(rank) + " is not in a group of " + std::to_string(size_)};
  const auto at = static_cast<size_t>(rank);
  if (members_[at] != nullptr) return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(rank) + " is attached already"};
  auto opened = segment::open(handle);
  if (!opened.ok()) {
    failure why = opened.why();
    why.message = "rank " + std::to_string(rank) + ": " + why.message;
    return why;
  }
  auto* found = reinterpret_cast<group_member*>(opened.value()->data());
  if (opened.value()->data_bytes() != member_bytes(size_) || found->header.magic != EP_MAGIC_GROUP || found->header.abi_major != EP_ABI_MAJOR ||
      found->rank != rank || found->size != size_ || found->group_nonce != nonce_) {
    return failure{EP_STATUS_MISMATCH, 0,
                   "the handle for rank " + std::to_string(rank) + " of " + std::to_string(size_) + " is of rank " + std::to_string(found->rank) + " of " +
                       std::to_string(found->size) + " of another group or build"};
  }
  peers_[at] = opened.value();
  members_[at] = found;
  return nothing{};
}

bool group_board::connected() const {
  return std::all_of(active_.begin(), active_.end(), [this](int32_t r) { return members_[static_cast<size_t>(r)] != nullptr; });
}

bool group_board::ready() {
  if (ready_) return true;
  for (const int32_t r : active_) {
    if (members_[static_cast<size_t>(r)] == nullptr) return false;
    if (shared(member(r).ready_epoch).load(std::memory_order_acquire) < epoch_) return false;
  }
  ready_ = true;
  return true;
}

uint8_t* group_board::slot(int32_t rank, uint64_t step) const {
  return peers_[static_cast<size_t>(rank)]->data() + slots_offset + (step & 1) * group_small_bytes;
}
uint8_t* group_board::chunk(int32_t rank, uint64_t step) const {
  return peers_[static_cast<size_t>(rank)]->data() + chunks_offset + (step & 1) * group_chunk_bytes;
}

message_lane& group_board::lane(int32_t owner, int32_t peer) const {
  return reinterpret_cast<message_lane*>(peers_[static_cast<size_t>(owner)]->data() + lanes_offset)[peer];
}
uint8_t* group_board::pool(int32_t owner, uint32_t chunk) const {
  return peers_[static_cast<size_t>(owner)]->data() + pool_offset(size_) + chunk * message_chunk_bytes;
}

void group_board::wake_peers() const {
  for (const int32_t r : active_) {
    if (r != rank_ && members_[static_cast<size_t>(r)] != nullptr) wake_notify(&member(r).wake);
  }
}

void group_board::enter(uint32_t signature, uint32_t flags) {
  group_line& line = next_line();
  line.signature = signature;
  line.flags = flags;
  ++step_;
  cursor_ = 0;
  // Sequentially consistent: the eventcount needs it before the look at who sleeps.
  shared(line.tick).store(tick(step_), std::memory_order_seq_cst);
  wake_peers();
}

bool group_board::has_entered(int32_t rank) const {
  const uint64_t found = shared(member(rank).steps[step_ & 1].line.tick).load(std::memory_order_acquire);
  return found >= tick(step_) && epoch_of(found) == epoch_;
}

bool group_board::entered() {
  for (; cursor_ < active_.size(); ++cursor_) {
    if (!has_entered(active_[cursor_])) return false;
  }
  return true;
}

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
    if (!there || (ready_ ? !has_entered(r) : shared(member(r).ready_epoch).load(std::memory_order_acquire) < epoch_)) ranks.push_back(r);
  }
  return ranks;
}

bool group_board::gone(int32_t rank) const {
  if (rank == rank_) return false;
  const auto at = static_cast<size_t>(rank);
  if (unreachable_[at]) return true;
  if (members_[at] == nullptr) return false;
  const uint32_t state = life_state(&members_[at]->life);
  return state == EP_LIFE_DEAD || state == EP_LIFE_CLOSED;
}

bool group_board::view_pending() const {
  if (members_[0] == nullptr) return false;
  const uint64_t next = epoch_ + 1;
  return shared(member(0).decided[next % group_views]).load(std::memory_order_acquire) >> 16 == next;
}

absence group_board::look(uint64_t sequence, int32_t* who) {
  // Also of those who have come: what they gave up while they waited for others, they do not carry on.
  for (const int32_t r : active_) {
    if (r == rank_ || members_[static_cast<size_t>(r)] == nullptr) continue;
    const uint64_t fault = shared(member(r).fault).load(std::memory_order_acquire);
    *who = r;
    if (fault != 0 && fault <= sequence) return absence::gave_up;
  }
  for (const int32_t r : missing()) {
    *who = r;
    if (!gone(r)) continue;
    // It may have come just before it died.
    const std::vector<int32_t> still = missing();
    if (std::find(still.begin(), still.end(), r) != still.end()) return absence::lost;
  }
  return view_pending() ? absence::view_changed : absence::none;
}

bool group_board::change_view(uint64_t failed_sequence) {
  if (members_[0] == nullptr) return false; // its segment is where decisions are kept
  const uint64_t next = epoch_ + 1;
  const uint64_t at = next % group_views;
  uint64_t& decided = member(0).decided[at];
  uint64_t found = shared(decided).load(std::memory_order_acquire);
  if (found >> 16 != next) {
    group_view& mine = member(rank_).proposed[at];
    mine = {};
    mine.epoch = next;
    mine.failed_sequence = failed_sequence;
    for (const int32_t r : active_) {
      if (!gone(r)) mine.active[r / 64] |= uint64_t{1} << (r % 64);
    }
    const uint64_t proposal = next << 16 | static_cast<uint64_t>(rank_ + 1);
    // One compare-and-swap decides for everybody. HAZARD: the proposal must not change once it may have been chosen.
    while (found >> 16 != next && !shared(decided).compare_exchange_weak(found, proposal, std::memory_order_seq_cst)) {
    }
    if (found >> 16 != next) found = proposal;
  }
  const auto proposer = static_cast<int32_t>(found & 0xffff) - 1;
  adopt(member(proposer).proposed[at]);
  return is_active(rank_);
}

void group_board::adopt(const group_view& view) {
  const std::vector<int32_t> before = std::move(active_);
  active_.clear();
  lost_.clear();
  std::fill(place_.begin(), place_.end(), -1);
  for (int32_t r = 0; r < size_; ++r) {
    if ((view.active[r / 64] >> (r % 64) & 1) == 0) continue;
    place_[static_cast<size_t>(r)] = static_cast<int32_t>(active_.size());
    active_.push_back(r);
  }
  for (const int32_t r : before) {
    if (!is_active(r)) lost_.push_back(r);
  }
  epoch_ = view.epoch;
  views_[epoch_] = active_;
  failed_sequence_ = view.failed_sequence;
  step_ = 0;
  cursor_ = 0;
  ready_ = false;
  // Nobody begins a step of the new epoch before all have left the old one: until then lines and chunks of the old one may still be read.
  shared(member(rank_).ready_epoch).store(epoch_, std::memory_order_seq_cst);
  wake_peers();
}

std::vector<int32_t> group_board::active_in(uint64_t epoch) const {
  const auto found = views_.find(epoch);
  return found == views_.end() ? std::vector<int32_t>{} : found->second;
}

void group_board::give_up(uint64_t sequence, uint32_t status) {
  group_member& own = member(rank_);
  if (shared(own.fault).load(std::memory_order_relaxed) != 0) return;
  own.fault_status = status;
  shared(own.fault).store(sequence, std::memory_order_seq_cst);
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
  if (index >= shared(peer.allocations).load(std::memory_order_acquire)) return nullptr;
  auto& known = peer_allocations_[static_cast<size_t>(rank)];
  if (known.size() <= index) known.resize(index + 1);
  if (known[index] == nullptr) {
    auto opened = segment::open(peer.allocation[index]);
    if (!opened.ok()) return nullptr;
    known[index] = opened.value();
  }
  return in_bounds(*known[index]) ? known[index]->data() + offset : nullptr;
}

} // namespace ep
