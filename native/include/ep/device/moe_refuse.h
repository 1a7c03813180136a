/* What a rank says of a low-latency call that is refused. */
#ifndef EP_DEVICE_MOE_REFUSE_H
#define EP_DEVICE_MOE_REFUSE_H

#include "moe_wait.h"

EP_MACHINE_BEGIN

namespace detail {

/* A call that this rank cannot take results of, or that it hears another refuse: writes down what it says of it. By one lane. */
template <class Ctx, class Endpoint> EP_HD void moe_keep_refusal(Ctx& ctx, const Endpoint& endpoint, const moe_view& at) {
  const bool own = at.refuses();
  moe_write_refusal(ctx, endpoint, at, own ? at.self() : at.status()->rank, true);
  if (own) moe_leave_bank(at);
}

/* Tells so all ranks that await results of it, in their place, or every `apart`th of them from `first` on. What it awaits itself ends in the same way, before it sends anything in the slot's next call. */
template <class Ctx, class Endpoint> EP_HD void moe_tell_refusal(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, uint32_t first, uint32_t apart) {
  for (auto rank = static_cast<int32_t>(first); rank < at.world(); rank += static_cast<int32_t>(apart)) {
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

/* By all blocks. */
template <class Ctx, class Endpoint> EP_HD void moe_refuse(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at) {
  if (ctx.block() == 0 && coop.lane() == 0) moe_keep_refusal(ctx, endpoint, at);
  ctx.sync_grid();
  moe_tell_refusal(ctx, coop, endpoint, at, ctx.block(), ctx.blocks());
}

/* By one block. */
template <class Ctx, class Endpoint> EP_HD void moe_refuse_alone(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at) {
  if (coop.lane() == 0) moe_keep_refusal(ctx, endpoint, at);
  coop.sync();
  moe_tell_refusal(ctx, coop, endpoint, at, 0, 1);
}

} // namespace detail

EP_MACHINE_END

#endif
