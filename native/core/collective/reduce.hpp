// Reductions of the collectives: element by element over arrays of several ranks, folded in the order in which the arrays are given.
//
// Every instruction set gives the same bits, as does the definition in packages/collectives/src/reduce-op.ts:
// - Integers wrap modulo 2^bits.
// - f32 and f64 are rounded after every step. f16 and bf16 are widened to f32, folded there and rounded once, to nearest even.
// - avg is the sum, then one division by `count`; of f16 and bf16 in f32, before they are rounded.
// - premul_sum multiplies each element by `factor`, rounds the product, then sums. But for f64, `factor` is first rounded to f32.
// - A NaN that sum, product, avg or premul_sum give is the canonical quiet one, without sign or payload (f64 0x7ff8000000000000, f32 0x7fc00000,
//   f16 0x7e00, bf16 0x7fc0): which NaN an addition keeps, and the sign of inf - inf, depend on the machine.
// - min and max give the first NaN among the elements, with its sign and payload, made quiet. -0 is less than +0.
// - All of this holds for one source, too.
#pragma once

#include <cstdint>

namespace ep {

enum class reduce_op : uint32_t { sum = 0, avg, product, min, max, band, bor, bxor, premul_sum };

enum class element_type : uint32_t { f64, f32, f16, bf16, i64, u64, i32, u32, i16, u16, i8, u8, f8e4m3, f8e5m2, ue8m0 };

uint32_t element_bytes(element_type type);

/// True if `op` takes elements of `type`. The functions below end the process if it does not.
bool reduces(reduce_op op, element_type type);

/// dst[i] = fold of srcs[0][i] .. srcs[count - 1][i], ascending; `count` is at least 1. `dst` may be one of the sources, otherwise it overlaps none.
/// `factor` is read by premul_sum alone. With `past_caches`, for what does not fit them, the result goes past the caches where that is faster, and is visible to whoever sees a later release
/// of this thread.
void reduce_elements(void* dst, const void* const* srcs, int count, uint64_t elements, element_type type, reduce_op op, double factor, bool past_caches);

/// The same into each of `dst_count` >= 1 destinations, none of which overlaps another; each may be one of the sources. Every source element is read once.
/// Which of them go past the caches, if any: the first; others that are like it modulo 64 bytes, or, with more stores, modulo 16. What remains goes
/// through the caches, as do calls of less than about 1 KiB.
void reduce_push(void* const* dsts, int dst_count, const void* const* srcs, int count, uint64_t elements, element_type type, reduce_op op, double factor,
                 bool past_caches);

}  // namespace ep
