// The engine of the backing `fabric` over a network of the tests that keeps no order, under many seeds, and what happens when that network or a peer stops.
#include <cstring>

#include "fabric_ranks.hpp"
#include "scripted_port.hpp"

namespace {

using namespace ep;
using namespace ep::test;
using fabric::request_state;

constexpr uint64_t memory_bytes = 1'200'000;

struct scripted_world {
  scripted_network network;
  fabric_ranks ranks;
  explicit scripted_world(int32_t size, uint64_t seed, const fabric::engine_options& options = {})
      : network(size, seed), ranks(size, memory_bytes, 16, options, [this](int32_t rank) { return network.port(rank); }) {}
};

// The last piece of a put takes the word of it along where the port writes to two places at once, and there is a slot free for it.
void test_pairs() {
  for (uint64_t seed = 50; seed < 54; ++seed) {
    scripted_world world(2, seed);
    world.network.set_room(1 + seed % 3);
    for (const int32_t rank : {0, 1}) {
      const int32_t peer = 1 - rank;
      fabric_side& own = world.ranks.side(rank);
      for (uint64_t i = 0; i < 3000; ++i) own.memory->own_data()[i] = pattern(i, static_cast<uint64_t>(rank));
      const auto put = [&](uint64_t at, uint64_t bytes) {
        EP_CHECK(world.ranks.ended(rank, peer, world.ranks.post(rank, fabric_ranks::with_signal(world.ranks.bytes_to(rank, peer, at, 50'000 + at, bytes), 1, 1))) == request_state::done);
      };
      auto writes = [&, before = uint64_t{0}]() mutable { return world.network.written(rank) - std::exchange(before, world.network.written(rank)); };
      writes();
      put(0, 1500); // pieces of 1000 and 500 bytes, and its word
      EP_CHECK_EQ(writes(), rank == 0 ? 2u : 3u);
      put(0, 2000); // with its word the second one would be too long for a message
      EP_CHECK_EQ(writes(), 3u);
      put(2000, 952); // goes within its word, which is a message
      EP_CHECK_EQ(writes(), 0u);
      EP_CHECK_EQ(world.network.paired(rank), rank == 0 ? 1u : 0u);
      EP_CHECK_EQ(world.ranks.signal(peer, 1), 3u);
      EP_CHECK(std::memcmp(world.ranks.side(peer).memory->own_data() + 50'000, own.memory->own_data(), 2952) == 0);
    }
    // No slot is free: the word is a message.
    world.network.set_room(1);
    world.network.hold_writes(true);
    const uint64_t before = world.network.paired(0);
    uint64_t last = 0;
    for (uint64_t i = 0; i < fabric::mailbox::slots + 10; ++i) last = world.ranks.post(0, world.ranks.bytes_to(0, 1, 0, 0, 1500));
    EP_CHECK(soon([&] { return world.ranks.side(0).engine->counts().requests >= 3 + fabric::mailbox::slots + 10 && world.network.written(0) >= 5 + 2 * (fabric::mailbox::slots + 10); }));
    EP_CHECK_EQ(world.network.paired(0) - before, fabric::mailbox::slots);
    world.network.hold_writes(false);
    EP_CHECK(world.ranks.ended(0, 1, last) == request_state::done);
    EP_CHECK_EQ(world.ranks.side(1).engine->counts().refused, 0u);
  }
}

// Whoever waits for requests hears of them while others are still coming in, so that it can post the next ones.
void test_told_meanwhile() {
  scripted_world world(2, 57);
  world.network.keep_order();
  world.network.hold_writes(true);
  constexpr uint64_t posted = 60; // fewer than are told of in any case
  uint64_t last = 0;
  for (uint64_t i = 0; i < posted; ++i) last = world.ranks.post(1, world.ranks.bytes_to(1, 0, 0, 0, 20'000));
  EP_CHECK(soon([&] { return world.network.written(1) >= posted * 20; }));
  const uint64_t before = world.ranks.side(0).engine->counts().messages;
  world.network.hold_writes(false);
  EP_CHECK(world.ranks.ended(1, 0, last) == request_state::done);
  EP_CHECK(world.ranks.side(0).engine->counts().messages - before >= 3);
}

void test_any_order() {
  uint64_t overtakes = 0;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    scripted_world world(2, seed);
    check_requests(world.ranks);
    overtakes += world.network.overtakes();
  }
  EP_CHECK(overtakes > 100); // or the network kept the order that it does not promise
}

void test_raw_link() {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    scripted_network network(2, seed);
    network.set_room(seed);
    check_raw_link([&](int32_t rank) { return network.port(rank); });
  }
}

void test_kernels() {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    fabric::engine_options options;
    options.ring_capacity = 4;
    scripted_world world(3, seed, options);
    world.network.set_room(seed);
    check_kernels(world.ranks, 40);
    if (seed > 1) EP_CHECK(world.network.refused() > 0);
  }
}

// More requests than the window while the first is held up: the rest waits at its source, or the target could not tell them apart and would give the source up.
void test_window() {
  scripted_world world(2, 5);
  world.network.hold_writes(true);
  uint64_t last = world.ranks.post(0, world.ranks.bytes_to(0, 1, 0, 0, 1500));
  for (uint64_t i = 0; i < 3 * fabric::request_window; ++i) last = world.ranks.post(0, fabric_ranks::with_signal(world.ranks.bytes_to(0, 1, 0, 0, i % 1500), 0, 1));
  EP_CHECK_EQ(world.ranks.side(0).engine->accepted(1), last);
  EP_CHECK(soon([&] { return world.ranks.side(0).engine->counts().messages >= 100; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  world.network.hold_writes(false);
  EP_CHECK(soon([&] { return world.ranks.side(0).engine->look(1, last) == request_state::done; }, 60));
  EP_CHECK_EQ(world.ranks.signal(1, 0), 3 * fabric::request_window);
}

// What a peer is too slow for stays in the ring: the engine takes no more of kernels than the window.
void test_back_pressure() {
  scripted_world world(2, 29);
  world.network.hold_writes(true);
  const ep_memory_handle handle = world.ranks.side(0).memory->device_handle();
  constexpr uint64_t puts = fabric::request_window + 3000;
  std::thread kernel([&] {
    ep_kernel_status status{};
    const kernel_environment environment{world.ranks.side(0).context->waits(nullptr, deadline_after(60'000))};
    EP_CHECK(fast_run(1, environment, [&](auto& context) {
      const thread_coop<std::remove_reference_t<decltype(context)>> coop{context};
      const proxy_endpoint endpoint{handle};
      const auto* source = reinterpret_cast<const void*>(world.ranks.side(0).memory->own_data());
      for (uint64_t i = 0; i < puts; ++i) EP_CHECK(endpoint.put_rows(context, coop, 1, 0, source, 1000, 1000, 1, false, 0, 1, &status));
    }).ok());
  });
  const auto taken = [&] { return world.ranks.side(0).engine->counts().requests; };
  EP_CHECK(soon([&] { return taken() == fabric::request_window; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EP_CHECK_EQ(taken(), fabric::request_window);
  world.network.hold_writes(false);
  kernel.join();
  EP_CHECK(soon([&] { return world.ranks.signal(1, 0) == puts; }, 60));
}

// The signal and the end of a put wait for its bytes, however early its message comes.
void test_signal_waits_for_bytes() {
  scripted_world world(2, 9);
  world.network.hold_writes(true);
  const uint64_t number = world.ranks.post(0, fabric_ranks::with_signal(world.ranks.bytes_to(0, 1, 0, 0, 5000), 0, 1));
  EP_CHECK(soon([&] { return world.ranks.side(0).engine->counts().messages >= 1; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EP_CHECK_EQ(world.ranks.signal(1, 0), 0u);
  EP_CHECK(world.ranks.side(0).engine->look(1, number) == request_state::pending);
  world.network.hold_writes(false);
  EP_CHECK(world.ranks.ended(0, 1, number) == request_state::done);
  EP_CHECK_EQ(world.ranks.signal(1, 0), 1u);
}

// What only the engine's thread carries is known as such from when it was posted until it is over, however it ends.
void test_heavy() {
  constexpr uint64_t bytes = 100'000;
  scripted_world world(3, 47);
  fabric::engine& engine = *world.ranks.side(0).engine;
  const auto posted = [&](int32_t peer) {
    const uint64_t number = world.ranks.post(0, world.ranks.bytes_to(0, peer, 0, 0, bytes));
    return std::pair(number, engine.heavy());
  };
  EP_CHECK(!engine.heavy());
  for (int i = 0; i < 100; ++i) {
    const auto [number, heavy] = posted(1);
    EP_CHECK(heavy || engine.look(1, number) == request_state::done);
    EP_CHECK(world.ranks.ended(0, 1, number) == request_state::done);
    EP_CHECK(soon([&] { return !engine.heavy(); }));
  }
  // For itself, which takes several looks; what is posted behind it ends behind it.
  constexpr uint64_t long_bytes = fabric::largest_piece + 100'000;
  static_assert(long_bytes <= memory_bytes);
  const uint64_t whole = world.ranks.post(0, fabric_ranks::with_signal(world.ranks.bytes_to(0, 0, 0, 0, long_bytes), 3, 1));
  EP_CHECK(engine.heavy() || engine.look(0, whole) == request_state::done);
  const uint64_t behind = world.ranks.post(0, fabric_ranks::with_signal(world.ranks.bytes_to(0, 0, 0, 0, 8), 3, 1));
  EP_CHECK(world.ranks.ended(0, 0, behind) == request_state::done);
  EP_CHECK(engine.look(0, whole) == request_state::done);
  EP_CHECK_EQ(world.ranks.signal(0, 3), 2u);
  EP_CHECK(soon([&] { return !engine.heavy(); }));
  world.network.hold_writes(true);
  EP_CHECK(posted(2).second);
  (void)posted(2);
  world.ranks.side(2).engine->stop(false);
  EP_CHECK(soon([&] { return !engine.heavy(); }));
  world.network.hold_writes(false);
}

// What nobody waits for ends all the same; its target says so of many at once.
void test_unawaited() {
  constexpr uint64_t puts = 60;
  fabric::engine_options options;
  options.tell_after_ns = 2'000'000'000;
  scripted_world world(2, 41, options);
  const auto target = [&] { return world.ranks.side(1).engine->counts().messages; };
  const uint64_t before = target();
  uint64_t last = 0;
  for (uint64_t i = 0; i < puts; ++i) {
    auto one = fabric_ranks::with_signal(world.ranks.bytes_to(0, 1, 0, 0, 8), 0, 1);
    one.unawaited = true;
    last = world.ranks.post(0, one);
    EP_CHECK(soon([&] { return world.ranks.signal(1, 0) == i + 1; }));
  }
  EP_CHECK(world.ranks.ended(0, 1, last) == request_state::done);
  EP_CHECK(target() - before < 10); // of which are signs of life
  // Who waits after all, asks.
  auto one = fabric_ranks::with_signal(world.ranks.bytes_to(0, 1, 0, 0, 8), 0, 1);
  one.unawaited = true;
  const int64_t begin = clock_now_ns();
  last = world.ranks.post(0, one);
  world.ranks.side(0).engine->want_end(1);
  EP_CHECK(world.ranks.ended(0, 1, last) == request_state::done);
  EP_CHECK(clock_now_ns() - begin < options.tell_after_ns);
}

// A memory that a rank gives up stays until what was under way to it has landed; what is put there from then on goes nowhere, reads are refused, and other memories go on.
void test_retired_memory() {
  scripted_world world(2, 11);
  fabric_ranks& ranks = world.ranks;
  const std::shared_ptr<symmetric_memory> first[2] = {ranks.side(0).memory, ranks.side(1).memory};
  world.network.hold_writes(true);
  const uint64_t number = ranks.post(0, ranks.bytes_to(0, 1, 0, 0, 3000));
  EP_CHECK(soon([&] { return ranks.side(0).engine->counts().messages >= 1; }));
  std::weak_ptr<symmetric_memory> given_up = ranks.side(1).memory;
  ranks.side(1).engine->remove_memory(*ranks.side(1).memory);
  fabric::request read = ranks.bytes_to(0, 1, 0, 0, 8);
  read.reads = true;
  EP_CHECK(soon([&] { return !ranks.side(0).engine->post(*first[0], read).ok(); }));
  EP_CHECK(ranks.side(0).engine->post(*first[0], read).why().status == EP_STATUS_CLOSED);
  const uint64_t nowhere = ranks.post(0, fabric_ranks::with_signal(ranks.bytes_to(0, 1, 0, 0, 5000), 2, 1));
  EP_CHECK(given_up.use_count() > 2); // the engine holds it still
  world.network.hold_writes(false);
  EP_CHECK(ranks.ended(0, 1, number) == request_state::done);
  EP_CHECK(ranks.ended(0, 1, nowhere) == request_state::done);
  EP_CHECK_EQ(ranks.signal(1, 2), 0u);
  EP_CHECK(soon([&] { return given_up.use_count() == 2; }));
  ranks.allocate(memory_bytes, 16);
  EP_CHECK(ranks.ended(0, 1, ranks.post(0, fabric_ranks::with_signal(ranks.bytes_to(0, 1, 0, 0, 800), 3, 1))) == request_state::done);
  EP_CHECK_EQ(ranks.signal(1, 3), 1u);
}

fabric::engine_options impatient() {
  fabric::engine_options options;
  options.heartbeat_ns = 20'000'000;
  options.silence_ns = 400'000'000;
  return options;
}

// A peer that falls silent without a word: its life ends here, so do waits and requests, and the others go on.
void test_silent_peer() {
  scripted_world world(3, 13, impatient());
  fabric_ranks& ranks = world.ranks;
  EP_CHECK(ranks.ended(0, 2, ranks.post(0, ranks.bytes_to(0, 2, 0, 0, 100))) == request_state::done);
  EP_CHECK(ranks.ended(1, 2, ranks.post(1, ranks.bytes_to(1, 2, 0, 0, 100))) == request_state::done);
  world.network.cut(2);
  const uint64_t number = ranks.post(0, ranks.bytes_to(0, 2, 0, 0, 5000));
  const wait_scope scope = ranks.side(0).context->waits(nullptr, deadline_after(20'000));
  const wait_result end = wait_word(scope, ranks.side(0).memory->own_signals() + 5, comparison::ge, 1, 2);
  EP_CHECK_EQ(end.status, uint32_t{EP_STATUS_PEER_LOST});
  EP_CHECK_EQ(end.rank, 2);
  EP_CHECK(ranks.ended(0, 2, number) == request_state::failed);
  EP_CHECK(ranks.side(0).engine->failure_of(2).text.find("rank 2: nothing was heard of it for ") == 0);
  EP_CHECK(!ranks.side(0).engine->post(*ranks.side(0).memory, ranks.bytes_to(0, 2, 0, 0, 8)).ok());
  EP_CHECK_EQ(ranks.side(0).context->life(1), uint32_t{EP_LIFE_ALIVE});
  EP_CHECK(ranks.ended(0, 1, ranks.post(0, fabric_ranks::with_signal(ranks.bytes_to(0, 1, 0, 0, 5000), 6, 1))) == request_state::done);
  EP_CHECK_EQ(ranks.signal(1, 6), 1u);
  // What a memory's end would tell it is nothing to wait for: the thread would look every millisecond from then on, and each post twice.
  EP_CHECK(soon([&] { return ranks.side(0).engine->quiet(); }));
  const uint64_t before = ranks.side(1).engine->counts().messages; // it answers
  ranks.side(0).engine->remove_memory(*ranks.side(0).memory);
  EP_CHECK(soon([&] { return ranks.side(1).engine->counts().messages > before; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EP_CHECK(soon([&] { return ranks.side(0).engine->quiet(); }));
}

// A port that never has room again: nothing spins (the processor time says so), and the peers count as lost, since none of them is heard.
void test_full_for_ever() {
  scripted_world world(2, 17, impatient());
  EP_CHECK(world.ranks.ended(0, 1, world.ranks.post(0, world.ranks.bytes_to(0, 1, 0, 0, 100))) == request_state::done);
  EP_CHECK(world.ranks.ended(1, 0, world.ranks.post(1, world.ranks.bytes_to(1, 0, 0, 0, 100))) == request_state::done);
  world.network.set_room(0);
  const std::clock_t before = std::clock();
  const uint64_t number = world.ranks.post(0, world.ranks.bytes_to(0, 1, 0, 0, 5000));
  EP_CHECK(world.ranks.ended(0, 1, number) == request_state::failed);
  const double burnt = static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
  EP_CHECK(burnt < 0.3); // of 0.4 s with two engines
}

// An orderly close and a death are told, and told apart. Puts to a rank that left in order go nowhere, since nobody will look; to one that died they fail, and so do all reads.
void test_leaving() {
  for (const bool orderly : {true, false}) {
    scripted_world world(2, 19);
    fabric::engine& engine = *world.ranks.side(0).engine;
    EP_CHECK(world.ranks.ended(0, 1, world.ranks.post(0, world.ranks.bytes_to(0, 1, 0, 0, 100))) == request_state::done);
    world.network.hold_writes(true);
    const uint64_t under_way = world.ranks.post(0, world.ranks.bytes_to(0, 1, 0, 0, 5000));
    EP_CHECK(soon([&] { return engine.counts().requests == 2; }));
    world.ranks.side(1).engine->stop(orderly);
    EP_CHECK(soon([&] { return world.ranks.side(0).context->life(1) == (orderly ? EP_LIFE_CLOSED : EP_LIFE_DEAD); }, 2));
    EP_CHECK(world.ranks.ended(0, 1, under_way) == (orderly ? request_state::done : request_state::failed));
    if (orderly) {
      EP_CHECK(world.ranks.ended(0, 1, world.ranks.post(0, world.ranks.bytes_to(0, 1, 0, 0, 8))) == request_state::done);
      EP_CHECK_EQ(engine.failure_of(1).text, std::string());
      fabric::request read = world.ranks.bytes_to(0, 1, 0, 0, 8);
      read.reads = true;
      EP_CHECK(world.ranks.ended(0, 1, world.ranks.post(0, read)) == request_state::failed);
    }
    EP_CHECK(!engine.post(*world.ranks.side(0).memory, world.ranks.bytes_to(0, 1, 0, 0, 8)).ok());
    EP_CHECK_EQ(engine.failure_of(1).text, std::string(orderly ? "rank 1 closed" : "rank 1 died"));
  }
}

// A peer that leaves as soon as it has seen everything: its last word says so, or requests that it carried out would count as failed.
void test_leaving_at_once() {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    scripted_world world(2, seed);
    uint64_t last = 0;
    for (int i = 0; i < 50; ++i) last = world.ranks.post(0, fabric_ranks::with_signal(world.ranks.bytes_to(0, 1, 0, 0, 300), 0, 1));
    EP_CHECK(soon([&] { return world.ranks.signal(1, 0) == 50; }));
    world.ranks.side(1).engine->stop(true);
    EP_CHECK(world.ranks.ended(0, 1, last) == request_state::done);
  }
}

// Who has left takes nothing any more, and whoever closes behind it has nothing to tell it: not what it has carried out for it, and not that memory is given up.
void test_leaving_behind_another() {
  bool prompt = false;
  for (uint64_t seed = 23; seed < 28 && !prompt; ++seed) { // a busy machine may take that long itself, now and then
    scripted_world world(3, seed);
    for (int32_t rank = 0; rank < 2; ++rank) {
      const int32_t next = rank + 1;
      EP_CHECK(world.ranks.ended(rank, next, world.ranks.post(rank, fabric_ranks::with_signal(world.ranks.bytes_to(rank, next, 0, 0, 300), 0, 1))) == request_state::done);
    }
    prompt = true;
    for (int32_t rank = 0; rank < 2; ++rank) {
      fabric_side& own = world.ranks.side(rank);
      own.engine->remove_memory(*own.memory);
      const int64_t before = clock_now_ns();
      own.engine->stop(true);
      prompt = prompt && clock_now_ns() - before < 400'000'000; // a farewell that is not heard takes 500 ms
      world.network.depart(rank);
      EP_CHECK(soon([&] { return world.ranks.side(2).context->life(rank) == EP_LIFE_CLOSED; }));
    }
  }
  EP_CHECK(prompt);
}

// A post into a ring with room carries nobody's work on: what its peer is to learn goes with it.
void test_room_is_not_awaited() {
  const auto context = must(rank_context::create(0, 2, 2));
  int looks = 0;
  context->progress().add(&looks, [&] {
    ++looks;
    return false;
  });
  std::vector<ep_proxy_request> entries(4);
  ep_wake_word wake{};
  ep_proxy_ring ring{};
  ring.capacity = entries.size();
  ring.entries = reinterpret_cast<uint64_t>(entries.data());
  ring.wake = reinterpret_cast<uint64_t>(&wake);
  ring.head = ring.tail = 6;
  ep_memory_handle handle{};
  handle.proxy = reinterpret_cast<uint64_t>(&ring);
  ep_kernel_status status{};
  const kernel_environment environment{context->waits(nullptr, deadline_after(20))};
  EP_CHECK(fast_run(1, environment, [&](auto& kernel) {
    const thread_coop<std::remove_reference_t<decltype(kernel)>> coop{kernel};
    for (size_t i = 0; i < entries.size(); ++i) EP_CHECK(proxy_endpoint{handle}.signal(kernel, coop, 1, 0, 1, &status));
    EP_CHECK_EQ(looks, 0);
    EP_CHECK(!proxy_endpoint{handle}.signal(kernel, coop, 1, 0, 1, &status));
  }).ok());
  EP_CHECK(looks > 0 && status.status == EP_STATUS_TIMEOUT && ring.tail == 10);
  context->progress().remove(&looks);
}

// An engine that stops ends what kernels wait for.
void test_stopped_ring() {
  scripted_world world(2, 23);
  const ep_memory_handle handle = world.ranks.side(0).memory->device_handle();
  auto& ring = *reinterpret_cast<ep_proxy_ring*>(handle.proxy);
  world.ranks.side(0).engine->stop(true);
  ep_kernel_status status{};
  const kernel_environment environment{world.ranks.side(0).context->waits(nullptr, deadline_after(10'000))};
  EP_CHECK(fast_run(1, environment, [&](auto& context) {
    const thread_coop<std::remove_reference_t<decltype(context)>> coop{context};
    EP_CHECK(!proxy_endpoint{handle}.signal(context, coop, 1, 0, 1, &status));
  }).ok());
  EP_CHECK_EQ(status.status, uint32_t{EP_STATUS_CLOSED});
  EP_CHECK_EQ(ring.head, UINT64_MAX);
}

// The vector of the paper, and that every byte of key and message counts.
void test_tags() {
  fabric::tag_key key{};
  uint8_t bytes[15];
  for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<uint8_t>(i);
  for (size_t i = 0; i < sizeof bytes; ++i) bytes[i] = static_cast<uint8_t>(i);
  const uint64_t tag = fabric::tagger(key)(bytes, sizeof bytes);
  EP_CHECK_EQ(tag, 0xa129ca6149be45e5u);
  for (size_t i = 0; i < sizeof bytes; ++i) {
    bytes[i] ^= 0x10;
    EP_CHECK(fabric::tagger(key)(bytes, sizeof bytes) != tag);
    bytes[i] ^= 0x10;
    key[i] ^= 0x10;
    EP_CHECK(fabric::tagger(key)(bytes, sizeof bytes) != tag);
    key[i] ^= 0x10;
  }
  EP_CHECK(fabric::tagger(key)(bytes, sizeof bytes - 1) != tag);
}

// A brief says what its message says, whatever the upper halves of its numbers are and in whatever order they come, and stands for no other message.
void test_briefs() {
  const auto sample = [](uint64_t sequence, uint64_t acked, uint32_t payload) {
    fabric::wire_message made{};
    made.magic = fabric::wire_magic;
    made.kind = fabric::message_kind::request;
    made.op = static_cast<uint8_t>(signal_op::add) | fabric::wire_asks;
    made.payload_bytes = static_cast<uint16_t>(payload);
    made.source = fabric::most_ranks - 1;
    made.sequence = sequence;
    made.acked = acked;
    made.memory = UINT32_MAX;
    made.slot = UINT32_MAX;
    made.offset = 0x123456789abcdef0;
    made.value = UINT64_MAX - 1;
    for (uint32_t i = 0; i < payload; ++i) made.payload[i] = static_cast<uint8_t>(i + 1);
    return made;
  };
  const fabric::tagger tag(keys_of(1, 2)[0].out);
  for (const uint64_t near : {uint64_t{0}, uint64_t{5000}, (uint64_t{1} << 32) - 2, uint64_t{1} << 32, (uint64_t{7} << 32) + 1}) {
    for (const int64_t off : {0, 1, 4095, -1, -4096}) {
      if (off < 0 && near < static_cast<uint64_t>(-off)) continue;
      for (uint32_t payload = 0; payload <= fabric::brief_payload_bytes; payload += 8) {
        fabric::wire_message made = sample(near + static_cast<uint64_t>(off), near + 3 + static_cast<uint64_t>(off), payload);
        const size_t bytes = fabric::head_bytes + payload;
        made.tag = tag(&made, bytes);
        const auto brief = fabric::brief_of(made);
        EP_CHECK(brief.has_value());
        fabric::wire_message back{};
        fabric::expand(*brief, near + 3, near, back);
        EP_CHECK(std::memcmp(&back, &made, bytes) == 0);
        // Said again when the lower halves have come round, it is another message, and its tag is wrong.
        fabric::expand(*brief, near + 3, near + (uint64_t{1} << 32), back);
        EP_CHECK_EQ(back.sequence, made.sequence + (uint64_t{1} << 32));
        EP_CHECK_EQ(std::exchange(back.tag, 0), made.tag);
        EP_CHECK(tag(&back, bytes) != made.tag);
      }
    }
  }
  // Whatever is no request has no number, however many the peer has been sent.
  for (const uint64_t near : {uint64_t{0}, (uint64_t{1} << 31) - 1, (uint64_t{1} << 31) + 1, (uint64_t{1} << 32) + 5, (uint64_t{7} << 32) - 1}) {
    for (const auto kind : {fabric::message_kind::alive, fabric::message_kind::bye, fabric::message_kind::byed, fabric::message_kind::retire, fabric::message_kind::retired}) {
      fabric::wire_message made = sample(0, near + 3, 0);
      made.kind = kind;
      made.tag = tag(&made, fabric::head_bytes);
      fabric::wire_message back{};
      fabric::expand(*fabric::brief_of(made), near, near, back);
      EP_CHECK(std::memcmp(&back, &made, fabric::head_bytes) == 0);
    }
  }
  EP_CHECK(!fabric::brief_of(sample(1, 1, fabric::brief_payload_bytes + 1)).has_value());
  fabric::wire_message wide = sample(1, 1, 8);
  wide.pieces = fabric::brief_pieces;
  fabric::wire_message narrow{};
  fabric::expand(*fabric::brief_of(wide), 1, 1, narrow);
  EP_CHECK_EQ(narrow.pieces, fabric::brief_pieces);
  ++wide.pieces;
  EP_CHECK(!fabric::brief_of(wide).has_value());
  wide.pieces = 0;
  ++wide.memory;
  EP_CHECK(!fabric::brief_of(wide).has_value());
  --wide.memory;
  ++wide.slot;
  EP_CHECK(!fabric::brief_of(wide).has_value());
}

// Nothing tells of the failure of what is injected, so signs of life go on beside it, however much there is.
void test_signs_beside_briefs() {
  fabric::engine_options options;
  options.heartbeat_ns = 20'000'000; // no pause between puts comes near that
  scripted_world world(2, 41, options);
  const auto others = [&] { return world.ranks.side(0).engine->counts().messages - world.network.injected(0); };
  world.network.hold_writes(true); // or they would go by the mailbox, of which a failure would be told
  for (uint64_t i = 0; i < fabric::mailbox::slots; ++i) world.ranks.post(0, world.ranks.bytes_to(0, 1, 0, 0, 8));
  EP_CHECK(soon([&] { return world.network.written(0) == fabric::mailbox::slots; }));
  const uint64_t before = others();
  uint64_t last = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(400);
  while (std::chrono::steady_clock::now() < end) {
    last = world.ranks.post(0, world.ranks.bytes_to(0, 1, 0, 0, 8));
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  EP_CHECK(others() >= before + 6);
  world.network.hold_writes(false);
  EP_CHECK(world.ranks.ended(0, 1, last) == request_state::done);
}

// Small requests go by the peer's mailbox as long as it has a slot free, and as messages otherwise: each slot is written anew only when what was there has been carried out.
void test_mailbox() {
  constexpr uint64_t posted = 5 * fabric::mailbox::slots;
  for (uint64_t seed = 43; seed < 49; ++seed) {
    const uint64_t bytes = seed % 2 == 0 ? 8 : fabric::brief_payload_bytes;
    scripted_world world(2, seed);
    uint8_t* data = world.ranks.side(0).memory->own_data();
    for (uint64_t i = 0; i < bytes * posted; ++i) data[i] = pattern(i, 7);
    const auto put = [&](uint64_t i) { return world.ranks.post(0, fabric_ranks::with_signal(world.ranks.bytes_to(0, 1, bytes * i, bytes * i, bytes), 1, 1)); };
    world.network.hold_writes(true);
    for (uint64_t i = 0; i + 1 < posted; ++i) put(i);
    // Of those that a provider does not take at once, the others are messages, as signs of life are.
    EP_CHECK(soon([&] { return bytes == 8 ? world.network.written(0) + world.network.injected(0) == posted - 1 : world.ranks.side(0).engine->counts().messages >= posted - 1; }));
    EP_CHECK_EQ(world.network.injected(0), bytes == 8 ? posted - 1 - fabric::mailbox::slots : 0);
    EP_CHECK_EQ(world.network.written(0), fabric::mailbox::slots);
    EP_CHECK_EQ(world.ranks.signal(1, 1), 0u); // the first of them is a write
    world.network.hold_writes(false);
    EP_CHECK(world.ranks.ended(0, 1, put(posted - 1)) == request_state::done);
    EP_CHECK_EQ(world.ranks.signal(1, 1), posted);
    EP_CHECK(std::memcmp(world.ranks.side(1).memory->own_data(), data, bytes * posted) == 0);
    // One at a time: all of them.
    const uint64_t before = world.network.written(0);
    for (uint64_t i = 0; i < posted; ++i) EP_CHECK(world.ranks.ended(0, 1, put(i)) == request_state::done);
    EP_CHECK_EQ(world.network.written(0), before + posted);
    // Between requests in pieces, whose numbers name slots that hold what is older.
    for (uint64_t i = 0; i < posted; ++i) {
      world.ranks.post(0, fabric_ranks::with_signal(world.ranks.bytes_to(0, 1, 0, 100'000, 2500), 2, 1));
      put(i);
    }
    EP_CHECK(soon([&] { return world.ranks.signal(1, 1) == 3 * posted && world.ranks.signal(1, 2) == posted; }));
    EP_CHECK_EQ(world.ranks.side(1).engine->counts().refused, 0u);
    EP_CHECK_EQ(world.ranks.side(1).context->life(0), uint32_t{EP_LIFE_ALIVE});
  }
}

// Whoever has the key of a mailbox is not believed without the keys of the rank in whose name it writes there; and since that rank's own request may have lain there, it is lost, not awaited for ever.
void test_forged_mail() {
  enum class lie { tag, number, source, length, nothing };
  for (const lie how : {lie::tag, lie::number, lie::source, lie::length, lie::nothing}) {
    scripted_world world(3, 53);
    fabric_side& target = world.ranks.side(1);
    const std::vector<uint8_t> address = must(target.engine->address());
    fabric::mailbox_place place;
    std::memcpy(&place, address.data() + address.size() - sizeof place, sizeof place);
    fabric::wire_message message{};
    message.magic = fabric::wire_magic;
    message.kind = fabric::message_kind::request;
    message.op = static_cast<uint8_t>(signal_op::add);
    message.source = how == lie::source ? 2 : 0;
    message.sequence = how == lie::number ? fabric::mailbox::slots : 0;
    message.memory = target.memory->device_handle().memory_id;
    message.slot = 3;
    message.value = 1;
    message.tag = fabric::tagger(keys_of(how == lie::tag ? 1 : message.source, 3)[1].out)(&message, fabric::head_bytes);
    auto brief = fabric::brief_of(message);
    if (how == lie::length) brief->payload_bytes = UINT8_MAX; // more than lies in a slot
    const auto* bytes = reinterpret_cast<const uint8_t*>(&*brief);
    world.network.inject_write(1, {bytes, bytes + (how == lie::nothing ? 0 : fabric::brief_head_bytes)}, fabric::mailbox::address(place, 0, 0), fabric::mail_data(0, 0));
    EP_CHECK(soon([&] { return target.context->life(0) == EP_LIFE_DEAD; }));
    EP_CHECK(target.engine->failure_of(0).text.find("mailbox") != std::string::npos);
    EP_CHECK_EQ(target.engine->counts().refused, how == lie::tag ? 1u : 0u);
    EP_CHECK_EQ(world.ranks.signal(1, 3), 0u);
    EP_CHECK_EQ(target.context->life(2), uint32_t{EP_LIFE_ALIVE});
  }
}

// Whoever lacks the keys is not believed, in whoever's name it speaks: neither a goodbye nor a sign of life.
void test_strangers() {
  fabric::engine_options options;
  options.heartbeat_ns = 20'000'000;
  options.silence_ns = 400'000'000;
  scripted_world world(2, 31, options);
  fabric_side& own = world.ranks.side(0);
  EP_CHECK(world.ranks.ended(0, 1, world.ranks.post(0, world.ranks.bytes_to(0, 1, 0, 0, 300))) == request_state::done);
  fabric::wire_message message{};
  message.magic = fabric::wire_magic;
  message.source = 1;
  message.value = EP_LIFE_CLOSED;
  const auto say = [&](fabric::message_kind kind) {
    message.kind = kind;
    message.tag = 1;
    const auto* bytes = reinterpret_cast<const uint8_t*>(&message);
    world.network.inject(0, {bytes, bytes + fabric::head_bytes});
  };
  say(fabric::message_kind::bye);
  EP_CHECK(soon([&] { return own.engine->counts().refused == 1; }));
  EP_CHECK_EQ(own.context->life(1), uint32_t{EP_LIFE_ALIVE});
  EP_CHECK_EQ(own.engine->violation(), std::string());
  world.network.cut(1);
  EP_CHECK(soon([&] {
    say(fabric::message_kind::alive);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return own.context->life(1) != EP_LIFE_ALIVE;
  }));
}

// A peer is told of a memory before this rank has routed it. One that does not wait is given up.
void test_not_routed_yet() {
  scripted_world world(2, 37);
  fabric_side& own = world.ranks.side(0);
  const auto early = must(symmetric_memory::create(own.context, 4096, 4));
  must(own.engine->add_memory(early));
  fabric::wire_message message{};
  message.magic = fabric::wire_magic;
  message.kind = fabric::message_kind::request;
  message.op = static_cast<uint8_t>(signal_op::add);
  message.payload_bytes = 8;
  message.source = 1;
  message.memory = early->device_handle().memory_id;
  message.value = 1;
  const size_t length = fabric::head_bytes + 8;
  message.tag = fabric::tagger(keys_of(1, 2)[0].out)(&message, length);
  const auto* bytes = reinterpret_cast<const uint8_t*>(&message);
  world.network.inject(0, {bytes, bytes + length});
  EP_CHECK(soon([&] { return own.context->life(1) == EP_LIFE_DEAD; }));
  EP_CHECK(own.engine->failure_of(1).text.find("does not fit the memory") != std::string::npos);
}

} // namespace

int main() {
  test_not_routed_yet();
  test_tags();
  test_briefs();
  test_signs_beside_briefs();
  test_mailbox();
  test_pairs();
  test_told_meanwhile();
  test_forged_mail();
  test_strangers();
  test_any_order();
  test_raw_link();
  test_kernels();
  test_window();
  test_back_pressure();
  test_unawaited();
  test_heavy();
  test_signal_waits_for_bytes();
  test_retired_memory();
  test_silent_peer();
  test_full_for_ever();
  test_leaving();
  test_leaving_at_once();
  test_leaving_behind_another();
  test_room_is_not_awaited();
  test_stopped_ring();
  return ep::check::finish();
}
