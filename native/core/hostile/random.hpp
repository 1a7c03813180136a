// SplitMix64 (Steele, Lea, Flood 2014): small, seeded, the same on every machine.
#pragma once

#include <cstdint>

namespace ep {

class random_source {
 public:
  explicit random_source(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15ull;
    uint64_t mixed = (state_ ^ (state_ >> 30)) * 0xbf58476d1ce4e5b9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
    return mixed ^ (mixed >> 31);
  }
  // In 0..bound-1; 0 for bound 0. The bias of the modulus does not matter to a scheduler.
  uint64_t below(uint64_t bound) { return bound == 0 ? 0 : next() % bound; }

 private:
  uint64_t state_;
};

} // namespace ep
