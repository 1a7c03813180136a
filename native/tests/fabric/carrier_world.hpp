// Members of a group on several hosts, each with its carrier, over the engine and a network of the tests that keeps no order; and what their calls come to.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>

#include "carrier.hpp"
#include "fabric/round_puts.hpp"
#include "fabric_ranks.hpp"
#include "scripted_port.hpp"

namespace ep::test {

inline constexpr uint64_t groups = 2;

struct carrier_world {
  scripted_network network;
  fabric_ranks ranks;
  round_place place;
  std::vector<std::unique_ptr<carrier>> carriers; // by member
  std::vector<uint64_t> numbers;                  // of their last calls
  bool prepares = false;                          // members begin calls before they know that all make them

  // `sizes`: members of each host. Ranks are numbered the other way round than members, so that neither is taken for the other.
  explicit carrier_world(const std::vector<uint32_t>& sizes, uint64_t seed, uint64_t group = 0, int32_t on_host = 0)
      : network(static_cast<int32_t>(sum(sizes)), seed), ranks(static_cast<int32_t>(sum(sizes)), 1, 1, patient(), [this](int32_t rank) { return network.port(rank); }, on_host) {
    const uint32_t world = sum(sizes);
    const carrier_layout layout{world};
    ranks.allocate(carrier_layout::memory_bytes(groups), groups * layout.group_slots());
    place.group = group;
    for (uint32_t member = 0; member < world; ++member) place.ranks.push_back(static_cast<int32_t>(world - 1 - member));
    for (uint32_t first = 0; const uint32_t size : sizes) place.hosts.push_back(std::exchange(first, first + size));
    for (uint32_t member = 0; member < world; ++member) {
      // What an earlier group has left.
      const symmetric_memory& memory = *side(member).memory;
      std::memset(memory.own_data() + carrier_layout::head_bytes, 0x77, carrier_layout::group_bytes() * groups);
      std::memset(memory.own_signals(), 0x77, 8 * memory.signal_slots());
      carrier::clear(memory, group);
    }
    for (uint32_t member = 0; member < world; ++member) carriers.push_back(must(open(member, place)));
    numbers.resize(world);
    prepares = seed % 2 == 1;
  }
  result<std::unique_ptr<carrier>> open(uint32_t member, round_place of) {
    of.self = member;
    fabric_side& own = side(member);
    std::vector<ep_segment_handle> parts;
    const uint32_t host = host_of(member);
    for (uint32_t mate = first_of(host); mate < first_of(host + 1); ++mate) parts.push_back(side(mate).memory->handle());
    auto way = std::make_unique<fabric::round_puts>(std::shared_ptr<fabric::engine>(std::shared_ptr<void>(), own.engine.get()), own.memory);
    return carrier::open(own.memory, std::move(way), std::move(of), parts);
  }
  fabric_side& side(uint32_t member) { return ranks.side(place.ranks[member]); }
  uint32_t members() const { return static_cast<uint32_t>(place.ranks.size()); }
  uint32_t hosts() const { return static_cast<uint32_t>(place.hosts.size()); }
  uint32_t first_of(uint32_t host) const { return host < hosts() ? place.hosts[host] : members(); }
  uint32_t host_of(uint32_t member) const { return static_cast<uint32_t>(std::upper_bound(place.hosts.begin(), place.hosts.end(), member) - place.hosts.begin()) - 1; }
  // HAZARD: nobody dies here, but a core of a virtual machine may stand still for longer than the silence that passes for a death: calls of those that live would never end.
  static fabric::engine_options patient() {
    fabric::engine_options options;
    options.silence_ns = 600'000'000'000;
    return options;
  }
  static uint32_t sum(const std::vector<uint32_t>& sizes) { return std::accumulate(sizes.begin(), sizes.end(), 0u); }

  // One thread of each member: body(member) of calls that all make.
  template <class Body> void run(Body&& body) {
    std::vector<std::thread> threads;
    for (uint32_t member = 0; member < members(); ++member) threads.emplace_back([&, member] { body(member); });
    for (std::thread& one : threads) one.join();
  }
  // Numbers have gaps, as where other calls are not carried.
  result<nothing> begin(uint32_t member, const carried_call& call) {
    const uint64_t number = numbers[member] + (numbers[member] % 3 == 0 ? 1 : 5);
    auto begun = carriers[member]->begin(call, number, !prepares);
    if (begun.ok()) numbers[member] = number;
    return begun;
  }
  // Until the call is over, in turns of this length.
  bool finish(uint32_t member, std::span<const carried_bytes> inputs, std::span<const carried_bytes> outputs, int64_t turn_ns) {
    // Some know sooner than others that all make it.
    for (uint64_t turn = 0; prepares && turn < (numbers[member] + member) % 4 * 20; ++turn) carriers[member]->prepare(inputs, outputs);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    while (carriers[member]->hold(inputs, outputs, turn_ns) != carrier::state::over) {
      if (std::chrono::steady_clock::now() <= end) continue;
      say_why(member);
      return false;
    }
    return true;
  }
  // That a call has not ended says nothing of what it waited for.
  void say_why(uint32_t member) {
    const fabric::engine& engine = *side(member).engine;
    const auto& refused = carriers[member]->refused();
    std::string text = "member " + std::to_string(member) + ", call " + std::to_string(numbers[member]) + ": " + (refused.has_value() ? refused->message : "nothing refused") + "; " + engine.violation();
    for (int32_t peer = 0; peer < static_cast<int32_t>(members()); ++peer) {
      const auto lost = engine.failure_of(peer);
      if (lost.status != EP_STATUS_OK) text += "; rank " + std::to_string(peer) + ": " + lost.text;
    }
    std::fprintf(stderr, "%s\n", text.c_str());
  }
};

inline float element(uint32_t member, uint64_t call, uint64_t i) { return static_cast<float>((i * 7 + member * 31 + call) % 1009) * 0.1f + static_cast<float>(member); }

inline std::vector<float> elements(uint32_t member, uint64_t call, uint64_t length) {
  std::vector<float> values(length);
  for (uint64_t i = 0; i < length; ++i) values[i] = element(member, call, i);
  return values;
}
inline carried_bytes whole(std::vector<float>& values) { return {reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(float)}; }

// As documented: the members of each host first, then the hosts. Sums of tenths are rounded otherwise in another order.
inline float folded(const carrier_world& world, uint64_t call, uint64_t i, reduce_op op) {
  const auto both = [op](float one, float other) { return op == reduce_op::max ? std::max(one, other) : one + other; };
  float all = 0;
  for (uint32_t host = 0; host < world.hosts(); ++host) {
    float here = element(world.first_of(host), call, i);
    for (uint32_t mate = world.first_of(host) + 1; mate < world.first_of(host + 1); ++mate) here = both(here, element(mate, call, i));
    all = host == 0 ? here : both(all, here);
  }
  return op == reduce_op::avg ? all / static_cast<float>(world.members()) : all;
}

inline constexpr uint64_t piece = carrier_layout::piece_bytes / sizeof(float);
inline constexpr uint64_t area = carrier_layout::area_bytes / sizeof(float);

// Members of each host.
inline const std::vector<std::vector<uint32_t>> worlds = {{1, 1}, {2, 2}, {3, 3}, {1, 1, 1}, {2, 2, 2}, {1, 1, 1, 1}, {1, 2}, {3, 1}, {2, 3, 1}};
inline bool is_unlike(const std::vector<uint32_t>& sizes) { return std::ranges::any_of(sizes, [&](uint32_t size) { return size != sizes[0]; }); }

} // namespace ep::test
