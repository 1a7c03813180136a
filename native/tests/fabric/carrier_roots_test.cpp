// Large calls to and from a root, and members that stand still: whoever is held up, nobody writes over what another one is still to take.
#include <array>
#include <atomic>

#include "carrier_world.hpp"

namespace {

using namespace ep;
using namespace ep::test;

// Reductions to any root, gathers and scatters, and broadcasts among them, in turn over the same places.
void test_roots() {
  constexpr uint64_t lengths[] = {1, 17, 1000, piece + 1, area / 2 + 77};
  for (const auto& sizes : worlds) {
    // Of as many hosts, the unlike ones have all that there is.
    if (!is_unlike(sizes) && carrier_world::sum(sizes) > 3) continue;
    carrier_world world(sizes, 80 + sizes[0], 1);
    world.network.set_room(sizes.size() == 3 ? 3 : 64);
    const uint32_t members = world.members();
    std::atomic<int> wrong{0};
    world.run([&](uint32_t member) {
      uint64_t call = 0;
      for (const uint64_t length : lengths) {
        const uint64_t bytes = length * sizeof(float);
        // Some with every root.
        for (uint32_t turn = 0; turn < (length == 17 ? members : 1); ++turn, ++call) {
          const auto root = static_cast<uint32_t>((length + call) % members);
          const bool roots = member == root;
          const auto filled = [&](uint32_t of, uint64_t seed) { return elements(of, seed, length); };
          const int64_t turn_ns = call % 2 == 0 ? 1'000'000 : 0;
          const reduce_op op = call % 3 == 0 ? reduce_op::avg : call % 3 == 1 ? reduce_op::sum : reduce_op::max;
          // Every other one into the root's own array.
          std::vector<float> values = filled(member, call), result(length, -1);
          const carried_bytes given = whole(values), taken = call % 2 == 0 ? given : whole(result);
          EP_CHECK(world.begin(member, {carried_kind::reduce, element_type::f32, op, 0, bytes, root}).ok());
          if (!world.finish(member, {&given, 1}, roots ? std::span(&taken, 1) : std::span<const carried_bytes>(), turn_ns)) ++wrong;
          const std::vector<float>& folds = call % 2 == 0 ? values : result;
          for (uint64_t i = 0; roots && i < length && wrong == 0; ++i) if (folds[i] != folded(world, call, i, op)) ++wrong;
          if (!roots && values != filled(member, call)) ++wrong;

          std::vector<float> mine = filled(member, call + 1);
          std::vector<std::vector<float>> all(members, std::vector<float>(length, -1));
          std::vector<carried_bytes> collected;
          for (auto& one : all) if (roots) collected.push_back(whole(one));
          const carried_bytes one = whole(mine);
          EP_CHECK(world.begin(member, {carried_kind::gather, element_type::f32, reduce_op::sum, 0, bytes, root}).ok());
          if (!world.finish(member, {&one, 1}, collected, turn_ns)) ++wrong;
          for (uint32_t peer = 0; roots && peer < members && wrong == 0; ++peer) if (all[peer] != filled(peer, call + 1)) ++wrong;

          // Back again, but for what each has been given.
          std::vector<float> got(length, -1);
          const carried_bytes dealt = whole(got);
          EP_CHECK(world.begin(member, {carried_kind::scatter, element_type::f32, reduce_op::sum, 0, bytes, root}).ok());
          if (!world.finish(member, collected, {&dealt, 1}, turn_ns)) ++wrong;
          if (wrong == 0 && got != filled(member, call + 1)) ++wrong;

          EP_CHECK(world.begin(member, {carried_kind::broadcast, element_type::f32, reduce_op::sum, 0, bytes, root}).ok());
          const bool ended = roots ? world.finish(member, {&dealt, 1}, {}, turn_ns) : world.finish(member, {}, {&dealt, 1}, turn_ns);
          if (!ended || (wrong == 0 && got != filled(root, call + 1))) ++wrong;
        }
      }
    });
    EP_CHECK_EQ(wrong.load(), 0);
    for (uint32_t member = 0; member < members; ++member) EP_CHECK_EQ(world.side(member).engine->violation(), std::string());
  }
}

// What leaves each member in calls with a root, which is on the second host, in one step and in many.
void test_root_traffic() {
  carrier_world world({3, 2, 1}, 71);
  constexpr uint32_t root = 4;
  const uint32_t members = world.members();
  for (const uint64_t length : {uint64_t{64 * 100}, 4 * carrier_layout::area_bytes}) {
    std::array<uint64_t, 6> reduced{}, gathered{}, scattered{};
    world.run([&](uint32_t member) {
      carrier& own = *world.carriers[member];
      std::vector<std::vector<uint8_t>> all(members, std::vector<uint8_t>(length, 1));
      std::vector<carried_bytes> arrays;
      for (auto& one : all) arrays.push_back({one.data(), length});
      const std::span<const carried_bytes> many(arrays), one = many.first(1), none;
      EP_CHECK(world.begin(member, {carried_kind::reduce, element_type::u8, reduce_op::sum, 0, length, root}).ok());
      EP_CHECK(world.finish(member, one, member == root ? many.subspan(1, 1) : none, 1'000'000));
      reduced[member] = own.sent();
      EP_CHECK(world.begin(member, {carried_kind::gather, element_type::u8, reduce_op::sum, 0, length, root}).ok());
      EP_CHECK(world.finish(member, one, member == root ? many : none, 1'000'000));
      gathered[member] = own.sent();
      EP_CHECK(world.begin(member, {carried_kind::scatter, element_type::u8, reduce_op::sum, 0, length, root}).ok());
      EP_CHECK(world.finish(member, member == root ? many : none, one, 1'000'000));
      scattered[member] = own.sent();
    });
    EP_CHECK(reduced == (std::array<uint64_t, 6>{length, 0, 0, 0, 0, length}));
    EP_CHECK(gathered == (std::array<uint64_t, 6>{length, length, length, 0, 0, length}));
    EP_CHECK(scattered == (std::array<uint64_t, 6>{0, 0, 0, 0, 4 * length, 0}));
  }
}

// Of a rank of each of two hosts, one of which stands still: the other sends as much as there are places for, and no more, and is not over before that one has what it is to have.
void check_ahead(carried_kind kind, uint32_t root, uint32_t sender, uint64_t step, uint64_t length) {
  carrier_world world({1, 1}, 41);
  std::vector<std::vector<uint8_t>> bytes(4, std::vector<uint8_t>(length));
  std::vector<carried_bytes> arrays;
  for (auto& one : bytes) arrays.push_back({one.data(), one.size()});
  const std::span<const carried_bytes> all(arrays), none;
  const auto turn = [&](uint32_t member) {
    const bool is_root = member == root;
    const auto given = all.subspan(2 * member, 1);
    const auto inputs = kind == carried_kind::scatter ? (is_root ? all.first(2) : none) : given;
    const auto outputs = kind == carried_kind::scatter ? all.subspan(3, 1) : !is_root ? none : kind == carried_kind::gather ? all.subspan(1, 2) : all.subspan(1, 1);
    return world.carriers[member]->hold(inputs, outputs, 50'000) == carrier::state::over;
  };
  for (uint32_t member = 0; member < 2; ++member) EP_CHECK(world.begin(member, {kind, element_type::u8, reduce_op::sum, 0, bytes[0].size(), root}).ok());
  for (int count = 0; count < 200; ++count) EP_CHECK(!turn(sender));
  EP_CHECK_EQ(world.carriers[sender]->sent(), std::min(length, carrier_layout::most_places * step));
  bool over[2] = {};
  EP_CHECK(soon([&] {
    for (uint32_t member = 0; member < 2; ++member) over[member] = turn(member) || over[member];
    return over[0] && over[1];
  }));
  // And hears no more than it waits for, beside that the other has all.
  const uint32_t other = 1 - sender;
  EP_CHECK(world.side(other).engine->accepted(world.place.ranks[sender]) <= std::max(length / step, carrier_layout::most_places) - carrier_layout::most_places + 1);
}

void test_roots_ahead() {
  for (const uint64_t length : {uint64_t{1000}, 3 * carrier_layout::area_bytes}) {
    check_ahead(carried_kind::reduce, 1, 0, carrier_layout::piece_bytes, length);
    check_ahead(carried_kind::gather, 1, 0, carrier_layout::piece_bytes / 2, length);
    check_ahead(carried_kind::scatter, 0, 0, carrier_layout::piece_bytes / 2, length);
  }
}

// One that stands still for a while again and again, having given more than it could take, since other hosts had stood still before: nothing that it is still to take is written over.
void check_slow(const std::vector<uint32_t>& sizes, carried_kind kind, uint32_t root, uint32_t slow) {
  carrier_world world(sizes, 90);
  const uint32_t members = world.members();
  constexpr uint64_t length = 3 * area;
  std::vector<std::vector<std::vector<float>>> given(members), taken(members);
  std::vector<std::vector<carried_bytes>> inputs(members), outputs(members);
  const bool is_gather = kind == carried_kind::gather || kind == carried_kind::all_gather;
  for (uint32_t member = 0; member < members; ++member) {
    const uint32_t gives = kind != carried_kind::scatter ? 1 : member == root ? members : 0;
    const uint32_t takes = (kind == carried_kind::gather || kind == carried_kind::reduce) && member != root ? 0 : is_gather ? members : 1;
    given[member].assign(gives, std::vector<float>(length));
    taken[member].assign(takes, std::vector<float>(length, -1));
    for (uint32_t of = 0; of < gives; ++of) for (uint64_t i = 0; i < length; ++i) given[member][of][i] = element(gives == 1 ? member : of, 3, i);
    for (auto& one : given[member]) inputs[member].push_back({reinterpret_cast<uint8_t*>(one.data()), length * sizeof(float)});
    for (auto& one : taken[member]) outputs[member].push_back({reinterpret_cast<uint8_t*>(one.data()), length * sizeof(float)});
    EP_CHECK(world.begin(member, {kind, element_type::f32, reduce_op::sum, 0, length * sizeof(float), root}).ok());
  }
  uint64_t turns = 0;
  EP_CHECK(soon([&] {
    bool over = true;
    for (uint32_t member = 0; member < members; ++member) {
      const uint64_t phase = turns / 40 % 3;
      const bool is_far = world.host_of(member) != world.host_of(slow);
      if ((phase == 0 && is_far) || (phase == 1 && member == slow)) over = false;
      else over = world.carriers[member]->advance(inputs[member], outputs[member], 0) == carrier::state::over && over;
    }
    ++turns;
    return over;
  }, 60));
  uint64_t wrong = 0;
  for (uint32_t member = 0; member < members; ++member) {
    for (uint32_t of = 0; of < taken[member].size(); ++of) {
      for (uint64_t i = 0; i < length; ++i) {
        const float expected = is_gather ? element(of, 3, i) : kind == carried_kind::scatter ? element(member, 3, i) : folded(world, 3, i, reduce_op::sum);
        if (taken[member][of][i] != expected) ++wrong;
      }
    }
  }
  EP_CHECK_EQ(wrong, uint64_t{0});
}

void test_slow() {
  for (const auto kind : {carried_kind::all_reduce, carried_kind::all_gather, carried_kind::reduce, carried_kind::gather, carried_kind::scatter}) {
    for (uint32_t slow = 0; slow < 4; ++slow) check_slow({3, 1}, kind, 1, slow);
  }
  // Of more than two hosts, and one without a share.
  check_slow({1, 2, 1}, carried_kind::all_reduce, 0, 2);
  check_slow({1, 2, 1}, carried_kind::reduce, 2, 2);
}

} // namespace

int main() {
  test_roots();
  test_root_traffic();
  test_roots_ahead();
  test_slow();
  return ep::check::finish();
}
