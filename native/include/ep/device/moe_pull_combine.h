/* The receive half of a combine in low-latency form, by blocks of several lanes, where all peers are stored to (moe_by_warps): without a barrier of the grid.
 *
 * Each block hears from all ranks itself, sums its tokens and says, as it ends, what is left to do: to sum again, since a rank has not come or has gone on meanwhile (moe_offer.h), or to look who is
 * missing. The block that ends last does it for all tokens, alone: blocks may have found different ranks missing.
 *
 * HAZARD: so blocks of one rank may be far apart, and only the one that ends last may say what has become of the call. */
#ifndef EP_DEVICE_MOE_PULL_COMBINE_H
#define EP_DEVICE_MOE_PULL_COMBINE_H

#include "moe_blocks.h"
#include "moe_mixture.h"

EP_MACHINE_BEGIN

namespace detail {

/* Whether a rank owes results of this call, or says that there are none. */
EP_HD bool moe_owes_word(const moe_view& at, int32_t rank) {
  if (rank == at.self() || at.peer(rank).told != at.call.epoch) return false;
  return moe_tells_all(at, rank) || moe_returns(at, rank) != 0; /* the first saves a look at all of its words */
}

/* Awaits all ranks that owe a word, a warp each, by a block, and that they have this rank's where it offers results. False: one was given up; who is left out anyway was so before the call. Block 0 counts the time. */
template <class Ctx, class Endpoint> EP_HD bool moe_hear_results(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at) {
  const bool offers = (at.call.flags & EP_MOE_OFFERED) != 0;
  const warp_share share = warps_of_block(ctx);
  const bool looks = coop.lane() % ctx.warp_lanes() == 0;
  bool all = true;
  for (auto rank = static_cast<int32_t>(share.warp); looks && rank < at.world(); rank += static_cast<int32_t>(share.warps)) {
    /* All looks at once. */
    const bool owes = moe_owes_word(at, rank);
    const bool takes_part = moe_takes_part(ctx, at, rank);
    const uint64_t value = at.call.epoch;
    const uint64_t* told = endpoint.local_signal(at.signal_slot(EP_MOE_SIGNAL_PLACED, rank));
    const bool has_ours = !offers || rank == at.self() || load_relaxed(ctx, told) >= value;
    const bool here = load_acquire(ctx, endpoint.local_signal(at.signal_slot(EP_MOE_SIGNAL_RETURNED, rank))) >= value;
    if (!has_ours) moe_await_block(ctx, told, value, at.self());
    if (here || !owes || !takes_part) continue;
    const bool came = ctx.block() == 0 ? moe_await_alone(ctx, endpoint, at, EP_MOE_SIGNAL_RETURNED, value, rank, EP_STAGE_RESULT)
                                       : moe_await(ctx, endpoint, at, EP_MOE_SIGNAL_RETURNED, value, rank, EP_STAGE_RESULT);
    all = came && all;
  }
  return coop.sync_and(all);
}

/* What a block leaves to the one that ends last; each such block adds it once. */
enum moe_left : uint64_t { moe_all_done = 0, moe_look_who = uint64_t{1} << 20, moe_sum_again = uint64_t{1} << 40 };

/* By one lane of each block, behind its look back: what all have left, for the one that ends last, which finds what they have written; nothing, for the others. */
template <class Ctx> EP_HD uint64_t moe_hand_over(Ctx& ctx, const moe_view& at, uint64_t left) {
  ctx.point();
  if (left != moe_all_done) fence_system(); /* whom it has given up; of what it has summed the fence before the look is enough */
  const launch_ref ended(at.peer(at.self()).arrived); /* as in moe_ends_last */
  const uint64_t all = ended.fetch_add(1 + left, relaxed) + 1 + left;
  if ((all & (moe_look_who - 1)) != ctx.blocks()) return moe_all_done;
  ended.store(0, relaxed);
  const uint64_t found = all / moe_look_who * moe_look_who;
  if (found != moe_all_done) fence_system();
  return found;
}

/* By the first warp of a block that has summed: what it leaves. */
template <class Ctx, class Endpoint> EP_HD uint64_t moe_look_back(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, bool sound, bool all) {
  fence_order(); /* rows were read before the words are: whoever writes rows anew has taken its word back before, with a fence between */
  bool who = !sound;
  bool again = !all;
  for (uint32_t first = 0; first < static_cast<uint32_t>(at.world()); first += ctx.warp_lanes()) {
    const auto rank = static_cast<int32_t>(first + ctx.lane());
    if (rank >= at.world() || rank == at.self()) continue;
    /* All looks at once. */
    const bool takes_part = moe_takes_part(ctx, at, rank);
    const uint64_t refused = load_relaxed(ctx, reinterpret_cast<const uint64_t*>(moe_data(endpoint, at.self(), at.refusal(rank))));
    const bool gone = moe_may_offer(at) && moe_how(ctx, endpoint, at, rank) == moe_results_gone;
    const bool there = !gone || !takes_part || !sound || moe_still_there(ctx, endpoint, at, rank);
    who = who || !takes_part || !there || refused >> EP_MOE_COUNT_EPOCH_SHIFT == at.call.epoch;
    again = again || !there;
  }
  return (ctx.ballot(who || again) != 0 ? moe_look_who : moe_all_done) + (ctx.ballot(again) != 0 ? moe_sum_again : moe_all_done);
}

/* Once all blocks have ended, by the last of them: a rank that is left out may write its results yet; one that refused has said so in the place of them. */
template <class Ctx, class Endpoint> EP_HD void moe_settle_returns(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at) {
  for (auto rank = static_cast<int32_t>(coop.lane()); rank < at.world(); rank += static_cast<int32_t>(coop.lanes())) {
    if (!moe_owes_word(at, rank)) continue;
    if (moe_takes_part(ctx, at, rank)) moe_hears_refusal(ctx, endpoint, at, rank);
    else if (at.sends_to(rank) != 0) moe_owes(at, rank, at.call.epoch);
  }
  coop.sync();
  if (coop.lane() < ctx.warp_lanes()) moe_leave_bank(ctx, at);
}

/* What a warp's first sum reads before it comes to rows: other kernels have driven it out of the caches. */
template <class Ctx> EP_HD void moe_look_ahead(Ctx& ctx, const moe_view& at, const ep_moe_combine_args& args) {
  const uint32_t lane = ctx.lane() % ctx.warp_lanes();
  const warp_share share = warps_of_grid(ctx);
  const uint32_t token = share.warp / moe_team_warps(share, at.call.routing.tokens);
  if (token >= at.call.routing.tokens || lane >= at.buffer.top_k) return;
  const uint64_t choice = static_cast<uint64_t>(token) * at.buffer.top_k + lane;
  const int32_t p = at.replicas()[choice];
  prefetch(&at.slots()[choice]);
  if (args.weights != 0) prefetch(reinterpret_cast<const float*>(args.weights) + choice);
  if (p >= 0) prefetch(reinterpret_cast<const int32_t*>(at.buffer.experts.replica_rank) + p);
}

template <class Ctx, class Endpoint> EP_HD bool moe_pull_combine(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, const ep_moe_combine_args& args) {
  const block_coop<Ctx> coop{ctx};
  moe_look_ahead(ctx, at, args);
  const uint32_t bank = at.peer(at.self()).bank;
  bool sound = moe_sound(ctx, coop, at); /* not what a graph's dispatch has left when it failed */
  bool all = moe_hear_results(ctx, coop, endpoint, at);
  /* The first turn is each block's, later ones are those of the block that has ended last. */
  EP_ONE_CODE for (bool alone = false;; alone = true) {
    if (sound) moe_sum_tokens(ctx, endpoint, at, args, bank, alone ? warps_of_block(ctx) : warps_of_grid(ctx));
    coop.sync();
    uint64_t left = coop.lane() < ctx.warp_lanes() ? moe_look_back(ctx, endpoint, at, sound, all) : moe_all_done;
    if (!alone && coop.lane() == 0) left = moe_hand_over(ctx, at, left);
    if (coop.sync_and(coop.lane() != 0 || left == moe_all_done) && !alone) return true;
    if (coop.sync_and(coop.lane() != 0 || left < moe_sum_again)) break;
    sound = moe_sound(ctx, coop, at);
    all = true;
  }
  moe_settle_returns(ctx, coop, endpoint, at);
  return moe_sound(ctx, coop, at);
}

} // namespace detail

EP_MACHINE_END

#endif
