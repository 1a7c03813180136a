// Kernels over queue pairs: the dispatch kernels unchanged, and what the endpoint promises about ranges, message lengths, order and failure.
#include "../check.hpp"
#include "compat_case.hpp"
#include "dispatch_case.hpp"

#include "ep/device/compat_dispatch.h"

using namespace ep::test;

namespace {

using in_turn = ep::ibgda_endpoint_of<ep::post_in_turn>;
using by_ringer = ep::ibgda_endpoint_of<ep::post_by_ringer>;
using under_lock = ep::ibgda_endpoint_of<ep::post_under_lock>;

world_options over_queues(int32_t size, uint64_t bytes, uint64_t slots, uint32_t qps) {
  world_options made;
  made.size = size;
  made.bytes = bytes;
  made.slots = slots;
  made.qps = qps;
  return made;
}

void expect_no_violations(world& ranks) {
  for (int32_t rank = 0; rank < ranks.size(); ++rank) {
    for (const std::string& violation : ranks.nic(rank).violations) EP_CHECK_EQ(violation, "");
    EP_CHECK_EQ(ranks.device(rank).broken, 0u);
  }
}

template <class Endpoint> void dispatches(int32_t size, uint64_t seed) {
  case_options wanted;
  wanted.size = size;
  wanted.calls = 3;
  wanted.leases = 1 + static_cast<uint32_t>(seed % 2);
  wanted.parts = 1 + static_cast<uint32_t>(seed % 3);
  dispatch_case plan(wanted, seed);
  const uint32_t blocks = 1 + static_cast<uint32_t>(seed / 3 % 3);
  world_options options = over_queues(size, plan.bytes(), plan.slots(), 1 + static_cast<uint32_t>(seed / 2 % 3));
  options.depth = 1u << (seed % 4 + (std::is_same_v<Endpoint, under_lock> ? 0 : seed % 2));
  options.collapsed = seed % 5 != 0;
  options.max_message = seed % 4 == 0 ? 24 : uint64_t{1} << 30;
  if (blocks <= options.qps && seed % 7 < 4) options.sharing = seed % 7 < 2 ? EP_IBGDA_SHARE_BLOCK : EP_IBGDA_SHARE_THREAD;
  world ranks(options);
  const auto args = all_args(plan, ranks);
  std::atomic<uint32_t> wrong{0};
  const auto result = ranks.run_simt(shape(blocks, 8, seed % 2 != 0 ? 4 : 8), seeded(seed), [&](auto& ctx, int32_t rank) {
    const auto& own = args[static_cast<size_t>(rank)];
    const Endpoint endpoint{own[0].memory};
    const bool ok = run_calls(ctx, endpoint, ranks, plan, rank, own, wrong,
                              [](auto& c, const auto& e, const ep_dispatch_args& a) { return ep::attention_dispatch(c, e, a); });
    return ok && endpoint.quiet_key(ctx, ep::block_coop<ep::simt_context>{ctx}, nullptr);
  });
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  EP_CHECK_EQ(wrong.load(), 0u);
  for (int32_t rank = 0; rank < size; ++rank) {
    for (int32_t peer = 0; peer < size; ++peer) {
      for (uint32_t key = 0; key < options.qps; ++key) EP_CHECK_EQ(ranks.qp(rank, peer, key).done, ranks.qp(rank, peer, key).taken);
    }
  }
  expect_no_violations(ranks);
}

void dispatches_on_threads(int32_t size, uint64_t seed) {
  dispatch_case plan({size, 6, 2, 2, true, true}, seed);
  world ranks(over_queues(size, plan.bytes(), plan.slots(), 2));
  const auto args = all_args(plan, ranks);
  std::atomic<uint32_t> wrong{0};
  EP_CHECK(ranks.run_fast(2, [&](auto& ctx, int32_t rank) {
    const auto& own = args[static_cast<size_t>(rank)];
    return run_calls(ctx, ep::ibgda_endpoint{own[0].memory}, ranks, plan, rank, own, wrong,
                     [](auto& c, const auto& e, const ep_dispatch_args& a) { return ep::attention_dispatch(c, e, a); });
  }));
  EP_CHECK_EQ(wrong.load(), 0u);
  expect_no_violations(ranks);
}

// Warps post beside each other; rows come from the rank's own part.
void compat(int32_t size, uint64_t seed) {
  const auto replicas = static_cast<uint32_t>(seed % 4);
  compat_case plan(size, replicas, seed);
  const auto dispatch = [&](auto&& args_of) {
    world_options options = over_queues(size, plan.bytes(), plan.slots(), 1 + static_cast<uint32_t>(seed % 2));
    options.depth = 4;
    world ranks(options);
    std::vector<ep_compat_args> args;
    for (int32_t rank = 0; rank < size; ++rank) args.push_back(args_of(ranks, rank));
    const auto result = ranks.run_simt(shape(2, 4 * (1 + replicas), 4), seeded(seed), [&](auto& ctx, int32_t rank) {
      const ep_compat_args& own = args[static_cast<size_t>(rank)];
      return ep::compat_dispatch(ctx, ep::ibgda_endpoint{own.memory}, own);
    });
    EP_CHECK_EQ(result.report, "");
    EP_CHECK(result.ok);
    expect_no_violations(ranks);
  };
  dispatch([&](const world& ranks, int32_t rank) { return plan.forward_args(ranks, rank); });
  for (int32_t rank = 0; rank < size; ++rank) EP_CHECK(plan.forward_right(rank));
  if (replicas == 0) return;
  dispatch([&](const world& ranks, int32_t rank) { return plan.gradient_args(ranks, rank); });
  for (int32_t rank = 0; rank < size; ++rank) EP_CHECK(plan.gradient_right(rank));
}

// Puts by one block to one peer, then a signal of its own: 'prior' order, which a dispatch does not need.
void prior(uint64_t seed) {
  constexpr uint64_t part = 96;
  constexpr uint32_t puts = 5;
  constexpr uint64_t rounds = 3;
  world_options options = over_queues(2, rounds * puts * part, 1, 3);
  options.depth = 4;
  world ranks(options);
  std::vector<uint8_t> source(rounds * puts * part);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint8_t>(i * 7 + 1);
  ranks.adopt(0, source.data(), source.size());
  bool right = true;
  const auto result = ranks.run_simt(shape(1, 4, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
    const ep::block_coop<ep::simt_context> coop{ctx};
    const ep::ibgda_endpoint endpoint{ranks.memory(rank)};
    for (uint64_t round = 0; round < rounds; ++round) {
      const uint64_t begin = round * puts * part;
      if (rank == 1) {
        if (ctx.lane() != 0) continue;
        if (!ctx.wait(endpoint.local_signal(0), round + 1, 0, EP_STAGE_ARRIVAL, nullptr)) return false;
        right = right && std::memcmp(ranks.data(1) + begin, source.data() + begin, puts * part) == 0;
        continue;
      }
      for (uint64_t at = begin; at < begin + puts * part; at += part) {
        if (!endpoint.put_rows(ctx, coop, 1, at, source.data() + at, part, part, 1, false, EP_NO_SLOT, 0, nullptr)) return false;
      }
      if (!endpoint.signal(ctx, coop, 1, 0, 1, nullptr)) return false;
    }
    return true;
  });
  EP_CHECK(result.ok);
  EP_CHECK(right);
  expect_no_violations(ranks);
}

// What one put becomes: opcode, bytes and inline flag of every WQE, and doorbells.
struct put_shape {
  std::vector<std::pair<uint32_t, uint64_t>> wqes;
  uint64_t doorbells = 0;
  ep_kernel_status status{};
  bool ok = false;
};

struct one_put {
  uint64_t stride;
  uint64_t row_bytes;
  uint64_t rows;
  uint64_t slot = 0;
};

put_shape shape_of(world& ranks, const void* src, const one_put& put, uint32_t lanes = 4) {
  put_shape seen;
  ranks.nic(0).watch = [&](const uint8_t* wqe) {
    const bool has_data = (load_be32(wqe + 4) & 0xff) > 2;
    seen.wqes.emplace_back(load_be32(wqe) & 0xff, has_data ? load_be32(wqe + 32) : 0);
  };
  const auto result = ranks.run_simt(shape(1, lanes, lanes), seeded(2), [&](auto& ctx, int32_t rank) {
    if (rank != 0) return true;
    const ep::block_coop<ep::simt_context> coop{ctx};
    const ep::ibgda_endpoint endpoint{ranks.memory(0)};
    return endpoint.put_rows(ctx, coop, 1, 0, src, put.stride, put.row_bytes, put.rows, false, put.slot, 1, &seen.status) &&
           endpoint.quiet(ctx, coop, 1, &seen.status);
  });
  seen.ok = result.ok;
  for (size_t i = 0; i < ranks.nic(0).size(); ++i) seen.doorbells += ranks.nic(0).queue(i).doorbells;
  expect_no_violations(ranks);
  return seen;
}

using wqe_list = std::vector<std::pair<uint32_t, uint64_t>>;
constexpr uint32_t write = EP_MLX5_OPCODE_RDMA_WRITE;
constexpr uint32_t add = EP_MLX5_OPCODE_ATOMIC_MASKED_FA;

void shapes_of_puts() {
  alignas(16) static uint8_t source[4096];
  const auto fresh = [](uint64_t longest, uint32_t depth) {
    world_options options = over_queues(2, 4096, 1, 1);
    options.depth = depth;
    options.max_message = longest;
    auto made = std::make_unique<world>(options);
    made->adopt(0, source, sizeof source);
    return made;
  };
  constexpr uint64_t any = uint64_t{1} << 30;
  const auto contiguous = shape_of(*fresh(any, 64), source, {64, 64, 10});
  EP_CHECK(contiguous.ok);
  EP_CHECK((contiguous.wqes == wqe_list{{write, 640}, {add, 0}}));
  EP_CHECK_EQ(contiguous.doorbells, 1u);
  const auto strided = shape_of(*fresh(any, 64), source, {80, 64, 10});
  EP_CHECK_EQ(strided.wqes.size(), 11u);
  EP_CHECK((strided.wqes[9] == std::pair<uint32_t, uint64_t>{write, 64}));
  EP_CHECK_EQ(strided.doorbells, 1u);
  const auto split = shape_of(*fresh(100, 64), source, {64, 64, 4});
  EP_CHECK((split.wqes == wqe_list{{write, 100}, {write, 100}, {write, 56}, {add, 0}}));
  const auto small = shape_of(*fresh(any, 64), source, {32, 28, 2, EP_NO_SLOT});
  EP_CHECK((small.wqes == wqe_list{{write, EP_MLX5_INLINE | 28}, {write, EP_MLX5_INLINE | 28}}));
  EP_CHECK((shape_of(*fresh(any, 64), source, {64, 64, 0}).wqes == wqe_list{{add, 0}}));
  EP_CHECK((shape_of(*fresh(any, 64), source, {64, 64, 0, EP_NO_SLOT}).wqes.empty()));
  EP_CHECK((shape_of(*fresh(any, 64), source, {0, 0, 3}).wqes == wqe_list{{add, 0}}));
  EP_CHECK((shape_of(*fresh(any, 64), source, {64, 64, 10}, 1).wqes == wqe_list{{write, 640}, {add, 0}}));
  // More WQEs than the ring holds: in batches of half of it.
  const auto long_one = shape_of(*fresh(any, 8), source, {80, 64, 20});
  EP_CHECK(long_one.ok);
  EP_CHECK_EQ(long_one.wqes.size(), 21u);
  EP_CHECK(long_one.doorbells >= 2 && long_one.doorbells <= 6);
}

// Beyond 2^30 bytes: lengths that the tests cannot move, so the NIC moves nothing.
void longest_message() {
  world ranks(over_queues(2, 64, 1, 1));
  constexpr uint64_t bytes = (uint64_t{1} << 30) + 5;
  auto* far = reinterpret_cast<uint8_t*>(uint64_t{1} << 40);
  ranks.adopt(0, far, bytes);
  ranks.nic(0).copies = false;
  ranks.nic(0).allow(0x102, ranks.data(1), bytes);
  const auto seen = shape_of(ranks, far, {bytes, bytes, 1});
  EP_CHECK(seen.ok);
  EP_CHECK((seen.wqes == wqe_list{{write, uint64_t{1} << 30}, {write, 5}, {add, 0}}));
}

// A source must lie in one registered range, all of it.
void ranges() {
  alignas(16) static uint8_t bytes[4096];
  world ranks(over_queues(2, 4096, 1, 1));
  ranks.adopt(0, bytes + 1024, 512);
  ranks.adopt(0, bytes + 64, 512);
  ranks.adopt(0, bytes + 1536, 64);
  ranks.adopt(0, bytes + 2048, 512);
  const auto put = [&](const uint8_t* from, const one_put& what) { return shape_of(ranks, from, what); };
  EP_CHECK(put(bytes + 64, {512, 512, 1}).ok);
  EP_CHECK(put(bytes + 1024, {512, 512, 1}).ok);
  EP_CHECK(put(bytes + 1536, {64, 64, 1}).ok); // begins where another ends
  EP_CHECK(put(bytes + 2048 + 100, {103, 100, 4}).ok);
  for (const auto& [from, what] : {std::pair<uint64_t, one_put>{63, {512, 512, 1}}, {65, {512, 512, 1}}, {0, {240, 240, 1}}, {576, {240, 240, 1}}, {1400, {240, 240, 1}},
                                   {2560, {240, 240, 1}}, {3800, {240, 240, 1}}, {2148, {110, 100, 5}}}) {
    const auto refused = put(bytes + from, what);
    EP_CHECK(!refused.ok);
    EP_CHECK_EQ(refused.status.status, static_cast<uint32_t>(EP_STATUS_INVALID));
    EP_CHECK_EQ(refused.status.stage, EP_STAGE_SOURCE);
    EP_CHECK_EQ(refused.status.expected, reinterpret_cast<uint64_t>(bytes + from));
    EP_CHECK(refused.wqes.empty());
  }
}

// A key names the queue pair of data and signal, whatever the block.
void keys() {
  alignas(16) static uint8_t source[256];
  world ranks(over_queues(2, 256, 1, 3));
  ranks.adopt(0, source, sizeof source);
  const auto result = ranks.run_simt(shape(2, 4, 4), seeded(3), [&](auto& ctx, int32_t rank) {
    if (rank != 0) return true;
    const auto endpoint = ep::ibgda_endpoint{ranks.memory(0)}.with_key(5);
    const ep::block_coop<ep::simt_context> coop{ctx};
    return endpoint.put_rows(ctx, coop, 1, 0, source, 64, 64, 1, false, EP_NO_SLOT, 0, nullptr) && endpoint.signal(ctx, coop, 1, 0, 1, nullptr) &&
           endpoint.quiet(ctx, coop, 1, nullptr);
  });
  EP_CHECK(result.ok);
  for (uint32_t key = 0; key < 3; ++key) EP_CHECK_EQ(ranks.qp(0, 1, key).done, key == 5 % 3 ? 4u : 0u);
  expect_no_violations(ranks);
}

// More blocks than queue pairs that they may not share.
void too_many_blocks() {
  world_options options = over_queues(2, 64, 1, 2);
  options.sharing = EP_IBGDA_SHARE_BLOCK;
  world ranks(options);
  ep_kernel_status status{};
  const auto result = ranks.run_simt(shape(3, 4, 4), seeded(1), [&](auto& ctx, int32_t rank) {
    const ep::ibgda_endpoint endpoint{ranks.memory(rank)};
    return rank != 0 || !endpoint.signal(ctx, ep::block_coop<ep::simt_context>{ctx}, 1, 0, 1, &status);
  });
  EP_CHECK(result.ok);
  EP_CHECK_EQ(status.status, static_cast<uint32_t>(EP_STATUS_INVALID));
  EP_CHECK_EQ(status.stage, EP_STAGE_SHARING);
  EP_CHECK_EQ(status.expected, 2u);
  EP_CHECK_EQ(status.found, 3u);
}

// A peer that the NIC cannot reach: whoever sends to it fails, whoever awaits nothing of it goes on.
void peer_is_gone(uint64_t seed) {
  alignas(16) static uint8_t source[256];
  world_options options = over_queues(3, 256, 4, 2);
  options.collapsed = seed % 2 == 0;
  world ranks(options);
  ranks.adopt(0, source, sizeof source);
  for (uint32_t key = 0; key < 2; ++key) ranks.nic(0).queue(2 * 2 + key).silent_from = 3;
  ep_kernel_status status{};
  const auto result = ranks.run_simt(shape(2, 4, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
    if (rank != 0) return true;
    const ep::block_coop<ep::simt_context> coop{ctx};
    const ep::ibgda_endpoint endpoint{ranks.memory(0)};
    for (uint32_t i = 0; i < 100; ++i) {
      if (!endpoint.put_rows(ctx, coop, 1, 0, source, 128, 128, 1, false, 0, 1, nullptr)) return false;
      if (!endpoint.put_rows(ctx, coop, 2, 0, source, 128, 128, 1, false, 0, 1, &status)) return true;
    }
    return false;
  });
  EP_CHECK_EQ(result.report, "");
  EP_CHECK(result.ok);
  EP_CHECK_EQ(status.rank, 2);
  EP_CHECK_EQ(status.stage, EP_STAGE_NIC);
  EP_CHECK(ranks.device(0).broken == 1 + 4 || ranks.device(0).broken == 1 + 5);
  const ep_ibgda_qp& qp = ranks.qp(0, 2, static_cast<uint32_t>(ranks.device(0).broken - 1 - 4));
  EP_CHECK_EQ(qp.broken, static_cast<uint64_t>(EP_IBGDA_BROKEN));
  // In a collapsed queue the CQEs of flushed WQEs may have overwritten the one that says why.
  const bool overwritten = options.collapsed && qp.syndrome == EP_MLX5_SYNDROME_FLUSHED;
  EP_CHECK(overwritten || qp.syndrome == EP_MLX5_SYNDROME_RETRY_EXCEEDED);
  EP_CHECK_EQ(qp.status, static_cast<uint32_t>(overwritten ? EP_STATUS_SYSTEM : EP_STATUS_PEER_LOST));
  if (status.found >> EP_NIC_FOUND_QPN == qp.qpn) EP_CHECK_EQ(status.found & 0xff, qp.syndrome); // two blocks, two queue pairs
}

} // namespace

int main() {
  for (int32_t size = 1; size <= 3; ++size) {
    for (uint64_t seed = 0; seed < 100 / seed_share; ++seed) {
      const uint64_t mixed = seed * 7919 + static_cast<uint64_t>(size);
      dispatches<in_turn>(size, mixed);
      if (seed % 2 == 0) dispatches<by_ringer>(size, mixed);
      if (seed % 5 == 0) dispatches<under_lock>(size, mixed);
    }
    for (uint64_t seed = 0; seed < 20 / seed_share; ++seed) compat(size, seed * 31 + static_cast<uint64_t>(size));
  }
  for (int32_t size = 2; size <= 3; ++size) {
    for (uint64_t seed = 0; seed < 5; ++seed) dispatches_on_threads(size, seed);
  }
  for (uint64_t seed = 0; seed < 40; ++seed) prior(seed);
  shapes_of_puts();
  longest_message();
  ranges();
  keys();
  too_many_blocks();
  for (uint64_t seed = 0; seed < 10; ++seed) peer_is_gone(seed);
  return ep::check::finish();
}
