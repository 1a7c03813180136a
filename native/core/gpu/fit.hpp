// Whether grids of blocks that wait for each other are sure to run at once, wherever the device puts their blocks.
#pragma once

#include <cstdint>
#include <vector>

namespace ep::gpu {

struct grid {
  uint32_t blocks;
  uint32_t resident; // blocks of this kind that the device runs at once, when it runs nothing else
};

/* How many blocks another grid of that kind may have beside those that are held.
 *
 * HAZARD: shares of the device do not add up. Blocks stay until those that they wait for have run, and the device places them as it likes: a few small ones on every
 * multiprocessor leave no room for one large block anywhere, however little of the device they take together. So every block counts as one of the widest kind of all,
 * of which k fit a multiprocessor: with fewer than k times the multiprocessors in all, some multiprocessor has fewer than k blocks, and room for one of any kind. */
uint64_t room_beside(const std::vector<grid>& held, uint32_t resident);

} // namespace ep::gpu
