// Ranks of one process with an engine and a memory each, and what is checked of them over any port.
#pragma once

#include <chrono>
#include <functional>
#include <thread>

#include "check.hpp"
#include "ep/device/endpoint.h"
#include "fabric/engine.hpp"
#include "fabric/raw_link.hpp"
#include "launch.hpp"

namespace ep::test {

template <class T> T must(result<T> got) {
  if (!got.ok()) std::fprintf(stderr, "%s\n", got.why().message.c_str());
  EP_CHECK(got.ok());
  return std::move(got.value());
}

template <class Look> bool soon(Look&& look, int seconds = 20) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  while (!look()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

// What a rank has for each peer: other keys for each direction of each pair.
inline std::vector<fabric::link_keys> keys_of(int32_t rank, int32_t world) {
  const auto key = [](int32_t from, int32_t to) {
    fabric::tag_key made{};
    for (size_t i = 0; i < made.size(); ++i) made[i] = static_cast<uint8_t>(static_cast<size_t>(from * 16) + static_cast<size_t>(to) + i * 17);
    return made;
  };
  std::vector<fabric::link_keys> keys;
  for (int32_t peer = 0; peer < world; ++peer) keys.push_back({key(rank, peer), key(peer, rank)});
  return keys;
}

struct fabric_side {
  std::shared_ptr<rank_context> context;
  std::unique_ptr<fabric::engine> engine;
  std::shared_ptr<symmetric_memory> memory;
};

class fabric_ranks {
 public:
  using port_maker = std::function<std::unique_ptr<dl::fabric_port>(int32_t)>;
  // `on_host`: how many of them share the cores; 0: all.
  fabric_ranks(int32_t ranks, uint64_t bytes, uint64_t slots, const fabric::engine_options& options, const port_maker& port, int32_t on_host = 0) {
    sides.resize(static_cast<size_t>(ranks));
    std::vector<std::vector<uint8_t>> addresses;
    for (int32_t rank = 0; rank < ranks; ++rank) {
      fabric_side& one = side(rank);
      one.context = must(rank_context::create(rank, ranks, on_host == 0 ? ranks : on_host));
      one.context->connect_apart();
      one.engine = std::make_unique<fabric::engine>(one.context, port(rank), options);
      addresses.push_back(must(one.engine->address()));
    }
    for (int32_t rank = 0; rank < ranks; ++rank) must(side(rank).engine->connect(addresses, keys_of(rank, ranks)));
    allocate(bytes, slots);
  }
  ~fabric_ranks() {
    // Each waits until the others have heard: one after the other would wait for who is not leaving yet, which answers all the same.
    for (fabric_side& one : sides) {
      if (one.engine) one.engine->stop(true);
      one.context->leave(true);
    }
  }

  fabric_side& side(int32_t rank) { return sides[static_cast<size_t>(rank)]; }

  void allocate(uint64_t bytes, uint64_t slots) {
    std::vector<std::vector<uint8_t>> parts;
    for (fabric_side& one : sides) {
      one.memory = must(symmetric_memory::create(one.context, bytes, slots));
      parts.push_back(must(one.engine->add_memory(one.memory)));
    }
    for (fabric_side& one : sides) must(one.engine->route(*one.memory, parts));
  }

  fabric::request bytes_to(int32_t from, int32_t to, uint64_t src, uint64_t dst, uint64_t bytes) {
    fabric::request made;
    made.peer = to;
    made.local = reinterpret_cast<uint64_t>(side(from).memory->own_data()) + src;
    made.stride = made.row_bytes = bytes;
    made.rows = 1;
    made.offset = dst;
    made.keep = side(from).memory;
    return made;
  }
  static fabric::request with_signal(fabric::request made, uint64_t slot, uint64_t add) {
    made.op = signal_op::add;
    made.slot = slot;
    made.value = add;
    return made;
  }
  uint64_t post(int32_t from, fabric::request made) { return must(side(from).engine->post(*side(from).memory, std::move(made))); }
  fabric::request_state ended(int32_t from, int32_t to, uint64_t number) {
    EP_CHECK(soon([&] { return side(from).engine->look(to, number) != fabric::request_state::pending; }));
    return side(from).engine->look(to, number);
  }
  uint64_t signal(int32_t rank, uint64_t slot) { return std::atomic_ref<uint64_t>(side(rank).memory->own_signals()[slot]).load(std::memory_order_acquire); }

  std::vector<fabric_side> sides;
};

inline uint8_t pattern(uint64_t i, uint64_t salt) { return static_cast<uint8_t>(i * 31 + (i >> 8) * 7 + salt * 101 + 1); }

// Puts of every size with a signal each: whoever sees the n-th signal of a source finds its first n puts whole. Then reads, words, bytes without a signal.
inline void check_requests(fabric_ranks& ranks) {
  constexpr uint64_t sizes[] = {0, 1, 7, 8, 9, 15, 16, 17, 192, 951, 952, 953, 1000, 1001, 4096, 70'000};
  constexpr uint64_t stride = 70'016;
  fabric_side& sender = ranks.side(0);
  fabric_side& target = ranks.side(1);
  const uint64_t count = std::size(sizes);
  uint8_t* data = sender.memory->own_data();
  for (uint64_t i = 0; i < count * stride; ++i) data[i] = pattern(i, 3);
  std::vector<uint64_t> numbers;
  for (uint64_t i = 0; i < count; ++i) numbers.push_back(ranks.post(0, fabric_ranks::with_signal(ranks.bytes_to(0, 1, i * stride, i * stride, sizes[i]), 0, 10)));
  uint64_t seen = 0;
  EP_CHECK(soon([&] {
    const uint64_t now = ranks.signal(1, 0) / 10;
    for (; seen < now; ++seen) {
      const uint64_t at = seen * stride;
      EP_CHECK(std::memcmp(target.memory->own_data() + at, data + at, sizes[seen]) == 0);
      EP_CHECK_EQ(target.memory->own_data()[at + sizes[seen]], 0);
    }
    return seen == count;
  }));
  for (const uint64_t number : numbers) EP_CHECK(ranks.ended(0, 1, number) == fabric::request_state::done);
  EP_CHECK_EQ(ranks.signal(1, 0), count * 10);

  fabric::request read = ranks.bytes_to(1, 0, count * stride, 5, 3001);
  read.reads = true;
  EP_CHECK(ranks.ended(1, 0, ranks.post(1, read)) == fabric::request_state::done);
  EP_CHECK(std::memcmp(target.memory->own_data() + count * stride, data + 5, 3001) == 0);

  fabric::request word;
  word.peer = 1;
  word.offset = 70'008;
  word.word = 0x1122334455667788;
  word.word_bytes = 8;
  EP_CHECK(ranks.ended(0, 1, ranks.post(0, word)) == fabric::request_state::done);
  uint64_t found = 0;
  std::memcpy(&found, target.memory->own_data() + 70'008, 8);
  EP_CHECK_EQ(found, 0x1122334455667788u);

  // A rank's own.
  EP_CHECK(ranks.ended(0, 0, ranks.post(0, fabric_ranks::with_signal(ranks.bytes_to(0, 0, 1, 2 * stride + 100, 500), 1, 3))) == fabric::request_state::done);
  EP_CHECK_EQ(ranks.signal(0, 1), 3u);

  // What does not fit is refused, and nothing is sent.
  EP_CHECK(!sender.engine->post(*sender.memory, ranks.bytes_to(0, 1, 0, sender.memory->byte_length() - 4, 5)).ok());
  EP_CHECK(!sender.engine->post(*sender.memory, fabric_ranks::with_signal(ranks.bytes_to(0, 1, 0, 0, 8), sender.memory->signal_slots(), 1)).ok());
  EP_CHECK_EQ(sender.engine->violation() + target.engine->violation(), std::string());
}

// On a word of 8 bytes of `to`; what it was lands at `old` of this rank's memory.
inline fabric::request atomic_on(fabric_ranks& ranks, int32_t from, int32_t to, uint64_t offset, uint64_t old, uint64_t add) {
  fabric::request made;
  made.peer = to;
  made.atomic = fabric::remote_atomic::fetch_add;
  made.word = add;
  made.word_bytes = 8;
  made.offset = offset;
  made.local = reinterpret_cast<uint64_t>(ranks.side(from).memory->own_data()) + old;
  made.keep = ranks.side(from).memory;
  return made;
}
inline fabric::request swap_on(fabric_ranks& ranks, int32_t from, int32_t to, uint64_t offset, uint64_t old, uint64_t compare, uint64_t swap) {
  fabric::request made = atomic_on(ranks, from, to, offset, old, swap);
  made.atomic = fabric::remote_atomic::compare_swap;
  made.compare = compare;
  return made;
}

// All ranks add to one word of rank 0 at the same time, rank 0 too: each finds a value that nobody else does, and their sum is there in the end. Then swaps.
inline void check_atomics(fabric_ranks& ranks) {
  constexpr uint64_t each = 200;
  constexpr uint64_t word = 64, olds = 4096;
  const auto world = static_cast<int32_t>(ranks.sides.size());
  const auto load = [&](int32_t rank, uint64_t offset) { return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(ranks.side(rank).memory->own_data() + offset)).load(); };
  std::vector<std::thread> adders;
  for (int32_t rank = 0; rank < world; ++rank) {
    adders.emplace_back([&, rank] {
      std::vector<uint64_t> numbers;
      for (uint64_t i = 0; i < each; ++i) numbers.push_back(ranks.post(rank, atomic_on(ranks, rank, 0, word, olds + 8 * i, 1)));
      for (const uint64_t number : numbers) EP_CHECK(ranks.ended(rank, 0, number) == fabric::request_state::done);
    });
  }
  for (std::thread& one : adders) one.join();
  const uint64_t sum = each * static_cast<uint64_t>(world);
  std::vector<bool> seen(sum);
  for (int32_t rank = 0; rank < world; ++rank) {
    for (uint64_t i = 0; i < each; ++i) {
      const uint64_t old = load(rank, olds + 8 * i);
      EP_CHECK(old < sum && !seen[old]);
      if (old < sum) seen[old] = true;
    }
  }
  EP_CHECK_EQ(load(0, word), sum);
  EP_CHECK_EQ(load(0, word - 8) | load(0, word + 8), 0u);
  for (int32_t rank = 0; rank < world; ++rank) {
    const uint64_t before = sum + static_cast<uint64_t>(rank);
    const auto swap = [&](uint64_t compare, uint64_t wanted) {
      EP_CHECK(ranks.ended(rank, 0, ranks.post(rank, swap_on(ranks, rank, 0, word, olds, compare, wanted))) == fabric::request_state::done);
      EP_CHECK_EQ(load(rank, olds), before);
    };
    swap(before + 1000, 5);
    EP_CHECK_EQ(load(0, word), before);
    swap(before, before + 1);
    EP_CHECK_EQ(load(0, word), before + 1);
  }
  EP_CHECK(!ranks.side(1).engine->post(*ranks.side(1).memory, atomic_on(ranks, 1, 0, word + 4, olds, 1)).ok());
  EP_CHECK(!ranks.side(1).engine->post(*ranks.side(1).memory, atomic_on(ranks, 1, 0, ranks.side(1).memory->byte_length(), olds, 1)).ok());
  EP_CHECK(ranks.side(0).engine->counts().atomics >= each);
}

// Kernels of all ranks send strided rows to all ranks through the ring, which is smaller than what they send.
inline void check_kernels(fabric_ranks& ranks, uint64_t calls) {
  const auto world = static_cast<int32_t>(ranks.sides.size());
  constexpr uint64_t row = 96, stride = 128, rows = 9, part = row * rows;
  const uint64_t half = ranks.side(0).memory->byte_length() / 2;
  for (int32_t rank = 0; rank < world; ++rank) {
    for (uint64_t i = 0; i < stride * rows; ++i) ranks.side(rank).memory->own_data()[half + i] = pattern(i, static_cast<uint64_t>(rank));
  }
  std::vector<std::thread> kernels;
  for (int32_t rank = 0; rank < world; ++rank) {
    kernels.emplace_back([&, rank] {
      const ep_memory_handle handle = ranks.side(rank).memory->device_handle();
      EP_CHECK_EQ(handle.header.kind, EP_MEMORY_PROXY);
      ep_kernel_status status{};
      const kernel_environment environment{ranks.side(rank).context->waits(nullptr, deadline_after(30'000))};
      EP_CHECK(fast_run(2, environment, [&](auto& context) {
        const proxy_endpoint endpoint{handle};
        const thread_coop<std::remove_reference_t<decltype(context)>> coop{context};
        const auto* source = reinterpret_cast<const void*>(ranks.side(rank).memory->own_data() + half);
        for (uint64_t call = 0; call < calls; ++call) {
          for (int32_t peer = 0; peer < world; ++peer) {
            const uint64_t to = (context.block() * static_cast<uint64_t>(world) + static_cast<uint64_t>(rank)) * part;
            EP_CHECK(endpoint.put_rows(context, coop, peer, to, source, stride, row, rows, false, 2 + static_cast<uint64_t>(rank), 1, &status));
          }
        }
      }).ok());
      EP_CHECK_EQ(status.status, uint32_t{EP_STATUS_OK});
      auto& ring = *reinterpret_cast<ep_proxy_ring*>(handle.proxy);
      const uint64_t posted = std::atomic_ref<uint64_t>(ring.tail).load();
      EP_CHECK(soon([&] { return std::atomic_ref<uint64_t>(ring.completed).load() >= posted; }));
    });
  }
  for (std::thread& one : kernels) one.join();
  for (int32_t rank = 0; rank < world; ++rank) {
    for (int32_t source = 0; source < world; ++source) {
      EP_CHECK_EQ(ranks.signal(rank, 2 + static_cast<uint64_t>(source)), 2 * calls); // `completed` means landed
      for (uint64_t block = 0; block < 2; ++block) {
        const uint8_t* at = ranks.side(rank).memory->own_data() + (block * static_cast<uint64_t>(world) + static_cast<uint64_t>(source)) * part;
        for (uint64_t i = 0; i < part; ++i) {
          if (at[i] == pattern(i / row * stride + i % row, static_cast<uint64_t>(source))) continue;
          EP_CHECK_EQ(i, part);
          break;
        }
      }
    }
    EP_CHECK_EQ(ranks.side(rank).engine->violation(), std::string());
  }
}

// Two ranks over the port alone: rounds, messages in one direction and in both; then what must be found: other bytes than were sent, and nobody who sends.
inline void check_raw_link(const fabric_ranks::port_maker& port) {
  constexpr uint64_t bytes = 4096;
  constexpr uint64_t window = 4;
  constexpr uint64_t places = 6;
  std::unique_ptr<fabric::raw_link> links[2];
  for (int32_t rank = 0; rank < 2; ++rank) links[rank] = must(fabric::raw_link::open(port(rank), places * bytes));
  for (int32_t rank = 0; rank < 2; ++rank) must(links[rank]->connect(must(links[1 - rank]->description())));
  const auto soon_ns = [] { return deadline_after(20'000); };
  const auto both = [](const auto& body) {
    std::thread other([&] { body(1); });
    body(0);
    other.join();
  };
  both([&](int32_t rank) {
    std::vector<double> samples(50, -1);
    must(links[rank]->ping_pong(rank == 0, samples, soon_ns()));
    for (const double one : samples) EP_CHECK(one > 0);
    EP_CHECK(must(links[rank]->stream(rank == 0 ? 30 : 0, rank == 0 ? 0 : 30, bytes, window, window, 1, soon_ns())) > 0);
  });
  both([&](int32_t rank) { EP_CHECK(must(links[rank]->stream(30, 30, bytes, window, places, 2, soon_ns())) > 0); });
  EP_CHECK_EQ(links[0]->stream(1, 0, bytes, window, places + 1, 3, soon_ns()).why().status, uint32_t{EP_STATUS_INVALID});
  EP_CHECK_EQ(links[0]->stream(1, 0, bytes, window, window - 1, 3, soon_ns()).why().status, uint32_t{EP_STATUS_INVALID});
  both([&](int32_t rank) {
    const auto wrong = links[rank]->stream(rank == 0 ? 3 : 0, rank == 0 ? 0 : 3, bytes, window, window, 3 + static_cast<uint64_t>(rank), soon_ns());
    EP_CHECK_EQ(wrong.ok() ? uint32_t{EP_STATUS_OK} : wrong.why().status, rank == 0 ? uint32_t{EP_STATUS_OK} : uint32_t{EP_STATUS_MISMATCH});
  });
  double sample = 0;
  EP_CHECK_EQ(links[1]->ping_pong(false, {&sample, 1}, deadline_after(50)).why().status, uint32_t{EP_STATUS_TIMEOUT});
}

} // namespace ep::test
