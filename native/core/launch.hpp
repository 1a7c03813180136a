// Runs kernels on the host's executors.
#pragma once

#include <thread>
#include <vector>

#include "device/fast.hpp"

namespace ep {

// The `fast` executor: `blocks` threads, the calling one among them. Returns when all blocks have ended. False if any block returned false.
template <class Kernel> bool fast_run(uint32_t blocks, const kernel_environment& environment, Kernel&& kernel) {
  if (blocks <= 1) {
    fast_context context{environment, 0, 1, nullptr};
    return kernel(context);
  }
  std::barrier<> grid(static_cast<std::ptrdiff_t>(blocks));
  std::atomic<bool> ok{true};
  const auto run_block = [&](uint32_t block) {
    fast_context context{environment, block, blocks, &grid};
    if (!kernel(context)) ok.store(false, std::memory_order_relaxed);
    // A block that ends early must not leave the others at the grid's barrier.
    grid.arrive_and_drop();
  };
  std::vector<std::thread> threads;
  for (uint32_t block = 1; block < blocks; ++block) threads.emplace_back(run_block, block);
  run_block(0);
  for (std::thread& thread : threads) thread.join();
  return ok.load();
}

} // namespace ep
