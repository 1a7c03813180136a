// Between the dispatcher (reduce.cpp) and the kernels, which are compiled once for each instruction set.
#pragma once

#include <array>
#include <cstddef>

#include "reduce.hpp"

namespace ep {

enum class reduce_isa : uint32_t { portable, avx2, avx512 };

bool reduce_isa_usable(reduce_isa isa);
reduce_isa reduce_isa_best();

/// How a call goes over its arrays: through the caches; through them in rows, which is two places of every array in turns, so that the hardware's prefetchers follow twice as many streams; past them.
enum class reduce_walk : uint32_t { caches, rows, past };

/// reduce_push by an instruction set that is usable here.
void reduce_push_with(reduce_isa isa, reduce_walk walk, void* const* dsts, int dst_count, const void* const* srcs, int count, uint64_t elements,
                      element_type type, reduce_op op, double factor);

inline constexpr std::size_t reduce_op_count = 9;
inline constexpr std::size_t element_type_count = 15;

constexpr bool reduce_takes(reduce_op op, element_type type) {
  if (type >= element_type::f8e4m3) return false;
  const bool is_float = type <= element_type::bf16;
  switch (op) {
    case reduce_op::avg:
    case reduce_op::premul_sum: return is_float;
    case reduce_op::band:
    case reduce_op::bor:
    case reduce_op::bxor: return !is_float;
    default: return true;
  }
}

struct reduce_job {
  void* const* dsts;
  int dst_count;
  const void* const* srcs;
  int count;
  double factor;
  uint64_t origin;  // the offset in the sources at which the destinations begin
};

/// Reduces bytes `from` .. `to` of the sources, whole elements.
using reduce_kernel = void (*)(const reduce_job& job, uint64_t from, uint64_t to);

/// What is streamed at a time.
inline constexpr uint64_t reduce_block = 1024;

struct reduce_table {
  /// By reduce_index; null if the op does not take the type.
  std::array<reduce_kernel, reduce_op_count * element_type_count> kernels;
  /// Runs `kernel` on bytes `from` .. `to`, a multiple of reduce_block, past the caches where the destinations' places allow. `job.origin` is 0, and
  /// `from` is on a 64-byte line of the first destination. Not fenced.
  void (*stream)(reduce_kernel kernel, const reduce_job& job, uint64_t from, uint64_t to);
};

constexpr std::size_t reduce_index(reduce_op op, element_type type) {
  return static_cast<std::size_t>(op) * element_type_count + static_cast<std::size_t>(type);
}

const reduce_table& reduce_table_portable();
#if defined(__x86_64__)
const reduce_table& reduce_table_avx2();
const reduce_table& reduce_table_avx512();
#endif

}  // namespace ep
