// What a launch of several ranks takes, on either machine.
#pragma once

#include "table.h"

namespace ep {

inline bool moe_ranks_agree(const ep_cuda_moe_rank* ranks, uint32_t count) {
  if (count == 0 || count > EP_CUDA_MOST_MOE_RANKS) return false;
  for (uint32_t i = 0; i < count; ++i) {
    const ep_cuda_moe_rank& one = ranks[i];
    if (one.buffer == nullptr || (one.dispatch == nullptr) != (ranks[0].dispatch == nullptr) || (one.dispatch == nullptr) == (one.combine == nullptr)) return false;
    const ep_moe_buffer& buffer = *one.buffer;
    if (buffer.header.kind != EP_MOE_LOW_LATENCY || buffer.memory.header.kind != EP_MEMORY_LOAD_STORE || buffer.memory.world_size != ranks[0].buffer->memory.world_size) return false;
    for (uint32_t j = 0; j < i; ++j) {
      if (ranks[j].buffer->memory.rank == buffer.memory.rank) return false;
    }
  }
  return true;
}

} // namespace ep
