// Calls that members prepare before they know that all make them: what others do not make, or make otherwise, costs nobody an element of what is carried behind it.
#include <atomic>
#include <functional>

#include "carrier_world.hpp"

namespace {

using namespace ep;
using namespace ep::test;

// Bytes from one member to another.
using lengths = std::function<uint64_t(uint32_t from, uint32_t to)>;

uint8_t block_byte(uint32_t from, uint32_t to, uint64_t call, uint64_t i) { return pattern(i, from * 16 + to + call * 3); }

// What one member gives and takes in an all-to-all.
struct exchanged {
  std::vector<std::vector<uint8_t>> inputs, outputs;
  std::vector<carried_bytes> given, taken;
  uint32_t member;
  uint64_t call;

  exchanged(uint32_t members, uint32_t self, uint64_t number, const lengths& of) : inputs(members), outputs(members), member(self), call(number) {
    for (uint32_t peer = 0; peer < members; ++peer) {
      inputs[peer].resize(of(member, peer));
      for (uint64_t i = 0; i < inputs[peer].size(); ++i) inputs[peer][i] = block_byte(member, peer, call, i);
      outputs[peer].assign(of(peer, member), 0xee);
      given.push_back({inputs[peer].data(), inputs[peer].size()});
      taken.push_back({outputs[peer].data(), outputs[peer].size()});
    }
  }
  // Of what this member gives and takes.
  uint64_t longest() const {
    uint64_t most = 0;
    for (const auto* list : {&given, &taken}) for (const carried_bytes& one : *list) most = std::max(most, one.bytes);
    return most;
  }
  bool right() const {
    for (uint32_t peer = 0; peer < outputs.size(); ++peer) {
      for (uint64_t i = 0; i < outputs[peer].size(); ++i) if (outputs[peer][i] != block_byte(peer, member, call, i)) return false;
    }
    return true;
  }
  bool untouched() const {
    return std::ranges::all_of(outputs, [](const std::vector<uint8_t>& one) { return std::ranges::all_of(one, [](uint8_t value) { return value == 0xee; }); });
  }
};

carried_call all_to_all(uint64_t longest) { return {carried_kind::all_to_all, element_type::u8, reduce_op::sum, 0, longest}; }
carried_call all_reduce(uint64_t bytes) { return {carried_kind::all_reduce, element_type::f32, reduce_op::sum, 0, bytes}; }

uint64_t longest_of(uint32_t members, const lengths& of) {
  uint64_t most = 0;
  for (uint32_t from = 0; from < members; ++from) for (uint32_t to = 0; to < members; ++to) most = std::max(most, of(from, to));
  return most;
}

// Until all know that all make the call nothing is written to anybody's arrays, though all that members send at first has left.
void test_untouched() {
  carrier_world world({2, 2}, 6);
  std::vector<std::vector<float>> values;
  for (uint32_t member = 0; member < 4; ++member) values.push_back(elements(member, 1, area));
  const auto prepare_all = [&](auto&& arrays) {
    for (int turn = 0; turn < 200; ++turn) for (uint32_t member = 0; member < 4; ++member) arrays(member, [&](auto given, auto taken) { world.carriers[member]->prepare(given, taken); });
  };
  for (uint32_t member = 0; member < 4; ++member) EP_CHECK(world.carriers[member]->begin(all_reduce(area * sizeof(float)), 1, false).ok());
  prepare_all([&](uint32_t member, auto&& run) {
    const carried_bytes both = whole(values[member]);
    run(std::span(&both, 1), std::span(&both, 1));
  });
  for (uint32_t member = 0; member < 4; ++member) {
    EP_CHECK(values[member] == elements(member, 1, area));
    EP_CHECK(world.carriers[member]->sent() > 0);
  }
  world.run([&](uint32_t member) {
    const carried_bytes both = whole(values[member]);
    EP_CHECK(world.finish(member, {&both, 1}, {&both, 1}, 1'000'000));
  });
  for (uint64_t i = 0; i < area; ++i) if (values[i % 4][i] != folded(world, 1, i, reduce_op::sum)) EP_CHECK_EQ(values[i % 4][i], folded(world, 1, i, reduce_op::sum));

  std::vector<exchanged> blocks;
  for (uint32_t member = 0; member < 4; ++member) blocks.emplace_back(4, member, 2, [](uint32_t from, uint32_t to) { return 1000 + from * 10 + to; });
  for (uint32_t member = 0; member < 4; ++member) EP_CHECK(world.carriers[member]->begin(all_to_all(1033), 2, false).ok());
  prepare_all([&](uint32_t member, auto&& run) { run(std::span(blocks[member].given), std::span(blocks[member].taken)); });
  for (uint32_t member = 0; member < 4; ++member) {
    EP_CHECK(blocks[member].untouched());
    EP_CHECK_EQ(world.carriers[member]->sent(), member < 2 ? 2 * (1000 + member * 10) + 5 : 2 * (1000 + member * 10) + 1);
  }
  world.run([&](uint32_t member) { EP_CHECK(world.finish(member, blocks[member].given, blocks[member].taken, 1'000'000)); });
  for (const exchanged& one : blocks) EP_CHECK(one.right());
}

// All-to-alls that some members prepare and nobody carries, between calls of all kinds that all carry.
void test_in_vain() {
  for (const auto& sizes : std::vector<std::vector<uint32_t>>{{2, 2}, {1, 1}, {1, 2}, {2, 2, 2}, {3, 1, 2}}) {
    for (uint64_t seed = 1; seed <= 2; ++seed) {
      carrier_world world(sizes, 100 + seed);
      world.network.set_room(seed);
      const uint32_t members = world.members();
      std::atomic<int> wrong{0};
      world.run([&](uint32_t member) {
        carrier& own = *world.carriers[member];
        uint64_t number = 0;
        for (uint64_t call = 0; call < 15 && wrong == 0; ++call) {
          ++number;
          // Of one length on each rank, and of another on others.
          const exchanged vain(members, member, number, [&](uint32_t, uint32_t) { return 500 + member * 64 + call; });
          if ((call + member + seed) % 3 != 0) {
            EP_CHECK(own.begin(all_to_all(vain.longest()), number, false).ok());
            for (uint64_t turn = 0; turn < (call + member) % 5; ++turn) own.prepare(vain.given, vain.taken);
          }
          ++number;
          const bool sure = (call + member) % 2 == 0;
          const auto before = [&](std::span<const carried_bytes> given, std::span<const carried_bytes> taken) {
            for (uint64_t turn = 0; !sure && turn < call % 7; ++turn) own.prepare(given, taken);
          };
          if (call % 3 == 0) {
            std::vector<float> values = elements(member, call, call % 2 == 0 ? 300 : area + 5);
            const carried_bytes both = whole(values);
            EP_CHECK(own.begin(all_reduce(both.bytes), number, sure).ok());
            before({&both, 1}, {&both, 1});
            if (!world.finish(member, {&both, 1}, {&both, 1}, 500'000)) ++wrong;
            for (uint64_t i = member; i < values.size(); i += members) if (values[i] != folded(world, call, i, reduce_op::sum)) ++wrong;
          } else {
            // In one step, and in several.
            const lengths of = [&](uint32_t from, uint32_t to) { return (from * 7 + to * 3 + call) % (call % 3 == 1 ? 900 : 300'000) + (call % 3 == 1 ? 100 : 250'000); };
            exchanged blocks(members, member, number, of);
            EP_CHECK(own.begin(all_to_all(longest_of(members, of)), number, sure).ok());
            before(blocks.given, blocks.taken);
            if (!world.finish(member, blocks.given, blocks.taken, 500'000) || !blocks.right()) ++wrong;
          }
        }
      });
      EP_CHECK_EQ(wrong.load(), 0);
      for (uint32_t member = 0; member < members; ++member) EP_CHECK_EQ(world.side(member).engine->violation(), std::string());
    }
  }
}

// Whoever has prepared one in vain puts nothing more before that has landed.
void test_held_up() {
  carrier_world world({1, 1}, 8);
  carrier& one = *world.carriers[0];
  world.network.hold_writes(true);
  const exchanged vain(2, 0, 1, [](uint32_t, uint32_t) { return 5000; });
  EP_CHECK(one.begin(all_to_all(5000), 1, false).ok());
  one.prepare(vain.given, vain.taken);
  EP_CHECK(one.sent() == 5000);
  std::vector<std::vector<float>> values{elements(0, 2, 300), elements(1, 2, 300)};
  for (uint32_t member = 0; member < 2; ++member) EP_CHECK(world.carriers[member]->begin(all_reduce(1200), 2).ok());
  const uint64_t before = world.side(0).engine->accepted(world.place.ranks[1]);
  const auto turn = [&](uint32_t member) {
    const carried_bytes both = whole(values[member]);
    return world.carriers[member]->hold({&both, 1}, {&both, 1}, 100'000) == carrier::state::over;
  };
  for (int turns = 0; turns < 50; ++turns) EP_CHECK(!turn(0));
  EP_CHECK_EQ(world.side(0).engine->accepted(world.place.ranks[1]), before);
  world.network.hold_writes(false);
  bool over[2] = {};
  EP_CHECK(soon([&] {
    for (uint32_t member = 0; member < 2; ++member) over[member] = turn(member) || over[member];
    return over[0] && over[1];
  }));
  for (const auto& mine : values) for (uint64_t i = 0; i < 300; ++i) if (mine[i] != folded(world, 2, i, reduce_op::sum)) EP_CHECK_EQ(mine[i], folded(world, 2, i, reduce_op::sum));
}

// The same of one that is prepared anew, since another member's arrays are longer.
void test_held_up_again() {
  carrier_world world({1, 1, 1}, 12);
  carrier& one = *world.carriers[0];
  world.network.hold_writes(true);
  const lengths of = [](uint32_t from, uint32_t to) -> uint64_t { return from == 0 || to == 0 ? 5000 : 700'000; };
  std::vector<exchanged> blocks;
  for (uint32_t member = 0; member < 3; ++member) blocks.emplace_back(3, member, 1, of);
  EP_CHECK(one.begin(all_to_all(blocks[0].longest()), 1, false).ok());
  one.prepare(blocks[0].given, blocks[0].taken);
  EP_CHECK_EQ(one.sent(), 10'000u);
  one.lengthen(700'000);
  for (uint32_t member = 1; member < 3; ++member) EP_CHECK(world.carriers[member]->begin(all_to_all(700'000), 1).ok());
  const auto turn = [&](uint32_t member) { return world.carriers[member]->hold(blocks[member].given, blocks[member].taken, 100'000) == carrier::state::over; };
  for (int turns = 0; turns < 50; ++turns) EP_CHECK(!turn(0));
  EP_CHECK_EQ(one.sent(), 10'000u);
  world.network.hold_writes(false);
  bool over[3] = {};
  EP_CHECK(soon([&] {
    for (uint32_t member = 0; member < 3; ++member) over[member] = turn(member) || over[member];
    return over[0] && over[1] && over[2];
  }));
  for (const exchanged& all : blocks) EP_CHECK(all.right());
}

// Members whose own arrays are short, and who learn that others' are longer: in one step as well, or in several.
void test_lengthened() {
  for (const auto& sizes : std::vector<std::vector<uint32_t>>{{2, 2}, {1, 2}, {2, 1, 1}}) {
    carrier_world world(sizes, 9);
    const uint32_t members = world.members();
    std::atomic<int> wrong{0};
    world.run([&](uint32_t member) {
      carrier& own = *world.carriers[member];
      for (uint64_t call = 1; call <= 12 && wrong == 0; ++call) {
        // The first member, and the last one in some calls, give and take little, and hear late that others do not.
        const lengths of = [&](uint32_t from, uint32_t to) -> uint64_t {
          const auto is_short = [&](uint32_t one) { return one == 0 || (call % 4 == 3 && one == members - 1); };
          if (is_short(from) || is_short(to)) return 400;
          return call % 2 == 0 ? 20'000 + call : 300'000 + call * 1000;
        };
        exchanged blocks(members, member, call, of);
        EP_CHECK(own.begin(all_to_all(blocks.longest()), call, false).ok());
        for (uint64_t turn = 0; turn < (call + member) % 4; ++turn) own.prepare(blocks.given, blocks.taken);
        // Others go on meanwhile.
        if (blocks.longest() == 400) std::this_thread::sleep_for(std::chrono::milliseconds(40));
        own.lengthen(longest_of(members, of));
        EP_CHECK(own.fits(blocks.given, blocks.taken));
        if (!world.finish(member, blocks.given, blocks.taken, 500'000) || !blocks.right()) ++wrong;
      }
    });
    EP_CHECK_EQ(wrong.load(), 0);
  }
}

// What takes the place of another, and what does not.
void test_begins() {
  carrier_world world({1, 1}, 10);
  carrier& one = *world.carriers[0];
  EP_CHECK(one.begin(all_reduce(400), 5, false).ok());
  EP_CHECK(!one.begin(all_reduce(400), 5).ok());
  EP_CHECK(!one.begin(all_reduce(400), 4).ok());
  EP_CHECK(!one.begin(all_reduce(400), carrier_layout::most_calls).ok());
  EP_CHECK(one.begin(all_reduce(400), 6, false).ok());
  std::vector<float> values(100);
  const carried_bytes both = whole(values);
  one.hold({&both, 1}, {&both, 1}, 0);
  auto refused = one.begin(all_reduce(400), 7, false);
  EP_CHECK(!refused.ok() && refused.why().status == EP_STATUS_BUSY);
  // Nor is anything prepared of what is known.
  EP_CHECK(!one.prepare({&both, 1}, {&both, 1}));
}

} // namespace

int main() {
  test_untouched();
  test_in_vain();
  test_held_up();
  test_held_up_again();
  test_lengthened();
  test_begins();
  return ep::check::finish();
}
