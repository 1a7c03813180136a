/* Combine, in either form: results go back to the tokens that they belong to, and each token's are summed.
 *
 * Send half: each received row that is not the rank's own goes to row (token * top_k + choice) at its source. Receive half: awaits every rank that owes rows, then
 * sums in the order of choices, whoever came first: docs/moe.md, "The order of summation". Rows of the rank itself are read where they are, and so are those that others offer
 * (moe_offer.h), which nobody sends. A rank that does not come in time is in `ranks` afterwards, and none of its rows in any sum. */
#ifndef EP_DEVICE_MOE_COMBINE_H
#define EP_DEVICE_MOE_COMBINE_H

#include "moe_mixture.h"
#include "moe_pull_combine.h"

EP_MACHINE_BEGIN

namespace detail {

/* Casts the result of one received row. */
template <class Endpoint, class Ctx, class Coop>
EP_HD void moe_cast_result(Ctx& ctx, const Coop& coop, const moe_view& at, const ep_moe_combine_args& args, const moe_results& results, uint64_t row) {
  const ep_moe_buffer& buffer = at.buffer;
  moe_cast_row(ctx, coop, args.dtype, results.y + row * results.stride, buffer.hidden, buffer.result_payload, results.staged + row * results.row_bytes);
  if constexpr (moe_puts<Endpoint>) fence_system(); /* a NIC or an engine reads it */
  coop.sync();
}

/* Where the result of a received row goes in its source's part. */
EP_HD uint64_t moe_result_place(const moe_view& at, uint64_t row, int32_t source) {
  const auto token = static_cast<uint64_t>(reinterpret_cast<const int32_t*>(at.call.routing.src_token)[row]);
  const auto choice = static_cast<uint32_t>(reinterpret_cast<const int32_t*>(at.call.routing.src_choice)[row]);
  return at.results(at.peer(source).bank) + (token * at.buffer.top_k + choice) * at.buffer.result_row_bytes;
}

/* This block's share of the rows of one (expert, source). */
template <class Ctx, class Endpoint>
EP_HD void moe_return_run(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, const ep_moe_combine_args& args, uint32_t expert,
                          int32_t source) {
  const ep_moe_buffer& buffer = at.buffer;
  const moe_results results = moe_results_of(endpoint, at, args);
  const bool non_temporal = (at.call.flags & EP_MOE_NON_TEMPORAL) != 0;
  const uint64_t range = *at.range(expert, source);
  if (static_cast<uint32_t>(range) == 0) return;
  const uint64_t turn = (ctx.block() + expert + static_cast<uint32_t>(source)) % ctx.blocks();
  for (uint64_t i = turn; i < static_cast<uint32_t>(range); i += ctx.blocks()) {
    const uint64_t row = at.block_start(expert) + (range >> 32) + i;
    if (results.cast) moe_cast_result<Endpoint>(ctx, coop, at, args, results, row);
    if (source == at.self()) continue;
    const uint64_t to = moe_result_place(at, row, source);
    if (moe_stores(endpoint, source)) {
      copy_rows(coop, moe_data(endpoint, source, to), results.row(row), buffer.result_bytes, buffer.result_bytes, 1, non_temporal);
    } else {
      if (!moe_takes_part(ctx, coop, at, source)) return;
      ep_kernel_status why{};
      if (!endpoint.put_rows(ctx, coop, source, to, results.row(row), buffer.result_bytes, buffer.result_bytes, 1, non_temporal,
                             at.signal_slot(EP_MOE_SIGNAL_RETURNED, at.self()), 1, &why) && coop.lane() == 0) {
        moe_give_up(ctx, at, source, why);
      }
    }
  }
}

/* All results, those of this rank only where they are cast. */
template <class Ctx, class Endpoint>
EP_HD void moe_return_runs(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, const ep_moe_combine_args& args) {
  const bool cast = args.dtype != at.buffer.result_payload;
  if constexpr (moe_by_warps<Ctx, Endpoint>) {
    const warp_coop<Ctx> warp{ctx};
    const moe_results results = moe_results_of(endpoint, at, args);
    const auto wanted = [&](int32_t source) { return source == at.self() ? cast : moe_takes_part(ctx, at, source); };
    moe_share_runs(ctx, at, wanted, [&](uint32_t expert, int32_t source, uint64_t begin, uint32_t from, uint32_t count) {
      const uint64_t first = at.block_start(expert) + begin + from;
      uint64_t own = 0; /* where one of the rows goes */
      if (source != at.self() && warp.lane() < count) own = reinterpret_cast<uint64_t>(moe_data(endpoint, source, moe_result_place(at, first + warp.lane(), source)));
      for (uint32_t i = 0; i < count; ++i) {
        if (cast) moe_cast_result<Endpoint>(ctx, warp, at, args, results, first + i);
        auto* to = reinterpret_cast<uint8_t*>(ctx.shuffle(own, i));
        if (to != nullptr) moe_copy_row(warp, to, results.row(first + i), at.buffer.result_bytes, at.buffer.header.kind == EP_MOE_LOW_LATENCY);
      }
    });
  } else {
    for (int32_t source = 0; source < at.world(); ++source) {
      if (source == at.self() ? !cast : !moe_takes_part(ctx, coop, at, source)) continue;
      for (uint32_t e = 0; e < at.experts_of(at.self()); ++e) moe_return_run(ctx, coop, endpoint, at, args, e, source);
    }
  }
}

} // namespace detail

template <class Ctx, class Endpoint>
EP_HD bool moe_combine_send(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, const ep_moe_combine_args& args) {
  const block_coop<Ctx> coop{ctx};
  const moe_view at{buffer, args.call};
  if constexpr (detail::moe_pulls<Endpoint>) {
    if ((args.call.flags & EP_MOE_OFFERED) != 0) {
      detail::moe_offer_results(ctx, coop, endpoint, at);
      return true; /* HAZARD: the half that follows may have failed in another block by now, and all of them go on to its barriers */
    }
    if (detail::moe_may_offer(at) && ctx.block() == 0 && coop.lane() == 0) detail::moe_say_how(ctx, endpoint, at, detail::moe_results_sent);
  }
  const bool before = moe_sound(ctx, coop, at);
  if (before) {
    detail::moe_return_runs(ctx, coop, endpoint, at, args);
    moe_written<Endpoint>(coop, (args.call.flags & EP_MOE_NON_TEMPORAL) != 0);
  }
  ctx.sync_grid();
  const bool ok = moe_agreed<Endpoint>(ctx, coop, at, before);
  for (int32_t source = static_cast<int32_t>(ctx.block()); ok && source < at.world(); source += static_cast<int32_t>(ctx.blocks())) {
    if (source == at.self()) continue;
    const bool tells = moe_tells_all(at, at.self());
    const bool says = moe_stores(endpoint, source) ? tells || moe_rows_of(at, source) != 0 : tells && moe_rows_of(at, source) == 0;
    if (!says || !moe_takes_part(ctx, coop, at, source)) continue;
    moe_say(ctx, coop, endpoint, at, EP_MOE_SIGNAL_RETURNED, source);
  }
  return ok;
}

namespace detail {

/* Awaits the results that one rank owes, by one lane. */
template <class Ctx, class Endpoint> EP_HD void moe_await_results(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, int32_t rank) {
  ep_moe_peer& peer = at.peer(rank);
  const bool surely = moe_stores(endpoint, rank) && moe_tells_all(at, rank); /* saves a look at all of its words */
  const uint64_t puts = surely ? 1 : moe_returns(at, rank);
  if (puts == 0 || peer.told != at.call.epoch) return;
  const uint64_t value = moe_next(endpoint, at, rank, peer.returned, puts);
  if (moe_takes_part(ctx, at, rank) && moe_await_alone(ctx, endpoint, at, EP_MOE_SIGNAL_RETURNED, value, rank, EP_STAGE_RESULT)) {
    peer.returned = value;
    const bool refused = at.buffer.header.kind == EP_MOE_LOW_LATENCY && moe_hears_refusal(ctx, endpoint, at, rank);
    if constexpr (moe_pulls<Endpoint>) {
      if (!refused && moe_may_offer(at)) moe_still_there(ctx, endpoint, at, rank);
    }
  } else if (at.sends_to(rank) != 0) {
    moe_owes(at, rank, value); /* it may be alive, and write them yet */
  }
}

} // namespace detail

template <class Ctx, class Endpoint>
EP_HD bool moe_combine_receive(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, const ep_moe_combine_args& args) {
  const block_coop<Ctx> coop{ctx};
  const moe_view at{buffer, args.call};
  if constexpr (detail::moe_by_warps<Ctx, Endpoint>) {
    if (buffer.header.kind == EP_MOE_LOW_LATENCY) return detail::moe_pull_combine(ctx, endpoint, at, args);
  }
  const auto lanes = static_cast<int32_t>(ctx.blocks() * coop.lanes());
  const uint32_t bank = at.peer(at.self()).bank;
  for (auto rank = static_cast<int32_t>(coop.lane() * ctx.blocks() + ctx.block()); rank < at.world(); rank += lanes) {
    if (rank != at.self()) detail::moe_await_results(ctx, endpoint, at, rank);
  }
  ctx.sync_grid();
  if (ctx.block() == 0 && coop.lane() < ctx.warp_lanes()) moe_leave_bank(ctx, at); /* every block has read which it is */
  const bool ok = moe_sound(ctx, coop, at);
  if (ok) detail::moe_sum_tokens(ctx, coop, endpoint, at, args, bank);
  if constexpr (detail::moe_pulls<Endpoint>) {
    if (detail::moe_may_offer(at)) {
      /* HAZARD: blocks may differ in `ok`, and all go through the same barriers. */
      while (!detail::moe_all_still_there(ctx, coop, endpoint, at, ok)) {
        if (ok) detail::moe_sum_tokens(ctx, coop, endpoint, at, args, bank);
      }
      return moe_sound(ctx, coop, at);
    }
  }
  return ok;
}

EP_MACHINE_END

#endif
