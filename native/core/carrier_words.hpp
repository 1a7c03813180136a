#pragma once

#include "carrier.hpp"

namespace ep {

// What members share is cut in whole lines of the cache.
namespace carried_lines {
constexpr uint64_t line = 64;
constexpr uint64_t down(uint64_t bytes) { return bytes / line * line; }
constexpr uint64_t up(uint64_t bytes) { return (bytes + line - 1) / line * line; }
} // namespace carried_lines

// What a member of a carrier says to its mates, at the beginning of its places. Each word only grows.

struct carrier::progress_words {
  uint64_t whole;  // as staged, of all-to-alls that go in one step
  uint64_t staged; // steps of which the mates' shares, or all blocks, are there
  uint64_t read;   // steps of whose shares this one has folded its own
  uint64_t ready;  // steps of which its share of the result is there
  uint64_t taken;  // steps of which it has all
  uint64_t done;   // calls of which it has its data
  uint64_t closed; // of the first member of a host: calls of which all members have theirs
};

} // namespace ep
