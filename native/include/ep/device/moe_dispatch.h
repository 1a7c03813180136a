/* Dispatch in low-latency form: a rank's tokens go to the ranks of their experts, which pack them by expert and source.
 *
 * Send half: layout; then, token by token, each row into the run that its (expert, source) has in the receiver's part of the buffer, which needs no knowledge of other
 * ranks; then one put of count words to each rank. Receive half: awaits the counts of every source, and where puts are counted, as many as they announce; places
 * runs behind each other in the order of sources; copies rows out; grants the credit, so that the same slot may be written again.
 *
 * Where all peers are stored to (moe_pulls) a token is written once, by its source in its own part, however many experts it goes to; others get headers, and a receive half reads each of
 * its rows there. A source writes its rows anew only with the credit of all that read them.
 *
 * Unless warps take them, rows of the rank itself go from x, or from where they were cast to, to the receive tensor. A source that does not come in time is in `ranks` afterwards, and none
 * of its rows in the receive tensor, for any expert: that is decided once for all blocks, before anything is placed. */
#ifndef EP_DEVICE_MOE_DISPATCH_H
#define EP_DEVICE_MOE_DISPATCH_H

#include "moe_layout.h"
#include "moe_pull.h"
#include "moe_send.h"

EP_MACHINE_BEGIN

namespace detail {

/* By blocks of one lane: this block's tokens that go to others, or have to be cast. What is cast lies apart from what others read, and is copied there: where rows are handed over past the
 * caches a cast would write, slowly, lines that a peer has read, and this rank would read its own rows from memory. */
template <class Ctx, class Endpoint>
EP_HD void moe_offer_own(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, const ep_moe_dispatch_args& args) {
  const ep_moe_buffer& buffer = at.buffer;
  const moe_tokens tokens = moe_tokens_of(endpoint, at, args);
  const bool non_temporal = (at.call.flags & EP_MOE_NON_TEMPORAL) != 0;
  uint8_t* offered = moe_data(endpoint, at.self(), at.offered(at.self()));
  for (uint32_t token = ctx.block(); token < at.call.routing.tokens; token += ctx.blocks()) {
    bool crosses = false;
    bool chosen = false;
    for (uint32_t k = 0; k < buffer.top_k; ++k) {
      const uint64_t choice = static_cast<uint64_t>(token) * buffer.top_k + k;
      const int32_t p = at.replicas()[choice];
      if (p < 0) continue;
      const int32_t rank = at.rank_of(p);
      if (!moe_takes_part(ctx, at, rank)) continue;
      chosen = true;
      crosses = crosses || rank != at.self();
      moe_run_headers(endpoint, at, p, rank)[at.slots()[choice]] = {at.self(), token, k, 0};
    }
    if (tokens.cast && chosen) moe_cast_row(ctx, coop, args.dtype, tokens.x + token * tokens.stride, buffer.hidden, buffer.payload, tokens.staged + token * tokens.row_bytes);
    if (crosses) copy_rows(coop, offered + token * buffer.row_bytes, tokens.row(token), buffer.payload_bytes, buffer.payload_bytes, 1, non_temporal);
  }
  moe_written<Endpoint>(coop, non_temporal);
}

/* This block's tokens, row by row. */
template <class Ctx, class Endpoint>
EP_HD void moe_send_rows(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, const ep_moe_dispatch_args& args) {
  if constexpr (moe_pulls<Endpoint>) return moe_offer_own(ctx, coop, endpoint, at, args);
  const ep_moe_buffer& buffer = at.buffer;
  const moe_tokens tokens = moe_tokens_of(endpoint, at, args);
  const bool non_temporal = (at.call.flags & EP_MOE_NON_TEMPORAL) != 0;
  const auto* first = reinterpret_cast<const uint32_t*>(at.call.routing.send_first);
  auto* headers = reinterpret_cast<ep_moe_header*>(at.call.routing.send_headers);
  for (uint32_t token = ctx.block(); token < at.call.routing.tokens; token += ctx.blocks()) {
    const uint8_t* src = tokens.row(token);
    if (tokens.cast) {
      moe_cast_row(ctx, coop, args.dtype, tokens.x + token * tokens.stride, buffer.hidden, buffer.payload, tokens.staged + token * tokens.row_bytes);
      if constexpr (moe_puts<Endpoint>) fence_system(); /* a NIC or an engine reads it */
      coop.sync();
    }
    for (uint32_t k = 0; k < buffer.top_k; ++k) {
      const uint64_t choice = static_cast<uint64_t>(token) * buffer.top_k + k;
      const int32_t p = at.replicas()[choice];
      if (p < 0) continue;
      const int32_t rank = at.rank_of(p);
      if (rank == at.self()) continue;
      const auto slot = static_cast<uint32_t>(at.slots()[choice]);
      const uint64_t run = at.run(static_cast<uint32_t>(p) - at.first_replica(rank), at.self());
      const uint64_t row = run + buffer.max_tokens * sizeof(ep_moe_header) + slot * buffer.row_bytes;
      const ep_moe_header header{at.self(), token, k, 0};
      if (moe_stores(endpoint, rank)) {
        if (!moe_takes_part(ctx, at, rank)) continue;
        if (coop.lane() == 0) reinterpret_cast<ep_moe_header*>(moe_data(endpoint, rank, run))[slot] = header;
        copy_rows(coop, moe_data(endpoint, rank, row), src, buffer.payload_bytes, buffer.payload_bytes, 1, non_temporal);
      } else {
        if (coop.lane() == 0) headers[first[p] + slot] = header;
        if (!moe_takes_part(ctx, coop, at, rank)) continue;
        ep_kernel_status why{};
        if (!endpoint.put_rows(ctx, coop, rank, row, src, buffer.payload_bytes, buffer.payload_bytes, 1, non_temporal,
                               at.signal_slot(EP_MOE_SIGNAL_ARRIVED, at.self()), 1, &why) && coop.lane() == 0) {
          moe_give_up(ctx, at, rank, why);
        }
      }
    }
  }
  moe_written<Endpoint>(coop, non_temporal);
}

/* Count words, and headers where they are put, to one rank; all rows to it have been written or posted. */
template <class Ctx, class Endpoint>
EP_HD void moe_send_counts(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, int32_t rank) {
  const uint32_t first_replica = at.first_replica(rank);
  const uint32_t experts = at.experts_of(rank);
  const uint64_t to = at.part(at.buffer.counts) + static_cast<uint64_t>(at.self()) * at.buffer.experts.most_local * sizeof(uint64_t);
  const uint64_t* words = at.send_words() + first_replica;
  if (moe_stores(endpoint, rank)) {
    auto* there = reinterpret_cast<uint64_t*>(moe_data(endpoint, rank, to));
    for (uint32_t e = coop.lane(); e < experts; e += coop.lanes()) store_relaxed(ctx, &there[e], words[e]);
    moe_written<Endpoint>(coop, false);
    moe_say(ctx, coop, endpoint, at, EP_MOE_SIGNAL_COUNTED, rank);
  } else {
    const auto* first = reinterpret_cast<const uint32_t*>(at.call.routing.send_first);
    const auto* headers = reinterpret_cast<const ep_moe_header*>(at.call.routing.send_headers);
    ep_kernel_status why{};
    bool ok = true;
    for (uint32_t e = 0; e < experts && ok; ++e) {
      const uint64_t bytes = at.sends(first_replica + e) * sizeof(ep_moe_header);
      if (bytes == 0) continue;
      ok = endpoint.put_rows(ctx, coop, rank, at.run(e, at.self()), headers + first[first_replica + e], bytes, bytes, 1, false,
                             at.signal_slot(EP_MOE_SIGNAL_ARRIVED, at.self()), 1, &why);
    }
    ok = ok && endpoint.put_rows(ctx, coop, rank, to, words, experts * sizeof(uint64_t), experts * sizeof(uint64_t), 1, false,
                                 at.signal_slot(EP_MOE_SIGNAL_COUNTED, at.self()), 1, &why);
    if (!ok && coop.lane() == 0) moe_give_up(ctx, at, rank, why);
  }
}

/* Whether every run has room for its rows, by each block for itself; block 0 says so where it has not. */
template <class Ctx> EP_HD bool moe_counts_fit(Ctx& ctx, const block_coop<Ctx>& coop, const moe_view& at) {
  bool fits = true;
  for (uint32_t p = coop.lane(); p < at.buffer.experts.replicas; p += coop.lanes()) {
    const uint32_t rows = at.sends(p);
    if (rows <= at.buffer.max_tokens) continue;
    fits = false;
    if (ctx.block() == 0) ctx.fail(at.status(), EP_STATUS_INVALID, at.rank_of(static_cast<int32_t>(p)), EP_STAGE_COUNT, at.buffer.max_tokens, rows);
  }
  return coop.sync_and(fits);
}

} // namespace detail

template <class Ctx, class Endpoint>
EP_HD bool moe_dispatch_send(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, const ep_moe_dispatch_args& args) {
  const block_coop<Ctx> coop{ctx};
  const moe_view at{buffer, args.call};
  if constexpr (detail::moe_by_warps<Ctx, Endpoint>) return detail::moe_pull_send(ctx, endpoint, at, args);
  moe_layout(ctx, at);
  moe_await_credits(ctx, endpoint, at);
  ctx.sync_grid();
  const bool refuses = moe_debtor(coop, at) >= 0;
  const bool fits = refuses || detail::moe_counts_fit(ctx, coop, at);
  if (ctx.block() == 0) {
    auto* words = reinterpret_cast<uint64_t*>(args.call.routing.send_words);
    for (uint32_t p = coop.lane(); refuses && p < buffer.experts.replicas; p += coop.lanes()) words[p] = at.word() | EP_MOE_COUNT_REFUSES;
    if constexpr (moe_puts<Endpoint>) {
      coop.sync();
      moe_first_headers(coop, at);
    }
  }
  if constexpr (moe_puts<Endpoint>) ctx.sync_grid();
  const bool before = moe_sound(ctx, coop, at) && fits;
  if (before && !refuses) detail::moe_send_rows(ctx, coop, endpoint, at, args);
  ctx.sync_grid();
  if (!moe_agreed<Endpoint>(ctx, coop, at, before)) return false;
  for (int32_t rank = static_cast<int32_t>(ctx.block()); rank < at.world(); rank += static_cast<int32_t>(ctx.blocks())) {
    if (rank == at.self() || at.experts_of(rank) == 0 || !moe_takes_part(ctx, coop, at, rank)) continue;
    detail::moe_send_counts(ctx, coop, endpoint, at, rank);
    if (coop.lane() != 0) continue;
    ep_moe_peer& peer = at.peer(rank);
    peer.credited = moe_next(endpoint, at, rank, peer.credited, 1);
    peer.told = args.call.epoch;
  }
  return moe_agreed<Endpoint>(ctx, coop, at, before);
}

namespace detail {

/* Awaits one source, by one lane. Its counts are sound and its rows are here; or it is given up. */
template <class Ctx, class Endpoint> EP_HD void moe_await_source(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, int32_t source) {
  const uint32_t experts = at.experts_of(at.self());
  const ep_peer_view& own = reinterpret_cast<const ep_peer_view*>(endpoint.memory.peers)[at.self()];
  const auto* words = reinterpret_cast<const uint64_t*>(own.data + at.part(at.buffer.counts)) + static_cast<uint64_t>(source) * at.buffer.experts.most_local;
  ep_moe_peer& peer = at.peer(source);
  for (uint64_t expected = moe_next(endpoint, at, source, peer.counted, 1);; ++expected) {
    if (!moe_await_alone(ctx, endpoint, at, EP_MOE_SIGNAL_COUNTED, expected, source, EP_STAGE_COUNT)) return;
    uint64_t puts = 0;
    bool late = false;
    bool refuses = false;
    uint32_t most = 0;
    uint32_t bank = 0;
    moe_each_word(ctx, words, experts, 1, [&](uint32_t, uint64_t word) {
      refuses = (word & EP_MOE_COUNT_REFUSES) != 0;
      bank = static_cast<uint32_t>(word) >> EP_MOE_COUNT_BANK_SHIFT;
      late = late || word >> EP_MOE_COUNT_EPOCH_SHIFT != at.call.epoch;
      const uint32_t rows = static_cast<uint32_t>(word) & EP_MOE_COUNT_ROWS;
      most = rows > most ? rows : most;
      puts += rows + (rows != 0 ? 1 : 0);
    });
    /* The signal was that of words of a past call, which came when they were no longer awaited: those of this call have one of their own. */
    if (late) continue;
    peer.bank = bank;
    if (most > at.buffer.max_tokens) return moe_give_up(ctx, at, source, {EP_STATUS_INVALID, source, EP_STAGE_COUNT, 0, at.buffer.max_tokens, most});
    if (refuses) ctx.fail(at.status(), EP_STATUS_BUSY, source, EP_STAGE_PLACE, 0, 0);
    if (!moe_stores(endpoint, source)) {
      peer.counted = expected;
      if (puts != 0 && !moe_await_alone(ctx, endpoint, at, EP_MOE_SIGNAL_ARRIVED, peer.arrived + puts, source, EP_STAGE_ARRIVAL)) return;
      peer.arrived += puts;
    }
    return;
  }
}

/* Rows from .. to of a run, which have come. */
template <class Ctx, class Endpoint>
EP_HD void moe_take_rows(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, const ep_moe_dispatch_args& args, uint32_t expert, int32_t source,
                         uint64_t from, uint64_t to) {
  const uint8_t* run = moe_data(endpoint, at.self(), at.run(expert, source));
  const uint64_t row = at.block_start(expert) + (*at.range(expert, source) >> 32);
  const auto* headers = reinterpret_cast<const ep_moe_header*>(run);
  for (uint64_t i = from + coop.lane(); i < to; i += coop.lanes()) moe_take_header(ctx, at, headers[i], source, row + i);
  const uint8_t* src = run + at.buffer.max_tokens * sizeof(ep_moe_header);
  moe_copy_out(coop, at, args, src + from * at.buffer.row_bytes, row + from, to - from);
}

/* Rows from .. to of a run, by one lane, from where their source offers them; this rank's own, unless they were cast, from x. Scales of some rows at once, since by column those of
 * neighbours share a line. */
template <class Ctx, class Endpoint>
EP_HD void moe_pull_run(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, const ep_moe_dispatch_args& args, uint32_t expert, int32_t source,
                        uint64_t from, uint64_t to) {
  const ep_moe_buffer& buffer = at.buffer;
  const uint64_t row = at.block_start(expert) + (*at.range(expert, source) >> 32);
  const auto* headers = reinterpret_cast<const ep_moe_header*>(moe_data(endpoint, at.self(), at.run(expert, source)));
  const uint8_t* offered = moe_data(endpoint, source, at.offered(source));
  const moe_tokens own = moe_tokens_of(endpoint, at, args);
  const uint8_t* tile[scale_tile];
  uint32_t held = 0;
  const auto scales_of = [&](uint64_t upto) {
    if (args.out_scales != 0 && held != 0) moe_copy_scale_tile(args, buffer.payload, buffer.hidden, tile, row + upto - held, held);
    held = 0;
  };
  for (uint64_t i = from; i < to; ++i) {
    const ep_moe_header header = headers[i];
    if (!moe_take_header(ctx, at, header, source, row + i)) {
      scales_of(i);
      continue;
    }
    tile[held++] = source == at.self() ? own.row(header.token) : offered + header.token * buffer.row_bytes;
    moe_copy_codes(coop, at, args, tile[held - 1], row + i, 1);
    if (held == scale_tile) scales_of(i + 1);
  }
  scales_of(to);
}

/* This block's share of a run: contiguous, and another block's turn first in every run. */
template <class Ctx, class Endpoint>
EP_HD void moe_take_run(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, const ep_moe_dispatch_args& args, uint32_t expert, int32_t source) {
  const uint64_t rows = static_cast<uint32_t>(*at.range(expert, source));
  if (rows == 0) return;
  const uint64_t turn = (ctx.block() + expert + static_cast<uint32_t>(source)) % ctx.blocks();
  const uint64_t from = rows * turn / ctx.blocks();
  const uint64_t to = rows * (turn + 1) / ctx.blocks();
  if (from == to) return;
  if constexpr (moe_pulls<Endpoint>) moe_pull_run(ctx, coop, endpoint, at, args, expert, source, from, to);
  else moe_take_rows(ctx, coop, endpoint, at, args, expert, source, from, to);
}

/* All rows that have been sent here, and those that are pulled, this rank's own, too. */
template <class Ctx, class Endpoint>
EP_HD void moe_take_runs(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, const ep_moe_dispatch_args& args) {
  for (uint32_t e = 0; e < at.experts_of(at.self()); ++e) {
    for (int32_t source = 0; source < at.world(); ++source) {
      if (moe_pulls<Endpoint> || source != at.self()) moe_take_run(ctx, coop, endpoint, at, args, e, source);
    }
  }
}

/* This rank's own rows, this block's tokens of them. */
template <class Ctx, class Endpoint>
EP_HD void moe_take_own(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, const ep_moe_dispatch_args& args) {
  const moe_tokens tokens = moe_tokens_of(endpoint, at, args);
  const uint32_t first = at.first_replica(at.self());
  const uint32_t experts = at.experts_of(at.self());
  for (uint32_t token = ctx.block(); token < at.call.routing.tokens; token += ctx.blocks()) {
    for (uint32_t k = 0; k < at.buffer.top_k; ++k) {
      const uint64_t i = static_cast<uint64_t>(token) * at.buffer.top_k + k;
      const int32_t p = at.replicas()[i];
      if (p < 0 || static_cast<uint32_t>(p) - first >= experts) continue;
      const uint32_t expert = static_cast<uint32_t>(p) - first;
      const uint64_t row = at.block_start(expert) + (*at.range(expert, at.self()) >> 32) + static_cast<uint32_t>(at.slots()[i]);
      moe_copy_out(coop, at, args, tokens.row(token), row, 1);
      if (coop.lane() != 0) continue;
      reinterpret_cast<int32_t*>(at.call.routing.src_token)[row] = static_cast<int32_t>(token);
      reinterpret_cast<int32_t*>(at.call.routing.src_choice)[row] = static_cast<int32_t>(k);
    }
  }
}

} // namespace detail

template <class Ctx, class Endpoint>
EP_HD bool moe_dispatch_receive(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, const ep_moe_dispatch_args& args) {
  const block_coop<Ctx> coop{ctx};
  const moe_view at{buffer, args.call};
  if constexpr (detail::moe_by_warps<Ctx, Endpoint>) return detail::moe_pull_receive(ctx, endpoint, at, args);
  const uint32_t experts = at.experts_of(at.self());
  if (at.refuses() && ctx.block() == 0 && coop.lane() == 0) ctx.fail(at.status(), EP_STATUS_BUSY, moe_debtor(at), EP_STAGE_RESULT, 0, 0);
  if (experts != 0) {
    /* Neighbours by different blocks: lanes of a warp would go through their words in turn. */
    const auto lanes = static_cast<int32_t>(ctx.blocks() * coop.lanes());
    for (auto source = static_cast<int32_t>(coop.lane() * ctx.blocks() + ctx.block()); source < at.world(); source += lanes) {
      if (source != at.self() && moe_takes_part(ctx, at, source)) detail::moe_await_source(ctx, endpoint, at, source);
    }
  }
  ctx.sync_grid();
  const bool ok = moe_sound(ctx, coop, at);
  detail::moe_place_all(ctx, endpoint, at, ok ? args.totals : 0, detail::moe_warp(ctx), detail::moe_warps(ctx));
  ctx.sync_grid();
  if (!ok && at.status()->status == EP_STATUS_BUSY) detail::moe_refuse(ctx, coop, endpoint, at);
  if (ok) {
    detail::moe_take_runs(ctx, coop, endpoint, at, args);
    if constexpr (!detail::moe_pulls<Endpoint>) detail::moe_take_own(ctx, coop, endpoint, at, args);
    moe_written<Endpoint>(coop, (args.call.flags & EP_MOE_NON_TEMPORAL) != 0);
    detail::moe_take_back(ctx, coop, endpoint, at);
  }
  ctx.sync_grid();
  return moe_release(ctx, endpoint, buffer, args.call);
}

EP_MACHINE_END

#endif
