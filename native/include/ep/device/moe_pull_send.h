/* The send half of a dispatch in low-latency form by blocks of several lanes, where all peers are stored to (moe_by_warps): without a barrier of the grid.
 *
 * Whoever finds a place in the layout tells it, each block casts its tokens, and the block that ends last tells all ranks, this one too, that they are there.
 *
 * HAZARD: so blocks of one rank may be far apart, and nothing is decided by what a block finds in `status` or `ranks` on its own. */
#ifndef EP_DEVICE_MOE_PULL_SEND_H
#define EP_DEVICE_MOE_PULL_SEND_H

#include "moe_layout.h"
#include "moe_offer.h"
#include "moe_receive.h"
#include "moe_send.h"

EP_MACHINE_BEGIN

namespace detail {

template <class Endpoint> EP_HD uint64_t* moe_own_word(const Endpoint& endpoint, const moe_view& at, uint32_t kind) {
  return const_cast<uint64_t*>(endpoint.local_signal(at.signal_slot(kind, at.self())));
}

/* What a launch reads before it has anything else to do. */
template <class Ctx> EP_HD void moe_look_ahead(Ctx& ctx, const moe_view& at) {
  const ep_moe_experts& experts = at.buffer.experts;
  const auto world = static_cast<uint64_t>(at.world());
  const auto ahead = [&](uint64_t address, uint64_t bytes) {
    for (uint64_t i = uint64_t{128} * ctx.lane(); i < bytes; i += uint64_t{128} * ctx.lanes()) prefetch(reinterpret_cast<const uint8_t*>(address) + i);
  };
  ahead(at.call.routing.topk, uint64_t{at.call.routing.tokens} * at.buffer.top_k * sizeof(int32_t));
  ahead(experts.candidate_begin, (experts.experts + uint64_t{1}) * sizeof(uint32_t));
  ahead(experts.candidates, experts.replicas * sizeof(uint32_t));
  ahead(experts.replica_rank, experts.replicas * sizeof(int32_t));
  ahead(at.buffer.memory.peers, world * sizeof(ep_peer_view));
}

/* The layout's findings to where others read them, by whoever has found them: headers and count words. Behind the credit of all. */
template <class Ctx, class Endpoint> struct moe_tells_receivers {
  Ctx& ctx;
  const Endpoint& endpoint;
  const moe_view& at;
  moe_feed<Ctx>& feed;
  bool whole = false; /* this block has the credit of all ranks, and leaves none out */

  EP_HD void admit() {
    whole = moe_await_credits(ctx, endpoint, at);
    feed.begin(); /* not before: looks that go on meanwhile take three times as long */
  }
  EP_HD moe_place place_of(uint32_t p) const {
    const int32_t rank = at.rank_of(static_cast<int32_t>(p));
    const auto headers = reinterpret_cast<uint64_t>(moe_run_headers(endpoint, at, static_cast<int32_t>(p), rank));
    const auto word = reinterpret_cast<uint64_t>(moe_count_words(endpoint, at, rank, at.self()) + (p - at.first_replica(rank)));
    return {headers, rank == at.self() ? 0 : word, rank};
  }
  EP_HD moe_place open(const moe_place& place) const { return whole || moe_takes_part(ctx, at, place.rank) ? place : moe_place{0, 0, place.rank}; }
  EP_HD void told(uint64_t headers, uint32_t choice, uint32_t slot) const {
    const uint32_t token = choice / at.buffer.top_k;
    if (headers != 0 && slot < at.buffer.max_tokens) reinterpret_cast<ep_moe_header*>(headers)[slot] = {at.self(), token, choice - token * at.buffer.top_k, 0};
  }
  EP_HD void counted(const moe_place& place, uint64_t word) const {
    const uint32_t rows = static_cast<uint32_t>(word) & EP_MOE_COUNT_ROWS;
    if (rows > at.buffer.max_tokens) ctx.fail(at.status(), EP_STATUS_INVALID, place.rank, EP_STAGE_COUNT, at.buffer.max_tokens, rows);
    if (place.word != 0) store_relaxed(ctx, reinterpret_cast<uint64_t*>(place.word), word);
  }
};

/* Once all blocks have told and cast, by a warp: says so to all ranks of experts, unless the call has failed, and then to this one. A rank in debt takes it all back: its count words say that it sends nothing. */
template <class Ctx, class Endpoint> EP_HD void moe_say_sent(Ctx& ctx, const Endpoint& endpoint, const moe_view& at) {
  const warp_coop<Ctx> warp{ctx};
  /* All looks of a lane at once, its first rank's: one after the other each would wait for memory, and all ranks for this one. */
  const auto owes = [&](int32_t rank) {
    const ep_moe_peer& peer = at.peer(rank);
    const uint64_t owed[EP_MOE_BANKS] = {peer.owed[0], peer.owed[1]};
    return (peer.owed_rows | owed[at.peer(at.self()).bank]) != 0;
  };
  const auto tells = [&](int32_t rank) {
    const bool has_experts = at.experts_of(rank) != 0;
    return moe_takes_part(ctx, at, rank) && has_experts;
  };
  const auto lane = static_cast<int32_t>(warp.lane());
  const auto lanes = static_cast<int32_t>(warp.lanes());
  const bool sound = half_ref(at.status()->status).load(acquire) == EP_STATUS_OK;
  bool owed = lane < at.world() && owes(lane);
  bool told = lane < at.world() && tells(lane);
  for (int32_t rank = lane + lanes; rank < at.world(); rank += lanes) owed = owed || owes(rank);
  if (!warp.sync_and(!owed)) {
    auto* words = reinterpret_cast<uint64_t*>(at.call.routing.send_words);
    for (uint32_t p = warp.lane(); p < at.buffer.experts.replicas; p += warp.lanes()) {
      const int32_t rank = at.rank_of(static_cast<int32_t>(p));
      const uint64_t refuses = at.word() | EP_MOE_COUNT_REFUSES;
      store_relaxed(ctx, &words[p], refuses);
      if (rank != at.self() && moe_takes_part(ctx, at, rank)) store_relaxed(ctx, moe_count_words(endpoint, at, rank, at.self()) + (p - at.first_replica(rank)), refuses);
    }
    warp.sync();
  }
  const auto tell = [&](int32_t rank) {
    ep_moe_peer& peer = at.peer(rank);
    if (sound || rank != at.self()) peer.credited = at.call.epoch; /* of this rank: that it has sent */
    peer.told = at.call.epoch; /* of this rank: the epoch, which every block has read */
    moe_say_stored(ctx, endpoint, at, EP_MOE_SIGNAL_COUNTED, rank);
  };
  /* HAZARD of time alone: this rank's blocks read at once, and what goes to another GPU goes one behind the other: a word that has not left when they do comes behind all that they ask for, 23 us of two GPUs. So it arrives before they
   * begin. On one GPU nothing is ahead of it, and a second turn takes 1 us. */
  const bool own_last = (at.buffer.flags & EP_MOE_LINKED) != 0;
  for (int32_t rank = lane; rank < at.world(); rank += lanes) {
    if (rank != lane) told = tells(rank);
    if (rank == at.self() ? !own_last : sound && told) tell(rank);
  }
  if (!own_last) return;
  fence_system();
  warp.sync();
  if (lane == 0) tell(at.self());
}

/* Whether all other blocks have ended the send half already, by the first warp of each; the one that all have ended for finds what they have written. */
template <class Ctx> EP_HD bool moe_sends_last(Ctx& ctx, const block_coop<Ctx>& coop, const moe_view& at) {
  coop.sync();
  if (coop.lane() >= ctx.warp_lanes()) return false;
  bool last = false;
  if (coop.lane() == 0) {
    ctx.point();
    const launch_ref ended(at.peer(at.self()).arrived); /* of itself a rank counts nothing; 0 between halves */
    last = ended.fetch_add(1, acq_rel) + 1 == ctx.blocks();
    if (last) ended.store(0, relaxed);
  }
  const bool found = ctx.ballot(last) != 0;
  ctx.sync_warp();
  return found;
}

template <class Ctx, class Endpoint> EP_HD bool moe_pull_send(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, const ep_moe_dispatch_args& args) {
  const block_coop<Ctx> coop{ctx};
  moe_feed<Ctx> feed(ctx, at, args);
  moe_look_ahead(ctx, at);
  moe_tells_receivers<Ctx, Endpoint> tell{ctx, endpoint, at, feed};
  moe_layout(ctx, at, tell);
  moe_offer_tokens(ctx, coop, endpoint, at, args, at.offered(at.self()), feed);
  if (moe_sends_last(ctx, coop, at)) moe_say_sent(ctx, endpoint, at);
  return true; /* what has failed is found out by the receive half, for all blocks alike */
}

} // namespace detail

EP_MACHINE_END

#endif
