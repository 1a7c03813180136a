// What a carrier does in each step of an all-reduce, and at the end of any call.
#include <algorithm>
#include <atomic>

#include "carrier_words.hpp"
#include "ep/device/copy.h"
#include "host_fold.hpp"

namespace ep {

using carried_lines::down;
using carried_lines::line;
using carried_lines::up;

// ---- an all-reduce

// Of a whole step, that of one of those that have shares. HAZARD: of more than two hosts, what lands of it and what comes of it have half a piece each, and parts of all hosts are counted as long as the first, in whole lines. Of a reduction
// to a root what lands is of all other hosts.
uint64_t carrier::share_bytes(const carried_call& call, uint64_t piece) const {
  const uint64_t wider = wide(call);
  const uint64_t staged = piece / (columns_ + (wider == 1 ? 0 : wider));
  if (call.kind == carried_kind::reduce) return down(std::min(staged, piece / wider / (hosts() - 1)));
  return down(std::min(staged, hosts() == 2 ? piece / wider : piece / 2 / wider - line * hosts()));
}

uint64_t carrier::wide(const carried_call& call) {
  return folds(call.kind) ? element_bytes(partial_type(call.type, call.op)) / element_bytes(call.type) : 1;
}

// In the array. The last step is shared equally, too.
carrier::share carrier::share_of(uint64_t step, uint32_t mate, uint64_t total) const {
  const uint64_t begin = step * share_bytes() * columns_;
  const uint64_t bytes = std::min(total - begin, share_bytes() * columns_);
  const uint64_t each = std::min(share_bytes(), up((bytes + columns_ - 1) / columns_));
  const uint64_t at = std::min(bytes, mate * each);
  return {begin + at, std::min(bytes, (mate + 1) * each) - at};
}

// Of a share of so many bytes, that of one host.
carrier::share carrier::part_of(uint64_t bytes, uint32_t host) const {
  const uint64_t each = up((bytes + hosts() - 1) / hosts());
  const uint64_t at = std::min(bytes, host * each);
  return {at, std::min(bytes, at + each) - at};
}

bool carrier::reduce_steps(const arrays& of) {
  bool moved = stage_shares(of);
  if (!has_share()) return take_shares(of) || moved;
  moved = fold_host(of) || moved;
  if (hosts() == 2) {
    moved = fold_two_hosts(of) || moved;
  } else {
    moved = fold_part(of) || moved;
    moved = take_parts(of) || moved;
  }
  return take_shares(of) || moved;
}

bool carrier::stage_shares(const arrays& of) {
  if (staged_ == steps_ || least(&progress_words::read, columns_) + places_ <= before_ + staged_) return false;
  const carried_bytes& input = of.inputs[0];
  uint8_t* to = staging(local_, staged_);
  for (uint32_t mate = 0; mate < columns_; ++mate) {
    if (mate == local_) continue;
    const share theirs = share_of(staged_, mate, input.bytes);
    ep_copy(to + mate * share_bytes(), input.data + theirs.at, theirs.bytes, 0);
  }
  publish(&progress_words::staged, before_ + ++staged_);
  return true;
}

bool carrier::fold_host(const arrays& of) {
  if (read_ == staged_ || least(&progress_words::staged) <= before_ + read_) return false;
  if (call_.kind == carried_kind::reduce ? !may_give(read_) : least(&progress_words::taken) + window_ <= before_ + read_) return false;
  const carried_bytes& input = of.inputs[0];
  const share own = share_of(read_, local_, input.bytes);
  const void* sources[round_layout::most_members];
  for (uint32_t mate = 0; mate < mates(); ++mate) {
    sources[mate] = mate == local_ ? input.data + own.at : staging(mate, read_) + local_ * share_bytes();
  }
  uint8_t* folded = partial(local_, read_);
  if (own.bytes != 0) fold_here(folded, sources, own.bytes);
  if (!(call_.kind == carried_kind::reduce ? send_to_root(own.bytes) : send_share(own.bytes))) return false;
  publish(&progress_words::read, before_ + ++read_);
  return true;
}

// What the host has come to: all of it to the one other host, or each other host's part.
bool carrier::send_share(uint64_t bytes) {
  const uint8_t* folded = partial(local_, read_);
  const uint64_t slot = layout_.sent_slot(place_.self);
  const uint64_t value = before_ + read_ + 1;
  if (hosts() == 2) return put(counterpart(1 - host_), folded, wide() * bytes, landing_at(read_), slot, value);
  for (uint32_t host = 0; host < hosts(); ++host) {
    const share part = part_of(bytes, host);
    // Parts of all hosts are as long as the first, or shorter.
    if (host != host_ && !put(counterpart(host), folded + wide() * part.at, wide() * part.bytes, landing_at(read_) + host_ * wide() * part_of(bytes, 0).bytes, slot, value)) return false;
  }
  return true;
}

bool carrier::fold_two_hosts(const arrays& of) {
  if (ready_ == read_ || !counterparts_say(&carrier_layout::sent_slot, before_ + ready_ + 1)) return false;
  const carried_bytes& output = of.outputs[0];
  const share own = share_of(ready_, local_, output.bytes);
  if (own.bytes != 0) {
    uint8_t* theirs = results(local_, ready_);
    const void* sources[2] = {partial(local_, ready_), theirs};
    if (host_ == 1) std::swap(sources[0], sources[1]);
    void* targets[2] = {output.data + own.at, theirs};
    // Nobody else needs it where this one is alone.
    fold_into(targets, mates() == 1 ? 1 : 2, sources, own.bytes);
  }
  publish(&progress_words::ready, before_ + ++ready_);
  return true;
}

void carrier::fold_here(void* partial, const void* const* sources, uint64_t bytes) const {
  fold_members(partial, sources, static_cast<int>(mates()), bytes / element_bytes(call_.type), call_.type, call_.op, call_.factor);
}

void carrier::fold_into(void* const* targets, int count, const void* const* partials, uint64_t bytes) const {
  fold_partials(targets, count, partials, static_cast<int>(hosts()), bytes / element_bytes(call_.type), call_.type, call_.op, call_.factor, members());
}

// This host's part of the share, of all hosts, for all of them.
bool carrier::fold_part(const arrays& of) {
  if (folded_ == read_ || !counterparts_say(&carrier_layout::sent_slot, before_ + folded_ + 1)) return false;
  const carried_bytes& output = of.outputs[0];
  const share own = share_of(folded_, local_, output.bytes);
  const share part = part_of(own.bytes, host_);
  uint8_t* result = results(local_, folded_) + part.at;
  if (part.bytes != 0) {
    const uint8_t* here = parts_[local_] + landing_at(folded_);
    const void* sources[round_layout::most_members];
    for (uint32_t host = 0; host < hosts(); ++host) sources[host] = host == host_ ? partial(local_, folded_) + wide() * part.at : here + host * wide() * part_of(own.bytes, 0).bytes;
    void* targets[2] = {output.data + own.at + part.at, result};
    fold_into(targets, 2, sources, part.bytes);
  }
  for (uint32_t host = 0; host < hosts(); ++host) {
    if (host != host_ && !put(counterpart(host), result, part.bytes, results_at(folded_) + part.at, layout_.result_slot(place_.self), before_ + folded_ + 1)) return false;
  }
  ++folded_;
  return true;
}

bool carrier::take_parts(const arrays& of) {
  if (ready_ == folded_ || !counterparts_say(&carrier_layout::result_slot, before_ + ready_ + 1)) return false;
  const carried_bytes& output = of.outputs[0];
  const share own = share_of(ready_, local_, output.bytes);
  for (uint32_t host = 0; host < hosts(); ++host) {
    const share part = part_of(own.bytes, host);
    if (host != host_) ep_copy(output.data + own.at + part.at, results(local_, ready_) + part.at, part.bytes, 0);
  }
  publish(&progress_words::ready, before_ + ++ready_);
  return true;
}

bool carrier::take_shares(const arrays& of) {
  if (taken_ == steps_ || least(&progress_words::ready, columns_) <= before_ + taken_) return false;
  const carried_bytes& output = of.outputs[0];
  for (uint32_t mate = 0; mate < columns_; ++mate) {
    const share theirs = share_of(taken_, mate, output.bytes);
    if (mate != local_) ep_copy(output.data + theirs.at, results(mate, taken_), theirs.bytes, 0);
  }
  publish(&progress_words::taken, before_ + ++taken_);
  return true;
}

// ---- its end

// This member has its data, and says so to the first one of its host. HAZARD: that one says that a call is over to its mates once all other hosts' have told it so, and not before: whoever has heard it knows of all members.
bool carrier::close_call() {
  const uint64_t over = before_ + 1;
  bool moved = false;
  if (!told_) {
    std::atomic_ref<uint64_t>(words(local_).done).store(over, std::memory_order_seq_cst);
    if (local_ != 0) wake_notify(reinterpret_cast<ep_wake_word*>(parts_[0]));
    told_ = moved = true;
  }
  if (local_ != 0) {
    if (said(&progress_words::closed, 0) < over) return moved;
    busy_ = false;
    return true;
  }
  if (!passed_on_) {
    if (least(&progress_words::done) < over) return moved;
    for (uint32_t host = 0; host < hosts(); ++host) if (host != host_ && !put(place_.hosts[host], nullptr, 0, 0, layout_.closed_slot(place_.self), over)) return false;
    passed_on_ = moved = true;
  }
  for (uint32_t host = 0; host < hosts(); ++host) if (host != host_ && !landed(layout_.closed_slot(place_.hosts[host]), over)) return moved;
  publish(&progress_words::closed, over);
  busy_ = false;
  return true;
}

} // namespace ep
