// What a carrier does in each step of a call with a root, but of a broadcast: of a reduction, a gather and a scatter to or from one member.
//
// HAZARD: where the root alone takes, or alone gives, nothing comes back by which senders see how far others are. So who sends to another host waits, before it uses a place again, for the word of those who
// have that place there (result_slot), and is told no more than it waits for: it may leave as soon as all have their data.
#include <algorithm>

#include "carrier_words.hpp"
#include "ep/device/copy.h"

namespace ep {

// The places of a step, those of this member and those that it sends to, are free for what it gives to the root.
bool carrier::may_give(uint64_t step) const {
  if (is_mate(call_.root)) return said(&progress_words::taken, root_mate()) + places_ > before_ + step;
  return step < places_ || landed(layout_.result_slot(counterpart(root_host())), before_ + step - places_ + 1);
}

// Tells whoever sends to this member that nothing of so many steps lies in its places any more.
bool carrier::free_places(uint64_t done) {
  const uint64_t free = steps_ <= places_ ? 0 : std::min(done, steps_ - places_);
  if (free <= answered_) return false;
  const auto tell = [&](uint32_t member) { return put(member, nullptr, 0, 0, layout_.result_slot(place_.self), before_ + free); };
  const bool gives = call_.kind == carried_kind::broadcast || call_.kind == carried_kind::scatter;
  // Of a reduction, those of this share.
  const bool told = gives ? tell(call_.root) : all_facing([&](uint32_t member) { return (call_.kind == carried_kind::reduce && local_of(member) != local_) || tell(member); });
  if (told) answered_ = free;
  return told;
}

// ---- a reduction

bool carrier::root_steps(const arrays& of) {
  bool moved = stage_shares(of);
  if (has_share()) moved = fold_host(of) || moved;
  const bool here = is_mate(call_.root);
  if (here && has_share()) {
    moved = fold_at_root(of) || moved;
    moved = free_places(ready_) || moved;
  }
  if (is_root()) return take_result(of) || moved;
  // Others have nothing to take.
  taken_ = !has_share() ? staged_ : here ? ready_ : read_;
  return moved;
}

// What the host has come to, to who has the same share on the root's. Rows there are those of all hosts but that one.
bool carrier::send_to_root(uint64_t bytes) {
  if (is_mate(call_.root)) return true;
  return put(counterpart(root_host()), partial(local_, read_), wide() * bytes, landing_at(read_) + root_row(host_) * wide() * share_bytes(), layout_.sent_slot(place_.self), before_ + read_ + 1);
}

// Where its host's partial was, for the root.
bool carrier::fold_at_root(const arrays& of) {
  if (ready_ == read_ || !counterparts_say(&carrier_layout::sent_slot, before_ + ready_ + 1)) return false;
  const share own = share_of(ready_, local_, call_.longest);
  if (own.bytes != 0) {
    const uint8_t* landing = parts_[local_] + landing_at(ready_);
    const void* sources[round_layout::most_members];
    for (uint32_t host = 0; host < hosts(); ++host) sources[host] = host == host_ ? partial(local_, ready_) : landing + root_row(host) * wide() * share_bytes();
    void* target = is_root() ? of.outputs[0].data + own.at : partial(local_, ready_);
    fold_into(&target, 1, sources, own.bytes);
  }
  publish(&progress_words::ready, before_ + ++ready_);
  return true;
}

bool carrier::take_result(const arrays& of) {
  if (taken_ == steps_ || least(&progress_words::ready, columns_) <= before_ + taken_) return false;
  const carried_bytes& output = of.outputs[0];
  for (uint32_t mate = 0; mate < columns_; ++mate) {
    const share theirs = share_of(taken_, mate, output.bytes);
    if (mate != local_) ep_copy(output.data + theirs.at, partial(mate, taken_), theirs.bytes, 0);
  }
  publish(&progress_words::taken, before_ + ++taken_);
  return true;
}

// ---- a gather

bool carrier::collect_steps(const arrays& of) {
  bool moved = give_block(of);
  if (!is_mate(call_.root)) {
    taken_ = staged_;
    return moved;
  }
  moved = hear_sources() || moved;
  if (is_root()) moved = take_sources(of) || moved;
  else taken_ = std::min(staged_, ready_);
  return free_places(said(&progress_words::taken, root_mate()) - before_) || moved;
}

bool carrier::give_block(const arrays& of) {
  if (staged_ == steps_) return false;
  // The root takes its own where it is.
  if (!is_root()) {
    if (!may_give(staged_)) return false;
    const share block = block_of(staged_, of.inputs[0].bytes);
    uint8_t* to = staging(local_, staged_);
    ep_copy(to, of.inputs[0].data + block.at, block.bytes, 0);
    const uint32_t host = root_host();
    if (host != host_ && !put(counterpart(host), to, block.bytes, landing_at(staged_) + row_of(place_.self, host) * block_bytes(), layout_.sent_slot(place_.self), before_ + staged_ + 1)) return false;
  }
  publish(&progress_words::staged, before_ + ++staged_);
  return true;
}

// ---- a scatter

bool carrier::deal_steps(const arrays& of) { return is_root() ? deal_blocks(of) : take_dealt(of); }

bool carrier::deal_blocks(const arrays& of) {
  if (staged_ == steps_) return false;
  for (uint32_t member = 0; member < members(); ++member) {
    if (member == place_.self) continue;
    const bool free = is_mate(member) ? said(&progress_words::taken, member - first_mate()) + places_ > before_ + staged_
                                      : staged_ < places_ || landed(layout_.result_slot(member), before_ + staged_ - places_ + 1);
    if (!free) return false;
  }
  const share block = block_of(staged_, call_.longest);
  uint8_t* to = staging(local_, staged_);
  for (uint32_t member = 0; member < members() && block.bytes != 0; ++member) {
    ep_copy(member == place_.self ? of.outputs[0].data + block.at : to + member * block_bytes(), of.inputs[member].data + block.at, block.bytes, 0);
  }
  for (uint32_t member = 0; member < members(); ++member) {
    if (!is_mate(member) && !put(member, to + member * block_bytes(), block.bytes, landing_at(staged_), layout_.sent_slot(place_.self), before_ + staged_ + 1)) return false;
  }
  publish(&progress_words::staged, before_ + ++staged_);
  taken_ = staged_;
  return true;
}

bool carrier::take_dealt(const arrays& of) {
  const bool here = is_mate(call_.root);
  if (taken_ == steps_ || !(here ? said(&progress_words::staged, root_mate()) > before_ + taken_ : landed(layout_.sent_slot(call_.root), before_ + taken_ + 1))) return false;
  const share block = block_of(taken_, of.outputs[0].bytes);
  const uint8_t* from = here ? staging(root_mate(), taken_) + place_.self * block_bytes() : parts_[local_] + landing_at(taken_);
  ep_copy(of.outputs[0].data + block.at, from, block.bytes, 0);
  publish(&progress_words::taken, before_ + ++taken_);
  if (!here) free_places(taken_);
  return true;
}

} // namespace ep
