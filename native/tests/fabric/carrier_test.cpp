// Large calls of several hosts' ranks, over the engine and a network of the tests that keeps no order: every element is what the order of the fold says, whoever is ahead of whom.
#include "carrier.hpp"

#include <array>
#include <atomic>

#include "carrier_world.hpp"
#include "ep/device/number.h"
#include "host_fold.hpp"

namespace {

using namespace ep;
using namespace ep::test;

void reduce_calls(carrier_world& world, std::span<const uint64_t> lengths, uint64_t first, bool in_place, int64_t turn_ns) {
  std::atomic<int> wrong{0};
  world.run([&](uint32_t member) {
    uint64_t call = first;
    for (const uint64_t length : lengths) {
      const reduce_op op = call % 3 == 0 ? reduce_op::sum : call % 3 == 1 ? reduce_op::avg : reduce_op::max;
      std::vector<float> input(length), other(length, -1);
      std::vector<float>& output = in_place ? input : other;
      for (uint64_t i = 0; i < length; ++i) input[i] = element(member, call, i);
      EP_CHECK(world.begin(member, {carried_kind::all_reduce, element_type::f32, op, 0, length * sizeof(float)}).ok());
      const carried_bytes given{reinterpret_cast<uint8_t*>(input.data()), length * sizeof(float)};
      const carried_bytes taken{reinterpret_cast<uint8_t*>(output.data()), length * sizeof(float)};
      if (!world.finish(member, {&given, 1}, {&taken, 1}, turn_ns)) ++wrong;
      // Of long ones each member looks at others.
      const uint64_t stride = length > 5000 ? world.members() : 1;
      for (uint64_t i = stride == 1 ? 0 : member; i < length && wrong == 0; i += stride) if (output[i] != folded(world, call, i, op)) ++wrong;
      ++call;
    }
  });
  EP_CHECK_EQ(wrong.load(), 0);
}

void test_reductions() {
  // Less than a share, steps that end within one, all places at once, more than there are places for.
  const uint64_t lengths[] = {0, 1, 15, 16, 17, 1000, piece - 1, piece, piece + 1, 3 * piece + 5, area - 1, area, area + 1, 11 * piece + piece / 3};
  for (const auto& sizes : worlds) {
    carrier_world world(sizes, sizes[0]);
    reduce_calls(world, is_unlike(sizes) ? std::span(lengths).first(10) : std::span(lengths), 0, sizes.size() % 2 == 1, 1'000'000);
    world.network.set_room(3);
    reduce_calls(world, std::span(lengths).first(10), 50, sizes.size() % 2 == 0, sizes[0] == 2 ? 0 : 200'000);
    for (uint32_t member = 0; member < world.members(); ++member) EP_CHECK_EQ(world.side(member).engine->violation(), std::string());
  }
}

// Of several NaNs the first one's payload stays, that of the first host's member: which host a member is on decides nothing else, as two of anything else fold alike in either order.
void test_order(uint32_t hosts) {
  carrier_world world(std::vector<uint32_t>(hosts, 1), 20);
  std::vector<std::vector<uint32_t>> values(hosts, std::vector<uint32_t>(100));
  for (uint32_t member = 0; member < hosts; ++member) for (uint32_t i = 0; i < 100; ++i) values[member][i] = 0x7fc00000 + 1000 * (member + 1) + i;
  world.run([&](uint32_t member) {
    EP_CHECK(world.begin(member, {carried_kind::all_reduce, element_type::f32, reduce_op::max, 0, 400}).ok());
    const carried_bytes both{reinterpret_cast<uint8_t*>(values[member].data()), 400};
    EP_CHECK(world.finish(member, {&both, 1}, {&both, 1}, 1'000'000));
  });
  for (const auto& found : values) for (uint32_t i = 0; i < 100; ++i) EP_CHECK_EQ(found[i], 0x7fc00000u + 1000 + i);
}

// f16 and bf16: as documented, in single precision until all hosts are folded, and rounded once.
template <class Number> uint16_t folded_half(const carrier_world& world, uint64_t call, uint64_t i, reduce_op op) {
  const auto both = [op](float one, float other) { return op == reduce_op::product ? one * other : one + other; };
  const auto value = [&](uint32_t member) { return Number::load(Number::store(element(member, call, i) * 0.01f)); };
  float all = 0;
  for (uint32_t host = 0; host < world.hosts(); ++host) {
    float here = value(world.first_of(host));
    for (uint32_t mate = world.first_of(host) + 1; mate < world.first_of(host + 1); ++mate) here = both(here, value(mate));
    all = host == 0 ? here : both(all, here);
  }
  return Number::store(op == reduce_op::avg ? all / static_cast<float>(world.members()) : all);
}

template <class Number> void half_calls(carrier_world& world, element_type type, std::span<const uint64_t> lengths) {
  std::atomic<int> wrong{0};
  world.run([&](uint32_t member) {
    uint64_t call = 0;
    for (const uint64_t length : lengths) {
      const reduce_op op = call % 3 == 0 ? reduce_op::sum : call % 3 == 1 ? reduce_op::avg : reduce_op::product;
      const uint64_t bytes = length * sizeof(uint16_t);
      const auto filled = [&](uint64_t seed) {
        std::vector<uint16_t> values(length);
        for (uint64_t i = 0; i < length; ++i) values[i] = Number::store(element(member, seed, i) * 0.01f);
        return values;
      };
      const auto whole = [&](std::vector<uint16_t>& values) { return carried_bytes{reinterpret_cast<uint8_t*>(values.data()), bytes}; };
      const uint64_t stride = length > 5000 ? world.members() : 1;
      std::vector<uint16_t> own = filled(call);
      const carried_bytes both = whole(own);
      EP_CHECK(world.begin(member, {carried_kind::all_reduce, type, op, 0, bytes}).ok());
      if (!world.finish(member, {&both, 1}, {&both, 1}, 500'000)) ++wrong;
      for (uint64_t i = stride == 1 ? 0 : member; i < length && wrong == 0; i += stride) if (own[i] != folded_half<Number>(world, call, i, op)) ++wrong;
      std::vector<std::vector<uint16_t>> blocks;
      std::vector<carried_bytes> given;
      for (uint32_t peer = 0; peer < world.members(); ++peer) blocks.push_back(filled(call + 1 + peer));
      for (auto& block : blocks) given.push_back(whole(block));
      EP_CHECK(world.begin(member, {carried_kind::reduce_scatter, type, op, 0, bytes}).ok());
      if (!world.finish(member, given, {&both, 1}, 500'000)) ++wrong;
      for (uint64_t i = 0; i < length && wrong == 0; i += stride) if (own[i] != folded_half<Number>(world, call + 1 + member, i, op)) ++wrong;
      own = filled(call + 2);
      const auto root = static_cast<uint32_t>((call * 3 + length) % world.members());
      const carried_bytes last = whole(own);
      EP_CHECK(world.begin(member, {carried_kind::reduce, type, op, 0, bytes, root}).ok());
      if (!world.finish(member, {&last, 1}, member == root ? std::span(&last, 1) : std::span<const carried_bytes>(), 500'000)) ++wrong;
      for (uint64_t i = 0; member == root && i < length && wrong == 0; i += stride) if (own[i] != folded_half<Number>(world, call + 2, i, op)) ++wrong;
      ++call;
    }
  });
  EP_CHECK_EQ(wrong.load(), 0);
}

void test_halves() {
  constexpr uint64_t lengths[] = {1, 33, 5000, 2 * piece + 3, 2 * area + 1001};
  for (const auto& sizes : worlds) {
    if (sizes == std::vector<uint32_t>{3, 3}) continue;
    carrier_world world(sizes, 50 + sizes[0]);
    const auto some = is_unlike(sizes) ? std::span(lengths).first(4) : std::span(lengths);
    half_calls<number_bf16>(world, element_type::bf16, some);
    half_calls<number_f16>(world, element_type::f16, some);
  }
  // Parts that are no whole lines, of shares that are as long as can be, in one step and in several.
  for (const uint32_t hosts : {5u, 6u}) {
    carrier_world world(std::vector<uint32_t>(hosts, 1), 60 + hosts);
    half_calls<number_bf16>(world, element_type::bf16, std::array<uint64_t, 3>{130'970, 131'062, 300'000});
  }
}

// One that does not come holds all others up, and nobody says that the call is over before all have their data.
void test_missing() {
  carrier_world world({2, 2}, 7);
  std::vector<std::vector<float>> values(4, std::vector<float>(5 * piece, 1));
  const auto array = [&](uint32_t member) { return carried_bytes{reinterpret_cast<uint8_t*>(values[member].data()), values[member].size() * sizeof(float)}; };
  const carried_call call{carried_kind::all_reduce, element_type::f32, reduce_op::sum, 0, values[0].size() * sizeof(float)};
  for (uint32_t member = 0; member < 4; ++member) EP_CHECK(world.begin(member, call).ok());
  bool over = false;
  const auto turns = [&](std::initializer_list<uint32_t> members, int count) {
    for (int turn = 0; turn < count; ++turn) {
      for (const uint32_t member : members) {
        const carried_bytes own = array(member);
        over = world.carriers[member]->hold({&own, 1}, {&own, 1}, 50'000) == carrier::state::over || over;
      }
    }
  };
  turns({0, 1, 2}, 100);
  EP_CHECK(!over);
  // A second call does not begin over it.
  EP_CHECK(!world.begin(0, call).ok());
  EP_CHECK(soon([&] {
    turns({0, 1, 2, 3}, 1);
    return over;
  }));
  EP_CHECK(soon([&] {
    bool all = true;
    for (uint32_t member = 0; member < 4; ++member) {
      const carried_bytes own = array(member);
      all = world.carriers[member]->advance({&own, 1}, {&own, 1}) == carrier::state::over && all;
    }
    return all;
  }));
  for (const auto& one : values) for (const float value : one) if (value != 4) EP_CHECK_EQ(value, 4.0f);
}

// A turn whose time is up ends with the step that it is in.
void test_turns() {
  carrier_world world({1, 1}, 8);
  carrier& one = *world.carriers[0];
  std::vector<uint8_t> bytes(carrier_layout::area_bytes + 1);
  const carried_bytes own{bytes.data(), bytes.size()};
  EP_CHECK(one.begin({carried_kind::all_reduce, element_type::u8, reduce_op::sum, 0, bytes.size()}, 1).ok());
  for (uint64_t step = 1; step <= carrier_layout::most_places / 2; ++step) {
    EP_CHECK(one.hold({&own, 1}, {&own, 1}, 0) == carrier::state::moved);
    EP_CHECK_EQ(one.sent(), step * carrier_layout::piece_bytes);
  }
}

// What fits the places goes in one step.
void test_one_step() {
  carrier_world world({1, 1}, 9);
  carrier& one = *world.carriers[0];
  std::vector<uint8_t> bytes(carrier_layout::area_bytes);
  const carried_bytes own{bytes.data(), bytes.size()};
  EP_CHECK(one.begin({carried_kind::all_reduce, element_type::u8, reduce_op::sum, 0, bytes.size()}, 1).ok());
  EP_CHECK(one.hold({&own, 1}, {&own, 1}, 0) == carrier::state::moved);
  EP_CHECK_EQ(one.sent(), bytes.size());
}

// A rank that has a core beside its own leaves what is long to the engine's thread; others wait for it anyway.
void test_core_beside() {
  for (const int32_t on_host : {1, 64}) {
    carrier_world world({1, 1}, 10, 0, on_host);
    const fabric_side& side = world.side(0);
    world.network.set_room(0);
    std::vector<uint8_t> bytes(carrier_layout::area_bytes, 1);
    const carried_bytes own{bytes.data(), bytes.size()};
    EP_CHECK(world.begin(0, {carried_kind::all_reduce, element_type::u8, reduce_op::sum, 0, bytes.size()}).ok());
    EP_CHECK(world.carriers[0]->hold({&own, 1}, {&own, 1}, 0) == carrier::state::moved);
    EP_CHECK_EQ(side.engine->heavy(), side.context->policy().room_beside);
    world.network.set_room(1);
    std::thread other([&] {
      std::vector<uint8_t> theirs(bytes.size(), 2);
      const carried_bytes array{theirs.data(), theirs.size()};
      EP_CHECK(world.begin(1, {carried_kind::all_reduce, element_type::u8, reduce_op::sum, 0, theirs.size()}).ok());
      EP_CHECK(world.finish(1, {&array, 1}, {&array, 1}, 500'000));
      EP_CHECK(std::ranges::all_of(theirs, [](uint8_t value) { return value == 3; }));
    });
    EP_CHECK(world.finish(0, {&own, 1}, {&own, 1}, 500'000));
    other.join();
    EP_CHECK(std::ranges::all_of(bytes, [](uint8_t value) { return value == 3; }));
    EP_CHECK(soon([&] { return !side.engine->heavy(); }));
    const uint64_t lengths[] = {16, piece, area + 1, 5 * piece};
    reduce_calls(world, lengths, 1, true, 200'000);
    EP_CHECK_EQ(side.engine->violation(), std::string());
  }
}

// Of more than two hosts, what leaves a member is twice its share but for its own part of it, whatever number of hosts there are.
void test_traffic() {
  for (const uint32_t hosts : {2u, 3u, 4u}) {
    carrier_world world(std::vector<uint32_t>(hosts, 2), hosts);
    constexpr uint64_t length = 3 * 4 * 64 * 100;
    world.run([&](uint32_t member) {
      std::vector<uint8_t> bytes(2 * length, 1);
      const carried_bytes both{bytes.data(), bytes.size()};
      EP_CHECK(world.begin(member, {carried_kind::all_reduce, element_type::u8, reduce_op::sum, 0, bytes.size()}).ok());
      EP_CHECK(world.finish(member, {&both, 1}, {&both, 1}, 1'000'000));
      EP_CHECK_EQ(world.carriers[member]->sent(), hosts == 2 ? length : 2 * (hosts - 1) * (length / hosts));
      for (const uint8_t value : bytes) if (value != 2 * hosts) EP_CHECK_EQ(value, 2 * hosts);
    });
  }
}

// Of unlike hosts, as many members of each as the smallest has send what their host has come to, and whoever gives or takes something alone sends or gets it once.
void test_unlike_traffic() {
  carrier_world world({3, 1, 2}, 70);
  constexpr uint64_t length = 3 * 64 * 100;
  const uint32_t members = world.members();
  std::array<uint64_t, 6> reduced{}, gathered{}, scattered{};
  world.run([&](uint32_t member) {
    carrier& own = *world.carriers[member];
    std::vector<std::vector<uint8_t>> all(members, std::vector<uint8_t>(length, 1)), taken = all;
    std::vector<carried_bytes> inputs, outputs;
    for (auto& one : all) inputs.push_back({one.data(), length});
    for (auto& one : taken) outputs.push_back({one.data(), length});
    const std::span<const carried_bytes> given(inputs), got(outputs);
    EP_CHECK(world.begin(member, {carried_kind::all_reduce, element_type::u8, reduce_op::sum, 0, length}).ok());
    EP_CHECK(world.finish(member, given.first(1), got.first(1), 1'000'000));
    for (const uint8_t value : taken[0]) if (value != members) EP_CHECK_EQ(value, members);
    reduced[member] = own.sent();
    EP_CHECK(world.begin(member, {carried_kind::all_gather, element_type::u8, reduce_op::sum, 0, length}).ok());
    EP_CHECK(world.finish(member, given.first(1), got, 1'000'000));
    gathered[member] = own.sent();
    EP_CHECK(world.begin(member, {carried_kind::reduce_scatter, element_type::u8, reduce_op::sum, 0, length}).ok());
    EP_CHECK(world.finish(member, given, got.first(1), 1'000'000));
    scattered[member] = own.sent();
  });
  const uint64_t share = 4 * length / 3;
  EP_CHECK(reduced == (std::array<uint64_t, 6>{share, 0, 0, share, share, 0}));
  EP_CHECK(gathered == (std::array<uint64_t, 6>{2 * length, 2 * length, 2 * length, 2 * length, 2 * length, 2 * length}));
  // Members that it folds for, on other hosts: those of its place modulo the members of its own.
  EP_CHECK(scattered == (std::array<uint64_t, 6>{2 * length, length, 0, 5 * length, 3 * length, length}));
}

// Arrays of other lengths than the call says are none of it.
void test_lengths() {
  carrier_world world({2, 2}, 6);
  carrier& one = *world.carriers[1];
  std::vector<uint8_t> bytes(200);
  const auto array = [&](uint64_t length) { return carried_bytes{bytes.data(), length}; };
  EP_CHECK(one.begin({carried_kind::all_reduce, element_type::u8, reduce_op::sum, 0, 100}, 1).ok());
  const auto reduces = [&](uint64_t input, uint64_t output) {
    const carried_bytes given = array(input), taken = array(output);
    return one.fits({&given, 1}, {&taken, 1});
  };
  EP_CHECK(reduces(100, 100));
  EP_CHECK(!reduces(99, 99));
  EP_CHECK(!reduces(101, 101));
  EP_CHECK(!reduces(100, 99));
  EP_CHECK(!one.fits({}, {}));
  carrier& other = *world.carriers[2];
  EP_CHECK(other.begin({carried_kind::all_to_all, element_type::u8, reduce_op::sum, 0, 100}, 1).ok());
  std::vector<carried_bytes> given{array(1), array(100), array(50), array(0)}, taken{array(0), array(100), array(50), array(3)};
  EP_CHECK(other.fits(given, taken));
  taken[2] = array(51);
  EP_CHECK(!other.fits(given, taken));
  taken[2] = array(50);
  taken[3] = array(101);
  EP_CHECK(!other.fits(given, taken));
  taken[3] = array(3);
  given[0] = array(101);
  EP_CHECK(!other.fits(given, taken));
  given.pop_back();
  EP_CHECK(!other.fits(given, taken));
  // With a root: what it alone gives or takes is there once for each member, and nowhere else.
  carrier_world rooted({2, 1}, 6);
  const std::vector<carried_bytes> many(3, array(100)), single(1, array(100)), longer{array(100), array(101), array(100)}, none;
  const std::array<std::pair<carried_kind, bool>, 3> kinds{{{carried_kind::reduce, false}, {carried_kind::gather, false}, {carried_kind::scatter, true}}};
  for (const auto& [kind, gives] : kinds) {
    const auto& at_root = kind == carried_kind::reduce ? single : many;
    for (uint32_t member = 0; member < 3; ++member) {
      carrier& any = *rooted.carriers[member];
      EP_CHECK(!any.begin({kind, element_type::u8, reduce_op::sum, 0, 100, 3}, 1).ok());
      const bool is_root = member == 1;
      carrier_world fresh({2, 1}, 6);
      carrier& begun = *fresh.carriers[member];
      EP_CHECK(begun.begin({kind, element_type::u8, reduce_op::sum, 0, 100, 1}, 1).ok());
      const auto fits = [&](std::span<const carried_bytes> alone, std::span<const carried_bytes> of_root) { return gives ? begun.fits(of_root, alone) : begun.fits(alone, of_root); };
      EP_CHECK_EQ(fits(single, at_root), is_root);
      EP_CHECK_EQ(fits(single, none), !is_root);
      EP_CHECK(!fits(none, at_root));
      EP_CHECK(!fits(single, longer));
      EP_CHECK(!fits(std::span(longer).subspan(1, 1), is_root ? std::span<const carried_bytes>(at_root) : std::span<const carried_bytes>(none)));
    }
  }
}

// What is nobody's, or does not fit, is refused; and a network that has gone carries nothing.
void test_refused() {
  carrier_world world({2, 2}, 5);
  const auto refused = [&](round_place place) { return !world.open(1, std::move(place)).ok(); };
  const round_place good = world.place;
  EP_CHECK(!refused(good));
  round_place bad = good;
  bad.group = groups;
  EP_CHECK(refused(bad));
  bad.group = UINT64_MAX;
  EP_CHECK(refused(bad));
  bad = good;
  bad.ranks[2] = 77;
  EP_CHECK(refused(bad));
  bad = good;
  bad.hosts = {0};
  EP_CHECK(refused(bad));
  bad.hosts = {0, 1};
  EP_CHECK(refused(bad));
  bad.hosts = {0, 1, 2, 3};
  EP_CHECK(refused(bad));
  bad.hosts = {0, 3};
  EP_CHECK(refused(bad));
  bad.hosts = {1, 2};
  EP_CHECK(refused(bad));
  bad.hosts = {0, 2, 2};
  EP_CHECK(refused(bad));
  bad.hosts = {0, 2, 4};
  EP_CHECK(refused(bad));
  EP_CHECK(!world.begin(0, {carried_kind::all_reduce, element_type::f16, reduce_op::bxor, 0, 8}).ok());
  EP_CHECK(!world.begin(0, {carried_kind::all_reduce, element_type::i32, reduce_op::avg, 0, 8}).ok());
  for (uint32_t member = 0; member < 4; ++member) EP_CHECK(world.begin(member, {carried_kind::all_reduce, element_type::u8, reduce_op::sum, 0, 100}).ok());
  world.side(0).engine->stop(false);
  std::vector<uint8_t> bytes(100);
  const carried_bytes own{bytes.data(), bytes.size()};
  for (int turn = 0; turn < 10; ++turn) {
    for (uint32_t member = 0; member < 4; ++member) EP_CHECK(world.carriers[member]->hold({&own, 1}, {&own, 1}, 100'000) != carrier::state::over);
  }
  EP_CHECK(world.carriers[0]->broken());
  EP_CHECK_EQ(world.carriers[0]->refused()->status, static_cast<uint32_t>(EP_STATUS_CLOSED));
  EP_CHECK(!world.carriers[1]->broken());
}

} // namespace

int main() {
  test_reductions();
  test_order(2);
  test_order(3);
  test_traffic();
  test_unlike_traffic();
  test_halves();
  test_missing();
  test_turns();
  test_one_step();
  test_core_beside();
  test_lengths();
  test_refused();
  return ep::check::finish();
}
