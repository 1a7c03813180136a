// Experts on the GPU: ep/device/expert_layer.h over the CUDA context, its scratch in shared memory.
#include "ep/device/expert_layer.h"

#include "kernels.hpp"
#include "launch.cuh"

namespace ep {
namespace {

constexpr uint32_t expert_lanes = 256;

__global__ void __launch_bounds__(expert_lanes) expert_kernel(const __grid_constant__ cuda_environment environment, const __grid_constant__ ep_expert_args args) {
  extern __shared__ float scratch[];
  cuda_context ctx{environment};
  expert_layer(ctx, args, scratch);
}

} // namespace

int cuda_load_experts() {
  int device = 0;
  int most = 0;
  if (const int error = cudaGetDevice(&device); error != 0) return error;
  if (const int error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device); error != 0) return error;
  cudaFuncAttributes ignored{};
  if (const int error = cudaFuncGetAttributes(&ignored, expert_kernel); error != 0) return error;
  return cudaFuncSetAttribute(expert_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
}

int cuda_experts_forward(const ep_cuda_launch& how, const ep_expert_args& args) {
  if (args.experts > EP_EXPERT_MOST) return cudaErrorInvalidValue;
  if (args.tiles == 0) return 0;
  ep_cuda_launch wide = how;
  wide.blocks = args.tiles;
  wide.lanes = expert_lanes;
  return launch_with(wide, {false, EP_EXPERT_FLOATS(args.hidden, args.intermediate) * static_cast<uint32_t>(sizeof(float))}, expert_kernel, args);
}

} // namespace ep
