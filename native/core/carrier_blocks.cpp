// What a carrier does in each step of a call that moves blocks of members: an all-to-all, an all-gather, a broadcast, a reduce-scatter.
#include <algorithm>

#include "carrier_words.hpp"
#include "ep/device/copy.h"
#include "host_fold.hpp"

namespace ep {

using carried_lines::down;

// ---- an all-to-all

// Of a step, what goes from one member to another: a place has room for one of every member, or, where all of a host take the same, of those that face one of them. What is folded and wide is behind them.
uint64_t carrier::block_bytes(const carried_call& call, uint64_t piece) const {
  if (call.kind == carried_kind::gather) return down(piece / rows_of(host_of(call.root)));
  const bool alike = call.kind == carried_kind::all_gather || call.kind == carried_kind::broadcast;
  const uint64_t folded = wide(call) == 1 ? 0 : wide(call) * most_rows_;
  return down(piece / (alike ? most_rows_ : members() + folded));
}

carrier::share carrier::block_of(uint64_t step, uint64_t total) const {
  const uint64_t at = std::min(total, step * block_bytes());
  return {at, std::min(total - at, block_bytes())};
}

uint64_t carrier::progress_words::* carrier::block_word() const { return whole() ? &progress_words::whole : &progress_words::staged; }

bool carrier::block_steps(const arrays& of) {
  const bool staged = stage_blocks(of);
  return take_blocks(of) || staged;
}

bool carrier::stage_blocks(const arrays& of) {
  if (staged_ == steps_ || staged_ >= taken_ + window_) return false;
  if (least(&progress_words::taken) + places_ <= before_ + staged_) return false;
  uint8_t* to = staging(local_, staged_);
  const auto stage = [&](uint32_t member) {
    const share block = block_of(staged_, of.inputs[member].bytes);
    ep_copy(to + member * block_bytes(), of.inputs[member].data + block.at, block.bytes, 0);
    return block.bytes;
  };
  // What leaves the host goes first, each block while it is in the caches: it is longest on its way. Those of this member's place begin, then the next ones, so that not all write to one at a time.
  for (uint32_t turn = 0; turn < members(); ++turn) {
    for (uint32_t next = 1; next < hosts(); ++next) {
      const uint32_t host = (host_ + next) % hosts();
      if (turn >= members_of(host)) continue;
      const uint32_t member = place_.hosts[host] + (local_ + turn) % members_of(host);
      const uint64_t bytes = stage(member);
      if (!put(member, to + member * block_bytes(), bytes, landing_at(staged_) + place_.self * block_bytes(), block_slot(place_.self), before_ + staged_ + 1)) return false;
    }
  }
  for (uint32_t mate = 0; mate < mates(); ++mate) if (mate != local_) stage(first_mate() + mate);
  publish(block_word(), before_ + ++staged_);
  return true;
}

// Each block as soon as it is there.
bool carrier::take_blocks(const arrays& of) {
  if (taken_ == staged_) return false;
  const uint8_t* here = parts_[local_] + landing_at(taken_);
  const uint64_t had = taken_blocks_;
  for (uint32_t member = 0; member < members(); ++member) {
    const uint64_t bit = uint64_t{1} << member;
    if ((taken_blocks_ & bit) != 0) continue;
    const bool there = !is_mate(member) ? landed(block_slot(member), before_ + taken_ + 1) : member == place_.self || said(block_word(), member - first_mate()) > before_ + taken_;
    if (!there) continue;
    const share block = block_of(taken_, of.outputs[member].bytes);
    const uint8_t* from = member == place_.self ? of.inputs[member].data + block.at
                          : is_mate(member)     ? staging(member - first_mate(), taken_) + place_.self * block_bytes()
                                                : here + member * block_bytes();
    if (block.bytes != 0) ep_copy(of.outputs[member].data + block.at, from, block.bytes, 0);
    taken_blocks_ |= bit;
  }
  if (taken_blocks_ != UINT64_MAX >> (64 - members())) return taken_blocks_ != had;
  taken_blocks_ = 0;
  publish(&progress_words::taken, before_ + ++taken_);
  return true;
}

// ---- an all-gather, and a broadcast

bool carrier::gather_steps(const arrays& of) {
  bool moved = stage_source(of);
  moved = hear_sources() || moved;
  moved = take_sources(of) || moved;
  // HAZARD: the root hears of nothing else how far other hosts are. Whoever it has put it to tells it.
  const bool tells = call_.kind == carried_kind::broadcast && !is_mate(call_.root) && local_of(call_.root) % mates() == local_;
  return (tells && free_places(least(&progress_words::taken) - before_)) || moved;
}

bool carrier::stage_source(const arrays& of) {
  if (staged_ == steps_ || least(&progress_words::taken) + window_ <= before_ + staged_) return false;
  if (is_source(place_.self)) {
    if (call_.kind == carried_kind::broadcast && staged_ >= places_ && !counterparts_say(&carrier_layout::result_slot, before_ + staged_ - places_ + 1)) return false;
    const share block = block_of(staged_, of.inputs[0].bytes);
    uint8_t* to = staging(local_, staged_);
    ep_copy(to, of.inputs[0].data + block.at, block.bytes, 0);
    for (uint32_t next = 1; next < hosts(); ++next) {
      const uint32_t host = (host_ + next) % hosts();
      if (!put(counterpart(host), to, block.bytes, landing_at(staged_) + row_of(place_.self, host) * block_bytes(), layout_.sent_slot(place_.self), before_ + staged_ + 1)) return false;
    }
  }
  publish(&progress_words::staged, before_ + ++staged_);
  return true;
}

// What those that face this member have put here is there, for its mates as well.
bool carrier::hear_sources() {
  if (ready_ == steps_ || !all_facing([this](uint32_t member) { return !is_source(member) || landed(layout_.sent_slot(member), before_ + ready_ + 1); })) return false;
  publish(&progress_words::ready, before_ + ++ready_);
  return true;
}

bool carrier::take_sources(const arrays& of) {
  if (taken_ == steps_ || least(&progress_words::staged) <= before_ + taken_ || least(&progress_words::ready) <= before_ + taken_) return false;
  for (uint32_t member = 0; member < members(); ++member) {
    if (!is_source(member) || (call_.kind == carried_kind::broadcast && member == place_.self)) continue;
    const carried_bytes& output = of.outputs[call_.kind == carried_kind::broadcast ? 0 : member];
    const share block = block_of(taken_, output.bytes);
    const uint32_t mate = local_of(member) % mates();
    const uint8_t* from = member == place_.self ? of.inputs[0].data + block.at
                          : is_mate(member)     ? staging(mate, taken_)
                                                : parts_[mate] + landing_at(taken_) + row_of(member, host_) * block_bytes();
    ep_copy(output.data + block.at, from, block.bytes, 0);
  }
  publish(&progress_words::taken, before_ + ++taken_);
  return true;
}

// ---- a reduce-scatter

// What this host gives to a member that faces this one. Where its mates' is staged, that of this member itself has room for it.
uint8_t* carrier::column_partial(uint64_t step, uint32_t member) const {
  return staging(local_, step) + (wide() == 1 ? member : members() + row_of(member, host_) * wide()) * block_bytes();
}

bool carrier::scatter_steps(const arrays& of) {
  bool moved = stage_columns(of);
  moved = fold_column(of) || moved;
  return fold_block(of) || moved;
}

bool carrier::stage_columns(const arrays& of) {
  if (staged_ == steps_ || least(&progress_words::read) + places_ <= before_ + staged_) return false;
  uint8_t* to = staging(local_, staged_);
  for (uint32_t member = 0; member < members(); ++member) {
    const share block = block_of(staged_, of.inputs[member].bytes);
    if (local_of(member) % mates() != local_) ep_copy(to + member * block_bytes(), of.inputs[member].data + block.at, block.bytes, 0);
  }
  publish(&progress_words::staged, before_ + ++staged_);
  return true;
}

// What this host gives to this member and those that face it.
bool carrier::fold_column(const arrays& of) {
  if (read_ == staged_ || least(&progress_words::staged) <= before_ + read_) return false;
  if (least(&progress_words::taken) + window_ <= before_ + read_) return false;
  const share block = block_of(read_, of.outputs[0].bytes);
  // That of its own host last: others wait for theirs.
  for (uint32_t next = 1; next <= hosts(); ++next) {
    const uint32_t host = (host_ + next) % hosts();
    for (uint32_t local = local_; local < members_of(host); local += mates()) {
      const uint32_t member = place_.hosts[host] + local;
      uint8_t* folded = column_partial(read_, member);
      if (block.bytes != 0) {
        const void* sources[round_layout::most_members];
        for (uint32_t mate = 0; mate < mates(); ++mate) sources[mate] = mate == local_ ? of.inputs[member].data + block.at : staging(mate, read_) + member * block_bytes();
        fold_here(folded, sources, block.bytes);
      }
      if (host != host_ && !put(member, folded, wide() * block.bytes, landing_at(read_) + host_ * wide() * block_bytes(), layout_.sent_slot(place_.self), before_ + read_ + 1)) return false;
    }
  }
  publish(&progress_words::read, before_ + ++read_);
  return true;
}

bool carrier::fold_block(const arrays& of) {
  if (taken_ == read_ || !counterparts_say(&carrier_layout::sent_slot, before_ + taken_ + 1)) return false;
  const share block = block_of(taken_, of.outputs[0].bytes);
  if (block.bytes != 0) {
    const uint8_t* here = parts_[local_] + landing_at(taken_);
    const void* sources[round_layout::most_members];
    for (uint32_t host = 0; host < hosts(); ++host) sources[host] = host == host_ ? column_partial(taken_, place_.self) : here + host * wide() * block_bytes();
    void* target = of.outputs[0].data + block.at;
    fold_into(&target, 1, sources, block.bytes);
  }
  publish(&progress_words::taken, before_ + ++taken_);
  return true;
}

} // namespace ep
