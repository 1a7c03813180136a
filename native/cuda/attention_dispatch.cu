// The GPU kernels: ep/device code over the CUDA context.
#include <cuda_runtime.h>

#include "../core/device/compat.hpp"
#include "ep/device/attention_dispatch.h"
#include "ep/device/compat_dispatch.h"
#include "ep/device/cuda_context.h"
#include "ep/device/ibgda_endpoint.h"
#include "ep/device/replica_sum.h"
#include "launch.hpp"

namespace ep {
namespace {

// The end of a kernel is the end of its reads, for whatever comes next on the stream. Behind a proxy it is not: its engine's owner says when.
template <class Endpoint> EP_HD void end_reads(cuda_context&, const Endpoint&, uint64_t) {}
EP_HD void end_reads(cuda_context& ctx, const ibgda_endpoint& endpoint, uint64_t status) {
  ctx.sync_block(); /* other warps of the block may have posted later */
  endpoint.quiet_key(ctx, block_coop<cuda_context>{ctx}, reinterpret_cast<ep_kernel_status*>(status));
}

// sums == nullptr: no gradient.
template <class Endpoint>
__global__ void dispatch_kernel(const __grid_constant__ cuda_environment environment, const __grid_constant__ ep_dispatch_args args,
                                const ep_replica_sum_args* sums, uint32_t sum_count) {
  cuda_context ctx{environment};
  const Endpoint endpoint{args.memory};
  attention_gradient(ctx, endpoint, args, sums, sum_count);
  end_reads(ctx, endpoint, args.status);
}

template <class Endpoint>
__global__ void compat_kernel(const __grid_constant__ cuda_environment environment, const __grid_constant__ ep_compat_args args) {
  cuda_context ctx{environment};
  const Endpoint endpoint{args.memory};
  compat_dispatch(ctx, endpoint, args);
  end_reads(ctx, endpoint, args.status);
}

__global__ void sum_kernel(const __grid_constant__ cuda_environment environment, const __grid_constant__ ep_replica_sum_args args) {
  cuda_context ctx{environment};
  replica_sum(ctx, args);
}

template <class... Parameters, class... Arguments>
int launch_cooperative(const cuda_launch& launch, void (*kernel)(Parameters...), Arguments... arguments) {
  const cuda_environment environment{launch.wait_cycles, reinterpret_cast<const uint32_t*>(launch.cancel)};
  if (launch.lanes == 0 || launch.lanes % 32 != 0) return cudaErrorInvalidConfiguration;
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(launch.blocks);
  config.blockDim = dim3(launch.lanes);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = &cooperative;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, environment, arguments...);
}

int dispatch_launch(const cuda_launch& launch, const ep_dispatch_args& args, const ep_replica_sum_args* sums, uint32_t sum_count) {
  if (args.memory.header.kind == EP_MEMORY_LOAD_STORE) {
    return launch_cooperative(launch, dispatch_kernel<load_store_endpoint>, args, sums, sum_count);
  }
  if (args.memory.header.kind == EP_MEMORY_PROXY) return launch_cooperative(launch, dispatch_kernel<proxy_endpoint>, args, sums, sum_count);
  if (args.memory.header.kind == EP_MEMORY_IBGDA) return launch_cooperative(launch, dispatch_kernel<ibgda_endpoint>, args, sums, sum_count);
  return cudaErrorInvalidValue;
}

} // namespace

int cuda_device_count(int* count) { return cudaGetDeviceCount(count); }

const char* cuda_error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

int cuda_attention_dispatch(const cuda_launch& launch, const ep_dispatch_args& args) { return dispatch_launch(launch, args, nullptr, 0); }

int cuda_attention_gradient(const cuda_launch& launch, const ep_dispatch_args& args, uint64_t sums, uint32_t sum_count) {
  return dispatch_launch(launch, args, reinterpret_cast<const ep_replica_sum_args*>(sums), sum_count);
}

int cuda_replica_sum(const cuda_launch& launch, const ep_replica_sum_args& args) { return launch_cooperative(launch, sum_kernel, args); }

int cuda_compat_dispatch(const cuda_launch& launch, const ep_compat_args& args) {
  if (compat_refusal(args) != nullptr || launch.lanes != compat_block_lanes) return cudaErrorInvalidValue;
  if (args.memory.header.kind == EP_MEMORY_LOAD_STORE) return launch_cooperative(launch, compat_kernel<load_store_endpoint>, args);
  if (args.memory.header.kind == EP_MEMORY_PROXY) return launch_cooperative(launch, compat_kernel<proxy_endpoint>, args);
  if (args.memory.header.kind == EP_MEMORY_IBGDA) return launch_cooperative(launch, compat_kernel<ibgda_endpoint>, args);
  return cudaErrorInvalidValue;
}

} // namespace ep
