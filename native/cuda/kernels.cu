// The GPU kernels: ep/device code over the CUDA context.
#include "kernels.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>

#include "../core/device/compat.hpp"
#include "ep/device/compat_dispatch.h"
#include "ep/device/cuda_context.h"
#include "ep/device/device_call.h"
#include "ep/device/ibgda_endpoint.h"
#include "launch.cuh"

namespace ep {
namespace {

// Two blocks of 512 lanes on a multiprocessor need no more than 64 registers of a lane.
constexpr uint32_t most_lanes = 1024;

// The end of a kernel is the end of its reads, for whatever comes next on the stream. Behind a proxy it is not: its engine's owner says when.
template <class Endpoint> EP_HD void end_reads(cuda_context&, const Endpoint&, uint64_t) {}
EP_HD void end_reads(cuda_context& ctx, const ibgda_endpoint& endpoint, uint64_t status) {
  ctx.sync_block(); /* other warps of the block may have posted later */
  endpoint.quiet_key(ctx, block_coop<cuda_context>{ctx}, reinterpret_cast<ep_kernel_status*>(status));
}

template <class Endpoint>
__global__ void __launch_bounds__(most_lanes, 1)
    dispatch_kernel(const __grid_constant__ cuda_environment environment, const __grid_constant__ ep_device_call call) {
  cuda_context ctx{environment};
  const Endpoint endpoint{call.args.memory};
  device_dispatch(ctx, endpoint, call);
  end_reads(ctx, endpoint, call.args.status);
}

// As dispatch_kernel, of parts in memory.
template <class Endpoint>
__global__ void __launch_bounds__(most_lanes, 1)
    gradient_kernel(const __grid_constant__ cuda_environment environment, const __grid_constant__ ep_dispatch_args args,
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

__global__ void begin_kernel(const __grid_constant__ cuda_environment environment, const __grid_constant__ ep_call_counts counts) {
  cuda_context ctx{environment};
  begin_call(ctx, counts);
}

template <class Endpoint> __global__ void grant_kernel(const __grid_constant__ cuda_environment environment, const __grid_constant__ ep_device_grant grant) {
  cuda_context ctx{environment};
  const Endpoint endpoint{grant.memory};
  grant_lease(ctx, endpoint, grant);
  end_reads(ctx, endpoint, 0); /* whoever awaits the stream may then take the memory away, when all have */
}

template <class... Parameters, class... Arguments>
int launch(const ep_cuda_launch& how, bool cooperative, void (*kernel)(Parameters...), Arguments... arguments) {
  return launch_with(how, {cooperative, 0}, kernel, arguments...);
}

// Blocks that one multiprocessor runs at once of whichever of these kernels has the fewest.
template <class... Kernels> int fewest(uint32_t lanes, int* each, Kernels... kernels) {
  *each = INT_MAX;
  int error = 0;
  for (const void* code : {reinterpret_cast<const void*>(kernels)...}) {
    int found = 0;
    if (error == 0) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, code, static_cast<int>(lanes), 0);
    if (found < *each) *each = found;
  }
  return error;
}

struct all_pieces {
  ep_cuda_piece each[EP_CUDA_MOST_PIECES];
};
constexpr uint32_t piece_lanes = 32;
constexpr uint32_t piece_vectors = 8; // of each lane: more are other blocks'
constexpr uint64_t most_piece_parts = 65535; // blocks of a grid's second extent

template <class Vector> __device__ void copy_piece(const ep_cuda_piece& piece, uint64_t from, uint64_t to) {
  Vector held[piece_vectors];
  const uint64_t first = from + uint64_t{piece_lanes * piece_vectors} * blockIdx.y + threadIdx.x;
#pragma unroll
  for (uint32_t n = 0; n < piece_vectors; ++n) {
    if (first + n * piece_lanes < to) held[n] = __ldcv(reinterpret_cast<const Vector*>(piece.from) + first + n * piece_lanes);
  }
#pragma unroll
  for (uint32_t n = 0; n < piece_vectors; ++n) {
    if (first + n * piece_lanes < to) reinterpret_cast<Vector*>(piece.to)[first + n * piece_lanes] = held[n];
  }
}

// Some blocks for each. HAZARD: the host has written some of them since an earlier launch: loads go past what a cache may keep of its memory. HAZARD: where ranks of one GPU have all of it between them, the rest
// waits for the rank that this is launched for: so a block is no larger than the least of a call's, in whose place it runs.
__global__ void __launch_bounds__(piece_lanes) pieces_kernel(const __grid_constant__ all_pieces all) {
  const ep_cuda_piece& piece = all.each[blockIdx.x];
  const uint64_t vectors = ((piece.to | piece.from) & 15) == 0 ? piece.bytes / 16 : 0;
  copy_piece<uint4>(piece, 0, vectors);
  copy_piece<uint32_t>(piece, vectors * 4, piece.bytes / 4);
}

} // namespace

int cuda_load_kernels() {
  const void* kernels[] = {reinterpret_cast<const void*>(dispatch_kernel<load_store_endpoint>), reinterpret_cast<const void*>(compat_kernel<load_store_endpoint>),
                           reinterpret_cast<const void*>(begin_kernel), reinterpret_cast<const void*>(grant_kernel<load_store_endpoint>),
                           reinterpret_cast<const void*>(dispatch_kernel<ibgda_endpoint>), reinterpret_cast<const void*>(grant_kernel<ibgda_endpoint>),
                           reinterpret_cast<const void*>(pieces_kernel)};
  for (const void* kernel : kernels) {
    cudaFuncAttributes ignored{};
    if (const int error = cudaFuncGetAttributes(&ignored, kernel); error != 0) return error;
  }
  if (const int error = cuda_load_attention(); error != 0) return error;
  if (const int error = cuda_load_experts(); error != 0) return error;
  if (const int error = cuda_load_moe(); error != 0) return error;
  return cuda_load_group();
}

int cuda_resident(int device, uint32_t kernel, uint32_t lanes, uint32_t* blocks) {
  *blocks = 0;
  int each = 0;
  int multiprocessors = 0;
  const int error = kernel == EP_CUDA_KERNEL_MOE      ? cuda_resident_moe(lanes, &each)
                    : kernel == EP_CUDA_KERNEL_GROUP  ? cuda_resident_group(lanes, &each)
                    : kernel == EP_CUDA_KERNEL_COMPAT ? fewest(lanes, &each, compat_kernel<load_store_endpoint>)
                                                      : fewest(lanes, &each, dispatch_kernel<load_store_endpoint>, dispatch_kernel<ibgda_endpoint>);
  if (error != 0) return error;
  if (const int unknown = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device); unknown != 0) return unknown;
  *blocks = static_cast<uint32_t>(each * multiprocessors);
  return 0;
}

int cuda_begin_call(const ep_cuda_launch& how, const ep_call_counts& counts) { return launch(how, false, begin_kernel, counts); }

int cuda_dispatch(const ep_cuda_launch& how, const ep_device_call& call) {
  if (call.args.part_count > EP_CALL_PARTS) return cudaErrorInvalidValue;
  switch (call.args.memory.header.kind) {
    case EP_MEMORY_LOAD_STORE: return launch(how, true, dispatch_kernel<load_store_endpoint>, call);
    case EP_MEMORY_PROXY: return launch(how, true, dispatch_kernel<proxy_endpoint>, call);
    case EP_MEMORY_IBGDA: return launch(how, true, dispatch_kernel<ibgda_endpoint>, call);
    default: return cudaErrorInvalidValue;
  }
}

int cuda_gradient(const ep_cuda_launch& how, const ep_dispatch_args& args, const ep_replica_sum_args* sums, uint32_t sum_count) {
  switch (args.memory.header.kind) {
    case EP_MEMORY_LOAD_STORE: return launch(how, true, gradient_kernel<load_store_endpoint>, args, sums, sum_count);
    case EP_MEMORY_PROXY: return launch(how, true, gradient_kernel<proxy_endpoint>, args, sums, sum_count);
    case EP_MEMORY_IBGDA: return launch(how, true, gradient_kernel<ibgda_endpoint>, args, sums, sum_count);
    default: return cudaErrorInvalidValue;
  }
}

int cuda_grant(const ep_cuda_launch& how, const ep_device_grant& grant) {
  switch (grant.memory.header.kind) {
    case EP_MEMORY_LOAD_STORE: return launch(how, false, grant_kernel<load_store_endpoint>, grant);
    case EP_MEMORY_IBGDA: return launch(how, false, grant_kernel<ibgda_endpoint>, grant);
    default: return cudaErrorInvalidValue;
  }
}

int cuda_replica_sum(const ep_cuda_launch& how, const ep_replica_sum_args& args) { return launch(how, true, sum_kernel, args); }

int cuda_copy_pieces(const ep_cuda_launch& how, const ep_cuda_piece* pieces, uint32_t count) {
  if (count == 0 || count > EP_CUDA_MOST_PIECES) return cudaErrorInvalidValue;
  all_pieces all{};
  uint64_t parts = 1;
  for (uint32_t i = 0; i < count; ++i) {
    if (((pieces[i].to | pieces[i].from | pieces[i].bytes) & 3) != 0) return cudaErrorInvalidValue;
    all.each[i] = pieces[i];
    const bool wide = ((pieces[i].to | pieces[i].from) & 15) == 0;
    const uint64_t of_block = uint64_t{piece_lanes * piece_vectors} * (wide ? sizeof(uint4) : sizeof(uint32_t));
    parts = std::max(parts, (pieces[i].bytes + of_block - 1) / of_block);
  }
  if (parts > most_piece_parts) return cudaErrorInvalidValue;
  ep_cuda_launch each = how;
  each.blocks = count;
  each.lanes = piece_lanes;
  return launch_rows(each, static_cast<uint32_t>(parts), {false, 0}, pieces_kernel, all);
}

int cuda_compat(const ep_cuda_launch& how, const ep_compat_args& args) {
  if (compat_refusal(args) != nullptr || how.lanes != compat_block_lanes) return cudaErrorInvalidValue;
  switch (args.memory.header.kind) {
    case EP_MEMORY_LOAD_STORE: return launch(how, true, compat_kernel<load_store_endpoint>, args);
    case EP_MEMORY_PROXY: return launch(how, true, compat_kernel<proxy_endpoint>, args);
    case EP_MEMORY_IBGDA: return launch(how, true, compat_kernel<ibgda_endpoint>, args);
    default: return cudaErrorInvalidValue;
  }
}

} // namespace ep
