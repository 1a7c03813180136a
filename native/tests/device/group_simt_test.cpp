// Collective calls on device tensors: every mode against plain loops, call after call over the same slots, all ranks interleaved under seeds; and how calls fail.
#include <cmath>

#include "../../core/collective/reduce.hpp"
#include "../check.hpp"
#include "ep/device/group_call.h"
#include "world.hpp"

using namespace ep::test;

namespace {

constexpr uint32_t no_fold = 0;

// One rank's side of a call: what it passes, and what has to come out.
struct side {
  std::vector<std::vector<uint8_t>> sources; // by receiver; of a fold on all ranks, one
  std::vector<std::vector<uint8_t>> targets; // by source; of a fold, one
  std::vector<std::vector<uint8_t>> expected;
};

struct group_case {
  int32_t size;
  uint32_t blocks;
  uint32_t launched;
  uint64_t slot_bytes;
  std::vector<std::vector<uint64_t>> rounds; // by rank, by block
  std::vector<ep_kernel_status> status;

  group_case(random_source& random, int32_t ranks) : size(ranks), blocks(1 + static_cast<uint32_t>(below(random, 3))), launched(1 + static_cast<uint32_t>(below(random, blocks))) {
    slot_bytes = 128 << below(random, 3);
    rounds.resize(static_cast<size_t>(size), std::vector<uint64_t>(blocks));
    status.resize(static_cast<size_t>(size));
  }
  uint64_t bytes() const { return 2 * uint64_t{blocks} * static_cast<uint64_t>(size) * slot_bytes; }
  uint64_t slots() const { return uint64_t{blocks} * static_cast<uint64_t>(size); }
  ep_group_args args(world& ranks, int32_t rank, uint32_t mode) {
    ep_group_args made{};
    made.memory = ranks.memory(rank);
    made.status = reinterpret_cast<uint64_t>(&status[static_cast<size_t>(rank)]);
    made.rounds = reinterpret_cast<uint64_t>(rounds[static_cast<size_t>(rank)].data());
    made.slot_bytes = slot_bytes;
    made.blocks = blocks;
    made.mode = mode;
    made.signature = 42;
    return made;
  }
};

// The 4 KiB below which chunks are not cut would hide every boundary from messages that fibers can move: so lengths go beyond it now and then.
uint64_t length_of(random_source& random, uint64_t each) {
  const uint64_t pick = below(random, 8);
  if (pick == 0) return 0;
  return each * (pick < 6 ? 1 + below(random, 40) : 1 + below(random, 3000 / each));
}

std::vector<uint8_t> random_bytes(random_source& random, uint64_t bytes, uint32_t element) {
  std::vector<uint8_t> made(bytes);
  for (uint8_t& value : made) value = static_cast<uint8_t>(random());
  // Numbers of like size, most of them: sums of any bits are mostly one of two numbers.
  const auto type = static_cast<ep::element_type>(element);
  for (uint64_t i = 0; i < bytes / ep::element_bytes(type); ++i) {
    if (below(random, 8) == 0) continue;
    const double value = static_cast<double>(static_cast<int64_t>(below(random, 2001)) - 1000) * 0.125;
    const float narrow = static_cast<float>(value);
    if (type == ep::element_type::f64) std::memcpy(&made[8 * i], &value, 8);
    if (type == ep::element_type::f32) std::memcpy(&made[4 * i], &narrow, 4);
    if (type == ep::element_type::f16) reinterpret_cast<uint16_t*>(made.data())[i] = ep::number_f16::store(narrow);
    if (type == ep::element_type::bf16) reinterpret_cast<uint16_t*>(made.data())[i] = ep::number_bf16::store(narrow);
  }
  return made;
}

uint64_t address(const std::vector<uint8_t>& bytes) { return bytes.empty() ? 0 : reinterpret_cast<uint64_t>(bytes.data()); }

struct plan {
  explicit plan(uint32_t of) : mode(of) {}
  uint32_t mode;
  uint32_t element = EP_ELEMENT_U8;
  uint32_t fold = no_fold;
  double factor = 1;
  bool in_place = false;
  std::vector<side> sides;
};

std::vector<uint8_t> folded(const plan& call, const std::vector<const void*>& sources, uint64_t bytes) {
  std::vector<uint8_t> made(bytes);
  const auto type = static_cast<ep::element_type>(call.element);
  if (bytes != 0) {
    ep::reduce_elements(made.data(), sources.data(), static_cast<int>(sources.size()), bytes / ep::element_bytes(type), type, static_cast<ep::reduce_op>(call.fold), call.factor, false);
  }
  return made;
}

plan exchange(random_source& random, int32_t size) {
  plan call(EP_GROUP_EXCHANGE);
  call.sides.resize(static_cast<size_t>(size));
  const bool even = below(random, 2) != 0;
  const uint64_t common = length_of(random, 1);
  for (side& from : call.sides) {
    for (int32_t to = 0; to < size; ++to) from.sources.push_back(random_bytes(random, even ? common : length_of(random, 1), EP_ELEMENT_U8));
  }
  for (size_t to = 0; to < call.sides.size(); ++to) {
    for (side& from : call.sides) {
      call.sides[to].expected.push_back(from.sources[to]);
      call.sides[to].targets.emplace_back(from.sources[to].size(), 0x11);
    }
  }
  return call;
}

void pick_fold(random_source& random, plan& call) {
  call.factor = 0.1 * static_cast<double>(below(random, 40));
  do {
    call.element = static_cast<uint32_t>(below(random, EP_ELEMENT_U8 + 1));
    call.fold = static_cast<uint32_t>(below(random, EP_FOLD_PREMUL_SUM + 1));
  } while (!ep::reduces(static_cast<ep::reduce_op>(call.fold), static_cast<ep::element_type>(call.element)));
}

// A reduce-scatter; or a reduce, where only one rank folds.
plan fold(random_source& random, int32_t size) {
  plan call(EP_GROUP_FOLD);
  pick_fold(random, call);
  const uint64_t bytes = length_of(random, ep::element_bytes(static_cast<ep::element_type>(call.element)));
  const auto root = static_cast<size_t>(below(random, static_cast<uint64_t>(size)));
  const bool rooted = below(random, 2) != 0;
  call.sides.resize(static_cast<size_t>(size));
  for (side& from : call.sides) {
    for (size_t to = 0; to < call.sides.size(); ++to) from.sources.push_back(random_bytes(random, rooted && to != root ? 0 : bytes, call.element));
  }
  for (size_t to = 0; to < call.sides.size(); ++to) {
    if (rooted && to != root) continue;
    std::vector<const void*> sources;
    for (side& from : call.sides) sources.push_back(from.sources[to].data());
    call.sides[to].expected.push_back(folded(call, sources, bytes));
    call.sides[to].targets.emplace_back(bytes, 0x11);
  }
  return call;
}

plan fold_all(random_source& random, int32_t size) {
  plan call(EP_GROUP_FOLD_ALL);
  pick_fold(random, call);
  call.in_place = below(random, 2) != 0;
  const uint64_t bytes = length_of(random, ep::element_bytes(static_cast<ep::element_type>(call.element)));
  call.sides.resize(static_cast<size_t>(size));
  std::vector<const void*> sources;
  for (side& from : call.sides) {
    from.sources.push_back(random_bytes(random, bytes, call.element));
    sources.push_back(from.sources[0].data());
  }
  const auto all = folded(call, sources, bytes);
  for (side& each : call.sides) {
    each.expected.push_back(all);
    each.targets.emplace_back(bytes, 0x11);
  }
  return call;
}

ep_group_args args_of(group_case& group, world& ranks, const plan& call, int32_t rank) {
  const side& own = call.sides[static_cast<size_t>(rank)];
  ep_group_args args = group.args(ranks, rank, call.mode);
  args.element = call.element;
  args.fold = call.fold;
  std::memcpy(&args.factor_bits, &call.factor, sizeof call.factor);
  for (size_t i = 0; i < own.sources.size(); ++i) args.sends[i] = {address(own.sources[i]), own.sources[i].size()};
  if (call.mode == EP_GROUP_EXCHANGE) {
    for (size_t i = 0; i < own.targets.size(); ++i) args.takes[i] = {address(own.targets[i]), own.targets[i].size()};
  } else if (!own.targets.empty()) {
    args.out = {call.in_place ? args.sends[0].address : address(own.targets[0]), own.targets[0].size()};
    for (size_t i = 0; i < call.sides.size() && call.mode == EP_GROUP_FOLD; ++i) args.takes[i] = {0, args.out.bytes};
  }
  return args;
}

plan any_plan(random_source& random, int32_t size) {
  switch (below(random, 3)) {
    case 0: return exchange(random, size);
    case 1: return fold(random, size);
    default: return fold_all(random, size);
  }
}

uint32_t wrong_bytes(const plan& call) {
  uint32_t wrong = 0;
  for (const side& each : call.sides) {
    for (size_t i = 0; i < each.targets.size(); ++i) wrong += (call.in_place ? each.sources[i] : each.targets[i]) != each.expected[i];
  }
  return wrong;
}

template <class Kernel> void run_calls(const group_case& group, world& ranks, uint64_t seed, bool fast, const Kernel& kernel) {
  if (fast) {
    EP_CHECK(ranks.run_fast(group.launched, kernel));
  } else {
    const auto result = ranks.run_simt(shape(group.launched, 8, 4), seeded(seed), kernel);
    EP_CHECK_EQ(result.report, "");
    EP_CHECK(result.ok);
  }
}

// Ranks begin a call while others are still in the one before.
void calls_match(int32_t size, uint64_t seed, bool fast) {
  random_source random(seed);
  group_case group(random, size);
  world ranks({size, group.bytes(), group.slots()});
  std::vector<plan> calls;
  for (int i = 0; i < 4; ++i) calls.push_back(any_plan(random, size));
  const auto kernel = [&](auto& ctx, int32_t rank) {
    for (const plan& call : calls) {
      const ep_group_args args = args_of(group, ranks, call, rank);
      if (!ep::group_call(ctx, ep::load_store_endpoint{args.memory}, args)) return false;
      ctx.sync_block(); /* the end of a kernel */
    }
    return true;
  };
  run_calls(group, ranks, seed, fast, kernel);
  for (size_t i = 0; i < calls.size(); ++i) {
    const uint32_t wrong = wrong_bytes(calls[i]);
    if (wrong != 0) std::fprintf(stderr, "%d ranks, seed %llu, call %zu: mode %u element %u fold %u\n", size, static_cast<unsigned long long>(seed), i, calls[i].mode, calls[i].element, calls[i].fold);
    EP_CHECK_EQ(wrong, 0u);
  }
}

// One rank calls something else: all hear of it, and of whom.
void mismatch_is_told(uint64_t seed) {
  random_source random(seed);
  group_case group(random, 3);
  world ranks({3, group.bytes(), group.slots()});
  const plan call = exchange(random, 3);
  const bool other_bytes = below(random, 2) != 0;
  const auto result = ranks.run_simt(shape(group.launched, 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
    ep_group_args args = args_of(group, ranks, call, rank);
    if (rank == 2 && !other_bytes) args.signature = 43;
    if (rank == 2 && other_bytes) args.takes[0].bytes += 1;
    ep::group_call(ctx, ep::load_store_endpoint{args.memory}, args);
    return true;
  });
  EP_CHECK_EQ(result.report, "");
  // Lengths are of one pair, and the others hear of it if they have to wait; a signature is everybody's. Nobody blames itself.
  EP_CHECK_EQ(group.status[2].status, static_cast<uint32_t>(EP_STATUS_MISMATCH));
  EP_CHECK(group.status[2].rank != 2);
  for (const size_t rank : {0, 1}) {
    if (other_bytes && group.status[rank].status == EP_STATUS_OK) continue;
    EP_CHECK_EQ(group.status[rank].status, static_cast<uint32_t>(EP_STATUS_MISMATCH));
    EP_CHECK(other_bytes || group.status[rank].rank == 2);
  }
}

// One rank does not come: the others end by their deadline, name it, and tell those whose own time is not up.
void absent_is_named() {
  random_source random(7);
  group_case group(random, 4);
  group.launched = group.blocks;
  world ranks({4, group.bytes(), group.slots()});
  const plan call = fold_all(random, 4);
  for (int32_t rank = 0; rank < 4; ++rank) ranks.environment(rank).waits.deadline_ns = ep::deadline_after(rank == 0 ? 1000 : 20'000);
  EP_CHECK(ranks.run_fast(group.launched, [&](auto& ctx, int32_t rank) {
    if (rank == 1) return true;
    const ep_group_args args = args_of(group, ranks, call, rank);
    return !ep::group_call(ctx, ep::load_store_endpoint{args.memory}, args);
  }));
  for (const int32_t rank : {0, 2, 3}) {
    const ep_kernel_status& status = group.status[static_cast<size_t>(rank)];
    EP_CHECK_EQ(status.status, static_cast<uint32_t>(EP_STATUS_TIMEOUT));
    EP_CHECK_EQ(status.rank, 1);
    EP_CHECK_EQ(status.found, 2u);
  }
}

// One rank is told to stop while all wait for one that does not come. The others hear of it from that rank or from each other, in any order, and all name the one that began.
void abort_is_traced(uint64_t seed, bool fast) {
  random_source random(seed);
  group_case group(random, 5);
  group.launched = group.blocks;
  world ranks({5, group.bytes(), group.slots()});
  const plan call = fold_all(random, 5);
  const auto first = static_cast<int32_t>(below(random, 4));
  const std::atomic<uint32_t> stop{1};
  ranks.environment(first).waits.cancel = &stop;
  const auto kernel = [&](auto& ctx, int32_t rank) {
    if (rank == 4) return true;
    const ep_group_args args = args_of(group, ranks, call, rank);
    return !ep::group_call(ctx, ep::load_store_endpoint{args.memory}, args);
  };
  run_calls(group, ranks, seed, fast, kernel);
  for (int32_t rank = 0; rank < 4; ++rank) {
    const ep_kernel_status& status = group.status[static_cast<size_t>(rank)];
    EP_CHECK_EQ(status.status, static_cast<uint32_t>(EP_STATUS_ABORTED));
    if (rank != first) EP_CHECK_EQ(status.rank, first);
    EP_CHECK((status.found & 16u) != 0);
  }
}

// What was launched behind a call that failed fails as well, whether or not the others ever hear of that: it must not pass for done.
void failure_outlasts_its_call() {
  random_source random(9);
  group_case group(random, 3);
  world ranks({3, group.bytes(), group.slots()});
  const plan call = fold_all(random, 3);
  ranks.environment(0).waits.deadline_ns = ep::deadline_after(100);
  EP_CHECK(ranks.run_fast(group.launched, [&](auto& ctx, int32_t rank) {
    const ep_group_args args = args_of(group, ranks, call, rank);
    return rank != 0 || !ep::group_call(ctx, ep::load_store_endpoint{args.memory}, args);
  }));
  EP_CHECK_EQ(group.status[0].status, static_cast<uint32_t>(EP_STATUS_TIMEOUT));
  for (ep_kernel_status& status : group.status) status = {};
  ranks.environment(0).waits.deadline_ns = ep::deadline_after(60'000);
  EP_CHECK(ranks.run_fast(group.blocks, [&](auto& ctx, int32_t rank) {
    const ep_group_args args = args_of(group, ranks, call, rank);
    return rank != 0 || !ep::group_call(ctx, ep::load_store_endpoint{args.memory}, args);
  }));
  EP_CHECK_EQ(group.status[0].status, static_cast<uint32_t>(EP_STATUS_ABORTED));
  EP_CHECK_EQ(group.status[0].rank, 0);
}

} // namespace

int main() {
  for (int32_t size = 1; size <= 4; ++size) {
    for (uint64_t seed = 0; seed < seeds_of(120); ++seed) calls_match(size, seed * 7919 + static_cast<uint64_t>(size), false);
    for (uint64_t seed = 0; seed < seeds_of(60); ++seed) calls_match(size, seed * 104729 + static_cast<uint64_t>(size), true);
  }
  for (uint64_t seed = 0; seed < seeds_of(60); ++seed) mismatch_is_told(seed);
  absent_is_named();
  failure_outlasts_its_call();
  for (uint64_t seed = 0; seed < seeds_of(60); ++seed) abort_is_traced(seed, false);
  for (uint64_t seed = 0; seed < seeds_of(60); ++seed) abort_is_traced(seed, true);
  return ep::check::finish();
}
