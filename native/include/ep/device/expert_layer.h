/* Experts over the rows that came to them: y = down * (silu(gate * x) . (up * x)), each expert with weights of its own (SwiGLU; Shazeer, GLU Variants Improve Transformer). Products and sums are fp32,
 * results are rounded once. A plain kernel, without matrix units: to compare with, and to have something that is computed while rows travel.
 *
 * Blocks wait for nobody, and no two write one row. `scratch` is a block's own, of EP_EXPERT_FLOATS; on a GPU shared memory. */
#ifndef EP_DEVICE_EXPERT_LAYER_H
#define EP_DEVICE_EXPERT_LAYER_H

#include <math.h>

#include "coop.h"
#include "ep/abi/expert_layer.h"
#include "moe_number.h"

/* Floats of a block's own memory: a tile's rows, and what becomes of them in between. For whoever launches, too. */
#define EP_EXPERT_FLOATS(hidden, intermediate) (EP_EXPERT_ROWS * ((hidden) + (intermediate)))

EP_MACHINE_BEGIN

namespace expert_layers {

constexpr uint32_t tile = EP_EXPERT_ROWS;

EP_HD uint32_t tiles_of(const ep_expert_run& run) { return run.rows / tile + (run.rows % tile != 0 ? 1 : 0); }

/* HAZARD: what lies on the device nobody has looked at, and rows beyond those of x and y are somebody else's. */
EP_HD ep_expert_run run_of(const ep_expert_args& args, uint32_t expert) {
  if (args.counts == 0) return args.runs[expert];
  const int32_t start = reinterpret_cast<const int32_t*>(args.starts)[expert];
  const int32_t count = reinterpret_cast<const int32_t*>(args.counts)[expert];
  if (start < 0 || count <= 0 || static_cast<uint64_t>(start) >= args.rows) return {0, 0};
  const uint64_t room = args.rows - static_cast<uint64_t>(start);
  return {static_cast<uint32_t>(start), static_cast<uint64_t>(count) < room ? static_cast<uint32_t>(count) : static_cast<uint32_t>(room)};
}

/* Channel h of a row of x. */
EP_HD float input_of(const ep_expert_args& args, uint64_t row, uint32_t h) {
  const auto* from = reinterpret_cast<const uint8_t*>(args.x + row * args.x_stride_bytes);
  if (args.payload == EP_MOE_F32) return reinterpret_cast<const float*>(from)[h];
  if (args.payload == EP_MOE_F16) return number_f16::load(reinterpret_cast<const uint16_t*>(from)[h]);
  if (args.payload == EP_MOE_BF16) return number_bf16::load(reinterpret_cast<const uint16_t*>(from)[h]);
  const uint64_t at = h / moe_block_channels * args.scale_room + row;
  const float scale = args.payload == EP_MOE_F8_UE8M0 ? ue8m0_load(reinterpret_cast<const uint8_t*>(args.scales)[at]) : reinterpret_cast<const float*>(args.scales)[at];
  return detail::product(number_e4m3::load(from[h]), scale);
}

EP_HD void store_output(const ep_expert_args& args, uint64_t row, uint32_t h, float value) {
  auto* to = reinterpret_cast<uint8_t*>(args.y + row * args.y_stride_bytes);
  if (args.dtype == EP_MOE_F32) reinterpret_cast<float*>(to)[h] = value;
  else if (args.dtype == EP_MOE_F16) reinterpret_cast<uint16_t*>(to)[h] = number_f16::store(value);
  else reinterpret_cast<uint16_t*>(to)[h] = number_bf16::store(value);
}

/* The sum over the lanes of a warp, known to all of them. */
template <class Ctx> EP_HD float warp_sum(Ctx& ctx, float value) {
  if constexpr (!Ctx::single_lane) {
    for (uint32_t apart = ctx.warp_lanes() / 2; apart != 0; apart /= 2) value += ctx.shuffle(value, (ctx.lane() % ctx.warp_lanes()) ^ apart);
  }
  return value;
}

/* Of the tile's rows with a row of weights. */
template <class Ctx> EP_HD void dots(Ctx& ctx, const float* weights, const float* rows, uint32_t length, float* into) {
  const warp_coop<Ctx> warp{ctx};
  for (uint32_t r = 0; r < tile; ++r) into[r] = 0.0f;
  for (uint32_t c = warp.lane(); c < length; c += warp.lanes()) {
    const float weight = weights[c];
    EP_UNROLL for (uint32_t r = 0; r < tile; ++r) into[r] += weight * rows[r * length + c];
  }
  EP_UNROLL for (uint32_t r = 0; r < tile; ++r) into[r] = warp_sum(ctx, into[r]);
}

/* Rows `first` .. `first + rows` of an expert. All lanes of the block call it. No barrier ends it: whoever is ahead writes the next rows where these were, which nobody reads any more, and waits before it writes `between`. */
template <class Ctx> EP_HD void expert_tile(Ctx& ctx, const ep_expert_args& args, uint32_t expert, uint64_t first, uint32_t rows, float* scratch) {
  const block_coop<Ctx> coop{ctx};
  const warp_coop<Ctx> warp{ctx};
  const uint32_t which = coop.lane() / ctx.warp_lanes();
  const uint32_t warps = coop.lanes() / ctx.warp_lanes();
  const uint64_t matrix = uint64_t{expert} * args.hidden * args.intermediate;
  float* x = scratch;
  float* between = scratch + tile * args.hidden;
  for (uint32_t r = 0; r < tile; ++r) {
    for (uint32_t h = coop.lane(); h < args.hidden; h += coop.lanes()) x[r * args.hidden + h] = r < rows ? input_of(args, first + r, h) : 0.0f;
  }
  coop.sync();
  for (uint32_t i = which; i < args.intermediate; i += warps) {
    float a[tile];
    float b[tile];
    dots(ctx, reinterpret_cast<const float*>(args.gate) + matrix + uint64_t{i} * args.hidden, x, args.hidden, a);
    dots(ctx, reinterpret_cast<const float*>(args.up) + matrix + uint64_t{i} * args.hidden, x, args.hidden, b);
    EP_UNROLL for (uint32_t r = 0; r < tile; ++r) {
      if (warp.lane() == 0) between[r * args.intermediate + i] = a[r] / (1.0f + expf(-a[r])) * b[r];
    }
  }
  coop.sync();
  for (uint32_t h = which; h < args.hidden; h += warps) {
    float out[tile];
    dots(ctx, reinterpret_cast<const float*>(args.down) + matrix + uint64_t{h} * args.intermediate, between, args.intermediate, out);
    EP_UNROLL for (uint32_t r = 0; r < tile; ++r) {
      if (warp.lane() == 0 && r < rows) store_output(args, first + r, h, out[r]);
    }
  }
}

} // namespace expert_layers

template <class Ctx> EP_HD void expert_layer(Ctx& ctx, const ep_expert_args& args, float* scratch) {
  using namespace expert_layers;
  uint32_t expert = 0;
  uint32_t before = 0; /* tiles of experts before this one */
  if (args.experts == 0) return;
  ep_expert_run run = run_of(args, 0);
  for (uint32_t at = ctx.block(); at < args.tiles; at += ctx.blocks()) {
    for (; at - before >= tiles_of(run); run = run_of(args, expert)) {
      before += tiles_of(run);
      if (++expert == args.experts) return;
    }
    const uint32_t done = (at - before) * tile;
    expert_tile(ctx, args, expert, uint64_t{run.row} + done, run.rows - done < tile ? run.rows - done : tile, scratch);
  }
}

EP_MACHINE_END

#endif
