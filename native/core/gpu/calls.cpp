#include "calls.hpp"

#include <algorithm>
#include <iterator>
#include <list>
#include <map>
#include <mutex>

#include "fit.hpp"

namespace ep::gpu {

// Of each device, what this process's calls may occupy at one time.
struct calls::account {
  std::mutex mutex;
  std::map<int, std::list<grid>> held;
  static account& here() {
    static auto* made = new account; // leaked on purpose: calls may go while static destructors run
    return *made;
  }
};

result<std::shared_ptr<calls>> calls::create(std::shared_ptr<symmetric_memory> memory, const lease_slots& slots, uint32_t blocks, uint32_t lanes) {
  if (!memory->connected()) return failure{EP_STATUS_CLOSED, 0, "the device memory is not connected"};
  std::shared_ptr<calls> made(new calls(std::move(memory), slots));
  const symmetric_memory& here = *made->memory_;
  const library& of = *here.of();
  const int device = here.device();
  if (lanes == 0 || lanes > 1024 || lanes % 32 != 0) return failure{EP_STATUS_INVALID, 0, "a block of " + std::to_string(lanes) + " lanes: expected whole warps of 32, at most 1024"};
  if (slots.leases == 0 || made->credit_slot(slots.leases - 1) + made->world() > here.signal_slots()) {
    return failure{EP_STATUS_INVALID, 0, std::to_string(slots.leases) + " leases do not fit " + std::to_string(here.signal_slots()) + " signal slots"};
  }
  ep_cuda_facts facts{};
  if (const int error = of.table().device_facts(device, &facts); error != 0) return of.error(error, "looking at GPU " + std::to_string(device));
  if (const int error = of.table().resident(device, EP_CUDA_KERNEL_DISPATCH, lanes, &made->resident_); error != 0) {
    return of.error(error, "asking how many blocks of " + std::to_string(lanes) + " lanes fit on GPU " + std::to_string(device));
  }
  made->clock_khz_ = facts.clock_khz;
  made->lanes_ = lanes;
  made->blocks_ = blocks != 0 ? blocks : std::max(1u, made->resident_ / (2 * std::max(1u, here.ranks_here())));
  {
    const std::lock_guard lock(account::here().mutex);
    std::list<grid>& held = account::here().held[device];
    const uint64_t room = room_beside({held.begin(), held.end()}, made->resident_);
    if (made->blocks_ > room) {
      return failure{EP_STATUS_INVALID, 0,
                     std::to_string(made->blocks_) + " blocks of " + std::to_string(lanes) + " lanes do not fit on GPU " + std::to_string(device) + ": it runs " +
                         std::to_string(made->resident_) + " at once, and beside the " + std::to_string(held.size()) + " other dispatchers of this process " +
                         std::to_string(room) + " are sure to find a place; ranks on one GPU wait for each other, so all must fit, each block counted as one of the widest (blocks, lanes)"};
    }
    held.push_back({made->blocks_, made->resident_});
    made->held_ = std::prev(held.end());
    made->counted_ = true;
  }
  const uint64_t world = made->world();
  auto block = device_block::allocate(here.of(), device, slots.leases * (sizeof(ep_lease_counts) + 2 * world * sizeof(uint64_t)));
  if (!block.ok()) return block.why();
  made->block_ = block.value();
  if (auto based = made->rebase(); !based.ok()) return based.why();
  return made;
}

calls::~calls() {
  if (!counted_) return;
  const std::lock_guard lock(account::here().mutex);
  account::here().held[memory_->device()].erase(held_);
}

uint64_t calls::cycles(double timeout_ms) const {
  if (!(timeout_ms >= 0)) return 0;
  const double wanted = 2.0 * timeout_ms * clock_khz_;
  return wanted > 9e18 ? 0 : static_cast<uint64_t>(wanted) + 1;
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
