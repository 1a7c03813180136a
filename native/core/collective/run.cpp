// What ranks agree on in the course of a call: its steps, who takes part, how it ends. How data moves is in run_data.cpp.
#include "run.hpp"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "../hand_over.hpp"

namespace ep {
namespace {

constexpr int64_t unmapped_ns = 500'000'000;
// How long those who are taken out are waited for.
constexpr int64_t leaving_ns = 100'000'000;
// How long the others are waited for when calls are known to differ: who is odd shows when all have come.
constexpr int64_t differing_ns = 100'000'000;

// What else runs on a socket has its part of the cache, and a virtual machine is told of all of it. Measured on a Xeon with 260 MiB: copies of 64 MiB in all are faster through the caches, the
// reading of what was copied included (by a tenth), those of 128 MiB past them (by half).
constexpr uint64_t caches_shared_by = 4;

uint64_t last_level_cache() {
  static const uint64_t bytes = [] {
    const long found = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return found > 0 ? static_cast<uint64_t>(found) : uint64_t{16} << 20;
  }();
  return bytes;
}

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  return hash ^ hash >> 32;
}

bool contains(const std::vector<int32_t>& ranks, int32_t rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); }

uint32_t signature_of(const collective_call& call, uint64_t sequence) {
  uint64_t hash = mix(0xcbf29ce484222325u, sequence);
  hash = mix(hash, static_cast<uint64_t>(call.kind) << 48 | static_cast<uint64_t>(call.dtype) << 40 | static_cast<uint64_t>(call.op) << 32 | static_cast<uint32_t>(call.root));
  hash = mix(hash, call.bytes);
  hash = mix(hash, std::bit_cast<uint64_t>(call.factor));
  if (call.change != nullptr) {
    // Who is taken out counts, too, but not whether ranks have to agree anew: some may not have noticed.
    hash = mix(hash, static_cast<uint64_t>(call.change->size));
    for (const auto* ranks : {&call.change->evicted, &call.change->admitted}) {
      hash = mix(hash, ranks->size());
      for (const int32_t r : *ranks) hash = mix(hash, static_cast<uint64_t>(r));
    }
  }
  return std::max(static_cast<uint32_t>(hash), 1u);
}

} // namespace

void collective_run::begin(group_board& board, const collective_call& call, op_trace& trace) {
  board_ = &board;
  call_ = &call;
  trace_ = &trace;
  phase_ = phase::begin;
  in_line_ = travels_in_line();
  sequence_ = call.sequence;
  signature_ = signature_of(call, sequence_);
  chunk_ = 0;
  unmapped_since_ = 0;
  asked_since_ = 0;
  differs_since_ = 0;
  gave_up_ = -1;
}

progress collective_run::fail(uint32_t status, int32_t rank, const char* message) {
  end_ = {};
  end_.status = status;
  end_.rank = rank;
  end_.message = message;
  // HAZARD: who tries it first is not who reports it: asked again, it must not begin anew in the next view.
  phase_ = phase::failed;
  return progress::failed;
}

// No view can be agreed on: this rank is not in it, or where decisions are kept cannot be reached.
progress collective_run::fail_unreached() {
  if (!board_->is_active(board_->rank()) || board_->evicted()) return evicted();
  return fail(EP_STATUS_SYSTEM, board_->active().front(), "the rank that keeps the group's decisions was never reached");
}

progress collective_run::enter(uint32_t signature, uint32_t flags) {
  switch (board_->enter(signature, flags)) {
    case entry::made: return progress::made;
    case entry::evicted: return evicted();
    case entry::cut: phase_ = phase::cut;
  }
  return progress::made;
}

// Small, and only the root gives: the root ends it when it has entered the step, the others when they see that, whoever else has come. The first step of an epoch all
// await: behind it, everybody has mapped what the root may leave behind when it dies.
bool collective_run::runs_ahead() const {
  if (call_->kind != op_kind::broadcast && call_->kind != op_kind::scatter) return false;
  const uint64_t blocks = call_->kind == op_kind::scatter ? static_cast<uint64_t>(board_->size()) : 1;
  return call_->bytes <= group_small_bytes / blocks && board_->step() + (phase_ == phase::begin ? 1 : 0) > 1;
}

bool collective_run::root_has_entered() const {
  return is_root() || (board_->has_entered(call_->root) && board_->signature_of(call_->root, board_->step()) == signature_);
}

// Who is to be taken out may come to this call, and has then ended those before it; but nobody waits for it for long.
void collective_run::evict_late() {
  const int64_t now = clock_now_ns();
  if (asked_since_ == 0) asked_since_ = now;
  if (now - asked_since_ < leaving_ns) return;
  const std::vector<int32_t> missing = board_->missing();
  for (const int32_t r : call_->change->evicted) {
    if (contains(missing, r)) board_->evict(r);
  }
}

void collective_run::evict_missing() {
  // HAZARD: it is itself among those that are awaited, and so may the others be: ranks that wait for the same straggler would take each other out.
  if (board_->fencing()) return;
  for (const int32_t r : board_->missing()) board_->evict(r);
}

// A group may have grown since the call was made.
bool collective_run::fits() const {
  const bool many_in = call_->kind == op_kind::reduce_scatter || call_->kind == op_kind::all_to_all || call_->kind == op_kind::scatter;
  const bool many_out = call_->kind == op_kind::all_gather || call_->kind == op_kind::all_to_all || call_->kind == op_kind::gather;
  const auto ranks = static_cast<size_t>(board_->size());
  return (!many_in || call_->inputs.empty() || call_->inputs.size() == ranks) && (!many_out || call_->outputs.empty() || call_->outputs.size() == ranks);
}

void collective_run::give_up(uint32_t status) {
  // Others have left it behind. HAZARD: they must not take it for their own, later one.
  if (!repairs() && sequence_ <= board_->repaired_sequence()) return;
  board_->give_up(sequence_, repairs(), status, gave_up_ < 0 ? board_->rank() : gave_up_);
}

// Ranks that failed at different calls come to one that repairs under different numbers: the highest is that of all.
void collective_run::catch_up() {
  if (sequence_ >= board_->repaired_sequence()) return;
  sequence_ = board_->repaired_sequence();
  signature_ = signature_of(*call_, sequence_);
}

bool collective_run::can_advance() {
  switch (phase_) {
    case phase::begin: return board_->connected() && (board_->view_pending() || (board_->ready() && board_->room()));
    case phase::unmapped: return false;
    case phase::work:
    case phase::cut:
    case phase::failed: return true;
    case phase::entered:
      if (runs_ahead() && root_has_entered()) return true;
      return board_->entered();
    default: return board_->entered();
  }
}

uint64_t collective_run::payload_bytes() const {
  if (call_->change != nullptr) return sizeof(group_peer) * static_cast<uint64_t>(board_->capacity());
  uint64_t bytes = 0;
  for (const call_block& block : call_->inputs) bytes += block.bytes;
  return bytes;
}

bool collective_run::all_flags(uint32_t flag) const {
  const auto& active = board_->active();
  return std::all_of(active.begin(), active.end(), [&](int32_t r) { return (board_->line_of(r).flags & flag) != 0; });
}

// What peers say of the call when it is not the one that they made.
void collective_run::name_call(group_call& call) const {
  call.sequence = sequence_;
  call.kind = static_cast<uint32_t>(call_->kind);
  call.dtype = static_cast<uint32_t>(call_->dtype);
  call.reduce_op = static_cast<uint32_t>(call_->op);
  call.root = call_->root;
  call.bytes = call_->bytes;
  call.factor = std::bit_cast<uint64_t>(call_->factor);
}

// What peers read of the call besides its signature.
void collective_run::publish_call(uint64_t payload) {
  group_call& call = board_->next_call();
  name_call(call);
  if (call_->change != nullptr) {
    uint64_t leaving[2] = {};
    for (const int32_t r : call_->change->evicted) leaving[r / 64] |= uint64_t{1} << (r % 64);
    call.bytes = leaving[0];
    call.factor = leaving[1];
  }
  call.longest = 0;
  // Where the blocks are is asked for by who reaches for them; where one begins, by who takes its own out of a row of any lengths.
  // So is where peers of a root want what it gives.
  if (payload <= group_small_bytes && call_->kind != op_kind::all_to_all && !(call_->kind == op_kind::broadcast && is_long())) return;
  group_block* blocks = board_->next_blocks();
  for (size_t i = 0; i < call_->inputs.size(); ++i) {
    const call_block& block = call_->inputs[i];
    blocks[i] = {block.bytes, block.offset, block.segment, 0};
    call.longest = std::max(call.longest, block.bytes);
  }
  call.output_segment = call_->outputs.size() == 1 ? call_->outputs[0].segment : group_no_segment;
  call.output_offset = call_->outputs.size() == 1 ? call_->outputs[0].offset : 0;
}

void collective_run::put_small(uint64_t bytes) {
  if (call_->change != nullptr) {
    board_->survey(reinterpret_cast<group_peer*>(board_->next_slot()));
    return;
  }
  if (in_line_) return put_in_line();
  const bool in_line = bytes <= group_inline_bytes;
  uint8_t* to = in_line ? board_->next_line().payload : board_->next_slot();
  for (const call_block& block : call_->inputs) {
    if (block.bytes == sizeof(uint64_t)) std::memcpy(to, block.data, sizeof(uint64_t));
    else if (in_line && block.bytes != 0) std::memcpy(to, block.data, block.bytes);
    else if (block.bytes != 0) hand_over(to, block.data, block.bytes);
    to += block.bytes;
  }
  if (bytes != 0) {
    ++trace_->writes;
    trace_->bytes += bytes;
  }
}

progress collective_run::advance() {
  const bool ended = in_line_ && (phase_ == phase::entered || (phase_ == phase::begin && begin_in_line())) && end_in_line();
  const progress now = ended ? progress::done : step();
  // What the next call writes first: peers have read it, and give the line back while the caller does something else.
  if (now == progress::done) __builtin_prefetch(&board_->next_line(), 1);
  // HAZARD: after the last read. The others go on without one that they have taken out, and what it reads of them from then on is of later calls.
  return now == progress::done && board_->evicted() ? evicted() : now;
}

progress collective_run::step() {
  switch (phase_) {
    case phase::begin: {
      if (!board_->connected()) return progress::waiting;
      if (repairs()) {
        if (!board_->repair(sequence_)) return fail_unreached();
        catch_up();
      }
      if (board_->view_pending()) return lose_members(false);
      if (!board_->ready()) return progress::waiting;
      if (!fits()) return fail(EP_STATUS_INVALID, board_->rank(), "the group has grown since the call was made: it has other blocks than ranks");
      if (call_->root >= 0 && !board_->is_active(call_->root)) return fail(EP_STATUS_PEER_LOST, call_->root);
      if (!board_->room()) return progress::waiting;
      uint32_t flags = group_flag_input | group_flag_output;
      for (const call_block& block : call_->inputs) {
        if (block.segment == group_no_segment) flags &= ~group_flag_input;
      }
      for (const call_block& block : call_->outputs) {
        if (block.segment == group_no_segment) flags &= ~group_flag_output;
      }
      const uint64_t payload = payload_bytes();
      publish_call(payload);
      if (payload <= group_small_bytes) {
        put_small(payload);
        flags |= group_flag_data;
      }
      ++trace_->calls;
      ++trace_->signals;
      const bool ahead = runs_ahead();
      phase_ = phase::entered;
      if (const progress now = enter(signature_, flags); phase_ != phase::entered) return now;
      if (ahead) board_->await(call_->root);
      [[fallthrough]];
    }
    case phase::entered:
      if (runs_ahead()) {
        if (root_has_entered()) return finish_small();
        // It made another call: who else did, shows when all have come.
        if (board_->has_entered(call_->root)) board_->await(-1);
      }
      if (!board_->entered()) return progress::waiting;
      if (!signatures_agree()) return progress::failed;
      if (!board_->compare()) {
        bool all = false;
        return differ(board_->differs_at(&all));
      }
      return decide();
    case phase::chunk:
      if (!board_->entered()) return progress::waiting;
      if (take_chunk()) return next_chunk();
      if (phase_ == phase::failed) return progress::failed;
      if (phase_ == phase::chunk) phase_ = phase::slice;
      return progress::made;
    case phase::slice:
      if (!board_->entered()) return progress::waiting;
      take_slices();
      return next_chunk();
    case phase::work: return work();
    case phase::unmapped: return progress::waiting;
    case phase::closing: return board_->entered() ? progress::done : progress::waiting;
    case phase::cut: return lose_members(true);
    case phase::failed: return progress::failed;
  }
  return progress::waiting;
}

progress collective_run::look() {
  if (phase_ == phase::closing && !awaits_writes() && board_->entered_by_living()) return progress::done;
  if (call_->change != nullptr) evict_late();
  int32_t who = -1;
  // Before the look at who gave up: whoever found out first did so, and what there is to say is why.
  bool all = false;
  if (const uint64_t step = phase_ == phase::unmapped ? 0 : board_->differs_at(&all); step != 0 && call_->change == nullptr) {
    const int64_t now = clock_now_ns();
    if (differs_since_ == 0) differs_since_ = now;
    if (all || now - differs_since_ >= differing_ns) return differ(step);
  }
  if (phase_ == phase::unmapped) {
    // A rank that died between its first step and now took the way to its memory with it. Nobody completes the call: all wait for this rank's next step.
    const auto& active = board_->active();
    const bool lost = std::any_of(active.begin(), active.end(), [&](int32_t r) { return board_->gone(r); });
    if (!lost && !board_->view_pending()) {
      const int64_t now = clock_now_ns();
      if (unmapped_since_ == 0) unmapped_since_ = now;
      if (now - unmapped_since_ < unmapped_ns) return progress::waiting; // its files may go before its death shows
      return fail(EP_STATUS_SYSTEM, board_->rank(), "the group memory of a peer cannot be mapped");
    }
    return lose_members(true);
  }
  uint32_t status = EP_STATUS_ABORTED;
  switch (board_->look(sequence_, &who, &status)) {
    case absence::none: return progress::waiting;
    case absence::gave_up: {
      // One that had come and waited in vain: its deadline was the first, and what there is to say is whom everybody waits for.
      const std::vector<int32_t> missing = board_->missing();
      const bool had_come = std::find(missing.begin(), missing.end(), who) == missing.end();
      gave_up_ = who;
      return fail(had_come && status == EP_STATUS_TIMEOUT ? EP_STATUS_TIMEOUT : EP_STATUS_ABORTED, who);
    }
    case absence::lost:
    case absence::view_changed: break;
  }
  return lose_members(phase_ != phase::begin);
}

// Whoever keeps decisions died before this rank had its memory: one that has it decides for all, and this rank hears of that.
bool collective_run::others_may_decide() {
  if (board_->reaches_decisions() || !board_->is_active(board_->rank()) || board_->evicted()) return false;
  const int64_t now = clock_now_ns();
  if (unmapped_since_ == 0) unmapped_since_ = now;
  return now - unmapped_since_ < unmapped_ns;
}

progress collective_run::lose_members(bool begun) {
  // Nobody can have completed this call: everyone needs the step that the lost rank did not enter. Before its first step nothing has been exchanged, and the
  // call is carried out by those who are left; a membership call always is.
  if (!board_->view_pending() && !board_->decide_change(begun && call_->change == nullptr ? sequence_ : sequence_ - 1)) {
    return others_may_decide() ? progress::waiting : fail_unreached();
  }
  if (taken_from_root(begun)) return progress::made;
  if (!board_->adopt_next()) return fail_unreached();
  if (board_->evicted()) return evicted();
  if (repairs()) catch_up();
  // Others may have ended it without its root before they agreed anew.
  else if (call_->root >= 0 && !board_->is_active(call_->root)) return fail(EP_STATUS_PEER_LOST, call_->root);
  // Others have given it up, and wait in a call that lets all agree anew: this rank must hear that it has to make it, too.
  else if (sequence_ <= board_->repaired_sequence()) return fail(EP_STATUS_ABORTED, board_->active().front());
  if (sequence_ <= board_->failed_sequence()) return fail(EP_STATUS_PEER_LOST, board_->lost().empty() ? -1 : board_->lost().front());
  phase_ = phase::begin;
  return progress::made;
}

// HAZARD: a root that has entered its step has ended the call, for itself and for whoever saw that: then all who are left take it in this epoch, although the next one
// has been decided. Where it has not, it must not do so any more, or some would repeat a call that others have ended.
bool collective_run::taken_from_root(bool begun) {
  if (!runs_ahead() || is_root() || !board_->attached(call_->root)) return false;
  const uint64_t step = board_->step() + (begun ? 0 : 1);
  if (!board_->entered_or_cut(call_->root, step)) return false;
  if (board_->signature_of(call_->root, step) != signature_) return false;
  if (!begun) board_->skip();
  phase_ = phase::entered;
  return true;
}

// Of a call that ended for this rank before it was compared, or of this one.
progress collective_run::differ(uint64_t step) {
  if (is_to_leave()) return evicted();
  const auto& active = board_->active();
  const auto odd = std::find_if(active.begin(), active.end(), [&](int32_t r) { return board_->has_entered(r, step) && board_->signature_of(r, step) != board_->signature_of(board_->rank(), step); });
  differs_at_ = step;
  return fail(EP_STATUS_MISMATCH, odd == active.end() ? -1 : *odd);
}

// Others are taking this rank out, and it makes another call.
bool collective_run::is_to_leave() const {
  if (board_->evicted()) return true;
  const int32_t rank = board_->rank();
  return std::any_of(board_->active().begin(), board_->active().end(), [&](int32_t r) {
    if (!board_->has_entered(r)) return false;
    const group_call& call = board_->call_of(r);
    const uint64_t leaving[2] = {call.bytes, call.factor};
    return call.kind == static_cast<uint32_t>(op_kind::membership) && (leaving[rank / 64] >> (rank % 64) & 1) != 0;
  });
}

bool collective_run::signatures_agree() {
  for (const int32_t r : board_->active()) {
    // What one that is taken out does instead, does not matter.
    if (board_->line_of(r).signature == signature_ || (call_->change != nullptr && contains(call_->change->evicted, r))) continue;
    differ(board_->step());
    return false;
  }
  if (call_->kind != op_kind::all_to_all) return true;
  for (const int32_t r : board_->active()) {
    const uint64_t given = board_->blocks_of(r)[board_->rank()].bytes;
    const uint64_t taken = call_->outputs[static_cast<size_t>(r)].bytes;
    if (given == taken) continue;
    fail(EP_STATUS_MISMATCH, r);
    differs_at_ = board_->step();
    end_.expected = taken;
    end_.found = given;
    return false;
  }
  return true;
}

// Whether results take the place of what this rank gives.
bool collective_run::rewrites() const {
  return call_->kind == op_kind::all_reduce && call_->inputs[0].data == call_->outputs[0].data;
}

progress collective_run::decide() {
  if (call_->kind == op_kind::barrier) return progress::done;
  if (call_->kind == op_kind::membership) return finish_membership();
  if (all_flags(group_flag_data)) return finish_small();
  const auto ranks = static_cast<uint64_t>(board_->active().size());
  longest_ = call_->bytes;
  if (call_->kind == op_kind::all_to_all) {
    for (const int32_t r : board_->active()) longest_ = std::max(longest_, board_->call_of(r).longest);
  }
  non_temporal_ = 2 * ranks * longest_ > last_level_cache() / caches_shared_by;
  pushes_ = writes_to_peers();
  if (all_flags(group_flag_input) && (!pushes_ || all_flags(group_flag_output))) {
    phase_ = prepare_direct() ? phase::work : phase::unmapped;
    return phase_ == phase::work ? progress::made : progress::waiting;
  }
  if (rewrites()) non_temporal_ = false;
  chunks_ = (longest_ + chunk_bytes() - 1) / chunk_bytes();
  phase_ = phase::chunk;
  begin_chunks();
  put_chunk();
  return phase_ == phase::failed ? progress::failed : progress::made;
}

// Everybody has what all have said, and comes to the same end.
progress collective_run::finish_membership() {
  const auto& active = board_->active();
  peers_.assign(static_cast<size_t>(board_->capacity()), {});
  for (int32_t r = 0; r < board_->capacity(); ++r) {
    group_peer& agreed = peers_[static_cast<size_t>(r)];
    bool first = true;
    for (const int32_t member : active) {
      const group_peer& one = reinterpret_cast<const group_peer*>(board_->slot_of(member))[r];
      if (first) agreed = one;
      else if (one.incarnation != agreed.incarnation) agreed = {};
      else agreed.state = std::min(agreed.state, one.state);
      first = false;
    }
    // Whatever they took it for: it has come to this call.
    if (board_->is_active(r)) agreed = {peer_state::active, board_->incarnation(r)};
  }
  const membership_change& change = *call_->change;
  // Those that have come to this step, too.
  if (!board_->drop(change.evicted)) return fail_unreached();
  admitted_ = std::all_of(change.admitted.begin(), change.admitted.end(), [&](int32_t r) { return peers_[static_cast<size_t>(r)].state >= peer_state::joining; });
  const bool changes = admitted_ && (!change.admitted.empty() || change.size > board_->size());
  return changes && !board_->admit(change.admitted, peers_.data(), change.size, sequence_) ? fail_unreached() : progress::done;
}

} // namespace ep
