// What the tests of the GIN facade over EFA begin with.
#pragma once

#include "../check.hpp"
#include "efa_cases.hpp"

namespace ep::test {

inline efa_world_options seeded_world(uint64_t seed) {
  efa_world_options wanted;
  wanted.seed = seed;
  return wanted;
}

// What one lane of rank 0 does, then a flush.
template <class Body> bool by_rank_0(efa_world& world, const Body& body) {
  return world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) {
    if (rank != 0) return true;
    const auto gin = our_way::gin(world, 0);
    return body(ctx, gin, thread_coop<efa_context>{ctx}) && gin.flush(ctx, thread_coop<efa_context>{ctx}, &world.at(0).status);
  }).ok;
}

} // namespace ep::test
