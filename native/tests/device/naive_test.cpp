// Protocols that are known to be wrong. Each differs from ours in one line, and the scheduler must find it out; the same plans with our
// protocol pass under the same seeds. If one of these stops failing, the executor has lost its teeth.
#include "../check.hpp"
#include "dispatch_case.hpp"

using namespace ep::test;

namespace {

// Signals first, copies after.
struct signal_first : ep::load_store_endpoint {
  template <class Ctx, class Coop>
  bool put_rows(Ctx& ctx, const Coop& coop, int32_t peer, uint64_t dst_offset, const void* src, uint64_t stride, uint64_t row_bytes,
                uint64_t rows, bool non_temporal, uint64_t slot, uint64_t add, ep_kernel_status* status) const {
    const bool ok = signal(ctx, coop, peer, slot, add, status);
    ep::copy_rows(coop, data(peer, dst_offset), src, stride, row_bytes, rows, non_temporal);
    ep::copy_rows_done(coop, false);
    return ok;
  }
};

// Copies, then signals without waiting for the other lanes' stores.
struct unfenced : ep::load_store_endpoint {
  template <class Ctx, class Coop>
  bool put_rows(Ctx& ctx, const Coop& coop, int32_t peer, uint64_t dst_offset, const void* src, uint64_t stride, uint64_t row_bytes,
                uint64_t rows, bool non_temporal, uint64_t slot, uint64_t add, ep_kernel_status* status) const {
    ep::copy_rows(coop, data(peer, dst_offset), src, stride, row_bytes, rows, non_temporal);
    return signal(ctx, coop, peer, slot, add, status);
  }
};

// Looks for room in the ring before it reserves.
struct room_first : ep::proxy_endpoint {
  template <class Ctx, class Coop>
  bool put_rows(Ctx& ctx, const Coop& coop, int32_t peer, uint64_t dst_offset, const void* src, uint64_t stride, uint64_t row_bytes,
                uint64_t rows, bool, uint64_t slot, uint64_t add, ep_kernel_status* status) const {
    bool ok = true;
    if (coop.lane() == 0) {
      ep_proxy_ring& r = ring();
      const uint64_t tail = ep::load_acquire(ctx, &r.tail);
      ok = tail < r.capacity || ctx.wait(&r.head, tail - r.capacity + 1, peer, EP_STAGE_ROOM, status);
      if (ok) {
        const uint64_t sequence = ep::fetch_add(ctx, &r.tail, 1);
        auto* entry = reinterpret_cast<ep_proxy_request*>(r.entries) + (sequence & (r.capacity - 1));
        *entry = ep_proxy_request{entry->turn, EP_PROXY_PUT, peer, memory.memory_id, reinterpret_cast<uint64_t>(src), stride, row_bytes, rows,
                                  dst_offset, slot, add, {}};
        ep::store_release(ctx, &entry->turn, sequence + 1);
        ctx.wake(r.wake);
      }
    }
    return coop.sync_and(ok);
  }
};

// Waits until the counters equal what is owed.
template <class Ctx, class Endpoint> bool dispatch_equal(Ctx& ctx, const Endpoint& endpoint, const ep_dispatch_args& args) {
  const ep::block_coop<Ctx> coop{ctx};
  const auto* parts = reinterpret_cast<const ep_dispatch_part*>(args.parts);
  for (uint32_t i = 0; i < args.part_count; ++i) {
    if (!ep::dispatch_send_part(ctx, endpoint, args, parts[i])) return false;
  }
  const auto* arrivals = reinterpret_cast<const uint64_t*>(args.arrivals);
  bool ok = true;
  for (uint32_t i = coop.lane(); i < static_cast<uint32_t>(args.memory.world_size) && ok; i += coop.lanes()) {
    if (arrivals[i] == 0) continue;
    ok = ctx.wait_equal(endpoint.local_signal(args.arrival_slot + i), arrivals[i], static_cast<int32_t>(i), EP_STAGE_ARRIVAL, nullptr);
  }
  return coop.sync_and(ok);
}

const auto ours = [](auto& ctx, const auto& endpoint, const ep_dispatch_args& args) { return ep::attention_dispatch(ctx, endpoint, args); };
const auto equal = [](auto& ctx, const auto& endpoint, const ep_dispatch_args& args) { return dispatch_equal(ctx, endpoint, args); };

struct outcome {
  uint32_t corrupt = 0; // seeds whose receive tensors were not the plan's
  uint32_t stuck = 0;   // seeds that ended in a deadlock
};

template <class Endpoint, class Dispatch> outcome sample(const case_options& wanted, bool proxy, Dispatch&& dispatch) {
  outcome seen;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    dispatch_case plan(wanted, seed);
    world ranks({wanted.size, plan.bytes(), plan.slots(), proxy, 2});
    const auto args = all_args(plan, ranks);
    std::atomic<uint32_t> wrong{0};
    const auto result = ranks.run_simt(shape(2, 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
      const auto& own = args[static_cast<size_t>(rank)];
      return run_calls(ctx, Endpoint{{own[0].memory}}, ranks, plan, rank, own, wrong, dispatch);
    });
    if (wrong.load() != 0) ++seen.corrupt;
    if (result.outcome == ep::simt_outcome::deadlock) ++seen.stuck;
  }
  return seen;
}

template <class Endpoint> struct plain : Endpoint {};

void expect_clean(const outcome& seen) {
  EP_CHECK_EQ(seen.corrupt, 0u);
  EP_CHECK_EQ(seen.stuck, 0u);
}

} // namespace

int main() {
  const case_options leased{2, 4, 1, 1, true, true};
  expect_clean(sample<plain<ep::load_store_endpoint>>(leased, false, ours));
  expect_clean(sample<plain<ep::proxy_endpoint>>(leased, true, ours));
  EP_CHECK(sample<signal_first>(leased, false, ours).corrupt > 20);
  EP_CHECK(sample<unfenced>(leased, false, ours).corrupt > 20);
  const outcome ring = sample<room_first>(leased, true, ours);
  EP_CHECK(ring.stuck + ring.corrupt > 5);

  // Every call has its own receive tensor, so running ahead harms nobody who counts; whoever wants equality misses its value.
  const case_options ahead{2, 12, 12, 1, false, false};
  expect_clean(sample<plain<ep::load_store_endpoint>>(ahead, false, ours));
  EP_CHECK(sample<plain<ep::load_store_endpoint>>(ahead, false, equal).stuck > 5);

  // One receive tensor without credit: a fast sender writes the next call over what its receiver still reads.
  const case_options greedy{2, 4, 1, 1, false, true};
  EP_CHECK(sample<plain<ep::load_store_endpoint>>(greedy, false, ours).corrupt > 20);
  return ep::check::finish();
}
