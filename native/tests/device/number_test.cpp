// Every 16-bit code both ways, and rounding at every boundary between neighbours, against arithmetic on powers of two.
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "../check.hpp"
#include "ep/device/number.h"

namespace {

struct format {
  int exponent_bits;
  int fraction_bits;
};
constexpr format f16{5, 10};
constexpr format bf16{8, 7};

// The value of a finite code by the definition of the format; infinity and NaN by name.
double value_of(const format& kind, uint32_t code) {
  const int bias = (1 << (kind.exponent_bits - 1)) - 1;
  const double sign = (code & 0x8000u) != 0 ? -1.0 : 1.0;
  const auto exponent = static_cast<int>((code & 0x7fffu) >> kind.fraction_bits);
  const double fraction = static_cast<double>(code & ((1u << kind.fraction_bits) - 1));
  if (exponent == (1 << kind.exponent_bits) - 1) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - kind.fraction_bits);
  return sign * std::ldexp(fraction + std::ldexp(1.0, kind.fraction_bits), exponent - bias - kind.fraction_bits);
}

template <class Number> void every_code(const format& kind) {
  uint32_t wrong_load = 0;
  uint32_t wrong_store = 0;
  for (uint32_t code = 0; code < 0x10000u; ++code) {
    const float loaded = Number::load(static_cast<uint16_t>(code));
    const double expected = value_of(kind, code);
    if (std::isnan(expected)) {
      if (!std::isnan(loaded)) ++wrong_load;
      const uint16_t stored = Number::store(loaded);
      // A NaN stays a NaN of the same sign, and becomes quiet.
      if (!std::isnan(value_of(kind, stored)) || (stored & 0x8000u) != (code & 0x8000u)) ++wrong_store;
      if ((stored & (1u << (kind.fraction_bits - 1))) == 0) ++wrong_store;
      continue;
    }
    if (static_cast<double>(loaded) != expected || std::signbit(loaded) != ((code & 0x8000u) != 0)) ++wrong_load;
    if (Number::store(loaded) != code) ++wrong_store;
  }
  EP_CHECK_EQ(wrong_load, 0u);
  EP_CHECK_EQ(wrong_store, 0u);
}

// Between neighbours lies one fp32 that is exactly half way: it goes to the even code, its own neighbours to theirs. Beyond the largest finite
// code lies the next power of two, which is infinity's place.
template <class Number> void every_boundary(const format& kind) {
  const uint32_t infinity = ((1u << kind.exponent_bits) - 1) << kind.fraction_bits;
  uint32_t wrong = 0;
  for (uint32_t code = 0; code < infinity; ++code) {
    const int bias = (1 << (kind.exponent_bits - 1)) - 1;
    const double next = code + 1 == infinity ? std::ldexp(1.0, bias + 1) : value_of(kind, code + 1);
    const double half = (value_of(kind, code) + next) / 2;
    const float middle = static_cast<float>(half);
    if (static_cast<double>(middle) != half) {
      ++wrong;
      continue;
    }
    const uint32_t even = (code & 1u) == 0 ? code : code + 1;
    for (const uint32_t sign : {0u, 0x8000u}) {
      const float signed_middle = sign != 0 ? -middle : middle;
      if (Number::store(signed_middle) != (sign | even)) ++wrong;
      if (Number::store(std::nextafter(signed_middle, 0.0f)) != (sign | code)) ++wrong;
      const float beyond = std::nextafter(signed_middle, sign != 0 ? -INFINITY : INFINITY);
      if (Number::store(beyond) != (sign | (code + 1))) ++wrong;
    }
  }
  EP_CHECK_EQ(wrong, 0u);
}

void every_nan_payload_bit() {
  for (uint32_t bit = 0; bit < 23; ++bit) {
    const float odd = std::bit_cast<float>(0x7f800000u | (1u << bit));
    EP_CHECK(std::isnan(ep::number_bf16::load(ep::number_bf16::store(odd))));
    EP_CHECK(std::isnan(ep::number_f16::load(ep::number_f16::store(odd))));
  }
  EP_CHECK_EQ(ep::number_f16::store(std::numeric_limits<float>::denorm_min()), 0u);
  EP_CHECK_EQ(ep::number_bf16::store(std::numeric_limits<float>::max()), 0x7f80u);
  EP_CHECK_EQ(ep::number_f16::store(std::numeric_limits<float>::max()), 0x7c00u);
}

} // namespace

int main() {
  every_code<ep::number_f16>(f16);
  every_code<ep::number_bf16>(bf16);
  every_boundary<ep::number_f16>(f16);
  every_boundary<ep::number_bf16>(bf16);
  every_nan_payload_bit();
  return ep::check::finish();
}
