#include "cast.hpp"

#include <cstring>
#include <type_traits>
#include <vector>

namespace ep::moe {
namespace {

struct row_table {
  void (*cast[3])(const void* src, uint64_t hidden, uint32_t payload, uint8_t* dst);  // by EP_MOE_F32, F16, BF16, less one
  void (*sum[3])(const ep_moe_sum& sum, const ep_moe_term* terms, uint32_t count);
};

namespace portable {
#define EP_MOE_TARGET
#define EP_MOE_VECTOR 16
#include "cast_kernels.inc"
}  // namespace portable

#if defined(__x86_64__)
#undef EP_MOE_TARGET
#undef EP_MOE_FUNCTION
#undef EP_MOE_MEMBER
#undef EP_MOE_VECTOR
namespace avx2 {
#define EP_MOE_TARGET __attribute__((target("avx2")))
#define EP_MOE_VECTOR 32
#include "cast_kernels.inc"
}  // namespace avx2

#undef EP_MOE_TARGET
#undef EP_MOE_FUNCTION
#undef EP_MOE_MEMBER
#undef EP_MOE_VECTOR
namespace avx512 {
// Only gcc takes the wish for wide vectors here; sums have them by their types.
#if defined(__clang__)
#define EP_MOE_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define EP_MOE_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#define EP_MOE_VECTOR 64
#include "cast_kernels.inc"
}  // namespace avx512
#endif

const row_table& table_of(isa which) {
#if defined(__x86_64__)
  if (which == isa::avx512) return avx512::table;
  if (which == isa::avx2) return avx2::table;
#endif
  (void)which;
  return portable::table;
}

const row_table& best() {
  static const row_table& chosen = table_of(isa_usable(isa::avx512) ? isa::avx512 : isa_usable(isa::avx2) ? isa::avx2 : isa::portable);
  return chosen;
}

}  // namespace

bool isa_usable(isa which) {
  if (which == isa::portable) return true;
#if defined(__x86_64__)
  if (which == isa::avx2) return __builtin_cpu_supports("avx2") != 0;
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
         __builtin_cpu_supports("avx512vl") != 0;
#else
  return false;
#endif
}

void cast_row_with(isa which, uint32_t dtype, const void* src, uint64_t hidden, uint32_t payload, void* dst) {
  table_of(which).cast[dtype - 1](src, hidden, payload, static_cast<uint8_t*>(dst));
}

void sum_row_with(isa which, const ep_moe_sum& sum, const ep_moe_term* terms, uint32_t count) {
  table_of(which).sum[sum.dtype - 1](sum, terms, count);
}

}  // namespace ep::moe

extern "C" void ep_moe_cast_row(uint32_t dtype, const void* src, uint64_t hidden, uint32_t payload, void* dst) {
  ep::moe::best().cast[dtype - 1](src, hidden, payload, static_cast<uint8_t*>(dst));
}

extern "C" void ep_moe_sum_row(const ep_moe_sum* sum, const ep_moe_term* terms, uint32_t count) {
  ep::moe::best().sum[sum->dtype - 1](*sum, terms, count);
}

extern "C" ep_moe_term* ep_moe_terms(uint32_t count) {
  thread_local std::vector<ep_moe_term> terms;
  if (terms.size() < count) terms.resize(count);
  return terms.data();
}
