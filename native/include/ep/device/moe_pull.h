/* The receive half of a dispatch in low-latency form by blocks of several lanes, where all peers are stored to (moe_by_warps): without a barrier of the grid.
 *
 * Block 0 places the runs that sources have told of while tokens are still cast, so that all warps find their rows meanwhile; then each block hears from all sources itself, and reads. So it goes where all are well. Where a block
 * finds otherwise, a source that does not come, or refuses, it says so as it ends, and the block that ends last decides for all which rows are there and reads all of them, alone: others may have found different
 * ranks missing. It is also the one that grants the credit.
 *
 * HAZARD: so blocks of one rank may be far apart, and only the one that ends last may say what has become of the call. Until all blocks have sent, nobody may end the call either: who sends last would find that, and tell
 * nobody. */
#ifndef EP_DEVICE_MOE_PULL_H
#define EP_DEVICE_MOE_PULL_H

#include "moe_blocks.h"
#include "moe_pull_rows.h"
#include "moe_pull_send.h"
#include "moe_refuse.h"

EP_MACHINE_BEGIN

namespace detail {

/* What has become of a receive half. */
enum moe_verdict : uint32_t { moe_unsent = 0, moe_failed = 1, moe_refused_by_one = 2, moe_sound_call = 3 };

/* Awaits one source, by a warp: its counts are sound and its rows may be read. False: it is given up, or the call has failed. */
template <class Ctx, class Endpoint> EP_HD bool moe_hear_source(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, int32_t source) {
  const warp_coop<Ctx> warp{ctx};
  const uint32_t experts = at.experts_of(at.self());
  const uint64_t* words = moe_count_words(endpoint, at, at.self(), source);
  for (uint64_t expected = at.call.epoch;; ++expected) {
    /* All looks at once. */
    const bool takes_part = moe_takes_part(ctx, at, source);
    const bool here = load_acquire(ctx, endpoint.local_signal(at.signal_slot(EP_MOE_SIGNAL_COUNTED, source))) >= expected;
    const bool came = warp.lane() != 0 || (takes_part && (here || moe_await_alone(ctx, endpoint, at, EP_MOE_SIGNAL_COUNTED, expected, source, EP_STAGE_COUNT)));
    if (!warp.sync_and(came)) return false;
    bool late = false;
    bool refuses = false;
    uint32_t most = 0;
    for (uint32_t e = warp.lane(); e < experts; e += warp.lanes()) {
      const uint64_t word = load_relaxed(ctx, &words[e]);
      const uint32_t rows = static_cast<uint32_t>(word) & EP_MOE_COUNT_ROWS;
      refuses = refuses || (word & EP_MOE_COUNT_REFUSES) != 0;
      late = late || word >> EP_MOE_COUNT_EPOCH_SHIFT != at.call.epoch;
      most = rows > most ? rows : most;
      if (e == 0) at.peer(source).bank = static_cast<uint32_t>(word) >> EP_MOE_COUNT_BANK_SHIFT;
    }
    if (!warp.sync_and(!late)) continue; /* words of a past call, which came when they were no longer awaited */
    if (most > at.buffer.max_tokens) moe_give_up(ctx, at, source, {EP_STATUS_INVALID, source, EP_STAGE_COUNT, 0, at.buffer.max_tokens, most});
    if (refuses) ctx.fail(at.status(), EP_STATUS_BUSY, source, EP_STAGE_PLACE, 0, 0);
    return !refuses && most <= at.buffer.max_tokens;
  }
}

/* Whether this rank's own send half, which has ended, has neither failed nor refuses the call; by a warp. */
template <class Ctx> EP_HD bool moe_has_sent(Ctx& ctx, const moe_view& at) {
  const bool sent = at.peer(at.self()).credited == at.call.epoch;
  const bool refuses = at.refuses();
  if (sent && refuses && ctx.lane() % ctx.warp_lanes() == 0) ctx.fail(at.status(), EP_STATUS_BUSY, moe_debtor(at), EP_STAGE_RESULT, 0, 0);
  return sent && !refuses;
}

/* Awaits that this rank has sent, and then all sources, by the first warp of a block: their rows may be read. False: one is given up or refuses, or this rank has sent nothing. That of block 0 counts the time, and keeps where
 * sources take their results. `sound`: their counts are known to be. HAZARD: else each lane looks at its source's as soon as that has sent, since other lanes may await one that never does: an end of the call ends that. */
template <class Ctx, class Endpoint> EP_HD bool moe_hear_all(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, bool sound) {
  const warp_coop<Ctx> warp{ctx};
  const auto lane = static_cast<int32_t>(warp.lane());
  const auto lanes = static_cast<int32_t>(warp.lanes());
  const bool first = ctx.block() == 0;
  const uint32_t experts = at.experts_of(at.self());
  const auto said = [&](int32_t rank) { return load_acquire(ctx, endpoint.local_signal(at.signal_slot(EP_MOE_SIGNAL_COUNTED, rank))) >= at.call.epoch; };
  /* All looks of a lane at once, as far as they may be. */
  bool here = lane < at.world() && said(lane);
  if (lane == at.self() % lanes && !(lane == at.self() && here)) moe_await_block(ctx, moe_own_word(endpoint, at, EP_MOE_SIGNAL_COUNTED), at.call.epoch, at.self());
  warp.sync();
  const bool sent = at.peer(at.self()).credited == at.call.epoch && !at.refuses();
  bool all = true;
  for (int32_t source = lane; experts != 0 && source < at.world(); source += lanes) {
    const uint64_t* words = moe_count_words(endpoint, at, at.self(), source);
    const bool takes_part = moe_takes_part(ctx, at, source);
    uint64_t word = load_relaxed(ctx, words);
    if (source == at.self()) continue;
    if (!takes_part) { /* HAZARD: its runs may have been placed before it was left out */
      for (uint32_t e = 0; sound && e < experts; ++e) all = all && static_cast<uint32_t>(load_relaxed(ctx, at.range(e, source))) == 0;
      continue;
    }
    if (source != lane) here = said(source);
    if (source != lane || !here) { /* HAZARD: what it has told before may have been taken back since: looked at behind what says that it has sent */
      const bool came = here || !sent || (first ? moe_await_alone(ctx, endpoint, at, EP_MOE_SIGNAL_COUNTED, at.call.epoch, source, EP_STAGE_COUNT)
                                                : moe_await(ctx, endpoint, at, EP_MOE_SIGNAL_COUNTED, at.call.epoch, source, EP_STAGE_COUNT));
      word = came ? load_relaxed(ctx, words) : 0;
    }
    uint32_t most = 0;
    if (word != 0 && sent && !sound) {
      moe_each_word(ctx, words, experts, 1, [&](uint32_t, uint64_t found) {
        const uint32_t rows = static_cast<uint32_t>(found) & EP_MOE_COUNT_ROWS;
        most = rows > most && found >> EP_MOE_COUNT_EPOCH_SHIFT == at.call.epoch ? rows : most;
      });
      if (most > at.buffer.max_tokens) moe_give_up(ctx, at, source, {EP_STATUS_INVALID, source, EP_STAGE_COUNT, 0, at.buffer.max_tokens, most});
    }
    if (first && sent) at.peer(source).bank = static_cast<uint32_t>(word) >> EP_MOE_COUNT_BANK_SHIFT;
    all = all && most <= at.buffer.max_tokens && word >> EP_MOE_COUNT_EPOCH_SHIFT == at.call.epoch && (word & EP_MOE_COUNT_REFUSES) == 0;
  }
  return warp.sync_and(sent && all);
}

/* Whether all sources that take part have told their counts by now, and what they may; by all lanes of a block. */
template <class Ctx, class Endpoint> EP_HD bool moe_all_told(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at) {
  const uint32_t experts = at.experts_of(at.self());
  const uint64_t* told = moe_count_words(endpoint, at, at.self(), 0);
  const uint64_t* own = at.send_words() + at.first_replica(at.self());
  bool all = true;
  for (uint32_t run = coop.lane(); run < experts * static_cast<uint32_t>(at.world()); run += coop.lanes()) {
    const uint32_t source = run / experts;
    const uint32_t expert = run - source * experts;
    const bool here = static_cast<int32_t>(source) == at.self();
    const uint64_t word = load_relaxed(ctx, here ? &own[expert] : &told[uint64_t{source} * at.buffer.experts.most_local + expert]);
    const bool may = word >> EP_MOE_COUNT_EPOCH_SHIFT == at.call.epoch && (word & EP_MOE_COUNT_REFUSES) == 0 && (static_cast<uint32_t>(word) & EP_MOE_COUNT_ROWS) <= at.buffer.max_tokens;
    all = all && (may || (!here && !moe_takes_part(ctx, at, static_cast<int32_t>(source))));
  }
  return coop.sync_and(all);
}

/* By block 0: places what all have told by now, or else what they have told once they have sent, and tells all blocks of this rank, in its own word of EP_MOE_SIGNAL_PLACED: twice the epoch, and 1 more where runs lie as they are to
 * be read. */
template <class Ctx, class Endpoint> EP_HD void moe_place_told(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at) {
  const warp_share share = warps_of_block(ctx);
  bool told = false;
  for (bool sent = false; !told && !sent;) { /* sources tell long before they send, and so does this rank */
    sent = !coop.sync_and(coop.lane() != 0 || load_acquire(ctx, moe_own_word(endpoint, at, EP_MOE_SIGNAL_COUNTED)) < at.call.epoch);
    told = moe_all_told(ctx, coop, endpoint, at);
  }
  if (!told) told = coop.sync_and(share.warp != 0 || moe_hear_all(ctx, endpoint, at, false));
  if (told) moe_place_all(ctx, endpoint, at, 0, share.warp, share.warps);
  coop.sync();
  if (coop.lane() != 0) return;
  launch_ref(*moe_own_word(endpoint, at, EP_MOE_SIGNAL_PLACED)).store(uint64_t{2} * at.call.epoch + (told ? 1 : 0), release);
  if constexpr (!requires { Ctx::wakes_nobody; }) {
    fence_system();
    ctx.wake(reinterpret_cast<const ep_peer_view*>(endpoint.memory.peers)[at.self()].wake);
  }
}

/* By all lanes of a block: whether runs are placed. */
template <class Ctx, class Endpoint> EP_HD bool moe_hear_placed(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at) {
  const uint64_t* word = moe_own_word(endpoint, at, EP_MOE_SIGNAL_PLACED);
  bool placed = true;
  if (coop.lane() == 0) {
    moe_await_block(ctx, word, uint64_t{2} * at.call.epoch, at.self());
    placed = load_relaxed(ctx, word) == uint64_t{2} * at.call.epoch + 1;
  }
  return coop.sync_and(placed);
}

/* By the block that has ended last, where not all is well: hears from all sources, this rank too, and says what is to be done. */
template <class Ctx, class Endpoint> EP_HD moe_verdict moe_decide(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at) {
  const warp_share share = warps_of_block(ctx);
  bool heard = true;
  for (auto source = static_cast<int32_t>(share.warp); source < at.world(); source += static_cast<int32_t>(share.warps)) {
    if (source == at.self()) heard = moe_has_sent(ctx, at) && heard;
    else if (at.experts_of(at.self()) != 0) heard = moe_hear_source(ctx, endpoint, at, source) && heard;
  }
  const bool all = coop.sync_and(heard);
  if (!all && at.peer(at.self()).credited != at.call.epoch) return moe_unsent;
  if (all || moe_sound(ctx, coop, at)) return moe_sound_call;
  return at.status()->status == EP_STATUS_BUSY ? moe_refused_by_one : moe_failed;
}

/* What a block that ends finds: others run yet, or it is the last of all; and then, whether any of them was not well. */
enum moe_end : uint32_t { moe_others_run, moe_all_well, moe_some_not };

/* By all lanes of each block, once; the one that ends last finds what all have written. */
template <class Ctx> EP_HD moe_end moe_ends(Ctx& ctx, const block_coop<Ctx>& coop, const moe_view& at, bool well) {
  constexpr uint64_t unwell = uint64_t{1} << 32;
  bool last = true;
  bool all_well = true;
  coop.sync(); /* all of its warps have read */
  if (coop.lane() == 0) {
    ctx.point();
    const launch_ref ended(at.peer(at.self()).arrived); /* as in moe_sends_last */
    const uint64_t found = ended.fetch_add(well ? 1 : 1 + unwell, acq_rel) + (well ? 1 : 1 + unwell);
    last = static_cast<uint32_t>(found) == ctx.blocks();
    all_well = found < unwell;
    if (last) ended.store(0, relaxed);
  }
  if (!coop.sync_and(last)) return moe_others_run;
  return coop.sync_and(all_well) ? moe_all_well : moe_some_not;
}

template <class Ctx, class Endpoint> EP_HD bool moe_pull_receive(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, const ep_moe_dispatch_args& args) {
  const block_coop<Ctx> coop{ctx};
  const bool first_warp = coop.lane() < ctx.warp_lanes();
  moe_verdict verdict = moe_sound_call;
  bool well = true;
  if (ctx.block() == 0) moe_place_told(ctx, coop, endpoint, at);
  /* The first turn is each block's, the second one that of the block that has ended last. */
  EP_ONE_CODE for (bool alone = false;; alone = true) {
    if (alone) {
      const warp_share share = warps_of_block(ctx);
      verdict = moe_decide(ctx, coop, endpoint, at);
      if (verdict != moe_unsent) moe_place_all(ctx, endpoint, at, 0, share.warp, share.warps);
      coop.sync();
    }
    well = alone ? verdict == moe_sound_call : moe_hear_placed(ctx, coop, endpoint, at);
    if (well) {
      well = moe_pull_rows(ctx, endpoint, at, args, alone ? block_share{0, 1} : block_share{ctx.block(), ctx.blocks()}, [&] {
        const bool heard = alone || coop.sync_and(!first_warp || moe_hear_all(ctx, endpoint, at, true));
        if (heard && (alone || ctx.block() == 0) && coop.lane() == 0 && moe_may_offer(at)) moe_say_how(ctx, endpoint, at, moe_results_gone); /* experts may write results anew */
        return heard;
      });
    }
    if (alone) break;
    const moe_end end = moe_ends(ctx, coop, at, well);
    if (end == moe_others_run) return true; /* it does not know yet */
    if (end == moe_all_well) break;
  }
  if (verdict == moe_refused_by_one) moe_refuse_alone(ctx, coop, endpoint, at);
  const uint32_t experts = at.experts_of(at.self());
  for (auto rank = static_cast<int32_t>(coop.lane()); verdict != moe_unsent && experts != 0 && rank < at.world(); rank += static_cast<int32_t>(coop.lanes())) {
    if (rank != at.self() && moe_takes_part(ctx, at, rank)) moe_say_stored(ctx, endpoint, at, EP_MOE_SIGNAL_CREDIT, rank);
  }
  for (uint32_t e = coop.lane(); well && args.totals != 0 && e < experts; e += coop.lanes()) {
    reinterpret_cast<uint64_t*>(args.totals)[e] += static_cast<uint64_t>(reinterpret_cast<const int32_t*>(at.call.routing.recv_count)[e]);
  }
  return well;
}

} // namespace detail

EP_MACHINE_END

#endif
