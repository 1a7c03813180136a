// Who sent a message: a keyed tag over its bytes, SipHash-2-4 (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012). Keys serve one direction between two ranks and one
// opening of a fabric; whoever lacks them can neither make a message nor change one. Nothing is encrypted, and a message that was recorded can be said again within its opening.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

namespace ep::fabric {

using tag_key = std::array<uint8_t, 16>;

struct link_keys {
  tag_key out{}; // of what is said to the peer
  tag_key in{};  // of what the peer says
};

class tagger {
 public:
  explicit tagger(const tag_key& key = {}) {
    std::memcpy(&k0_, key.data(), 8);
    std::memcpy(&k1_, key.data() + 8, 8);
  }

  uint64_t operator()(const void* bytes, size_t length) const {
    state at{k0_ ^ 0x736f6d6570736575, k1_ ^ 0x646f72616e646f6d, k0_ ^ 0x6c7967656e657261, k1_ ^ 0x7465646279746573};
    const auto* from = static_cast<const uint8_t*>(bytes);
    size_t left = length;
    for (; left >= 8; left -= 8, from += 8) {
      uint64_t word = 0;
      std::memcpy(&word, from, 8);
      at.take(word);
    }
    uint64_t last = static_cast<uint64_t>(length) << 56;
    for (size_t i = 0; i < left; ++i) last |= static_cast<uint64_t>(from[i]) << (8 * i);
    at.take(last);
    at.c ^= 0xff;
    for (int i = 0; i < 4; ++i) at.round();
    return at.a ^ at.b ^ at.c ^ at.d;
  }

 private:
  struct state {
    uint64_t a, b, c, d;
    void round() {
      a += b;
      b = std::rotl(b, 13) ^ a;
      a = std::rotl(a, 32);
      c += d;
      d = std::rotl(d, 16) ^ c;
      a += d;
      d = std::rotl(d, 21) ^ a;
      c += b;
      b = std::rotl(b, 17) ^ c;
      c = std::rotl(c, 32);
    }
    void take(uint64_t word) {
      d ^= word;
      round();
      round();
      a ^= word;
    }
  };
  uint64_t k0_ = 0;
  uint64_t k1_ = 0;
};

} // namespace ep::fabric
