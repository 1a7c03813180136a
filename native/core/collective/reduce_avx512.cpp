#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>
#include <utility>

#include "reduce_kernels.hpp"

namespace ep {
namespace reduce_avx512 {
namespace {

#define EP_REDUCE_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

constexpr uint64_t width = 64;
typedef uint64_t raw __attribute__((vector_size(width)));
typedef float single __attribute__((vector_size(width)));

// Neither the unmasked conversions nor the casts and extractions of immintrin.h: in GCC 12 they warn of their own uninitialised temporaries.
constexpr __mmask16 everywhere = 0xffff;

EP_REDUCE_TARGET inline void f16_widen(raw bytes, single& a, single& b) {
  a = (single)_mm512_maskz_cvtph_ps(everywhere, (__m256i)__builtin_shufflevector(bytes, bytes, 0, 1, 2, 3));
  b = (single)_mm512_maskz_cvtph_ps(everywhere, (__m256i)__builtin_shufflevector(bytes, bytes, 4, 5, 6, 7));
}

EP_REDUCE_TARGET inline raw f16_narrow(single a, single b) {
  typedef uint64_t half __attribute__((vector_size(width / 2)));
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const half low = (half)_mm512_maskz_cvtps_ph(everywhere, (__m512)a, nearest);
  const half high = (half)_mm512_maskz_cvtps_ph(everywhere, (__m512)b, nearest);
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
}

EP_REDUCE_TARGET inline void stream_whole(uint8_t* to, raw value) { _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)value); }

EP_REDUCE_TARGET inline void stream_sixteens(uint8_t* to, raw value) {
  __m128i* at = reinterpret_cast<__m128i*>(to);
  _mm_stream_si128(at, (__m128i)__builtin_shufflevector(value, value, 0, 1));
  _mm_stream_si128(at + 1, (__m128i)__builtin_shufflevector(value, value, 2, 3));
  _mm_stream_si128(at + 2, (__m128i)__builtin_shufflevector(value, value, 4, 5));
  _mm_stream_si128(at + 3, (__m128i)__builtin_shufflevector(value, value, 6, 7));
}

#include "reduce_kernels.inc"

}  // namespace
}  // namespace reduce_avx512

const reduce_table& reduce_table_avx512() { return reduce_avx512::table; }

}  // namespace ep

#endif
