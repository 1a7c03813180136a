/* Memory operations that other ranks, other threads or a NIC can see. System scope (but for `reserve`): the other side may be a CPU, a GPU or a
 * device.
 *
 * Every operation is a point at which the `simt` executor may switch to another fiber (Ctx::point), so a protocol that is wrong under
 * some interleaving of its atomics can be caught on any machine. */
#ifndef EP_DEVICE_ORDER_H
#define EP_DEVICE_ORDER_H

#include "config.h"

#if defined(__CUDACC__)
#include <cuda/atomic>
#else
#include <atomic>
#endif

EP_MACHINE_BEGIN

namespace detail {
#if defined(__CUDACC__)
using word_ref = cuda::atomic_ref<uint64_t, cuda::thread_scope_system>;
using half_ref = cuda::atomic_ref<uint32_t, cuda::thread_scope_system>;
using launch_ref = cuda::atomic_ref<uint64_t, cuda::thread_scope_device>;
constexpr auto relaxed = cuda::memory_order_relaxed;
constexpr auto acquire = cuda::memory_order_acquire;
constexpr auto release = cuda::memory_order_release;
constexpr auto acq_rel = cuda::memory_order_acq_rel;
constexpr auto seq_cst = cuda::memory_order_seq_cst;
#else
using word_ref = std::atomic_ref<uint64_t>;
using half_ref = std::atomic_ref<uint32_t>;
using launch_ref = std::atomic_ref<uint64_t>;
constexpr auto relaxed = std::memory_order_relaxed;
constexpr auto acquire = std::memory_order_acquire;
constexpr auto release = std::memory_order_release;
constexpr auto acq_rel = std::memory_order_acq_rel;
constexpr auto seq_cst = std::memory_order_seq_cst;
#endif
} // namespace detail

/* In place of a context for looks of Ctx::wait_for, which may run on another lane's stack: no switch there. */
struct no_point {
  EP_HD void point() const {}
};

template <class Ctx> EP_HD uint64_t load_acquire(Ctx& ctx, const uint64_t* word) {
  ctx.point();
  return detail::word_ref(*const_cast<uint64_t*>(word)).load(detail::acquire);
}

/* For Ctx::wait_for: the word has come to `value`. */
struct word_look {
  const uint64_t* word;
  uint64_t value;
  EP_HD bool operator()(uint64_t* found) const {
    no_point here;
    *found = load_acquire(here, word);
    return *found >= value;
  }
};

template <class Ctx> EP_HD uint64_t load_relaxed(Ctx& ctx, const uint64_t* word) {
  ctx.point();
  return detail::word_ref(*const_cast<uint64_t*>(word)).load(detail::relaxed);
}

template <class Ctx> EP_HD void store_relaxed(Ctx& ctx, uint64_t* word, uint64_t value) {
  ctx.point();
  detail::word_ref(*word).store(value, detail::relaxed);
}

template <class Ctx> EP_HD void store_release(Ctx& ctx, uint64_t* word, uint64_t value) {
  ctx.point();
  detail::word_ref(*word).store(value, detail::release);
}

template <class Ctx> EP_HD void store_release(Ctx& ctx, uint32_t* word, uint32_t value) {
  ctx.point();
  detail::half_ref(*word).store(value, detail::release);
}

/* Sequentially consistent: on the host it is also the signaller's half of the eventcount (ep_wake_word). */
template <class Ctx> EP_HD uint64_t fetch_add(Ctx& ctx, uint64_t* word, uint64_t value) {
  ctx.point();
  return detail::word_ref(*word).fetch_add(value, detail::seq_cst);
}

template <class Ctx> EP_HD uint64_t exchange(Ctx& ctx, uint64_t* word, uint64_t value) {
  ctx.point();
  return detail::word_ref(*word).exchange(value, detail::seq_cst);
}

/* Takes number `next` of a queue whose producers all run on one machine; false when another producer took it first. Orders nothing. Device scope,
 * because such a word may lie in host memory: over PCIe without native atomics a GPU's system-scope read-modify-write of host memory is not
 * allowed (compute-sanitizer refuses it). */
template <class Ctx> EP_HD bool reserve(Ctx& ctx, uint64_t* word, uint64_t next) {
  ctx.point();
  uint64_t found = next;
  return detail::launch_ref(*word).compare_exchange_strong(found, next + 1, detail::relaxed);
}

/* Orders this lane's earlier stores before its later ones, as seen by everyone. Non-temporal stores of the host bulk copy are not ordered
 * by a release store: `ep_copy_fence` (copy.h) is what orders those. */
EP_HD void fence_system() {
#if defined(__CUDACC__)
  __threadfence_system();
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

/* The same but for one thing: that a store is seen before what is looked at later. Half as long on a GPU. */
EP_HD void fence_order() {
#if defined(__CUDACC__)
  cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_system);
#else
  std::atomic_thread_fence(std::memory_order_acq_rel);
#endif
}

/* The same as fence_system, where a context may take the call over (system_fence): tests and benchmarks count it. */
template <class Ctx> EP_HD void fence_system(Ctx& ctx) {
  if constexpr (requires { ctx.system_fence(); }) {
    ctx.system_fence();
  } else {
    fence_system();
  }
}

/* That the line of an address will be read soon. */
EP_HD void prefetch(const void* address) {
#if defined(__CUDACC__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
#else
  __builtin_prefetch(address);
#endif
}

/* Before and after a store to a device's register. On the host such a register may be mapped write-combining: its stores pass earlier ones, and stay in a
 * buffer, unless fenced. A GPU maps it uncached, where a release of system scope is enough. */
EP_HD void fence_register() {
#if defined(__CUDACC__)
#elif defined(__x86_64__)
  asm volatile("sfence" ::: "memory");
#elif defined(__aarch64__)
  asm volatile("dsb st" ::: "memory");
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

EP_MACHINE_END

#endif
