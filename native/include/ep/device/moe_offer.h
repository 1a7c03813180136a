/* Results that stay where experts have written them (EP_MOE_ZERO_COPY): sources read them there when they sum, so each crosses memory once. For buffers of which all peers are stored to.
 *
 * A rank says by a word of its own part how the results of a call come: from staged_results, or sent as elsewhere. It lies where the rank would say to itself how many rows it sends.
 *
 * HAZARD: who is late, and was given up, may still read results while experts write those of a later call there, and would sum what is neither. So whoever lets experts write there again
 * takes the word back first, and whoever has summed looks at it once more: results of a rank that has gone on are those of a rank that is lost. Nobody who was waited for is found out by
 * that: the word goes when the slot's next dispatch has heard from all of its sources, and each of them had summed before it began that. */
#ifndef EP_DEVICE_MOE_OFFER_H
#define EP_DEVICE_MOE_OFFER_H

#include "moe_rows.h"

EP_MACHINE_BEGIN

namespace detail {

/* Below the epoch in the word. */
enum moe_results_kind : uint32_t { moe_results_gone = 0, moe_results_offered = 1, moe_results_sent = 2 };

EP_HD bool moe_may_offer(const moe_view& at) { return (at.buffer.flags & EP_MOE_ZERO_COPY) != 0; }

/* Count words of a source in a rank's part. */
template <class Endpoint> EP_HD uint64_t* moe_count_words(const Endpoint& endpoint, const moe_view& at, int32_t rank, int32_t source) {
  return reinterpret_cast<uint64_t*>(moe_data(endpoint, rank, at.part(at.buffer.counts))) + static_cast<uint64_t>(source) * at.buffer.experts.most_local;
}

/* By one lane, before anybody is told that there are results, or once all sources of a call were heard from. */
template <class Ctx, class Endpoint> EP_HD void moe_say_how(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, moe_results_kind how) {
  store_release(ctx, moe_count_words(endpoint, at, at.self(), at.self()), static_cast<uint64_t>(at.call.epoch) << EP_MOE_COUNT_EPOCH_SHIFT | how);
  fence_system(); /* taken back before anything is written there */
}

/* Once all sources of a dispatch were heard from: experts may write results anew. By all lanes, before a barrier of the grid. */
template <class Ctx, class Endpoint> EP_HD void moe_take_back(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at) {
  if constexpr (moe_pulls<Endpoint>) {
    if (moe_may_offer(at) && ctx.block() == 0 && coop.lane() == 0) moe_say_how(ctx, endpoint, at, moe_results_gone);
  }
}

/* How the results of a rank come, as it says now. */
template <class Ctx, class Endpoint> EP_HD moe_results_kind moe_how(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, int32_t rank) {
  const uint64_t word = load_acquire(ctx, moe_count_words(endpoint, at, rank, rank));
  if (word >> EP_MOE_COUNT_EPOCH_SHIFT != at.call.epoch) return moe_results_gone;
  return static_cast<moe_results_kind>(static_cast<uint32_t>(word));
}

/* Low latency: where each run of a source begins in its block, for the source to read. In high throughput it was told. All blocks. HAZARD: in place of the counts that it has sent, which
 * nobody reads any more; it sends others when it has its results. */
template <class Ctx, class Endpoint> EP_HD void moe_say_begins(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at) {
  if (at.buffer.header.kind != EP_MOE_LOW_LATENCY) return;
  const auto world = static_cast<uint32_t>(at.world());
  const uint32_t runs = at.experts_of(at.self()) * world;
  for (uint32_t run = ctx.block() * coop.lanes() + coop.lane(); run < runs; run += ctx.blocks() * coop.lanes()) {
    const auto source = static_cast<int32_t>(run % world);
    if (source == at.self()) continue;
    const uint64_t begin = *at.range(run / world, source) >> 32;
    store_relaxed(ctx, moe_count_words(endpoint, at, at.self(), source) + run / world, static_cast<uint64_t>(at.call.epoch) << EP_MOE_COUNT_EPOCH_SHIFT | begin);
  }
}

/* The result of this rank's row number `slot` to replica p of a rank that offers it. */
template <class Ctx, class Endpoint> EP_HD const uint8_t* moe_offered_result(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, int32_t rank, uint32_t p, uint32_t slot) {
  uint64_t row = slot;
  if (at.buffer.header.kind == EP_MOE_LOW_LATENCY) {
    const uint32_t expert = p - at.first_replica(rank);
    const uint64_t block = static_cast<uint64_t>(expert) * static_cast<uint64_t>(at.world()) * at.buffer.max_tokens;
    row += block + static_cast<uint32_t>(load_relaxed(ctx, moe_count_words(endpoint, at, rank, at.self()) + expert));
  } else {
    row += reinterpret_cast<const uint32_t*>(at.call.routing.send_start)[p];
  }
  if (row >= at.buffer.recv_rows) { /* nothing that a rank may say: beyond there may be no memory */
    ctx.fail(at.status(), EP_STATUS_INVALID, rank, EP_STAGE_RESULT, at.buffer.recv_rows, row);
    row = 0;
  }
  return moe_data(endpoint, rank, at.part(at.buffer.staged_results) + row * at.buffer.result_row_bytes);
}

/* Gives up a rank that has gone on since it said that its results are there. */
template <class Ctx, class Endpoint> EP_HD bool moe_still_there(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, int32_t rank) {
  if (moe_how(ctx, endpoint, at, rank) != moe_results_gone) return true;
  moe_give_up(ctx, at, rank, {EP_STATUS_TIMEOUT, rank, EP_STAGE_RESULT, 0, at.call.epoch, 0});
  return false;
}

/* After all blocks have summed: whether nobody has gone on meanwhile. Otherwise all sum again, without whom they have lost. All blocks call it. */
template <class Ctx, class Endpoint> EP_HD bool moe_all_still_there(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at) {
  uint64_t& lost = at.peer(at.self()).counted; /* of itself a rank counts nothing */
  ctx.sync_grid();
  if (ctx.block() == 0 && coop.lane() == 0) {
    fence_system(); /* rows were read before the word is */
    lost = 0;
    for (int32_t rank = 0; rank < at.world(); ++rank) {
      if (rank == at.self() || at.sends_to(rank) == 0 || !moe_takes_part(ctx, at, rank)) continue;
      if (!moe_still_there(ctx, endpoint, at, rank)) lost = 1;
    }
  }
  ctx.sync_grid();
  return lost == 0;
}

} // namespace detail

EP_MACHINE_END

#endif
