// What the GPU test needs of the CUDA runtime, for a translation unit that is compiled for the host.
#pragma once

#include <cstddef>

namespace ep::test {

void* gpu_pinned(size_t bytes);  // host memory at the same address on the device; null when there is none
void* gpu_memory(size_t bytes);  // zeroed device memory; null when there is none
void gpu_free(void* device);
int gpu_copy(void* to, const void* from, size_t bytes); // either side may be the device
void* gpu_stream();
int gpu_finish(void* stream); // waits; a CUDA error number
void gpu_stream_free(void* stream);

} // namespace ep::test
