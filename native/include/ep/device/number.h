/* 16- and 32-bit floats as their raw carriers: load widens to fp32, store rounds to nearest, ties to even. */
#ifndef EP_DEVICE_NUMBER_H
#define EP_DEVICE_NUMBER_H

#include "config.h"

#include <string.h>

EP_MACHINE_BEGIN

namespace detail {
EP_HD uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
EP_HD float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
} // namespace detail

struct number_f32 {
  using carrier = float;
  EP_HD static float load(carrier value) { return value; }
  EP_HD static carrier store(float value) { return value; }
};

struct number_bf16 {
  using carrier = uint16_t;
  EP_HD static float load(carrier value) { return detail::bits_float(static_cast<uint32_t>(value) << 16); }
  EP_HD static carrier store(float value) {
    const uint32_t bits = detail::float_bits(value);
    /* A NaN whose payload lies in the lower half would round to infinity: keep it a quiet NaN. */
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<carrier>((bits >> 16) | 0x40u);
    return static_cast<carrier>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

struct number_f16 {
  using carrier = uint16_t;
  EP_HD static float load(carrier value) {
    const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
    const uint32_t exponent = (value >> 10) & 0x1fu;
    const uint32_t fraction = value & 0x3ffu;
    if (exponent == 31) return detail::bits_float(sign | 0x7f800000u | (fraction << 13));
    if (exponent != 0) return detail::bits_float(sign | ((exponent + 112) << 23) | (fraction << 13));
    /* Subnormal: fraction * 2^-24, exact in fp32. */
    const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return detail::bits_float(sign | detail::float_bits(magnitude));
  }
  EP_HD static carrier store(float value) {
    const uint32_t bits = detail::float_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<carrier>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) return static_cast<carrier>(sign | 0x7c00u); /* rounds to 2^16 or more: infinity */
    if (magnitude < 0x38800000u) {
      /* Below 2^-14: count of 2^-24, rounded to even by adding 0.5 ulp at that scale. */
      const float scaled = detail::bits_float(magnitude) * 16777216.0f;
      const uint32_t whole = static_cast<uint32_t>(scaled);
      const float rest = scaled - static_cast<float>(whole);
      const uint32_t up = rest > 0.5f || (rest == 0.5f && (whole & 1u)) ? 1u : 0u;
      return static_cast<carrier>(sign | (whole + up));
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<carrier>(sign | ((rounded - 0x38000000u) >> 13));
  }
};

EP_MACHINE_END

#endif
