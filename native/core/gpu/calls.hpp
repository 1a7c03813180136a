// What a dispatcher keeps on its device: the counts of its leases, and its share of the device.
#pragma once

#include "ep/abi/device_call.h"
#include "share.hpp"

namespace ep::gpu {

// Where the counters of lease n lie among the signal words: arrivals by source, then credits by destination.
struct lease_slots {
  uint64_t first = 0; // of lease 0's arrivals
  uint32_t leases = 1;
};

class calls {
 public:
  // Blocks and lanes as in share::take.
  static result<std::shared_ptr<calls>> create(std::shared_ptr<symmetric_memory> memory, const lease_slots& slots, uint32_t blocks, uint32_t lanes);

  uint32_t blocks() const { return share_->blocks(); }
  uint32_t lanes() const { return share_->lanes(); }
  uint32_t resident() const { return share_->resident(); }
  uint32_t leases() const { return slots_.leases; }
  const std::shared_ptr<symmetric_memory>& memory() const { return memory_; }
  uint64_t arrival_slot(uint32_t lease) const { return slots_.first + 2 * uint64_t{lease} * world(); }
  uint64_t credit_slot(uint32_t lease) const { return arrival_slot(lease) + world(); }
  uint64_t counts(uint32_t lease) const { return block_->address() + uint64_t{lease} * sizeof(ep_lease_counts); }
  // What a wait of so many milliseconds is in cycles, twice over: the host ends it first, and says why. 0 for no limit.
  uint64_t cycles(double timeout_ms) const { return share_->cycles(2 * timeout_ms); }

  // Takes the counters as they stand for the new zero. No kernel of these calls may run, at any rank.
  result<nothing> rebase();

 private:
  calls(std::shared_ptr<symmetric_memory> memory, const lease_slots& slots) : memory_(std::move(memory)), slots_(slots) {}
  uint64_t world() const { return static_cast<uint64_t>(memory_->context().world_size()); }

  std::shared_ptr<symmetric_memory> memory_;
  lease_slots slots_;
  std::shared_ptr<const device_block> block_; // ep_lease_counts[leases], then for each lease arrived[world] and granted[world]
  std::shared_ptr<share> share_;
};

} // namespace ep::gpu
