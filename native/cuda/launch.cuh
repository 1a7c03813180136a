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

template <class... Parameters, class... Arguments>
int launch_with(const ep_cuda_launch& how, const grid_needs& needs, void (*kernel)(Parameters...), Arguments... arguments) {
  const cuda_environment environment{how.wait_cycles, reinterpret_cast<const uint32_t*>(how.cancel), 0, reinterpret_cast<const uint32_t*>(how.lost)};
  if (how.lanes == 0 || how.lanes % 32 != 0) return cudaErrorInvalidConfiguration;
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(how.blocks);
  config.blockDim = dim3(how.lanes);
  config.dynamicSmemBytes = needs.shared_bytes;
  config.stream = static_cast<cudaStream_t>(how.stream);
  config.attrs = &together;
  config.numAttrs = needs.cooperative ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, environment, arguments...);
}

} // namespace ep
