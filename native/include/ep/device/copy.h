/* Copies by a cooperation scope. */
#ifndef EP_DEVICE_COPY_H
#define EP_DEVICE_COPY_H

#include "config.h"
#include "coop.h"
#include "order.h"

#if !defined(__CUDACC__)
/* core/copy: memcpy, or stores past the caches. `non_temporal` copies are not ordered by any later release store or locked instruction until
 * ep_copy_fence() has run on the same thread (measured: half of the reads stale without it). */
extern "C" void ep_copy(void* dst, const void* src, uint64_t bytes, int non_temporal);
extern "C" void ep_copy_fence(void);
#endif

EP_MACHINE_BEGIN

struct alignas(16) vector16 {
  uint32_t word[4];
};

#if defined(__CUDACC__)
namespace detail {
/* Of accesses to what nobody reads again soon: what others will read stays longer in the second-level cache. Of a dispatch and a combine of experts one after the other, 100 us in all, 4 to 8 are that. */
EP_HD uint64_t soon_gone() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
} // namespace detail
#endif

/* A vector that nobody reads again soon, past the first-level cache of a GPU, and the first to leave the second-level one. Where a kernel has few rows for each multiprocessor it takes less time than to make room for them in the
 * first (sums of 117 MB: 31 us in place of 40); where it has many, more (sums of 3.7 GB: 1 093 in place of 1 045). */
EP_HD vector16 load_once(const vector16* address) {
#if defined(__CUDA_ARCH__)
  vector16 held;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(held.word[0]), "=r"(held.word[1]), "=r"(held.word[2]), "=r"(held.word[3])
               : "l"(__cvta_generic_to_global(address)), "l"(detail::soon_gone()));
  return held;
#else
  return *address;
#endif
}

/* The same for a vector that is written. */
EP_HD void store_once(vector16* address, const vector16& held) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(address)), "r"(held.word[0]), "r"(held.word[1]), "r"(held.word[2]), "r"(held.word[3]) : "memory");
#else
  *address = held;
#endif
}

/* Vectors that a lane has in flight before it stores the first: stores may alias later loads as far as a compiler knows, so loads must come first in the source. */
constexpr uint32_t copy_in_flight = 4;

/* Vector i goes from `from(i)` to `to(i)`, for every i < vectors. */
template <class From, class To> EP_HD void copy_vectors(uint32_t lane, uint32_t lanes, uint64_t vectors, const From& from, const To& to) {
  uint64_t i = lane;
  for (; i + (copy_in_flight - 1) * static_cast<uint64_t>(lanes) < vectors; i += copy_in_flight * static_cast<uint64_t>(lanes)) {
    vector16 held[copy_in_flight];
    for (uint32_t k = 0; k < copy_in_flight; ++k) held[k] = *from(i + k * static_cast<uint64_t>(lanes));
    for (uint32_t k = 0; k < copy_in_flight; ++k) *to(i + k * static_cast<uint64_t>(lanes)) = held[k];
  }
  for (; i < vectors; i += lanes) *to(i) = *from(i);
}

/* Lanes > 1: 16-byte vectors where both sides allow it, bytes otherwise. All lanes of the scope call it with equal arguments. */
template <class Coop> EP_HD void copy_lanes(const Coop& coop, void* dst, const void* src, uint64_t bytes) {
  const uint32_t lane = coop.lane();
  const uint32_t lanes = coop.lanes();
  uint64_t done = 0;
  if (((reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src)) & 15u) == 0) {
    const uint64_t vectors = bytes / 16;
    auto* to = static_cast<vector16*>(dst);
    const auto* from = static_cast<const vector16*>(src);
    copy_vectors(lane, lanes, vectors, [=](uint64_t i) { return from + i; }, [=](uint64_t i) { return to + i; });
    done = vectors * 16;
  }
  auto* to = static_cast<uint8_t*>(dst);
  const auto* from = static_cast<const uint8_t*>(src);
  for (uint64_t i = done + lane; i < bytes; i += lanes) to[i] = from[i];
}

/* Strided rows that are whole vectors, taken as one run of vectors: row by row, lanes beyond a row's vectors would idle, and none would have more than one in
 * flight. False: not such rows. */
template <class Coop>
EP_HD bool copy_strided_vectors(const Coop& coop, uint8_t* dst, const uint8_t* src, uint64_t stride, uint64_t row_bytes, uint64_t rows) {
  if (((reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src) | stride | row_bytes) & 15u) != 0) return false;
  const uint64_t vectors = row_bytes / 16 * rows;
  if (row_bytes == 0 || vectors > UINT32_MAX) return false;
  const auto in_row = static_cast<uint32_t>(row_bytes / 16);
  auto* to = reinterpret_cast<vector16*>(dst);
  const auto from = [=](uint64_t i) {
    const uint32_t row = static_cast<uint32_t>(i) / in_row;
    return reinterpret_cast<const vector16*>(src + row * stride) + (static_cast<uint32_t>(i) - row * in_row);
  };
  copy_vectors(coop.lane(), coop.lanes(), vectors, from, [=](uint64_t i) { return to + i; });
  return true;
}

/* `rows` rows, strided at the source, packed at the destination. After it, `copy_rows_done` must run before the signal. */
template <class Coop>
EP_HD void copy_rows(const Coop& coop, void* dst, const void* src, uint64_t stride, uint64_t row_bytes, uint64_t rows,
                     bool non_temporal) {
  auto* to = static_cast<uint8_t*>(dst);
  const auto* from = static_cast<const uint8_t*>(src);
  if (stride == row_bytes) {
    row_bytes *= rows;
    rows = rows != 0 ? 1 : 0;
  }
  if constexpr (!Coop::single) {
    if (rows > 1 && copy_strided_vectors(coop, to, from, stride, row_bytes, rows)) return;
  }
  for (uint64_t i = 0; i < rows; ++i) {
#if !defined(__CUDACC__)
    if constexpr (Coop::single) {
      ep_copy(to + i * row_bytes, from + i * stride, row_bytes, non_temporal ? 1 : 0);
      continue;
    }
#else
    (void)non_temporal;
#endif
    copy_lanes(coop, to + i * row_bytes, from + i * stride, row_bytes);
  }
}

/* Every lane's stores of `copy_rows` are visible to whoever acquires a signal that lane 0 releases after this. */
template <class Coop> EP_HD void copy_rows_done(const Coop& coop, bool non_temporal) {
#if !defined(__CUDACC__)
  if constexpr (Coop::single) {
    /* Ordinary stores are ordered by the signal's own release. */
    if (non_temporal) ep_copy_fence();
    return;
  }
#else
  (void)non_temporal;
#endif
  fence_system();
  coop.sync();
}

EP_MACHINE_END

#endif
