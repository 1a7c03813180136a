// Short exchanges among ranks of several hosts, each in one call of its thread: what every member says in a round goes to every other one.
//
// Members of a host write into the memory of its leader, the first of them, which they map. When all of them have, the leader puts what they said into the memory of each other host's
// leader, in one request. A member has the round when all of its host have written, the leader has put, and what the other hosts said has landed; it reads that where it lies. So whoever has a round
// knows that all others get it, whatever becomes of the threads of the ranks, as long as nobody dies or stands still: nobody else's thread has to look first.
//
// Nothing waits for anybody: a round that does not come in time is left, and whoever uses this has another way to say the same. Rounds have numbers that only grow, and nobody begins a
// round before all have, in this way or in another, what was said in the one before the last. HAZARD: places are used in turn, by two rounds: that rule alone keeps a reader's bytes as they are.
// A round that was said in another way may still be leaving when its places are written again: what lands of it is torn, under its own number, and nobody reads that.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "memory.hpp"
#include "segment.hpp"

namespace ep {

// A rank in a call asks the network at least so often what has come, where nothing of that is awaited.
constexpr int64_t asks_apart_ns = 20'000;

// How a leader's bytes come to those of other hosts.
class round_way {
 public:
  virtual ~round_way() = default;
  // Nothing with this signal word is under way to the peer. HAZARD: else a late one could land over the bytes of the next.
  virtual bool clear(int32_t peer, uint64_t slot) const = 0;
  // From this rank's part of the memory, at `local`, into the same memory of a peer; then sets a signal word there. A failure: never; EP_STATUS_PEER_LOST where the peer is gone.
  virtual result<nothing> put(int32_t peer, uint64_t local, uint64_t stride, uint64_t row_bytes, uint64_t rows, uint64_t offset, uint64_t slot, uint64_t value) = 0;
};

// Where things lie in the memory, which every rank of the world has: a word that wakes the leader of a host, in whichever group it sleeps, then the places of each group.
struct round_layout {
  static constexpr uint64_t most_bytes = 1024; // that a member says in a round
  static constexpr int32_t most_members = 64;
  static constexpr uint64_t head_bytes = 64;
  uint32_t world;

  uint64_t group_bytes() const;
  uint64_t memory_bytes(uint64_t groups) const { return head_bytes + groups * group_bytes(); }
  uint64_t group_slots() const { return uint64_t{2} * world; }
};

struct round_place {
  uint64_t group = 0;              // its number
  uint64_t token = 0;              // unlike that of any group that has used the places before
  std::vector<int32_t> ranks;      // of the world, those of a host next to each other
  std::vector<uint32_t> hosts;     // the first member of each; ascending, beginning with 0
  uint32_t self = 0;               // member
};

class rounds {
 public:
  // `way`: null where all members share a host. `leader`: the memory of the host's first member; fails where it cannot be mapped here. EP_STATUS_INVALID for a place that does not fit the memory.
  static result<std::unique_ptr<rounds>> open(std::shared_ptr<symmetric_memory> memory, std::unique_ptr<round_way> way, round_place place, const ep_segment_handle& leader);

  // This rank's part of a round, one behind the other: most_bytes together. One thread, as of all that follows.
  void enter(uint64_t round, std::span<const uint8_t> said, std::span<const uint8_t> more = {});
  // Holds the thread until the round is there, or for `most_ns`. What look() says. `meanwhile` runs between looks, and says whether it has done something.
  bool hold(uint64_t round, int64_t most_ns, const std::function<bool()>& meanwhile = nullptr);
  // The round is there. A leader puts what it can.
  bool look(uint64_t round);
  // After that: what a member said; `into` has most_bytes. The bytes, or UINT32_MAX where this is not of that round after all.
  uint32_t read(uint64_t round, uint32_t member, uint8_t* into) const;
  uint32_t members() const { return static_cast<uint32_t>(place_.ranks.size()); }

 private:
  struct row; // of a member, before its bytes
  rounds() = default;
  uint64_t key(uint64_t round) const { return place_.token + round; }
  uint64_t rows_at(uint64_t round, uint32_t member) const;    // offset of what the member writes, in the leader's data
  uint64_t landing_at(uint64_t round, uint32_t member) const; // of what lands of its host
  uint64_t slot_of(uint64_t round, uint32_t host) const;
  row* row_at(uint64_t offset) const { return reinterpret_cast<row*>(data_ + offset); }
  uint8_t* places() const { return data_ + round_layout::head_bytes + place_.group * layout_.group_bytes(); }
  uint64_t* posted_at(uint64_t round) const;
  ep_wake_word* leader_wake() const { return reinterpret_cast<ep_wake_word*>(data_); }
  ep_wake_word* wake_at(uint32_t member) const;
  bool all_said(uint64_t round) const;
  bool landed(uint64_t round) const;
  bool drive(uint64_t round);
  void wake_mates() const;
  uint32_t host_end(uint32_t host) const { return host + 1 < place_.hosts.size() ? place_.hosts[host + 1] : members(); }

  std::shared_ptr<symmetric_memory> memory_;
  std::unique_ptr<round_way> way_;
  round_place place_;
  round_layout layout_{};
  std::shared_ptr<segment> leader_memory_;
  uint64_t* signals_ = nullptr; // the leader's
  uint8_t* data_ = nullptr;
  uint32_t host_ = 0;
  bool leads_ = false;
  int64_t looked_ns_ = 0; // when a leader asked last what has come
  bool broken_ = false; // a leader is not reached any more: some have heard of a round, and others never do
};

} // namespace ep
