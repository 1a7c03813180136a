// What a kernel of the stand-in for a GPU runs in: see host_device.cpp.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "core/launch.hpp"
#include "ep/device/device_call.h"

namespace ep::shim {

// As on a GPU: peers never sleep, so nobody is woken; and of ranks that are gone a kernel knows what the host has told it (ep_cuda_launch.lost).
struct device_context : ep::fast_context {
  static constexpr bool outlives_ranks = true;
  const uint32_t* lost;

  void wake(uint64_t) const {}
  uint32_t lost_as(int32_t rank) const {
    return lost == nullptr || rank < 0 ? EP_STATUS_OK : std::atomic_ref<uint32_t>(const_cast<uint32_t*>(lost)[rank]).load(std::memory_order_acquire);
  }
  template <class Look> bool wait_within(const ep::wait_scope& waits, const Look& look, uint64_t expected, int32_t rank, uint32_t stage, ep_kernel_status* status) const {
    uint32_t how = EP_STATUS_OK;
    bool came = false;
    const auto either = [&](uint64_t* found) {
      how = lost_as(rank); // first: the value may have come just before the end
      came = look(found);
      return came || how != EP_STATUS_OK;
    };
    ep::wait_result result = ep::wait_until(waits, ep::wait_look_of(either), rank);
    if (came) return true;
    if (result.status == EP_STATUS_OK) result.status = how;
    ep::kernel_status_fail(status, result, stage, expected);
    return false;
  }
  template <class Look> bool wait_for(const Look& look, uint64_t expected, int32_t rank, uint32_t stage, ep_kernel_status* status) const {
    return wait_within(environment.waits, look, expected, rank, stage, status);
  }
  static auto reaching(const uint64_t* word, ep::comparison how, uint64_t value) {
    return [=](uint64_t* found) {
      *found = std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
      return ep::comparison_holds(how, *found, value);
    };
  }
  bool wait(const uint64_t* word, uint64_t value, int32_t rank, uint32_t stage, ep_kernel_status* status) const {
    return wait_for(reaching(word, ep::comparison::ge, value), value, rank, stage, status);
  }
  bool wait_equal(const uint64_t* word, uint64_t value, int32_t rank, uint32_t stage, ep_kernel_status* status) const {
    return wait_for(reaching(word, ep::comparison::eq, value), value, rank, stage, status);
  }
  bool wait_by(const uint64_t* word, uint64_t value, uint64_t by_ns, int32_t rank, uint32_t stage, ep_kernel_status* status) const {
    ep::wait_scope waits = environment.waits;
    waits.deadline_ns = std::min(waits.deadline_ns, static_cast<int64_t>(by_ns));
    return wait_within(waits, reaching(word, ep::comparison::ge, value), value, rank, stage, status);
  }
};

} // namespace ep::shim
