// How fast host threads put over the GIN facade where nobody executes what they post: for `ep bench efa` and tests/device/efa_bench.cpp. Every run checks what the
// queue pair holds in the end, and fails where that is not what was put (EP_STATUS_SYSTEM, EPROTO).
#pragma once

#include <cstdint>
#include <span>

#include "status.hpp"

namespace ep::efa {

// A protocol behind the facade, and how posters share the queue pair.
struct put_way {
  const char* name;    // "lock": the pull request's (efa_pr_gin.h); "lock-free": ours (efa_gin.h)
  const char* sharing; // "device", "block", "thread"
  bool shared;         // by several posters; otherwise each has a queue pair of its own
};
// The lock is the first.
std::span<const put_way> put_ways();

struct put_load {
  uint32_t way = 0;     // in put_ways()
  uint32_t posters = 1; // threads
  uint32_t run = 1;     // puts of which all but the last are aggregated: 1 to 512
  uint64_t puts = 0;    // of all posters together; rounded down to whole runs
};

// Puts of 64 bytes each second. Nobody executes them: whoever waits for room writes the completions itself, so that posting is all that is measured, and two posters have two
// cores.
result<double> drained_puts_per_second(const put_load& load);
// One thread, one queue pair and nothing else: for counting instructions. EP_STATUS_INVALID: no such way.
result<nothing> put_only(const char* way, const char* sharing, uint32_t run, uint64_t puts);

// What one poster does for its puts, as counts that no machine's speed changes.
struct put_counts {
  uint64_t puts = 0;
  uint64_t doorbells = 0;
  uint64_t words = 0;           // of 8 bytes, stored to the ring
  uint64_t register_fences = 0; // around stores to the device
  uint64_t system_fences = 0;
};
result<put_counts> count_puts(uint32_t way, uint32_t run, uint64_t puts);

} // namespace ep::efa
