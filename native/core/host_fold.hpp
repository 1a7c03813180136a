// In which order elements of members on several hosts are folded: those of each host first, then what the hosts have come to. So does the group's TypeScript
// (packages/collectives/src/portable/fold-order.ts), to the bit.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "collective/reduce.hpp"

namespace ep {

// What a host comes to is kept in this: f32 of f16 and bf16 that are more than compared, which are rounded once, behind all hosts.
element_type partial_type(element_type type, reduce_op op);

// What a host does with its members: `partial`, of elements of partial_type(), overlaps no source. An average is no more than a sum yet.
void fold_members(void* partial, const void* const* sources, int count, uint64_t elements, element_type type, reduce_op op, double factor);

// And then the group with what its hosts have come to, into each target. A target may be one of the partials, or begin where one does, and overlaps no other.
void fold_partials(void* const* targets, int target_count, const void* const* partials, int hosts, uint64_t elements, element_type type, reduce_op op, double factor, uint32_t members);

// Little at a time, on one thread.
class host_fold {
 public:
  // `order`: members as they are folded; `hosts`: of each host the first of them there, ascending, beginning with 0. One host: all as they are.
  host_fold(std::vector<uint32_t> order, std::vector<uint32_t> hosts) : order_(std::move(order)), hosts_(std::move(hosts)) {}
  // Every member once, among so many.
  bool sound(uint32_t members) const;
  // `sources` by member, aligned as elements are; `into` overlaps none.
  void run(void* into, std::span<const void* const> sources, uint64_t elements, element_type type, reduce_op op, double factor);

 private:
  std::vector<uint32_t> order_;
  std::vector<uint32_t> hosts_;
  std::vector<uint64_t> partials_; // of each host
};

} // namespace ep
