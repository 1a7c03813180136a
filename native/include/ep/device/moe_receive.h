/* What a low-latency receive half does with what has come: the places of runs in the receive tensor, and one row to its place. */
#ifndef EP_DEVICE_MOE_RECEIVE_H
#define EP_DEVICE_MOE_RECEIVE_H

#include "moe_cast.h"
#include "moe_offer.h"
#include "moe_rows.h"

EP_MACHINE_BEGIN

namespace detail {

/* HAZARD of rows that stay with their source: whoever is late and given up may read them while a later call writes there. What it makes of such rows goes nowhere: results are those of the
 * source, which has given it up. */
template <class Endpoint> EP_HD ep_moe_header* moe_run_headers(const Endpoint& endpoint, const moe_view& at, int32_t p, int32_t rank) {
  return reinterpret_cast<ep_moe_header*>(moe_data(endpoint, rank, at.run(static_cast<uint32_t>(p) - at.first_replica(rank), at.self())));
}

/* Where an expert's block begins in a low-latency receive tensor, whatever came. */
EP_HD uint64_t moe_loose_block(const moe_view& at, uint32_t expert) { return static_cast<uint64_t>(expert) * static_cast<uint64_t>(at.world()) * at.buffer.max_tokens; }

/* Experts whose runs a warp places at once. */
template <class Ctx> EP_HD uint32_t moe_placed_at_once(Ctx& ctx, const moe_view& at) {
  const auto world = static_cast<uint32_t>(at.world());
  return world < ctx.warp_lanes() ? ctx.warp_lanes() / world : 1;
}

/* Runs of `count` experts, at most moe_placed_at_once, behind each other in the order of sources; by a warp, of which each lane has a source of an expert. */
template <class Ctx, class Endpoint>
EP_HD void moe_place_runs(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, uint64_t totals, uint32_t first, uint32_t count = 1) {
  const auto world = static_cast<uint32_t>(at.world());
  const warp_coop<Ctx> warp{ctx};
  const uint32_t across = world < warp.lanes() ? world : warp.lanes();
  const uint32_t member = warp.lane() % across;
  const bool places = warp.lane() / across < count;
  const uint32_t expert = first + (places ? warp.lane() / across : 0);
  const auto* words = moe_count_words(endpoint, at, at.self(), 0) + expert;
  const uint64_t* own = at.send_words() + at.first_replica(at.self()) + expert;
  uint64_t begin = 0;
  for (uint32_t base = 0; base < world; base += across) {
    const uint32_t rank = base + member;
    const auto source = static_cast<int32_t>(rank);
    const bool one = places && rank < world;
    uint32_t rows = 0;
    if (one) {
      const uint64_t word = load_relaxed(ctx, source == at.self() ? own : &words[static_cast<uint64_t>(rank) * at.buffer.experts.most_local]);
      const bool here = source == at.self() || moe_takes_part(ctx, at, source);
      rows = here ? static_cast<uint32_t>(word) & EP_MOE_COUNT_ROWS : 0;
    }
    const uint32_t upto = Ctx::single_lane ? rows : warp_upto(ctx, rows, across);
    if (one) *at.range(expert, source) = (begin + upto - rows) << 32 | rows;
    begin += Ctx::single_lane ? rows : ctx.shuffle(upto, warp.lane() - member + across - 1);
  }
  if (!places || member != 0) return;
  reinterpret_cast<uint32_t*>(at.call.routing.block_start)[expert] = static_cast<uint32_t>(moe_loose_block(at, expert));
  reinterpret_cast<int32_t*>(at.call.routing.recv_count)[expert] = static_cast<int32_t>(begin);
  if (totals != 0) reinterpret_cast<uint64_t*>(totals)[expert] += begin;
}

/* The runs of all experts, shared among `warps` warps, of which this is number `warp`. */
template <class Ctx, class Endpoint>
EP_HD void moe_place_all(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, uint64_t totals, uint32_t warp, uint32_t warps) {
  const uint32_t experts = at.experts_of(at.self());
  const uint32_t at_once = moe_placed_at_once(ctx, at);
  for (uint32_t e = warp * at_once; e < experts; e += warps * at_once) moe_place_runs(ctx, endpoint, at, totals, e, experts - e < at_once ? experts - e : at_once);
}

/* Codes of `rows` payloads, packed at row_bytes, to rows `row` and on of the receive tensor. */
template <class Coop>
EP_HD void moe_copy_codes(const Coop& coop, const moe_view& at, const ep_moe_dispatch_args& args, const uint8_t* src, uint64_t row, uint64_t rows) {
  const ep_moe_buffer& buffer = at.buffer;
  const bool non_temporal = (at.call.flags & EP_MOE_NON_TEMPORAL_OUT) != 0;
  const uint64_t bytes = payload_code_bytes(buffer.payload, buffer.hidden);
  auto* to = reinterpret_cast<uint8_t*>(args.out) + row * args.out_stride_bytes;
  if constexpr (!Coop::single) {
    for (uint64_t i = 0; i < rows; ++i) moe_copy_row(coop, to + i * args.out_stride_bytes, src + i * buffer.row_bytes, bytes);
  } else if (args.out_stride_bytes == bytes) {
    copy_rows(coop, to, src, buffer.row_bytes, bytes, rows, non_temporal);
  } else {
    for (uint64_t i = 0; i < rows; ++i) copy_rows(coop, to + i * args.out_stride_bytes, src + i * buffer.row_bytes, bytes, bytes, 1, non_temporal);
  }
}

/* The same with their scales. */
template <class Coop>
EP_HD void moe_copy_out(const Coop& coop, const moe_view& at, const ep_moe_dispatch_args& args, const uint8_t* src, uint64_t row, uint64_t rows) {
  moe_copy_codes(coop, at, args, src, row, rows);
  if (args.out_scales != 0) moe_copy_scales(coop, args, at.buffer.payload, at.buffer.hidden, src, at.buffer.row_bytes, row, rows);
}

/* Whether a header says what its source may say. */
EP_HD bool moe_is_sound(const moe_view& at, const ep_moe_header& header, int32_t source) {
  return header.rank == source && header.token < at.buffer.max_tokens && header.choice < at.buffer.top_k;
}

/* What a header says, to the row that it is of. False: nothing that its source may say. */
template <class Ctx> EP_HD bool moe_take_header(Ctx& ctx, const moe_view& at, const ep_moe_header& header, int32_t source, uint64_t row) {
  const bool sound = moe_is_sound(at, header, source);
  /* Results would go to where it says. */
  if (!sound) ctx.fail(at.status(), EP_STATUS_INVALID, source, EP_STAGE_ARRIVAL, at.buffer.max_tokens, header.token);
  reinterpret_cast<int32_t*>(at.call.routing.src_token)[row] = static_cast<int32_t>(header.token);
  reinterpret_cast<int32_t*>(at.call.routing.src_choice)[row] = static_cast<int32_t>(header.choice);
  return sound;
}

} // namespace detail

EP_MACHINE_END

#endif
