/* Casts a token's row to what travels, and hands out the scales of received rows. */
#ifndef EP_DEVICE_MOE_CAST_H
#define EP_DEVICE_MOE_CAST_H

#include "copy.h"
#include "coop.h"
#include "ep/abi/moe.h"
#include "moe_number.h"

#if !defined(__CUDACC__)
/* core/moe/cast.cpp: the same bits as the templates below, by the widest instructions of this CPU. */
extern "C" void ep_moe_cast_row(uint32_t dtype, const void* src, uint64_t hidden, uint32_t payload, void* dst);
#endif

EP_MACHINE_BEGIN

EP_HD constexpr uint64_t payload_blocks(uint64_t hidden) { return (hidden + EP_MOE_SCALED_CHANNELS - 1) / EP_MOE_SCALED_CHANNELS; }

/* Bytes of the codes of a row, behind which its scales begin, on no boundary in particular. */
EP_HD constexpr uint64_t payload_code_bytes(uint32_t payload, uint64_t hidden) {
  if (payload == EP_MOE_F32) return 4 * hidden;
  if (payload == EP_MOE_F16 || payload == EP_MOE_BF16) return 2 * hidden;
  return payload == EP_MOE_LOGFMT10 ? (10 * hidden + 7) / 8 : hidden;
}

/* Bytes of the scale of one block. */
EP_HD constexpr uint64_t payload_scale_bytes(uint32_t payload) {
  if (payload < EP_MOE_F8_F32) return 0;
  return payload == EP_MOE_F8_UE8M0 ? 1 : 4;
}

EP_HD constexpr uint64_t payload_bytes(uint32_t payload, uint64_t hidden) {
  return payload_code_bytes(payload, hidden) + payload_scale_bytes(payload) * payload_blocks(hidden);
}

EP_HD constexpr uint64_t aligned_row_bytes(uint32_t payload, uint64_t hidden) {
  return (payload_bytes(payload, hidden) + EP_MOE_ROW_ALIGNMENT - 1) / EP_MOE_ROW_ALIGNMENT * EP_MOE_ROW_ALIGNMENT;
}

EP_HD constexpr bool payload_is_cast(uint32_t payload) { return payload >= EP_MOE_F8_F32; }

namespace detail {

/* Little-endian, on no boundary in particular. */
EP_HD void store_bytes(uint8_t* to, uint64_t value, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; ++i) to[i] = static_cast<uint8_t>(value >> (8 * i));
}
EP_HD uint64_t load_bytes(const uint8_t* from, uint32_t bytes) {
  uint64_t value = 0;
  for (uint32_t i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(from[i]) << (8 * i);
  return value;
}

/* The largest of all lanes' values, at all of them. */
template <class Ctx> EP_HD uint32_t warp_largest(Ctx& ctx, uint32_t value) {
  const uint32_t own = ctx.lane() % ctx.warp_lanes();
  for (uint32_t distance = 1; distance < ctx.warp_lanes(); distance *= 2) {
    const uint32_t other = ctx.shuffle(value, own ^ distance);
    value = other > value ? other : value;
  }
  return value;
}

} // namespace detail

/* Bits of a channel's magnitude; NaN is above infinity, infinity above all numbers. */
template <class Number> EP_HD uint32_t channel_magnitude(typename Number::carrier value) {
  return detail::float_bits(Number::load(value)) & 0x7fffffffu;
}

/* One block of `count` channels to e4m3, by a warp: groups of 4 channels, so that a lane writes whole words. */
template <class Number, class Ctx>
EP_HD void cast_block_e4m3(Ctx& ctx, const typename Number::carrier* src, uint32_t count, uint32_t payload, uint8_t* codes, uint8_t* scale) {
  const uint32_t lane = ctx.lane() % ctx.warp_lanes();
  const uint32_t step = 4 * ctx.warp_lanes();
  uint32_t largest = 0;
  for (uint32_t first = 4 * lane; first < count; first += step) {
    for (uint32_t c = first; c < first + 4 && c < count; ++c) {
      const uint32_t bits = channel_magnitude<Number>(src[c]);
      largest = bits > largest ? bits : largest;
    }
  }
  largest = detail::warp_largest(ctx, largest);
  const bool finite = largest < moe_infinity_bits;
  const e4m3_scale by = e4m3_scale_of(finite ? largest : 0, payload != EP_MOE_F8_F32);
  for (uint32_t first = 4 * lane; first < count; first += step) {
    for (uint32_t c = first; c < first + 4 && c < count; ++c) {
      codes[c] = finite ? number_e4m3::store(detail::product(Number::load(src[c]), by.inverse)) : uint8_t{0x7f};
    }
  }
  if (lane != 0) return;
  const float kept = finite ? by.scale : detail::bits_float(0x7fc00000u);
  if (payload == EP_MOE_F8_UE8M0) *scale = ue8m0_of(kept);
  else detail::store_bytes(scale, detail::float_bits(kept), 4);
}

/* One block to LogFMT-10, by a warp: 4 channels are 5 bytes. What is not bf16 is rounded to it first. */
template <class Number, class Ctx>
EP_HD void cast_block_logfmt(Ctx& ctx, const typename Number::carrier* src, uint32_t count, uint8_t* codes, uint8_t* scale) {
  const uint32_t lane = ctx.lane() % ctx.warp_lanes();
  const uint32_t step = 4 * ctx.warp_lanes();
  uint32_t largest = 0;
  uint32_t away = 0; /* 0xffff - the smallest that is not 0: the largest of these is the smallest */
  for (uint32_t first = 4 * lane; first < count; first += step) {
    for (uint32_t c = first; c < first + 4 && c < count; ++c) {
      const uint32_t code = number_bf16::store(Number::load(src[c])) & 0x7fffu;
      largest = code > largest ? code : largest;
      away = code != 0 && 0xffffu - code > away ? 0xffffu - code : away;
    }
  }
  largest = detail::warp_largest(ctx, largest);
  away = detail::warp_largest(ctx, away);
  const bool finite = largest < 0x7f80u;
  const uint32_t smallest = away == 0 ? 0u : 0xffffu - away;
  const logfmt_block by = finite ? logfmt_block_of(static_cast<uint16_t>(largest), static_cast<uint16_t>(smallest)) : logfmt_block{};
  for (uint32_t first = 4 * lane; first < count; first += step) {
    uint64_t word = 0;
    uint32_t c = first;
    for (; c < first + 4 && c < count; ++c) {
      const uint64_t code = finite ? logfmt_encode(by, number_bf16::store(Number::load(src[c]))) : 0u;
      word |= code << (10 * (c - first));
    }
    detail::store_bytes(codes + first / 4 * 5, word, (10 * (c - first) + 7) / 8);
  }
  if (lane == 0) detail::store_bytes(scale, finite ? largest | (smallest << 16) : 0x7fc07fc0u, 4);
}

/* Lanes that share a block of 16-bit channels: each reads two vectors and writes one. */
constexpr uint32_t cast_sharing = 8;

struct e4m3_part {
  vector16 codes;
  uint32_t scale; /* of the block: bits of fp32 */
};

namespace detail {

/* The larger one of each half of two words. */
EP_HD uint32_t larger_halves(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#else
  const uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a : b;
  const uint32_t high = a > b ? a : b; /* equal upper halves: either one's */
  return (high & 0xffff0000u) | (low & 0xffffu);
#endif
}

} // namespace detail

/* This lane's 16 channels of a block; all lanes of the warp call it, those without a block with zeroes. Magnitudes of 16-bit floats are in the order of their codes, so that two are compared at once. */
template <class Number, class Ctx> EP_HD e4m3_part cast_part(Ctx& ctx, const vector16 (&held)[2], uint32_t payload) {
  const uint32_t lane = ctx.lane() % ctx.warp_lanes();
  const auto channel = [&](uint32_t c) { return static_cast<typename Number::carrier>(held[c / 8].word[c % 8 / 2] >> (c % 2 * 16)); };
  uint32_t halves = 0;
  EP_UNROLL for (uint32_t c = 0; c < 16; c += 2) halves = detail::larger_halves(halves, held[c / 8].word[c % 8 / 2] & 0x7fff7fffu);
  for (uint32_t distance = 1; distance < cast_sharing; distance *= 2) halves = detail::larger_halves(halves, ctx.shuffle(halves, lane ^ distance));
  const auto code = static_cast<typename Number::carrier>(detail::larger_halves(halves, halves >> 16));
  const uint32_t largest = channel_magnitude<Number>(code);
  const bool finite = largest < moe_infinity_bits;
  const e4m3_scale by = e4m3_scale_of(finite ? largest : 0, payload != EP_MOE_F8_F32);
  e4m3_part made{{}, finite ? detail::float_bits(by.scale) : 0x7fc00000u};
  EP_UNROLL for (uint32_t c = 0; c < 16; c += 2) {
    const float low = detail::product(Number::load(channel(c)), by.inverse);
    const float high = detail::product(Number::load(channel(c + 1)), by.inverse);
    made.codes.word[c / 4] |= number_e4m3::store_pair(low, high) << (c % 4 * 8);
  }
  EP_UNROLL for (uint32_t word = 0; word < 4; ++word) made.codes.word[word] = finite ? made.codes.word[word] : 0x7f7f7f7fu;
  return made;
}

EP_HD void store_scale(uint32_t payload, uint8_t* row, uint64_t hidden, uint64_t block, uint32_t bits) {
  if (payload == EP_MOE_F8_UE8M0) row[hidden + block] = ue8m0_of(detail::bits_float(bits));
  else reinterpret_cast<uint32_t*>(row + hidden)[block] = bits;
}

/* Whether rows of a dtype are cast by parts: whole blocks of 16-bit channels, of which warps hold some. */
template <class Ctx> EP_HD bool cast_by_parts(Ctx& ctx, uint32_t dtype, uint64_t hidden, uint32_t payload) {
  return dtype != EP_MOE_F32 && payload != EP_MOE_LOGFMT10 && hidden % EP_MOE_SCALED_CHANNELS == 0 && ctx.warp_lanes() >= cast_sharing;
}

/* False: not such a row, or not on a boundary of vectors. */
template <class Number, class Ctx>
EP_HD bool cast_row_vectors(Ctx& ctx, uint32_t warp, uint32_t warps, const void* src, uint64_t hidden, uint32_t payload, uint8_t* dst) {
  if constexpr (sizeof(typename Number::carrier) != 2) return false;
  const uint32_t lane = ctx.lane() % ctx.warp_lanes();
  const uint32_t at_once = ctx.warp_lanes() / cast_sharing;
  if (!cast_by_parts(ctx, EP_MOE_BF16, hidden, payload)) return false;
  if (((reinterpret_cast<uintptr_t>(src) | reinterpret_cast<uintptr_t>(dst)) & 15u) != 0) return false;
  const auto* vectors = static_cast<const vector16*>(src);
  const uint64_t blocks = hidden / EP_MOE_SCALED_CHANNELS;
  for (uint64_t first = warp * at_once; first < blocks; first += warps * at_once) {
    const uint64_t block = first + lane / cast_sharing;
    const bool here = block < blocks;
    vector16 held[2] = {};
    for (uint32_t i = 0; here && i < 2; ++i) held[i] = vectors[block * 16 + lane % cast_sharing * 2 + i];
    const e4m3_part made = cast_part<Number>(ctx, held, payload);
    if (!here) continue;
    reinterpret_cast<vector16*>(dst)[block * cast_sharing + lane % cast_sharing] = made.codes;
    if (lane % cast_sharing == 0) store_scale(payload, dst, hidden, block, made.scale);
  }
  return true;
}

template <class Number, class Ctx>
EP_HD void cast_row_lanes(Ctx& ctx, uint32_t warp, uint32_t warps, const void* src, uint64_t hidden, uint32_t payload, uint8_t* dst) {
  if (cast_row_vectors<Number>(ctx, warp, warps, src, hidden, payload, dst)) return;
  const auto* channels = static_cast<const typename Number::carrier*>(src);
  uint8_t* scales = dst + payload_code_bytes(payload, hidden);
  const uint64_t blocks = payload_blocks(hidden);
  for (uint64_t block = warp; block < blocks; block += warps) {
    const uint64_t first = block * EP_MOE_SCALED_CHANNELS;
    const auto count = static_cast<uint32_t>(hidden - first < EP_MOE_SCALED_CHANNELS ? hidden - first : EP_MOE_SCALED_CHANNELS);
    if (payload == EP_MOE_LOGFMT10) cast_block_logfmt<Number>(ctx, channels + first, count, dst + first / 4 * 5, scales + 4 * block);
    else cast_block_e4m3<Number>(ctx, channels + first, count, payload, dst + first, scales + block * payload_scale_bytes(payload));
  }
}

/* One row of `hidden` channels of `dtype` (EP_MOE_F32, F16, BF16) to `payload`, which is a cast; payload_bytes of `dst` are written.
 * The scope is a warp or a block: all its lanes call it, and its warps take the blocks of channels in turn. No lane may read `dst` before the scope's
 * next sync. */
template <class Ctx, class Coop>
EP_HD_SHARED void moe_cast_row(Ctx& ctx, const Coop& coop, uint32_t dtype, const void* src, uint64_t hidden, uint32_t payload, void* dst) {
#if !defined(__CUDACC__)
  if constexpr (Coop::single) {
    ep_moe_cast_row(dtype, src, hidden, payload, dst);
    return;
  }
#endif
  const uint32_t warp = coop.lane() / ctx.warp_lanes();
  const uint32_t warps = coop.lanes() / ctx.warp_lanes();
  auto* to = static_cast<uint8_t*>(dst);
  if (dtype == EP_MOE_F32) cast_row_lanes<number_f32>(ctx, warp, warps, src, hidden, payload, to);
  else if (dtype == EP_MOE_F16) cast_row_lanes<number_f16>(ctx, warp, warps, src, hidden, payload, to);
  else cast_row_lanes<number_bf16>(ctx, warp, warps, src, hidden, payload, to);
}

namespace detail {

/* By several lanes, several loads each under way. */
template <class Coop> EP_HD bool copy_scale_words(const Coop& coop, const ep_moe_dispatch_args& args, uint32_t blocks, const uint8_t* from, uint64_t from_stride, uint64_t row, uint64_t rows) {
  constexpr uint32_t in_flight = 4;
  if (((reinterpret_cast<uintptr_t>(from) | from_stride | args.out_scales) & 3u) != 0) return false;
  uint32_t tile = 16; /* rows: by column they fill a cache line */
  while (tile > rows || tile > coop.lanes()) tile /= 2;
  const uint32_t group = args.scale_group;
  const uint32_t apart = coop.lanes() / tile; /* lanes share the rows of a tile, and what is left of them the blocks */
  const uint32_t lane = coop.lane() % tile;
  if (coop.lane() / tile >= apart) return true;
  for (uint64_t r = lane; r < rows; r += tile) {
    const auto* here = reinterpret_cast<const uint32_t*>(from + r * from_stride);
    auto* there = reinterpret_cast<uint32_t*>(args.out_scales) + (row + r) * args.scale_row_stride;
    for (uint32_t first = coop.lane() / tile; first < blocks; first += in_flight * apart) {
      uint32_t held[in_flight] = {};
      for (uint32_t i = 0; i < in_flight; ++i) {
        if (first + i * apart < blocks) held[i] = here[first + i * apart];
      }
      for (uint32_t i = 0; i < in_flight; ++i) {
        const uint32_t block = first + i * apart;
        if (block < blocks) there[group == 1 ? block * args.scale_block_stride : block / group * args.scale_block_stride + block % group] = held[i];
      }
    }
  }
  return true;
}

/* Rows whose scales are copied at once: by column they fill a cache line, and their own lines stay in the cache. */
constexpr uint32_t scale_tile = 16;

/* By one lane, of at most scale_tile rows: column by column, without quotients, which would take longer than the scales. */
template <uint32_t Bytes> EP_HD void copy_scale_tile(const ep_moe_dispatch_args& args, uint64_t blocks, const uint8_t* const* from, uint64_t row, uint32_t rows) {
  const uint64_t apart = args.scale_row_stride * Bytes;
  uint8_t* column = reinterpret_cast<uint8_t*>(args.out_scales) + row * apart;
  uintptr_t ends = args.out_scales;
  for (uint32_t r = 0; r < rows; ++r) ends |= reinterpret_cast<uintptr_t>(from[r]);
  const bool words = Bytes == 4 && (ends & 3u) == 0;
  uint64_t in_group = 0;
  for (uint64_t block = 0; block < blocks; ++block) {
    uint8_t* there = column + in_group * Bytes;
    const uint64_t here = block * Bytes;
    for (uint32_t r = 0; words && r < rows; ++r) *reinterpret_cast<uint32_t*>(there + r * apart) = *reinterpret_cast<const uint32_t*>(from[r] + here);
    for (uint32_t r = 0; !words && r < rows; ++r) store_bytes(there + r * apart, load_bytes(from[r] + here, Bytes), Bytes);
    if (++in_group < args.scale_group) continue;
    in_group = 0;
    column += args.scale_block_stride * Bytes;
  }
}

template <uint32_t Bytes> EP_HD void copy_scales_alone(const ep_moe_dispatch_args& args, uint64_t blocks, const uint8_t* from, uint64_t from_stride, uint64_t row, uint64_t rows) {
  const uint8_t* tile[scale_tile];
  for (uint64_t first = 0; first < rows; first += scale_tile) {
    const auto count = static_cast<uint32_t>(rows - first < scale_tile ? rows - first : scale_tile);
    for (uint32_t r = 0; r < count; ++r) tile[r] = from + (first + r) * from_stride;
    copy_scale_tile<Bytes>(args, blocks, tile, row + first, count);
  }
}

template <uint32_t Bytes, class Coop>
EP_HD void copy_scales(const Coop& coop, const ep_moe_dispatch_args& args, uint64_t blocks, const uint8_t* from, uint64_t from_stride, uint64_t row, uint64_t rows) {
  if constexpr (Coop::single) return copy_scales_alone<Bytes>(args, blocks, from, from_stride, row, rows);
  if constexpr (!Coop::single && Bytes == 4) {
    if (rows == 0 || copy_scale_words(coop, args, static_cast<uint32_t>(blocks), from, from_stride, row, rows)) return;
  }
  uint64_t tile = 16; /* rows: by column they fill a cache line, and their own lines stay in the cache */
  while (tile > rows && tile > 1) tile /= 2;
  const uint64_t group = args.scale_group;
  auto* to = reinterpret_cast<uint8_t*>(args.out_scales);
  for (uint64_t first = 0; first < rows; first += tile) {
    const uint64_t count = rows - first < tile ? rows - first : tile;
    /* Lanes share the rows of a tile, and what is left of them the blocks. */
    const uint64_t lanes = coop.lanes();
    for (uint64_t block = coop.lane() / tile; block < blocks; block += lanes < tile ? 1 : lanes / tile) {
      const uint8_t* scale = from + first * from_stride + block * Bytes;
      uint8_t* at = to + ((row + first) * args.scale_row_stride + block / group * args.scale_block_stride + block % group) * Bytes;
      for (uint64_t r = coop.lane() % tile; r < count; r += lanes < tile ? lanes : tile) {
        uint8_t* there = at + r * args.scale_row_stride * Bytes;
        const uint8_t* here = scale + r * from_stride;
        if (Bytes == 4 && ((reinterpret_cast<uintptr_t>(there) | reinterpret_cast<uintptr_t>(here)) & 3u) == 0) {
          *reinterpret_cast<uint32_t*>(there) = *reinterpret_cast<const uint32_t*>(here);
        } else {
          store_bytes(there, load_bytes(here, Bytes), Bytes);
        }
      }
    }
  }
}

} // namespace detail

/* Copies the scales of `rows` received rows, whose payloads lie `stride` bytes apart, to where ep_moe_dispatch_args wants those of rows `row` and on; the lanes
 * of the scope share them. */
template <class Coop>
EP_HD void moe_copy_scales(const Coop& coop, const ep_moe_dispatch_args& args, uint32_t payload, uint64_t hidden, const void* payload_rows, uint64_t stride, uint64_t row,
                           uint64_t rows) {
  const uint8_t* from = static_cast<const uint8_t*>(payload_rows) + payload_code_bytes(payload, hidden);
  if (payload_scale_bytes(payload) == 1) detail::copy_scales<1>(coop, args, payload_blocks(hidden), from, stride, row, rows);
  else detail::copy_scales<4>(coop, args, payload_blocks(hidden), from, stride, row, rows);
}

/* The same by one lane, of at most detail::scale_tile rows whose payloads lie wherever `payload_rows` say. */
EP_HD void moe_copy_scale_tile(const ep_moe_dispatch_args& args, uint32_t payload, uint64_t hidden, const uint8_t* const* payload_rows, uint64_t row, uint32_t rows) {
  const uint8_t* from[detail::scale_tile];
  for (uint32_t r = 0; r < rows; ++r) from[r] = payload_rows[r] + payload_code_bytes(payload, hidden);
  if (payload_scale_bytes(payload) == 1) detail::copy_scale_tile<1>(args, payload_blocks(hidden), from, row, rows);
  else detail::copy_scale_tile<4>(args, payload_blocks(hidden), from, row, rows);
}

EP_MACHINE_END

#endif
