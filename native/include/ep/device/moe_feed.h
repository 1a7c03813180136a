/* Tokens that warps cast, on their way to where they are cast before anybody asks for them: whatever a call does first is looks at memory, one after the other, while tokens come from there at its full rate.
 *
 * A warp has some blocks of channels of some tokens, in parts of a few blocks. Where a context has a copy engine (bulk.h) the first parts of a warp are begun by begin() and lie in the block's own memory when they
 * are taken, the next ones follow as stages are free; elsewhere lanes read them where they are. */
#ifndef EP_DEVICE_MOE_FEED_H
#define EP_DEVICE_MOE_FEED_H

#include "bulk.h"
#include "moe_cast.h"

EP_MACHINE_BEGIN

namespace detail {

constexpr uint32_t moe_feed_turns = 4; /* in which a warp casts a part */

/* Blocks of EP_MOE_SCALED_CHANNELS channels, `count` of them from `first` on, of a token: one warp's, and at most as many as it casts in moe_feed_turns. */
struct moe_feed_part {
  uint32_t token;
  uint32_t first;
  uint32_t count;
};

template <class Ctx> class moe_feed {
 public:
  EP_HD moe_feed(Ctx& context, const moe_view& at, const ep_moe_dispatch_args& given)
      : ctx(context), args(given), blocks(static_cast<uint32_t>(at.buffer.hidden / EP_MOE_SCALED_CHANNELS)) {
    const uint32_t tokens = at.call.routing.tokens;
    const warp_share share = warps_that_cast(ctx, tokens);
    const uint32_t each = moe_team_warps(share, tokens);
    team_bits = ones(each - 1);
    apart = share.warps;
    casts = args.dtype != at.buffer.payload && cast_by_parts(ctx, args.dtype, at.buffer.hidden, at.buffer.payload) && ((args.x | args.x_stride_bytes) & 15u) == 0;
    units = casts ? tokens << team_bits : 0;
    const uint32_t turn = at_once() << team_bits;
    of_member = (blocks + turn - 1) / turn * at_once();
    now = at_unit(share.warp);
    ahead = now;
  }
  /* Whether rows are cast here at all; the same for all warps of the rank. */
  EP_HD bool has_tokens() const { return casts; }
  EP_HD void begin() {
    if constexpr (moe_has_bulk<Ctx>) {
      for (uint32_t i = 0; i < bulk_stages; ++i) load_next();
    }
  }
  /* Each part of this warp: take(part, channels). All lanes call it; what is begun must be taken, and the engine has loaded nothing else before: stages are counted from the first load. */
  template <class Take> EP_HD void each(const Take& take) {
    EP_ONE_CODE for (uint32_t number = 0; now.unit < units; ++number) {
      const moe_feed_part part{now.unit >> team_bits, now.first, count_of(now)};
      if constexpr (moe_has_bulk<Ctx>) {
        ctx.bulk_landed(number % bulk_stages, number / bulk_stages);
        take(part, ctx.bulk_data(number % bulk_stages));
        ctx.sync_warp();
        load_next();
      } else {
        take(part, source(now));
      }
      step(now);
    }
  }

 private:
  /* The part of a unit of work, which is a member's share of a token, that begins with block `first`; its share ends before block `end`. */
  struct place {
    uint32_t unit;
    uint32_t first;
    uint32_t end;
  };
  Ctx& ctx;
  const ep_moe_dispatch_args& args;
  uint32_t blocks;
  uint32_t units;
  uint32_t apart;
  uint32_t team_bits;
  uint32_t of_member;
  bool casts;
  place now;
  place ahead;

  EP_HD place at_unit(uint32_t unit) const {
    for (;; unit += apart) { /* where a row has few blocks some members have none */
      const uint32_t first = (unit & ((1u << team_bits) - 1)) * of_member;
      if (unit >= units || first < blocks) return {unit, first, first + of_member < blocks ? first + of_member : blocks};
    }
  }
  /* Blocks that a warp casts at once; narrower ones cast none here. */
  EP_HD uint32_t at_once() const { return ctx.warp_lanes() < cast_sharing ? 1 : ctx.warp_lanes() / cast_sharing; }
  EP_HD uint32_t most() const { return moe_feed_turns * at_once(); }
  EP_HD uint32_t count_of(const place& of) const { return of.end - of.first < most() ? of.end - of.first : most(); }
  EP_HD void step(place& of) const {
    of.first += most();
    if (of.first >= of.end) of = at_unit(of.unit + apart);
  }
  EP_HD const uint8_t* source(const place& of) const {
    return reinterpret_cast<const uint8_t*>(args.x) + (of.unit >> team_bits) * args.x_stride_bytes + uint64_t{of.first} * (2 * EP_MOE_SCALED_CHANNELS);
  }
  EP_HD void load_next() {
    static_assert(Ctx::bulk_bytes >= moe_feed_turns * (32 / cast_sharing) * 2 * EP_MOE_SCALED_CHANNELS, "a part of the widest warp is loaded to one stage");
    if (ahead.unit >= units) return;
    if (ctx.lane() % ctx.warp_lanes() == 0) ctx.bulk_load_once(ctx.bulk_count % bulk_stages, source(ahead), count_of(ahead) * (2 * EP_MOE_SCALED_CHANNELS));
    ++ctx.bulk_count;
    step(ahead);
  }
};

/* A part to its place in a row, by a warp. */
template <class Number, class Ctx> EP_HD void moe_cast_fed(Ctx& ctx, const moe_feed_part& part, const uint8_t* channels, uint64_t hidden, uint32_t payload, uint8_t* row) {
  const uint32_t lane = ctx.lane() % ctx.warp_lanes();
  const uint32_t at_once = ctx.warp_lanes() / cast_sharing;
  const auto* vectors = reinterpret_cast<const vector16*>(channels);
  uint32_t scale = 0; /* lane n has that of block n, so that a part gets them by one store */
  EP_ONE_CODE for (uint32_t first = 0; first < part.count; first += at_once) {
    const uint32_t block = first + lane / cast_sharing;
    const bool here = block < part.count;
    vector16 held[2] = {};
    for (uint32_t i = 0; here && i < 2; ++i) held[i] = vectors[block * (2 * cast_sharing) + lane % cast_sharing * 2 + i];
    const e4m3_part made = cast_part<Number>(ctx, held, payload);
    if (here) reinterpret_cast<vector16*>(row)[(part.first + block) * cast_sharing + lane % cast_sharing] = made.codes;
    const uint32_t found = ctx.shuffle(made.scale, lane % at_once * cast_sharing);
    if (lane / at_once * at_once == first) scale = found;
  }
  if (lane < part.count) store_scale(payload, row, hidden, part.first + lane, scale);
}

} // namespace detail

EP_MACHINE_END

#endif
