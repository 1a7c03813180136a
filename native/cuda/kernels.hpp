// Launchers of the GPU kernels, for host code that never sees cuda_runtime.h. Everything an argument points to must be reachable from the device. Calls
// return a CUDA error number, 0 for success, and do not wait for the kernel.
#pragma once

#include "table.h"

namespace ep {

// All blocks of a dispatch must fit on the device at once: more is an error of the launch. The endpoint follows memory.header.kind.
int cuda_dispatch(const ep_cuda_launch& how, const ep_device_call& call);
// The same with parts, counts and sums in memory, for callers that count by themselves.
int cuda_gradient(const ep_cuda_launch& how, const ep_dispatch_args& args, const ep_replica_sum_args* sums, uint32_t sum_count);
int cuda_replica_sum(const ep_cuda_launch& how, const ep_replica_sum_args& args);
// Refuses (cudaErrorInvalidValue) what core/device/compat.hpp refuses; how.lanes must be compat_block_lanes.
int cuda_compat(const ep_cuda_launch& how, const ep_compat_args& args);

// One block each.
int cuda_begin_call(const ep_cuda_launch& how, const ep_call_counts& counts);
int cuda_grant(const ep_cuda_launch& how, const ep_device_grant& grant);

// As many blocks as there is work, whatever `how` says: they wait for nobody.
int cuda_attention_forward(const ep_cuda_launch& how, const ep_attention_args& args);
int cuda_attention_backward(const ep_cuda_launch& how, const ep_attention_args& args);
int cuda_experts_forward(const ep_cuda_launch& how, const ep_expert_args& args);

// Of memory that is loaded and stored directly. See table.h for times.
int cuda_moe_dispatch(const ep_cuda_launch& how, const ep_moe_buffer& buffer, const ep_moe_dispatch_args& args, uint32_t halves);
int cuda_moe_combine(const ep_cuda_launch& how, const ep_moe_buffer& buffer, const ep_moe_combine_args& args, uint32_t halves);
int cuda_moe_release(const ep_cuda_launch& how, const ep_moe_buffer& buffer, const ep_moe_call& call);

// As in table.h.
int cuda_moe_together(const ep_cuda_launch& how, const ep_cuda_moe_rank* ranks, uint32_t count, uint32_t halves);
int cuda_copy_pieces(const ep_cuda_launch& how, const ep_cuda_piece* pieces, uint32_t count);

// Of memory that is loaded and stored directly; refuses (cudaErrorInvalidValue) more blocks than the layout has.
int cuda_group_call(const ep_cuda_launch& how, const ep_group_args& args);

// HAZARD: the runtime loads a kernel at its first launch, which waits for those that run; and a rank's kernel may wait for the one that is to be loaded. So all that
// ranks launch is loaded before any of it runs.
int cuda_load_kernels();
int cuda_load_attention(); // parts of it
int cuda_load_experts();
int cuda_load_moe();
int cuda_load_moe_low_latency(); // part of it
int cuda_load_group();

// EP_CUDA_KERNEL_*; of several kernels, as many as of the widest.
int cuda_resident(int device, uint32_t kernel, uint32_t lanes, uint32_t* blocks);
int cuda_resident_moe(uint32_t lanes, int* each); // on one multiprocessor
int cuda_resident_moe_low_latency(uint32_t lanes, int* each);
int cuda_resident_group(uint32_t lanes, int* each);

} // namespace ep
