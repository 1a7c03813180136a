// Shared segments without names: memfds that peers open through /proc/<pid>/fd. Nothing is left behind after SIGKILL at any moment.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "ep/abi/segment.h"
#include "status.hpp"

namespace ep {

// One mapping. All ranks of a process share it (registry by inode and nonce): fewer mappings, and TSan sees one address for one word.
class segment : public std::enable_shared_from_this<segment> {
 public:
  ~segment();
  segment(const segment&) = delete;
  segment& operator=(const segment&) = delete;

  // Refuses what would not fit before anything is allocated; commits and pre-faults every page, so that no SIGBUS can come later; seals the size.
  static result<std::shared_ptr<segment>> create(uint64_t data_bytes);
  // Verifies inode, size, version and nonce: fd numbers and pids are reused.
  static result<std::shared_ptr<segment>> open(const ep_segment_handle& handle);

  // Memory in the place of a segment whose maker is not here: zeroes that nobody else sees, without a handle, until replace().
  static result<std::shared_ptr<segment>> stand_in(uint64_t data_bytes);
  // From here on this shows another segment of as many bytes, at the same addresses: that of a rank that comes in the place of a dead one. Whoever holds an address sees the
  // one or the other, never nothing. Another rank of this process may have done it before: then it does nothing. EP_STATUS_BUSY while the maker of the old one, in this
  // process, is there.
  result<nothing> replace(const ep_segment_handle& handle);
  // From here on this shows what a stand-in of as many bytes shows, which is used up by that. EP_STATUS_BUSY as of replace().
  result<nothing> vacate(segment& stand_in);
  // What this shows at this moment. Another rank of this process may be replacing it.
  bool shows(const ep_segment_handle& handle) const;
  // By the maker's last use of it. HAZARD: what a maker still did with its segment after replace(), it would do to its successor's.
  void abandon() { abandoned_.store(true, std::memory_order_release); }
  bool replaceable() const { return fd_ < 0 || abandoned_.load(std::memory_order_acquire); }

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
  std::atomic<bool> abandoned_{false};
};

// Mappings alive in this process: leak tests count them.
uint64_t segment_count();

} // namespace ep
