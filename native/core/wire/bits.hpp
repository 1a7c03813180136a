// Reads and writes the bit fields that ep/abi names with EP_BITS, in any buffer of bytes. For host code that encodes or decodes hardware's formats
// (control path, software NICs, tests); post paths write whole words.
#pragma once

#include <cstdint>

#include "ep/abi/wire.h"

namespace ep::wire {

struct bit_place {
  uint32_t offset, high, low;
  constexpr uint32_t bytes() const { return high > 31 ? 8 : 4; }
  constexpr uint64_t mask() const { return ~uint64_t{0} >> (63 - (high - low)); }
};

/** The parts of a constant made by EP_BITS. */
constexpr bit_place place_of(uint32_t field) { return {field >> 16, field >> 8 & 0xff, field & 0xff}; }

constexpr uint64_t load_big(const uint8_t *bytes, uint32_t count) {
  uint64_t value = 0;
  for (uint32_t i = 0; i < count; i++) value = value << 8 | bytes[i];
  return value;
}

constexpr void store_big(uint8_t *bytes, uint32_t count, uint64_t value) {
  for (uint32_t i = 0; i < count; i++) bytes[i] = static_cast<uint8_t>(value >> 8 * (count - 1 - i));
}

constexpr uint64_t get(const uint8_t *layout, uint32_t field) {
  const bit_place at = place_of(field);
  return load_big(layout + at.offset, at.bytes()) >> at.low & at.mask();
}

/** False if the value needs more bits than the field has; then nothing is written. */
constexpr bool put(uint8_t *layout, uint32_t field, uint64_t value) {
  const bit_place at = place_of(field);
  if (value > at.mask()) return false;
  const uint64_t word = load_big(layout + at.offset, at.bytes());
  store_big(layout + at.offset, at.bytes(), (word & ~(at.mask() << at.low)) | value << at.low);
  return true;
}

} // namespace ep::wire
