/* Rows of tokens by warps, cast on the way where they have to be: to where others read them, or to all of their places, read once. */
#ifndef EP_DEVICE_MOE_SEND_H
#define EP_DEVICE_MOE_SEND_H

#include "moe_cast.h"
#include "moe_feed.h"
#include "moe_rows.h"

EP_MACHINE_BEGIN

namespace detail {

/* Where a token's payload is read from: x, or what was cast. */
struct moe_tokens {
  const uint8_t* x;
  uint64_t stride;
  uint8_t* staged;
  bool cast;
  uint64_t row_bytes;

  EP_HD const uint8_t* row(uint64_t token) const { return cast ? staged + token * row_bytes : x + token * stride; }
};

template <class Endpoint> EP_HD moe_tokens moe_tokens_of(const Endpoint& endpoint, const moe_view& at, const ep_moe_dispatch_args& args) {
  const ep_peer_view& own = reinterpret_cast<const ep_peer_view*>(endpoint.memory.peers)[at.self()];
  return {reinterpret_cast<const uint8_t*>(args.x), args.x_stride_bytes, reinterpret_cast<uint8_t*>(own.data) + at.part(at.buffer.staged_tokens),
          args.dtype != at.buffer.payload, at.buffer.row_bytes};
}

/* A team's share of a row, from registers to the `count` addresses that each warp's lanes hold, 0 for none; all on boundaries of vectors. */
template <class Number, class Ctx>
EP_HD void moe_cast_spread(const team_coop<Ctx>& team, const uint8_t* src, uint64_t hidden, uint32_t payload, uint64_t own, uint32_t count) {
  constexpr uint32_t in_flight = 4;
  Ctx& ctx = team.ctx;
  const uint32_t lane = ctx.lane() % ctx.warp_lanes();
  const uint32_t at_once = ctx.warp_lanes() / cast_sharing;
  const uint32_t apart = team.warps * at_once;
  const auto blocks = static_cast<uint32_t>(hidden / EP_MOE_SCALED_CHANNELS);
  const auto* vectors = reinterpret_cast<const vector16*>(src);
  for (uint32_t first = team.member * at_once; first < blocks; first += in_flight * apart) {
    const uint32_t block = first + lane / cast_sharing;
    vector16 held[in_flight][2] = {};
    EP_UNROLL for (uint32_t i = 0; i < in_flight; ++i) {
      const vector16* two = vectors + (block + i * apart) * 16 + lane % cast_sharing * 2;
      if (block + i * apart < blocks) held[i][0] = two[0];
      if (block + i * apart < blocks) held[i][1] = two[1];
    }
    /* Lanes take the scales in turn, so that a row gets them by one store. */
    const uint32_t scaled = first + lane / at_once * apart + lane % at_once;
    const bool scales = lane < in_flight * at_once && scaled < blocks;
    uint32_t scale = 0;
    vector16 codes[in_flight] = {};
    EP_UNROLL for (uint32_t i = 0; i < in_flight; ++i) {
      if (first + i * apart >= blocks) break;
      const e4m3_part made = cast_part<Number>(ctx, held[i], payload);
      codes[i] = made.codes;
      const uint32_t found = ctx.shuffle(made.scale, lane % at_once * cast_sharing);
      if (lane / at_once == i) scale = found;
    }
    const auto store = [&](uint8_t* to) {
      EP_UNROLL for (uint32_t i = 0; i < in_flight; ++i) {
        if (block + i * apart < blocks) reinterpret_cast<vector16*>(to)[(block + i * apart) * cast_sharing + lane % cast_sharing] = codes[i];
      }
      if (scales) store_scale(payload, to, hidden, scaled, scale);
    };
    for (uint32_t k = 0; k < count; ++k) {
      auto* to = reinterpret_cast<uint8_t*>(ctx.shuffle(own, k));
      if (to != nullptr) store(to);
    }
  }
}

/* Whether rows from x are cast by teams: all lanes of a warp ask. */
template <class Ctx, class Endpoint>
EP_HD bool moe_casts_by_teams(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, const ep_moe_dispatch_args& args) {
  const auto* peers = reinterpret_cast<const ep_peer_view*>(endpoint.memory.peers);
  uint64_t all = args.x | args.x_stride_bytes | at.part(at.buffer.received);
  for (auto rank = static_cast<int32_t>(ctx.lane() % ctx.warp_lanes()); rank < at.world(); rank += static_cast<int32_t>(ctx.warp_lanes())) all |= peers[rank].data;
  return ctx.ballot((all & 15u) != 0) == 0 && cast_by_parts(ctx, args.dtype, at.buffer.hidden, at.buffer.payload);
}

template <class Ctx>
EP_HD void moe_cast_by_team(const team_coop<Ctx>& team, const ep_moe_buffer& buffer, const ep_moe_dispatch_args& args, uint32_t token, uint64_t own, uint32_t count) {
  const uint8_t* src = reinterpret_cast<const uint8_t*>(args.x) + token * args.x_stride_bytes;
  if (args.dtype == EP_MOE_F16) moe_cast_spread<number_f16>(team, src, buffer.hidden, buffer.payload, own, count);
  else moe_cast_spread<number_bf16>(team, src, buffer.hidden, buffer.payload, own, count);
}

/* All tokens of the rank as they travel, to this rank's rows at `offset`; what is fed has been begun. */
template <class Ctx, class Endpoint>
EP_HD void moe_offer_tokens(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, const ep_moe_dispatch_args& args, uint64_t offset, moe_feed<Ctx>& feed) {
  const ep_moe_buffer& buffer = at.buffer;
  uint8_t* offered = moe_data(endpoint, at.self(), offset);
  const bool fits = feed.has_tokens() && (reinterpret_cast<uintptr_t>(offered) & 15u) == 0; /* row_bytes are of whole vectors */
  feed.each([&](const moe_feed_part& part, const uint8_t* channels) {
    uint8_t* row = offered + part.token * buffer.row_bytes;
    if (!fits) return;
    if (args.dtype == EP_MOE_F16) moe_cast_fed<number_f16>(ctx, part, channels, buffer.hidden, buffer.payload, row);
    else moe_cast_fed<number_bf16>(ctx, part, channels, buffer.hidden, buffer.payload, row);
  });
  if (fits) return;
  const auto* x = reinterpret_cast<const uint8_t*>(args.x);
  const uint32_t tokens = at.call.routing.tokens;
  if (args.dtype == buffer.payload) {
    moe_share_tokens(ctx, warps_that_cast(ctx, tokens), tokens, [&](uint32_t token, const team_coop<Ctx>& team) { moe_copy_row(team, offered + token * buffer.row_bytes, x + token * args.x_stride_bytes, buffer.payload_bytes, team.warps > 1); });
  } else {
    for (uint32_t token = ctx.block(); token < tokens; token += ctx.blocks()) {
      moe_cast_row(ctx, coop, args.dtype, x + token * args.x_stride_bytes, buffer.hidden, buffer.payload, offered + token * buffer.row_bytes);
    }
  }
}

/* All tokens of the rank to all of their places: place(token, k, first) is where the row of a choice goes, 0 for nowhere. Each warp that has a part of a row asks for all of its places, by one
 * lane each; `first` says whether it is the one that may write what belongs to the row. */
template <class Ctx, class Endpoint, class Place>
EP_HD void moe_send_tokens(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, const ep_moe_dispatch_args& args, const Place& place) {
  const ep_moe_buffer& buffer = at.buffer;
  const moe_tokens tokens = moe_tokens_of(endpoint, at, args);
  const uint32_t width = ctx.warp_lanes();
  const uint32_t in_warp = ctx.lane() % width;
  const auto each_place = [&](uint32_t token, bool first, const auto& send) {
    for (uint32_t base = 0; base < buffer.top_k; base += width) {
      const uint32_t count = buffer.top_k - base < width ? buffer.top_k - base : width;
      send(base, in_warp < count ? place(token, base + in_warp, first) : 0, count);
    }
  };
  if (!tokens.cast) {
    moe_share_tokens(ctx, at.call.routing.tokens, [&](uint32_t token, const team_coop<Ctx>& team) {
      each_place(token, team.member == 0, [&](uint32_t, uint64_t own, uint32_t count) { moe_spread_row(team, tokens.row(token), buffer.payload_bytes, own, count); });
    });
  } else if (moe_casts_by_teams(ctx, endpoint, at, args)) {
    moe_share_tokens(ctx, at.call.routing.tokens, [&](uint32_t token, const team_coop<Ctx>& team) {
      each_place(token, team.member == 0, [&](uint32_t, uint64_t own, uint32_t count) { moe_cast_by_team(team, buffer, args, token, own, count); });
    });
  } else {
    for (uint32_t token = ctx.block(); token < at.call.routing.tokens; token += ctx.blocks()) {
      uint8_t* staged = tokens.staged + token * tokens.row_bytes;
      moe_cast_row(ctx, coop, args.dtype, tokens.x + token * tokens.stride, buffer.hidden, buffer.payload, staged);
      coop.sync();
      each_place(token, coop.lane() < width, [&](uint32_t, uint64_t own, uint32_t count) { moe_spread_row(coop, staged, buffer.payload_bytes, own, count); });
    }
  }
}

} // namespace detail

EP_MACHINE_END

#endif
