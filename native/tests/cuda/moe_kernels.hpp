// Launchers of the kernels for experts, for the test that runs them on a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "ep/abi/moe.h"

namespace ep::test {

// One half of a call: 0 and 1 dispatch, 2 and 3 combine. A CUDA error number; does not wait for the kernel.
int gpu_moe(void* stream, uint32_t blocks, uint32_t lanes, const ep_moe_buffer& buffer, const ep_moe_dispatch_args& dispatch, const ep_moe_combine_args& combine,
            uint32_t half);

// One rank of a launch of several.
struct gpu_moe_rank {
  ep_moe_buffer buffer;
  const ep_moe_dispatch_args* dispatch;
  const ep_moe_combine_args* combine;
};
// The same half of all these, low latency and stored to, by the library's launch for several ranks.
int gpu_moe_together(void* stream, uint32_t blocks, uint32_t lanes, const std::vector<gpu_moe_rank>& ranks, uint32_t half);

// Floats of which e4m3 codes made in pairs differ from those made one by one. A CUDA error number.
int gpu_wrong_pairs(uint64_t* wrong);

} // namespace ep::test
