#include "group.hpp"

#include <algorithm>

namespace ep::gpu {

result<std::shared_ptr<group>> group::create(std::shared_ptr<symmetric_memory> memory, uint32_t blocks, uint32_t lanes) {
  if (!memory->connected()) return failure{EP_STATUS_CLOSED, 0, "the device memory is not connected"};
  if (memory->by_nic()) return failure{EP_STATUS_INVALID, 0, "collective calls of a GPU store to all ranks' parts: they reach none by a NIC"};
  std::shared_ptr<group> made(new group(std::move(memory)));
  const symmetric_memory& here = *made->memory_;
  const auto world = static_cast<uint64_t>(here.context().world_size());
  if (world > EP_GROUP_MOST_RANKS) return failure{EP_STATUS_INVALID, 0, std::to_string(world) + " ranks: a group on a device has at most " + std::to_string(EP_GROUP_MOST_RANKS)};
  if (here.signal_slots() < world * EP_GROUP_MOST_BLOCKS) return failure{EP_STATUS_INVALID, 0, std::to_string(here.signal_slots()) + " signal slots are too few for a group"};
  auto taken = share::take(here, EP_CUDA_KERNEL_GROUP, blocks, lanes);
  if (taken.ok() && taken.value()->blocks() > EP_GROUP_MOST_BLOCKS) {
    if (blocks != 0) return failure{EP_STATUS_INVALID, 0, std::to_string(blocks) + " blocks: a group takes at most " + std::to_string(EP_GROUP_MOST_BLOCKS)};
    taken = failure{EP_STATUS_INVALID, 0, ""}; // given back before fewer are taken
    taken = share::take(here, EP_CUDA_KERNEL_GROUP, EP_GROUP_MOST_BLOCKS, lanes);
  }
  if (!taken.ok()) return taken.why();
  made->share_ = taken.value();
  auto rounds = device_block::allocate(here.of(), here.device(), EP_GROUP_MOST_BLOCKS * sizeof(uint64_t));
  if (!rounds.ok()) return rounds.why();
  made->rounds_ = rounds.value();
  made->args_.memory = here.device_handle();
  made->args_.rounds = made->rounds_->address();
  return made;
}

result<nothing> group::lay_out(uint32_t blocks) {
  if (blocks == 0 || blocks > share_->blocks()) return failure{EP_STATUS_INVALID, 0, std::to_string(blocks) + " blocks of " + std::to_string(share_->blocks())};
  const uint64_t slots = 2 * uint64_t{blocks} * static_cast<uint64_t>(memory_->context().world_size());
  const uint64_t slot_bytes = memory_->byte_length() / slots / 64 * 64;
  constexpr uint64_t least = 2 * sizeof(ep_group_head);
  if (slot_bytes < least) {
    return failure{EP_STATUS_INVALID, 0, std::to_string(memory_->byte_length()) + " bytes are too few for " + std::to_string(slots) + " slots: " + std::to_string(slots * least) + " are needed"};
  }
  args_.blocks = blocks;
  args_.slot_bytes = slot_bytes;
  return nothing{};
}

} // namespace ep::gpu
