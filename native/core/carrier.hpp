// Large calls of a group on several hosts, carried by whoever waits for them: within a host through memory that its members map, between hosts by puts of each member to its
// counterparts (one on each other host, of its place there modulo the members of that host), or, in an all-to-all and a scatter, to each member there. Several members of a large host face one of a small host, then, and some of a
// large host are faced by nobody.
//
// A call that fits an area goes in one step, so that nobody is told more often than must be; a longer one in steps of at most `piece_bytes` of a rank's array, so that one moves while another is folded. What
// a member has come to it says in words of its own part, which only grow, over all calls: its mates read them there, and a counterpart is told by the signal of a put. Nothing here waits for anybody: advance() does what can be done now, and a call is over once all members have their data and all have said so: those of a host to its first one, which tells the first ones of the others when all have, and its mates when it has heard of all hosts.
//
// An all-reduce: the first members of each host have shares of a step, as many as the smallest host has members, so that each of these has one counterpart on all hosts that has the same share. Each member puts its mates' shares into
// its part (staged), and who has one folds it of all of the host, in their order (read). Of two hosts, it puts that to its counterpart, and
// folds what both have come to where the counterpart's has landed (ready). Of more, a share has a part for each host: each counterpart gets its own part of all, folds it, and puts the result to all others
// (ready: all parts are there). So twice (H - 1) / H of a share leave a member of one of H hosts. Then all take their mates' shares (taken). Hosts are folded in their order: bits depend on the
// placement alone.
// An all-to-all: each member stages all blocks, puts those of other hosts, and takes what its mates staged and what has landed.
// An all-gather, and a broadcast, which is one of a single member: each source stages its block and puts it to its counterparts (ready: those of whoever faces this one are there), and all take what their mates staged, and
// what has landed on them.
// A reduce-scatter: each member stages what is for its mates and for those that face them, folds what its host gives to itself and to those that face it, puts the latter, and folds what all hosts have come to.
// A reduction to a root: as an all-reduce, but who has a share puts what its host has come to to its counterpart on the root's host alone, which folds it (ready); the root takes all shares.
// A gather: each member stages its block and, of another host, puts it to its counterpart on the root's (ready), where the root takes it. A scatter: the root stages all blocks, and puts those of other hosts to whom they are for.
//
// HAZARD: places are used again by the step `places` later. A member sends a step only when all of its host (in an all-to-all, where nobody else reads what lands, it itself) have taken the one `window` before,
// for which something of each other host has to have landed; and who sent it had seen all of its own host take the one `window` before that. There are twice as many places: so nothing of the step `places` before is read or under
// way any more, on any host. Where only a root gives or takes (carrier_roots.cpp), senders are told how far others are. When a call begins all places are free: nobody ends one before all have said that they have their data.
//
// Steps are counted from the number of the call, so that what is said of one is never taken for another. HAZARD: after a call that was carried and has not come to its end nothing here is used any more: what
// lands may be of the wrong one.
//
// A member may prepare a call before it knows that all make it (prepare()). If they do not, all-reduces and their like are over for everybody, and so is the carrier. But others may give an all-to-all of other lengths, or one that
// is not carried at all: what was prepared in vain may still be under way, then, while calls behind it are carried. So an all-to-all that goes in one step has places of its own for what lands, of each member the
// same in all such calls; and a member that has prepared one in vain puts nothing more before all of that has landed (loose_).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "collective/reduce.hpp"
#include "rounds.hpp"

namespace ep {

// Where things lie in the memory, which every rank of the world has: a word that wakes whoever waits in this rank's part, then the places of each group.
struct carrier_layout {
  static constexpr uint64_t area_bytes = 1u << 20;
  static constexpr uint64_t most_places = 4;
  static constexpr uint64_t piece_bytes = area_bytes / most_places;
  static constexpr uint64_t head_bytes = 4096;
  uint32_t world;

  static constexpr uint64_t group_bytes() { return head_bytes + 3 * area_bytes; }
  static constexpr uint64_t memory_bytes(uint64_t groups) { return head_bytes + groups * group_bytes(); }
  // In a rank's part: 0, words of the group; 1, what is staged, and what the host has come to; 2, what lands, and the results of a share; 3, what lands of all-to-alls that go in one step.
  static constexpr uint64_t begin_of(uint64_t group, uint32_t area) { return head_bytes + group * group_bytes() + (area == 0 ? 0 : head_bytes + (area - 1) * area_bytes); }
  // Of each member: steps of what it has sent, calls that its host has all data of, steps of its part of a result, or of which nothing lies any more where it has told it, and steps of all-to-alls that go in one.
  uint64_t group_slots() const { return uint64_t{4} * world; }
  uint64_t sent_slot(uint32_t member) const { return member; }
  uint64_t closed_slot(uint32_t member) const { return uint64_t{world} + member; }
  uint64_t result_slot(uint32_t member) const { return uint64_t{2} * world + member; }
  uint64_t whole_slot(uint32_t member) const { return uint64_t{3} * world + member; }
  // Steps of a call that are told apart. Of blocks of 4 KiB, as 64 members have them, 64 GiB.
  static constexpr uint32_t step_bits = 24;
  static constexpr uint64_t most_calls = uint64_t{1} << (64 - step_bits);
};

enum class carried_kind : uint32_t { all_reduce = 0, all_to_all = 1, all_gather = 2, broadcast = 3, reduce_scatter = 4, reduce = 5, gather = 6, scatter = 7 };

// Of a call; arrays are those of carrier::advance.
struct carried_call {
  carried_kind kind = carried_kind::all_reduce;
  element_type type = element_type::u8;
  reduce_op op = reduce_op::sum; // of what folds
  double factor = 0;
  uint64_t longest = 0;          // bytes of the longest array of any member: the same on all
  uint32_t root = 0;             // of a broadcast, a reduction, a gather and a scatter: a member
};

struct carried_bytes {
  uint8_t* data = nullptr;
  uint64_t bytes = 0;
};

class carrier {
 public:
  // Before any member opens it: forgets what an earlier group has left in this rank's places.
  static void clear(const symmetric_memory& memory, uint64_t group);
  // `mates`: the memories of all members of this host, in their order; all have cleared their places. EP_STATUS_INVALID for a place that does not
  // fit the memory, and for a single host.
  static result<std::unique_ptr<carrier>> open(std::shared_ptr<symmetric_memory> memory, std::unique_ptr<round_way> way, round_place place, std::span<const ep_segment_handle> mates);

  enum class state { over, moved, stuck };
  // Folds what reduces() says. `number`: grows from call to call, the same on all members. EP_STATUS_BUSY while one is under way, or where one has not come to its end. A call that is not `sure` may be one that others do not
  // make: until advance(), for which all have said that they do, it is prepared at most, and the next one may take its place. HAZARD: only where all have carried one before, so that all carry what is not an all-to-all.
  result<nothing> begin(const carried_call& call, uint64_t number, bool sure = true);
  // What can be done of a call that is not sure: arrays are read, and none is written. False: nothing has moved.
  bool prepare(std::span<const carried_bytes> inputs, std::span<const carried_bytes> outputs);
  // The longest array of all members, of a call that was begun with another: of an all-to-all.
  void lengthen(uint64_t longest);
  // Whether a call is of arrays of these lengths. HAZARD: advance() and prepare() read and write beyond others.
  bool fits(const carried_call& call, std::span<const carried_bytes> inputs, std::span<const carried_bytes> outputs) const;
  // The same of the call under way, or of the last one.
  bool fits(std::span<const carried_bytes> inputs, std::span<const carried_bytes> outputs) const { return fits(call_, inputs, outputs); }
  // Of an all-reduce one array each, of `longest` bytes; of an all-to-all one for each member, in their order, of at most as many; of an all-gather one, and one of each member; of a broadcast one input of its
  // root, and one output of all others; of a reduce-scatter one for each member, and one, all of `longest` bytes; of a reduction, a gather and a scatter as of an all-reduce, an all-gather and a reduce-scatter, but only the
  // root has outputs, or in a scatter inputs. The same in every turn of a call, and as long. One thread, as of all that follows.
  // As far as it goes, but no step more after `end_ns` of clock_now_ns() than one.
  state advance(std::span<const carried_bytes> inputs, std::span<const carried_bytes> outputs, int64_t end_ns = INT64_MAX);
  // The same again and again for `most_ns`, or until the call is over. Stuck: nothing has moved meanwhile.
  state hold(std::span<const carried_bytes> inputs, std::span<const carried_bytes> outputs, int64_t most_ns);
  // Bytes of this call that left the host from here.
  uint64_t sent() const { return sent_; }
  // Why a member of another host is not reached any more: EP_STATUS_PEER_LOST where it is gone.
  const std::optional<failure>& refused() const { return refused_; }
  bool broken() const { return refused_.has_value(); }
  uint32_t members() const { return static_cast<uint32_t>(place_.ranks.size()); }

 private:
  struct progress_words;
  struct arrays {
    std::span<const carried_bytes> inputs;
    std::span<const carried_bytes> outputs;
  };
  struct share {
    uint64_t at = 0;
    uint64_t bytes = 0;
  };
  // Places of an area, bytes of one, and steps of a call.
  struct plan {
    uint64_t places = 1;
    uint64_t piece = 0;
    uint64_t steps = 0;
  };
  carrier() = default;
  void lay();
  plan plan_of(const carried_call& call) const;
  void follow(const plan& of);
  result<nothing> check(const carried_call& call, uint64_t number) const;

  progress_words& words(uint32_t mate) const;
  uint8_t* staging(uint32_t mate, uint64_t step) const;
  uint8_t* partial(uint32_t mate, uint64_t step) const;
  uint64_t landing_at(uint64_t step) const;
  // An all-to-all that goes in one step. HAZARD: what is said of its one step has words of its own, too: who prepared it may yet stage another first step.
  bool whole() const { return call_.kind == carried_kind::all_to_all && places_ == 1; }
  uint64_t block_slot(uint32_t member) const { return whole() ? layout_.whole_slot(member) : layout_.sent_slot(member); }
  uint64_t progress_words::* block_word() const;
  bool settled();
  uint64_t results_at(uint64_t step) const;
  uint8_t* results(uint32_t mate, uint64_t step) const;
  bool landed(uint64_t slot, uint64_t least) const;
  uint64_t said(uint64_t progress_words::* word, uint32_t mate) const;
  bool counterparts_say(uint64_t (carrier_layout::*slot)(uint32_t) const, uint64_t least) const;
  uint64_t least(uint64_t progress_words::* word) const { return least(word, mates()); }
  uint64_t least(uint64_t progress_words::* word, uint32_t count) const;
  void publish(uint64_t progress_words::* word, uint64_t value);
  bool put(uint32_t member, const uint8_t* from, uint64_t bytes, uint64_t to, uint64_t slot, uint64_t value);
  uint32_t mates() const { return static_cast<uint32_t>(parts_.size()); }
  uint32_t hosts() const { return static_cast<uint32_t>(place_.hosts.size()); }
  uint32_t first_mate() const { return place_.hosts[host_]; }
  bool is_mate(uint32_t member) const { return member >= first_mate() && member < first_mate() + mates(); }
  uint32_t members_of(uint32_t host) const { return (host + 1 < hosts() ? place_.hosts[host + 1] : members()) - place_.hosts[host]; }
  uint32_t host_of(uint32_t member) const { return host_of_[member]; }
  uint32_t local_of(uint32_t member) const { return member - place_.hosts[host_of_[member]]; }
  // Of this member on another host.
  uint32_t counterpart(uint32_t host) const { return place_.hosts[host] + local_ % members_of(host); }
  // Those whose counterpart this member is, all of them; false as soon as `one` is. Members of this host are not among them.
  template <class One> bool all_facing(One&& one) const {
    for (uint32_t host = 0; host < hosts(); ++host) {
      if (host == host_) continue;
      for (uint32_t local = local_; local < members_of(host); local += mates()) if (!one(place_.hosts[host] + local)) return false;
    }
    return true;
  }
  // Members of a host face one of another host, or of the same, in rows, which it counts over all hosts: that of a member.
  uint32_t row_of(uint32_t member, uint32_t on) const { return rows_[on * hosts() + host_of(member)] + local_of(member) / members_of(on); }
  uint32_t rows_of(uint32_t on) const { return row_of(members() - 1, on) + 1; }
  bool has_share() const { return local_ < columns_; }
  bool is_root(const carried_call& call) const { return place_.self == call.root; }
  bool is_root() const { return is_root(call_); }
  uint32_t root_host() const { return host_of(call_.root); }
  uint32_t root_mate() const { return call_.root - first_mate(); } // where it is of this host

  bool steps(const arrays& of);
  bool prepare_steps(const arrays& of);
  bool go(const arrays& of, int64_t end_ns);
  // carrier_steps.cpp
  static bool folds(carried_kind kind) { return kind == carried_kind::all_reduce || kind == carried_kind::reduce_scatter || kind == carried_kind::reduce; }
  // What hosts come to takes as many bytes, or twice as many: halves that are added are kept in single precision until all hosts are folded.
  static uint64_t wide(const carried_call& call);
  uint64_t share_bytes(const carried_call& call, uint64_t piece) const;
  uint64_t block_bytes(const carried_call& call, uint64_t piece) const;
  uint64_t wide() const { return wide(call_); }
  uint64_t share_bytes() const { return share_bytes(call_, piece_); }
  uint64_t block_bytes() const { return block_bytes(call_, piece_); }
  share share_of(uint64_t step, uint32_t mate, uint64_t total) const;
  share part_of(uint64_t bytes, uint32_t host) const;
  share block_of(uint64_t step, uint64_t total) const;
  bool reduce_steps(const arrays& of);
  bool stage_shares(const arrays& of);
  bool fold_host(const arrays& of);
  bool send_share(uint64_t bytes);
  bool fold_two_hosts(const arrays& of);
  bool fold_part(const arrays& of);
  bool take_parts(const arrays& of);
  void fold_here(void* partial, const void* const* sources, uint64_t bytes) const;                     // what this host gives
  void fold_into(void* const* targets, int count, const void* const* partials, uint64_t bytes) const; // what hosts have come to
  bool take_shares(const arrays& of);
  bool close_call();

  // carrier_blocks.cpp
  bool block_steps(const arrays& of);
  bool stage_blocks(const arrays& of);
  bool take_blocks(const arrays& of);
  bool is_source(uint32_t member) const { return call_.kind != carried_kind::broadcast || member == call_.root; }
  bool gather_steps(const arrays& of);
  bool stage_source(const arrays& of);
  bool hear_sources();
  bool take_sources(const arrays& of);
  uint8_t* column_partial(uint64_t step, uint32_t member) const;
  bool scatter_steps(const arrays& of);
  bool stage_columns(const arrays& of);
  bool fold_column(const arrays& of);
  bool fold_block(const arrays& of);

  // carrier_roots.cpp
  bool may_give(uint64_t step) const;
  bool free_places(uint64_t done);
  bool root_steps(const arrays& of);
  bool send_to_root(uint64_t bytes);
  bool fold_at_root(const arrays& of);
  bool take_result(const arrays& of);
  uint32_t root_row(uint32_t host) const { return host < root_host() ? host : host - 1; }
  bool collect_steps(const arrays& of);
  bool give_block(const arrays& of);
  bool deal_steps(const arrays& of);
  bool deal_blocks(const arrays& of);
  bool take_dealt(const arrays& of);

  std::shared_ptr<symmetric_memory> memory_;
  std::unique_ptr<round_way> way_;
  round_place place_;
  carrier_layout layout_{};
  std::vector<std::shared_ptr<segment>> mapped_;
  std::vector<uint8_t*> parts_; // data of each mate
  uint32_t host_ = 0;
  uint32_t local_ = 0;
  uint32_t columns_ = 0;           // members of the smallest host
  uint32_t most_rows_ = 0;         // that any member is faced in
  std::vector<uint32_t> host_of_;  // of each member
  std::vector<uint32_t> rows_;     // on each host, before those of each host

  carried_call call_;
  bool busy_ = false;
  bool sure_ = true;
  bool loose_ = false; // something that was prepared in vain may be under way
  std::optional<failure> refused_;
  bool told_ = false;      // that this member has its data
  bool passed_on_ = false; // and, of the first one of a host, that all of its host have
  mutable bool awaits_hosts_ = false; // something that a step looked for has not landed
  int64_t looked_ns_ = 0; // when it asked last what has landed
  // Of this call: places of an area, bytes of one, and how many steps a member may be ahead of its mates.
  uint64_t places_ = 1;
  uint64_t piece_ = 0;
  uint64_t window_ = 1;
  uint64_t number_ = 0;
  uint64_t before_ = 0; // where its steps are counted from
  uint64_t steps_ = 0;
  // Of this call.
  uint64_t staged_ = 0;
  uint64_t read_ = 0;
  uint64_t folded_ = 0; // of more than two hosts: this member's part
  uint64_t ready_ = 0;
  uint64_t taken_ = 0;
  uint64_t taken_blocks_ = 0; // of an all-to-all, in the step that is taken: a bit for each member whose block has been
  uint64_t answered_ = 0; // where others wait for it: steps of which nothing lies here any more
  uint64_t sent_ = 0;
};

} // namespace ep
