// What every kernel for experts does first.
#pragma once

#include "ep/device/cuda_context.h"
#include "ep/device/moe_launch.h"

namespace ep {

constexpr uint32_t most_moe_lanes = 512;

/* HAZARD: a rank gives up another when its own time is up, for the whole half: were each wait to have a limit of its own, one that waits for several dead ranks would be
 * late itself, and be given up by those that wait for it. Times of a call are handed over counted from the kernel's begin, which the host does not know. Both are the
 * block's own: kept where all of its lanes see them. */
struct moe_begun {
  cuda_environment environment;
  uint64_t begin_ns;
};

__device__ __forceinline__ void moe_begin(moe_begun& own, const cuda_environment& environment) {
  if (threadIdx.x == 0) {
    own.environment = environment;
    own.environment.since = static_cast<uint64_t>(clock64());
    own.begin_ns = cuda_context{environment}.clock_ns();
  }
  __syncthreads();
}

/* Where peers' memory is, in the block's own memory: whatever a kernel reads or writes of a peer it asks for first, and each time that is as far as memory, since a load that acquires sweeps the first-level cache. */
struct moe_near {
  static constexpr uint32_t most_peers = 32; // more stay where they are
  ep_memory_handle memory;
  ep_peer_view peers[most_peers];
};

/* By all threads of a block, before a barrier of it. */
__device__ __forceinline__ void moe_bring_near(moe_near& near, const ep_memory_handle& memory) {
  const bool fits = static_cast<uint32_t>(memory.world_size) <= moe_near::most_peers;
  const uint32_t words = fits ? static_cast<uint32_t>(memory.world_size) * static_cast<uint32_t>(sizeof(ep_peer_view) / 8) : 0;
  for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) reinterpret_cast<uint64_t*>(near.peers)[i] = reinterpret_cast<const uint64_t*>(memory.peers)[i];
  if (threadIdx.x != 0) return;
  near.memory = memory;
  if (fits) near.memory.peers = reinterpret_cast<uint64_t>(near.peers);
}

__device__ __forceinline__ uint64_t moe_from_begin(const moe_begun& own, uint64_t ns) { return ns == 0 ? 0 : own.begin_ns + ns; }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
struct moe_dispatch_context : cuda_context {
  __device__ moe_dispatch_context(const cuda_environment& environment, void*) : cuda_context{environment} {}
};
#else
using moe_dispatch_context = cuda_bulk_context;
#endif

/* Of a kernel that takes rows by the copy engine, where there is one: bytes of a block's own memory for those under way. */
inline int moe_row_bytes_of(const void* kernel, uint32_t lanes, uint32_t* bytes) {
  *bytes = 0;
  cudaFuncAttributes facts{};
  const int error = cudaFuncGetAttributes(&facts, kernel);
  if (error == 0 && facts.binaryVersion >= 90) *bytes = lanes / 32 * cuda_bulk_memory;
  return error;
}

} // namespace ep
