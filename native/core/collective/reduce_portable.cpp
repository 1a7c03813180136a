// Sixteen bytes of whatever the compiler's base target offers: SSE2 on x86-64, NEON on arm64, scalar code elsewhere.
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "reduce_kernels.hpp"

namespace ep {
namespace reduce_portable {
namespace {

#define EP_REDUCE_TARGET

constexpr uint64_t width = 16;
typedef uint64_t raw __attribute__((vector_size(width)));
typedef float single __attribute__((vector_size(width)));
#if defined(__aarch64__)
inline void f16_widen(raw bytes, single& a, single& b) {
  const float16x8_t halves = (float16x8_t)bytes;
  a = (single)vcvt_f32_f16(vget_low_f16(halves));
  b = (single)vcvt_high_f32_f16(halves);
}

inline raw f16_narrow(single a, single b) { return (raw)vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)a), (float32x4_t)b); }
#else
typedef int32_t bits __attribute__((vector_size(width)));

inline bits splat(int32_t x) { return x - bits{}; }

// The values of number_f16 (ep/device/number.h), without branches: shifted up, a half has a float's fraction, and 2^112 sets the exponent right, that of
// subnormal halves as well.
inline single f16_widen_words(bits half) {
  const bits magnitude = (half & 0x7fff) << 13;
  const bits finite = (bits)((single)magnitude * 0x1p112f);
  const bits value = magnitude >= 0x7c00 << 13 ? magnitude | 0x7f800000 : finite;
  return (single)(value | ((half & 0x8000) << 16));
}

// Knows canonical NaNs only.
inline bits f16_narrow_words(single from) {
  const bits all = (bits)from;
  const bits magnitude = all & 0x7fffffff;
  const bits normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000) >> 13;
  // Below 2^-14: the last place of 0.5f is 2^-24, that of the subnormals, so the addition rounds there.
  const bits subnormal = (bits)((single)magnitude + 0.5f) - 0x3f000000;
  bits half = magnitude < 0x38800000 ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? splat(0x7c00) : half;  // rounds to 2^16 or more: infinity
  half = magnitude > 0x7f800000 ? splat(0x7e00) : half;
  return half | ((all >> 16) & 0x8000);
}

inline void f16_widen(raw bytes, single& a, single& b) {
  const bits both = (bits)bytes;
  a = f16_widen_words(both & 0xffff);
  b = f16_widen_words((both >> 16) & 0xffff);
}

inline raw f16_narrow(single a, single b) { return (raw)(f16_narrow_words(a) | (f16_narrow_words(b) << 16)); }
#endif

#if defined(__x86_64__)
inline void stream_whole(uint8_t* to, raw value) { _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)value); }
#else
inline void stream_whole(uint8_t* to, raw value) { *reinterpret_cast<raw*>(to) = value; }
#endif
inline void stream_sixteens(uint8_t* to, raw value) { stream_whole(to, value); }

#include "reduce_kernels.inc"

}  // namespace
}  // namespace reduce_portable

const reduce_table& reduce_table_portable() { return reduce_portable::table; }

}  // namespace ep
