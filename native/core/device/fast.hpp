// The `fast` executor's context: one lane per block, bulk copies. What users run on CPUs.
#pragma once

#include <algorithm>
#include <barrier>

#include "kernel.hpp"

namespace ep {

struct fast_context {
  static constexpr bool single_lane = true;

  const kernel_environment& environment;
  uint32_t block_index;
  uint32_t block_count;
  std::barrier<>* grid; // null where block_count is 1

  uint32_t block() const { return block_index; }
  uint32_t blocks() const { return block_count; }
  uint32_t lane() const { return 0; }
  uint32_t lanes() const { return 1; }
  uint32_t warp_lanes() const { return 1; }
  void point() const {}
  void sync_block() const {}
  bool sync_block_and(bool value) const { return value; }
  void sync_warp() const {}
  void sync_grid() const {
    if (grid != nullptr) grid->arrive_and_wait();
  }
  template <class T> T shuffle(T value, uint32_t) const { return value; }
  uint32_t ballot(bool value) const { return value ? 1u : 0u; }
  template <class T> uint32_t match_any(T) const { return 1u; }

  bool wait(const uint64_t* word, uint64_t value, int32_t rank, uint32_t stage, ep_kernel_status* status) const {
    return wait_until(comparison::ge, word, value, rank, stage, status);
  }
  bool wait_equal(const uint64_t* word, uint64_t value, int32_t rank, uint32_t stage, ep_kernel_status* status) const {
    return wait_until(comparison::eq, word, value, rank, stage, status);
  }
  // `wait`, until by_ns (as clock_ns) at the latest.
  bool wait_by(const uint64_t* word, uint64_t value, uint64_t by_ns, int32_t rank, uint32_t stage, ep_kernel_status* status) const {
    wait_scope waits = environment.waits;
    waits.deadline_ns = std::min(waits.deadline_ns, static_cast<int64_t>(by_ns));
    const wait_result result = wait_word(waits, word, comparison::ge, value, rank);
    if (result.status == EP_STATUS_OK) return true;
    kernel_status_fail(status, result, stage, value);
    return false;
  }
  bool wait_until(comparison cmp, const uint64_t* word, uint64_t value, int32_t rank, uint32_t stage, ep_kernel_status* status) const {
    const wait_result result = wait_word(environment.waits, word, cmp, value, rank);
    if (result.status == EP_STATUS_OK) return true;
    kernel_status_fail(status, result, stage, value);
    return false;
  }
  template <class Look> bool wait_for(const Look& look, uint64_t expected, int32_t rank, uint32_t stage, ep_kernel_status* status) const {
    const wait_result result = ep::wait_until(environment.waits, wait_look_of(look), rank);
    if (result.status == EP_STATUS_OK) return true;
    kernel_status_fail(status, result, stage, expected);
    return false;
  }
  void fail(ep_kernel_status* status, uint32_t how, int32_t rank, uint32_t stage, uint64_t expected, uint64_t found) const {
    kernel_status_fail(status, {how, rank, found}, stage, expected);
  }
  uint64_t clock_ns() const { return static_cast<uint64_t>(clock_now_ns()); }
  void wake(uint64_t word) const { wake_notify(reinterpret_cast<ep_wake_word*>(word)); }
  bool end_way(int32_t rank) const { return environment.end_way(rank); }
  bool own_fault(uint64_t found) const { return environment.own_fault(found); }
  void stop_waits() const { environment.stop_waits(); }
};

} // namespace ep
