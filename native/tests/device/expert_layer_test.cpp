// The kernel that computes experts on the host's executors, against fp64.
#include "core/launch.hpp"
#include "core/simt/simt.hpp"
#include "ep/device/expert_layer.h"
#include "expert_case.hpp"

using namespace ep::test;

namespace {

constexpr uint32_t hidden = 130; // two blocks of scales, the second with two channels
constexpr uint32_t intermediate = 13;

void on_fast(const expert_case& given, uint32_t blocks) {
  const ep::kernel_environment environment;
  EP_CHECK(ep::fast_run(blocks, environment, [&](ep::fast_context& ctx) {
             std::vector<float> scratch(EP_EXPERT_FLOATS(hidden, intermediate));
             ep::expert_layer(ctx, given.args, scratch.data());
           }).ok());
}

// Many lanes: a barrier that is missing shows as values that are not there yet.
void on_simt(const expert_case& given, uint64_t seed) {
  const ep::kernel_environment environment;
  ep::simt_options options;
  options.blocks = 2;
  options.lanes = 8;
  options.warp_lanes = 4;
  options.seed = seed;
  std::vector<std::vector<float>> scratch(options.blocks);
  for (auto& own : scratch) own.resize(EP_EXPERT_FLOATS(hidden, intermediate));
  EP_CHECK(ep::simt_run(options, environment, [&](ep::simt_context& ctx) { ep::expert_layer(ctx, given.args, scratch[ctx.block()].data()); }).ok);
}

} // namespace

int main() {
  for (const expert_formats& pair : expert_pairs) {
    expert_case given(pair.payload, pair.dtype, hidden, intermediate, expert_runs, pair.payload);
    on_fast(given, 1);
    given.check(pair.bound);
    const std::vector<uint8_t> one = given.result();
    given.clear();
    on_fast(given, 3);
    EP_CHECK(given.result() == one);
    for (uint64_t seed = 0; seed < 4; ++seed) {
      given.clear();
      on_simt(given, seed);
      given.check(pair.bound);
    }
  }
  expert_case empty(EP_MOE_BF16, EP_MOE_BF16, hidden, intermediate, {{0, 0}, {0, 0}}, 1);
  on_fast(empty, 2);
  EP_CHECK(empty.result() == std::vector<uint8_t>(empty.result().size(), 0x5a));
  return ep::check::finish();
}
