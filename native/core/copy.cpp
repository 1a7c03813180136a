// Bulk copies of the host build: through the caches, or past them with non-temporal stores.
#include "hand_over.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__x86_64__)

// How lines past the caches are best written depends on who made the processor, by up to a factor of three (below).
//
// AMD: one row of lines, with prefetches. Shared segments have 4 KiB pages, and a non-temporal store that misses the TLB stalls the write-combining buffers behind it. A prefetch of the
// line one page ahead walks the page table in time (measured: 15 to 21 GB/s into a memfd); prefetches past the end of a mapping do nothing.
constexpr uint64_t page_bytes = 4096;
// The hardware prefetcher stops at page borders; this far ahead the next reads are in flight.
constexpr uint64_t read_ahead = 1024;

inline void stream_prefetch(const uint8_t* dst, const uint8_t* src) {
  if ((reinterpret_cast<uintptr_t>(dst) & (page_bytes - 1)) < 256) _mm_prefetch(reinterpret_cast<const char*>(dst + page_bytes), _MM_HINT_T0);
  for (uint64_t line = 0; line < 256; line += 64) _mm_prefetch(reinterpret_cast<const char*>(src + read_ahead + line), _MM_HINT_NTA);
}

__attribute__((target("avx512f"))) void stream_avx512(uint8_t* dst, const uint8_t* src, uint64_t bytes) {
  uint64_t i = 0;
  for (; i + 256 <= bytes; i += 256) {
    stream_prefetch(dst + i, src + i);
    const __m512i a = _mm512_loadu_si512(src + i);
    const __m512i b = _mm512_loadu_si512(src + i + 64);
    const __m512i c = _mm512_loadu_si512(src + i + 128);
    const __m512i d = _mm512_loadu_si512(src + i + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + 192), d);
  }
  for (; i < bytes; i += 64) _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), _mm512_loadu_si512(src + i));
}

__attribute__((target("avx2"))) void stream_avx2(uint8_t* dst, const uint8_t* src, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; i += 64) {
    if ((i & 255) == 0) stream_prefetch(dst + i, src + i);
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 32), b);
  }
}

void stream_sse2(uint8_t* dst, const uint8_t* src, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; i += 16) {
    if ((i & 255) == 0) stream_prefetch(dst + i, src + i);
    _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i)));
  }
}

// Intel, and whoever else: four rows of lines at once, without prefetches, so that the hardware's own prefetchers follow four streams. Measured on a Xeon (Emerald Rapids), two cores at
// once, 56 MiB each in rows of 4, 14 and 64 KiB: 13.9, 15.8 and 17.1 GB/s; one row 11.1, 9.8 and 10.4; one row with prefetches past the caches (PREFETCHNTA) 5.3, 5.9 and 6.2; memcpy 6.5 to 7.0.
constexpr uint64_t rows_at_once = 4;
constexpr uint64_t row_step = 128;
// Longer copies go piece by piece: rows that are far apart only cost translations.
constexpr uint64_t rows_bytes = 65536;

__attribute__((target("avx512f"))) void step_avx512(uint8_t* dst, const uint8_t* src) {
  const __m512i a = _mm512_loadu_si512(src);
  const __m512i b = _mm512_loadu_si512(src + 64);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), a);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 64), b);
}

__attribute__((target("avx512f"))) void rows_avx512(uint8_t* dst, const uint8_t* src, uint64_t bytes) {
  const uint64_t row = bytes / rows_at_once / row_step * row_step;
  for (uint64_t i = 0; i < row; i += row_step) {
    for (uint64_t r = 0; r < rows_at_once; ++r) step_avx512(dst + r * row + i, src + r * row + i);
  }
  for (uint64_t i = rows_at_once * row; i < bytes; i += 64) _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), _mm512_loadu_si512(src + i));
}

void rows_sse2(uint8_t* dst, const uint8_t* src, uint64_t bytes) {
  const uint64_t row = bytes / rows_at_once / row_step * row_step;
  for (uint64_t i = 0; i < row; i += row_step) {
    for (uint64_t r = 0; r < rows_at_once; ++r) {
      for (uint64_t at = r * row + i; at < r * row + i + row_step; at += 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(dst + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + at)));
      }
    }
  }
  for (uint64_t i = rows_at_once * row; i < bytes; i += 16) _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i)));
}

template <void (*Rows)(uint8_t*, const uint8_t*, uint64_t)> void by_pieces(uint8_t* dst, const uint8_t* src, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; i += rows_bytes) Rows(dst + i, src + i, std::min(rows_bytes, bytes - i));
}

using stream_function = void (*)(uint8_t*, const uint8_t*, uint64_t);

stream_function stream_choose() {
  if (!__builtin_cpu_is("amd")) return __builtin_cpu_supports("avx512f") ? by_pieces<rows_avx512> : by_pieces<rows_sse2>;
  if (__builtin_cpu_supports("avx512f")) return stream_avx512;
  if (__builtin_cpu_supports("avx2")) return stream_avx2;
  return stream_sse2;
}

// `rep movsb`, which a C library's memcpy uses for what is large, takes one byte after the other on AMD's Zen 3 and 4 where the destination lies up to 64 bytes
// behind the source within a page (measured on a Zen 4: 3.5 GB/s instead of 53). Ordinary arrays, which lie at any multiple of 8, meet that.
constexpr uint64_t near_bytes = 64;
// From here on a memcpy may be one `rep movsb` (glibc on those processors: 2 KiB).
constexpr uint64_t string_bytes = 1024;

bool meets_slow_strings(const uint8_t* dst, const uint8_t* src, uint64_t bytes) {
  const uint64_t behind = (reinterpret_cast<uintptr_t>(dst) - reinterpret_cast<uintptr_t>(src)) & (page_bytes - 1);
  return bytes >= string_bytes && behind - 1 < near_bytes - 1;
}

void copy_lines(uint8_t* dst, const uint8_t* src, uint64_t bytes) {
  uint64_t i = 0;
  for (; i + 64 <= bytes; i += 64) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i + 16));
    const __m128i c = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i + 32));
    const __m128i d = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i + 48));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), a);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i + 16), b);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i + 32), c);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i + 48), d);
  }
  std::memcpy(dst + i, src + i, bytes - i);
}

// Whole 64-byte lines of the destination go past the caches; its ragged ends are ordinary stores.
void copy_stream(uint8_t* dst, const uint8_t* src, uint64_t bytes) {
  static const stream_function stream = stream_choose();
  const uint64_t head = (64 - (reinterpret_cast<uintptr_t>(dst) & 63u)) & 63u;
  if (bytes < head + 64) {
    std::memcpy(dst, src, bytes);
    return;
  }
  std::memcpy(dst, src, head);
  const uint64_t body = (bytes - head) & ~uint64_t{63};
  stream(dst + head, src + head, body);
  std::memcpy(dst + head + body, src + head + body, bytes - head - body);
}

#endif

} // namespace

extern "C" void ep_copy(void* dst, const void* src, uint64_t bytes, int non_temporal) {
#if defined(__x86_64__)
  if (non_temporal != 0) {
    copy_stream(static_cast<uint8_t*>(dst), static_cast<const uint8_t*>(src), bytes);
    return;
  }
  if (meets_slow_strings(static_cast<const uint8_t*>(dst), static_cast<const uint8_t*>(src), bytes)) {
    copy_lines(static_cast<uint8_t*>(dst), static_cast<const uint8_t*>(src), bytes);
    return;
  }
#else
  (void)non_temporal;
#endif
  if (bytes != 0) std::memcpy(dst, src, bytes);
}

// Hazard: neither a release store nor a locked instruction is documented to drain the write-combining buffers in time for another core that
// has seen the signal. Every signal after a non-temporal copy is preceded by this fence.
extern "C" void ep_copy_fence(void) {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

namespace ep {

bool takes_lines_back_slowly() {
#if defined(__x86_64__)
  static const bool slowly = __builtin_cpu_is("amd") != 0;
  return slowly;
#else
  return false;
#endif
}

bool hands_over_past_caches(uint64_t bytes) {
  constexpr uint64_t few_bytes = 2048;
  return takes_lines_back_slowly() && bytes >= few_bytes;
}

void hand_over(uint8_t* to, const uint8_t* from, uint64_t bytes) {
#if defined(__x86_64__)
  if (hands_over_past_caches(bytes)) {
    // Of a thread: those of one process may lie differently to whom they copy for.
    thread_local faster_way way;
    const bool past = way.choose();
    const uint64_t began = hand_over_ticks();
    hand_over(to, from, bytes, past);
    way.took(past, hand_over_ticks() - began, bytes);
    return;
  }
#endif
  ep_copy(to, from, bytes, 0);
}

void hand_over(uint8_t* to, const uint8_t* from, uint64_t bytes, bool past) {
  ep_copy(to, from, bytes, past ? 1 : 0);
  if (past) ep_copy_fence();
}

uint64_t hand_over_ticks() {
#if defined(__x86_64__)
  return __rdtsc();
#else
  return 0;
#endif
}

} // namespace ep
