// How all kernels are launched: a grid of whole warps on a stream, its waits bounded by ep_cuda_launch.
#pragma once

#include <cuda_runtime.h>

#include "ep/device/cuda_context.h"
#include "table.h"

namespace ep {

struct grid_needs {
  bool cooperative;      // all blocks run at once, or the launch fails
  uint32_t shared_bytes; // of each block
};

inline cuda_environment environment_of(uint64_t wait_cycles, uint64_t cancel, uint64_t lost) {
  return {wait_cycles, reinterpret_cast<const uint32_t*>(cancel), 0, reinterpret_cast<const uint32_t*>(lost)};
}

// As many times `how.blocks` as there are `rows` of the grid.
template <class... Parameters, class... Arguments>
int launch_rows(const ep_cuda_launch& how, uint32_t rows, const grid_needs& needs, void (*kernel)(Parameters...), const Arguments&... arguments) {
  if (how.lanes == 0 || how.lanes % 32 != 0) return cudaErrorInvalidConfiguration;
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(how.blocks, rows);
  config.blockDim = dim3(how.lanes);
  config.dynamicSmemBytes = needs.shared_bytes;
  config.stream = static_cast<cudaStream_t>(how.stream);
  config.attrs = &together;
  config.numAttrs = needs.cooperative ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <class... Parameters, class... Arguments>
int launch_with(const ep_cuda_launch& how, const grid_needs& needs, void (*kernel)(Parameters...), const Arguments&... arguments) {
  return launch_rows(how, 1, needs, kernel, environment_of(how.wait_cycles, how.cancel, how.lost), arguments...);
}

} // namespace ep
