// Rounds of ranks on several hosts, over the engine and a network of the tests that keeps no order: every member hears what all others said, and of that round.
#include "rounds.hpp"

#include <atomic>
#include <cstring>
#include <thread>

#include "fabric/round_puts.hpp"
#include "fabric_ranks.hpp"
#include "scripted_port.hpp"

namespace {

using namespace ep;
using namespace ep::test;

constexpr uint64_t groups = 2;

// Members of hosts of these sizes. Ranks are numbered the other way round than members, so that neither is taken for the other.
struct round_world {
  scripted_network network;
  fabric_ranks ranks;
  round_place place;
  std::vector<std::unique_ptr<rounds>> tables; // by member

  round_world(const std::vector<uint32_t>& hosts, uint64_t seed, uint64_t group = 0) : network(total(hosts), seed), ranks(total(hosts), 1, 1, {}, [this](int32_t rank) { return network.port(rank); }) {
    const auto world = static_cast<uint32_t>(total(hosts));
    const round_layout layout{world};
    ranks.allocate(layout.memory_bytes(groups), groups * layout.group_slots());
    place.group = group;
    place.token = 0xfedc'0000'0000'0000 + seed * 1'000'003;
    for (uint32_t member = 0; member < world; ++member) place.ranks.push_back(static_cast<int32_t>(world - 1 - member));
    uint32_t first = 0;
    for (const uint32_t size : hosts) {
      place.hosts.push_back(first);
      first += size;
    }
    for (uint32_t member = 0; member < world; ++member) tables.push_back(open(member, place));
  }
  std::unique_ptr<rounds> open(uint32_t member, round_place of) {
    of.self = member;
    uint32_t leader = 0;
    for (const uint32_t first : of.hosts) if (first <= member) leader = first;
    fabric_side& own = side(member);
    const fabric_side& first = side(leader);
    auto way = std::make_unique<fabric::round_puts>(std::shared_ptr<fabric::engine>(std::shared_ptr<void>(), own.engine.get()), own.memory);
    return must(rounds::open(own.memory, std::move(way), std::move(of), first.memory->handle()));
  }
  static int32_t total(const std::vector<uint32_t>& hosts) {
    uint32_t sum = 0;
    for (const uint32_t size : hosts) sum += size;
    return static_cast<int32_t>(sum);
  }
  fabric_side& side(uint32_t member) { return ranks.side(place.ranks[member]); }
  uint32_t members() const { return static_cast<uint32_t>(place.ranks.size()); }
  // Every member looks, and has the round.
  bool look_all(uint64_t round) {
    bool there = true;
    for (const auto& table : tables) there = table->look(round) && there;
    return there;
  }
};

// Of every length, up to the longest.
std::vector<uint8_t> words_of(uint64_t round, uint32_t member) {
  std::vector<uint8_t> said((round * 37 + member * 11) % (round % 5 == 0 ? round_layout::most_bytes + 1 : 40));
  for (size_t i = 0; i < said.size(); ++i) said[i] = pattern(i, round * 64 + member);
  return said;
}

void check_round(const rounds& table, uint64_t round) {
  uint8_t into[round_layout::most_bytes];
  for (uint32_t member = 0; member < table.members(); ++member) {
    const std::vector<uint8_t> said = words_of(round, member);
    const uint32_t bytes = table.read(round, member, into);
    EP_CHECK_EQ(bytes, said.size());
    EP_CHECK(said.empty() || std::memcmp(into, said.data(), said.size()) == 0);
  }
}

// One thread of each rank, which goes on as soon as it has a round: some are a round ahead of others all the time.
void run_rounds(round_world& world, uint64_t first, uint64_t count) {
  std::atomic<bool> late{false};
  std::vector<std::thread> threads;
  for (uint32_t member = 0; member < world.members(); ++member) {
    threads.emplace_back([&, member] {
      rounds& table = *world.tables[member];
      for (uint64_t round = first; round < first + count && !late; ++round) {
        table.enter(round, words_of(round, member));
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(120);
        while (!table.hold(round, 1'000'000) && !late) {
          if (std::chrono::steady_clock::now() > end) late = true;
        }
        if (!late) check_round(table, round);
      }
    });
  }
  for (std::thread& one : threads) one.join();
  EP_CHECK(!late);
}

void test_rounds() {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    round_world two({2, 2}, seed);
    run_rounds(two, 1, 150);
    round_world uneven({3, 1, 2}, seed, 1);
    uneven.network.set_room(seed);
    run_rounds(uneven, 7, 100);
  }
  round_world alone({3}, 9);
  run_rounds(alone, 1, 100);
}

// A leader that has put, and does nothing more, holds up nobody of its host: the other hosts' words land without its thread.
void test_busy_leader() {
  round_world world({2, 2}, 3);
  for (uint32_t member = 0; member < 4; ++member) world.tables[member]->enter(1, words_of(1, member));
  world.tables[0]->look(1);
  world.tables[2]->look(1);
  // They have put what their hosts said. From here on neither looks until its mate has the round.
  EP_CHECK(soon([&] { return world.tables[1]->look(1); }));
  EP_CHECK(soon([&] { return world.tables[3]->look(1); }));
  EP_CHECK(soon([&] { return world.look_all(1); }));
  for (const auto& table : world.tables) check_round(*table, 1);
}

// A round that not all come to is there for nobody, whoever looks; and the words of others, two rounds later in the same places, are not taken for those of this one.
void test_missing() {
  round_world world({2, 2}, 4);
  for (const uint32_t member : {0u, 2u, 3u}) world.tables[member]->enter(1, words_of(1, member));
  for (int turn = 0; turn < 20; ++turn) {
    for (uint32_t member = 0; member < 4; ++member) EP_CHECK(!world.tables[member]->hold(1, 100'000));
  }
  world.tables[1]->enter(1, words_of(1, 1));
  EP_CHECK(soon([&] { return world.look_all(1); }));
  for (const auto& table : world.tables) check_round(*table, 1);
  uint8_t into[round_layout::most_bytes];
  for (uint32_t member = 0; member < 4; ++member) EP_CHECK_EQ(world.tables[0]->read(3, member, into), UINT32_MAX);
  EP_CHECK(!world.tables[0]->look(3));
}

// A round whose words are still on their way when all have gone on holds up what is put behind it, in the same places: a late one never lands over another's.
void test_held_up() {
  round_world world({1, 1}, 6);
  const auto long_words = [](uint64_t round, uint32_t member) {
    std::vector<uint8_t> said(1000);
    for (size_t i = 0; i < said.size(); ++i) said[i] = pattern(i, round * 2 + member);
    return said;
  };
  world.network.hold_writes(true);
  world.tables[0]->enter(1, long_words(1, 0));
  world.tables[1]->enter(1, long_words(1, 1));
  // All of their bytes have been taken, which are two pieces of this port: else the engines' threads would read them while they are written again, which means no harm and is a race.
  for (uint32_t member = 0; member < 2; ++member) EP_CHECK(soon([&] { return world.network.written(world.place.ranks[member]) >= 2; }));
  // They have said it to each other in another way.
  world.tables[0]->enter(2, {});
  world.tables[1]->enter(2, {});
  world.tables[0]->enter(3, long_words(3, 0));
  world.tables[1]->enter(3, long_words(3, 1));
  const uint64_t before = world.side(0).engine->accepted(world.place.ranks[1]);
  for (int turn = 0; turn < 20; ++turn) EP_CHECK(!world.tables[0]->hold(3, 100'000));
  EP_CHECK_EQ(world.side(0).engine->accepted(world.place.ranks[1]), before);
  world.network.hold_writes(false);
  EP_CHECK(soon([&] { return world.look_all(3); }));
  uint8_t into[round_layout::most_bytes];
  for (uint32_t member = 0; member < 2; ++member) {
    for (uint32_t reader = 0; reader < 2; ++reader) {
      EP_CHECK_EQ(world.tables[reader]->read(3, member, into), 1000u);
      EP_CHECK(std::memcmp(into, long_words(3, member).data(), 1000) == 0);
    }
  }
}

// What says more than there is, or is nobody's, is refused; and a network that has gone takes no rounds.
void test_refused() {
  round_world world({2, 1}, 5);
  const ep_segment_handle leader = world.side(0).memory->handle();
  const auto refused = [&](round_place place, const ep_segment_handle& handle) {
    fabric_side& own = world.side(1);
    auto way = std::make_unique<fabric::round_puts>(std::shared_ptr<fabric::engine>(std::shared_ptr<void>(), own.engine.get()), own.memory);
    return !rounds::open(own.memory, std::move(way), std::move(place), handle).ok();
  };
  round_place good = world.place;
  good.self = 1;
  EP_CHECK(!refused(good, leader));
  round_place bad = good;
  bad.group = groups;
  EP_CHECK(refused(bad, leader));
  bad = good;
  bad.group = UINT64_MAX;
  EP_CHECK(refused(bad, leader));
  bad = good;
  bad.self = 2;
  EP_CHECK(refused(bad, leader));
  bad = good;
  bad.ranks[2] = 77;
  EP_CHECK(refused(bad, leader));
  bad = good;
  bad.hosts = {0, 3};
  EP_CHECK(refused(bad, leader));
  bad.hosts = {1};
  EP_CHECK(refused(bad, leader));
  EP_CHECK(refused(good, ep_segment_handle{}));
  EP_CHECK(refused(good, world.side(0).context->handle()));
  // Nothing is reached any more.
  world.side(0).engine->stop(false);
  for (uint32_t member = 0; member < 3; ++member) world.tables[member]->enter(1, words_of(1, member));
  for (int turn = 0; turn < 10; ++turn) {
    for (uint32_t member = 0; member < 3; ++member) EP_CHECK(!world.tables[member]->hold(1, 100'000));
  }
}

} // namespace

int main() {
  test_rounds();
  test_busy_leader();
  test_missing();
  test_held_up();
  test_refused();
  return ep::check::finish();
}
