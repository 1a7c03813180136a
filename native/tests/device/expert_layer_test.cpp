// The kernel that computes experts on the host's executors, against fp64.
#include "core/launch.hpp"
#include "core/simt/simt.hpp"
#include "ep/device/expert_layer.h"
#include "expert_case.hpp"

using namespace ep::test;

namespace {

constexpr uint32_t hidden = 130; // two blocks of scales, the second with two channels
constexpr uint32_t intermediate = 13;
constexpr uint32_t most_rows = 18; // up to the last run's end

void on_fast(const ep_expert_args& args, uint32_t blocks) {
  const ep::kernel_environment environment;
  EP_CHECK(ep::fast_run(blocks, environment, [&](ep::fast_context& ctx) {
             std::vector<float> scratch(EP_EXPERT_FLOATS(hidden, intermediate));
             ep::expert_layer(ctx, args, scratch.data());
           }).ok());
}

// Many lanes: a barrier that is missing shows as values that are not there yet.
void on_simt(const ep_expert_args& args, uint64_t seed) {
  const ep::kernel_environment environment;
  ep::simt_options options;
  options.blocks = 2;
  options.lanes = 8;
  options.warp_lanes = 4;
  options.seed = seed;
  std::vector<std::vector<float>> scratch(options.blocks);
  for (auto& own : scratch) own.resize(EP_EXPERT_FLOATS(hidden, intermediate));
  EP_CHECK(ep::simt_run(options, environment, [&](ep::simt_context& ctx) { ep::expert_layer(ctx, args, scratch[ctx.block()].data()); }).ok);
}

} // namespace

int main() {
  for (const expert_formats& pair : expert_pairs) {
    expert_case given(pair.payload, pair.dtype, hidden, intermediate, expert_runs, pair.payload);
    on_fast(given.args, 1);
    given.check(pair.bound);
    const std::vector<uint8_t> one = given.result();
    given.clear();
    on_fast(given.args, 3);
    EP_CHECK(given.result() == one);
    const ep_expert_args counted = given.counted(most_rows);
    for (const uint32_t blocks : {1u, 3u, 40u}) {
      given.clear();
      on_fast(counted, blocks);
      EP_CHECK(given.result() == one);
    }
    for (uint64_t seed = 0; seed < 4; ++seed) {
      given.clear();
      on_simt(given.args, seed);
      given.check(pair.bound);
      const std::vector<uint8_t> wanted = given.result();
      given.clear();
      on_simt(counted, seed);
      EP_CHECK(given.result() == wanted);
    }
  }
  expert_case empty(EP_MOE_BF16, EP_MOE_BF16, hidden, intermediate, {{0, 0}, {0, 0}}, 1);
  on_fast(empty.args, 2);
  EP_CHECK(empty.result() == std::vector<uint8_t>(empty.result().size(), 0x5a));
  return ep::check::finish();
}
