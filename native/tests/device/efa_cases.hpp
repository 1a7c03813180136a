// What several tests of the EFA post path do. `Way` is ours or the pull request's.
#pragma once

#include "efa_world.hpp"

namespace ep::test {

/* By posters that take turns; the tests `efa_..._unordered_test` are the same by those that wait for none, as kernels of a GPU. */
#ifndef EP_TEST_EFA_WAY
#define EP_TEST_EFA_WAY 0u
#endif
constexpr uint32_t efa_test_way = EP_TEST_EFA_WAY;
using our_gin = efa_gin<EP_EFA_SHARE_DEVICE | efa_test_way>;

template <uint32_t Sharing> struct our_way_of {
  using options = gin_options;
  static efa_gin<Sharing | efa_test_way> gin(efa_world& world, int32_t rank) { return {world.at(rank).device}; }
  static const ep_efa_memory& part(efa_world& world, int32_t rank) { return world.part(rank); }
};

using our_way = our_way_of<EP_EFA_SHARE_DEVICE>;

template <class Rules> struct pr_way_of {
  using options = efa_pr_options;
  static efa_pr_gin_of<Rules> gin(efa_world& world, int32_t rank) { return {world.at(rank).pr}; }
  static const ep_efa_pr_mr& part(efa_world& world, int32_t rank) { return world.pr_part(rank); }
};
using pr_way = pr_way_of<efa_pr_rules>;

template <class Way> typename Way::options aggregated(bool aggregate) {
  typename Way::options made;
  made.aggregate = aggregate;
  return made;
}

// Rank 0's values 1, 2, ... to rank 1, in runs of which all but the last are aggregated; then a flush.
template <class Way> bool post_values(efa_context& ctx, efa_world& world, uint64_t count, uint32_t run) {
  const auto gin = Way::gin(world, 0);
  const thread_coop<efa_context> coop{ctx};
  ep_kernel_status* status = &world.at(0).status;
  for (uint64_t i = 0; i < count; ++i) {
    const auto options = aggregated<Way>((i + 1) % run != 0);
    if (!gin.put_value(ctx, coop, world.team(), 1, Way::part(world, 0), i % 64 * 8, i + 1, gin_no_action{}, options, status)) return false;
  }
  return gin.flush(ctx, coop, status);
}

inline uint64_t word_at(efa_world& world, int32_t rank, uint64_t offset) {
  uint64_t value;
  std::memcpy(&value, world.data(rank) + offset, 8);
  return value;
}

// Until *word >= value, whatever becomes of it.
inline bool wait_word(efa_context& ctx, const uint64_t* word, uint64_t value) { return ctx.wait(word, value, -1, EP_STAGE_ARRIVAL, nullptr); }

// Lanes of rank 0 put messages to rank 1, each with a signal; rank 1 looks at all of them when the signal has come to their number. Sources are the upper half of a
// part, targets the lower one.
struct traffic_options {
  uint32_t blocks = 2;
  uint32_t lanes = 2;
  uint32_t rounds = 4;
  uint32_t bytes = 40;
  uint32_t run = 1; // of puts, of which all but the last are aggregated
  bool counts = false; // every put has a counter, too
};

struct traffic_outcome {
  simt_result result;
  uint64_t corrupt = 0;
  bool clean = false;
  bool right() const { return result.ok && corrupt == 0 && clean; }
};

inline uint8_t traffic_byte(uint64_t message, uint64_t at) { return static_cast<uint8_t>(message * 31 + at * 7 + 1); }

template <class Way> traffic_outcome traffic(efa_world& world, const traffic_options& wanted) {
  const uint64_t half = world.options.bytes / 2;
  const uint64_t senders = static_cast<uint64_t>(wanted.blocks) * wanted.lanes;
  const uint64_t messages = senders * wanted.rounds;
  if (messages * wanted.bytes > half) throw std::runtime_error("traffic does not fit");
  for (uint64_t i = 0; i < messages * wanted.bytes; ++i) world.data(0)[half + i] = traffic_byte(i / wanted.bytes, i % wanted.bytes);
  traffic_outcome seen;
  seen.result = world.run(shape(wanted.blocks, wanted.lanes, 1), [&](efa_context& ctx, int32_t rank) {
    const auto gin = Way::gin(world, rank);
    const thread_coop<efa_context> coop{ctx};
    const uint64_t lane = ctx.block() * wanted.lanes + ctx.lane();
    if (rank == 1) {
      if (lane != 0) return true;
      if (!gin.wait_signal(ctx, coop, 0, messages, nullptr)) return false;
      for (uint64_t i = 0; i < messages * wanted.bytes; ++i) seen.corrupt += world.data(1)[i] != traffic_byte(i / wanted.bytes, i % wanted.bytes) ? 1 : 0;
      return true;
    }
    for (uint64_t round = 0; round < wanted.rounds; ++round) {
      const uint64_t at = (lane * wanted.rounds + round) * wanted.bytes;
      const auto options = aggregated<Way>((round + 1) % wanted.run != 0);
      const auto& part = Way::part(world, 0);
      const bool ok = wanted.counts ? gin.put(ctx, coop, world.team(), 1, part, at, part, half + at, wanted.bytes, gin_signal_inc{0}, gin_counter_inc{0}, options, nullptr)
                                    : gin.put(ctx, coop, world.team(), 1, part, at, part, half + at, wanted.bytes, gin_signal_inc{0}, gin_no_action{}, options, nullptr);
      if (!ok) return false;
    }
    return gin.flush(ctx, coop, nullptr);
  });
  seen.clean = world.violations().empty();
  return seen;
}

} // namespace ep::test
