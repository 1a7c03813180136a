#include "team.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace ep {
namespace {

uint64_t entered_bytes(int32_t size) { return (static_cast<uint64_t>(size) * sizeof(uint64_t) + 63) & ~uint64_t{63}; }

uint64_t team_bytes(int32_t size) {
  return sizeof(ep_team_control) + entered_bytes(size) + 2 * static_cast<uint64_t>(size) * EP_TEAM_EXCHANGE_BYTES;
}

} // namespace

result<std::shared_ptr<segment>> team::segment_create(int32_t size) {
  if (size < 1) return failure{EP_STATUS_INVALID, 0, "a team needs at least one member, got " + std::to_string(size)};
  auto made = segment::create(team_bytes(size));
  if (!made.ok()) return made;
  auto* control = reinterpret_cast<ep_team_control*>(made.value()->data());
  control->header = {EP_MAGIC_TEAM, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof(ep_team_control)};
  control->size = size;
  return made;
}

result<std::shared_ptr<team>> team::join(std::shared_ptr<rank_context> context, std::shared_ptr<segment> shared, std::vector<int32_t> ranks) {
  const auto own = std::find(ranks.begin(), ranks.end(), context->rank());
  if (own == ranks.end()) return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(context->rank()) + " is not a member of this team"};
  for (const int32_t rank : ranks) {
    if (rank < 0 || rank >= context->world_size()) {
      return failure{EP_STATUS_INVALID, 0, "member " + std::to_string(rank) + " is not in a world of " + std::to_string(context->world_size())};
    }
  }
  const auto size = static_cast<int32_t>(ranks.size());
  const auto* control = reinterpret_cast<const ep_team_control*>(shared->data());
  if (shared->data_bytes() != team_bytes(size) || control->header.magic != EP_MAGIC_TEAM || control->size != size) {
    return failure{EP_STATUS_MISMATCH, 0, "the team segment is not one of " + std::to_string(size) + " members"};
  }
  std::shared_ptr<team> joined(new team);
  joined->context_ = std::move(context);
  joined->shared_ = std::move(shared);
  joined->position_ = static_cast<int32_t>(own - ranks.begin());
  joined->ranks_ = std::move(ranks);
  return joined;
}

uint64_t team::barrier_enter() {
  if (entered_) return epoch_;
  entered_ = true;
  ++epoch_;
  // Hazard: a member may be killed between any two of these lines. The count of arrivals alone decides (barrier_passed), and a member is taken for
  // missing until it has been counted; the other way round, one killed in between would be neither missing nor counted.
  const uint64_t before = std::atomic_ref<uint64_t>(control().arrived).fetch_add(1, std::memory_order_seq_cst);
  std::atomic_ref<uint64_t>(entered_words()[position_]).store(epoch_, std::memory_order_release);
  if (before + 1 == epoch_ * static_cast<uint64_t>(size())) {
    std::atomic_ref<uint64_t> released(control().released);
    uint64_t seen = released.load(std::memory_order_relaxed);
    // Whoever comes late with an old epoch must not take back a newer one.
    while (seen < epoch_ && !released.compare_exchange_weak(seen, epoch_, std::memory_order_seq_cst)) {
    }
    for (const int32_t rank : ranks_) {
      if (rank != context_->rank()) context_->wake_rank(rank);
    }
  }
  return epoch_;
}

uint64_t team::barrier_passed() const {
  return std::atomic_ref<uint64_t>(control().arrived).load(std::memory_order_acquire) / static_cast<uint64_t>(size());
}

std::vector<int32_t> team::barrier_missing() const {
  std::vector<int32_t> missing;
  for (int32_t i = 0; i < size(); ++i) {
    if (std::atomic_ref<uint64_t>(entered_words()[i]).load(std::memory_order_acquire) < epoch_) missing.push_back(ranks_[static_cast<size_t>(i)]);
  }
  return missing;
}

uint8_t* team::slot(uint64_t set, int32_t position) const {
  const uint64_t index = (set & 1) * static_cast<uint64_t>(size()) + static_cast<uint64_t>(position);
  return shared_->data() + sizeof(ep_team_control) + entered_bytes(size()) + index * EP_TEAM_EXCHANGE_BYTES;
}

void team::exchange_put(const void* bytes, uint32_t byte_length) {
  ++exchanges_;
  std::memcpy(slot(exchanges_, position_), bytes, std::min<uint32_t>(byte_length, EP_TEAM_EXCHANGE_BYTES));
}

const uint8_t* team::exchange_get(int32_t position) const { return slot(exchanges_, position); }

} // namespace ep
