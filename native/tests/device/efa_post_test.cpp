// Posting to EFA queue pairs, by the simt executor over the software NIC's stepper: rings, batches, deferred doorbells, room, posters that meet. The numbers are those
// of the list of tests in docs/efa-contract.md. Ways that are known to be wrong are in efa_naive_test.cpp.
#include "../check.hpp"
#include "efa_cases.hpp"

using namespace ep;
using namespace ep::test;

namespace {

constexpr uint64_t samples = 100 / seed_share;

// One lane posts, and every WQE has the phase and place that the NIC expects: it checks each, so a violation is all that could happen.
void t3_phase_over_four_wraps(uint32_t depth, bool inline_write) {
  efa_world_options wanted;
  wanted.depth = depth;
  wanted.max_batch = std::min<uint32_t>(depth, 16);
  wanted.inline_write = inline_write;
  wanted.fragment_bytes = 64;
  efa_world world(wanted);
  const uint64_t posts = 4ull * depth + 3;
  const simt_result outcome = world.run(shape(1, 1, 1), [&](efa_context& ctx, int32_t rank) {
    if (rank != 0) return true;
    return post_values(ctx, world, posts, wanted.depth > 64 ? 16 : 3);
  });
  EP_CHECK(outcome.ok);
  EP_CHECK(world.clean());
  EP_CHECK_EQ(world.qp(0, 0).prefix, posts);
  EP_CHECK_EQ(world.counted(0, 0).written, posts);
  EP_CHECK_EQ(world.counted(1, 0).arrived, posts);
}

} // namespace

int main() {
  for (const bool inline_write : {true, false}) {
    t3_phase_over_four_wraps(4, inline_write);
    t3_phase_over_four_wraps(16, inline_write);
  }
  t3_phase_over_four_wraps(2048, true);
  t3_phase_over_four_wraps(4096, false);
  (void)samples;
  return ep::check::finish();
}
