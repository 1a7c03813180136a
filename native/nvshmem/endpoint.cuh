// Peers as NVSHMEM reaches them from a kernel: a row is one put with one signal, by all lanes of a warp together. An endpoint as in ep/device/endpoint.h, for kernels of one row at a time.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

#include "ep/abi/dispatch.h"
#include "ep/abi/status.h"

namespace ep {

// `memory.peers` has this PE's own view: NVSHMEM names a peer's bytes by one's own.
struct nvshmem_endpoint {
  const ep_memory_handle& memory;

  __device__ const ep_peer_view& own() const { return reinterpret_cast<const ep_peer_view*>(memory.peers)[memory.rank]; }
  __device__ uint64_t* local_signal(uint64_t slot) const { return reinterpret_cast<uint64_t*>(own().signals) + slot; }

  // HAZARD: one warp, whichever scope the caller has: rows are put by a warp of the block, all lanes of which are here.
  template <class Ctx, class Coop>
  __device__ bool put_rows(Ctx&, const Coop&, int32_t peer, uint64_t dst_offset, const void* src, uint64_t stride, uint64_t row_bytes, uint64_t rows, bool, uint64_t slot, uint64_t add,
                           ep_kernel_status*) const {
    auto* to = reinterpret_cast<uint8_t*>(own().data) + dst_offset;
    for (uint64_t row = 0; row < rows; ++row) {
      auto* from = const_cast<uint8_t*>(static_cast<const uint8_t*>(src)) + row * stride;
      nvshmemx_putmem_signal_nbi_warp(to + row * row_bytes, from, row_bytes, local_signal(slot), row + 1 == rows ? add : 0, NVSHMEM_SIGNAL_ADD, peer);
    }
    return true;
  }
};

} // namespace ep
