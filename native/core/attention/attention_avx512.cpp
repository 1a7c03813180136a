#if defined(__x86_64__)

#include <immintrin.h>

#include "attention_job.hpp"

namespace ep::attention {
namespace avx512 {
namespace {

#define EP_ATTENTION_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))

typedef __m512 vec;
constexpr int width = 16;
constexpr int panel = 4;

EP_ATTENTION_TARGET inline vec splat(float x) { return _mm512_set1_ps(x); }
EP_ATTENTION_TARGET inline vec multiply_add(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }

EP_ATTENTION_TARGET inline float largest(vec v) {
  // Not _mm512_reduce_max_ps: in GCC 12 it warns of its own uninitialised temporary.
  const __m256 quarter = _mm256_max_ps(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                                       __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(quarter), _mm256_extractf128_ps(quarter, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

#include "attention_tile.inc"
#include "attention_kernels.inc"

}  // namespace
}  // namespace avx512

const kernels& avx512_kernels() {
  static constexpr kernels table{avx512::forward_item_run, avx512::backward_item_run, avx512::exp2_sixteen};
  return table;
}

}  // namespace ep::attention

#endif
