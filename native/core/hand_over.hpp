// Copies into memory that other cores read: chunks, slots and pools of groups.
#pragma once

#include <cstdint>

#include "ep/device/copy.h"

namespace ep {

/// True where a store to a line that another core's cache holds costs more than the way over memory. On AMD's Zen each such line is taken back one at a time (measured on a
/// Zen 4: 2.3 GB/s through the caches, 30 past them, at the same speed for the reader); elsewhere lines are taken back several at a time.
bool hands_over_past_caches(uint64_t bytes);

/// Visible to whoever sees a later release of this thread.
inline void hand_over(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  const bool past = hands_over_past_caches(bytes);
  ep_copy(to, from, bytes, past ? 1 : 0);
  if (past) ep_copy_fence();
}

} // namespace ep
