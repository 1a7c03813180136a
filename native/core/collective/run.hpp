// One collective call over a board, as steps that never block: whoever runs it decides how to wait.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "board.hpp"
#include "reduce.hpp"

namespace ep {

enum class op_kind : uint32_t { barrier = 0, broadcast, all_reduce, reduce, all_gather, gather, scatter, reduce_scatter, all_to_all, membership };
constexpr uint32_t op_kinds = 10;

struct op_trace {
  uint64_t calls = 0;
  uint64_t bytes = 0;
  uint64_t writes = 0;
  uint64_t signals = 0;
};

struct call_block {
  uint8_t* data = nullptr;
  uint64_t bytes = 0;
  uint32_t segment = group_no_segment; // index of this rank's allocation that holds it
  uint64_t offset = 0;
};

// What a call of kind `membership` is to change. All that take part ask for the same.
struct membership_change {
  std::vector<int32_t> evicted{};
  std::vector<int32_t> admitted{}; // those that ask to be taken in; if one of them does not, nothing changes
  int32_t size = 0;              // ranks of the group from then on; never less than before
  bool repairs = false;          // begins an epoch in which all are at this call
};

// Which blocks there are: engine.ts of @ep/collectives. `inputs` are those that this rank gives, `outputs` those that it takes.
struct collective_call {
  uint64_t sequence = 0;
  op_kind kind = op_kind::barrier;
  element_type dtype = element_type::u8;
  reduce_op op = reduce_op::sum;
  double factor = 0;
  int32_t root = -1;
  uint64_t bytes = 0; // of one block; 0 for all-to-all
  std::vector<call_block> inputs;
  std::vector<call_block> outputs;
  std::unique_ptr<membership_change> change;
};

enum class progress : uint8_t { waiting, made, done, failed };

class collective_run {
 public:
  // The call must stay where it is until the run has ended. Memory of its blocks may move while advance() waits, with its contents.
  void begin(group_board& board, const collective_call& call, op_trace& trace);
  // Does what can be done now.
  progress advance();
  // Looks why nobody comes, and carries on without those that have died where that is possible.
  progress look();
  // Ends the call for this rank, for a reason of its own, and tells the others.
  void give_up(uint32_t status);
  // True: the board's entered(), ready() or connected() is what it waits for.
  bool can_advance();

  // Lets those that have not come to the call's present step count as dead.
  void evict_missing();

  // After a membership call that is done: what all agree that the ranks are, and whether those that were to be taken in have been.
  const std::vector<group_peer>& peers() const { return peers_; }
  bool admitted() const { return admitted_; }
  // The number under which all made the call; of one that repairs it may be higher than this rank's.
  uint64_t sequence() const { return sequence_; }

  // After EP_STATUS_MISMATCH: the step at which the calls differ; it may be of a call that ended for this rank before this one.
  uint64_t differs_at() const { return differs_at_; }

  // After `failed`: EP_STATUS_PEER_LOST, ABORTED (a peer gave up), MISMATCH, SYSTEM, EVICTED.
  const outcome& end() const { return end_; }

 private:
  enum class phase : uint8_t { begin, entered, chunk, slice, work, unmapped, closing, cut, failed };
  progress step();
  progress lose_members(bool begun);
  bool others_may_decide();
  progress fail(uint32_t status, int32_t rank, const char* message = "");
  progress fail_unreached();
  progress evicted() { return fail(EP_STATUS_EVICTED, board_->rank()); }
  progress enter(uint32_t signature, uint32_t flags); // `made`, or `failed`
  bool fits() const;
  void evict_late();
  bool is_to_leave() const;
  bool repairs() const { return call_->change != nullptr && call_->change->repairs; }
  void catch_up();
  progress finish_membership();
  uint64_t payload_bytes() const;
  void name_call(group_call& call) const;
  void publish_call(uint64_t payload);
  void put_small(uint64_t payload);
  bool runs_ahead() const;
  bool is_root() const { return call_->root == board_->rank(); }
  bool root_has_entered() const;
  bool taken_from_root(bool begun);
  progress differ(uint64_t step);
  bool signatures_agree();
  bool all_flags(uint32_t flag) const;
  bool travels_in_line() const;
  bool begin_in_line();
  bool end_in_line();
  void put_in_line();
  void take_from_lines();
  const uint8_t* small_of(int32_t rank) const;
  void sum_few(); // of `sources_`
  progress finish_small();
  progress decide();
  // Through chunks.
  bool keeps(size_t block) const;
  bool rewrites() const;
  void put_chunk();
  bool take_chunk(); // false: another step follows for this chunk
  bool shares_reduction() const;
  void take_slices();
  progress next_chunk();
  // In place.
  bool prepare_direct();
  progress work();
  // From here on the root of a broadcast writes a share of what its peers are to have, and they copy the rest: below, they take it out of its caches.
  static constexpr uint64_t bytes_that_root_shares = 512 << 10;
  bool is_long() const { return call_->bytes >= bytes_that_root_shares; }
  bool writes_to_peers() const;
  // Of results that others write, some may be missing. Those of a broadcast come from the root alone.
  bool awaits_writes() const { return pushes_ && !(call_->kind == op_kind::broadcast && board_->has_entered(call_->root)); }
  const uint8_t* input_of(int32_t rank, uint32_t index, uint64_t bytes);

  uint64_t chunk_bytes() const; // of one block in one step
  void begin_chunks();
  void give(uint8_t* to, const uint8_t* from, uint64_t bytes);
  bool gives() const { return !call_->inputs.empty(); }
  uint64_t width() const { return element_bytes(call_->dtype); }

  group_board* board_ = nullptr;
  const collective_call* call_ = nullptr;
  op_trace* trace_ = nullptr;
  phase phase_ = phase::begin;
  outcome end_;
  uint64_t sequence_ = 0;
  uint32_t signature_ = 0;
  bool in_line_ = false;
  int32_t gave_up_ = -1; // who gave this call up first, where another one did
  int64_t unmapped_since_ = 0;
  int64_t asked_since_ = 0;
  int64_t differs_since_ = 0;
  uint64_t differs_at_ = 0;
  uint64_t chunk_ = 0;
  uint64_t chunks_ = 0;
  uint64_t longest_ = 0;
  bool pushes_ = false; // the closing step says that results have been written, not only that all were read
  bool non_temporal_ = false;
  faster_way* way_ = nullptr; // for its chunks; null: always through the caches
  bool past_ = false;         // the caches, in this call
  uint64_t chunks_begun_ = 0; // ticks
  std::vector<group_peer> peers_;
  bool admitted_ = false;
  // In place: what this rank has to do, one item after the other.
  struct piece {
    const uint8_t* from;
    uint8_t* to;
    uint64_t bytes;
  };
  std::vector<piece> copies_;
  std::vector<const void*> sources_;
  std::vector<void*> targets_;
  uint64_t reduce_bytes_ = 0;
  uint64_t done_bytes_ = 0;
  size_t copy_at_ = 0;
};

} // namespace ep
