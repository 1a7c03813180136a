#include "share.hpp"

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>

namespace ep::gpu {

// Of each device.
struct share::account {
  std::mutex mutex;
  std::map<int, std::list<grid>> held;
  static account& here() {
    static auto* made = new account; // leaked on purpose: shares may go while static destructors run
    return *made;
  }
};

result<std::shared_ptr<share>> share::take(const symmetric_memory& memory, uint32_t kernel, uint32_t blocks, uint32_t lanes) {
  if (!memory.connected()) return failure{EP_STATUS_CLOSED, 0, "the device memory is not connected"};
  std::shared_ptr<share> made(new share);
  const library& of = *memory.of();
  const int device = memory.device();
  if (lanes == 0 || lanes > 1024 || lanes % 32 != 0) return failure{EP_STATUS_INVALID, 0, "a block of " + std::to_string(lanes) + " lanes: expected whole warps of 32, at most 1024"};
  ep_cuda_facts facts{};
  if (const int error = of.table().device_facts(device, &facts); error != 0) return of.error(error, "looking at GPU " + std::to_string(device));
  if (const int error = of.table().resident(device, kernel, lanes, &made->resident_); error != 0) {
    return of.error(error, "asking how many blocks of " + std::to_string(lanes) + " lanes fit on GPU " + std::to_string(device));
  }
  made->device_ = device;
  made->clock_khz_ = facts.clock_khz;
  made->lanes_ = lanes;
  made->blocks_ = blocks != 0 ? blocks : std::max(1u, made->resident_ / (2 * std::max(1u, memory.ranks_here())));
  const std::lock_guard lock(account::here().mutex);
  std::list<grid>& held = account::here().held[device];
  const uint64_t room = room_beside({held.begin(), held.end()}, made->resident_);
  if (made->blocks_ > room) {
    return failure{EP_STATUS_INVALID, 0,
                   std::to_string(made->blocks_) + " blocks of " + std::to_string(lanes) + " lanes do not fit on GPU " + std::to_string(device) + ": it runs " +
                       std::to_string(made->resident_) + " at once, and beside the " + std::to_string(held.size()) + " other dispatchers of this process " + std::to_string(room) +
                       " are sure to find a place; ranks on one GPU wait for each other, so all must fit, each block counted as one of the widest (blocks, lanes)"};
  }
  held.push_back({made->blocks_, made->resident_});
  made->held_ = std::prev(held.end());
  made->counted_ = true;
  return made;
}

share::~share() {
  if (!counted_) return;
  const std::lock_guard lock(account::here().mutex);
  account::here().held[device_].erase(held_);
}

uint64_t share::cycles(double timeout_ms) const {
  if (!(timeout_ms >= 0)) return 0;
  const double wanted = timeout_ms * clock_khz_;
  return wanted > 9e18 ? 0 : static_cast<uint64_t>(wanted) + 1;
}

} // namespace ep::gpu
