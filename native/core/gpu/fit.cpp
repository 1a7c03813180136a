#include "fit.hpp"

#include <algorithm>

namespace ep::gpu {

uint64_t room_beside(const std::vector<grid>& held, uint32_t resident) {
  uint64_t widest = resident; // those of which the fewest fit
  uint64_t taken = 0;
  for (const grid& each : held) {
    widest = std::min<uint64_t>(widest, each.resident);
    taken += each.blocks;
  }
  return widest > taken ? widest - taken : 0;
}

} // namespace ep::gpu
