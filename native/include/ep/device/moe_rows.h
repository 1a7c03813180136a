/* Rows by warps: which warp takes which rows of a rank's runs, and one row to all places of its token. Not for contexts of one lane, which copy runs as they lie.
 *
 * A look at memory takes as long as a row does to copy, so nobody looks at every run or every choice in turn: each lane of a warp looks at one, and shuffles hand out what it has found. */
#ifndef EP_DEVICE_MOE_ROWS_H
#define EP_DEVICE_MOE_ROWS_H

#include "copy.h"
#include "moe_wait.h"

EP_MACHINE_BEGIN

namespace detail {

/* Whether warps take rows. Puts are a block's: it has a queue pair, of which its warps would await each other's doorbells. */
template <class Ctx, class Endpoint> constexpr bool moe_by_warps = !Ctx::single_lane && !moe_puts<Endpoint>;

EP_HD uint32_t ones(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__popc(bits));
#else
  return static_cast<uint32_t>(__builtin_popcount(bits));
#endif
}

/* Shares the rows that came to this rank among all warps, at most `most` of a run together: take(expert, source, first, count), called by a whole warp, for runs of the sources
 * that are wanted(source). All warps must get the same answers. */
template <class Ctx, class Wanted, class Take>
EP_HD void moe_share_runs(Ctx& ctx, const moe_view& at, uint32_t most, const Wanted& wanted, const Take& take) {
  const uint32_t width = ctx.warp_lanes();
  const uint32_t in_warp = ctx.lane() % width;
  const uint32_t warps = ctx.blocks() * (ctx.lanes() / width);
  const uint32_t warp = ctx.lane() / width * ctx.blocks() + ctx.block();
  const auto world = static_cast<uint32_t>(at.world());
  const uint32_t runs = at.experts_of(at.self()) * world;
  uint32_t turn = 0; /* the warp that is next */
  for (uint32_t first = 0; first < runs; first += width) {
    const uint32_t run = first + in_warp;
    uint32_t rows = 0;
    if (run < runs && wanted(static_cast<int32_t>(run % world))) rows = static_cast<uint32_t>(*at.range(run / world, static_cast<int32_t>(run % world)));
    const uint32_t pieces = (rows + most - 1) / most;
    uint32_t upto = pieces; /* of this run and those of lower lanes */
    for (uint32_t distance = 1; distance < width; distance *= 2) {
      const uint32_t lower = ctx.shuffle(upto, (in_warp + width - distance) % width);
      if (in_warp >= distance) upto += lower;
    }
    const uint32_t total = ctx.shuffle(upto, width - 1);
    for (uint32_t piece = (warp + warps - turn) % warps; piece < total; piece += warps) {
      const uint32_t lane = ones(ctx.ballot(upto <= piece));
      const uint32_t from = (piece - ctx.shuffle(upto - pieces, lane)) * most;
      const uint32_t left = ctx.shuffle(rows, lane) - from;
      take((first + lane) / world, static_cast<int32_t>((first + lane) % world), from, left < most ? left : most);
    }
    turn = (turn + total) % warps;
  }
}

/* One row of `bytes` to the addresses place(0) .. place(places - 1), 0 for none: read once. All lanes of the block call it; each warp asks for every place once, by one of its
 * lanes. */
template <class Ctx, class Place>
EP_HD void moe_spread_row(Ctx& ctx, const block_coop<Ctx>& coop, const uint8_t* src, uint64_t bytes, uint32_t places, const Place& place) {
  const uint32_t width = ctx.warp_lanes();
  const uint32_t in_warp = ctx.lane() % width;
  const uint64_t lane = coop.lane();
  const uint64_t lanes = coop.lanes();
  for (uint32_t base = 0; base < places; base += width) {
    const uint32_t count = places - base < width ? places - base : width;
    const uint64_t own = in_warp < count ? place(base + in_warp) : 0;
    const bool aligned = ctx.ballot(((own | reinterpret_cast<uint64_t>(src)) & 15u) != 0) == 0;
    const uint64_t vectors = aligned ? bytes / 16 : 0;
    const auto* from = reinterpret_cast<const vector16*>(src);
    for (uint64_t first = lane; first - lane < vectors; first += copy_in_flight * lanes) {
      vector16 held[copy_in_flight] = {};
      for (uint32_t i = 0; i < copy_in_flight; ++i) {
        if (first + i * lanes < vectors) held[i] = from[first + i * lanes];
      }
      for (uint32_t k = 0; k < count; ++k) {
        auto* to = reinterpret_cast<vector16*>(ctx.shuffle(own, k));
        if (to == nullptr) continue;
        for (uint32_t i = 0; i < copy_in_flight; ++i) {
          if (first + i * lanes < vectors) to[first + i * lanes] = held[i];
        }
      }
    }
    for (uint64_t first = 16 * vectors + lane; first - lane < bytes; first += lanes) {
      const uint8_t held = first < bytes ? src[first] : uint8_t{0};
      for (uint32_t k = 0; k < count; ++k) {
        auto* to = reinterpret_cast<uint8_t*>(ctx.shuffle(own, k));
        if (to != nullptr && first < bytes) to[first] = held;
      }
    }
  }
}

} // namespace detail

EP_MACHINE_END

#endif
