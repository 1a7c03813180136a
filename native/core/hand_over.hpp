// Copies into memory that other cores read: chunks, slots and pools of groups.
#pragma once

#include <cstdint>

#include "ep/device/copy.h"

namespace ep {

/// True where a store to a line that another core's cache holds may cost more than the way over memory. On AMD's Zen each such line is taken back one at a time (2.3 GB/s through the caches on a Zen 4,
/// 30 past them, at the same speed for the reader; between cores of a Zen 5 that share their last cache three times as slow as lines that the reader's has let go); elsewhere several at a time.
bool takes_lines_back_slowly();
/// The same, for so many bytes: of few, a fence costs as much.
bool hands_over_past_caches(uint64_t bytes);

/// Which of two ways is faster, by what each took when it was last tried: where two cores lie to each other nobody says, and a hypervisor moves them.
class faster_way {
 public:
  /// The other way is tried once in so many choices.
  static constexpr uint32_t trial = 256;

  /// Whether to go past the caches now.
  bool choose() {
    if (++choices_ % trial == first_trial) return !past_;
    return past_;
  }
  void took(bool past, uint64_t ticks, uint64_t bytes) {
    float& known = cost_[past ? 1 : 0];
    const float now = static_cast<float>(ticks) / static_cast<float>(bytes);
    // HAZARD: a thread that lost its core took long, whichever way it went: what is known grows by steps, and falls at once.
    known = now < known || known < 0 ? now : now < known * growth ? now : known * growth;
    if (cost_[0] >= 0 && cost_[1] >= 0) past_ = cost_[1] <= cost_[0];
  }

 private:
  static constexpr uint32_t first_trial = 16;
  static constexpr float growth = 1.5f;
  float cost_[2] = {-1, -1}; // ticks a byte: through the caches, past them; negative: not tried yet
  uint32_t choices_ = 0;
  bool past_ = true;
};

/// A clock for faster_way. 0 where hands_over_past_caches() is false.
uint64_t hand_over_ticks();

/// By the way that was faster for this thread. Visible to whoever sees a later release of it.
void hand_over(uint8_t* to, const uint8_t* from, uint64_t bytes);
/// The same by a way that the caller has chosen.
void hand_over(uint8_t* to, const uint8_t* from, uint64_t bytes, bool past);

} // namespace ep
