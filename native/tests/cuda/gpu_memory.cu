#include "gpu_memory.hpp"

namespace ep::test {

void* gpu_pinned(size_t bytes) {
  void* made = nullptr;
  return cudaHostAlloc(&made, bytes, cudaHostAllocMapped | cudaHostAllocPortable) == cudaSuccess ? made : nullptr;
}

void* gpu_memory(size_t bytes) {
  void* made = nullptr;
  if (cudaMalloc(&made, bytes) != cudaSuccess) return nullptr;
  /* HAZARD: the call returns before the memory is cleared, and streams of tests do not wait for the one that clears it: where processes share the GPU, rows had come before. */
  return cudaMemset(made, 0, bytes) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess ? made : nullptr;
}

void gpu_free(void* device) { cudaFree(device); }

int gpu_copy(void* to, const void* from, size_t bytes) { return cudaMemcpy(to, from, bytes, cudaMemcpyDefault); }

void* gpu_stream() {
  cudaStream_t made = nullptr;
  return cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking) == cudaSuccess ? made : nullptr;
}

int gpu_finish(void* stream) { return cudaStreamSynchronize(static_cast<cudaStream_t>(stream)); }

void gpu_stream_free(void* stream) { cudaStreamDestroy(static_cast<cudaStream_t>(stream)); }

} // namespace ep::test
