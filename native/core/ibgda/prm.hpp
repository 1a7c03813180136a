// The bit fields of abi/mlx5_prm.h in the spans that commands are: checked against the layout's size in debug builds.
#pragma once

#include <cassert>
#include <cstdint>
#include <span>

#include "ep/abi/mlx5_prm.h"
#include "wire/bits.hpp"

namespace ep::ibgda {

// `layout` begins where the layout of the field begins: prm_part() goes from a command into its context.
inline uint64_t prm_get(std::span<const uint8_t> layout, uint32_t field) {
  assert(wire::place_of(field).offset + wire::place_of(field).bytes() <= layout.size());
  return wire::get(layout.data(), field);
}

// The caller has checked that the value fits its field.
inline void prm_set(std::span<uint8_t> layout, uint32_t field, uint64_t value) {
  assert(wire::place_of(field).offset + wire::place_of(field).bytes() <= layout.size());
  [[maybe_unused]] const bool fits = wire::put(layout.data(), field, value);
  assert(fits);
}

inline std::span<uint8_t> prm_part(std::span<uint8_t> whole, uint32_t at, uint32_t bytes) { return whole.subspan(at, bytes); }

} // namespace ep::ibgda
