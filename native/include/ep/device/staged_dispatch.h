/* The same dispatch staged through a send and a receive buffer in symmetric memory, as all-to-all based designs do it: every byte is copied three times.
 * Kept as the baseline of attention_dispatch.h; whole buffers at a time, each pass with the bulk copies that the direct kernel uses. */
#ifndef EP_DEVICE_STAGED_DISPATCH_H
#define EP_DEVICE_STAGED_DISPATCH_H

#include "attention_dispatch.h"
#include "ep/abi/staged.h"

EP_MACHINE_BEGIN

/* This block's share of packed rows: contiguous, so that copies stay large. */
template <class Ctx>
EP_HD void staged_copy(Ctx& ctx, uint8_t* to, const uint8_t* from, uint64_t stride, uint64_t row_bytes, uint64_t rows, bool non_temporal) {
  const block_coop<Ctx> coop{ctx};
  const uint64_t share = (rows + ctx.blocks() - 1) / ctx.blocks();
  const uint64_t first = share * ctx.block();
  if (first < rows) {
    const uint64_t count = rows - first < share ? rows - first : share;
    copy_rows(coop, to + first * row_bytes, from + first * stride, stride, row_bytes, count, non_temporal);
  }
  copy_rows_done(coop, non_temporal);
}

template <class Ctx>
EP_HD bool staged_dispatch(Ctx& ctx, const load_store_endpoint& endpoint, const ep_dispatch_args& args, const ep_staged_part* staged) {
  const auto* parts = reinterpret_cast<const ep_dispatch_part*>(args.parts);
  const int32_t self = args.memory.rank;
  const bool non_temporal = (args.flags & EP_DISPATCH_NON_TEMPORAL) != 0;
  for (uint32_t i = 0; i < args.part_count; ++i) {
    staged_copy(ctx, endpoint.data(self, staged[i].send_offset_bytes), reinterpret_cast<const uint8_t*>(parts[i].src), parts[i].src_stride_bytes,
                parts[i].row_bytes, staged[i].send_rows, non_temporal);
  }
  ctx.sync_grid(); /* a chunk may have been packed by several blocks */
  for (uint32_t i = 0; i < args.part_count; ++i) {
    ep_dispatch_part part = parts[i];
    part.src = reinterpret_cast<uint64_t>(endpoint.data(self, staged[i].send_offset_bytes));
    part.src_stride_bytes = part.row_bytes;
    part.dst_offset_bytes = staged[i].recv_offset_bytes;
    if (!dispatch_send_part(ctx, endpoint, args, part)) return false;
  }
  if (!dispatch_wait(ctx, endpoint, args)) return false;
  for (uint32_t i = 0; i < args.part_count; ++i) {
    staged_copy(ctx, endpoint.data(self, parts[i].dst_offset_bytes), endpoint.data(self, staged[i].recv_offset_bytes), parts[i].row_bytes,
                parts[i].row_bytes, staged[i].recv_rows, non_temporal);
  }
  ctx.sync_grid(); /* the caller may read rows that another block copied */
  return true;
}

EP_MACHINE_END

#endif
