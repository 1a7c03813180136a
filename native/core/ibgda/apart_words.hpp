// Signal words that only NICs add to, beside those of a memory that processors add to, too: an addition of a ConnectX is atomic against those of other requesters, not against a
// processor's. Whoever waits on the memory adds what these have grown by (signal_board.hpp).
#pragma once

#include <memory>

#include "dl/mlx5.hpp"
#include "memory.hpp"
#include "segment.hpp"
#include "signal_board.hpp"

namespace ep::ibgda {

class apart_words {
 public:
  // One for each signal slot, zero. Folded by the waits of the memory's context, and a last time when they go away.
  static result<std::unique_ptr<apart_words>> create(const symmetric_memory& memory);
  ~apart_words();
  apart_words(const apart_words&) = delete;
  apart_words& operator=(const apart_words&) = delete;

  dl::mlx5_memory memory() const { return {.address = reinterpret_cast<uint64_t>(words_->data()), .byte_length = bytes_}; }

 private:
  apart_words(std::shared_ptr<segment> words, const symmetric_memory& memory);
  std::shared_ptr<segment> words_; // a segment, because software NICs of other processes change them
  uint64_t bytes_;
  std::shared_ptr<const void> mapping_; // what is added to
  std::shared_ptr<rank_context> waits_;
  signal_board board_;
};

} // namespace ep::ibgda
