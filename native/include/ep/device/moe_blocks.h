/* What blocks of one rank tell each other within a launch: a word that another of them writes, and a barrier of a rank's blocks where a launch has those of other ranks, too. */
#ifndef EP_DEVICE_MOE_BLOCKS_H
#define EP_DEVICE_MOE_BLOCKS_H

#include "ep/abi/dispatch.h"
#include "order.h"

EP_MACHINE_BEGIN

namespace detail {

/* Awaits a word that another block of this launch writes, whatever happens, by one lane. HAZARD: no limit: whoever writes it may await peers for as long as any wait may last. */
template <class Ctx> EP_HD void moe_await_block(Ctx& ctx, const uint64_t* word, uint64_t value, int32_t self) {
  ep_kernel_status ignored{};
  while (!ctx.wait(word, value, self, EP_STAGE_TURN, &ignored)) ignored = {};
}

/* Below the number of barriers that are past: blocks that have come to the next one. */
constexpr uint64_t moe_barrier_turn = uint64_t{1} << 20;

/* A barrier of the blocks of one rank, all of which run at once: what sync_grid is where a launch has no others. `word` is the rank's own, 0 at first; between launches, which may differ in their blocks, nobody is at
 * it. HAZARD: ranks of a launch may differ in how many barriers they come by (one fails, another does not), so one of all blocks in the place of this one would hang. */
template <class Ctx> EP_HD void moe_sync_blocks(Ctx& ctx, uint64_t* word, int32_t self) {
  ctx.sync_block();
  if (ctx.lane() == 0) {
    ctx.point();
    const launch_ref turn(*word);
    const uint64_t before = turn.fetch_add(1, acq_rel);
    if (before % moe_barrier_turn + 1 == ctx.blocks()) turn.fetch_add(moe_barrier_turn - ctx.blocks(), release);
    else moe_await_block(ctx, word, (before / moe_barrier_turn + 1) * moe_barrier_turn, self);
  }
  ctx.sync_block();
}

} // namespace detail

EP_MACHINE_END

#endif
