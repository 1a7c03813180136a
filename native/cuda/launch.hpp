// Launchers of the GPU kernels, for host code that never sees cuda_runtime.h. Everything an argument points to must be reachable from the
// device. Calls return a CUDA error number, 0 for success, and do not wait for the kernel.
#pragma once

#include <cstdint>

#include "ep/abi/compat.h"
#include "ep/abi/dispatch.h"

namespace ep {

struct cuda_launch {
  uint32_t blocks;       // all of them must fit on the device at once; more is an error of the launch
  uint32_t lanes;        // of a block; whole warps of 32
  uint64_t wait_cycles;  // of the SM's clock that one wait may take; 0: no limit
  uint64_t cancel;       // device-visible address of a uint32_t that ends the waits when not 0, or 0
  void* stream;          // cudaStream_t
};

int cuda_device_count(int* count);
const char* cuda_error_text(int error);

// The endpoint follows args.memory.header.kind.
int cuda_attention_dispatch(const cuda_launch& launch, const ep_dispatch_args& args);
int cuda_attention_gradient(const cuda_launch& launch, const ep_dispatch_args& args, uint64_t sums, uint32_t sum_count);
int cuda_replica_sum(const cuda_launch& launch, const ep_replica_sum_args& args);

// Refuses (cudaErrorInvalidValue) what core/device/compat.hpp refuses; launch.lanes must be compat_block_lanes.
int cuda_compat_dispatch(const cuda_launch& launch, const ep_compat_args& args);

} // namespace ep
