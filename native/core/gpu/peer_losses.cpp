#include "peer_losses.hpp"

#include <algorithm>
#include <atomic>

namespace ep::gpu {

result<std::shared_ptr<peer_losses>> peer_losses::create(std::shared_ptr<rank_context> context, library_ref of, int device) {
  std::shared_ptr<peer_losses> made(new peer_losses(std::move(context)));
  const auto world = static_cast<size_t>(made->context_->world_size());
  auto words = pinned_block::allocate(std::move(of), device, world * sizeof(uint32_t));
  if (!words.ok()) return words.why();
  made->words_ = words.value();
  made->closed_ns_.assign(world, no_deadline);
  return made;
}

void peer_losses::look() {
  const std::lock_guard lock(mutex_);
  auto* words = reinterpret_cast<uint32_t*>(words_->data());
  for (int32_t rank = 0; rank < context_->world_size(); ++rank) {
    const std::atomic_ref<uint32_t> word(words[rank]);
    if (rank == context_->rank() || word.load(std::memory_order_relaxed) != EP_STATUS_OK) continue;
    const uint32_t state = context_->life(rank);
    if (state == EP_LIFE_CLOSED) {
      // HAZARD: a GPU may have kernels of a rank under way that has closed in order; what they send is on its way, and would be missing from a call that no longer waits for it.
      int64_t& since = closed_ns_[static_cast<size_t>(rank)];
      const int64_t now = clock_now_ns();
      since = std::min(since, now);
      if (now - since < closed_peers_grace_ns) continue;
    } else if (state != EP_LIFE_DEAD) {
      continue; // EP_LIFE_ABSENT: of a rank that nothing is known of, the time runs out
    }
    word.store(EP_STATUS_PEER_LOST, std::memory_order_release);
  }
}

} // namespace ep::gpu
