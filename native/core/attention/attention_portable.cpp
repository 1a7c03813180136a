// Four lanes of whatever the compiler's base target offers: SSE2 on x86-64, NEON on arm64, scalar code elsewhere.
#include "attention_job.hpp"

namespace ep::attention {
namespace portable {
namespace {

#define EP_ATTENTION_TARGET

typedef float vec __attribute__((vector_size(16)));
constexpr int width = 4;
constexpr int panel = 2;

inline vec splat(float x) { return vec{x, x, x, x}; }
inline vec multiply_add(vec a, vec b, vec c) { return a * b + c; }

inline float largest(vec v) {
  const float low = v[0] > v[1] ? v[0] : v[1];
  const float high = v[2] > v[3] ? v[2] : v[3];
  return low > high ? low : high;
}

#include "attention_tile.inc"
#include "attention_kernels.inc"

}  // namespace
}  // namespace portable

const kernels& portable_kernels() {
  static constexpr kernels table{portable::forward_item_run, portable::backward_item_run, portable::exp2_sixteen};
  return table;
}

}  // namespace ep::attention
