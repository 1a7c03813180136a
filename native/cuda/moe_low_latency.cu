// Dispatch and combine of experts in low-latency form on the GPU, of one rank or of several by one launch: row y of the grid has the blocks of rank y, which see a grid of their own.
#include "kernels.hpp"
#include "launch.cuh"
#include "moe_begin.cuh"
#include "moe_ranks.h"

namespace ep {
namespace {

// blockIdx.x and gridDim.x are those of the rank already; a barrier of the grid is that of the rank's blocks.
template <class Context> struct of_rank : Context {
  uint64_t* barrier;
  int32_t rank;
  template <class... Given>
  __device__ of_rank(const ep_moe_buffer& buffer, const ep_moe_call& call, const Given&... given)
      : Context{given...}, barrier(&moe_view{buffer, call}.peer(buffer.memory.rank).placed), rank(buffer.memory.rank) {}
  __device__ void sync_grid() const { detail::moe_sync_blocks(*this, barrier, rank); }
};

template <class Args> struct rank_call {
  cuda_environment environment;
  ep_moe_buffer buffer;
  Args args;
};
template <class Args> struct calls {
  rank_call<Args> ranks[EP_CUDA_MOST_MOE_RANKS];
};

extern __shared__ __align__(128) uint8_t row_memory[];

__global__ void __launch_bounds__(most_moe_lanes) dispatch_ranks(const __grid_constant__ calls<ep_moe_dispatch_args> all, const uint32_t halves) {
  __shared__ moe_begun own;
  __shared__ moe_near near;
  __shared__ ep_moe_dispatch_args args;
  const rank_call<ep_moe_dispatch_args>& given = all.ranks[blockIdx.y];
  for (uint32_t i = threadIdx.x; i < sizeof args / 8; i += blockDim.x) reinterpret_cast<uint64_t*>(&args)[i] = reinterpret_cast<const uint64_t*>(&given.args)[i];
  moe_begin(own, given.environment);
  moe_bring_near(near, given.buffer.memory);
  if (threadIdx.x == 0) {
    args.call.epoch = moe_epoch_of(given.buffer, given.args.call, (halves & moe_send_half) != 0);
    args.call.credits_by_ns = moe_from_begin(own, given.args.call.credits_by_ns);
    args.call.counts_by_ns = moe_from_begin(own, given.args.call.counts_by_ns);
    args.call.answers_by_ns = moe_from_begin(own, given.args.call.answers_by_ns);
  }
  __syncthreads();
  of_rank<moe_dispatch_context> ctx(given.buffer, given.args.call, own.environment, static_cast<void*>(row_memory));
  moe_low_latency_dispatch(ctx, load_store_endpoint{near.memory}, given.buffer, args, halves);
}

__global__ void __launch_bounds__(most_moe_lanes) combine_ranks(const __grid_constant__ calls<ep_moe_combine_args> all, const uint32_t halves) {
  __shared__ moe_begun own;
  __shared__ moe_near near;
  const rank_call<ep_moe_combine_args>& given = all.ranks[blockIdx.y];
  moe_bring_near(near, given.buffer.memory);
  moe_begin(own, given.environment);
  ep_moe_combine_args args = given.args; // the epoch in a register, the rest where it is: in shared memory sums took a tenth longer
  args.call.epoch = moe_epoch_of(given.buffer, given.args.call, false);
  of_rank<cuda_context> ctx(given.buffer, given.args.call, own.environment);
  moe_low_latency_combine(ctx, load_store_endpoint{near.memory}, given.buffer, args, halves);
}

const void* const dispatch_kernel = reinterpret_cast<const void*>(dispatch_ranks);
const void* const combine_kernel = reinterpret_cast<const void*>(combine_ranks);

template <class Args, class Of>
int launch_all(const ep_cuda_launch& how, const ep_cuda_moe_rank* ranks, uint32_t count, uint32_t halves, uint32_t bytes, void (*kernel)(const calls<Args>, uint32_t), const Of& of) {
  calls<Args> all{};
  for (uint32_t i = 0; i < count; ++i) all.ranks[i] = {environment_of(ranks[i].wait_cycles, ranks[i].cancel, ranks[i].lost), *ranks[i].buffer, *of(ranks[i])};
  return launch_rows(how, count, {true, bytes}, kernel, all, halves);
}

} // namespace

int cuda_load_moe_low_latency() {
  cudaFuncAttributes ignored{};
  if (const int error = cudaFuncGetAttributes(&ignored, combine_kernel); error != 0) return error;
  uint32_t most = 0;
  if (const int error = moe_row_bytes_of(dispatch_kernel, most_moe_lanes, &most); error != 0 || most == 0) return error;
  return cudaFuncSetAttribute(dispatch_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most));
}

int cuda_resident_moe_low_latency(uint32_t lanes, int* each) {
  uint32_t bytes = 0;
  int others = 0;
  if (const int error = moe_row_bytes_of(dispatch_kernel, lanes, &bytes); error != 0) return error;
  if (const int error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(each, dispatch_kernel, static_cast<int>(lanes), bytes); error != 0) return error;
  if (const int error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&others, combine_kernel, static_cast<int>(lanes), 0); error != 0) return error;
  *each = others < *each ? others : *each;
  return 0;
}

int cuda_moe_together(const ep_cuda_launch& how, const ep_cuda_moe_rank* ranks, uint32_t count, uint32_t halves) {
  if (how.lanes > most_moe_lanes || !moe_ranks_agree(ranks, count)) return cudaErrorInvalidValue;
  if (ranks[0].dispatch == nullptr) return launch_all<ep_moe_combine_args>(how, ranks, count, halves, 0, combine_ranks, [](const ep_cuda_moe_rank& of) { return of.combine; });
  uint32_t bytes = 0;
  if (const int error = moe_row_bytes_of(dispatch_kernel, how.lanes, &bytes); error != 0) return error;
  return launch_all<ep_moe_dispatch_args>(how, ranks, count, halves, bytes, dispatch_ranks, [](const ep_cuda_moe_rank& of) { return of.dispatch; });
}

} // namespace ep
