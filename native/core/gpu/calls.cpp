#include "calls.hpp"

namespace ep::gpu {

result<std::shared_ptr<calls>> calls::create(std::shared_ptr<symmetric_memory> memory, const lease_slots& slots, uint32_t blocks, uint32_t lanes) {
  if (!memory->connected()) return failure{EP_STATUS_CLOSED, 0, "the device memory is not connected"};
  std::shared_ptr<calls> made(new calls(std::move(memory), slots));
  const symmetric_memory& here = *made->memory_;
  if (slots.leases == 0 || made->credit_slot(slots.leases - 1) + made->world() > here.signal_slots()) {
    return failure{EP_STATUS_INVALID, 0, std::to_string(slots.leases) + " leases do not fit " + std::to_string(here.signal_slots()) + " signal slots"};
  }
  auto taken = share::take(here, EP_CUDA_KERNEL_DISPATCH, blocks, lanes);
  if (!taken.ok()) return taken.why();
  made->share_ = taken.value();
  const uint64_t world = made->world();
  auto block = device_block::allocate(here.of(), here.device(), slots.leases * (sizeof(ep_lease_counts) + 2 * world * sizeof(uint64_t)));
  if (!block.ok()) return block.why();
  made->block_ = block.value();
  if (auto based = made->rebase(); !based.ok()) return based.why();
  return made;
}

result<nothing> calls::rebase() {
  const uint64_t world_size = world();
  auto words = memory_->read_signals(slots_.first, 2 * slots_.leases * world_size);
  if (!words.ok()) return words.why();
  const uint64_t counters = block_->address() + slots_.leases * sizeof(ep_lease_counts);
  std::vector<uint64_t> image;
  for (uint32_t lease = 0; lease < slots_.leases; ++lease) {
    const uint64_t arrived = counters + 2 * lease * world_size * sizeof(uint64_t);
    image.insert(image.end(), {0, arrived, arrived + world_size * sizeof(uint64_t)});
  }
  // Both arrays of a lease stand as its words do: arrivals, then credits.
  image.insert(image.end(), words.value().begin(), words.value().end());
  return copy_now(memory_->of(), memory_->device(), block_->address(), reinterpret_cast<uint64_t>(image.data()), image.size() * sizeof(uint64_t), "writing the counts of calls");
}

} // namespace ep::gpu
