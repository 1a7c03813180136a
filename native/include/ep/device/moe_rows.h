/* Rows by warps: which warp takes which rows of a rank's runs, and one row to all places of its token. Not for contexts of one lane, which copy runs as they lie.
 *
 * A look at memory takes as long as a row does to copy, so nobody looks at every run or every choice in turn: each lane of a warp looks at some, and shuffles hand out what it has found. */
#ifndef EP_DEVICE_MOE_ROWS_H
#define EP_DEVICE_MOE_ROWS_H

#include "copy.h"
#include "moe_wait.h"

EP_MACHINE_BEGIN

namespace detail {

/* Whether the rows of a low-latency dispatch stay with their source until they are read: a reader must reach all of its sources. */
template <class Endpoint> constexpr bool moe_pulls = !moe_puts<Endpoint>;
/* Whether warps take rows. Puts are a block's: it has a queue pair, of which its warps would await each other's doorbells. */
template <class Ctx, class Endpoint> constexpr bool moe_by_warps = !Ctx::single_lane && !moe_puts<Endpoint>;

EP_HD uint32_t ones(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__popc(bits));
#else
  return static_cast<uint32_t>(__builtin_popcount(bits));
#endif
}

/* Loads of a lane under way at once, where rows are a warp's: an SM holds few warps of such kernels, and memory answers late. */
constexpr uint32_t rows_in_flight = 4;

/* Some warps, wherever in the grid they are, that have a thing in common. No barrier. */
template <class Ctx> struct team_coop {
  static constexpr bool single = Ctx::single_lane;
  Ctx& ctx;
  uint32_t member;
  uint32_t warps;
  EP_HD uint32_t lane() const { return member * ctx.warp_lanes() + ctx.lane() % ctx.warp_lanes(); }
  EP_HD uint32_t lanes() const { return warps * ctx.warp_lanes(); }
};

/* Warps of the grid, neighbours on different blocks. */
template <class Ctx> EP_HD uint32_t moe_warp(Ctx& ctx) { return ctx.lane() / ctx.warp_lanes() * ctx.blocks() + ctx.block(); }
template <class Ctx> EP_HD uint32_t moe_warps(Ctx& ctx) { return ctx.blocks() * (ctx.lanes() / ctx.warp_lanes()); }

/* Some warps that share a thing: this one's number among them. */
struct warp_share {
  uint32_t warp;
  uint32_t warps;
};
template <class Ctx> EP_HD warp_share warps_of_grid(Ctx& ctx) { return {moe_warp(ctx), moe_warps(ctx)}; }
template <class Ctx> EP_HD warp_share warps_of_block(Ctx& ctx) { return {ctx.lane() / ctx.warp_lanes(), ctx.lanes() / ctx.warp_lanes()}; }

/* The warps that share a token: as many as there are for each. */
EP_HD uint32_t moe_team_warps(const warp_share& share, uint32_t tokens) {
  constexpr uint32_t most = 8;
  uint32_t each = 1;
  while (each < most && 2 * each * static_cast<uint64_t>(tokens) <= share.warps) each *= 2;
  return each;
}

/* The warps of the grid that cast, of which block 0 has none where others are enough: it has to place runs meanwhile (moe_pull.h). A warp that casts nothing has a number beyond them. */
template <class Ctx> EP_HD warp_share warps_that_cast(Ctx& ctx, uint32_t tokens) {
  const warp_share all = warps_of_grid(ctx);
  const uint32_t each = ctx.lanes() / ctx.warp_lanes();
  const warp_share others{ctx.block() == 0 ? UINT32_MAX : ctx.lane() / ctx.warp_lanes() * (ctx.blocks() - 1) + ctx.block() - 1, all.warps - each};
  return ctx.blocks() > 1 && tokens <= others.warps && moe_team_warps(others, tokens) == moe_team_warps(all, tokens) ? others : all;
}

/* Shares `tokens` among warps: take(token, team). */
template <class Ctx, class Take> EP_HD void moe_share_tokens(Ctx& ctx, const warp_share& share, uint32_t tokens, const Take& take) {
  const uint32_t each = moe_team_warps(share, tokens);
  for (uint64_t unit = share.warp; unit < static_cast<uint64_t>(tokens) * each; unit += share.warps) {
    take(static_cast<uint32_t>(unit / each), team_coop<Ctx>{ctx, static_cast<uint32_t>(unit % each), each});
  }
}
template <class Ctx, class Take> EP_HD void moe_share_tokens(Ctx& ctx, uint32_t tokens, const Take& take) { moe_share_tokens(ctx, warps_of_grid(ctx), tokens, take); }

/* The sum of the values of this lane and lower ones of its part of the warp; parts are of `across` lanes. */
template <class Ctx> EP_HD uint32_t warp_upto(Ctx& ctx, uint32_t value, uint32_t across) {
  const uint32_t width = ctx.warp_lanes();
  const uint32_t in_warp = ctx.lane() % width;
  for (uint32_t distance = 1; distance < across; distance *= 2) {
    const uint32_t lower = ctx.shuffle(value, (in_warp + width - distance) % width);
    if (in_warp % across >= distance) value += lower;
  }
  return value;
}
template <class Ctx> EP_HD uint32_t warp_upto(Ctx& ctx, uint32_t value) { return warp_upto(ctx, value, ctx.warp_lanes()); }

/* Shares the rows that came to this rank among all warps, each of which gets rows that follow each other: take(expert, source, begin, first, count), called by a whole warp, for rows
 * `first` .. `first + count` of a run that begins at row `begin` of its block, at most as many as a warp has lanes. Runs of sources that are not wanted(source) are left out; all warps
 * must get the same answers. */
template <class Ctx, class Wanted, class Take> EP_HD void moe_share_runs(Ctx& ctx, const moe_view& at, const Wanted& wanted, const Take& take) {
  const uint32_t width = ctx.warp_lanes();
  const uint32_t in_warp = ctx.lane() % width;
  const auto world = static_cast<uint32_t>(at.world());
  const uint32_t runs = at.experts_of(at.self()) * world;
  const auto* ranges = at.range(0, 0);
  const uint32_t few = world <= width ? ctx.ballot(in_warp < world && wanted(static_cast<int32_t>(in_warp))) : 0;
  const auto rows_of = [&](uint32_t run, uint64_t* range) -> uint32_t {
    *range = run < runs ? ranges[run] : 0;
    const uint32_t source = run % world;
    const bool here = world <= width ? (few >> source & 1u) != 0 : run < runs && wanted(static_cast<int32_t>(source));
    return here ? static_cast<uint32_t>(*range) : 0;
  };
  /* Lanes count `each` runs one after the other, and a warp then looks at those of one lane: so `width` of them at most. */
  const uint32_t needed = (runs + width - 1) / width;
  const uint32_t each = needed < width ? needed : width;
  for (uint32_t chunk = 0; chunk < runs; chunk += each * width) {
    const uint32_t own = chunk + in_warp * each;
    uint32_t rows = 0;
    for (uint32_t i = 0; i < each; i += rows_in_flight) {
      uint64_t range[rows_in_flight];
      uint32_t found[rows_in_flight];
      EP_UNROLL for (uint32_t n = 0; n < rows_in_flight; ++n) found[n] = i + n < each ? rows_of(own + i + n, &range[n]) : 0;
      EP_UNROLL for (uint32_t n = 0; n < rows_in_flight; ++n) rows += found[n];
    }
    const uint32_t upto = warp_upto(ctx, rows);
    const uint64_t total = ctx.shuffle(upto, width - 1);
    const uint32_t warps = moe_warps(ctx);
    const uint32_t turn = moe_warp(ctx);
    auto row = static_cast<uint32_t>(total * turn / warps);
    const auto end = static_cast<uint32_t>(total * (turn + 1) / warps);
    while (row < end) {
      const uint32_t lane = ones(ctx.ballot(upto <= row));
      const uint32_t before = ctx.shuffle(upto - rows, lane);
      uint64_t range = 0;
      const uint32_t first_run = chunk + lane * each;
      const uint32_t in_run = in_warp < each ? rows_of(first_run + in_warp, &range) : 0;
      const uint32_t run_upto = before + warp_upto(ctx, in_run);
      const uint32_t lane_end = ctx.shuffle(run_upto, each - 1);
      while (row < end && row < lane_end) {
        const uint32_t which = ones(ctx.ballot(run_upto <= row && in_warp < each));
        const uint32_t run = first_run + which;
        const uint32_t run_end = ctx.shuffle(run_upto, which);
        const uint32_t from = row - ctx.shuffle(run_upto - in_run, which);
        const uint64_t begin = ctx.shuffle(range, which) >> 32;
        uint32_t count = (run_end < end ? run_end : end) - row;
        count = count < width ? count : width;
        take(run / world, static_cast<int32_t>(run % world), begin, from, count);
        row += count;
      }
    }
  }
}

/* One row of `bytes` by a scope of warps: several loads under way, the last ones too. `once`: see load_once. */
template <class Coop> EP_HD void moe_copy_row(const Coop& coop, uint8_t* dst, const uint8_t* src, uint64_t bytes, bool once = false) {
  if (((reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src)) & 15u) != 0) return copy_lanes(coop, dst, src, bytes);
  const auto vectors = static_cast<uint32_t>(bytes / 16);
  const uint32_t lanes = coop.lanes();
  auto* to = reinterpret_cast<vector16*>(dst);
  const auto* from = reinterpret_cast<const vector16*>(src);
  for (uint32_t first = coop.lane(); first < vectors; first += rows_in_flight * lanes) {
    vector16 held[rows_in_flight];
    EP_UNROLL for (uint32_t i = 0; i < rows_in_flight; ++i) {
      if (first + i * lanes < vectors) held[i] = once ? load_once(from + first + i * lanes) : from[first + i * lanes];
    }
    EP_UNROLL for (uint32_t i = 0; i < rows_in_flight; ++i) {
      if (first + i * lanes < vectors) to[first + i * lanes] = held[i];
    }
  }
  for (uint64_t i = 16 * static_cast<uint64_t>(vectors) + coop.lane(); i < bytes; i += lanes) dst[i] = src[i];
}

/* One row of `bytes` to the addresses that a warp's lanes hold, 0 for none, of which there are `count`: read once. All lanes of the scope, which is of whole warps, call it, and each warp holds
 * the same addresses. */
template <class Coop> EP_HD void moe_spread_row(const Coop& coop, const uint8_t* src, uint64_t bytes, uint64_t own, uint32_t count) {
  auto& ctx = coop.ctx;
  const uint32_t lane = coop.lane();
  const uint32_t lanes = coop.lanes();
  const bool aligned = ctx.ballot(((own | reinterpret_cast<uint64_t>(src)) & 15u) != 0) == 0;
  const auto vectors = static_cast<uint32_t>(aligned ? bytes / 16 : 0);
  const auto* from = reinterpret_cast<const vector16*>(src);
  for (uint32_t first = lane; first - lane < vectors; first += rows_in_flight * lanes) {
    vector16 held[rows_in_flight] = {};
    EP_UNROLL for (uint32_t i = 0; i < rows_in_flight; ++i) {
      if (first + i * lanes < vectors) held[i] = from[first + i * lanes];
    }
    for (uint32_t k = 0; k < count; ++k) {
      auto* to = reinterpret_cast<vector16*>(ctx.shuffle(own, k));
      if (to == nullptr) continue;
      EP_UNROLL for (uint32_t i = 0; i < rows_in_flight; ++i) {
        if (first + i * lanes < vectors) to[first + i * lanes] = held[i];
      }
    }
  }
  for (uint64_t first = 16 * static_cast<uint64_t>(vectors) + lane; first - lane < bytes; first += lanes) {
    const uint8_t held = first < bytes ? src[first] : uint8_t{0};
    for (uint32_t k = 0; k < count; ++k) {
      auto* to = reinterpret_cast<uint8_t*>(ctx.shuffle(own, k));
      if (to != nullptr && first < bytes) to[first] = held;
    }
  }
}

} // namespace detail

EP_MACHINE_END

#endif
