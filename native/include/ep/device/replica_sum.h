/* Sum of the key-value gradients that several servers return for one home shard: fp32, replica 0 first, rounded once. */
#ifndef EP_DEVICE_REPLICA_SUM_H
#define EP_DEVICE_REPLICA_SUM_H

#include "attention_dispatch.h"
#include "number.h"

EP_MACHINE_BEGIN

template <class Ctx, class Number> EP_HD void replica_sum_typed(Ctx& ctx, const ep_replica_sum_args& args) {
  using carrier = typename Number::carrier;
  const block_coop<Ctx> coop{ctx};
  const auto* shard_row = reinterpret_cast<const uint64_t*>(args.shard_row);
  const auto* shard_rows = reinterpret_cast<const uint64_t*>(args.shard_rows);
  const auto* begin = reinterpret_cast<const uint64_t*>(args.replica_begin);
  const auto* replica_row = reinterpret_cast<const uint64_t*>(args.replica_row);
  const auto* src = reinterpret_cast<const carrier*>(args.src);
  for (uint64_t shard = 0; shard < args.shard_count; ++shard) {
    const uint64_t first = begin[shard];
    const uint64_t last = begin[shard + 1];
    for (uint64_t row = ctx.block(); row < shard_rows[shard]; row += ctx.blocks()) {
      auto* dst = reinterpret_cast<carrier*>(args.dst + (shard_row[shard] + row) * args.dst_stride_bytes);
      for (uint64_t i = coop.lane(); i < args.row_elements; i += coop.lanes()) {
        float sum = 0.0f;
        for (uint64_t replica = first; replica < last; ++replica) {
          const float value = Number::load(src[(replica_row[replica] + row) * args.row_elements + i]);
          /* Not 0 + value for the first one: that would turn a lone -0.0 into +0.0. */
          sum = replica == first ? value : sum + value;
        }
        dst[i] = Number::store(sum);
      }
    }
  }
}

template <class Ctx> EP_HD void replica_sum(Ctx& ctx, const ep_replica_sum_args& args) {
  if (args.dtype == EP_DTYPE_F32) replica_sum_typed<Ctx, number_f32>(ctx, args);
  if (args.dtype == EP_DTYPE_F16) replica_sum_typed<Ctx, number_f16>(ctx, args);
  if (args.dtype == EP_DTYPE_BF16) replica_sum_typed<Ctx, number_bf16>(ctx, args);
}

/* Key-value gradients on their way home: dispatch into the compact replica form, then sum. */
template <class Ctx, class Endpoint>
EP_HD bool attention_gradient(Ctx& ctx, const Endpoint& endpoint, const ep_dispatch_args& args, const ep_replica_sum_args* sums,
                              uint32_t sum_count) {
  if (!attention_dispatch(ctx, endpoint, args)) return false;
  for (uint32_t i = 0; i < sum_count; ++i) replica_sum(ctx, sums[i]);
  return true;
}

EP_MACHINE_END

#endif
