// Shared segments without names: memfds that peers open through /proc/<pid>/fd. Nothing is left behind after SIGKILL at any moment.
#pragma once

#include <cstdint>
#include <memory>

#include "ep/abi/segment.h"
#include "status.hpp"

namespace ep {

// One mapping. All ranks of a process share it (registry by inode and nonce): fewer mappings, and TSan sees one address for one word.
class segment {
 public:
  ~segment();
  segment(const segment&) = delete;
  segment& operator=(const segment&) = delete;

  // Refuses what would not fit before anything is allocated; commits and pre-faults every page, so that no SIGBUS can come later; seals the size.
  static result<std::shared_ptr<segment>> create(uint64_t data_bytes);
  // Verifies inode, size, version and nonce: fd numbers and pids are reused.
  static result<std::shared_ptr<segment>> open(const ep_segment_handle& handle);

  // Of one's own: other memory with the same contents at the same addresses, under another handle. Who has mapped the old memory in another process keeps that.
  // Nobody may write to it meanwhile.
  result<nothing> move();

  // The segment of this process that holds all of these bytes; null if none does.
  static std::shared_ptr<segment> containing(const void* address, uint64_t bytes);

  uint8_t* data() const { return base_ + EP_SEGMENT_DATA_OFFSET; }
  uint64_t data_bytes() const { return data_bytes_; }
  const ep_segment_handle& handle() const { return handle_; }

 private:
  segment() = default;
  uint8_t* base_ = nullptr;
  uint64_t data_bytes_ = 0;
  int fd_ = -1; // kept open by the creator: peers open it through /proc
  ep_segment_handle handle_{};
};

// Mappings alive in this process: leak tests count them.
uint64_t segment_count();

} // namespace ep
