#include "moe_kernels.hpp"

#include "../../cuda/kernels.hpp"

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
  const ep::cuda_environment environment{20'000'000'000, nullptr, 0, nullptr};
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

// Two codes at once, over all floats, beside the codes one by one.
__global__ void compare_pairs(unsigned long long* wrong) {
  const uint32_t threads = gridDim.x * blockDim.x;
  unsigned long long found = 0;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < uint64_t{1} << 32; i += threads) {
    const float low = ep::detail::bits_float(static_cast<uint32_t>(i));
    const float high = ep::detail::bits_float(static_cast<uint32_t>(i) * 0x9e3779b1u); // odd: every float once, too
    const uint32_t pair = ep::number_e4m3::store_pair(low, high);
    const auto same = [](uint32_t code, float value) {
      const uint32_t wanted = ep::number_e4m3::store(value);
      return code == wanted || (value != value && (code & 0x7fu) == 0x7fu);
    };
    found += !same(pair & 0xffu, low) + !same(pair >> 8, high);
  }
  if (found != 0) atomicAdd(wrong, found);
}

} // namespace

namespace ep::test {

int gpu_wrong_pairs(uint64_t* wrong) {
  unsigned long long* found = nullptr;
  unsigned long long here = 0;
  int error = cudaMalloc(&found, sizeof here);
  if (error == 0) error = cudaMemset(found, 0, sizeof here);
  if (error == 0) {
    compare_pairs<<<1024, 256>>>(found);
    error = cudaMemcpy(&here, found, sizeof here, cudaMemcpyDeviceToHost);
  }
  cudaFree(found);
  *wrong = here;
  return error;
}

int gpu_moe(void* stream, uint32_t blocks, uint32_t lanes, const ep_moe_buffer& buffer, const ep_moe_dispatch_args& dispatch, const ep_moe_combine_args& combine,
            uint32_t half) {
  if (buffer.memory.header.kind == EP_MEMORY_LOAD_STORE) return launch<load_store_endpoint>(stream, blocks, lanes, buffer, dispatch, combine, half);
  if (buffer.memory.header.kind == EP_MEMORY_PROXY) return launch<proxy_endpoint>(stream, blocks, lanes, buffer, dispatch, combine, half);
  return launch<ibgda_endpoint>(stream, blocks, lanes, buffer, dispatch, combine, half);
}

int gpu_moe_together(void* stream, uint32_t blocks, uint32_t lanes, const std::vector<gpu_moe_rank>& ranks, uint32_t half) {
  static const int loaded = cuda_load_moe_low_latency(); // also what its blocks need of shared memory
  if (loaded != 0) return loaded;
  std::vector<ep_cuda_moe_rank> all;
  for (const gpu_moe_rank& one : ranks) all.push_back({&one.buffer, half < 2 ? one.dispatch : nullptr, half < 2 ? nullptr : one.combine, 20'000'000'000, 0, 0});
  return cuda_moe_together({stream, blocks, lanes, 0, 0, 0}, all.data(), static_cast<uint32_t>(all.size()), 1 + half % 2);
}

} // namespace ep::test
