// Dispatch and combine of experts on the GPU: ep/device/moe_*.h over the CUDA context.
#include "ep/device/cuda_context.h"
#include "ep/device/moe_launch.h"

#include "kernels.hpp"
#include "launch.cuh"

namespace ep {
namespace {

constexpr uint32_t most_lanes = 512;

/* HAZARD: a rank gives up another when its own time is up, for the whole half: were each wait to have a limit of its own, one that waits for several dead ranks would be
 * late itself, and be given up by those that wait for it. Times of a call are handed over counted from the kernel's begin, which the host does not know. Both are the
 * block's own: kept where all of its lanes see them. */
struct begun {
  cuda_environment environment;
  uint64_t begin_ns;
};

__device__ __forceinline__ void begin(begun& own, const cuda_environment& environment) {
  if (threadIdx.x == 0) {
    own.environment = environment;
    own.environment.since = static_cast<uint64_t>(clock64());
    own.begin_ns = cuda_context{environment}.clock_ns();
  }
  __syncthreads();
}

__device__ __forceinline__ uint64_t from_begin(const begun& own, uint64_t ns) { return ns == 0 ? 0 : own.begin_ns + ns; }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
struct dispatch_context : cuda_context {
  __device__ dispatch_context(const cuda_environment& environment, void*) : cuda_context{environment} {}
};
#else
using dispatch_context = cuda_bulk_context;
#endif

extern __shared__ __align__(128) uint8_t row_memory[];

__global__ void __launch_bounds__(most_lanes) moe_dispatch_kernel(const __grid_constant__ cuda_environment environment, const __grid_constant__ ep_moe_buffer buffer,
                                                                  const __grid_constant__ ep_moe_dispatch_args given, const uint32_t halves) {
  __shared__ begun own;
  __shared__ ep_moe_dispatch_args args;
  if (threadIdx.x == 0) args = given;
  begin(own, environment);
  if (threadIdx.x == 0) {
    args.call.epoch = moe_epoch_of(buffer, given.call, (halves & moe_send_half) != 0);
    args.call.credits_by_ns = from_begin(own, given.call.credits_by_ns);
    args.call.counts_by_ns = from_begin(own, given.call.counts_by_ns);
    args.call.answers_by_ns = from_begin(own, given.call.answers_by_ns);
  }
  __syncthreads();
  dispatch_context ctx{own.environment, row_memory};
  moe_run_dispatch(ctx, load_store_endpoint{buffer.memory}, buffer, args, halves);
}

__global__ void __launch_bounds__(most_lanes) moe_combine_kernel(const __grid_constant__ cuda_environment environment, const __grid_constant__ ep_moe_buffer buffer,
                                                                 const __grid_constant__ ep_moe_combine_args given, const uint32_t halves) {
  __shared__ begun own;
  begin(own, environment);
  ep_moe_combine_args args = given; // the epoch in a register, the rest where it is: in shared memory sums took a tenth longer
  args.call.epoch = moe_epoch_of(buffer, given.call, false);
  cuda_context ctx{own.environment};
  moe_run_combine(ctx, load_store_endpoint{buffer.memory}, buffer, args, halves);
}

__global__ void __launch_bounds__(most_lanes)
    moe_release_kernel(const __grid_constant__ cuda_environment environment, const __grid_constant__ ep_moe_buffer buffer, const __grid_constant__ ep_moe_call given) {
  cuda_context ctx{environment};
  ep_moe_call call = given;
  call.epoch = moe_epoch_of(buffer, given, false);
  moe_release(ctx, load_store_endpoint{buffer.memory}, buffer, call);
}

const void* const kernels[] = {reinterpret_cast<const void*>(moe_dispatch_kernel), reinterpret_cast<const void*>(moe_combine_kernel),
                               reinterpret_cast<const void*>(moe_release_kernel)};

// Bytes of a block's own memory for rows that a kernel has under way: for code of GPUs that have a copy engine for it.
int row_bytes_of(const void* kernel, uint32_t lanes, uint32_t* bytes) {
  *bytes = 0;
  if (kernel != reinterpret_cast<const void*>(moe_dispatch_kernel)) return 0;
  cudaFuncAttributes facts{};
  const int error = cudaFuncGetAttributes(&facts, kernel);
  if (error == 0 && facts.binaryVersion >= 90) *bytes = lanes / 32 * cuda_bulk_memory;
  return error;
}

bool takes(const ep_cuda_launch& how, const ep_moe_buffer& buffer) { return buffer.memory.header.kind == EP_MEMORY_LOAD_STORE && how.lanes <= most_lanes; }

} // namespace

int cuda_load_moe() {
  for (const void* kernel : kernels) {
    cudaFuncAttributes ignored{};
    if (const int error = cudaFuncGetAttributes(&ignored, kernel); error != 0) return error;
    uint32_t most = 0;
    if (const int error = row_bytes_of(kernel, most_lanes, &most); error != 0) return error;
    if (most == 0) continue;
    if (const int error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most)); error != 0) return error;
  }
  return 0;
}

int cuda_resident_moe(uint32_t lanes, int* each) {
  *each = 0;
  if (lanes > most_lanes) return cudaErrorInvalidConfiguration;
  for (const void* kernel : kernels) {
    int fits = 0;
    uint32_t bytes = 0;
    if (const int error = row_bytes_of(kernel, lanes, &bytes); error != 0) return error;
    if (const int error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fits, kernel, static_cast<int>(lanes), bytes); error != 0) return error;
    *each = *each == 0 || fits < *each ? fits : *each;
  }
  return 0;
}

int cuda_moe_dispatch(const ep_cuda_launch& how, const ep_moe_buffer& buffer, const ep_moe_dispatch_args& args, uint32_t halves) {
  if (!takes(how, buffer)) return cudaErrorInvalidValue;
  uint32_t bytes = 0;
  if (const int error = row_bytes_of(kernels[0], how.lanes, &bytes); error != 0) return error;
  return launch_with(how, {true, bytes}, moe_dispatch_kernel, buffer, args, halves);
}

int cuda_moe_combine(const ep_cuda_launch& how, const ep_moe_buffer& buffer, const ep_moe_combine_args& args, uint32_t halves) {
  if (!takes(how, buffer)) return cudaErrorInvalidValue;
  return launch_with(how, {true, 0}, moe_combine_kernel, buffer, args, halves);
}

int cuda_moe_release(const ep_cuda_launch& how, const ep_moe_buffer& buffer, const ep_moe_call& call) {
  if (!takes(how, buffer)) return cudaErrorInvalidValue;
  return launch_with(how, {true, 0}, moe_release_kernel, buffer, call);
}

} // namespace ep
