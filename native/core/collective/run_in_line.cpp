// Barriers, and broadcasts and reductions to all or one whose payload travels in the line of their only step: what step() does for them, without what it asks for other kinds. Whatever is
// out of the ordinary is left to step(), which finds the run as if it had come that far itself.
#include "run.hpp"

#include <bit>
#include <cstring>

namespace ep {
namespace {

constexpr uint32_t canonical_nan = 0x7fc00000; // see reduce.hpp

// Lengths that are known when this is compiled take no call.
void copy_few(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  if (bytes == sizeof(uint64_t)) std::memcpy(to, from, sizeof(uint64_t));
  else if (bytes != 0) std::memcpy(to, from, bytes);
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

// True once the step is entered. False: it is not, or cannot be any more.
bool collective_run::begin_in_line() {
  if (!board_->connected() || board_->view_pending() || !board_->ready() || !board_->room()) return false;
  if (call_->root >= 0 && !board_->is_active(call_->root)) return false;
  name_call(board_->next_call());
  ++trace_->calls;
  ++trace_->signals;
  if (gives() && call_->bytes != 0) {
    copy_few(board_->next_line().payload, call_->inputs.front().data, call_->bytes);
    ++trace_->writes;
    trace_->bytes += call_->bytes;
  }
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
      if (!board_->has_entered(r) || board_->line_of(r).signature != signature_) return false;
    }
    if (!board_->compare()) return false;
  }
  switch (call_->kind) {
    case op_kind::barrier: return true;
    case op_kind::broadcast:
      if (!is_root()) copy_few(call_->outputs.front().data, board_->line_of(call_->root).payload, call_->bytes);
      return true;
    default:
      if (call_->outputs.empty()) return true;
      if (call_->dtype == element_type::f32 && call_->op == reduce_op::sum) {
        const auto& active = board_->active();
        sum_of(call_->outputs.front().data, call_->bytes, active.size(), [&](size_t i) { return board_->line_of(active[i]).payload; });
      } else {
        finish_small();
      }
      return true;
  }
}

void collective_run::sum_few() {
  sum_of(call_->outputs.front().data, call_->bytes, sources_.size(), [&](size_t i) { return static_cast<const uint8_t*>(sources_[i]); });
}

} // namespace ep
