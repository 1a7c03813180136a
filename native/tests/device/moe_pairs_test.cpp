// Calls of experts with several queue pairs to each peer, which the scheduler serves in any order. Blocks put rows by a queue pair each, and count words by whichever block has the
// rank: so these may come before rows that they count. What says that a row is here is the signal behind it, on its own queue pair; count words say how many of those to await.
#include "../check.hpp"
#include "moe_case.hpp"

using namespace ep::test;

namespace {

uint32_t kind_of(const ep_memory_handle& memory, uint64_t slot) {
  return static_cast<uint32_t>(slot / static_cast<uint64_t>(memory.world_size) % EP_MOE_SIGNAL_KINDS);
}

// Count words by another queue pair than any row of their block.
struct counts_apart : ep::ibgda_endpoint {
  template <class Ctx, class Coop>
  bool put_rows(Ctx& ctx, const Coop& coop, int32_t peer, uint64_t offset, const void* src, uint64_t stride, uint64_t bytes, uint64_t rows, bool non_temporal, uint64_t slot,
                uint64_t add, ep_kernel_status* status) const {
    const uint32_t by = key(ctx) + (kind_of(memory, slot) == EP_MOE_SIGNAL_COUNTED ? 1 : 0);
    return with_key(by).put_rows(ctx, coop, peer, offset, src, stride, bytes, rows, non_temporal, slot, add, status);
  }
};

// Wrong: the signal of a row by another queue pair than the row.
struct signals_apart : ep::ibgda_endpoint {
  template <class Ctx, class Coop>
  bool put_rows(Ctx& ctx, const Coop& coop, int32_t peer, uint64_t offset, const void* src, uint64_t stride, uint64_t bytes, uint64_t rows, bool non_temporal, uint64_t slot,
                uint64_t add, ep_kernel_status* status) const {
    if (kind_of(memory, slot) == EP_MOE_SIGNAL_COUNTED) return ep::ibgda_endpoint::put_rows(ctx, coop, peer, offset, src, stride, bytes, rows, non_temporal, slot, add, status);
    return ep::ibgda_endpoint::put_rows(ctx, coop, peer, offset, src, stride, bytes, rows, non_temporal, EP_NO_SLOT, 0, status) &&
           with_key(key(ctx) + 1).signal(ctx, coop, peer, slot, add, status);
  }
};

// Wrong: rows are taken once their counts are here, as where one queue pair carries both.
struct counts_alone : ep::ibgda_endpoint {
  const uint64_t* local_signal(uint64_t slot) const {
    static constexpr uint64_t plenty = UINT64_MAX;
    return kind_of(memory, slot) == EP_MOE_SIGNAL_ARRIVED ? &plenty : ep::ibgda_endpoint::local_signal(slot);
  }
};

// Whether something is not as it should be.
template <class Endpoint> bool fails(bool compact, uint64_t seed) {
  moe_options wanted;
  wanted.size = 2 + static_cast<int32_t>(seed % 2);
  wanted.calls = 2;
  wanted.slots = 1;
  wanted.overlap = false;
  wanted.compact = compact;
  moe_case plan(wanted, seed);
  world_options options{wanted.size, plan.bytes(), plan.signal_slots(), false, 4};
  options.qps = 2 + static_cast<uint32_t>(seed % 3);
  world ranks(options);
  plan.bind(ranks);
  // One of the queue pairs to each peer is behind the others, longer than a receiver takes.
  for (int32_t rank = 0; rank < wanted.size; ++rank) {
    for (int32_t peer = 0; peer < wanted.size; ++peer) {
      ranks.nic(rank).queue(static_cast<uint32_t>(peer) * options.qps + static_cast<uint32_t>(seed) % options.qps).slow = 400;
    }
  }
  std::atomic<uint32_t> wrong{0};
  const auto result = ranks.run_simt(shape(1 + static_cast<uint32_t>(seed / 2 % options.qps), 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
    return run_moe(ctx, Endpoint{{plan.buffer(rank).memory}}, plan, rank, wrong);
  });
  return wrong.load() != 0 || !result.ok;
}

} // namespace

int main() {
  for (const bool compact : {false, true}) {
    for (uint64_t seed = 0; seed < 40 / seed_share; ++seed) {
      EP_CHECK(!fails<counts_apart>(compact, seed));
    }
    EP_CHECK(found_out("signals apart", 40, 10, [&](uint64_t seed) { return fails<signals_apart>(compact, seed); }));
    EP_CHECK(found_out("counts alone", 40, 10, [&](uint64_t seed) { return fails<counts_alone>(compact, seed); }));
  }
  return ep::check::finish();
}
