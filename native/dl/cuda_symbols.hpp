// The CUDA driver, opened by name: what the control path needs to put queues into GPU memory. Kernels are launched elsewhere (cuda/).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "library.hpp"

namespace ep::dl {

using cuda_result = int;         // 0: success
using cuda_device = int;         // ordinal's device
using cuda_context = void*;      // opaque
using cuda_stream = void*;       // opaque
using cuda_pointer = uint64_t;   // of device memory

// X(name, (arguments)). The driver has kept these (with their suffixes) since CUDA 11.7.
#define EP_CUDA_SYMBOLS(X)                                                                                             \
  X(cuInit, (unsigned flags))                                                                                          \
  X(cuDriverGetVersion, (int* version))                                                                                \
  X(cuGetErrorName, (cuda_result error, const char** name))                                                            \
  X(cuDeviceGetCount, (int* count))                                                                                    \
  X(cuDeviceGet, (cuda_device * device, int ordinal))                                                                  \
  X(cuDeviceGetAttribute, (int* value, int attribute, cuda_device device))                                             \
  X(cuDeviceGetPCIBusId, (char* text, int bytes, cuda_device device))                                                  \
  X(cuDevicePrimaryCtxRetain, (cuda_context * context, cuda_device device))                                            \
  X(cuDevicePrimaryCtxRelease_v2, (cuda_device device))                                                                \
  X(cuCtxPushCurrent_v2, (cuda_context context))                                                                       \
  X(cuCtxPopCurrent_v2, (cuda_context * context))                                                                      \
  X(cuStreamCreate, (cuda_stream * stream, unsigned flags))                                                            \
  X(cuStreamDestroy_v2, (cuda_stream stream))                                                                          \
  X(cuStreamSynchronize, (cuda_stream stream))                                                                         \
  X(cuStreamWriteValue64_v2, (cuda_stream stream, cuda_pointer address, uint64_t value, unsigned flags))               \
  X(cuMemAlloc_v2, (cuda_pointer * address, size_t bytes))                                                             \
  X(cuMemFree_v2, (cuda_pointer address))                                                                              \
  X(cuMemcpyHtoDAsync_v2, (cuda_pointer to, const void* from, size_t bytes, cuda_stream stream))                       \
  X(cuMemcpyDtoHAsync_v2, (void* to, cuda_pointer from, size_t bytes, cuda_stream stream))                            \
  X(cuMemsetD8Async, (cuda_pointer address, unsigned char value, size_t bytes, cuda_stream stream))                    \
  X(cuPointerSetAttribute, (const void* value, int attribute, cuda_pointer address))                                   \
  X(cuPointerGetAttribute, (void* value, int attribute, cuda_pointer address))                                         \
  X(cuMemGetHandleForAddressRange, (void* handle, cuda_pointer address, size_t bytes, int type, uint64_t flags))       \
  X(cuMemHostRegister_v2, (void* address, size_t bytes, unsigned flags))                                               \
  X(cuMemHostUnregister, (void* address))                                                                              \
  X(cuMemHostGetDevicePointer_v2, (cuda_pointer * device, void* host, unsigned flags))

struct cuda_symbols {
#define EP_MEMBER(name, arguments) cuda_result(*name) arguments = nullptr;
  EP_CUDA_SYMBOLS(EP_MEMBER)
#undef EP_MEMBER
};

inline constexpr int cuda_attribute_gpudirect = 116; // GPU_DIRECT_RDMA_SUPPORTED
inline constexpr int cuda_attribute_dmabuf = 124;    // DMA_BUF_SUPPORTED
inline constexpr int cuda_pointer_memory_type = 2;
inline constexpr unsigned cuda_memory_of_device = 2;
inline constexpr int cuda_pointer_device_ordinal = 9;
inline constexpr int cuda_pointer_sync_memops = 6;
inline constexpr int cuda_handle_dmabuf = 1;
inline constexpr unsigned cuda_stream_non_blocking = 1;
inline constexpr unsigned cuda_host_portable = 1;
inline constexpr unsigned cuda_host_device_map = 2;
inline constexpr unsigned cuda_host_io_memory = 4;

// Loads and initializes the driver. ELIBACC: it is not installed. ELIBBAD: too old. ENODEV: it finds no GPU.
result<std::shared_ptr<const cuda_symbols>> cuda_symbols_load(const std::string& name = "libcuda.so.1");

// "CUDA_ERROR_OUT_OF_MEMORY", or the number.
std::string cuda_error_text(const cuda_symbols& cuda, cuda_result error);

} // namespace ep::dl
