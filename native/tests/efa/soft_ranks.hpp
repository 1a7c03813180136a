// Ranks of efa_ranks.hpp over software NICs.
#pragma once

#include "efa_ranks.hpp"
#include "nic/efa/soft_device.hpp"

namespace ep::test {

inline efa::emulator_hooks hooks_of(dl::efa_device& opened) {
  auto* device = dynamic_cast<nic::efa::soft_device*>(&opened);
  efa::emulator_hooks hooks;
  hooks.doorbell_wake = reinterpret_cast<uint64_t>(device->doorbell_wake());
  hooks.region_wake = [device](const dl::efa_mr& mr, const ep_wake_word* wake) { return device->region_wake(mr, wake); };
  hooks.counter_wake = [device](const dl::efa_counter& counter, const ep_wake_word* wake) { return device->counter_wake(counter, wake); };
  hooks.cq_wake = [device](const dl::efa_cq& cq, ep_wake_word* wake) { return device->cq_wake(cq, wake); };
  hooks.cq_consumer = [device](const dl::efa_cq& cq, const uint64_t* polled) { return device->cq_polled(cq, polled); };
  return hooks;
}

inline std::unique_ptr<efa_ranks> soft_ranks(const nic::efa::soft_options& soft = {}, const efa::endpoint_options& options = {}) {
  return std::make_unique<efa_ranks>(2, options, 8192, 4, [&] { return std::make_unique<nic::efa::soft_driver>(soft); }, hooks_of);
}

inline uint64_t violations(const efa_ranks& ranks) {
  uint64_t all = 0;
  for (const efa_side& one : ranks.sides) {
    auto& device = dynamic_cast<nic::efa::soft_device&>(one.nic->endpoints().nic());
    for (const auto& wrong : device.violations()) std::fprintf(stderr, "  %s\n", nic::efa::violation_text(wrong).c_str());
    all += device.counts().violations;
  }
  return all;
}

} // namespace ep::test
