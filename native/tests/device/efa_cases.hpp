// What several tests of the EFA post path do.
#pragma once

#include "efa_world.hpp"

namespace ep::test {

// Rank 0's values 1, 2, ... to rank 1, in runs of which all but the last are aggregated; then a flush.
inline bool post_values(efa_context& ctx, efa_world& world, uint64_t count, uint32_t run) {
  const efa_gin<> gin{world.at(0).device};
  const thread_coop<efa_context> coop{ctx};
  for (uint64_t i = 0; i < count; ++i) {
    gin_options options;
    options.aggregate = (i + 1) % run != 0;
    if (!gin.put_value(ctx, coop, world.team(), 1, world.part(0), i % 64 * 8, i + 1, gin_no_action{}, options, &world.at(0).status)) return false;
  }
  return gin.flush(ctx, coop, &world.at(0).status);
}

} // namespace ep::test
