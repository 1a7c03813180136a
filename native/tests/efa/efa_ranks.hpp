// Ranks of this thread, each with an EFA NIC of a driver, connected, with one memory: what a transport does, without JS.
#pragma once

#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "../check.hpp"
#include "core/efa/device_choice.hpp"
#include "core/efa/rank_nic.hpp"

namespace ep::test {

template <class Value> Value must(result<Value> got) {
  if (!got.ok()) {
    std::fprintf(stderr, "%s\n", got.why().message.c_str());
    std::abort();
  }
  return std::move(got.value());
}

// Looks until it holds; false: it did not within 30 s.
inline bool soon(const std::function<bool()>& holds) {
  const int64_t deadline = clock_now_ns() + 30'000'000'000;
  while (!holds()) {
    if (clock_now_ns() > deadline) return false;
    sched_yield();
  }
  return true;
}

struct efa_side {
  std::shared_ptr<rank_context> context;
  std::shared_ptr<efa::rank_nic> nic;
  std::shared_ptr<symmetric_memory> memory;
};

class efa_ranks {
 public:
  // `driver` is called for each rank; `hooks` says what its device, which was just opened, offers besides.
  efa_ranks(int32_t world, const efa::endpoint_options& options, uint64_t bytes, uint64_t slots, const std::function<std::unique_ptr<dl::efa_driver>()>& driver,
            const std::function<efa::emulator_hooks(dl::efa_device&)>& hooks) {
    std::vector<ep_segment_handle> handles;
    for (int32_t rank = 0; rank < world; ++rank) {
      sides.push_back({must(rank_context::create(rank, world, world)), nullptr, nullptr});
      handles.push_back(sides.back().context->handle());
    }
    std::vector<efa::rank_address> addresses;
    for (efa_side& one : sides) {
      (void)must(one.context->connect(handles));
      auto library = driver();
      auto device = must(efa::device_open(*library, ""));
      efa::emulator_hooks extra = hooks(*device);
      one.nic = must(efa::rank_nic::create(one.context, std::move(library), std::move(device), options, std::move(extra)));
      addresses.push_back(one.nic->endpoints().address());
    }
    for (efa_side& one : sides) (void)must(one.nic->endpoints().connect(addresses));
    allocate(bytes, slots);
  }
  ~efa_ranks() {
    for (efa_side& one : sides) {
      if (one.nic) one.nic->stop();
    }
    for (efa_side& one : sides) one.context->leave(true);
  }

  void allocate(uint64_t bytes, uint64_t slots) {
    std::vector<std::vector<uint8_t>> parts;
    for (efa_side& one : sides) {
      one.memory = must(symmetric_memory::create(one.context, bytes, slots));
      parts.push_back(must(one.nic->add_memory(*one.memory)));
    }
    for (efa_side& one : sides) (void)must(one.nic->route(*one.memory, parts));
  }

  efa::host_request write(int32_t from, int32_t to, uint64_t at, uint64_t offset, uint64_t bytes) const {
    efa::host_request made;
    made.what = efa::host_request::kind::write;
    made.peer = to;
    made.offset = offset;
    made.local = reinterpret_cast<uint64_t>(sides[static_cast<size_t>(from)].memory->own_data()) + at;
    made.bytes = bytes;
    return made;
  }
  uint64_t post(int32_t from, const efa::host_request& request) const {
    const efa_side& one = sides[static_cast<size_t>(from)];
    return must(one.nic->post(*one.memory, request));
  }
  efa::request_state ended(int32_t from, int32_t to, uint64_t number) const {
    efa::request_state state = efa::request_state::pending;
    (void)soon([&] { return (state = sides[static_cast<size_t>(from)].nic->look(to, number)) != efa::request_state::pending; });
    return state;
  }
  // A signal word of a rank, folded.
  uint64_t signal(int32_t rank, uint64_t slot) const {
    const efa_side& one = sides[static_cast<size_t>(rank)];
    one.context->progress().run();
    return std::atomic_ref<uint64_t>(one.memory->own_signals()[slot]).load();
  }

  std::vector<efa_side> sides;
};

// What every backing must do: each kind of request, signals by arrival and by cell, from several sources, sources that come and go.
inline void check_requests(efa_ranks& ranks) {
  using efa::host_request;
  using efa::request_state;
  uint8_t* here = ranks.sides[0].memory->own_data();
  uint8_t* there = ranks.sides[1].memory->own_data();
  for (uint64_t i = 0; i < 1000; ++i) here[i] = static_cast<uint8_t>(i * 7);

  host_request one = ranks.write(0, 1, 3, 4001, 997);
  one.signals = true;
  one.slot = 1;
  one.add = 1;
  EP_CHECK(ranks.ended(0, 1, ranks.post(0, one)) == request_state::done);
  EP_CHECK(soon([&] { return ranks.signal(1, 1) == 1; }));
  EP_CHECK_EQ(std::memcmp(here + 3, there + 4001, 997), 0);

  host_request word;
  word.what = host_request::kind::word;
  word.peer = 1;
  word.offset = 16;
  word.bytes = 4;
  word.word = 0x11223344;
  word.signals = true;
  word.slot = 1;
  word.add = uint64_t{1} << 40;
  std::memset(there + 16, 0xaa, 8);
  EP_CHECK(ranks.ended(0, 1, ranks.post(0, word)) == request_state::done);
  EP_CHECK(soon([&] { return ranks.signal(1, 1) == (uint64_t{1} << 40) + 1; }));
  EP_CHECK_EQ(*reinterpret_cast<uint64_t*>(there + 16), uint64_t{0xaaaaaaaa11223344});

  // To oneself, and from the other side, onto the same slot; modulo 2^64.
  host_request only;
  only.signals = true;
  only.slot = 1;
  only.peer = 1;
  only.add = ~uint64_t{0};
  EP_CHECK(ranks.ended(1, 1, ranks.post(1, only)) == request_state::done);
  only.add = 1;
  EP_CHECK(ranks.ended(1, 1, ranks.post(1, only)) == request_state::done);
  EP_CHECK(soon([&] { return ranks.signal(1, 1) == (uint64_t{1} << 40) + 1; }));
  EP_CHECK_EQ(ranks.signal(1, 0), 0u);
  EP_CHECK_EQ(ranks.signal(0, 1), 0u);

  host_request read = ranks.write(0, 1, 5000, 4001, 100);
  read.what = host_request::kind::read;
  EP_CHECK(ranks.ended(0, 1, ranks.post(0, read)) == request_state::done);
  EP_CHECK_EQ(std::memcmp(here + 5000, there + 4001, 100), 0);

  auto outside = std::make_shared<std::vector<uint8_t>>(4096, uint8_t{0x5c});
  host_request from = ranks.write(0, 1, 0, 100, 64);
  from.local = reinterpret_cast<uint64_t>(outside->data());
  EP_CHECK(!ranks.sides[0].nic->post(*ranks.sides[0].memory, from).ok());
  EP_CHECK(ranks.sides[0].nic->prepare_source(from.local, 4096, outside).ok());
  from.keep = outside;
  EP_CHECK(ranks.ended(0, 1, ranks.post(0, from)) == request_state::done);
  EP_CHECK_EQ(there[163], 0x5c);
}

// More than the ring takes, with values of their own: nothing is lost, and every signal is seen after its bytes.
inline void check_burst(efa_ranks& ranks, uint64_t count) {
  uint64_t total = 0;
  uint64_t last = 0;
  auto* there = reinterpret_cast<uint64_t*>(ranks.sides[1].memory->own_data());
  const uint64_t before = ranks.signal(1, 2);
  for (uint64_t i = 0; i < count; ++i) {
    efa::host_request word;
    word.what = efa::host_request::kind::word;
    word.peer = 1;
    word.offset = 8 * (i % 64);
    word.bytes = 8;
    word.word = i + 1;
    word.signals = true;
    word.slot = 2;
    word.add = i % 3 == 0 ? 1 : i;
    total += word.add;
    last = ranks.post(0, word);
  }
  EP_CHECK(ranks.ended(0, 1, last) == efa::request_state::done);
  EP_CHECK(soon([&] { return ranks.signal(1, 2) - before == total; }));
  for (uint64_t i = count - 64; i < count; ++i) EP_CHECK(there[i % 64] % 64 == (i + 1) % 64);
}

} // namespace ep::test
