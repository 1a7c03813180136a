/* What a rank says of a low-latency call that is refused. */
#ifndef EP_DEVICE_MOE_REFUSE_H
#define EP_DEVICE_MOE_REFUSE_H

#include "moe_wait.h"

EP_MACHINE_BEGIN

namespace detail {

/* A call that this rank cannot take results of, or that it hears another refuse: tells so all ranks that await results of it, in their place. What it awaits itself ends in the same
 * way, before it sends anything in the slot's next call. All blocks call it. */
template <class Ctx, class Endpoint> EP_HD void moe_refuse(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at) {
  if (ctx.block() == 0 && coop.lane() == 0) {
    const bool own = at.refuses();
    moe_write_refusal(ctx, endpoint, at, own ? at.self() : at.status()->rank, true);
    if (own) moe_leave_bank(at);
  }
  ctx.sync_grid();
  for (auto rank = static_cast<int32_t>(ctx.block()); rank < at.world(); rank += static_cast<int32_t>(ctx.blocks())) {
    if (rank == at.self()) continue;
    const uint64_t puts = moe_returns_to(at, rank);
    if (puts != 0 && moe_takes_part(ctx, coop, at, rank)) moe_pass_on(ctx, coop, endpoint, at, rank, EP_MOE_SIGNAL_RETURNED, puts);
    ep_moe_peer& peer = at.peer(rank);
    const uint64_t awaited = moe_returns(at, rank);
    if (coop.lane() != 0 || awaited == 0 || peer.told != at.call.epoch) continue;
    peer.returned = moe_next(endpoint, at, rank, peer.returned, awaited);
    if (at.sends_to(rank) != 0) moe_owes(at, rank, peer.returned);
  }
}

} // namespace detail

EP_MACHINE_END

#endif
