// What kernels that wait for each other may occupy of a device at one time, over all of this process.
#pragma once

#include <list>

#include "fit.hpp"
#include "memory.hpp"

namespace ep::gpu {

class share {
 public:
  // Of the device of this memory, for grids of `kernel` (EP_CUDA_KERNEL_*). `blocks` 0: half of this rank's share. EP_STATUS_INVALID: with those of other ranks of this
  // process, the blocks are not sure to fit on the device at once (fit.hpp): their kernels wait for each other.
  static result<std::shared_ptr<share>> take(const symmetric_memory& memory, uint32_t kernel, uint32_t blocks, uint32_t lanes);
  ~share();
  share(const share&) = delete;

  uint32_t blocks() const { return blocks_; }
  uint32_t lanes() const { return lanes_; }
  uint32_t resident() const { return resident_; }
  // What so many milliseconds are in cycles of the device; 0 for no limit.
  uint64_t cycles(double timeout_ms) const;

 private:
  share() = default;
  int device_ = 0;
  uint32_t blocks_ = 0;
  uint32_t lanes_ = 0;
  uint32_t resident_ = 0;
  int32_t clock_khz_ = 0;
  struct account;
  std::list<grid>::iterator held_; // in the account of the device, if `counted_`
  bool counted_ = false;
};

} // namespace ep::gpu
