/* The calls of a buffer for experts as one launch makes them: its halves one after the other, in a call whose epoch may be counted where kernels run. Nothing on the host then changes from one
 * launch to the next, so that a graph may repeat it. */
#ifndef EP_DEVICE_MOE_LAUNCH_H
#define EP_DEVICE_MOE_LAUNCH_H

#include "moe_combine.h"
#include "moe_compact.h"
#include "moe_dispatch.h"

EP_MACHINE_BEGIN

constexpr uint32_t moe_send_half = 1;
constexpr uint32_t moe_receive_half = 2;

/* The epoch of a call, which `begins` by its first half. By each block, before it calls what is below with it. 0: the slot can count no further. */
EP_HD uint32_t moe_epoch_of(const ep_moe_buffer& buffer, const ep_moe_call& call, bool begins) {
  if ((call.flags & EP_MOE_DEVICE_EPOCH) == 0) return call.epoch;
  const moe_view at{buffer, call};
  return at.peer(at.self()).told + (begins ? 1 : 0);
}

namespace detail {

/* HAZARD: an epoch of 0 would be that of words that nobody has written yet. All blocks, and all ranks, find out alike, and nothing was sent. */
template <class Ctx> EP_HD bool moe_has_epoch(Ctx& ctx, const ep_moe_buffer& buffer, const ep_moe_call& call) {
  if (call.epoch != 0) return true;
  const moe_view at{buffer, call};
  ctx.fail(at.status(), EP_STATUS_INVALID, at.self(), EP_STAGE_COUNT, UINT32_MAX, 0);
  return false;
}

/* After a barrier of the grid: every block has read the one before. */
template <class Ctx> EP_HD void moe_keep_epoch(Ctx& ctx, const ep_moe_buffer& buffer, const ep_moe_call& call) {
  const moe_view at{buffer, call};
  if (ctx.block() == 0 && ctx.lane() == 0) at.peer(at.self()).told = call.epoch;
}

} // namespace detail

/* Of one form alone, for kernels that have no other: what they are made of comes from memory at a cold launch, and what is not there needs no registers. */
template <class Ctx, class Endpoint>
EP_HD void moe_low_latency_dispatch(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, const ep_moe_dispatch_args& args, uint32_t halves) {
  if (!detail::moe_has_epoch(ctx, buffer, args.call)) return;
  if ((halves & moe_send_half) != 0) {
    const bool ok = moe_dispatch_send(ctx, endpoint, buffer, args);
    if constexpr (!detail::moe_by_warps<Ctx, Endpoint>) detail::moe_keep_epoch(ctx, buffer, args.call); /* else the block that ended last has */
    if (!ok) return;
  }
  if ((halves & moe_receive_half) != 0) moe_dispatch_receive(ctx, endpoint, buffer, args);
}
template <class Ctx, class Endpoint>
EP_HD void moe_high_throughput_dispatch(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, const ep_moe_dispatch_args& args, uint32_t halves) {
  if (!detail::moe_has_epoch(ctx, buffer, args.call)) return;
  if ((halves & moe_send_half) != 0) {
    const bool ok = moe_compact_send(ctx, endpoint, buffer, args);
    detail::moe_keep_epoch(ctx, buffer, args.call);
    if (!ok) return;
  }
  if ((halves & moe_receive_half) != 0) moe_compact_receive(ctx, endpoint, buffer, args);
}

template <class Ctx, class Endpoint>
EP_HD void moe_run_dispatch(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, const ep_moe_dispatch_args& args, uint32_t halves) {
  if (buffer.header.kind == EP_MOE_HIGH_THROUGHPUT) moe_high_throughput_dispatch(ctx, endpoint, buffer, args, halves);
  else moe_low_latency_dispatch(ctx, endpoint, buffer, args, halves);
}

/* Where warps take rows. */
template <class Ctx, class Endpoint>
EP_HD void moe_low_latency_combine(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, const ep_moe_combine_args& args, uint32_t halves) {
  if (!detail::moe_has_epoch(ctx, buffer, args.call)) return;
  if ((halves & moe_send_half) != 0 && !moe_combine_send(ctx, endpoint, buffer, args)) return;
  if ((halves & moe_receive_half) != 0) detail::moe_pull_combine(ctx, endpoint, moe_view{buffer, args.call}, args);
}

template <class Ctx, class Endpoint>
EP_HD void moe_run_combine(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, const ep_moe_combine_args& args, uint32_t halves) {
  if (!detail::moe_has_epoch(ctx, buffer, args.call)) return;
  if ((halves & moe_send_half) != 0 && !moe_combine_send(ctx, endpoint, buffer, args)) return;
  if ((halves & moe_receive_half) == 0 || !moe_combine_receive(ctx, endpoint, buffer, args)) return;
  /* Low latency has granted its credit at the end of dispatch. */
  if (buffer.header.kind == EP_MOE_HIGH_THROUGHPUT) moe_release(ctx, endpoint, buffer, args.call);
}

EP_MACHINE_END

#endif
