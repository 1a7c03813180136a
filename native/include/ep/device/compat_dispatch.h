/* The per-token dispatch that attention_dispatch.h replaces, kept as its baseline for speed and as the exhibit of its defects.
 *
 * One row at a time per block: all lanes copy it into a send buffer; then warp 0 puts the query row, and warps 1..C the key-value row of
 * replica warp - 1, each with one signal to the counter that the receiver keeps for this rank. Then a grid barrier, a wait until every counter
 * EQUALS the plan's number of rows, and a copy from the receive buffer to the output. The caller zeroes the counters and runs a barrier of all
 * ranks before the next call.
 *
 * Kept defects, each with a test (tests/device/compat_test.cpp); core/device/compat.hpp refuses input that trips one of the first four:
 *   - as many blocks as there are rows: a rank without rows to send cannot launch, though it may have to receive (launch rule, compat.hpp)
 *   - roles are warps: replicas beyond the block's last warp are never sent, and the receiver waits for ever
 *   - the gradient's cursor starts a replica anew whenever its end is a multiple of the replica's rows, so an empty first shard loops for ever
 *   - rows are copied as 16-byte vectors
 *   - equality: one signal too many, or one of the next call, and the wait never ends
 *   - one put and one signal per row and destination; a destination on the same rank takes the same way
 * Not kept, because they write outside of the memory: 32-bit buffer offsets, and a put to rank -1 for a query without destination. */
#ifndef EP_DEVICE_COMPAT_DISPATCH_H
#define EP_DEVICE_COMPAT_DISPATCH_H

#include "endpoint.h"
#include "ep/abi/compat.h"

EP_MACHINE_BEGIN

constexpr uint32_t compat_warps = 10; /* of a block, at most: its roles */

/* A role's place in the list of shards. */
struct compat_cursor {
  uint32_t shard;
  uint64_t begin;
  uint64_t end;
};

EP_HD void compat_advance(const ep_compat_args& args, compat_cursor& cursor, uint64_t token) {
  const auto* lengths = reinterpret_cast<const uint32_t*>(args.seq_len);
  while (token >= cursor.end && cursor.shard + 1 < args.num_seqs) {
    ++cursor.shard;
    cursor.begin = cursor.end;
    cursor.end += lengths[cursor.shard];
  }
}

EP_HD uint8_t* compat_buffer(const ep_memory_handle& memory, uint64_t offset) {
  return reinterpret_cast<uint8_t*>(reinterpret_cast<const ep_peer_view*>(memory.peers)[memory.rank].data) + offset;
}

template <class Ctx, class Endpoint>
EP_HD bool compat_put(Ctx& ctx, const Endpoint& endpoint, const ep_compat_args& args, const ep_compat_route& route, uint32_t replica,
                      const compat_cursor& cursor, uint64_t token) {
  const warp_coop<Ctx> coop{ctx};
  const uint64_t index = static_cast<uint64_t>(cursor.shard) * route.replicas + replica;
  const int32_t rank = reinterpret_cast<const int32_t*>(route.dst_rank)[index];
  if (rank < 0) return true;
  const uint64_t row = reinterpret_cast<const uint32_t*>(route.dst_offset)[index] + (token - cursor.begin);
  return endpoint.put_rows(ctx, coop, rank, route.recv_offset + row * route.row_bytes,
                           compat_buffer(args.memory, route.send_offset) + token * route.row_bytes, route.row_bytes, route.row_bytes, 1,
                           false, route.signal_slot + static_cast<uint64_t>(args.memory.rank), 1,
                           reinterpret_cast<ep_kernel_status*>(args.status));
}

template <class Ctx, class Endpoint> EP_HD bool compat_send(Ctx& ctx, const Endpoint& endpoint, const ep_compat_args& args) {
  const block_coop<Ctx> coop{ctx};
  const bool with_kv = args.key_value.src != 0;
  const uint32_t roles = 1 + (with_kv ? args.key_value.replicas : 0);
  /* A block of one lane plays every role that the original has a warp for, in turn; elsewhere a warp has its one role. */
  const uint32_t first = Ctx::single_lane ? 0 : ctx.lane() / ctx.warp_lanes();
  const uint32_t last = Ctx::single_lane ? compat_warps : first + 1;
  compat_cursor cursors[Ctx::single_lane ? compat_warps : 1];
  for (compat_cursor& cursor : cursors) cursor = {0, 0, args.num_seqs != 0 ? reinterpret_cast<const uint32_t*>(args.seq_len)[0] : 0};
  bool ok = true;
  for (uint64_t token = ctx.block(); token < args.tokens; token += ctx.blocks()) {
    copy_rows(coop, compat_buffer(args.memory, args.query.send_offset) + token * args.query.row_bytes,
              reinterpret_cast<const uint8_t*>(args.query.src) + token * args.query.row_bytes, args.query.row_bytes, args.query.row_bytes,
              1, false);
    if (with_kv) {
      copy_rows(coop, compat_buffer(args.memory, args.key_value.send_offset) + token * args.key_value.row_bytes,
                reinterpret_cast<const uint8_t*>(args.key_value.src) + token * args.key_value.row_bytes, args.key_value.row_bytes,
                args.key_value.row_bytes, 1, false);
    }
    fence_system();
    if (!coop.sync_and(ok)) break;
    for (uint32_t role = first; role < last && role < roles && ok; ++role) {
      compat_cursor& cursor = cursors[role - first];
      compat_advance(args, cursor, token);
      ok = role == 0 ? compat_put(ctx, endpoint, args, args.query, 0, cursor, token)
                     : compat_put(ctx, endpoint, args, args.key_value, role - 1, cursor, token);
    }
  }
  return coop.sync_and(ok);
}

template <class Ctx, class Endpoint>
EP_HD bool compat_wait(Ctx& ctx, const Endpoint& endpoint, const ep_compat_args& args, const ep_compat_route& route) {
  const block_coop<Ctx> coop{ctx};
  const auto* expected = reinterpret_cast<const uint64_t*>(route.num_recv_tokens);
  bool ok = true;
  for (uint32_t i = coop.lane(); i < static_cast<uint32_t>(args.memory.world_size) && ok; i += coop.lanes()) {
    ok = ctx.wait_equal(endpoint.local_signal(route.signal_slot + i), expected[i], static_cast<int32_t>(i), EP_STAGE_ARRIVAL,
                        reinterpret_cast<ep_kernel_status*>(args.status));
  }
  return coop.sync_and(ok);
}

template <class Ctx> EP_HD void compat_copy_row(Ctx& ctx, const ep_compat_args& args, const ep_compat_route& route, uint64_t row) {
  const block_coop<Ctx> coop{ctx};
  copy_rows(coop, reinterpret_cast<uint8_t*>(route.dst) + row * route.row_bytes,
            compat_buffer(args.memory, route.recv_offset) + row * route.row_bytes, route.row_bytes, route.row_bytes, 1, false);
}

template <class Ctx> EP_HD void compat_receive(Ctx& ctx, const ep_compat_args& args, const ep_compat_route& route) {
  const uint64_t rows = reinterpret_cast<const uint64_t*>(route.num_recv_tokens)[args.memory.world_size];
  for (uint64_t row = ctx.block(); row < rows; row += ctx.blocks()) compat_copy_row(ctx, args, route, row);
}

/* Replica-major: row = replica * recv_tokens + row of the rank. Rows of replicas that do not exist keep what the output held. */
template <class Ctx> EP_HD void compat_receive_gradient(Ctx& ctx, const ep_compat_args& args) {
  const auto* mask = reinterpret_cast<const uint32_t*>(args.recv_mask);
  const auto* lengths = reinterpret_cast<const uint32_t*>(args.recv_seq_len);
  uint32_t replica = 0;
  uint32_t shard = 0;
  uint64_t end = args.recv_tokens != 0 ? lengths[0] : 0;
  for (uint64_t row = ctx.block(); row < args.recv_tokens * args.recv_replicas; row += ctx.blocks()) {
    while (row >= end) {
      ctx.point();
      if (end % args.recv_tokens == 0) {
        ++replica;
        shard = 0;
      } else {
        ++shard;
      }
      end += lengths[shard];
    }
    if (mask[static_cast<uint64_t>(shard) * args.recv_replicas + replica] != 0) compat_copy_row(ctx, args, args.query, row);
  }
}

template <class Ctx, class Endpoint> EP_HD bool compat_dispatch(Ctx& ctx, const Endpoint& endpoint, const ep_compat_args& args) {
  const bool sent = compat_send(ctx, endpoint, args);
  ctx.sync_grid();
  if (!sent || !compat_wait(ctx, endpoint, args, args.query)) return false;
  if (args.key_value.src != 0 && !compat_wait(ctx, endpoint, args, args.key_value)) return false;
  if (args.recv_mask != 0) {
    compat_receive_gradient(ctx, args);
    return true;
  }
  compat_receive(ctx, args, args.query);
  if (args.key_value.src != 0) compat_receive(ctx, args, args.key_value);
  return true;
}

EP_MACHINE_END

#endif
