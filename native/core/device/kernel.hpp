// What host code sees of a kernel: a function over a context, run by an executor.
#pragma once

#include <cstdint>
#include <memory>

#include "../waiting.hpp"
#include "ep/abi/dispatch.h"

namespace ep {

// What a kernel asks of whoever drives the NIC between ranks: as of memory_route.
class kernel_ways {
 public:
  virtual ~kernel_ways() = default;
  virtual bool end_way(int32_t rank) const = 0;
  virtual bool own_fault(uint64_t found) const = 0;
};

// Where the waits of a running kernel end. One per launch, shared by its blocks.
struct kernel_environment {
  wait_scope waits;
  const kernel_ways* ways = nullptr; // null: no NIC is between ranks

  bool end_way(int32_t rank) const { return ways == nullptr || ways->end_way(rank); }
  bool own_fault(uint64_t found) const { return ways != nullptr && ways->own_fault(found); }
  // Ends the waits of all blocks, those that are still to come included.
  void stop_waits() const {
    if (waits.stopped == nullptr) return;
    waits.stopped->store(1, std::memory_order_seq_cst);
    wake_notify(waits.wake);
  }
};

// A kernel's look, which is `bool operator()(uint64_t* found) const`.
template <class Look> wait_look wait_look_of(const Look& look) {
  return {[](const void* self, uint64_t* found) { return (*static_cast<const Look*>(self))(found); }, &look};
}

// Writes *status once: the first failure of a launch is the one that is reported.
void kernel_status_fail(ep_kernel_status* status, const wait_result& result, uint32_t stage, uint64_t expected);

} // namespace ep
