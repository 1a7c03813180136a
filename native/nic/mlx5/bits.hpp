// Big-endian words, as the wire and the rings have them. Bit fields are read by core/wire/bits.hpp.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace ep::nic {

static_assert(std::endian::native == std::endian::little, "the software NIC swaps what the wire has big-endian");

template <class Word> Word load_raw(const uint8_t* at) {
  Word word;
  std::memcpy(&word, at, sizeof word);
  return word;
}
inline uint32_t be32(uint32_t word) { return __builtin_bswap32(word); }
inline uint64_t be64(uint64_t word) { return __builtin_bswap64(word); }
inline uint32_t load_be32(const uint8_t* at) { return be32(load_raw<uint32_t>(at)); }
inline uint64_t load_be64(const uint8_t* at) { return be64(load_raw<uint64_t>(at)); }
inline void store_be32(uint8_t* at, uint32_t word) {
  word = be32(word);
  std::memcpy(at, &word, sizeof word);
}
inline void store_be64(uint8_t* at, uint64_t word) {
  word = be64(word);
  std::memcpy(at, &word, sizeof word);
}

} // namespace ep::nic
