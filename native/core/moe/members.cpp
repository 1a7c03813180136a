#include "moe/members.hpp"

#include <atomic>

namespace ep {
namespace {

void clear(uint64_t* words, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) std::atomic_ref<uint64_t>(words[i]).store(0, std::memory_order_relaxed);
}

} // namespace

void moe_forget(const ep_moe_buffer& buffer, uint8_t* data, uint64_t* signals, int32_t rank) {
  const auto world = static_cast<uint64_t>(buffer.memory.world_size);
  const auto of = static_cast<uint64_t>(rank);
  const uint64_t most = buffer.experts.most_local;
  const auto* begin = reinterpret_cast<const uint32_t*>(buffer.experts.rank_begin);
  for (uint64_t slot = 0; slot < buffer.calls; ++slot) {
    for (uint64_t kind = 0; kind < EP_MOE_SIGNAL_KINDS; ++kind) clear(signals + buffer.first_signal + (slot * EP_MOE_SIGNAL_KINDS + kind) * world + of, 1);
    auto* counts = reinterpret_cast<uint64_t*>(data + buffer.counts.offset + slot * buffer.counts.stride);
    clear(counts + of * most, most);
    if (buffer.header.kind == EP_MOE_HIGH_THROUGHPUT) {
      auto* starts = reinterpret_cast<uint64_t*>(data + buffer.starts.offset + slot * buffer.starts.stride);
      clear(starts + begin[of], begin[of + 1] - begin[of]);
    }
    clear(reinterpret_cast<uint64_t*>(data + buffer.refusals.offset + slot * buffer.refusals.stride) + of, 1);
    reinterpret_cast<ep_moe_peer*>(buffer.peers)[slot * world + of] = {};
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

} // namespace ep
