// Large calls that move blocks: all-to-alls, all-gathers, broadcasts, and the reduce-scatters between them.
#include <array>
#include <atomic>

#include "carrier_world.hpp"

namespace {

using namespace ep;
using namespace ep::test;

// Of every length between two members, also none at all.
uint64_t block_elements(uint32_t from, uint32_t to, uint64_t call) { return (call * 7919 + from * 104'729 + to * 1299) % (call % 3 == 2 ? 9 * piece : 500) * ((from + 2 * to + call) % 5 == 0 ? 0 : 1); }
uint8_t block_byte(uint32_t from, uint32_t to, uint64_t call, uint64_t i) { return pattern(i, from * 16 + to + call * 3); }

void test_blocks() {
  for (const auto& sizes : worlds) {
    carrier_world world(sizes, 10 + sizes[0], 1);
    const uint32_t members = world.members();
    std::atomic<int> wrong{0};
    world.run([&](uint32_t member) {
      for (uint64_t call = 0; call < (is_unlike(sizes) ? 6 : 12); ++call) {
        uint64_t longest = 0;
        for (uint32_t from = 0; from < members; ++from) for (uint32_t to = 0; to < members; ++to) longest = std::max(longest, block_elements(from, to, call));
        std::vector<std::vector<uint8_t>> inputs(members), outputs(members);
        std::vector<carried_bytes> given, taken;
        for (uint32_t peer = 0; peer < members; ++peer) {
          inputs[peer].resize(block_elements(member, peer, call));
          for (uint64_t i = 0; i < inputs[peer].size(); ++i) inputs[peer][i] = block_byte(member, peer, call, i);
          outputs[peer].resize(block_elements(peer, member, call));
          given.push_back({inputs[peer].data(), inputs[peer].size()});
          taken.push_back({outputs[peer].data(), outputs[peer].size()});
        }
        EP_CHECK(world.begin(member, {carried_kind::all_to_all, element_type::u8, reduce_op::sum, 0, longest}).ok());
        if (!world.finish(member, given, taken, call % 2 == 0 ? 1'000'000 : 0)) ++wrong;
        for (uint32_t peer = 0; peer < members; ++peer) {
          for (uint64_t i = 0; i < outputs[peer].size() && wrong == 0; ++i) if (outputs[peer][i] != block_byte(peer, member, call, i)) ++wrong;
        }
        // Other calls between them.
        if (call % 4 == 3 && wrong == 0) {
          std::vector<float> values(777);
          for (uint64_t i = 0; i < values.size(); ++i) values[i] = element(member, call, i);
          EP_CHECK(world.begin(member, {carried_kind::all_reduce, element_type::f32, reduce_op::sum, 0, values.size() * sizeof(float)}).ok());
          const carried_bytes both{reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(float)};
          if (!world.finish(member, {&both, 1}, {&both, 1}, 1'000'000)) ++wrong;
          for (uint64_t i = 0; i < values.size() && wrong == 0; ++i) if (values[i] != folded(world, call, i, reduce_op::sum)) ++wrong;
        }
      }
    });
    EP_CHECK_EQ(wrong.load(), 0);
  }
}

// All-gathers, broadcasts of any root, and reduce-scatters, in turn over the same places.
void test_gathers() {
  constexpr uint64_t lengths[] = {1, 17, 1000, area + 1, 2 * area + 77};
  for (const auto& sizes : worlds) {
    if (carrier_world::sum(sizes) == 2 || sizes == std::vector<uint32_t>{3, 3}) continue;
    carrier_world world(sizes, 30 + sizes[0], 1);
    const uint32_t members = world.members();
    std::atomic<int> wrong{0};
    world.run([&](uint32_t member) {
      uint64_t call = 0;
      for (const uint64_t length : is_unlike(sizes) ? std::span(lengths).first(4) : std::span(lengths)) {
        const uint64_t bytes = length * sizeof(float);
        const auto filled = [&](uint32_t of, uint64_t seed) { return elements(of, seed, length); };
        const int64_t turn_ns = call % 2 == 0 ? 1'000'000 : 0;
        std::vector<float> own = filled(member, call);
        std::vector<std::vector<float>> all(members, std::vector<float>(length, -1));
        std::vector<carried_bytes> taken;
        for (auto& one : all) taken.push_back(whole(one));
        const carried_bytes given = whole(own);
        EP_CHECK(world.begin(member, {carried_kind::all_gather, element_type::f32, reduce_op::sum, 0, bytes, 0}).ok());
        if (!world.finish(member, {&given, 1}, taken, turn_ns)) ++wrong;
        for (uint32_t peer = 0; peer < members && wrong == 0; ++peer) if (all[peer] != filled(peer, call)) ++wrong;

        const auto root = static_cast<uint32_t>((call * 5 + length) % members);
        std::vector<float> sent = member == root ? filled(root, call + 1) : std::vector<float>(length, -1);
        const carried_bytes one = whole(sent);
        EP_CHECK(world.begin(member, {carried_kind::broadcast, element_type::u8, reduce_op::sum, 0, bytes, root}).ok());
        const bool ended = member == root ? world.finish(member, {&one, 1}, {}, turn_ns) : world.finish(member, {}, {&one, 1}, turn_ns);
        if (!ended || (wrong == 0 && sent != filled(root, call + 1))) ++wrong;

        const reduce_op op = call % 3 == 0 ? reduce_op::avg : call % 3 == 1 ? reduce_op::sum : reduce_op::max;
        std::vector<std::vector<float>> blocks;
        std::vector<carried_bytes> scattered;
        for (uint32_t peer = 0; peer < members; ++peer) blocks.push_back(filled(member, call + 2 + peer));
        for (auto& block : blocks) scattered.push_back(whole(block));
        EP_CHECK(world.begin(member, {carried_kind::reduce_scatter, element_type::f32, op, 0, bytes, 0}).ok());
        if (!world.finish(member, scattered, {&given, 1}, turn_ns)) ++wrong;
        for (uint64_t i = 0; i < length && wrong == 0; ++i) if (own[i] != folded(world, call + 2 + member, i, op)) ++wrong;
        ++call;
      }
    });
    EP_CHECK_EQ(wrong.load(), 0);
    for (uint32_t member = 0; member < members; ++member) EP_CHECK_EQ(world.side(member).engine->violation(), std::string());
  }
}

// A root is no further ahead of those who are to take than there are places for: they hear of it from nobody else.
void test_ahead() {
  carrier_world world({1, 1}, 40);
  std::vector<uint8_t> bytes(3 * carrier_layout::area_bytes);
  const carried_bytes all{bytes.data(), bytes.size()};
  for (uint32_t member = 0; member < 2; ++member) EP_CHECK(world.begin(member, {carried_kind::broadcast, element_type::u8, reduce_op::sum, 0, bytes.size(), 0}).ok());
  for (int turn = 0; turn < 200; ++turn) EP_CHECK(world.carriers[0]->hold({&all, 1}, {}, 50'000) != carrier::state::over);
  EP_CHECK_EQ(world.carriers[0]->sent(), carrier_layout::most_places * (carrier_layout::piece_bytes / 2));
  // Nor told more than it waits for: who takes the last step says no more than that it has all.
  bool over[2] = {};
  EP_CHECK(soon([&] {
    over[0] = world.carriers[0]->hold({&all, 1}, {}, 50'000) == carrier::state::over;
    over[1] = world.carriers[1]->hold({}, {&all, 1}, 50'000) == carrier::state::over;
    return over[0] && over[1];
  }));
  const uint64_t steps = bytes.size() / (carrier_layout::piece_bytes / 2);
  EP_CHECK(world.side(1).engine->accepted(world.place.ranks[0]) <= steps - carrier_layout::most_places + 1);
}

} // namespace

int main() {
  test_blocks();
  test_gathers();
  test_ahead();
  return ep::check::finish();
}
