// What the process groups of one rank keep on a device: together, sections of device memory and a share of the device; each for itself, the rounds that its blocks have gone
// through and where its members' parts lie.
#pragma once

#include "ep/abi/group.h"
#include "share.hpp"

namespace ep::gpu {

// HAZARD: the groups of an arena have one share of the device between them, so their calls are launched on one stream, where one runs at a time. Those on another stream have another
// arena, over the same memory and sections.
class group_arena {
 public:
  // Of this memory, which has EP_GROUP_MOST_BLOCKS signal words for each rank of the world in each section. Blocks and lanes as in share::take, but at most EP_GROUP_MOST_BLOCKS.
  static result<std::shared_ptr<group_arena>> create(std::shared_ptr<symmetric_memory> memory, uint32_t sections, uint32_t blocks, uint32_t lanes);
  // With a share of its own, of blocks that are as wide.
  result<std::shared_ptr<group_arena>> beside(uint32_t blocks) const;

  uint32_t blocks() const { return share_->blocks(); }
  uint32_t lanes() const { return share_->lanes(); }
  uint32_t resident() const { return share_->resident(); }
  uint32_t sections() const { return sections_; }
  const std::shared_ptr<symmetric_memory>& memory() const { return memory_; }
  uint64_t cycles(double timeout_ms) const { return share_->cycles(2 * timeout_ms); }
  // Signal words of a section, in everybody's part.
  uint64_t first_slot(uint32_t section) const { return uint64_t{section} * slots_of_section(); }
  uint64_t slots_of_section() const { return EP_GROUP_MOST_BLOCKS * static_cast<uint64_t>(memory_->context().world_size()); }
  // Of a section, on the device.
  uint64_t tables(uint32_t section) const;

 private:
  explicit group_arena(std::shared_ptr<symmetric_memory> memory) : memory_(std::move(memory)) {}
  result<nothing> take_share(uint32_t blocks, uint32_t lanes);
  std::shared_ptr<symmetric_memory> memory_;
  std::shared_ptr<const device_block> tables_;
  std::shared_ptr<share> share_;
  uint32_t sections_ = 0;
};

class group {
 public:
  struct section {
    uint32_t index;
    uint64_t byte_offset; // of the slots, in everybody's part
    uint64_t byte_length;
  };
  // Of these ranks of the world, this one among them, numbered as they are listed. HAZARD: zeroes this rank's words of the section: nobody may write there any more for a group that
  // had it before, nor yet for this one.
  static result<std::shared_ptr<group>> create(std::shared_ptr<group_arena> arena, const section& at, std::vector<int32_t> ranks);
  // The blocks that all members have, which calls are laid out for. EP_STATUS_INVALID: not these, or too little memory for them.
  result<nothing> lay_out(uint32_t blocks);

  const group_arena& arena() const { return *arena_; }
  // World rank of each member.
  const rank_list& ranks() const { return ranks_; }
  // With everything that is the same in all calls; blocks 0: not laid out.
  const ep_group_args& args() const { return args_; }

 private:
  group(std::shared_ptr<group_arena> arena, uint64_t byte_length, std::vector<int32_t> ranks)
      : arena_(std::move(arena)), byte_length_(byte_length), ranks_(std::make_shared<const std::vector<int32_t>>(std::move(ranks))) {}
  std::shared_ptr<group_arena> arena_;
  uint64_t byte_length_;
  rank_list ranks_;
  ep_group_args args_{};
};

} // namespace ep::gpu
