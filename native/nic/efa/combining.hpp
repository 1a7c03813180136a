// The write-combining buffers of posters. Stores to a device's registers stay there, each poster's its own, until they leave: by themselves at any time and in any order, or
// all of one poster's by its fence. A model of what may happen, not of what a processor does: it says whether a protocol has its fences where they are needed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ep::nic::efa {

// Stores of one poster within one aligned line, or one doorbell.
struct combined_line {
  uint64_t writer = 0;
  uint64_t address = 0; // of the line, or of the doorbell
  uint64_t order = 0;   // of its first store: what a fence brings out, it brings out by this
  bool doorbell = false;
  uint32_t value = 0;    // of a doorbell
  uint32_t words = 0;    // of a line: a bit for each 8 bytes that were stored
  std::array<uint64_t, 8> data{};
};

inline constexpr uint64_t line_bytes = 64;

class combining {
 public:
  void store64(uint64_t writer, uint64_t address, uint64_t value);
  // Doorbells of one poster to one address leave in their order.
  void doorbell(uint64_t writer, uint64_t address, uint32_t value);

  size_t size() const { return lines_.size(); }
  const combined_line& at(size_t index) const { return lines_[index]; }
  // False: an older doorbell of the same poster to the same address has to leave before.
  bool may_leave(size_t index) const;
  combined_line take(size_t index);
  // The first entry of this poster in order; size() if there is none.
  size_t oldest(uint64_t writer) const;
  // Forgets what is meant for begin .. begin + bytes - 1.
  void forget(uint64_t begin, uint64_t bytes);

 private:
  std::vector<combined_line> lines_;
  uint64_t orders_ = 0;
};

} // namespace ep::nic::efa
