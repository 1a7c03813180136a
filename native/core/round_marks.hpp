// Rounds of a barrier, timed one by one, in which every member shows that it has entered: one that returned at once would be the fastest of all.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "waiting.hpp"

namespace ep {

// A word of each member that all can read, on a line of its own.
struct round_marks {
  std::vector<std::pair<int32_t, uint64_t*>> members; // rank, word
  uint64_t* own;
};

// Runs rounds first + 1 .. first + rounds of `barrier()`, a wait_result, and writes the nanoseconds of each into `samples`. EP_STATUS_MISMATCH, with the rank and the
// word that was found, when a member had not entered the round that this one left; `*reached` is the round that ended it.
// Hazard: neither access to a mark orders anything, so that a barrier which lets members out before they see each other's stores fails, too.
template <class Barrier>
wait_result timed_rounds(const round_marks& marks, uint64_t first, uint64_t rounds, double* samples, uint64_t* reached, const Barrier& barrier) {
  for (uint64_t i = 0; i < rounds; ++i) {
    const uint64_t round = *reached = first + i + 1;
    std::atomic_ref<uint64_t>(*marks.own).store(round, std::memory_order_relaxed);
    const int64_t begin = clock_now_ns();
    const wait_result passed = barrier();
    samples[i] = static_cast<double>(clock_now_ns() - begin);
    if (passed.status != EP_STATUS_OK) return passed;
    for (const auto& [rank, word] : marks.members) {
      const uint64_t entered = std::atomic_ref<uint64_t>(*word).load(std::memory_order_relaxed);
      if (entered < round) return {EP_STATUS_MISMATCH, rank, entered};
    }
  }
  return {EP_STATUS_OK, any_rank, first + rounds};
}

} // namespace ep
