// How the data of a call moves, once all have entered it: with the step itself, through chunks, or in place.
#include "run.hpp"

#include <algorithm>
#include <cstring>

#include "../hand_over.hpp"

namespace ep {
namespace {

constexpr uint64_t line_bytes = 64;
// Work between two looks at whether the call goes on.
constexpr uint64_t work_bytes = uint64_t{1} << 20;
// Few ranks all reduce a short chunk, which takes one step less; otherwise each reduces a slice for all, and copies those of the others: less is staged, and less read.
constexpr size_t ranks_that_reduce_all = 3;
constexpr uint64_t bytes_that_all_reduce = 65536;

// Part of a chunk that the rank at this place among the active ones reduces for all.
struct slice_range {
  uint64_t from;
  uint64_t to;
};
slice_range slice_of(uint64_t bytes, size_t ranks, size_t place) {
  const uint64_t slice = (bytes / ranks / line_bytes + 1) * line_bytes;
  const uint64_t from = std::min(bytes, slice * place);
  return {from, std::min(bytes, from + slice)};
}

bool is_list(op_kind kind) { return kind == op_kind::scatter || kind == op_kind::reduce_scatter || kind == op_kind::all_to_all; }

} // namespace

const uint8_t* collective_run::small_of(int32_t rank) const {
  uint64_t bytes = 0;
  if (call_->kind == op_kind::all_to_all) {
    const group_block* blocks = board_->blocks_of(rank);
    for (int32_t i = 0; i < board_->size(); ++i) bytes += blocks[i].bytes;
  } else {
    bytes = is_list(call_->kind) ? call_->bytes * static_cast<uint64_t>(board_->size()) : call_->bytes;
  }
  return bytes <= group_inline_bytes ? board_->line_of(rank).payload : board_->slot_of(rank);
}

progress collective_run::finish_small() {
  if (in_line_) {
    take_from_lines();
    return progress::done;
  }
  const int32_t rank = board_->rank();
  const uint64_t bytes = call_->bytes;
  const auto own = static_cast<uint64_t>(rank);
  const auto take = [](const call_block& to, const uint8_t* from) {
    if (to.bytes != 0) ep_copy(to.data, from, to.bytes, 0);
  };
  const auto reduce = [&](uint64_t offset) {
    sources_.clear();
    for (const int32_t r : board_->active()) sources_.push_back(small_of(r) + offset);
    if (call_->dtype == element_type::f32 && call_->op == reduce_op::sum && bytes <= group_inline_bytes) return sum_few();
    reduce_elements(call_->outputs[0].data, sources_.data(), static_cast<int>(sources_.size()), bytes / width(), call_->dtype, call_->op, call_->factor, false);
  };
  switch (call_->kind) {
    case op_kind::barrier:
    case op_kind::membership: break;
    case op_kind::broadcast:
      if (rank != call_->root) take(call_->outputs[0], small_of(call_->root));
      break;
    case op_kind::all_reduce: reduce(0); break;
    case op_kind::reduce:
      if (rank == call_->root) reduce(0);
      break;
    case op_kind::gather:
    case op_kind::all_gather:
      if (call_->outputs.empty()) break;
      for (const int32_t r : board_->active()) take(call_->outputs[static_cast<size_t>(r)], small_of(r));
      break;
    case op_kind::scatter: take(call_->outputs[0], small_of(call_->root) + own * bytes); break;
    case op_kind::reduce_scatter: reduce(own * bytes); break;
    case op_kind::all_to_all:
      for (const int32_t r : board_->active()) {
        uint64_t offset = 0;
        for (int32_t i = 0; i < rank; ++i) offset += board_->blocks_of(r)[i].bytes;
        take(call_->outputs[static_cast<size_t>(r)], small_of(r) + offset);
      }
      break;
  }
  return progress::done;
}

// Whether no other rank reads this block of what this rank gives.
bool collective_run::keeps(size_t block) const {
  if (call_->kind == op_kind::gather) return is_root();
  return is_list(call_->kind) && block == static_cast<size_t>(board_->rank());
}

uint64_t collective_run::chunk_bytes() const {
  return is_list(call_->kind) ? group_chunk_bytes / static_cast<uint64_t>(board_->size()) / line_bytes * line_bytes : group_chunk_bytes;
}

// The whole call tells which way is faster, not what the copies took: what is written past the caches is read from memory, by others. HAZARD: when all have entered it, or it would tell who was late.
void collective_run::begin_chunks() {
  // Of calls alike: what is compared is ticks of a byte, of which short ones take more.
  const uint32_t length = longest_ <= uint64_t{256} << 10 ? 0 : longest_ <= uint64_t{2} << 20 ? 1 : longest_ <= uint64_t{16} << 20 ? 2 : 3;
  static_assert(op_kinds * 4 <= group_board::chunk_ways);
  way_ = takes_lines_back_slowly() ? &board_->chunk_way(static_cast<uint32_t>(call_->kind) * 4 + length) : nullptr;
  past_ = way_ != nullptr && way_->choose();
  chunks_begun_ = hand_over_ticks();
}

// Into a chunk, by the way that this call goes.
void collective_run::give(uint8_t* to, const uint8_t* from, uint64_t bytes) { hand_over(to, from, bytes, past_ && hands_over_past_caches(bytes)); }

void collective_run::put_chunk() {
  const uint64_t share = chunk_bytes();
  const uint64_t at = chunk_ * share;
  uint8_t* to = board_->next_chunk();
  if (shares_reduction()) {
    // Nobody else reads this rank's own slice.
    const uint64_t bytes = std::min(share, call_->bytes - at);
    const slice_range own = slice_of(bytes, board_->active().size(), static_cast<size_t>(board_->place()));
    const uint8_t* from = call_->inputs[0].data + at;
    give(to, from, own.from);
    give(to + own.to, from + own.to, bytes - own.to);
    ++trace_->writes;
    trace_->bytes += bytes - (own.to - own.from);
    ++trace_->signals;
    enter(0, 0);
    return;
  }
  for (size_t i = 0; i < call_->inputs.size(); ++i) {
    const call_block& block = call_->inputs[i];
    if (at >= block.bytes || keeps(i)) continue;
    const uint64_t bytes = std::min(share, block.bytes - at);
    give(to + i * share, block.data + at, bytes);
    ++trace_->writes;
    trace_->bytes += bytes;
  }
  ++trace_->signals;
  enter(0, 0);
}

bool collective_run::take_chunk() {
  const uint64_t share = chunk_bytes();
  const uint64_t at = chunk_ * share;
  const auto& active = board_->active();
  const int32_t rank = board_->rank();
  const auto own = static_cast<uint64_t>(rank);
  // What a rank gives: this one's own where it lies, others' in their chunks.
  const auto given = [&](int32_t from, uint64_t block) { return from == rank ? call_->inputs[block].data + at : board_->chunk_of(from) + block * share; };
  const auto take = [&](const call_block& to, int32_t from, uint64_t block) {
    if (at >= to.bytes) return;
    const uint8_t* data = given(from, block);
    if (data != to.data + at) ep_copy(to.data + at, data, std::min(share, to.bytes - at), non_temporal_ ? 1 : 0);
  };
  const auto reduce = [&](uint8_t* to, uint64_t block, uint64_t bytes, bool past_cache) {
    sources_.clear();
    for (const int32_t r : active) sources_.push_back(given(r, block));
    reduce_elements(to, sources_.data(), static_cast<int>(sources_.size()), bytes / width(), call_->dtype, call_->op, call_->factor, past_cache);
  };
  const uint64_t bytes = at < call_->bytes ? std::min(share, call_->bytes - at) : 0;
  switch (call_->kind) {
    case op_kind::barrier:
    case op_kind::membership: break;
    case op_kind::broadcast:
      if (rank != call_->root) take(call_->outputs[0], call_->root, 0);
      break;
    case op_kind::all_reduce: {
      if (!shares_reduction()) {
        reduce(call_->outputs[0].data + at, 0, bytes, non_temporal_);
        break;
      }
      const slice_range own_slice = slice_of(bytes, active.size(), static_cast<size_t>(board_->place()));
      sources_.clear();
      for (const int32_t r : active) sources_.push_back((r == rank ? call_->inputs[0].data + at : board_->chunk_of(r)) + own_slice.from);
      uint8_t* const shared = board_->next_chunk() + own_slice.from;
      uint8_t* const kept = call_->outputs[0].data + at + own_slice.from;
      const uint64_t own_bytes = own_slice.to - own_slice.from;
      // Past the caches to others means past one's own in the same pass: a second pass reads what the first has left there.
      const bool twice = !non_temporal_;
      targets_.assign({kept});
      if (!twice) targets_.insert(targets_.begin(), shared);
      reduce_push(targets_.data(), static_cast<int>(targets_.size()), sources_.data(), static_cast<int>(sources_.size()), own_bytes / width(), call_->dtype, call_->op, call_->factor,
                  non_temporal_);
      if (twice) give(shared, kept, own_bytes);
      ++trace_->signals;
      ++trace_->writes;
      trace_->bytes += own_slice.to - own_slice.from;
      enter(0, 0);
      return false;
    }
    case op_kind::reduce:
      if (rank == call_->root) reduce(call_->outputs[0].data + at, 0, bytes, non_temporal_);
      break;
    case op_kind::gather:
    case op_kind::all_gather:
      if (call_->outputs.empty()) break;
      for (const int32_t r : active) take(call_->outputs[static_cast<size_t>(r)], r, 0);
      break;
    case op_kind::scatter: take(call_->outputs[0], call_->root, own); break;
    case op_kind::reduce_scatter: reduce(call_->outputs[0].data + at, own, bytes, non_temporal_); break;
    case op_kind::all_to_all:
      for (const int32_t r : active) take(call_->outputs[static_cast<size_t>(r)], r, own);
      break;
  }
  return true;
}

void collective_run::take_slices() {
  const uint64_t share = chunk_bytes();
  const uint64_t at = chunk_ * share;
  const uint64_t bytes = std::min(share, call_->bytes - at);
  const auto& active = board_->active();
  for (size_t i = 0; i < active.size(); ++i) {
    if (active[i] == board_->rank()) continue;
    const slice_range slice = slice_of(bytes, active.size(), i);
    ep_copy(call_->outputs[0].data + at + slice.from, board_->chunk_of(active[i]) + slice.from, slice.to - slice.from, non_temporal_ ? 1 : 0);
  }
}

// Of the chunk that is the next one: the same on all ranks.
bool collective_run::shares_reduction() const {
  if (call_->kind != op_kind::all_reduce) return false;
  const size_t ranks = board_->active().size();
  const uint64_t at = chunk_ * chunk_bytes();
  return ranks > ranks_that_reduce_all || (ranks > 1 && at < call_->bytes && std::min(chunk_bytes(), call_->bytes - at) > bytes_that_all_reduce);
}

progress collective_run::next_chunk() {
  if (++chunk_ == chunks_) {
    if (non_temporal_) ep_copy_fence();
    if (way_ != nullptr) way_->took(past_, hand_over_ticks() - chunks_begun_, longest_);
    return progress::done;
  }
  phase_ = phase::chunk;
  put_chunk();
  return phase_ == phase::failed ? progress::failed : progress::made;
}

bool collective_run::writes_to_peers() const {
  return call_->kind == op_kind::all_reduce || call_->kind == op_kind::reduce || (call_->kind == op_kind::broadcast && is_long() && all_flags(group_flag_output));
}

const uint8_t* collective_run::input_of(int32_t rank, uint32_t index, uint64_t bytes) {
  if (bytes == 0) return board_->slot_of(rank);
  const group_block& block = board_->blocks_of(rank)[index];
  return board_->memory_of(rank, block.segment, block.offset, bytes);
}

bool collective_run::prepare_direct() {
  copies_.clear();
  sources_.clear();
  targets_.clear();
  reduce_bytes_ = done_bytes_ = 0;
  copy_at_ = 0;
  const auto& active = board_->active();
  const int32_t rank = board_->rank();
  const auto own = static_cast<uint32_t>(rank);
  bool mapped = true;
  const auto copy = [&](const call_block& to, int32_t from, uint32_t index) {
    const uint8_t* data = input_of(from, index, to.bytes);
    mapped = mapped && data != nullptr;
    if (to.bytes != 0 && mapped && data != to.data) copies_.push_back({data, to.data, to.bytes});
  };
  switch (call_->kind) {
    case op_kind::barrier:
    case op_kind::membership: break;
    case op_kind::broadcast: {
      // The root's share of each peer's bytes is as large as what is left to that peer.
      const uint64_t pushed = pushes_ ? call_->bytes / active.size() / line_bytes * line_bytes : 0;
      if (rank != call_->root) {
        const uint8_t* data = input_of(call_->root, 0, call_->bytes);
        mapped = data != nullptr;
        if (mapped) copies_.push_back({data + pushed, call_->outputs[0].data + pushed, call_->bytes - pushed});
        break;
      }
      for (const int32_t r : active) {
        if (r == rank || pushed == 0) continue;
        const group_call& theirs = board_->call_of(r);
        uint8_t* to = board_->memory_of(r, theirs.output_segment, theirs.output_offset, call_->bytes);
        mapped = mapped && to != nullptr;
        copies_.push_back({call_->inputs[0].data, to, pushed});
        ++trace_->writes;
        trace_->bytes += pushed;
      }
      break;
    }
    case op_kind::gather:
    case op_kind::all_gather:
    case op_kind::all_to_all:
      if (call_->outputs.empty()) break;
      // Everyone begins with another peer, so that no rank's memory is read by all at once.
      for (size_t i = 0; i < active.size(); ++i) {
        const int32_t r = active[(i + static_cast<size_t>(board_->place())) % active.size()];
        copy(call_->outputs[static_cast<size_t>(r)], r, call_->kind == op_kind::all_to_all ? own : 0);
      }
      break;
    case op_kind::scatter: copy(call_->outputs[0], call_->root, own); break;
    case op_kind::reduce_scatter:
      for (const int32_t r : active) sources_.push_back(input_of(r, own, call_->bytes));
      targets_.push_back(call_->outputs[0].data);
      reduce_bytes_ = call_->bytes;
      break;
    case op_kind::all_reduce:
    case op_kind::reduce: {
      const uint64_t slice = (call_->bytes / active.size() / line_bytes + 1) * line_bytes;
      const uint64_t from = std::min(call_->bytes, slice * static_cast<uint64_t>(board_->place()));
      reduce_bytes_ = std::min(call_->bytes, from + slice) - from;
      for (const int32_t r : active) {
        const uint8_t* data = input_of(r, 0, call_->bytes);
        sources_.push_back(data == nullptr ? nullptr : data + from);
        if (call_->kind == op_kind::reduce && r != call_->root) continue;
        const group_call& theirs = board_->call_of(r);
        uint8_t* to = call_->bytes == 0 ? nullptr : board_->memory_of(r, theirs.output_segment, theirs.output_offset, call_->bytes);
        mapped = mapped && (to != nullptr || call_->bytes == 0);
        targets_.push_back(to == nullptr ? nullptr : to + from);
      }
      trace_->writes += targets_.size();
      trace_->bytes += reduce_bytes_ * targets_.size();
      break;
    }
  }
  return mapped && std::all_of(sources_.begin(), sources_.end(), [](const void* data) { return data != nullptr; });
}

progress collective_run::work() {
  uint64_t left = work_bytes;
  while (copy_at_ < copies_.size() && left != 0) {
    piece& next = copies_[copy_at_];
    const uint64_t bytes = std::min(left, next.bytes);
    const bool pushes = pushes_ && is_root();
    if (pushes && !board_->begin_push()) return evicted();
    ep_copy(next.to, next.from, bytes, non_temporal_ ? 1 : 0);
    if (pushes) {
      if (non_temporal_) ep_copy_fence();
      board_->end_push();
    }
    next.from += bytes;
    next.to += bytes;
    next.bytes -= bytes;
    left -= bytes;
    if (next.bytes == 0) ++copy_at_;
  }
  const uint64_t share = std::max<uint64_t>(work_bytes / std::max<size_t>(1, sources_.size()) / line_bytes, 1) * line_bytes;
  if (left != 0 && done_bytes_ < reduce_bytes_) {
    const uint64_t bytes = std::min(share, reduce_bytes_ - done_bytes_);
    if (pushes_ && !board_->begin_push()) return evicted();
    reduce_push(targets_.data(), static_cast<int>(targets_.size()), sources_.data(), static_cast<int>(sources_.size()), bytes / width(), call_->dtype,
                call_->op, call_->factor, non_temporal_);
    if (pushes_) {
      if (non_temporal_) ep_copy_fence();
      board_->end_push();
    }
    for (const void*& source : sources_) source = static_cast<const uint8_t*>(source) + bytes;
    for (void*& target : targets_) target = static_cast<uint8_t*>(target) + bytes;
    done_bytes_ += bytes;
  }
  if (copy_at_ < copies_.size() || done_bytes_ < reduce_bytes_) return progress::made;
  if (non_temporal_) ep_copy_fence();
  ++trace_->signals;
  phase_ = phase::closing;
  enter(0, 0);
  return phase_ == phase::failed ? progress::failed : progress::made;
}

} // namespace ep
