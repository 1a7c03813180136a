// The signal words of one memory, made from what a NIC can leave behind whose additions to them would not be atomic against those of processors, or who cannot add at all. What has
// come by the NIC,
//
//   total[s] = ticks[s] + the sum over all sources of cells[source][s]     modulo 2^64
//
// is added to word[s] as it grows: others may add there, too (a memory that is over another).
//
// Of an EFA, ticks[s]: how many WRITEs have arrived at the queue pair of slot s, as the NIC counts them: 31 bits that wrap. A WRITE that goes there brings bytes and signal at once, since it
// ticks after its last byte; the value is a count, so "add 1" is one WRITE.
// cells[source][s]: what `source` has added there besides, in all: a word of its own that it overwrites by WRITEs of 8 bytes, one at a time, each after all that it tells of has
// completed. For values that no count can carry.
//
// Of an mlx5, there are no ticks, and one row of cells: the words that NICs add to, all of them atomic against each other.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "ep/abi/efa_cqe.h"

namespace ep {

// One counter as the NIC is told of it: two words of 8 bytes.
struct counter_words {
  uint64_t completed;
  uint64_t failed;
};

class signal_board {
 public:
  // `words`: one for each slot, in this process. `ticks`: the same, or none. `cells`: uint64_t[sources * slots], those of source 0 first; both zero now.
  signal_board(std::span<uint64_t> words, std::span<const counter_words> ticks, std::span<const uint64_t> cells);

  // Brings the words up to date: any thread, at any time, and nothing is lost however rarely, as long as fewer than 2^31 WRITEs arrive in between. Acquires what the NIC released before it changed a count or a cell.
  void fold();

 private:
  std::mutex mutex_;
  std::span<uint64_t> words_;
  std::span<const counter_words> ticks_;
  std::span<const uint64_t> cells_;
  std::vector<uint64_t> widened_; // by slot: the NIC's count as if it had 64 bits
  std::vector<uint64_t> added_;   // by slot: of the total, what the word has
};

} // namespace ep
