// The `simt` executor: runs a kernel as B blocks x N lanes on one thread, each lane a fiber, under a seeded interleaver. For tests: the GPU's
// code paths (lanes > 1, warp roles, leaders, grid sync) on any machine, repeatable by seed, with deadlocks reported instead of suffered.
//
// A switch can happen where a context's function is called and nowhere else, so a wrong protocol shows when the order of its atomics, signals
// or synchronisations is wrong. What it cannot show: reordering inside one lane's plain accesses, the GPU memory model, PCIe ordering.
//
// Stricter than hardware: a lane that has returned counts as missing at every synchronisation, and lanes that meet at different operations
// are an error at once.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../device/kernel.hpp"
#include "ep/abi/memory.h"

namespace ep {

class simt_machine;
struct simt_lane;

constexpr uint32_t simt_named_barriers = 16;     // of a block; 0 is the block's own
constexpr uint32_t simt_largest_value = 16;      // bytes that a lane can hand to its warp

// What a kernel sees; one per lane.
class simt_context {
 public:
  static constexpr bool single_lane = false;
  static constexpr bool never_sleeps = true;

  uint32_t block() const { return block_index; }
  uint32_t blocks() const { return block_count; }
  uint32_t lane() const { return lane_index; }
  uint32_t lanes() const { return lane_count; }
  uint32_t warp_lanes() const { return warp_lane_count; }

  void point();
  void sync_block();
  bool sync_block_and(bool value);
  void sync_named(uint32_t barrier, uint32_t lanes); // the first `lanes` lanes to come; all name the same count
  void sync_warp();
  void sync_grid();

  template <class T> T shuffle(T value, uint32_t from) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= simt_largest_value);
    T result;
    std::memcpy(&result, exchange_shuffle(&value, sizeof(T), from), sizeof(T));
    return result;
  }
  uint32_t ballot(bool value);
  // The lanes of the warp that hold the same bits.
  template <class T> uint32_t match_any(T value) {
    static_assert(std::is_integral_v<T>);
    return exchange_match(static_cast<uint64_t>(value));
  }

  bool wait(const uint64_t* word, uint64_t value, int32_t rank, uint32_t stage, ep_kernel_status* status);
  bool wait_equal(const uint64_t* word, uint64_t value, int32_t rank, uint32_t stage, ep_kernel_status* status);
  template <class Look> bool wait_for(const Look& look, uint64_t expected, int32_t rank, uint32_t stage, ep_kernel_status* status) {
    return wait_until(wait_look_of(look), expected, rank, stage, status);
  }
  void fail(ep_kernel_status* status, uint32_t how, int32_t rank, uint32_t stage, uint64_t expected, uint64_t found);
  uint64_t clock_ns() const { return static_cast<uint64_t>(clock_now_ns()); }
  void wake(uint64_t word);
  bool end_way(int32_t rank) const;
  bool own_fault(uint64_t found) const;
  void stop_waits() const;

 private:
  friend class simt_machine;
  bool wait_until(const wait_look& look, uint64_t expected, int32_t rank, uint32_t stage, ep_kernel_status* status);
  const void* exchange_shuffle(const void* value, uint32_t bytes, uint32_t from);
  uint32_t exchange_match(uint64_t value);

  simt_machine* machine = nullptr;
  simt_lane* self = nullptr;
  uint32_t block_index = 0;
  uint32_t block_count = 1;
  uint32_t lane_index = 0;
  uint32_t lane_count = 1;
  uint32_t warp_lane_count = 1;
};

struct simt_schedule {
  uint64_t seed = 1;
  double switch_probability = 0.25;          // at each point; synchronisations and waits always may switch
  uint64_t point_limit = uint64_t{1} << 32;  // more points than this end the run as `runaway`: a loop that polls for ever
  size_t stack_bytes = 128 * 1024;           // of a lane
};

enum class simt_outcome : uint32_t {
  finished, // every lane has returned
  deadlock, // nobody can go on
  diverged, // lanes of one scope met at different operations
  runaway,  // point_limit was passed
};

struct simt_result {
  simt_outcome outcome = simt_outcome::finished;
  bool ok = true;         // finished, and no lane returned false
  std::string report;     // who stood where, unless finished
  uint64_t switches = 0;
  uint64_t schedule = 0;  // fingerprint of the order in which lanes ran: equal for equal seeds
};

// One rank's kernel, or a helper beside the ranks such as a proxy engine.
struct simt_launch {
  uint32_t blocks = 1;
  uint32_t lanes = 32;       // of a block; a multiple of warp_lanes
  uint32_t warp_lanes = 32;  // 1 to 32
  const kernel_environment* environment = nullptr;
  std::function<bool(simt_context&)> kernel;
  std::string name;                          // in reports, "rank 3"
  const ep_memory_handle* memory = nullptr;  // lets reports name signal slots
  bool serves = false;  // not waited for: it is stopped, at whatever it waits for, once all other launches have returned
};

// Several launches interleaved on this thread. Never sleeps and never looks at the clock: when every lane is blocked and no word has its
// value, that is a deadlock. Cancellation, closing and peers' life words still end waits. Nothing outside may write the awaited words.
// Throws what a lane threw, after all lanes have been unwound; std::invalid_argument for a shape that is not documented above.
simt_result simt_run_together(const simt_schedule& schedule, const std::vector<simt_launch>& launches);

// One launch whose words other threads or processes write. When all its lanes wait, the thread sleeps on environment.waits.wake, and waits
// end as they do on the `fast` executor.
simt_result simt_run_launch(const simt_schedule& schedule, const simt_launch& launch);

// A kernel is `void(simt_context&)` or `bool(simt_context&)`.
template <class F> std::function<bool(simt_context&)> simt_kernel(F&& kernel) {
  return [kernel = std::forward<F>(kernel)](simt_context& ctx) mutable -> bool {
    if constexpr (std::is_void_v<std::invoke_result_t<F&, simt_context&>>) {
      kernel(ctx);
      return true;
    } else {
      return kernel(ctx);
    }
  };
}

struct simt_options {
  uint32_t blocks = 1;
  uint32_t lanes = 32;
  uint32_t warp_lanes = 32;
  uint64_t seed = 1;
  double switch_probability = 0.25;
};

template <class F> simt_result simt_run(const simt_options& options, const kernel_environment& environment, F&& kernel) {
  simt_schedule schedule;
  schedule.seed = options.seed;
  schedule.switch_probability = options.switch_probability;
  simt_launch launch;
  launch.blocks = options.blocks;
  launch.lanes = options.lanes;
  launch.warp_lanes = options.warp_lanes;
  launch.environment = &environment;
  launch.kernel = simt_kernel(std::forward<F>(kernel));
  launch.name = "rank " + std::to_string(environment.waits.self);
  return simt_run_launch(schedule, launch);
}

} // namespace ep
