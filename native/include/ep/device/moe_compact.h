/* Dispatch in high-throughput form: rows go to their final places in a receive tensor that holds what there is, expert by expert.
 *
 * Send half: layout; counts to every rank of experts; each of them places what it will get (sources in order, blocks padded to the alignment) and answers every source
 * with the first row of each of its runs (moe_places.h); rows, written in place. Receive half: awaits the rows that were counted; zeroes what nobody writes.
 *
 * A call that repeats an earlier routing (EP_MOE_CACHED) is answered at once, from the places of that call: no headers, and counts, which nobody awaits before rows have come, only
 * to say where results go.
 *
 * HAZARD: a rank that was given up alive may still write rows to where it was told. The next call of the slot answers nobody before that rank has said that it is done, or is
 * dead (ep_moe_peer.owed_rows). Rows of cached calls await an answer for the same reason: it is what a rank that was given up in another slot does not get. A routing in which
 * a rank's rows were dropped has no rows of it any more, so that rank must not take part in later calls with it. */
#ifndef EP_DEVICE_MOE_COMPACT_H
#define EP_DEVICE_MOE_COMPACT_H

#include "moe_places.h"

EP_MACHINE_BEGIN

namespace detail {

/* Rows by warps, each to all of its places. */
template <class Ctx, class Endpoint>
EP_HD void compact_spread_rows(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const compact_view& view, const ep_moe_dispatch_args& args) {
  const moe_view& at = view.at;
  moe_send_tokens(ctx, coop, endpoint, at, args, [&](uint32_t token, uint32_t k, bool first) -> uint64_t {
    const uint64_t choice = static_cast<uint64_t>(token) * at.buffer.top_k + k;
    const int32_t p = at.replicas()[choice];
    const auto slot = static_cast<uint32_t>(at.slots()[choice]);
    if (p < 0) return 0;
    const int32_t rank = at.rank_of(p);
    if (rank != at.self() && !moe_takes_part(ctx, at, rank)) return 0;
    const uint64_t row = view.start()[p] + slot;
    if (first && !view.cached()) *reinterpret_cast<ep_moe_header*>(moe_data(endpoint, rank, view.header(row))) = {at.self(), token, k, 0};
    return reinterpret_cast<uint64_t>(moe_data(endpoint, rank, view.row(row)));
  });
}

/* This block's tokens, each to all of its places: read once, from memory, and then from the cache. */
template <class Ctx, class Endpoint>
EP_HD void compact_send_rows(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const compact_view& view, const ep_moe_dispatch_args& args) {
  if constexpr (moe_by_warps<Ctx, Endpoint>) return compact_spread_rows(ctx, coop, endpoint, view, args);
  const moe_view& at = view.at;
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
      const auto slot = static_cast<uint32_t>(at.slots()[choice]);
      const uint64_t row = view.start()[p] + slot;
      const ep_moe_header header{at.self(), token, k, 0};
      if (rank == at.self()) {
        if (coop.lane() == 0 && !view.cached()) *reinterpret_cast<ep_moe_header*>(view.own + view.header(row)) = header;
        copy_rows(coop, view.own + view.row(row), src, buffer.payload_bytes, buffer.payload_bytes, 1, non_temporal);
        continue;
      }
      if (moe_stores(endpoint, rank)) {
        if (!moe_takes_part(ctx, at, rank)) continue;
        if (coop.lane() == 0 && !view.cached()) *reinterpret_cast<ep_moe_header*>(moe_data(endpoint, rank, view.header(row))) = header;
        copy_rows(coop, moe_data(endpoint, rank, view.row(row)), src, buffer.payload_bytes, buffer.payload_bytes, 1, non_temporal);
      } else {
        if (coop.lane() == 0) headers[first[p] + slot] = header;
        if (!moe_takes_part(ctx, coop, at, rank)) continue;
        ep_kernel_status why{};
        if (!endpoint.put_rows(ctx, coop, rank, view.row(row), src, buffer.payload_bytes, buffer.payload_bytes, 1, non_temporal,
                               at.signal_slot(EP_MOE_SIGNAL_ARRIVED, at.self()), 1, &why) && coop.lane() == 0) {
          moe_give_up(ctx, at, rank, why);
        }
      }
    }
  }
  moe_written<Endpoint>(coop, non_temporal);
}

/* All rows to a rank have been written or posted: says so, or puts the headers, of which there is one run for each expert. A rank that gets none hears so, since it may be told
 * something else in their place (compact_refuse). */
template <class Ctx, class Endpoint>
EP_HD void compact_finish_rank(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const compact_view& view, int32_t rank) {
  const moe_view& at = view.at;
  const bool none = at.sends_to(rank) == 0;
  if (moe_stores(endpoint, rank) || none) {
    moe_say(ctx, coop, endpoint, at, EP_MOE_SIGNAL_ARRIVED, rank);
  } else {
    const auto* first = reinterpret_cast<const uint32_t*>(at.call.routing.send_first);
    const auto* headers = reinterpret_cast<const ep_moe_header*>(at.call.routing.send_headers);
    ep_kernel_status why{};
    bool ok = true;
    for (uint32_t p = at.first_replica(rank); !view.cached() && ok && p < at.first_replica(rank + 1); ++p) {
      const uint64_t bytes = at.sends(p) * sizeof(ep_moe_header);
      if (bytes == 0) continue;
      ok = endpoint.put_rows(ctx, coop, rank, view.header(view.start()[p]), headers + first[p], bytes, bytes, 1, false,
                             at.signal_slot(EP_MOE_SIGNAL_ARRIVED, at.self()), 1, &why);
    }
    if (!ok && coop.lane() == 0) moe_give_up(ctx, at, rank, why);
  }
}

/* The count words of an earlier call become those of this one. */
template <class Ctx> EP_HD void compact_rename_words(Ctx& ctx, const moe_view& at) {
  auto* words = reinterpret_cast<uint64_t*>(at.call.routing.send_words);
  for (uint32_t p = ctx.block() * ctx.lanes() + ctx.lane(); p < at.buffer.experts.replicas; p += ctx.blocks() * ctx.lanes()) words[p] = at.word() | at.sends(p);
}

/* Ranks that were given up alive, or that had not heard of a full rank, have written what they owed, or are dead; or the slot stays in debt. */
template <class Ctx, class Endpoint> EP_HD void compact_await_owed(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, int32_t rank) {
  ep_moe_peer& peer = at.peer(rank);
  if (peer.owed_rows == 0 || !moe_settled(ctx, endpoint, at, EP_MOE_SIGNAL_ARRIVED, peer.owed_rows, rank, EP_STAGE_ARRIVAL)) return;
  peer.arrived = peer.owed_rows;
  peer.owed_rows = 0;
}

template <class Coop> EP_HD void compact_zero(const Coop& coop, uint8_t* to, uint64_t bytes) {
#if !defined(__CUDACC__)
  if constexpr (Coop::single) {
    memset(to, 0, bytes);
    return;
  }
#endif
  /* Rows begin on 16-byte boundaries and are as long. */
  auto* vectors = reinterpret_cast<vector16*>(to);
  for (uint64_t i = coop.lane(); i < bytes / sizeof(vector16); i += coop.lanes()) vectors[i] = vector16{};
}

/* Rows from .. to of the tensor hold nothing. */
template <class Coop>
EP_HD void compact_clear(const Coop& coop, const compact_view& view, const ep_moe_dispatch_args& args, uint64_t from, uint64_t to) {
  const ep_moe_routing& routing = args.call.routing;
  if (from >= to) return;
  compact_zero(coop, view.own + view.row(from), (to - from) * view.at.buffer.row_bytes);
  coop.sync();
  for (uint64_t row = from + coop.lane(); row < to; row += coop.lanes()) {
    reinterpret_cast<int32_t*>(routing.src_token)[row] = -1;
    reinterpret_cast<int32_t*>(routing.src_choice)[row] = -1;
  }
  if (args.out_scales == 0) return;
  moe_copy_scales(coop, args, view.at.buffer.payload, view.at.buffer.hidden, view.own + view.row(from), view.at.buffer.row_bytes, from, to - from);
}

/* Rows from .. to of the tensor have come, of one source: where they are from, and their scales. */
template <class Ctx, class Coop>
EP_HD void compact_take_rows(Ctx& ctx, const Coop& coop, const compact_view& view, const ep_moe_dispatch_args& args, int32_t source, uint64_t from, uint64_t to) {
  const moe_view& at = view.at;
  const auto* headers = reinterpret_cast<const ep_moe_header*>(view.own + view.header(0));
  for (uint64_t row = from + coop.lane(); !view.cached() && row < to; row += coop.lanes()) {
    const ep_moe_header header = headers[row];
    if (header.rank != source || header.token >= at.buffer.max_tokens || header.choice >= at.buffer.top_k) {
      /* Results would go to where it says. */
      ctx.fail(at.status(), EP_STATUS_INVALID, source, EP_STAGE_ARRIVAL, at.buffer.max_tokens, header.token);
    }
    reinterpret_cast<int32_t*>(at.call.routing.src_token)[row] = static_cast<int32_t>(header.token);
    reinterpret_cast<int32_t*>(at.call.routing.src_choice)[row] = static_cast<int32_t>(header.choice);
  }
  if (args.out_scales == 0 || from == to) return;
  moe_copy_scales(coop, args, at.buffer.payload, at.buffer.hidden, view.own + view.row(from), at.buffer.row_bytes, from, to - from);
}

/* This block's share of a run. */
template <class Ctx>
EP_HD void compact_take_run(Ctx& ctx, const block_coop<Ctx>& coop, const compact_view& view, const ep_moe_dispatch_args& args, uint32_t expert, int32_t source) {
  const uint64_t range = *view.at.range(expert, source);
  const uint64_t rows = static_cast<uint32_t>(range);
  const uint64_t first = view.at.block_start(expert) + (range >> 32);
  const uint64_t turn = (ctx.block() + expert + static_cast<uint32_t>(source)) % ctx.blocks();
  compact_take_rows(ctx, coop, view, args, source, first + rows * turn / ctx.blocks(), first + rows * (turn + 1) / ctx.blocks());
}

/* All rows that have come, by warps. */
template <class Ctx> EP_HD void compact_take_runs(Ctx& ctx, const compact_view& view, const ep_moe_dispatch_args& args) {
  const moe_view& at = view.at;
  const auto wanted = [&](int32_t source) { return source == at.self() || moe_takes_part(ctx, at, source); };
  moe_share_runs(ctx, at, wanted, [&](uint32_t expert, int32_t source, uint64_t begin, uint32_t from, uint32_t count) {
    const uint64_t first = at.block_start(expert) + begin + from;
    compact_take_rows(ctx, warp_coop<Ctx>{ctx}, view, args, source, first, first + count);
  });
}

} // namespace detail

template <class Ctx, class Endpoint>
EP_HD bool moe_compact_send(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, const ep_moe_dispatch_args& args) {
  const block_coop<Ctx> coop{ctx};
  const moe_view at{buffer, args.call};
  detail::compact_view view = detail::compact_view_of(endpoint, at);
  const auto block = static_cast<int32_t>(ctx.block());
  const auto blocks = static_cast<int32_t>(ctx.blocks());
  if (view.cached()) detail::compact_rename_words(ctx, at);
  else moe_layout(ctx, at);
  moe_await_credits(ctx, endpoint, at);
  for (auto rank = static_cast<int32_t>(ctx.block() * coop.lanes() + coop.lane()); rank < at.world(); rank += static_cast<int32_t>(ctx.blocks() * coop.lanes())) {
    detail::compact_await_owed(ctx, endpoint, at, rank);
  }
  ctx.sync_grid();
  view.debtor = moe_debtor(coop, at);
  if (ctx.block() == 0 && !view.cached() && moe_puts<Endpoint>) moe_first_headers(coop, at);
  detail::compact_agree(ctx, coop, endpoint, view);
  const bool ok = moe_sound(ctx, coop, at);
  if (ok) detail::compact_send_rows(ctx, coop, endpoint, view, args);
  ctx.sync_grid();
  if (!ok && (at.status()->status == EP_STATUS_CAPACITY || at.status()->status == EP_STATUS_BUSY)) detail::compact_refuse(ctx, coop, endpoint, view);
  if (!ok || !moe_agreed<Endpoint>(ctx, coop, at, ok)) return false;
  for (int32_t rank = block; rank < at.world(); rank += blocks) {
    if (rank == at.self() || !moe_takes_part(ctx, coop, at, rank)) continue;
    if (view.cached() && at.sends_to(rank) != 0) detail::compact_send_counts(ctx, coop, endpoint, view, rank);
    detail::compact_finish_rank(ctx, coop, endpoint, view, rank);
    if (coop.lane() == 0) at.peer(rank).told = args.call.epoch;
  }
  return moe_agreed<Endpoint>(ctx, coop, at, ok);
}

template <class Ctx, class Endpoint>
EP_HD bool moe_compact_receive(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, const ep_moe_dispatch_args& args) {
  const block_coop<Ctx> coop{ctx};
  const moe_view at{buffer, args.call};
  const detail::compact_view view = detail::compact_view_of(endpoint, at);
  const uint32_t experts = at.experts_of(at.self());
  const auto lane = static_cast<int32_t>(ctx.block() * coop.lanes() + coop.lane());
  const auto lanes = static_cast<int32_t>(ctx.blocks() * coop.lanes());
  for (int32_t source = lane; source < at.world(); source += lanes) {
    uint64_t puts = 0;
    const uint64_t rows = source == at.self() ? 0 : view.expects(source, &puts);
    if (puts == 0 || (rows == 0 && !moe_takes_part(ctx, at, source))) continue;
    ep_moe_peer& peer = at.peer(source);
    const uint64_t value = moe_next(endpoint, at, source, peer.arrived, puts);
    bool came = moe_takes_part(ctx, at, source) && moe_await_alone(ctx, endpoint, at, EP_MOE_SIGNAL_ARRIVED, value, source, EP_STAGE_ARRIVAL);
    if (came) peer.arrived = value;
    if (came && !moe_hears_refusal(ctx, endpoint, at, source) && view.cached() && rows != 0) came = detail::compact_await_counts(ctx, endpoint, view, source, 0);
    if (!came && rows != 0 && load_relaxed(ctx, &at.ranks()[source]) != EP_MOE_RANK_MASKED) {
      peer.owed_rows = value; /* it knows where to write, and may be alive */
      /* HAZARD: the NIC of a dead one would write over the zeroes that its places get below. */
      if (load_relaxed(ctx, &at.ranks()[source]) == EP_STATUS_PEER_LOST) (void)moe_ended(ctx, endpoint, source);
    }
  }
  ctx.sync_grid();
  const bool ok = moe_sound(ctx, coop, at);
  constexpr bool by_warps = detail::moe_by_warps<Ctx, Endpoint>;
  if constexpr (by_warps) {
    if (ok) detail::compact_take_runs(ctx, view, args);
  }
  for (uint32_t e = 0; ok && e < experts; ++e) {
    const bool clears = (ctx.block() + e) % ctx.blocks() == 0;
    if (by_warps && !clears) continue;
    uint64_t cleared = at.block_start(e);
    for (int32_t source = 0; source < at.world(); ++source) {
      const uint64_t range = *at.range(e, source);
      if (static_cast<uint32_t>(range) == 0 || (source != at.self() && !moe_takes_part(ctx, coop, at, source))) continue;
      if constexpr (!by_warps) detail::compact_take_run(ctx, coop, view, args, e, source);
      const uint64_t first = at.block_start(e) + (range >> 32);
      if (clears) detail::compact_clear(coop, view, args, cleared, first);
      cleared = first + static_cast<uint32_t>(range);
    }
    if (clears) detail::compact_clear(coop, view, args, cleared, at.block_start(e + 1));
  }
  ctx.sync_grid();
  for (auto e = static_cast<uint32_t>(lane); ok && e < experts; e += static_cast<uint32_t>(lanes)) {
    uint64_t rows = 0;
    for (int32_t source = 0; source < at.world(); ++source) {
      uint64_t* range = at.range(e, source);
      if (source != at.self() && !moe_takes_part(ctx, at, source)) *range &= ~uint64_t{0xffffffffu};
      rows += static_cast<uint32_t>(*range);
    }
    reinterpret_cast<int32_t*>(args.call.routing.recv_count)[e] = static_cast<int32_t>(rows);
    if (args.totals != 0) reinterpret_cast<uint64_t*>(args.totals)[e] += rows;
  }
  /* HAZARD: only now, since a call that was refused gives nobody credit. */
  for (int32_t rank = lane; ok && rank < at.world(); rank += lanes) {
    ep_moe_peer& peer = at.peer(rank);
    if (rank != at.self() && at.experts_of(rank) != 0 && peer.told == args.call.epoch) peer.credited = moe_next(endpoint, at, rank, peer.credited, 1);
  }
  if (ok) detail::moe_take_back(ctx, coop, endpoint, at);
  ctx.sync_grid();
  return moe_sound(ctx, coop, at);
}

EP_MACHINE_END

#endif
