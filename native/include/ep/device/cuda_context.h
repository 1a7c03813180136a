/* The GPU as a context (coop.h): one thread per lane, warps of 32. Blocks must be whole warps; kernels that wait for peers or use the grid
 * barrier must be launched cooperatively, so that all their blocks run at once. */
#ifndef EP_DEVICE_CUDA_CONTEXT_H
#define EP_DEVICE_CUDA_CONTEXT_H

#if defined(__CUDACC__)

#include <cooperative_groups.h>

#include "config.h"
#include "coop.h"
#include "copy.h"
#include "ep/abi/dispatch.h"
#include "ep/abi/status.h"
#include "order.h"

EP_MACHINE_BEGIN

/* What ends the waits of a launch besides their value. A GPU cannot see a peer process die: the host sets `cancel`, or `lost` of that rank, after which a kernel goes on without it. */
struct cuda_environment {
  uint64_t wait_cycles;   /* of the SM's clock, for one wait; 0: no limit */
  const uint32_t* cancel; /* mapped host memory or null; not 0: EP_STATUS_ABORTED */
  uint64_t since;         /* this block's clock64() from which all of its waits together have wait_cycles; 0: each wait has them for itself */
  const uint32_t* lost;   /* mapped host memory, by rank, or null; not 0: how waits for that rank end */
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
  static constexpr bool never_sleeps = true;
  static constexpr bool outlives_ranks = true; /* a rank is dead before its kernels have ended: see moe_ended */

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
      /* One more look after the end: the value may have come just before it.
       * HAZARD: rarely, which is a few milliseconds, and not all blocks at a time: what it reads lies in memory of the host, and reads of one line across the bus queue up, about 1 us each. 132 blocks that look there
       * together wait for 130 us, and peers that wait for them meanwhile then look as well. */
      if ((looks + 64 * blockIdx.x) % 8192 == 0) end = ended(start, rank);
    }
  }

  EP_HD uint32_t ended(uint64_t start, int32_t rank) const {
    /* Both looks at once: each goes across the bus. The second is before any later one: what a lost rank had sent is found once more. */
    using flag_ref = ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_system>;
    uint32_t cancelled = 0;
    uint32_t lost = EP_STATUS_OK;
    if (environment.cancel != nullptr) cancelled = flag_ref(*const_cast<uint32_t*>(environment.cancel)).load(::cuda::memory_order_relaxed);
    if (environment.lost != nullptr && rank >= 0) lost = flag_ref(const_cast<uint32_t*>(environment.lost)[rank]).load(::cuda::memory_order_acquire);
    if (cancelled != 0) return EP_STATUS_ABORTED;
    if (lost != EP_STATUS_OK) return lost;
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

/* Of a block's own memory, for each of its warps: stages of rows, as many as bulk.h takes in turn, and a barrier for each. */
constexpr uint32_t cuda_bulk_stages = 3;
constexpr uint32_t cuda_bulk_bytes = 4096;
constexpr uint32_t cuda_bulk_memory = cuda_bulk_stages * (cuda_bulk_bytes + 8);

/* The same with the copy engine of compute capability 9.0 and later (bulk.h), for kernels that are launched with cuda_bulk_memory for each warp of a block. One for each lane, made when the whole block
 * comes by. HAZARD: the engine is another observer of memory. What lanes have written, and what was acquired for them, it sees only behind a fence between the two (bulk_begin). */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
struct cuda_bulk_context : cuda_context {
  static constexpr uint32_t bulk_bytes = cuda_bulk_bytes;
  uint32_t stages; /* address of this warp's, among the block's own memory */
  uint32_t barriers;
  uint32_t bulk_count = 0;

  EP_HD cuda_bulk_context(const cuda_environment& environment, void* memory) : cuda_context{environment} {
    const auto begin = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
    stages = begin + lane() / 32 * (cuda_bulk_stages * bulk_bytes);
    barriers = begin + lanes() / 32 * (cuda_bulk_stages * bulk_bytes) + lane() / 32 * (8 * cuda_bulk_stages);
    if (lane() % 32 == 0) {
      for (uint32_t i = 0; i < cuda_bulk_stages; ++i) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
      asm volatile("fence.proxy.async;" ::: "memory");
    }
    __syncwarp();
  }

  EP_HD void bulk_begin() const { asm volatile("fence.proxy.async;" ::: "memory"); }
  EP_HD void bulk_load(uint32_t stage, const void* src, uint32_t bytes) const {
    const uint32_t barrier = expect(stage, bytes);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(stages + bulk_bytes * stage), "l"(__cvta_generic_to_global(src)), "r"(bytes), "r"(barrier)
                 : "memory");
  }
  EP_HD void bulk_load_once(uint32_t stage, const void* src, uint32_t bytes) const {
    const uint32_t barrier = expect(stage, bytes);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(stages + bulk_bytes * stage), "l"(__cvta_generic_to_global(src)),
                 "r"(bytes), "r"(barrier), "l"(detail::soon_gone())
                 : "memory");
  }
  EP_HD const uint8_t* bulk_data(uint32_t stage) const { return static_cast<const uint8_t*>(__cvta_shared_to_generic(stages + bulk_bytes * stage)); }
  EP_HD void bulk_landed(uint32_t stage, uint32_t turn) const {
    for (uint32_t done = 0; done == 0;) {
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(barriers + 8 * stage), "r"(turn & 1u) : "memory");
    }
  }
  /* Rows are read by nobody here. */
  EP_HD void bulk_store(void* dst, uint32_t stage, uint32_t bytes) const {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(__cvta_generic_to_global(dst)), "r"(stages + bulk_bytes * stage), "r"(bytes),
                 "l"(detail::soon_gone())
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
  EP_HD void bulk_left(uint32_t) const { asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory"); }
  EP_HD void bulk_end() const {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }

 private:
  /* A barrier, which the bytes of a load come to. */
  EP_HD uint32_t expect(uint32_t stage, uint32_t bytes) const {
    const uint32_t barrier = barriers + 8 * stage;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    return barrier;
  }
};
#endif

EP_MACHINE_END

#endif
#endif
