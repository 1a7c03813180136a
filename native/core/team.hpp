// A team of ranks on this host: barrier, and small all-gathers through the team's segment.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "rank.hpp"

namespace ep {

// Entered by one thread at a time, the rank's own; its wait may go on on another thread.
class team {
 public:
  static result<std::shared_ptr<segment>> segment_create(int32_t size);
  // `ranks`: world ranks of the members in team order. `shared`: the segment that member 0 made.
  static result<std::shared_ptr<team>> join(std::shared_ptr<rank_context> context, std::shared_ptr<segment> shared, std::vector<int32_t> ranks);

  int32_t size() const { return static_cast<int32_t>(ranks_.size()); }
  int32_t position() const { return position_; }
  const std::vector<int32_t>& ranks() const { return ranks_; }
  rank_context& context() const { return *context_; }

  // Enters the next barrier and returns the value of `barrier_word` that ends it. A barrier whose wait ended early stays entered: entering again goes on
  // with that one.
  uint64_t barrier_enter();
  uint64_t barrier_target() const { return epoch_; }
  // For spinning; it may lag behind barrier_passed() for ever if the last to arrive was killed before it raised it.
  const uint64_t* barrier_word() const { return &control().released; }
  // Barriers that every member has entered.
  uint64_t barrier_passed() const;
  // The barrier under way has ended; the next enter starts a new one.
  void barrier_leave() { entered_ = false; }
  bool barrier_under_way() const { return entered_; }
  // World ranks of members that have not entered the barrier under way.
  std::vector<int32_t> barrier_missing() const;

  // All-gather of at most EP_TEAM_EXCHANGE_BYTES: put, one barrier, then get. Two sets of slots alternate, so that a fast member's next blob does not
  // overwrite what a slow one still reads.
  void exchange_put(const void* bytes, uint32_t byte_length);
  const uint8_t* exchange_get(int32_t position) const;

 private:
  team() = default;
  ep_team_control& control() const { return *reinterpret_cast<ep_team_control*>(shared_->data()); }
  uint64_t* entered_words() const { return reinterpret_cast<uint64_t*>(shared_->data() + sizeof(ep_team_control)); }
  uint8_t* slot(uint64_t set, int32_t position) const;

  std::shared_ptr<rank_context> context_;
  std::shared_ptr<segment> shared_;
  std::vector<int32_t> ranks_;
  int32_t position_ = -1;
  uint64_t epoch_ = 0;
  bool entered_ = false;
  uint64_t exchanges_ = 0;
};

} // namespace ep
