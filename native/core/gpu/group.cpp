#include "group.hpp"

#include <algorithm>
#include <cstddef>

namespace ep::gpu {
namespace {

// What a section has on the device.
struct section_tables {
  uint64_t rounds[EP_GROUP_MOST_BLOCKS];
  ep_peer_view views[EP_GROUP_MOST_RANKS]; // by rank of the group
};

failure invalid(std::string why) { return failure{EP_STATUS_INVALID, 0, std::move(why)}; }

} // namespace

result<std::shared_ptr<group_arena>> group_arena::create(std::shared_ptr<symmetric_memory> memory, uint32_t sections, uint32_t blocks, uint32_t lanes) {
  if (!memory->connected()) return failure{EP_STATUS_CLOSED, 0, "the device memory is not connected"};
  if (memory->by_nic()) return failure{EP_STATUS_INVALID, 0, "collective calls of a GPU store to all ranks' parts: they reach none by a NIC"};
  std::shared_ptr<group_arena> made(new group_arena(std::move(memory)));
  const symmetric_memory& here = *made->memory_;
  const uint64_t wanted = sections * made->slots_of_section();
  if (sections == 0 || here.signal_slots() < wanted) {
    return invalid(std::to_string(here.signal_slots()) + " signal slots are too few for " + std::to_string(sections) + " groups: " + std::to_string(wanted) + " are needed");
  }
  if (auto taken = made->take_share(blocks, lanes); !taken.ok()) return taken.why();
  made->sections_ = sections;
  // HAZARD: those of all groups at once: allocating later would wait for kernels that run, and one may wait for what this thread is about to launch.
  auto tables = device_block::allocate(here.of(), here.device(), sections * sizeof(section_tables));
  if (!tables.ok()) return tables.why();
  made->tables_ = tables.value();
  return made;
}

result<nothing> group_arena::take_share(uint32_t blocks, uint32_t lanes) {
  auto taken = share::take(*memory_, EP_CUDA_KERNEL_GROUP, blocks, lanes);
  if (taken.ok() && taken.value()->blocks() > EP_GROUP_MOST_BLOCKS) {
    if (blocks != 0) return invalid(std::to_string(blocks) + " blocks: a group takes at most " + std::to_string(EP_GROUP_MOST_BLOCKS));
    taken = invalid(""); // given back before fewer are taken
    taken = share::take(*memory_, EP_CUDA_KERNEL_GROUP, EP_GROUP_MOST_BLOCKS, lanes);
  }
  if (!taken.ok()) return taken.why();
  share_ = taken.value();
  return nothing{};
}

result<std::shared_ptr<group_arena>> group_arena::beside(uint32_t blocks) const {
  std::shared_ptr<group_arena> made(new group_arena(memory_));
  made->tables_ = tables_;
  made->sections_ = sections_;
  if (auto taken = made->take_share(blocks, lanes()); !taken.ok()) return taken.why();
  return made;
}

uint64_t group_arena::tables(uint32_t section) const { return tables_->address() + section * sizeof(section_tables); }

result<std::shared_ptr<group>> group::create(std::shared_ptr<group_arena> arena, const section& at, std::vector<int32_t> ranks) {
  const symmetric_memory& memory = *arena->memory();
  const int32_t world = memory.context().world_size();
  const auto size = ranks.size();
  if (at.index >= arena->sections()) return invalid("section " + std::to_string(at.index) + " is not one of " + std::to_string(arena->sections()));
  if (at.byte_offset > memory.byte_length() || at.byte_length > memory.byte_length() - at.byte_offset || at.byte_offset % 64 != 0) {
    return invalid(std::to_string(at.byte_length) + " bytes from " + std::to_string(at.byte_offset) + " do not lie in memory of " + std::to_string(memory.byte_length()));
  }
  if (size > EP_GROUP_MOST_RANKS) return invalid(std::to_string(size) + " ranks: a group on a device has at most " + std::to_string(EP_GROUP_MOST_RANKS));
  section_tables tables{};
  int32_t self = -1;
  for (size_t i = 0; i < size; ++i) {
    const int32_t rank = ranks[i];
    if (rank < 0 || rank >= world || std::count(ranks.begin(), ranks.end(), rank) != 1) {
      return invalid("rank " + std::to_string(rank) + " is not one of " + std::to_string(world) + ", or is named twice");
    }
    if (rank == memory.context().rank()) self = static_cast<int32_t>(i);
    tables.views[i] = {memory.data(rank) + at.byte_offset, memory.signals(rank) + arena->first_slot(at.index) * sizeof(uint64_t), 0, 0};
  }
  if (self < 0) return invalid("rank " + std::to_string(memory.context().rank()) + " is not a member of the group");
  const uint64_t there = arena->tables(at.index);
  const auto put = [&](uint64_t to, const void* from, uint64_t bytes) {
    return copy_now(memory.of(), memory.device(), to, reinterpret_cast<uint64_t>(from), bytes, "writing the tables of a group");
  };
  if (auto put_tables = put(there, &tables, sizeof tables); !put_tables.ok()) return put_tables.why();
  const std::vector<uint64_t> zeros(arena->slots_of_section());
  if (auto put_words = put(tables.views[self].signals, zeros.data(), zeros.size() * sizeof(uint64_t)); !put_words.ok()) return put_words.why();
  std::shared_ptr<group> made(new group(std::move(arena), at.byte_length, std::move(ranks)));
  ep_memory_handle& handle = made->args_.memory;
  handle = memory.device_handle();
  handle.rank = self;
  handle.world_size = static_cast<int32_t>(size);
  handle.byte_length = at.byte_length;
  handle.signal_slots = made->arena_->slots_of_section();
  handle.peers = there + offsetof(section_tables, views);
  made->args_.rounds = there + offsetof(section_tables, rounds);
  return made;
}

result<nothing> group::lay_out(uint32_t blocks) {
  if (blocks == 0 || blocks > arena_->blocks()) return invalid(std::to_string(blocks) + " blocks of " + std::to_string(arena_->blocks()));
  const uint64_t slots = 2 * uint64_t{blocks} * ranks_->size();
  const uint64_t slot_bytes = byte_length_ / slots / 64 * 64;
  constexpr uint64_t least = 2 * sizeof(ep_group_head);
  if (slot_bytes < least) {
    return invalid(std::to_string(byte_length_) + " bytes are too few for " + std::to_string(slots) + " slots: " + std::to_string(slots * least) + " are needed");
  }
  args_.blocks = blocks;
  args_.slot_bytes = slot_bytes;
  return nothing{};
}

} // namespace ep::gpu
