/* Attention dispatch: moves the shards of a plan from home tensors into the attention servers' receive tensors, or back.
 *
 * The unit is the chunk of a contiguous shard: one put and one counted signal each. On load/store routes a byte is read once from the source
 * tensor and written once into the peer's receive tensor.
 *
 * Counting instead of ordering: the receiver knows from the plan how many chunks each source owes it and waits until its counter has reached
 * that many; it never assumes in which order they land. A counter belongs to one lease of the receive tensor, and a sender writes into a
 * lease only with the receiver's credit; so a chunk of a later call can never be counted for an earlier one. */
#ifndef EP_DEVICE_ATTENTION_DISPATCH_H
#define EP_DEVICE_ATTENTION_DISPATCH_H

#include "ep/abi/dispatch.h"
#include "ep/abi/status.h"
#include "endpoint.h"

EP_MACHINE_BEGIN

/* Sends this block's share of a part: chunks block, block + blocks, ... False when a wait ended without its value. */
template <class Ctx, class Endpoint>
EP_HD bool dispatch_send_part(Ctx& ctx, const Endpoint& endpoint, const ep_dispatch_args& args, const ep_dispatch_part& part) {
  const block_coop<Ctx> coop{ctx};
  const auto* entries = reinterpret_cast<const ep_dispatch_entry*>(part.entries);
  const auto* credits = reinterpret_cast<const uint64_t*>(args.credits);
  auto* status = reinterpret_cast<ep_kernel_status*>(args.status);
  const bool non_temporal = (args.flags & EP_DISPATCH_NON_TEMPORAL) != 0;
  uint32_t cursor = 0;
  int32_t credited = -1; /* the destination whose credit this block has seen */
  for (uint32_t chunk = ctx.block(); chunk < part.chunk_count; chunk += ctx.blocks()) {
    while (cursor + 1 < part.entry_count && entries[cursor + 1].first_chunk <= chunk) ++cursor;
    const ep_dispatch_entry& entry = entries[cursor];
    if (entry.dst_rank != credited) {
      const uint64_t needed = credits[entry.dst_rank];
      bool ok = true;
      if (needed != 0 && coop.lane() == 0) {
        ok = ctx.wait(endpoint.local_signal(args.credit_slot + static_cast<uint64_t>(entry.dst_rank)), needed,
                      entry.dst_rank, EP_STAGE_CREDIT, status);
      }
      if (!coop.sync_and(ok)) return false;
      credited = entry.dst_rank;
    }
    const uint64_t first = static_cast<uint64_t>(chunk - entry.first_chunk) * part.chunk_rows;
    const uint64_t left = entry.rows - first;
    const uint64_t rows = left < part.chunk_rows ? left : part.chunk_rows;
    const auto* src = reinterpret_cast<const uint8_t*>(part.src) + (entry.src_row + first) * part.src_stride_bytes;
    if (!endpoint.put_rows(ctx, coop, entry.dst_rank, part.dst_offset_bytes + (entry.dst_row + first) * part.row_bytes, src,
                           part.src_stride_bytes, part.row_bytes, rows, non_temporal,
                           args.arrival_slot + static_cast<uint64_t>(args.memory.rank), 1, status)) {
      return false;
    }
  }
  return true;
}

/* Waits until every source has delivered the chunks that the plan promises. Every block waits by itself: whoever reads the tensor afterwards in
 * the same kernel needs no grid barrier. */
template <class Ctx, class Endpoint>
EP_HD bool dispatch_wait(Ctx& ctx, const Endpoint& endpoint, const ep_dispatch_args& args) {
  const block_coop<Ctx> coop{ctx};
  const auto* arrivals = reinterpret_cast<const uint64_t*>(args.arrivals);
  auto* status = reinterpret_cast<ep_kernel_status*>(args.status);
  bool ok = true;
  for (uint32_t i = coop.lane(); i < static_cast<uint32_t>(args.memory.world_size) && ok; i += coop.lanes()) {
    if (arrivals[i] == 0) continue;
    ok = ctx.wait(endpoint.local_signal(args.arrival_slot + i), arrivals[i], static_cast<int32_t>(i), EP_STAGE_ARRIVAL, status);
  }
  return coop.sync_and(ok);
}

/* Query only, or query with key and value: as many parts as the caller has tensors. */
template <class Ctx, class Endpoint> EP_HD bool attention_dispatch(Ctx& ctx, const Endpoint& endpoint, const ep_dispatch_args& args) {
  const auto* parts = reinterpret_cast<const ep_dispatch_part*>(args.parts);
  for (uint32_t i = 0; i < args.part_count; ++i) {
    if (!dispatch_send_part(ctx, endpoint, args, parts[i])) return false;
  }
  return dispatch_wait(ctx, endpoint, args);
}

EP_MACHINE_END

#endif
