/* How a kernel reaches a peer. An endpoint type offers:
 *   put_rows(ctx, coop, peer, dst_offset, src, stride, row_bytes, rows, non_temporal, slot, add)
 *       copies rows into the peer's part and, once these bytes have landed, adds `add` to the peer's signal slot ('bundled' order: says
 *       nothing about other puts)
 *   signal(ctx, coop, peer, slot, add)
 *   local_signal(slot)           address of one's own slot
 * All lanes of the scope call put_rows and signal with equal arguments. */
#ifndef EP_DEVICE_ENDPOINT_H
#define EP_DEVICE_ENDPOINT_H

#include "copy.h"
#include "ep/abi/dispatch.h"
#include "ep/abi/status.h"

EP_MACHINE_BEGIN

/* Peers' memory is mapped (shared memory, NVLink, CUDA IPC). */
struct load_store_endpoint {
  const ep_memory_handle& memory;

  EP_HD const ep_peer_view& view(int32_t rank) const {
    return reinterpret_cast<const ep_peer_view*>(memory.peers)[rank];
  }
  EP_HD const uint64_t* local_signal(uint64_t slot) const {
    return reinterpret_cast<const uint64_t*>(view(memory.rank).signals) + slot;
  }
  EP_HD uint8_t* data(int32_t rank, uint64_t offset) const {
    return reinterpret_cast<uint8_t*>(view(rank).data) + offset;
  }

  template <class Ctx, class Coop>
  EP_HD bool signal(Ctx& ctx, const Coop& coop, int32_t peer, uint64_t slot, uint64_t add, ep_kernel_status*) const {
    if (coop.lane() == 0) {
      fetch_add(ctx, reinterpret_cast<uint64_t*>(view(peer).signals) + slot, add);
      ctx.wake(view(peer).wake);
    }
    return true;
  }

  template <class Ctx, class Coop>
  EP_HD bool put_rows(Ctx& ctx, const Coop& coop, int32_t peer, uint64_t dst_offset, const void* src, uint64_t stride,
                      uint64_t row_bytes, uint64_t rows, bool non_temporal, uint64_t slot, uint64_t add,
                      ep_kernel_status* status) const {
    copy_rows(coop, data(peer, dst_offset), src, stride, row_bytes, rows, non_temporal);
    copy_rows_done(coop, non_temporal);
    return signal(ctx, coop, peer, slot, add, status);
  }
};

/* Requests go to an engine on the host through a ring (see ep_proxy_ring). The source must stay unchanged until the engine's `completed`
 * count has passed the request. */
struct proxy_endpoint {
  const ep_memory_handle& memory;

  EP_HD ep_proxy_ring& ring() const { return *reinterpret_cast<ep_proxy_ring*>(memory.proxy); }
  EP_HD const uint64_t* local_signal(uint64_t slot) const {
    return reinterpret_cast<const uint64_t*>(
               reinterpret_cast<const ep_peer_view*>(memory.peers)[memory.rank].signals) + slot;
  }

  template <class Ctx> EP_HD bool post(Ctx& ctx, const ep_proxy_request& request, ep_kernel_status* status) const {
    ep_proxy_ring& r = ring();
    uint64_t sequence;
    do {
      sequence = load_relaxed(ctx, &r.tail);
      if ((sequence & EP_PROXY_STOPPED) != 0) {
        ctx.fail(status, EP_STATUS_CLOSED, memory.rank, EP_STAGE_ROOM, 0, 0);
        return false;
      }
      /* Room is awaited before the reservation, which cannot be given back: the engine would wait for ever for an entry whose producer gave up.
       * Another producer may see the same last free entry, but only one gets its number. The rank itself is awaited: the queue is its own, so
       * neither a peer's death nor its slowness can be the reason, and only deadline, cancellation and closing end this wait. Where there is room it is not begun: whoever waits
       * carries the engine on first, and the peer would be told what it is to learn with this request. */
      if (sequence >= r.capacity) {
        const uint64_t taken = sequence - r.capacity + 1;
        if (load_acquire(ctx, &r.head) < taken && !ctx.wait(&r.head, taken, memory.rank, EP_STAGE_ROOM, status)) return false;
      }
    } while (!reserve(ctx, &r.tail, sequence));
    auto* entry = reinterpret_cast<ep_proxy_request*>(r.entries) + (sequence & (r.capacity - 1));
    entry->op = request.op;
    entry->peer = request.peer;
    entry->memory_id = request.memory_id;
    entry->src = request.src;
    entry->src_stride = request.src_stride;
    entry->row_bytes = request.row_bytes;
    entry->rows = request.rows;
    entry->dst_offset = request.dst_offset;
    entry->slot = request.slot;
    entry->add = request.add;
    store_release(ctx, &entry->turn, sequence + 1);
    fence_system(); /* the engine's half of the eventcount: publish before looking for sleepers */
    ctx.wake(r.wake);
    return true;
  }

  template <class Ctx, class Coop>
  EP_HD bool signal(Ctx& ctx, const Coop& coop, int32_t peer, uint64_t slot, uint64_t add, ep_kernel_status* status) const {
    bool ok = true;
    if (coop.lane() == 0) {
      ep_proxy_request request{};
      request.op = EP_PROXY_SIGNAL;
      request.peer = peer;
      request.memory_id = memory.memory_id;
      request.slot = slot;
      request.add = add;
      ok = post(ctx, request, status);
    }
    return coop.sync_and(ok);
  }

  template <class Ctx, class Coop>
  EP_HD bool put_rows(Ctx& ctx, const Coop& coop, int32_t peer, uint64_t dst_offset, const void* src, uint64_t stride,
                      uint64_t row_bytes, uint64_t rows, bool, uint64_t slot, uint64_t add, ep_kernel_status* status) const {
    bool ok = true;
    if (coop.lane() == 0) {
      ep_proxy_request request{};
      request.op = EP_PROXY_PUT;
      request.peer = peer;
      request.memory_id = memory.memory_id;
      request.src = reinterpret_cast<uint64_t>(src);
      request.src_stride = stride;
      request.row_bytes = row_bytes;
      request.rows = rows;
      request.dst_offset = dst_offset;
      request.slot = slot;
      request.add = add;
      ok = post(ctx, request, status);
    }
    return coop.sync_and(ok);
  }
};

EP_MACHINE_END

#endif
