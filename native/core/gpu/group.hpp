// What a process group keeps on a device: the rounds that its blocks have gone through, its slots' layout, and its share of the device.
#pragma once

#include "ep/abi/group.h"
#include "share.hpp"

namespace ep::gpu {

class group {
 public:
  // Over all of this memory, which has EP_GROUP_MOST_BLOCKS signal words for each rank, all zero. Blocks and lanes as in share::take, but at most EP_GROUP_MOST_BLOCKS.
  static result<std::shared_ptr<group>> create(std::shared_ptr<symmetric_memory> memory, uint32_t blocks, uint32_t lanes);
  // The blocks that all ranks have, which calls are laid out for. EP_STATUS_INVALID: not these, or too little memory for them.
  result<nothing> lay_out(uint32_t blocks);

  uint32_t blocks() const { return share_->blocks(); }
  uint32_t lanes() const { return share_->lanes(); }
  uint32_t resident() const { return share_->resident(); }
  const std::shared_ptr<symmetric_memory>& memory() const { return memory_; }
  // With everything that is the same in all calls; blocks 0: not laid out.
  const ep_group_args& args() const { return args_; }
  uint64_t cycles(double timeout_ms) const { return share_->cycles(2 * timeout_ms); }

 private:
  explicit group(std::shared_ptr<symmetric_memory> memory) : memory_(std::move(memory)) {}
  std::shared_ptr<symmetric_memory> memory_;
  std::shared_ptr<const device_block> rounds_;
  std::shared_ptr<share> share_;
  ep_group_args args_{};
};

} // namespace ep::gpu
