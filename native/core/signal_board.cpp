#include "signal_board.hpp"

#include <atomic>

namespace ep {
namespace {

uint64_t load(const uint64_t& word) { return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(word)).load(std::memory_order_acquire); }

} // namespace

signal_board::signal_board(std::span<uint64_t> words, std::span<const counter_words> ticks, std::span<const uint64_t> cells)
    : words_(words), ticks_(ticks), cells_(cells), widened_(ticks.size()), added_(words.size()) {}

void signal_board::fold() {
  const std::lock_guard lock(mutex_);
  const size_t slots = words_.size();
  for (size_t slot = 0; slot < slots; ++slot) {
    uint64_t total = 0;
    if (!ticks_.empty()) {
      const uint64_t counted = load(ticks_[slot].completed);
      widened_[slot] += (counted - widened_[slot]) & EP_EFA_COUNTER_MASK;
      total = widened_[slot];
    }
    for (size_t at = slot; at < cells_.size(); at += slots) total += load(cells_[at]);
    if (total == added_[slot]) continue;
    std::atomic_ref<uint64_t>(words_[slot]).fetch_add(total - added_[slot], std::memory_order_acq_rel);
    added_[slot] = total;
  }
}

} // namespace ep
