/* The GPU as a context (coop.h): one thread per lane, warps of 32. Blocks must be whole warps; kernels that wait for peers or use the grid
 * barrier must be launched cooperatively, so that all their blocks run at once. */
#ifndef EP_DEVICE_CUDA_CONTEXT_H
#define EP_DEVICE_CUDA_CONTEXT_H

#if defined(__CUDACC__)

#include <cooperative_groups.h>

#include "config.h"
#include "coop.h"
#include "ep/abi/dispatch.h"
#include "ep/abi/status.h"
#include "order.h"

EP_MACHINE_BEGIN

/* What ends the waits of a launch besides their value. A GPU cannot see a peer process die: the host sets `cancel`. */
struct cuda_environment {
  uint64_t wait_cycles;   /* of the SM's clock, for one wait; 0: no limit */
  const uint32_t* cancel; /* mapped host memory or null; not 0: EP_STATUS_ABORTED */
  uint64_t since;         /* this block's clock64() from which all of its waits together have wait_cycles; 0: each wait has them for itself */
};

struct cuda_context {
  static constexpr bool single_lane = false;
  const cuda_environment& environment;

  EP_HD uint32_t block() const { return blockIdx.x; }
  EP_HD uint32_t blocks() const { return gridDim.x; }
  EP_HD uint32_t lane() const { return threadIdx.x; }
  EP_HD uint32_t lanes() const { return blockDim.x; }
  EP_HD uint32_t warp_lanes() const { return 32; }
  EP_HD void point() const {}
  EP_HD void sync_block() const { __syncthreads(); }
  EP_HD bool sync_block_and(bool value) const { return __syncthreads_and(value ? 1 : 0) != 0; }
  EP_HD void sync_named(uint32_t barrier, uint32_t lanes) const {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(lanes) : "memory");
  }
  EP_HD void sync_warp() const { __syncwarp(); }
  EP_HD void sync_grid() const { cooperative_groups::this_grid().sync(); }
  template <class T> EP_HD T shuffle(T value, uint32_t from) const { return __shfl_sync(0xffffffffu, value, static_cast<int>(from)); }
  EP_HD uint32_t ballot(bool value) const { return __ballot_sync(0xffffffffu, value ? 1 : 0); }
  template <class T> EP_HD uint32_t match_any(T value) const {
    return __match_any_sync(0xffffffffu, static_cast<unsigned long long>(value));
  }

  EP_HD bool wait(const uint64_t* word, uint64_t value, int32_t rank, uint32_t stage, ep_kernel_status* status) const {
    return wait_until<false>(word, value, rank, stage, status);
  }
  EP_HD bool wait_equal(const uint64_t* word, uint64_t value, int32_t rank, uint32_t stage, ep_kernel_status* status) const {
    return wait_until<true>(word, value, rank, stage, status);
  }
  EP_HD uint64_t clock_ns() const {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }
  /* Peers on the host that may sleep are woken by their engine; peers on a GPU never sleep. */
  EP_HD void wake(uint64_t) const {}
  static constexpr bool wakes_nobody = true;

  template <bool Equal>
  EP_HD bool wait_until(const uint64_t* word, uint64_t value, int32_t rank, uint32_t stage, ep_kernel_status* status) const {
    const auto look = [&](uint64_t* found) {
      *found = load_acquire(*this, word);
      return Equal ? *found == value : *found >= value;
    };
    return wait_for(look, value, rank, stage, status);
  }

  template <class Look>
  EP_HD bool wait_for(const Look& look, uint64_t expected, int32_t rank, uint32_t stage, ep_kernel_status* status) const {
    const uint64_t start = static_cast<uint64_t>(clock64());
    uint32_t end = EP_STATUS_OK;
    uint64_t found = 0;
    for (uint32_t looks = 1;; ++looks) {
      if (look(&found)) return true;
      if (end != EP_STATUS_OK) {
        fail(status, end, rank, stage, expected, found);
        return false;
      }
      /* One more look after the end: the value may have come just before it. */
      if (looks % 64 == 0) end = ended(start);
    }
  }

  EP_HD uint32_t ended(uint64_t start) const {
    if (environment.cancel != nullptr) {
      using flag_ref = ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_system>;
      if (flag_ref(*const_cast<uint32_t*>(environment.cancel)).load(::cuda::memory_order_relaxed) != 0) return EP_STATUS_ABORTED;
    }
    const uint64_t spent = static_cast<uint64_t>(clock64()) - (environment.since != 0 ? environment.since : start);
    return environment.wait_cycles != 0 && spent > environment.wait_cycles ? EP_STATUS_TIMEOUT : EP_STATUS_OK;
  }

  /* The first failure of a launch is the one that is reported; the host reads it after the kernel. */
  EP_HD static void fail(ep_kernel_status* status, uint32_t how, int32_t rank, uint32_t stage, uint64_t expected, uint64_t found) {
    if (status == nullptr) return;
    using launch_ref32 = ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_device>; /* may lie in host memory: see `reserve` in order.h */
    using word_ref32 = ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_system>;
    uint32_t ok = EP_STATUS_OK;
    if (!launch_ref32(status->status).compare_exchange_strong(ok, EP_STATUS_PENDING, ::cuda::memory_order_relaxed)) return;
    status->rank = rank;
    status->stage = stage;
    status->expected = expected;
    status->found = found;
    word_ref32(status->status).store(how, ::cuda::memory_order_release);
  }
};

EP_MACHINE_END

#endif
#endif
