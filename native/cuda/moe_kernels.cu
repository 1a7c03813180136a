// Dispatch and combine of experts on the GPU: ep/device/moe_*.h over the CUDA context. Those of low latency have a file of their own.
#include "kernels.hpp"
#include "launch.cuh"
#include "moe_begin.cuh"

namespace ep {
namespace {

extern __shared__ __align__(128) uint8_t row_memory[];

__global__ void __launch_bounds__(most_moe_lanes) moe_dispatch_kernel(const __grid_constant__ cuda_environment environment, const __grid_constant__ ep_moe_buffer buffer,
                                                                      const __grid_constant__ ep_moe_dispatch_args given, const uint32_t halves) {
  __shared__ moe_begun own;
  __shared__ ep_moe_dispatch_args args;
  if (threadIdx.x == 0) args = given;
  moe_begin(own, environment);
  if (threadIdx.x == 0) {
    args.call.epoch = moe_epoch_of(buffer, given.call, (halves & moe_send_half) != 0);
    args.call.credits_by_ns = moe_from_begin(own, given.call.credits_by_ns);
    args.call.counts_by_ns = moe_from_begin(own, given.call.counts_by_ns);
    args.call.answers_by_ns = moe_from_begin(own, given.call.answers_by_ns);
  }
  __syncthreads();
  moe_dispatch_context ctx{own.environment, row_memory};
  moe_high_throughput_dispatch(ctx, load_store_endpoint{buffer.memory}, buffer, args, halves);
}

__global__ void __launch_bounds__(most_moe_lanes) moe_combine_kernel(const __grid_constant__ cuda_environment environment, const __grid_constant__ ep_moe_buffer buffer,
                                                                     const __grid_constant__ ep_moe_combine_args given, const uint32_t halves) {
  __shared__ moe_begun own;
  moe_begin(own, environment);
  ep_moe_combine_args args = given; // the epoch in a register, the rest where it is: in shared memory sums took a tenth longer
  args.call.epoch = moe_epoch_of(buffer, given.call, false);
  cuda_context ctx{own.environment};
  moe_run_combine(ctx, load_store_endpoint{buffer.memory}, buffer, args, halves);
}

__global__ void __launch_bounds__(most_moe_lanes)
    moe_release_kernel(const __grid_constant__ cuda_environment environment, const __grid_constant__ ep_moe_buffer buffer, const __grid_constant__ ep_moe_call given) {
  cuda_context ctx{environment};
  ep_moe_call call = given;
  call.epoch = moe_epoch_of(buffer, given, false);
  moe_release(ctx, load_store_endpoint{buffer.memory}, buffer, call);
}

const void* const kernels[] = {reinterpret_cast<const void*>(moe_dispatch_kernel), reinterpret_cast<const void*>(moe_combine_kernel),
                               reinterpret_cast<const void*>(moe_release_kernel)};

// Bytes of a block's own memory for rows that a kernel has under way.
int row_bytes_of(const void* kernel, uint32_t lanes, uint32_t* bytes) {
  *bytes = 0;
  return kernel == reinterpret_cast<const void*>(moe_dispatch_kernel) ? moe_row_bytes_of(kernel, lanes, bytes) : 0;
}

bool takes(const ep_cuda_launch& how, const ep_moe_buffer& buffer) { return buffer.memory.header.kind == EP_MEMORY_LOAD_STORE && how.lanes <= most_moe_lanes; }

} // namespace

int cuda_load_moe() {
  for (const void* kernel : kernels) {
    cudaFuncAttributes ignored{};
    if (const int error = cudaFuncGetAttributes(&ignored, kernel); error != 0) return error;
    uint32_t most = 0;
    if (const int error = row_bytes_of(kernel, most_moe_lanes, &most); error != 0) return error;
    if (most == 0) continue;
    if (const int error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most)); error != 0) return error;
  }
  return cuda_load_moe_low_latency();
}

int cuda_resident_moe(uint32_t lanes, int* each) {
  *each = 0;
  if (lanes > most_moe_lanes) return cudaErrorInvalidConfiguration;
  for (const void* kernel : kernels) {
    int fits = 0;
    uint32_t bytes = 0;
    if (const int error = row_bytes_of(kernel, lanes, &bytes); error != 0) return error;
    if (const int error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fits, kernel, static_cast<int>(lanes), bytes); error != 0) return error;
    *each = *each == 0 || fits < *each ? fits : *each;
  }
  int others = 0;
  if (const int error = cuda_resident_moe_low_latency(lanes, &others); error != 0) return error;
  *each = others < *each ? others : *each;
  return 0;
}

int cuda_moe_dispatch(const ep_cuda_launch& how, const ep_moe_buffer& buffer, const ep_moe_dispatch_args& args, uint32_t halves) {
  if (!takes(how, buffer)) return cudaErrorInvalidValue;
  if (buffer.header.kind == EP_MOE_LOW_LATENCY) {
    const ep_cuda_moe_rank one{&buffer, &args, nullptr, how.wait_cycles, how.cancel, how.lost};
    return cuda_moe_together(how, &one, 1, halves);
  }
  uint32_t bytes = 0;
  if (const int error = row_bytes_of(kernels[0], how.lanes, &bytes); error != 0) return error;
  return launch_with(how, {true, bytes}, moe_dispatch_kernel, buffer, args, halves);
}

int cuda_moe_combine(const ep_cuda_launch& how, const ep_moe_buffer& buffer, const ep_moe_combine_args& args, uint32_t halves) {
  if (!takes(how, buffer)) return cudaErrorInvalidValue;
  if (buffer.header.kind == EP_MOE_LOW_LATENCY) {
    const ep_cuda_moe_rank one{&buffer, nullptr, &args, how.wait_cycles, how.cancel, how.lost};
    return cuda_moe_together(how, &one, 1, halves);
  }
  return launch_with(how, {true, 0}, moe_combine_kernel, buffer, args, halves);
}

int cuda_moe_release(const ep_cuda_launch& how, const ep_moe_buffer& buffer, const ep_moe_call& call) {
  if (!takes(how, buffer)) return cudaErrorInvalidValue;
  return launch_with(how, {true, 0}, moe_release_kernel, buffer, call);
}

} // namespace ep
