/* Rows that sources offer, by warps: which are a warp's, and from their sources to the receive tensor. */
#ifndef EP_DEVICE_MOE_PULL_ROWS_H
#define EP_DEVICE_MOE_PULL_ROWS_H

#include "bulk.h"
#include "moe_receive.h"

EP_MACHINE_BEGIN

namespace detail {

constexpr uint32_t looks_in_flight = 8; /* of a lane, at runs or at blocks' numbers of rows */

/* A received row: number `row` of an expert's block, and `index` of those of its source there. */
struct moe_run_row {
  uint32_t expert;
  int32_t source;
  uint32_t row;
  uint32_t index;
};

/* Some blocks that share a thing: this one's number among them. */
struct block_share {
  uint32_t block;
  uint32_t blocks;
};

/* Shares the rows that came to this rank among blocks, each of which gets rows that follow each other: take(count, row), called by all warps alike, of each of which lane i < `count` has row i, at most as many as a warp has
 * lanes; all find theirs at once, since what a row is takes several looks one after the other. Those of the first turn are found before settled(), once by each warp, says whether they may be taken: where runs lie is known long
 * before that. False: it says that they may not. HAZARD of time alone: all warps of a rank look at the same few lines at once, each sector of each look by itself: so they look at experts' numbers of rows first, and then at the runs of few
 * experts. And all rows are shared out at once: of a few experts' rows alone, one after the other, most warps would have none. */
template <class Ctx, class Settled, class Take> EP_HD bool moe_share_rows(Ctx& ctx, const moe_view& at, const block_share& share, const Settled& settled, const Take& take) {
  const uint32_t width = ctx.warp_lanes();
  const uint32_t in_warp = ctx.lane() % width;
  const uint32_t experts = at.experts_of(at.self());
  const auto* counts = reinterpret_cast<const int32_t*>(at.call.routing.recv_count);
  const uint32_t of_lane = (experts + width - 1) / width; /* experts that each lane counts, one after the other */
  const auto each_count = [&](uint32_t lane, const auto& look) {
    for (uint32_t first = 0; first < of_lane; first += looks_in_flight) {
      uint32_t found[looks_in_flight];
      EP_UNROLL for (uint32_t n = 0; n < looks_in_flight; ++n) {
        const uint32_t expert = lane * of_lane + first + n;
        found[n] = first + n < of_lane && expert < experts ? static_cast<uint32_t>(counts[expert]) : 0;
      }
      EP_UNROLL for (uint32_t n = 0; n < looks_in_flight; ++n) look(lane * of_lane + first + n, found[n]);
    }
  };
  uint32_t rows = 0;
  each_count(in_warp, [&](uint32_t, uint32_t found) { rows += found; });
  const uint32_t upto = warp_upto(ctx, rows);
  const uint32_t total = ctx.shuffle(upto, width - 1);
  const uint32_t each = total / share.blocks;
  const uint32_t more = total - each * share.blocks; /* which have one row more */
  uint32_t row = each * share.block + (share.block < more ? share.block : more);
  const uint32_t end = row + each + (share.block < more ? 1 : 0);
  EP_ONE_CODE for (bool waits = true; waits || row < end; waits = false) {
    const uint32_t count = end - row < width ? end - row : width;
    uint32_t lane = 0; /* that has counted the row: as many end before it */
    for (uint32_t step = width / 2; step != 0; step /= 2) lane += ctx.shuffle(upto, lane + step - 1) <= row + in_warp ? step : 0;
    moe_run_row own{0, 0, row + in_warp - ctx.shuffle(upto - rows, lane), 0};
    if (in_warp < count) {
      bool known = false;
      each_count(lane, [&](uint32_t expert, uint32_t found) {
        own.expert = known ? own.expert : expert;
        known = known || own.row < found;
        own.row -= known ? 0 : found;
      });
      const uint64_t* ranges = at.range(own.expert, 0);
      for (int32_t first = 0; first < at.world(); first += looks_in_flight) {
        uint64_t found[looks_in_flight];
        EP_UNROLL for (int32_t n = 0; n < static_cast<int32_t>(looks_in_flight); ++n) found[n] = first + n < at.world() ? ranges[first + n] : 0;
        EP_UNROLL for (int32_t n = 0; n < static_cast<int32_t>(looks_in_flight); ++n) {
          const uint32_t index = own.row - static_cast<uint32_t>(found[n] >> 32);
          if (index >= static_cast<uint32_t>(found[n])) continue; /* also where it lies before the run */
          own.source = first + n;
          own.index = index;
        }
      }
    }
    if (waits && !settled()) return false;
    if (count != 0) take(count, own);
    row += count;
  }
  return true;
}

/* Some blocks of the scales of a block's rows by each of its warps, of which each lane has a row: under way while rows are, since by themselves they would take as long. HAZARD of time alone: where scales are by column, stores of a
 * few rows each write parts of sectors, which memory must read first: 5 us of a dispatch whose rows take 18. So each warp has all rows of few columns, not the other way round. */
template <class Ctx> class pulled_scales {
 public:
  EP_HD pulled_scales(Ctx& context, const ep_moe_buffer& of, const ep_moe_dispatch_args& to) : ctx(context), buffer(of), args(to) {}
  /* Of the row at `from`; 0: this lane has none. */
  EP_HD void load(uint64_t from) {
    const warp_share share = warps_of_block(ctx);
    const auto blocks = static_cast<uint32_t>(payload_blocks(buffer.hidden));
    here = reinterpret_cast<const uint32_t*>(from + payload_code_bytes(buffer.payload, buffer.hidden));
    const bool words = payload_scale_bytes(buffer.payload) == 4 && args.scale_group == 1 && ((reinterpret_cast<uintptr_t>(here) | args.out_scales) & 3u) == 0;
    is_words = ctx.ballot(from != 0 && !words) == 0;
    begin = from != 0 ? blocks * share.warp / share.warps : 0;
    end = from != 0 ? blocks * (share.warp + 1) / share.warps : 0;
    if (is_words) look(begin);
  }
  /* The same, to row `to` of the receive tensor; where they are no words of their own each warp copies those of its rows, `first` to `last` - 1 of the lanes'. */
  EP_HD void store(uint64_t from, uint64_t to, uint32_t first, uint32_t last) {
    if (!is_words) {
      for (uint32_t i = first; i < last; ++i) {
        moe_copy_scales(warp_coop<Ctx>{ctx}, args, buffer.payload, buffer.hidden, reinterpret_cast<const void*>(ctx.shuffle(from, i)), buffer.row_bytes, ctx.shuffle(to, i), 1);
      }
      return;
    }
    auto* there = reinterpret_cast<uint32_t*>(args.out_scales) + to * args.scale_row_stride;
    for (uint32_t block = begin; block < end; block += in_flight) {
      if (block != begin) look(block);
      EP_UNROLL for (uint32_t i = 0; i < in_flight; ++i) {
        if (block + i < end) there[(block + i) * args.scale_block_stride] = held[i];
      }
    }
  }

 private:
  static constexpr uint32_t in_flight = 8;
  Ctx& ctx;
  const ep_moe_buffer& buffer;
  const ep_moe_dispatch_args& args;
  const uint32_t* here = nullptr;
  uint32_t begin = 0;
  uint32_t end = 0;
  bool is_words = false;
  uint32_t held[in_flight] = {};

  EP_HD void look(uint32_t block) {
    EP_UNROLL for (uint32_t i = 0; i < in_flight; ++i) held[i] = block + i < end ? here[block + i] : 0;
  }
};

/* Rows that sources offer, this rank too, by the blocks of `share`. */
template <class Ctx, class Endpoint, class Settled>
EP_HD bool moe_pull_rows(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, const ep_moe_dispatch_args& args, const block_share& share, const Settled& settled) {
  const uint32_t lane = ctx.lane() % ctx.warp_lanes();
  const warp_share warps = warps_of_block(ctx);
  const ep_moe_buffer& buffer = at.buffer;
  const uint64_t bytes = payload_code_bytes(buffer.payload, buffer.hidden);
  bulk_rows<Ctx> rows(ctx);
  pulled_scales<Ctx> scales(ctx, buffer, args);
  const auto may = [&] {
    const bool ok = settled();
    rows.begin();
    return ok;
  };
  const bool taken = moe_share_rows(ctx, at, share, may, [&](uint32_t count, const moe_run_row& one) {
    /* Of which rows are this warp's. */
    const uint32_t first = count * warps.warp / warps.warps;
    const uint32_t last = count * (warps.warp + 1) / warps.warps;
    uint64_t from = 0;
    uint64_t to = 0; /* row of the receive tensor */
    if (lane < count) {
      to = moe_loose_block(at, one.expert) + one.row;
      const ep_moe_header header = reinterpret_cast<const ep_moe_header*>(moe_data(endpoint, at.self(), at.run(one.expert, one.source)))[one.index];
      from = reinterpret_cast<uint64_t>(moe_data(endpoint, one.source, at.offered(one.source)));
      const bool sound = lane >= first && lane < last ? moe_take_header(ctx, at, header, one.source, to) : moe_is_sound(at, header, one.source);
      if (sound) from += header.token * buffer.row_bytes;
    }
    if (args.out_scales != 0) scales.load(from);
    for (uint32_t i = first; i < last; ++i) {
      auto* out = reinterpret_cast<uint8_t*>(args.out) + ctx.shuffle(to, i) * args.out_stride_bytes;
      rows.copy(out, reinterpret_cast<const uint8_t*>(ctx.shuffle(from, i)), bytes);
    }
    if (args.out_scales != 0) scales.store(from, to, first, last);
  });
  rows.end();
  return taken;
}

} // namespace detail

EP_MACHINE_END

#endif
