// Collective calls on tensors of a GPU: ep/device/group_call.h over the CUDA context.
#include "ep/device/group_call.h"

#include "kernels.hpp"
#include "launch.cuh"

namespace ep {
namespace {

constexpr uint32_t most_lanes = 512;

__global__ void __launch_bounds__(most_lanes) group_kernel(const __grid_constant__ cuda_environment environment, const __grid_constant__ ep_group_args args) {
  cuda_context ctx{environment};
  group_call(ctx, load_store_endpoint{args.memory}, args);
}

} // namespace

int cuda_load_group() {
  cudaFuncAttributes ignored{};
  return cudaFuncGetAttributes(&ignored, group_kernel);
}

int cuda_resident_group(uint32_t lanes, int* each) {
  if (lanes > most_lanes) return cudaErrorInvalidConfiguration;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(each, group_kernel, static_cast<int>(lanes), 0);
}

int cuda_group_call(const ep_cuda_launch& how, const ep_group_args& args) {
  if (args.memory.header.kind != EP_MEMORY_LOAD_STORE || how.blocks > args.blocks || args.memory.world_size > EP_GROUP_MOST_RANKS) return cudaErrorInvalidValue;
  return launch_with(how, {true, 0}, group_kernel, args);
}

} // namespace ep
