/* The steps of a call whose counts live on the device (ep/abi/device_call.h), in the order in which they are put on a stream: begin_call, then
 * device_dispatch; grant_lease once its rows have been read. */
#ifndef EP_DEVICE_DEVICE_CALL_H
#define EP_DEVICE_DEVICE_CALL_H

#include "ep/abi/device_call.h"
#include "replica_sum.h"

EP_MACHINE_BEGIN

/* One block. HAZARD: every launch counts, also one whose dispatch then fails: the sources may have sent what this call was to wait for. */
template <class Ctx> EP_HD void begin_call(Ctx& ctx, const ep_call_counts& counts) {
  const block_coop<Ctx> coop{ctx};
  auto& lease = *reinterpret_cast<ep_lease_counts*>(counts.lease);
  auto* arrived = reinterpret_cast<uint64_t*>(lease.arrived);
  const auto* granted = reinterpret_cast<const uint64_t*>(lease.granted);
  const auto* chunks = reinterpret_cast<const uint64_t*>(counts.chunks);
  const uint64_t uses = lease.uses;
  coop.sync(); /* all lanes have read `uses` */
  for (uint32_t rank = coop.lane(); rank < static_cast<uint32_t>(counts.world_size); rank += coop.lanes()) {
    arrived[rank] += chunks[rank];
    reinterpret_cast<uint64_t*>(counts.arrivals)[rank] = chunks[rank] != 0 ? arrived[rank] : 0;
    reinterpret_cast<uint64_t*>(counts.credits)[rank] = uses != 0 ? granted[rank] + uses : 0;
  }
  if (coop.lane() == 0) lease.uses = uses + 1;
}

template <class Ctx, class Endpoint> EP_HD bool device_dispatch(Ctx& ctx, const Endpoint& endpoint, const ep_device_call& call) {
  ep_dispatch_args args = call.args;
  args.parts = reinterpret_cast<uint64_t>(call.parts);
  return attention_gradient(ctx, endpoint, args, reinterpret_cast<const ep_replica_sum_args*>(call.sums), call.sum_count);
}

/* One block; its lanes take the ranks in turn. */
template <class Ctx, class Endpoint> EP_HD void grant_lease(Ctx& ctx, const Endpoint& endpoint, const ep_device_grant& grant) {
  const thread_coop<Ctx> alone{ctx};
  /* Reads of the lease by earlier kernels of the stream have ended with them; the order of this stream's writes is for whoever is granted. */
  fence_system();
  for (uint32_t rank = ctx.lane(); rank < static_cast<uint32_t>(grant.memory.world_size); rank += ctx.lanes()) {
    endpoint.signal(ctx, alone, static_cast<int32_t>(rank), grant.credit_slot + static_cast<uint64_t>(grant.memory.rank), 1, nullptr);
  }
}

EP_MACHINE_END

#endif
