#if defined(__x86_64__)

#include <immintrin.h>

#include "attention_job.hpp"

namespace ep::attention {
namespace avx2 {
namespace {

#define EP_ATTENTION_TARGET __attribute__((target("avx2,fma")))

typedef __m256 vec;
constexpr int width = 8;
constexpr int panel = 2;

EP_ATTENTION_TARGET inline vec splat(float x) { return _mm256_set1_ps(x); }
EP_ATTENTION_TARGET inline vec multiply_add(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }

EP_ATTENTION_TARGET inline float largest(vec v) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

#include "attention_tile.inc"
#include "attention_kernels.inc"

}  // namespace
}  // namespace avx2

const kernels& avx2_kernels() {
  static constexpr kernels table{avx2::forward_item_run, avx2::backward_item_run, avx2::exp2_sixteen};
  return table;
}

}  // namespace ep::attention

#endif
