// Atomics of the engine over a network of the tests that keeps no order, and the trial that a port's atomics go through before they are offered.
#include "dl/fabric_atomics.hpp"
#include "fabric_ranks.hpp"
#include "scripted_port.hpp"

namespace {

using namespace ep;
using namespace ep::test;
using fabric::request_state;

void test_trial() {
  using lie = scripted_network::lie;
  const auto tried = [](lie what, uint64_t room) {
    dl::atomics_trial trial;
    scripted_network network(1, 7);
    network.set_room(room);
    network.set_lie(what);
    const auto port = network.port(0);
    return trial.run(*port, room == 0 || what == lie::never_ends ? 20'000'000 : 10'000'000'000);
  };
  for (const uint64_t room : {1, 2, 5}) EP_CHECK_EQ(tried(lie::none, room), std::string());
  const auto says = [](const std::string& why, const char* text) {
    if (why.find(text) == std::string::npos) std::fprintf(stderr, "expected \"%s\" in \"%s\"\n", text, why.c_str());
    EP_CHECK(why.find(text) != std::string::npos);
  };
  says(tried(lie::loses, 1), "some are lost");
  says(tried(lie::ignores_compare, 1), "a comparison of 15 with 16 found 15 and left 5");
  says(tried(lie::other_old, 1), "a comparison of 15 with 16 found 16");
  says(tried(lie::beside, 1), "found what the word never was");
  says(tried(lie::never_ends, 1), "had not ended in time");
  says(tried(lie::fails, 1), "the scripted port fails it");
  says(tried(lie::none, 0), "had not ended in time");
}

struct scripted_world {
  scripted_network network;
  fabric_ranks ranks;
  scripted_world(int32_t size, uint64_t seed) : network(size, seed), ranks(size, 1'200'000, 16, {}, [this](int32_t rank) { return network.port(rank); }) {}
};

void test_any_order() {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    scripted_world world(3, seed);
    world.network.set_room(seed % 3 + 1);
    check_atomics(world.ranks);
    check_requests(world.ranks);
  }
}

// A rank's own puts go by no network; behind an atomic of its own they wait for that, or would end before it.
void test_own_in_order() {
  scripted_world world(2, 3);
  fabric_ranks& ranks = world.ranks;
  fabric::engine& engine = *ranks.side(0).engine;
  world.network.set_room(0);
  const uint64_t first = ranks.post(0, atomic_on(ranks, 0, 0, 64, 128, 7));
  const uint64_t put = ranks.post(0, fabric_ranks::with_signal(ranks.bytes_to(0, 0, 1000, 2000, 100), 1, 1));
  const uint64_t last = ranks.post(0, atomic_on(ranks, 0, 0, 64, 136, 7));
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  for (const uint64_t number : {first, put, last}) EP_CHECK(engine.look(0, number) == request_state::pending);
  EP_CHECK_EQ(ranks.signal(0, 1), 0u);
  world.network.set_room(1);
  for (const uint64_t number : {first, put, last}) EP_CHECK(ranks.ended(0, 0, number) == request_state::done);
  EP_CHECK_EQ(ranks.signal(0, 1), 1u);
  uint64_t old = 0;
  std::memcpy(&old, ranks.side(0).memory->own_data() + 136, sizeof old);
  EP_CHECK_EQ(old, 7u);
}

// The provider may change a word until it has said that it did: the memory stays registered.
void test_own_holds_memory() {
  scripted_world world(1, 4);
  fabric_ranks& ranks = world.ranks;
  fabric::engine& engine = *ranks.side(0).engine;
  world.network.set_room(0);
  const uint64_t number = ranks.post(0, atomic_on(ranks, 0, 0, 64, 128, 7));
  engine.remove_memory(*ranks.side(0).memory);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  constexpr uint64_t mail = fabric::mailbox::byte_length(1);
  EP_CHECK_EQ(engine.counts().registered, mail + ranks.side(0).memory->byte_length());
  world.network.set_room(1);
  EP_CHECK(ranks.ended(0, 0, number) == request_state::done);
  EP_CHECK(soon([&] { return engine.counts().registered == mail; }));
}

// What fails on the way to a peer is the end of that peer; of this rank's own it is not the end of this rank.
void test_failures() {
  scripted_world world(2, 5);
  fabric_ranks& ranks = world.ranks;
  world.network.set_lie(scripted_network::lie::fails);
  const uint64_t own = ranks.post(0, atomic_on(ranks, 0, 0, 64, 128, 7));
  EP_CHECK(ranks.ended(0, 0, own) == request_state::failed);
  EP_CHECK_EQ(ranks.side(0).context->life(0), uint32_t{EP_LIFE_ALIVE});
  EP_CHECK(ranks.side(0).engine->failure_of(0).text.find("the scripted port fails it") != std::string::npos);
  EP_CHECK(ranks.ended(0, 1, ranks.post(0, fabric_ranks::with_signal(ranks.bytes_to(0, 1, 0, 0, 100), 0, 1))) == request_state::done);
  EP_CHECK(ranks.ended(1, 0, ranks.post(1, atomic_on(ranks, 1, 0, 64, 128, 7))) == request_state::failed);
  EP_CHECK(soon([&] { return ranks.side(1).context->life(0) == EP_LIFE_DEAD; })); // told after the end of what was asked of it
}

} // namespace

int main() {
  test_trial();
  test_any_order();
  test_own_in_order();
  test_own_holds_memory();
  test_failures();
  return ep::check::finish();
}
