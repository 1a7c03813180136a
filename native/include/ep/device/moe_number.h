/* The numbers of quantised payloads: e4m3 with a scale for each 128 channels, and LogFMT-10. Every operation on floats is one IEEE operation in
 * fp32, written out one by one, so that all machines give the same bits and @ep/plan/reference can say the same.
 *
 * Hazard: host code that includes this must be compiled with -ffp-contract=off wherever the target has a fused multiply-add, which rounds once
 * where these formulas round twice. CUDA's contraction is kept out by `product` and `sum`. */
#ifndef EP_DEVICE_MOE_NUMBER_H
#define EP_DEVICE_MOE_NUMBER_H

#include "number.h"

EP_MACHINE_BEGIN

namespace detail {
#if defined(__CUDACC__)
EP_HD float product(float a, float b) { return __fmul_rn(a, b); }
EP_HD float sum(float a, float b) { return __fadd_rn(a, b); }
EP_HD float quotient(float a, float b) { return __fdiv_rn(a, b); }
#else
EP_HD float product(float a, float b) { return a * b; }
EP_HD float sum(float a, float b) { return a + b; }
EP_HD float quotient(float a, float b) { return a / b; }
#endif
} // namespace detail

constexpr uint32_t moe_block_channels = 128; /* channels that share a scale */
constexpr uint32_t moe_infinity_bits = 0x7f800000u;

/* OCP E4M3: largest 448, no infinity, NaN is 0x7f. Stores to nearest even, saturating. */
struct number_e4m3 {
  using carrier = uint8_t;
  EP_HD static float load(carrier code) {
    const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
    const uint32_t magnitude = code & 0x7fu;
    const float subnormal = static_cast<float>(magnitude) * 0.001953125f; /* 2^-9, exact */
    uint32_t bits = (magnitude << 20) + (120u << 23);
    bits = magnitude < 8 ? detail::float_bits(subnormal) : bits;
    bits = magnitude == 0x7f ? 0x7fc00000u : bits;
    return detail::bits_float(sign | bits);
  }
  EP_HD static carrier store(float value) {
    const uint32_t bits = detail::float_bits(value);
    const uint32_t all = bits & 0x7fffffffu;
    const uint32_t magnitude = all > 0x43e00000u ? 0x43e00000u : all; /* 448 */
    const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
    /* Below 2^-6 the last place is 2^-9, which is the last place of 2^14 in fp32: the addition rounds there. */
    const uint32_t subnormal = detail::float_bits(detail::sum(detail::bits_float(magnitude), 16384.0f)) - 0x46800000u;
    uint32_t code = magnitude < 0x3c800000u ? subnormal : normal;
    code = all > moe_infinity_bits ? 0x7fu : code;
    return static_cast<carrier>(((bits >> 24) & 0x80u) | code);
  }
  /* Two codes, the lower one in the lower byte. */
  EP_HD static uint32_t store_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    /* The same bits for all floats but NaN, whose sign it drops (tests/cuda/moe_gpu_test.cpp goes through all of them). */
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return store(low) | static_cast<uint32_t>(store(high)) << 8;
#endif
  }
};

/* What the 128 channels of a block are multiplied with on their way to e4m3, and what codes are multiplied with on their way back. */
struct e4m3_scale {
  float scale;
  float inverse;
};

/* `largest`: bits of the block's largest magnitude, finite. Magnitudes below 1e-4 share its scale. `power`: the least power of two that maps no channel
 * beyond 448; else both factors are quotients in fp32, and not each other's inverse. */
EP_HD e4m3_scale e4m3_scale_of(uint32_t largest, bool power) {
  constexpr float floor = 1e-4f;
  const float amax = detail::bits_float(largest) > floor ? detail::bits_float(largest) : floor;
  if (!power) return {detail::quotient(amax, 448.0f), detail::quotient(448.0f, amax)};
  const uint32_t bits = detail::float_bits(amax);
  const uint32_t exponent = (bits >> 23) - 8 + ((bits & 0x7fffffu) > 0x600000u ? 1u : 0u);
  return {detail::bits_float(exponent << 23), detail::bits_float((254u - exponent) << 23)};
}

/* A power of two, 2^(code - 127), in a byte; 0xff is NaN. */
EP_HD uint8_t ue8m0_of(float power) {
  const uint32_t bits = detail::float_bits(power);
  return bits >= moe_infinity_bits ? uint8_t{0xff} : static_cast<uint8_t>(bits >> 23);
}
EP_HD float ue8m0_load(uint8_t code) {
  return detail::bits_float(code == 0xff ? 0x7fc00000u : code == 0 ? 0x400000u : static_cast<uint32_t>(code) << 23);
}

/* log2 of a positive finite number, to 2e-7 of the larger of 1 and the result. The mantissa goes to [sqrt(1/2), sqrt(2)), there
 * log2(m) = 2 / ln(2) * (s + s^3/3 + s^5/5 + s^7/7 + s^9/9), s = (m - 1) / (m + 1). */
EP_HD float moe_log2(float value) {
  const bool tiny = detail::float_bits(value) < 0x800000u;
  const float normal = tiny ? detail::product(value, 16777216.0f) : value;
  const uint32_t bits = detail::float_bits(normal);
  /* 0x3f3504f3 = sqrt(1/2); + 127 keeps the shifted difference from being negative. */
  const uint32_t raised = (bits - 0x3f3504f3u + (127u << 23)) >> 23;
  const float mantissa = detail::bits_float(bits - (raised << 23) + (127u << 23));
  const float exponent = static_cast<float>(static_cast<int32_t>(raised) - (tiny ? 151 : 127));
  const float s = detail::quotient(detail::sum(mantissa, -1.0f), detail::sum(mantissa, 1.0f));
  const float z = detail::product(s, s);
  float series = 0.32059890f;                             /* 2 / (9 ln 2) */
  series = detail::sum(detail::product(series, z), 0.41219858f); /* 2 / (7 ln 2) */
  series = detail::sum(detail::product(series, z), 0.57707802f); /* 2 / (5 ln 2) */
  series = detail::sum(detail::product(series, z), 0.96179669f); /* 2 / (3 ln 2) */
  series = detail::sum(detail::product(series, z), 2.8853900f);  /* 2 / ln 2 */
  return detail::sum(exponent, detail::product(series, s));
}

/* 2^value for -170 < value < 128, to 3e-7 of the result: 2^n by the exponent, in two steps since n may be below -126, and Taylor's series of 2^f,
 * |f| <= 1/2. */
EP_HD float moe_exp2(float value) {
  constexpr float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  const float shifted = detail::sum(value, magic);
  const float f = detail::sum(value, -detail::sum(shifted, -magic));
  const int32_t n = static_cast<int32_t>(detail::float_bits(shifted)) - 0x4b400000;
  float series = 1.5403530e-4f;
  series = detail::sum(detail::product(series, f), 1.3333558e-3f);
  series = detail::sum(detail::product(series, f), 9.6181291e-3f);
  series = detail::sum(detail::product(series, f), 5.5504109e-2f);
  series = detail::sum(detail::product(series, f), 0.24022651f);
  series = detail::sum(detail::product(series, f), 0.69314718f);
  series = detail::sum(detail::product(series, f), 1.0f);
  const int32_t half = n / 2;
  const float once = detail::product(series, detail::bits_float(static_cast<uint32_t>(half + 127) << 23));
  return detail::product(once, detail::bits_float(static_cast<uint32_t>(n - half + 127) << 23));
}

/* LogFMT-10 of a block: a sign bit above 9 bits of magnitude. Magnitude 0 is zero, magnitude m is 2^(low + (m - 1) * step), evenly spaced in the logarithm from
 * the smallest magnitude that is not 0 (but no less than 2^-32 of the largest) to the largest. Rounding is to nearest in the linear value:
 * `rise` moves the middle between two codes from the geometric to the arithmetic mean. */
struct logfmt_block {
  float low;
  float step;
  float inverse; /* 1 / step; 0 where all magnitudes are equal */
  float rise;
  uint32_t least; /* code of the smallest magnitude that is not to become 0: 1 unless `low` was raised */
};

/* `largest`, `smallest`: bf16 codes of magnitudes, as they travel; finite, smallest > 0 unless both are 0. */
EP_HD logfmt_block logfmt_block_of(uint16_t largest, uint16_t smallest) {
  if (largest == 0) return {0.0f, 0.0f, 0.0f, 0.0f, 0};
  const float high = moe_log2(number_bf16::load(largest));
  const float lowest = moe_log2(number_bf16::load(smallest));
  const float bound = detail::sum(high, -32.0f);
  const bool raised = lowest < bound;
  const float low = raised ? bound : lowest;
  const float step = detail::quotient(detail::sum(high, -low), 510.0f);
  if (!(step > 0.0f)) return {low, 0.0f, 0.0f, 1.0f, 1};
  const float inverse = detail::quotient(1.0f, step);
  const float middle = moe_log2(detail::product(detail::sum(1.0f, moe_exp2(step)), 0.5f));
  return {low, step, inverse, detail::sum(2.0f, -detail::product(middle, inverse)), raised ? 0u : 1u};
}

/* `value`: a bf16 code of the block. */
EP_HD uint32_t logfmt_encode(const logfmt_block& block, uint16_t value) {
  const uint32_t sign = (value & 0x8000u) >> 6;
  const uint16_t magnitude = static_cast<uint16_t>(value & 0x7fffu);
  const float log = moe_log2(number_bf16::load(magnitude));
  float place = detail::sum(detail::product(detail::sum(log, -block.low), block.inverse), block.rise);
  place = place > 0.0f ? place : 0.0f;
  place = place < 511.0f ? place : 511.0f;
  uint32_t code = static_cast<uint32_t>(static_cast<int32_t>(place));
  code = code < block.least ? block.least : code;
  return sign | (magnitude == 0 ? 0u : code);
}

EP_HD float logfmt_decode(const logfmt_block& block, uint32_t code) {
  const uint32_t sign = (code & 0x200u) << 22;
  const uint32_t magnitude = code & 0x1ffu;
  const float log = detail::sum(detail::product(static_cast<float>(static_cast<int32_t>(magnitude) - 1), block.step), block.low);
  const float value = magnitude == 0 ? 0.0f : moe_exp2(log);
  return detail::bits_float(sign | detail::float_bits(value));
}

EP_MACHINE_END

#endif
