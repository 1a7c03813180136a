// Core attention on the GPU: ep/device/core_attention.h over the CUDA context, its scratch in shared memory.
#include "ep/device/core_attention.h"

#include "kernels.hpp"
#include "launch.cuh"

namespace ep {
namespace {

constexpr uint32_t attention_lanes = 256;
constexpr uint64_t most_blocks = 1u << 20;

using attention_kernel = void (*)(const cuda_environment, const ep_attention_args);

__global__ void __launch_bounds__(attention_lanes)
    forward_kernel(const __grid_constant__ cuda_environment environment, const __grid_constant__ ep_attention_args args) {
  extern __shared__ float scratch[];
  cuda_context ctx{environment};
  core_attention_forward(ctx, args, scratch);
}

__global__ void __launch_bounds__(attention_lanes)
    backward_kernel(const __grid_constant__ cuda_environment environment, const __grid_constant__ ep_attention_args args) {
  extern __shared__ float scratch[];
  cuda_context ctx{environment};
  core_attention_backward(ctx, args, scratch);
}

int launch_items(const ep_cuda_launch& how, attention_kernel kernel, const ep_attention_args& args, uint64_t items, uint32_t floats) {
  if (items == 0) return 0;
  ep_cuda_launch wide = how;
  wide.blocks = static_cast<uint32_t>(items < most_blocks ? items : most_blocks);
  wide.lanes = attention_lanes;
  return launch_with(wide, {false, floats * static_cast<uint32_t>(sizeof(float))}, kernel, args);
}

} // namespace

int cuda_load_attention() {
  int device = 0;
  int most = 0;
  if (const int error = cudaGetDevice(&device); error != 0) return error;
  if (const int error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device); error != 0) return error;
  for (const attention_kernel kernel : {attention_kernel{forward_kernel}, attention_kernel{backward_kernel}}) {
    cudaFuncAttributes ignored{};
    if (const int error = cudaFuncGetAttributes(&ignored, kernel); error != 0) return error;
    if (const int error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most); error != 0) return error;
  }
  return 0;
}

int cuda_attention_forward(const ep_cuda_launch& how, const ep_attention_args& args) {
  return launch_items(how, forward_kernel, args, uint64_t{args.tiles} * args.q_heads, EP_ATTENTION_FORWARD_FLOATS(args.head_dim));
}

int cuda_attention_backward(const ep_cuda_launch& how, const ep_attention_args& args) {
  const uint64_t of_keys = (args.kv_rows + EP_ATTENTION_TILE - 1) / EP_ATTENTION_TILE * args.kv_heads;
  return launch_items(how, backward_kernel, args, of_keys + uint64_t{args.tiles} * args.q_heads, EP_ATTENTION_BACKWARD_FLOATS(args.head_dim));
}

} // namespace ep
