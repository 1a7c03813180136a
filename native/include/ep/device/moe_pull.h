/* Dispatch in low-latency form by blocks of several lanes, where all peers are stored to (moe_by_warps): without a barrier of the grid.
 *
 * Send half: whoever finds a place in the layout tells it, each block casts its tokens, and the block that ends last tells all ranks, this one too, that they are there. Receive half: block 0
 * hears from all sources, places what has come and decides, for all blocks, whether it is to be read; the others await its verdict; the block that ends last grants the credit.
 *
 * HAZARD: so blocks of one rank may be far apart. Nothing of a send half is decided by what a block finds in `status` or `ranks` on its own, and nothing of a receive half but by the verdict. */
#ifndef EP_DEVICE_MOE_PULL_H
#define EP_DEVICE_MOE_PULL_H

#include "bulk.h"
#include "moe_blocks.h"
#include "moe_layout.h"
#include "moe_receive.h"
#include "moe_refuse.h"
#include "moe_send.h"

EP_MACHINE_BEGIN

namespace detail {

/* What block 0 has decided about a receive half, below the epoch in this rank's own word of EP_MOE_SIGNAL_PLACED. */
enum moe_verdict : uint32_t { moe_unsent = 0, moe_failed = 1, moe_refused_by_one = 2, moe_sound_call = 3 };
constexpr uint32_t moe_verdict_bits = 2;

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

/* The layout; and, by whoever has found them, headers and count words to where others read them. Behind the credit of all. */
template <class Ctx, class Endpoint> EP_HD void moe_tell_layout(Ctx& ctx, const Endpoint& endpoint, const moe_view& at) {
  const ep_moe_buffer& buffer = at.buffer;
  const auto place_of = [&](uint32_t p) -> uint64_t {
    const int32_t rank = at.rank_of(static_cast<int32_t>(p));
    const auto headers = reinterpret_cast<uint64_t>(moe_run_headers(endpoint, at, static_cast<int32_t>(p), rank));
    return moe_takes_part(ctx, at, rank) ? headers : 0;
  };
  const auto told = [&](uint64_t headers, uint32_t choice, uint32_t slot) {
    const uint32_t token = choice / buffer.top_k;
    if (headers != 0 && slot < buffer.max_tokens) reinterpret_cast<ep_moe_header*>(headers)[slot] = {at.self(), token, choice - token * buffer.top_k, 0};
  };
  const auto counted = [&](uint32_t p, uint64_t word) {
    const int32_t rank = at.rank_of(static_cast<int32_t>(p));
    const uint32_t rows = static_cast<uint32_t>(word) & EP_MOE_COUNT_ROWS;
    if (rows > buffer.max_tokens) ctx.fail(at.status(), EP_STATUS_INVALID, rank, EP_STAGE_COUNT, buffer.max_tokens, rows);
    if (rank != at.self() && moe_takes_part(ctx, at, rank)) store_relaxed(ctx, moe_count_words(endpoint, at, rank, at.self()) + (p - at.first_replica(rank)), word);
  };
  moe_layout(ctx, at, place_of, told, counted);
}

/* Once all blocks have told and cast: says so to all ranks of experts, unless the call has failed, and to this one. A rank in debt takes it all back: its count words say that it sends nothing. */
template <class Ctx, class Endpoint> EP_HD void moe_say_sent(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at) {
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
  const auto lane = static_cast<int32_t>(coop.lane());
  const bool sound = half_ref(at.status()->status).load(acquire) == EP_STATUS_OK;
  bool owed = lane < at.world() && owes(lane);
  bool told = lane < at.world() && tells(lane);
  for (auto rank = lane + static_cast<int32_t>(coop.lanes()); rank < at.world(); rank += static_cast<int32_t>(coop.lanes())) owed = owed || owes(rank);
  if (!coop.sync_and(!owed)) {
    auto* words = reinterpret_cast<uint64_t*>(at.call.routing.send_words);
    for (uint32_t p = coop.lane(); p < at.buffer.experts.replicas; p += coop.lanes()) {
      const int32_t rank = at.rank_of(static_cast<int32_t>(p));
      words[p] = at.word() | EP_MOE_COUNT_REFUSES;
      if (rank != at.self() && moe_takes_part(ctx, at, rank)) store_relaxed(ctx, moe_count_words(endpoint, at, rank, at.self()) + (p - at.first_replica(rank)), words[p]);
    }
    coop.sync();
  }
  for (auto rank = lane; rank < at.world(); rank += static_cast<int32_t>(coop.lanes())) {
    if (rank != lane) told = tells(rank);
    if (rank != at.self() && !(sound && told)) continue;
    ep_moe_peer& peer = at.peer(rank);
    if (sound || rank != at.self()) peer.credited = at.call.epoch; /* of this rank: that it has sent */
    peer.told = at.call.epoch; /* of this rank: the epoch, which every block has read */
    moe_say_stored(ctx, endpoint, at, EP_MOE_SIGNAL_COUNTED, rank);
  }
}

template <class Ctx, class Endpoint> EP_HD bool moe_pull_send(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, const ep_moe_dispatch_args& args) {
  const block_coop<Ctx> coop{ctx};
  moe_look_ahead(ctx, at);
  moe_await_credits(ctx, endpoint, at);
  moe_tell_layout(ctx, endpoint, at);
  moe_offer_tokens(ctx, coop, endpoint, at, args, at.offered(at.self()));
  if (moe_ends_last(ctx, coop, at)) moe_say_sent(ctx, coop, endpoint, at);
  return true; /* what has failed is found out by the receive half, for all blocks alike */
}

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

/* By block 0: hears from all sources, this rank too, places what has come, and says what all blocks are to do. */
template <class Ctx, class Endpoint>
EP_HD void moe_decide(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, const ep_moe_dispatch_args& args) {
  const uint32_t warp = coop.lane() / ctx.warp_lanes();
  const uint32_t warps = coop.lanes() / ctx.warp_lanes();
  uint64_t verdict = moe_unsent;
  EP_ONE_CODE for (uint32_t turn = 0; turn < 2; ++turn) { /* the first turn is a rehearsal: what it places is placed anew */
    bool ok = turn != 0;
    if (ok) {
      /* HAZARD: what is heard of others may end the call. Until all blocks have sent, who sends last would find that, and tell nobody. */
      bool heard = true;
      if (coop.lane() % ctx.warp_lanes() == 0) moe_await_block(ctx, moe_own_word(endpoint, at, EP_MOE_SIGNAL_COUNTED), at.call.epoch, at.self());
      ctx.sync_warp();
      for (auto source = static_cast<int32_t>(warp); source < at.world(); source += static_cast<int32_t>(warps)) {
        if (source == at.self()) heard = moe_has_sent(ctx, at) && heard;
        else if (at.experts_of(at.self()) != 0) heard = moe_hear_source(ctx, endpoint, at, source) && heard;
      }
      const bool all = coop.sync_and(heard);
      if (!all && at.peer(at.self()).credited != at.call.epoch) break;
      ok = all || moe_sound(ctx, coop, at);
      verdict = ok ? moe_sound_call : at.status()->status == EP_STATUS_BUSY ? moe_refused_by_one : moe_failed;
    }
    moe_place_all(ctx, endpoint, at, ok ? args.totals : 0, warp, warps);
    coop.sync();
  }
  if (coop.lane() != 0) return;
  launch_ref(*moe_own_word(endpoint, at, EP_MOE_SIGNAL_PLACED)).store(static_cast<uint64_t>(at.call.epoch) << moe_verdict_bits | verdict, release);
  if constexpr (!requires { Ctx::wakes_nobody; }) {
    fence_system();
    ctx.wake(reinterpret_cast<const ep_peer_view*>(endpoint.memory.peers)[at.self()].wake);
  }
  if (verdict == moe_sound_call) moe_take_back(ctx, coop, endpoint, at);
}

constexpr uint32_t runs_in_flight = 8; /* looks of a lane at runs under way at once */

/* A received row: of the run of a source in an expert's block, which begins at row `begin` of that, number `index`. */
struct moe_run_row {
  uint32_t expert;
  int32_t source;
  uint64_t begin;
  uint32_t index;
};

/* Shares the rows that came to this rank among all warps: take(count, row), called by a whole warp, of which each of the first `count` lanes has a row; all of them find theirs at once, since what a
 * row is takes several looks one after the other. `rehearses`: nothing is known of the runs yet; as if each were of one row. */
template <class Ctx, class Take> EP_HD void moe_share_rows(Ctx& ctx, const moe_view& at, bool rehearses, const Take& take) {
  const uint32_t width = ctx.warp_lanes();
  const uint32_t in_warp = ctx.lane() % width;
  const auto world = static_cast<uint32_t>(at.world());
  const uint32_t runs = at.experts_of(at.self()) * world;
  const auto* ranges = at.range(0, 0);
  const auto rows_of = [&](uint32_t run, uint64_t* range) -> uint32_t {
    *range = run < runs ? ranges[run] : 0;
    if (rehearses) *range = run < runs ? 1 : 0;
    return static_cast<uint32_t>(*range);
  };
  /* Lanes count `each` runs one after the other. */
  const uint32_t needed = (runs + width - 1) / width;
  const uint32_t each = needed < width ? needed : width;
  for (uint32_t chunk = 0; chunk < runs; chunk += each * width) {
    const auto each_run = [&](uint32_t first, const auto& look) {
      for (uint32_t i = 0; i < each; i += runs_in_flight) {
        uint64_t range[runs_in_flight];
        uint32_t found[runs_in_flight];
        EP_UNROLL for (uint32_t n = 0; n < runs_in_flight; ++n) found[n] = i + n < each ? rows_of(first + i + n, &range[n]) : 0;
        EP_UNROLL for (uint32_t n = 0; n < runs_in_flight; ++n) look(first + i + n, found[n], range[n]);
      }
    };
    uint32_t rows = 0;
    each_run(chunk + in_warp * each, [&](uint32_t, uint32_t found, uint64_t) { rows += found; });
    const uint32_t upto = warp_upto(ctx, rows);
    const uint64_t total = ctx.shuffle(upto, width - 1);
    const uint32_t warps = moe_warps(ctx);
    const uint32_t turn = moe_warp(ctx);
    const auto end = static_cast<uint32_t>(total * (turn + 1) / warps);
    for (auto row = static_cast<uint32_t>(total * turn / warps); row < end; row += width) {
      const uint32_t count = end - row < width ? end - row : width;
      uint32_t lane = 0; /* that has counted the run */
      for (uint32_t i = 0; i < count; ++i) {
        const uint32_t before = ones(ctx.ballot(upto <= row + i));
        if (i == in_warp) lane = before;
      }
      const uint32_t before = ctx.shuffle(upto - rows, lane);
      uint32_t left = in_warp < count ? row + in_warp - before : 0;
      bool known = in_warp >= count;
      uint32_t own = 0;
      uint64_t begin = 0;
      each_run(chunk + lane * each, [&](uint32_t run, uint32_t found, uint64_t range) {
        const bool here = !known && left < found;
        own = here ? run : own;
        begin = here ? range >> 32 : begin;
        known = known || here;
        left -= known ? 0 : found;
      });
      take(count, moe_run_row{own / world, static_cast<int32_t>(own % world), begin, left});
    }
  }
}

/* Scales of the rows of a warp, four at once: under way while the rows are, since by themselves they would take as long. By column those of neighbours share a line. */
template <class Ctx> class pulled_scales {
 public:
  EP_HD pulled_scales(Ctx& context, const ep_moe_buffer& of, const ep_moe_dispatch_args& to) : ctx(context), buffer(of), args(to) {}
  /* Of `count` rows from number `done` on; lane i of the warp has where row i lies. */
  EP_HD void load(uint64_t own, uint32_t done, uint32_t count) {
    const uint32_t lane = ctx.lane() % ctx.warp_lanes();
    const uint64_t row = ctx.shuffle(own, (done + lane % at_once) % ctx.warp_lanes());
    here = reinterpret_cast<const uint32_t*>(row + payload_code_bytes(buffer.payload, buffer.hidden));
    blocks = lane % at_once < count ? static_cast<uint32_t>(payload_blocks(buffer.hidden)) : 0;
    const bool words = payload_scale_bytes(buffer.payload) == 4 && ((reinterpret_cast<uintptr_t>(here) | args.out_scales) & 3u) == 0;
    is_words = args.scale_group == 1 && ctx.warp_lanes() >= at_once && ctx.ballot(!words) == 0;
    if (is_words) look(lane / at_once);
  }
  /* The same, to rows `to` of the receive tensor, of which lane i has that of row i. */
  EP_HD void store(uint64_t own, uint64_t to, uint32_t done, uint32_t count, bool rehearses) {
    if (!is_words) {
      for (uint32_t i = 0; i < count && !rehearses; ++i) {
        moe_copy_scales(warp_coop<Ctx>{ctx}, args, buffer.payload, buffer.hidden, reinterpret_cast<const void*>(ctx.shuffle(own, done + i)), buffer.row_bytes,
                        ctx.shuffle(to, done + i), 1);
      }
      return;
    }
    const uint32_t lane = ctx.lane() % ctx.warp_lanes();
    auto* there = reinterpret_cast<uint32_t*>(args.out_scales) + ctx.shuffle(to, (done + lane % at_once) % ctx.warp_lanes()) * args.scale_row_stride;
    for (uint32_t first = lane / at_once; first < blocks; first += in_flight * apart()) {
      if (first != lane / at_once) look(first);
      EP_UNROLL for (uint32_t i = 0; i < in_flight; ++i) {
        const uint32_t block = first + i * apart();
        if (block < blocks && !rehearses) there[block * args.scale_block_stride] = held[i];
      }
    }
  }
  static constexpr uint32_t at_once = 4;

 private:
  static constexpr uint32_t in_flight = 8;
  Ctx& ctx;
  const ep_moe_buffer& buffer;
  const ep_moe_dispatch_args& args;
  const uint32_t* here = nullptr;
  uint32_t blocks = 0;
  bool is_words = false;
  uint32_t held[in_flight] = {};

  EP_HD uint32_t apart() const { return ctx.warp_lanes() / at_once; }
  EP_HD void look(uint32_t first) {
    EP_UNROLL for (uint32_t i = 0; i < in_flight; ++i) held[i] = first + i * apart() < blocks ? here[first + i * apart()] : 0;
  }
};

/* Rows that sources offer, this rank too, by warps. `rehearses`: reads some row or other of this rank, and writes nothing. */
template <class Ctx, class Endpoint> EP_HD void moe_pull_rows(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, const ep_moe_dispatch_args& args, bool rehearses = false) {
  const warp_coop<Ctx> warp{ctx};
  const ep_moe_buffer& buffer = at.buffer;
  const uint64_t bytes = payload_code_bytes(buffer.payload, buffer.hidden);
  bulk_rows<Ctx> rows(ctx);
  pulled_scales<Ctx> scales(ctx, buffer, args);
  moe_share_rows(ctx, at, rehearses, [&](uint32_t count, const moe_run_row& one) {
    uint64_t from = 0;
    uint64_t to = 0; /* row of the receive tensor */
    if (warp.lane() < count) {
      to = moe_loose_block(at, one.expert) + one.begin + one.index;
      const ep_moe_header header = reinterpret_cast<const ep_moe_header*>(moe_data(endpoint, at.self(), at.run(one.expert, one.source)))[one.index];
      const int32_t source = rehearses ? at.self() : one.source;
      from = reinterpret_cast<uint64_t>(moe_data(endpoint, source, at.offered(source)));
      if (!rehearses && moe_take_header(ctx, at, header, source, to)) from += header.token * buffer.row_bytes;
    }
    for (uint32_t done = 0; done < count; done += scales.at_once) {
      const uint32_t few = count - done < scales.at_once ? count - done : scales.at_once;
      if (args.out_scales != 0) scales.load(from, done, few);
      for (uint32_t i = done; i < done + few; ++i) {
        auto* out = reinterpret_cast<uint8_t*>(args.out) + ctx.shuffle(to, i) * args.out_stride_bytes;
        rows.copy(rehearses ? nullptr : out, reinterpret_cast<const uint8_t*>(ctx.shuffle(from, i)), bytes);
      }
      if (args.out_scales != 0) scales.store(from, to, done, few, rehearses);
    }
  });
  rows.end();
}

template <class Ctx, class Endpoint> EP_HD bool moe_pull_receive(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, const ep_moe_dispatch_args& args) {
  const block_coop<Ctx> coop{ctx};
  const uint64_t* word = moe_own_word(endpoint, at, EP_MOE_SIGNAL_PLACED);
  const uint64_t sound = static_cast<uint64_t>(at.call.epoch) << moe_verdict_bits | moe_sound_call;
  bool ok = false;
  /* HAZARD of time alone: by now other kernels have driven the instructions out of the caches, and all blocks would await each of them from memory, one after the other (8 us of rows that take 17).
   * So whoever has to wait rehearses meanwhile. */
  EP_ONE_CODE for (uint32_t turn = ctx.block() == 0 ? 1 : 0; turn < 2; ++turn) {
    if (turn != 0) {
      if (ctx.block() == 0) moe_decide(ctx, coop, endpoint, at, args);
      else if (coop.lane() == 0) moe_await_block(ctx, word, sound & ~uint64_t{moe_sound_call}, at.self());
      ok = coop.sync_and(coop.lane() != 0 || load_relaxed(ctx, word) == sound);
      if (!ok) break;
    }
    moe_pull_rows(ctx, endpoint, at, args, turn == 0);
  }
  bool grants = ok;
  if (!ok) {
    const uint64_t verdict = load_relaxed(ctx, word) & moe_sound_call;
    if (verdict == moe_refused_by_one) moe_refuse(ctx, coop, endpoint, at);
    grants = verdict != moe_unsent;
  }
  if (moe_ends_last(ctx, coop, at) && grants && at.experts_of(at.self()) != 0) {
    for (auto rank = static_cast<int32_t>(coop.lane()); rank < at.world(); rank += static_cast<int32_t>(coop.lanes())) {
      if (rank != at.self() && moe_takes_part(ctx, at, rank)) moe_say_stored(ctx, endpoint, at, EP_MOE_SIGNAL_CREDIT, rank);
    }
  }
  return ok;
}

} // namespace detail

EP_MACHINE_END

#endif
