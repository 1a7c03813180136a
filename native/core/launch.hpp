// Runs kernels on the host's executors.
#pragma once

#include <thread>
#include <vector>

#include "device/fast.hpp"
#include "thread.hpp"

namespace ep {

// The `fast` executor: `blocks` threads, the calling one among them. Returns when all blocks have ended; how they ended is in the kernel's own status.
// Fails, without having run any block, where a thread cannot be started.
template <class Kernel> result<nothing> fast_run(uint32_t blocks, const kernel_environment& environment, Kernel&& kernel) {
  if (blocks <= 1) {
    fast_context context{environment, 0, 1, nullptr};
    kernel(context);
    return nothing{};
  }
  std::barrier<> grid(static_cast<std::ptrdiff_t>(blocks));
  const auto run_block = [&](uint32_t block) {
    fast_context context{environment, block, blocks, &grid};
    kernel(context);
    // A block that ends early must not leave the others at the grid's barrier.
    grid.arrive_and_drop();
  };
  // HAZARD: no block begins before all threads are there. Blocks wait for each other at the grid's barrier, so those of a grid that is never complete would
  // wait for ever; and one that has sent rows cannot take them back.
  enum : uint32_t { waiting, running, abandoned };
  std::atomic<uint32_t> gate{waiting};
  std::vector<std::thread> threads;
  threads.reserve(blocks - 1);
  const auto open_gate = [&](uint32_t state) {
    gate.store(state, std::memory_order_release);
    gate.notify_all();
  };
  const auto join_all = [&] {
    for (std::thread& thread : threads) thread.join();
  };
  for (uint32_t block = 1; block < blocks; ++block) {
    auto started = thread_start(
        "ep-kernel",
        [&, block] {
          gate.wait(waiting, std::memory_order_acquire);
          if (gate.load(std::memory_order_acquire) == running) run_block(block);
        },
        "thread " + std::to_string(block + 1) + " of " + std::to_string(blocks) + " for a kernel; use fewer blocks or raise the limit on tasks");
    if (!started.ok()) {
      open_gate(abandoned);
      join_all();
      return started.why();
    }
    threads.push_back(std::move(started.value()));
  }
  open_gate(running);
  run_block(0);
  join_all();
  return nothing{};
}

} // namespace ep
