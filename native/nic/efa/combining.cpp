#include "combining.hpp"

namespace ep::nic::efa {

void combining::store64(uint64_t writer, uint64_t address, uint64_t value) {
  const uint64_t line = address / line_bytes * line_bytes;
  const uint32_t word = static_cast<uint32_t>(address - line) / 8;
  for (combined_line& known : lines_) {
    if (known.doorbell || known.writer != writer || known.address != line) continue;
    known.data[word] = value;
    known.words |= 1u << word;
    return;
  }
  combined_line& made = lines_.emplace_back();
  made.writer = writer;
  made.address = line;
  made.order = ++orders_;
  made.data[word] = value;
  made.words = 1u << word;
}

void combining::doorbell(uint64_t writer, uint64_t address, uint32_t value) {
  combined_line& made = lines_.emplace_back();
  made.writer = writer;
  made.address = address;
  made.order = ++orders_;
  made.doorbell = true;
  made.value = value;
}

bool combining::may_leave(size_t index) const {
  const combined_line& this_one = lines_[index];
  if (!this_one.doorbell) return true;
  for (const combined_line& other : lines_) {
    if (other.doorbell && other.writer == this_one.writer && other.address == this_one.address && other.order < this_one.order) return false;
  }
  return true;
}

combined_line combining::take(size_t index) {
  const combined_line taken = lines_[index];
  lines_.erase(lines_.begin() + static_cast<std::ptrdiff_t>(index));
  return taken;
}

size_t combining::oldest(uint64_t writer) const {
  size_t found = lines_.size();
  for (size_t i = 0; i < lines_.size(); ++i) {
    if (lines_[i].writer == writer && (found == lines_.size() || lines_[i].order < lines_[found].order)) found = i;
  }
  return found;
}

void combining::forget(uint64_t begin, uint64_t bytes) {
  std::erase_if(lines_, [&](const combined_line& line) { return line.address >= begin && line.address - begin < bytes; });
}

} // namespace ep::nic::efa
