// Contexts of the GIN facade over ranks of efa_ranks.hpp, and what every backing must do with them.
#pragma once

#include <thread>

#include "core/device/fast.hpp"
#include "core/efa/gin_context.hpp"
#include "core/launch.hpp"
#include "efa_ranks.hpp"
#include "ep/device/gin_putvalue.h"

namespace ep::test {

struct gin_ranks {
  gin_ranks(efa_ranks& of, const efa::gin_spec& spec) : ranks(of) {
    std::vector<std::vector<uint8_t>> addresses;
    for (efa_side& one : ranks.sides) {
      contexts.push_back(must(efa::gin_context::create(one.nic, spec)));
      addresses.push_back(contexts.back()->address());
    }
    for (const auto& one : contexts) (void)must(one->connect(addresses));
  }

  // kernel: bool(fast_context&, const efa_gin<>&, const ep_efa_memory&, int32_t rank, ep_kernel_status*), of every rank at once, in a thread of its own. By rank: how it ended.
  template <class Kernel> std::vector<ep_kernel_status> run(const Kernel& kernel, double timeout_ms = 20'000) {
    std::vector<ep_kernel_status> ended(contexts.size());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < contexts.size(); ++rank) {
      threads.emplace_back([&, rank] {
        const kernel_environment environment{ranks.sides[rank].context->waits(nullptr, deadline_after(timeout_ms))};
        fast_context ctx{environment, 0, 1, nullptr};
        const ep_efa_memory memory = must(contexts[rank]->memory_of(*ranks.sides[rank].memory));
        const efa_gin<> gin{contexts[rank]->device()};
        if (gin.check(ctx, &ended[rank])) (void)kernel(ctx, gin, memory, static_cast<int32_t>(rank), &ended[rank]);
      });
    }
    for (std::thread& one : threads) one.join();
    return ended;
  }

  efa_ranks& ranks;
  std::vector<std::shared_ptr<efa::gin_context>> contexts;
};

inline void check_ended(const std::vector<ep_kernel_status>& ended) {
  for (const ep_kernel_status& one : ended) EP_CHECK_EQ(one.status, static_cast<uint32_t>(EP_STATUS_OK));
}

// Puts and values between the parts of a transport's memory, with signals and counters of the context: each ticks its own, and none of the memory's.
inline void check_gin(efa_ranks& ranks) {
  using context = fast_context;
  gin_ranks gins(ranks, {3, 2});
  uint8_t* here = ranks.sides[0].memory->own_data();
  uint8_t* there = ranks.sides[1].memory->own_data();
  std::memset(there, 0, 4096);
  for (uint64_t i = 0; i < 1000; ++i) here[i] = static_cast<uint8_t>(i * 11 + 3);
  bool landed = false;
  uint64_t ticked = 0;
  check_ended(gins.run([&](context& ctx, const efa_gin<>& gin, const ep_efa_memory& memory, int32_t rank, ep_kernel_status* status) {
    const thread_coop<context> coop{ctx};
    const gin_team team{nullptr, 2};
    if (rank == 1) {
      if (!gin.wait_signal(ctx, coop, 2, 1, status)) return false;
      landed = std::memcmp(here + 5, there + 101, 900) == 0;
      return gin.wait_signal(ctx, coop, 1, 3, status) && gin.signal(ctx, coop, team, 0, gin_signal_inc{0}, {}, status) && gin.flush(ctx, coop, status);
    }
    const bool ok = gin.put(ctx, coop, team, 1, memory, 101, memory, 5, 900, gin_signal_inc{2}, gin_counter_inc{0}, {}, status) &&
                    gin.put_value(ctx, coop, team, 1, memory, 2048, uint64_t{0x1122334455667788}, gin_signal_add{1, 3}, {}, status) &&
                    gin.put(ctx, coop, team, 1, memory, 1200, memory, 0, 64, gin_no_action{}, gin_counter_inc{1}, {}, status) && gin.wait_counter(ctx, coop, 1, 1, status) &&
                    gin.get(ctx, coop, team, 1, memory, 101, memory, 3000, 300, {}, status) && gin.get(ctx, coop, team, 1, memory, 0, memory, 0, 0, {}, status) &&
                    gin.flush(ctx, coop, status) && gin.wait_signal(ctx, coop, 0, 1, status);
    ticked = gin.read_counter(ctx, 0) << 16 | gin.read_counter(ctx, 1) << 8 | gin.read_signal(ctx, 2);
    return ok && gin.put(ctx, coop, {nullptr, 3}, 2, memory, 0, memory, 0, 1, gin_no_action{}, gin_no_action{}, {}, nullptr) == false;
  }));
  EP_CHECK(landed);
  EP_CHECK_EQ(ticked, 0x10100u);
  uint64_t value;
  std::memcpy(&value, there + 2048, 8);
  EP_CHECK_EQ(value, uint64_t{0x1122334455667788});
  EP_CHECK_EQ(std::memcmp(here, there + 1200, 64), 0);
  EP_CHECK_EQ(std::memcmp(there + 101, here + 3000, 300), 0);
  for (const int32_t rank : {0, 1}) {
    for (uint64_t slot = 0; slot < ranks.sides[0].memory->signal_slots(); ++slot) EP_CHECK_EQ(ranks.signal(rank, slot), 0u);
  }
  // The other way round: what the host signals in the memory ticks nothing of the context.
  efa::host_request one;
  one.peer = 1;
  one.signals = true;
  one.slot = 2;
  one.add = 1;
  EP_CHECK(ranks.ended(0, 1, ranks.post(0, one)) == efa::request_state::done);
  EP_CHECK(soon([&] { return ranks.signal(1, 2) == 1; }));
  uint64_t unticked = 1;
  check_ended(gins.run([&](context& ctx, const efa_gin<>& gin, const ep_efa_memory&, int32_t rank, ep_kernel_status*) {
    if (rank == 1) unticked = gin.read_signal(ctx, 2);
    return true;
  }));
  EP_CHECK_EQ(unticked, 1u); // of its own put, above
}

// Rounds in which the eighth value was seen before another one.
inline uint64_t check_putvalue(efa_ranks& ranks, uint64_t rounds) {
  gin_ranks gins(ranks, {1, 0});
  for (efa_side& one : ranks.sides) std::memset(one.memory->own_data(), 0, gin_putvalue_words * 8);
  uint64_t behind = 0;
  check_ended(gins.run([&](fast_context& ctx, const efa_gin<>& gin, const ep_efa_memory& memory, int32_t rank, ep_kernel_status* status) {
    return gin_putvalue(ctx, block_coop<fast_context>{ctx}, gin, memory, rank, rounds, &behind, status);
  }));
  return behind;
}

} // namespace ep::test
