#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>
#include <utility>

#include "reduce_kernels.hpp"

namespace ep {
namespace reduce_avx2 {
namespace {

#define EP_REDUCE_TARGET __attribute__((target("avx2,f16c")))

constexpr uint64_t width = 32;
typedef uint64_t raw __attribute__((vector_size(width)));
typedef float single __attribute__((vector_size(width)));

EP_REDUCE_TARGET inline void f16_widen(raw bytes, single& a, single& b) {
  a = (single)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)bytes));
  b = (single)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)bytes, 1));
}

EP_REDUCE_TARGET inline raw f16_narrow(single a, single b) {
  return (raw)_mm256_set_m128i(_mm256_cvtps_ph((__m256)b, _MM_FROUND_TO_NEAREST_INT), _mm256_cvtps_ph((__m256)a, _MM_FROUND_TO_NEAREST_INT));
}

EP_REDUCE_TARGET inline void stream_whole(uint8_t* to, raw value) { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)value); }

EP_REDUCE_TARGET inline void stream_sixteens(uint8_t* to, raw value) {
  __m128i* at = reinterpret_cast<__m128i*>(to);
  _mm_stream_si128(at, _mm256_castsi256_si128((__m256i)value));
  _mm_stream_si128(at + 1, _mm256_extracti128_si256((__m256i)value, 1));
}

#include "reduce_kernels.inc"

}  // namespace
}  // namespace reduce_avx2

const reduce_table& reduce_table_avx2() { return reduce_avx2::table; }

}  // namespace ep

#endif
