/* What the posters of a queue pair share, whichever NIC it is of: words of their own scope, and the lanes that post together. */
#ifndef EP_DEVICE_POSTERS_H
#define EP_DEVICE_POSTERS_H

#include "ep/abi/ibgda.h"
#include "order.h"

EP_MACHINE_BEGIN

/* With a way of sharing (EP_IBGDA_SHARE_*): posters wait for no turn (marks.h). */
constexpr uint32_t by_marks = 4;

/* Words that only the posters of a queue pair write, with the scope of their sharing. */
template <uint32_t Sharing> struct poster_words {
  static constexpr uint32_t shared_by = Sharing & ~by_marks;
#if defined(__CUDACC__)
  using ref = cuda::atomic_ref<uint64_t, shared_by == EP_IBGDA_SHARE_DEVICE ? cuda::thread_scope_device : cuda::thread_scope_block>;
#else
  using ref = std::atomic_ref<uint64_t>;
#endif
  static constexpr bool alone = shared_by == EP_IBGDA_SHARE_THREAD;

  template <class Ctx> EP_HD static uint64_t load(Ctx& ctx, uint64_t* word) {
    ctx.point();
    return ref(*word).load(alone ? detail::relaxed : detail::acquire);
  }
  template <class Ctx> EP_HD static void store(Ctx& ctx, uint64_t* word, uint64_t value) {
    ctx.point();
    ref(*word).store(value, alone ? detail::relaxed : detail::release);
  }
  template <class Ctx> EP_HD static uint64_t add(Ctx& ctx, uint64_t* word, uint64_t value) {
    ctx.point();
    if constexpr (alone) {
      const uint64_t old = ref(*word).load(detail::relaxed);
      ctx.point(); /* a second poster, whom this way of sharing leaves out, would show here */
      ref(*word).store(old + value, detail::relaxed);
      return old;
    } else {
      return ref(*word).fetch_add(value, detail::relaxed);
    }
  }
  /* Of a word that only ever grows. */
  template <class Ctx> EP_HD static void raise(Ctx& ctx, uint64_t* word, uint64_t value) {
    ctx.point();
    uint64_t found = ref(*word).load(detail::relaxed);
    if constexpr (alone) {
      if (found < value) ref(*word).store(value, detail::relaxed);
    } else {
      while (found < value && !ref(*word).compare_exchange_weak(found, value, detail::release)) {}
    }
  }
  /* Changes bits that nobody else changes at the time. Who had looked at them by `set`, and found them unchanged, has said before what is read behind this. */
  template <class Ctx> EP_HD static void flip(Ctx& ctx, uint64_t* word, uint64_t bits) {
    ctx.point();
    if constexpr (alone) {
      ref(*word).store(ref(*word).load(detail::relaxed) ^ bits, detail::relaxed);
    } else {
      ref(*word).fetch_xor(bits, detail::acq_rel);
    }
  }
  /* The same by whoever has just fenced all that it has written (register_fence), which on a GPU is a release, too. */
  template <class Ctx> EP_HD static void flip_fenced(Ctx& ctx, uint64_t* word, uint64_t bits) {
#if defined(__CUDACC__)
    if constexpr (!alone) {
      ref(*word).fetch_xor(bits, detail::acquire);
      return;
    }
#endif
    flip(ctx, word, bits);
  }
  /* Acquires what was loaded relaxed before. */
  EP_HD static void acquire_loaded() {
#if defined(__CUDACC__)
    if constexpr (!alone) cuda::atomic_thread_fence(detail::acquire, cuda::thread_scope_device);
#else
    if constexpr (!alone) std::atomic_thread_fence(detail::acquire);
#endif
  }
  /* Sets bits, or none; what the word was. */
  template <class Ctx> EP_HD static uint64_t set(Ctx& ctx, uint64_t* word, uint64_t bits) {
    static_assert(!alone);
    ctx.point();
    return ref(*word).fetch_or(bits, detail::acq_rel);
  }
  template <class Ctx> EP_HD static void exchange(Ctx& ctx, uint64_t* word, uint64_t value) {
    static_assert(!alone);
    ctx.point();
    ref(*word).exchange(value, detail::acq_rel);
  }
  /* Keeps the first value but 0 that is given to a word. */
  template <class Ctx> EP_HD static void first(Ctx& ctx, uint64_t* word, uint64_t value) {
    ctx.point();
    uint64_t none = 0;
    ref(*word).compare_exchange_strong(none, value, detail::release);
  }
  /* A flag that one poster at a time holds: true when it was free. Both are read-modify-writes, so that whoever drops it has seen all that happened
   * before anyone tried to take it. */
  template <class Ctx> EP_HD static bool flag_take(Ctx& ctx, uint64_t* flag) {
    ctx.point();
    if constexpr (alone) {
      return true;
    } else {
      return ref(*flag).exchange(1, detail::acq_rel) == 0;
    }
  }
  template <class Ctx> EP_HD static void flag_drop(Ctx& ctx, uint64_t* flag) {
    ctx.point();
    if constexpr (!alone) ref(*flag).exchange(0, detail::acq_rel);
  }
};

/* Whether one poster at a time looks at the CQ, and the others at what it has found: where waits never sleep, and several posters meet.
 * HAZARD: not where waits may sleep: who had found somebody looking would sleep through what the NIC wrote just behind that look, since nobody wakes it but the NIC.
 * Of time: where the CQ lies in memory of the host, looks of a GPU queue up on its line, some 1 us each: 128 blocks that waited for room posted 1.1 million WQEs a second, by one look at a time 66. */
template <uint32_t Sharing, class Ctx> constexpr bool one_polls = requires { Ctx::never_sleeps; } && !poster_words<Sharing>::alone;

/* For polls in looks of Ctx::wait_for, as no_point. */
struct polling_context : no_point {
  static constexpr bool never_sleeps = true;
};

/* Lanes that write the WQEs of one post together. All of them call with equal arguments. */
template <class Ctx> struct lone_poster {
  Ctx& ctx;
  EP_HD uint32_t lane() const { return 0; }
  EP_HD uint32_t lanes() const { return 1; }
  template <class T> EP_HD T from_first(T value) const { return value; }
  EP_HD void sync() const {}
};

template <class Ctx> struct warp_poster {
  Ctx& ctx;
  EP_HD uint32_t lane() const { return ctx.lane() % ctx.warp_lanes(); }
  EP_HD uint32_t lanes() const { return ctx.warp_lanes(); }
  template <class T> EP_HD T from_first(T value) const { return ctx.shuffle(value, 0); }
  EP_HD void sync() const { ctx.sync_warp(); }
};

EP_MACHINE_END

#endif
