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

/* By one lane of the block that tells `source` of results, once that is done or there is nothing to tell, in low latency: says so to this rank's blocks. HAZARD of time alone: what goes to another GPU goes one behind the other.
 * Where all blocks ask a rank that is ahead for its results at once, the word to that rank, which waits for it, comes behind all of them: 18 us of two GPUs. So none asks before. */
template <class Ctx, class Endpoint> EP_HD void moe_has_offered(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, int32_t source) {
  store_relaxed(ctx, const_cast<uint64_t*>(endpoint.local_signal(at.signal_slot(EP_MOE_SIGNAL_PLACED, source))), static_cast<uint64_t>(at.call.epoch));
  if constexpr (!requires { Ctx::wakes_nobody; }) {
    fence_system();
    ctx.wake(reinterpret_cast<const ep_peer_view*>(endpoint.memory.peers)[at.self()].wake);
  }
}

/* In place of sending results, unless the call has failed: tells each source that they are there, and, in low latency, where its runs begin in their blocks; in high throughput it was told. Of what one
 * is told nothing is another block's, so no barrier of the grid is needed. HAZARD: in place of the counts that the source has sent, which nobody reads any more; it sends others when it has its
 * results. */
template <class Ctx, class Endpoint> EP_HD void moe_offer_results(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at) {
  const uint64_t epoch = static_cast<uint64_t>(at.call.epoch) << EP_MOE_COUNT_EPOCH_SHIFT;
  const bool low_latency = at.buffer.header.kind == EP_MOE_LOW_LATENCY;
  const uint32_t experts = low_latency ? at.experts_of(at.self()) : 0;
  const auto tell = [&](int32_t source) {
    if (!moe_tells_all(at, at.self()) && moe_rows_of(at, source) == 0) return;
    /* Looks at once: the first run's, and whether anybody is to be told. */
    uint64_t range = coop.lane() < experts ? *at.range(coop.lane(), source) : 0;
    const bool sound = half_ref(at.status()->status).load(relaxed) == EP_STATUS_OK;
    if (!coop.sync_and(coop.lane() != 0 || (sound && moe_takes_part(ctx, at, source)))) return;
    uint64_t* words = moe_count_words(endpoint, at, at.self(), source);
    for (uint32_t e = coop.lane(); e < experts; e += coop.lanes()) {
      if (e != coop.lane()) range = *at.range(e, source);
      store_relaxed(ctx, &words[e], epoch | range >> 32);
    }
    /* By each block that tells somebody: its release orders nothing that another block has written. */
    if (coop.lane() == 0) store_relaxed(ctx, moe_count_words(endpoint, at, at.self(), at.self()), epoch | moe_results_offered);
    moe_written<Endpoint>(coop, false);
    moe_say(ctx, coop, endpoint, at, EP_MOE_SIGNAL_RETURNED, source);
  };
  for (auto source = static_cast<int32_t>(ctx.block()); source < at.world(); source += static_cast<int32_t>(ctx.blocks())) {
    if (source == at.self()) continue;
    tell(source);
    if (low_latency && coop.lane() == 0) moe_has_offered(ctx, endpoint, at, source);
  }
}

/* The result of this rank's row number `slot` to replica p of a rank that offers its results; null: it does not. Words are read without order, several at once: what they say was heard before a
 * barrier of the grid, or by this block, and whoever has gone on since is found out by the second look. */
template <class Ctx, class Endpoint> EP_HD const uint8_t* moe_offered_result(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, int32_t rank, uint32_t p, uint32_t slot) {
  const uint64_t said = load_relaxed(ctx, moe_count_words(endpoint, at, rank, rank));
  uint64_t row = slot;
  if (at.buffer.header.kind == EP_MOE_LOW_LATENCY) {
    const uint32_t expert = p - at.first_replica(rank);
    const uint64_t block = static_cast<uint64_t>(expert) * static_cast<uint64_t>(at.world()) * at.buffer.max_tokens;
    row += block + static_cast<uint32_t>(load_relaxed(ctx, moe_count_words(endpoint, at, rank, at.self()) + expert));
  } else {
    row += reinterpret_cast<const uint32_t*>(at.call.routing.send_start)[p];
  }
  if (said != (static_cast<uint64_t>(at.call.epoch) << EP_MOE_COUNT_EPOCH_SHIFT | moe_results_offered)) return nullptr;
  if (row >= at.buffer.recv_rows) { /* nothing that a rank may say: beyond there may be no memory */
    ctx.fail(at.status(), EP_STATUS_INVALID, rank, EP_STAGE_RESULT, at.buffer.recv_rows, row);
    row = 0;
  }
  return moe_data(endpoint, rank, at.part(at.buffer.staged_results) + row * at.buffer.result_row_bytes);
}

/* Gives up a rank that has gone on since it said that its results are there; one that owes none does not matter. */
template <class Ctx, class Endpoint> EP_HD bool moe_still_there(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, int32_t rank) {
  if (moe_how(ctx, endpoint, at, rank) != moe_results_gone || at.sends_to(rank) == 0) return true;
  moe_give_up(ctx, at, rank, {EP_STATUS_TIMEOUT, rank, EP_STAGE_RESULT, 0, at.call.epoch, 0});
  return false;
}

/* After a block has summed: whether none that it may have read from has gone on meanwhile; one that has is given up. `looks`: whether it has read anything. By all lanes, with one answer. */
template <class Ctx, class Endpoint> EP_HD bool moe_look_again(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, bool looks) {
  coop.sync();
  fence_system(); /* rows were read before the words are */
  bool there = true;
  for (auto rank = static_cast<int32_t>(coop.lane()); looks && rank < at.world(); rank += static_cast<int32_t>(coop.lanes())) {
    if (rank != at.self() && moe_takes_part(ctx, at, rank)) there = moe_still_there(ctx, endpoint, at, rank) && there;
  }
  return coop.sync_and(there);
}

/* The same for all blocks at once: otherwise all sum again, without whom they have lost. One barrier of the grid tells of what others have found. All blocks call it. */
template <class Ctx, class Endpoint> EP_HD bool moe_all_still_there(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, bool looks) {
  uint64_t& lost = at.peer(at.self()).counted; /* of itself a rank counts nothing; 0 between calls */
  if (!moe_look_again(ctx, coop, endpoint, at, looks) && coop.lane() == 0) store_release(ctx, &lost, 1);
  ctx.sync_grid();
  if (load_acquire(ctx, &lost) == 0) return true;
  ctx.sync_grid();
  if (ctx.block() == 0 && coop.lane() == 0) store_release(ctx, &lost, 0);
  ctx.sync_grid();
  return false;
}

} // namespace detail

EP_MACHINE_END

#endif
