// What the members of a group see of each other: steps, calls, views, deaths. No thread of its own, and no lock: one thread at a time uses it.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "../hand_over.hpp"
#include "../life.hpp"
#include "../operation.hpp"
#include "../segment.hpp"
#include "../waiting.hpp"
#include "layout.hpp"

namespace ep {

// Why a member does not come.
enum class absence : uint8_t { none, lost, gave_up, view_changed };

// What became of an attempt to enter a step: `cut`: the next epoch has been decided, and this step is none of this one; `evicted`: nor is any other.
enum class entry : uint8_t { made, cut, evicted };

struct group_options {
  int32_t rank = 0;
  int32_t size = 1;
  int32_t capacity = 1; // ranks that the group may grow to
  uint64_t nonce = 0;   // equal on all members
  int32_t ranks_on_host = 1;
  std::vector<ep_core_set> cores_on_host{}; // of other ranks of this host, in the group or not, as far as the group that this one is made from knows them
  std::vector<int32_t> active{}; // at first; none: all
  bool joins = false;            // begins alone, and asks the others to take it in
  uint32_t incarnation = 1;    // of this rank: 1, 2, … of those that have had its number
  std::vector<std::shared_ptr<segment>> allocations{}; // group memory that this rank already has
  std::vector<std::shared_ptr<segment>> former{};      // peers that could write to it
};

class group_board {
 public:
  static result<std::unique_ptr<group_board>> create(const group_options& options);
  ~group_board();

  int32_t rank() const { return rank_; }
  // Ranks of the group, whether or not they take part.
  int32_t size() const { return size_; }
  int32_t capacity() const { return capacity_; }
  const ep_segment_handle& handle() const { return own_->handle(); }
  const wait_policy& policy() const { return policy_; }
  // Cores of other ranks of this host that are known here.
  std::vector<ep_core_set> cores_on_host() const;
  ep_wake_word* wake() const { return &member(rank_).wake; }

  // Peers come one by one, at any time before they are needed. One that is not the process that takes part now is kept until it is taken in.
  result<nothing> attach(int32_t rank, const ep_segment_handle& handle, uint32_t incarnation);
  // The peer cannot be reached: as if it had died.
  void lose(int32_t rank, uint32_t incarnation);
  bool attached(int32_t rank) const { return peers_[static_cast<size_t>(rank)] != nullptr; }
  bool connected() { return connected_ || all_attached(); } // all active members

  uint64_t epoch() const { return epoch_; }
  const std::vector<int32_t>& active() const { return active_; }
  // Of an epoch that this rank has been in.
  std::vector<int32_t> active_in(uint64_t epoch) const;
  bool is_active(int32_t rank) const { return place_[static_cast<size_t>(rank)] >= 0; }
  uint32_t incarnation(int32_t rank) const { return incarnations_[static_cast<size_t>(rank)]; }
  // This rank's place among the active ones.
  int32_t place() const { return place_[static_cast<size_t>(rank_)]; }
  // Every active member takes part in this epoch.
  bool ready() { return ready_ || all_ready(); }

  uint64_t step() const { return step_; }
  // The line that the next step will publish, its small slot, its chunk and its call: this rank writes them before enter().
  group_line& next_line() const { return line(rank_, step_ + 1); }
  uint8_t* next_slot() const { return slot(rank_, step_ + 1); }
  uint8_t* next_chunk() const { return chunk(rank_, step_ + 1); }
  // How this rank writes its chunks: one for all calls that are alike, by a number below `chunk_ways` that the caller gives their kind.
  static constexpr uint32_t chunk_ways = 64;
  faster_way& chunk_way(uint32_t alike) { return chunk_ways_[alike]; }
  group_call& next_call() const { return member(rank_).calls[at(step_ + 1)]; }
  group_block* next_blocks() const { return member(rank_).blocks[at(step_ + 1)]; }
  // Whether the next step may be entered: nobody needs any more what its line holds. Compares the steps that this takes (see `differs_at`).
  bool room() { return (compared_ + group_ring >= step_ + 2 && !crowded_) || make_room(); }
  // Enters the next step; `signature` and `flags` of the call that begins with it, 0 for a call's later steps. Only where there is room.
  entry enter(uint32_t signature, uint32_t flags);
  // Counts the next step without entering it: once the next epoch has been decided, nobody waits for this rank in this one.
  void skip();
  // Around every write into others' memory. False: this rank has been evicted and must not write.
  bool begin_push();
  void end_push();
  // True once every active member has entered this step. What they wrote before is visible then.
  bool entered() {
    for (; cursor_ < active_.size(); ++cursor_) {
      if (!has_entered(active_[cursor_], step_)) return false;
    }
    return true;
  }
  // The same, without waiting for members that have died: for steps after which nothing of theirs is needed.
  bool entered_by_living();
  // True once this one member has entered the current step. What it wrote before is visible then.
  bool has_entered(int32_t rank) const { return has_entered(rank, step_); }
  // Whether a member has entered a step of this epoch; if not, it cannot do so any more. HAZARD: only behind the decision of the next epoch.
  bool entered_or_cut(int32_t rank, uint64_t step);
  // Whom missing() and look() are about in the current step: a rank, or -1: all.
  void await(int32_t rank) { awaited_ = rank; }

  // All have entered the current step: compares the steps before it that nobody has compared yet. False: see `differs_at`.
  bool compare() {
    if (compared_ + 1 < step_ && !compare_earlier()) return false;
    compared_ = step_;
    return true;
  }
  // A step up to the current one that a member made another call of, among those that have not been found equal; 0: none is known. `all`: all members have entered it.
  uint64_t differs_at(bool* all) const;

  // What members published with the current step.
  const group_line& line_of(int32_t rank) const { return line(rank, step_); }
  const uint8_t* slot_of(int32_t rank) const { return slot(rank, step_); }
  const uint8_t* chunk_of(int32_t rank) const { return chunk(rank, step_); }
  uint32_t signature_of(int32_t rank, uint64_t step) const { return std::atomic_ref<uint32_t>(line(rank, step).signature).load(std::memory_order_acquire); }
  const group_call& call_of(int32_t rank) const { return call_of(rank, step_); }
  const group_call& call_of(int32_t rank, uint64_t step) const { return member(rank).calls[at(step)]; }
  const group_block* blocks_of(int32_t rank) const { return member(rank).blocks[at(step_)]; }
  bool has_entered(int32_t rank, uint64_t step) const {
    const uint64_t found = std::atomic_ref<uint64_t>(line(rank, step).tick).load(std::memory_order_acquire) & ~group_marks;
    return found >= tick(step) && found >> 48 == tick(step) >> 48;
  }
  // Whether all that are awaited have last waited on other cores than this thread's: until they come, nobody here can go on. Tells the others where this rank waits. Costs a few loads.
  bool awaits_elsewhere();
  // Those of the active ranks that are awaited and have not entered the current step (or, before it, are not ready, or keep this rank from entering it).
  std::vector<int32_t> missing() const;

  // Whether somebody has given up the call `sequence` or an earlier one (`who` did so first, with `status`), or has died before coming to it. Costly: for waits that last.
  absence look(uint64_t sequence, int32_t* who, uint32_t* status);
  // Agrees with the other survivors on the next epoch, without those that have died; calls up to `failed_sequence` end with the loss. What others have decided before,
  // holds. False: where decisions are kept cannot be reached, or this rank is no longer a member.
  bool decide_change(uint64_t failed_sequence);
  // Begins the epoch that has been decided. False: this rank is no member of it, or it cannot be read.
  bool adopt_next();
  // Of the last change of view: who left with it, and up to which call it cuts.
  const std::vector<int32_t>& lost() const { return lost_; }
  uint64_t failed_sequence() const { return failed_sequence_; }
  bool view_pending() const {
    const group_member* owner = members_[static_cast<size_t>(active_.front())];
    return (owner == nullptr || decided_in(*owner, epoch_ + 1) >> 16 == epoch_ + 1) && pending_view() != nullptr;
  }
  // Whether this rank has the memory in which decisions are kept.
  bool reaches_decisions() const { return members_[static_cast<size_t>(active_.front())] != nullptr; }

  // This rank gives up the call `sequence` and does not come to later ones, unless the ranks agree anew; `repairs`: that was what the call was for; `first`: who gave it up before, or this rank.
  void give_up(uint64_t sequence, bool repairs, uint32_t status, int32_t first);
  // Agrees with the others on an epoch in which everybody begins with the call `sequence`, whatever became of those before. False: no longer a member.
  bool repair(uint64_t sequence);
  uint64_t repaired_sequence() const { return repaired_sequence_; }

  // Lets a living rank count as dead, for good: it cannot enter a step any more.
  void evict(int32_t rank);
  // Evicts them, and agrees with the others on a view without them. False: no longer a member.
  bool drop(const std::vector<int32_t>& ranks);
  bool evicted() const { return frozen(member(rank_)); }
  // What this rank knows of all that there may be.
  void survey(group_peer* peers) const;
  // Agrees with the others on an epoch with `added`, of these incarnations, and `size` ranks. False: no longer a member.
  bool admit(const std::vector<int32_t>& added, const group_peer* peers, int32_t size, uint64_t sequence);
  // Of a rank that is not a member: asks to be taken in, or no longer.
  void ask_to_join(bool asks);
  // True once a view that this rank is in has been adopted.
  bool try_join();
  uint64_t joined_sequence() const { return joined_sequence_; }
  // Called for every rank that takes part from now on, before anything can come from it.
  std::function<void(int32_t)> on_joined;
  // False while messages of the rank may still be of an earlier time.
  bool current(int32_t rank) const;
  // Moves this rank's group memory away from evicted ranks that may still be writing to it. On the thread that uses the memory, which it may not change meanwhile.
  result<nothing> fence();
  bool fencing() const { return !pushers_.empty(); }
  // Marks this rank as closed (or dead), for all to see.
  void leave(bool orderly);
  // After that: lets go of all mappings of others, and of its own segments once nobody needs them who has yet to map them. Whoever has mapped them keeps them. True: this rank's wake word is gone.
  bool release();

  // Group memory. Index of the new allocation.
  result<uint32_t> allocate(uint64_t byte_length);
  const std::vector<std::shared_ptr<segment>>& own_memory() const { return allocations_; }
  std::vector<std::shared_ptr<segment>> peers() const; // those that are attached
  const std::shared_ptr<segment>& allocation(uint32_t index) const { return allocations_[index]; }
  uint64_t allocations() const { return allocations_.size(); }
  // Null where the peer's memory cannot be mapped, or ends before `offset` + `bytes`.
  uint8_t* memory_of(int32_t rank, uint32_t index, uint64_t offset, uint64_t bytes);

  // Messages: what `owner` says to `peer`, and a chunk of its pool.
  message_lane& lane(int32_t owner, int32_t peer) const;
  uint8_t* pool(int32_t owner, uint32_t chunk) const;
  bool gone(int32_t rank) const;

  group_member& member(int32_t rank) const { return *members_[static_cast<size_t>(rank)]; }
  void wake_peers() const;

 private:
  group_board() = default;
  static constexpr size_t at(uint64_t step) { return step & (group_ring - 1); }
  uint64_t tick(uint64_t step) const { return epoch_ << 48 | step; }
  group_line& line(int32_t rank, uint64_t step) const { return member(rank).steps[at(step)].line; }
  static void freeze(group_member& member);
  static bool frozen(const group_member& member) { return std::atomic_ref<uint32_t>(const_cast<uint32_t&>(member.frozen)).load(std::memory_order_seq_cst) != 0; }
  static uint64_t decided_in(const group_member& owner, uint64_t epoch) {
    return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(owner.decided[epoch % group_views])).load(std::memory_order_seq_cst);
  }
  bool all_attached();
  bool all_ready();
  static bool is_gone(const group_member& member);
  const group_view* pending_view() const;
  group_view proposal(uint64_t failed_sequence) const;
  bool decide(const group_view& wanted);
  bool propose(const group_view& wanted);
  void install(int32_t rank, std::shared_ptr<segment> mapping);
  void choose_policy();
  void settle();
  void leave_behind(const std::shared_ptr<segment>& mapping);
  bool find_view(group_view& view) const;
  bool is_mapped_by_all() const;
  uint8_t* slot(int32_t rank, uint64_t step) const;
  uint8_t* chunk(int32_t rank, uint64_t step) const;
  bool compare(uint64_t step);
  bool compare_earlier();
  bool make_room();
  bool differs(int32_t rank, uint64_t step) const;
  void adopt(const group_view& view);

  // A process that may take part one day, or, with an incarnation and no mapping, one that is known to be out of reach.
  struct candidate {
    std::shared_ptr<segment> mapping;
    uint32_t incarnation = 0;
    group_member* seen() const { return mapping == nullptr ? nullptr : reinterpret_cast<group_member*>(mapping->data()); }
  };

  int32_t rank_ = 0;
  int32_t size_ = 0;
  int32_t capacity_ = 0;
  uint64_t nonce_ = 0;
  int32_t ranks_on_host_ = 1;
  std::vector<ep_core_set> told_cores_;
  wait_policy policy_{};
  std::shared_ptr<segment> own_;
  life_holder life_;
  std::vector<std::shared_ptr<segment>> peers_;
  std::vector<group_member*> members_; // null: not attached
  std::vector<candidate> candidates_;
  std::vector<uint32_t> incarnations_;  // of the processes that take part; 0: none has
  std::vector<uint64_t> joined_epoch_;
  std::vector<bool> unreachable_;
  std::vector<int32_t> active_;
  std::vector<int32_t> place_;
  std::vector<int32_t> lost_;
  uint64_t failed_sequence_ = 0;
  uint64_t repaired_sequence_ = 0;
  uint64_t joined_sequence_ = 0;
  uint64_t epoch_ = group_first_epoch;
  std::map<uint64_t, std::vector<int32_t>> views_; // by epoch
  uint64_t step_ = 0;
  uint64_t compared_ = 0; // up to this step, all members have entered and made the same calls
  int32_t awaited_ = -1;
  bool crowded_ = false; // waits for room
  std::array<faster_way, chunk_ways> chunk_ways_;
  uint64_t ticks_[group_ring] = {}; // what this rank's lines hold
  size_t cursor_ = 0; // members before it have entered the current step
  bool ready_ = false;
  bool connected_ = false;
  std::vector<std::shared_ptr<segment>> allocations_;
  std::vector<std::vector<std::shared_ptr<segment>>> peer_allocations_;
  std::vector<uint64_t> peer_moved_;
  struct pusher {
    group_member* member;
    std::shared_ptr<segment> mapping;
  };
  std::vector<pusher> pushers_; // evicted, and not seen to have stopped writing: this rank is not ready before
  std::vector<std::shared_ptr<segment>> former_; // of this rank's group before it came back
  bool left_ = false;
};

} // namespace ep
