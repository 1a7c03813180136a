// Grids that are admitted beside each other run at once, whatever order their blocks start in and wherever they are put; and what was admitted once, though it did not.
#include "core/gpu/fit.hpp"

#include <algorithm>
#include <random>

#include "check.hpp"

namespace {

using namespace ep::gpu;

// Of a multiprocessor: warps and blocks that fit.
struct device {
  uint32_t multiprocessors;
  uint32_t warps;
  uint32_t slots;
};

uint32_t resident(const device& on, uint32_t warps) { return std::min(on.warps / warps, on.slots) * on.multiprocessors; }

struct kind {
  uint32_t warps;
  uint32_t blocks;
};

enum class placing { spread, anywhere, packed };

enum class order { random, narrow_first };

// Starts all blocks; none ends. How many were left without a place.
uint32_t stranded(const device& on, const std::vector<kind>& grids, order in, placing how, std::mt19937_64& random) {
  std::vector<uint32_t> all;
  for (const kind& each : grids) all.insert(all.end(), each.blocks, each.warps);
  if (in == order::random) std::shuffle(all.begin(), all.end(), random);
  else std::sort(all.begin(), all.end());
  std::vector<uint32_t> warps(on.multiprocessors);
  std::vector<uint32_t> blocks(on.multiprocessors);
  uint32_t left = 0;
  for (const uint32_t block : all) {
    std::vector<uint32_t> places;
    for (uint32_t at = 0; at < on.multiprocessors; ++at) {
      if (warps[at] + block <= on.warps && blocks[at] < on.slots) places.push_back(at);
    }
    if (places.empty()) {
      ++left;
      continue;
    }
    const auto fewer = [&](uint32_t a, uint32_t b) { return warps[a] < warps[b]; };
    const uint32_t at = how == placing::spread   ? *std::min_element(places.begin(), places.end(), fewer)
                        : how == placing::packed ? *std::max_element(places.begin(), places.end(), fewer)
                                                 : places[random() % places.size()];
    warps[at] += block;
    ++blocks[at];
  }
  return left;
}

void small_blocks_leave_no_room_for_wide_ones() {
  std::mt19937_64 random(1);
  const device large{132, 32, 32};
  EP_CHECK_EQ(resident(large, 4), 1056u);
  EP_CHECK_EQ(resident(large, 32), 132u);
  // Half of the device each, by shares: and not one of the wide blocks runs.
  EP_CHECK_EQ(stranded(large, {{4, 528}, {32, 66}}, order::narrow_first, placing::spread, random), 66u);
  EP_CHECK_EQ(room_beside({{528, 1056}}, 132), 0u);
  EP_CHECK_EQ(room_beside({{66, 1056}}, 132), 66u);
  // Also when the narrow grid comes second.
  EP_CHECK_EQ(room_beside({{66, 132}}, 1056), 66u);
}

void equal_blocks_may_take_all_of_the_device() {
  EP_CHECK_EQ(room_beside({}, 264), 264u);
  EP_CHECK_EQ(room_beside({{66, 264}, {66, 264}}, 264), 132u);
  EP_CHECK_EQ(room_beside({{132, 264}, {132, 264}}, 264), 0u);
  EP_CHECK_EQ(room_beside({}, 0), 0u);
}

void whatever_is_admitted_runs_at_once() {
  std::mt19937_64 random(7);
  uint32_t worlds = 0;
  uint32_t full = 0;
  for (int round = 0; round < 3000; ++round) {
    const device on{1 + static_cast<uint32_t>(random() % 12), 32u << (random() % 2), 16u << (random() % 2)};
    std::vector<kind> grids;
    std::vector<grid> held;
    for (int tries = 0; tries < 6; ++tries) {
      const uint32_t warps = 1 + static_cast<uint32_t>(random() % 32);
      const uint64_t room = room_beside(held, resident(on, warps));
      if (room == 0) continue;
      const auto blocks = static_cast<uint32_t>(random() % 3 == 0 ? room : 1 + random() % room);
      grids.push_back({warps, blocks});
      held.push_back({blocks, resident(on, warps)});
      full += blocks == room ? 1 : 0;
    }
    worlds += grids.size() > 1 ? 1 : 0;
    for (const placing how : {placing::spread, placing::anywhere, placing::packed}) {
      for (const order in : {order::random, order::narrow_first}) EP_CHECK_EQ(stranded(on, grids, in, how, random), 0u);
    }
  }
  EP_CHECK(worlds > 1000);
  EP_CHECK(full > 1000);
}

} // namespace

int main() {
  small_blocks_leave_no_room_for_wide_ones();
  equal_blocks_may_take_all_of_the_device();
  whatever_is_admitted_runs_at_once();
  return ep::check::finish();
}
