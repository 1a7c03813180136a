#include "round_puts.hpp"

#include <utility>

namespace ep::fabric {

bool round_puts::clear(int32_t peer, uint64_t slot) const {
  const auto last = under_way_.find({peer, slot});
  if (last == under_way_.end() || carrier_->look(peer, last->second) == request_state::done) return true;
  // The peer tells of it in passing, with what it says next; this round is left, so ask.
  carrier_->want_end(peer);
  return false;
}

result<nothing> round_puts::put(int32_t peer, uint64_t local, uint64_t stride, uint64_t row_bytes, uint64_t rows, uint64_t offset, uint64_t slot, uint64_t value) {
  request wanted;
  wanted.peer = peer;
  wanted.local = local;
  wanted.stride = stride;
  wanted.row_bytes = row_bytes;
  wanted.rows = rows;
  wanted.offset = offset;
  wanted.op = signal_op::set;
  wanted.slot = slot;
  wanted.value = value;
  wanted.keep = memory_;
  wanted.unawaited = true;
  // A rank that has a core beside its own leaves what is long to the engine's thread, and copies and folds meanwhile.
  wanted.eager = !memory_->context().policy().room_beside || wanted.bytes() < request::long_bytes;
  auto posted = carrier_->post(*memory_, std::move(wanted));
  if (!posted.ok()) return posted.why();
  under_way_[{peer, slot}] = posted.value();
  return nothing{};
}

} // namespace ep::fabric
