// Barriers, and broadcasts and reductions to all or one whose payload travels in the line of their only step: what step() does for them, without what it asks for other kinds. Whatever is
// out of the ordinary is left to step(), which finds the run as if it had come that far itself.
#include "run.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstring>

namespace ep {
namespace {

constexpr uint32_t canonical_nan = 0x7fc00000; // see reduce.hpp
constexpr uint64_t word_bytes = sizeof(uint64_t);
constexpr uint64_t line_words = group_inline_bytes / word_bytes;
static_assert(offsetof(group_line, payload) % word_bytes == 0 && group_inline_bytes % word_bytes == 0);

// Lengths that are known when this is compiled take no call.
void copy_few(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  if (bytes == word_bytes) std::memcpy(to, from, word_bytes);
  else if (bytes != 0) std::memcpy(to, from, bytes);
}

// HAZARD: the payload of a line is written and read by words, release and acquire: a rank that the others have taken out may still read a line that is being written for a
// later call. Whoever has read such a word, sees behind it that it was taken out.
void put_words(uint8_t* payload, const uint8_t* from, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes; at += word_bytes) {
    uint64_t word = 0;
    copy_few(reinterpret_cast<uint8_t*>(&word), from + at, std::min(word_bytes, bytes - at));
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(payload + at)).store(word, std::memory_order_release);
  }
}

void take_words(uint64_t* to, const uint8_t* payload, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes; at += word_bytes) {
    auto* const word = reinterpret_cast<uint64_t*>(const_cast<uint8_t*>(payload + at));
    to[at / word_bytes] = std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire);
  }
}

// As reduce_elements() does it, without its ways to choose a kernel: they take longer than the sum.
template <class Source> void sum_of(uint8_t* to, uint64_t bytes, size_t sources, Source source) {
  float sums[group_inline_bytes / sizeof(float)];
  const uint64_t count = bytes / sizeof(float);
  copy_few(reinterpret_cast<uint8_t*>(sums), source(0), bytes);
  for (size_t at = 1; at < sources; ++at) {
    const uint8_t* const from = source(at);
    for (uint64_t i = 0; i < count; ++i) {
      float value;
      std::memcpy(&value, from + i * sizeof value, sizeof value);
      sums[i] += value;
    }
  }
  for (uint64_t i = 0; i < count; ++i) {
    if (sums[i] != sums[i]) sums[i] = std::bit_cast<float>(canonical_nan);
  }
  copy_few(to, reinterpret_cast<const uint8_t*>(sums), bytes);
}

} // namespace

bool collective_run::travels_in_line() const {
  switch (call_->kind) {
    case op_kind::barrier:
    case op_kind::broadcast:
    case op_kind::all_reduce:
    case op_kind::reduce: return call_->bytes <= group_inline_bytes;
    default: return false;
  }
}

void collective_run::put_in_line() {
  if (!gives() || call_->bytes == 0) return;
  put_words(board_->next_line().payload, call_->inputs.front().data, call_->bytes);
  ++trace_->writes;
  trace_->bytes += call_->bytes;
}

// True once the step is entered. False: it is not, or cannot be any more.
bool collective_run::begin_in_line() {
  if (!board_->connected() || board_->view_pending() || !board_->ready() || !board_->room()) return false;
  if (call_->root >= 0 && !board_->is_active(call_->root)) return false;
  name_call(board_->next_call());
  ++trace_->calls;
  ++trace_->signals;
  put_in_line();
  phase_ = phase::entered;
  enter(signature_, group_flag_data);
  if (phase_ != phase::entered) return false;
  if (call_->kind == op_kind::broadcast && runs_ahead()) board_->await(call_->root);
  return true;
}

// True once the call has ended, and well.
bool collective_run::end_in_line() {
  if (call_->kind == op_kind::broadcast && runs_ahead()) {
    if (!root_has_entered()) return false;
  } else {
    for (const int32_t r : board_->active()) {
      if (!board_->has_entered(r) || board_->signature_of(r, board_->step()) != signature_) return false;
    }
    if (!board_->compare()) return false;
  }
  take_from_lines();
  return true;
}

void collective_run::take_from_lines() {
  const uint64_t bytes = call_->bytes;
  if (call_->outputs.empty() || bytes == 0) return; // of a barrier, too, and of who gives to a root, or is one that has what it gives
  uint8_t* const to = call_->outputs.front().data;
  uint64_t words[group_ranks][line_words];
  if (call_->kind == op_kind::broadcast) {
    take_words(words[0], board_->line_of(call_->root).payload, bytes);
    copy_few(to, reinterpret_cast<const uint8_t*>(words[0]), bytes);
    return;
  }
  size_t taken = 0;
  for (const int32_t r : board_->active()) take_words(words[taken++], board_->line_of(r).payload, bytes);
  if (call_->dtype == element_type::f32 && call_->op == reduce_op::sum) {
    sum_of(to, bytes, taken, [&](size_t i) { return reinterpret_cast<const uint8_t*>(words[i]); });
    return;
  }
  sources_.clear();
  for (size_t i = 0; i < taken; ++i) sources_.push_back(words[i]);
  reduce_elements(to, sources_.data(), static_cast<int>(taken), bytes / width(), call_->dtype, call_->op, call_->factor, false);
}

void collective_run::sum_few() {
  sum_of(call_->outputs.front().data, call_->bytes, sources_.size(), [&](size_t i) { return static_cast<const uint8_t*>(sources_[i]); });
}

} // namespace ep
