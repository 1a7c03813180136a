// In which order elements of members on several hosts are folded: those of each host first, then what the hosts have come to. So does the group's TypeScript
// (packages/collectives/src/portable/fold-order.ts), to the bit.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "collective/reduce.hpp"

namespace ep {

// What a host does with its members, and then the group with what hosts have come to.
reduce_op within_host(reduce_op op);
reduce_op across_hosts(reduce_op op);

// Not sums, averages and products of f16 and bf16, which are kept in single precision in between, and not averages of integers.
bool folds_by_host(element_type type, reduce_op op);

// Behind the sum of all members, of an average: f32 and f64.
void divide_elements(void* at, uint64_t elements, element_type type, uint32_t members);

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
  std::vector<uint64_t> partials_;
};

} // namespace ep
