#include "moe_kernels.hpp"

#include "ep/device/cuda_context.h"
#include "ep/device/ibgda_endpoint.h"
#include "ep/device/moe_combine.h"
#include "ep/device/moe_compact.h"
#include "ep/device/moe_dispatch.h"

namespace {

template <class Endpoint>
__global__ void one_half(const __grid_constant__ ep::cuda_environment environment, const __grid_constant__ ep_moe_buffer buffer,
                         const __grid_constant__ ep_moe_dispatch_args dispatch, const __grid_constant__ ep_moe_combine_args combine, uint32_t half) {
  ep::cuda_context ctx{environment};
  const Endpoint endpoint{buffer.memory};
  const bool compact = buffer.header.kind == EP_MOE_HIGH_THROUGHPUT;
  switch (half) {
    case 0:
      if (compact) ep::moe_compact_send(ctx, endpoint, buffer, dispatch);
      else ep::moe_dispatch_send(ctx, endpoint, buffer, dispatch);
      break;
    case 1:
      if (compact) ep::moe_compact_receive(ctx, endpoint, buffer, dispatch);
      else ep::moe_dispatch_receive(ctx, endpoint, buffer, dispatch);
      break;
    case 2: ep::moe_combine_send(ctx, endpoint, buffer, combine); break;
    default: ep::moe_combine_receive(ctx, endpoint, buffer, combine);
  }
}

template <class Endpoint>
int launch(void* stream, uint32_t blocks, uint32_t lanes, const ep_moe_buffer& buffer, const ep_moe_dispatch_args& dispatch, const ep_moe_combine_args& combine,
           uint32_t half) {
  const ep::cuda_environment environment{20'000'000'000, nullptr, 0};
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(lanes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &cooperative;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, one_half<Endpoint>, environment, buffer, dispatch, combine, half);
}

} // namespace

namespace ep::test {

int gpu_moe(void* stream, uint32_t blocks, uint32_t lanes, const ep_moe_buffer& buffer, const ep_moe_dispatch_args& dispatch, const ep_moe_combine_args& combine,
            uint32_t half) {
  if (buffer.memory.header.kind == EP_MEMORY_LOAD_STORE) return launch<load_store_endpoint>(stream, blocks, lanes, buffer, dispatch, combine, half);
  if (buffer.memory.header.kind == EP_MEMORY_PROXY) return launch<proxy_endpoint>(stream, blocks, lanes, buffer, dispatch, combine, half);
  return launch<ibgda_endpoint>(stream, blocks, lanes, buffer, dispatch, combine, half);
}

} // namespace ep::test
