/* Some peers are stored to, all others are reached by another endpoint over the same memory and the same signal words (compose() of transports). */
#ifndef EP_DEVICE_MIXED_ENDPOINT_H
#define EP_DEVICE_MIXED_ENDPOINT_H

#include "endpoint.h"

EP_MACHINE_BEGIN

/* HAZARD: words are added to by processors and by the far endpoint, so additions of both must be atomic against each other. */
template <class Far> struct mixed_endpoint {
  const ep_memory_handle& memory; /* of its peers, those are near that are mapped; this rank is */
  Far far;                        /* over the same handle */

  EP_HD static constexpr uint64_t most_add() {
    if constexpr (requires { Far::max_add; }) {
      return Far::max_add;
    } else {
      return UINT64_MAX;
    }
  }
  static constexpr uint64_t max_add = most_add();

  EP_HD bool stores_to(int32_t peer) const { return stores().view(peer).data != 0; }
  EP_HD load_store_endpoint stores() const { return load_store_endpoint{memory}; }
  EP_HD const uint64_t* local_signal(uint64_t slot) const { return stores().local_signal(slot); }

  template <class Ctx, class Coop>
  EP_HD bool signal(Ctx& ctx, const Coop& coop, int32_t peer, uint64_t slot, uint64_t add, ep_kernel_status* status) const {
    if (stores_to(peer)) return stores().signal(ctx, coop, peer, slot, add, status);
    return far.signal(ctx, coop, peer, slot, add, status);
  }

  template <class Ctx, class Coop>
  EP_HD bool put_rows(Ctx& ctx, const Coop& coop, int32_t peer, uint64_t dst_offset, const void* src, uint64_t stride, uint64_t row_bytes, uint64_t rows,
                      bool non_temporal, uint64_t slot, uint64_t add, ep_kernel_status* status) const {
    if (stores_to(peer)) return stores().put_rows(ctx, coop, peer, dst_offset, src, stride, row_bytes, rows, non_temporal, slot, add, status);
    return far.put_rows(ctx, coop, peer, dst_offset, src, stride, row_bytes, rows, non_temporal, slot, add, status);
  }
};

EP_MACHINE_END

#endif
