// libep_cuda.so: the table of cuda/table.h over the CUDA runtime, which is linked statically and opens the driver when it is first called. So this library loads
// where there is no driver, and then says so.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "ep/abi/version.h"
#include "kernels.hpp"

namespace {

struct stream_of_device {
  int device;
  cudaStream_t stream;
};

struct graph_of_device {
  int device;
  cudaGraphExec_t graph;
};

// The device is a property of the calling thread in the runtime's interface.
template <class Call> int on(int device, const Call& call) {
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess) return error;
  return call();
}

stream_of_device& stream_at(void* stream) { return *static_cast<stream_of_device*>(stream); }

const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

int device_count(int* count) { return cudaGetDeviceCount(count); }

// HAZARD: not through `on`: choosing a device makes its context.
int device_facts(int device, ep_cuda_facts* facts) {
  cudaDeviceProp found{};
  if (const cudaError_t error = cudaGetDeviceProperties(&found, device); error != cudaSuccess) return error;
  *facts = {};
  std::snprintf(facts->name, sizeof facts->name, "%s", found.name);
  std::snprintf(facts->runs_on, sizeof facts->runs_on, "cuda");
  std::snprintf(facts->pci, sizeof facts->pci, "%04x:%02x:%02x.0", static_cast<unsigned>(found.pciDomainID), static_cast<unsigned>(found.pciBusID),
                static_cast<unsigned>(found.pciDeviceID));
  facts->memory_bytes = found.totalGlobalMem;
  facts->l2_bytes = static_cast<uint64_t>(found.l2CacheSize);
  facts->compute_major = found.major;
  facts->compute_minor = found.minor;
  facts->multiprocessors = found.multiProcessorCount;
  facts->cooperative = found.cooperativeLaunch;
  facts->copy_engines = found.asyncEngineCount;
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    return cudaDeviceGetAttribute(&value, which, device) == cudaSuccess ? value : 0;
  };
  facts->clock_khz = attribute(cudaDevAttrClockRate);
  facts->host_atomics = attribute(cudaDevAttrHostNativeAtomicSupported);
  facts->ipc = attribute(cudaDevAttrIpcEventSupport);
  facts->exclusive = attribute(cudaDevAttrComputeMode) == cudaComputeModeExclusiveProcess ? 1 : 0;
  facts->dmabuf = attribute(cudaDevAttrGPUDirectRDMASupported);
  int version = 0;
  if (cudaDriverGetVersion(&version) == cudaSuccess) facts->driver_version = version;
  if (cudaRuntimeGetVersion(&version) == cudaSuccess) facts->runtime_version = version;
  return 0;
}

int peer_access(int device, int peer, int* reaches) {
  *reaches = 0;
  return device == peer ? cudaSuccess : cudaDeviceCanAccessPeer(reaches, device, peer);
}

int memory_allocate(int device, uint64_t bytes, uint64_t* address) {
  return on(device, [&]() -> int {
    void* made = nullptr;
    if (const cudaError_t error = cudaMalloc(&made, bytes); error != cudaSuccess) return error;
    cudaError_t error = cudaMemset(made, 0, bytes);
    // HAZARD: a fill of device memory may still run when the call returns, and streams of ours do not wait for the default stream.
    if (error == cudaSuccess) error = cudaStreamSynchronize(nullptr);
    if (error != cudaSuccess) {
      cudaFree(made);
      return error;
    }
    *address = reinterpret_cast<uint64_t>(made);
    return 0;
  });
}

int memory_free(int device, uint64_t address) {
  return on(device, [&]() -> int { return cudaFree(reinterpret_cast<void*>(address)); });
}

int memory_export(int device, uint64_t address, uint8_t handle[EP_CUDA_IPC_BYTES]) {
  static_assert(sizeof(cudaIpcMemHandle_t) == EP_CUDA_IPC_BYTES);
  return on(device, [&]() -> int {
    cudaIpcMemHandle_t made{};
    const cudaError_t error = cudaIpcGetMemHandle(&made, reinterpret_cast<void*>(address));
    std::memcpy(handle, &made, sizeof made);
    return error;
  });
}

int memory_import(int device, const uint8_t handle[EP_CUDA_IPC_BYTES], uint64_t* address) {
  return on(device, [&]() -> int {
    cudaIpcMemHandle_t theirs{};
    std::memcpy(&theirs, handle, sizeof theirs);
    void* made = nullptr;
    const cudaError_t error = cudaIpcOpenMemHandle(&made, theirs, cudaIpcMemLazyEnablePeerAccess);
    *address = reinterpret_cast<uint64_t>(made);
    return error;
  });
}

// Unlike freeing, unmapping waits for no kernel.
int memory_unmap(int device, uint64_t address) {
  return on(device, [&]() -> int {
    if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) return error;
    return cudaIpcCloseMemHandle(reinterpret_cast<void*>(address));
  });
}

int memory_find(int device, uint64_t address, uint64_t* end) {
  return on(device, [&]() -> int {
    cudaPointerAttributes found{};
    if (const cudaError_t error = cudaPointerGetAttributes(&found, reinterpret_cast<const void*>(address)); error != cudaSuccess) return error;
    if (found.type != cudaMemoryTypeDevice || found.device != device) return cudaErrorInvalidDevicePointer;
    // The runtime does not tell how far an allocation goes; the driver does. Its entry point comes from the runtime, since nothing links the driver.
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult how{};
    if (const cudaError_t error = cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &entry, 12000, cudaEnableDefault, &how); error != cudaSuccess) return error;
    if (how != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
    unsigned long long base = 0;
    size_t bytes = 0;
    if (reinterpret_cast<int (*)(unsigned long long*, size_t*, unsigned long long)>(entry)(&base, &bytes, address) != 0) return cudaErrorInvalidDevicePointer;
    *end = base + bytes;
    return 0;
  });
}

int pinned_allocate(int device, uint64_t bytes, uint64_t* address) {
  return on(device, [&]() -> int {
    void* made = nullptr;
    if (const cudaError_t error = cudaHostAlloc(&made, bytes, cudaHostAllocMapped | cudaHostAllocPortable); error != cudaSuccess) return error;
    std::memset(made, 0, bytes);
    *address = reinterpret_cast<uint64_t>(made);
    return 0;
  });
}

int pinned_free(int device, uint64_t address) {
  return on(device, [&]() -> int { return cudaFreeHost(reinterpret_cast<void*>(address)); });
}

int stream_create(int device, int high_priority, void** stream) {
  return on(device, [&]() -> int {
    if (const int error = ep::cuda_load_kernels(); error != 0) return error;
    int lowest = 0;
    int highest = 0;
    if (const cudaError_t error = cudaDeviceGetStreamPriorityRange(&lowest, &highest); error != cudaSuccess) return error;
    auto made = new stream_of_device{device, nullptr};
    if (const cudaError_t error = cudaStreamCreateWithPriority(&made->stream, cudaStreamNonBlocking, high_priority != 0 ? highest : lowest); error != cudaSuccess) {
      delete made;
      return error;
    }
    *stream = made;
    return 0;
  });
}

int stream_finish(void* stream) {
  return on(stream_at(stream).device, [&]() -> int { return cudaStreamSynchronize(stream_at(stream).stream); });
}

int stream_destroy(void* stream) {
  const int error = stream_finish(stream);
  cudaStreamDestroy(stream_at(stream).stream);
  delete static_cast<stream_of_device*>(stream);
  return error;
}

int event_create(int device, int timed, void** event) {
  return on(device, [&]() -> int {
    cudaEvent_t made = nullptr;
    const cudaError_t error = cudaEventCreateWithFlags(&made, timed != 0 ? cudaEventDefault : cudaEventDisableTiming);
    *event = made;
    return error;
  });
}

int event_destroy(void* event) { return cudaEventDestroy(static_cast<cudaEvent_t>(event)); }

int event_record(void* event, void* stream) {
  return on(stream_at(stream).device, [&]() -> int { return cudaEventRecord(static_cast<cudaEvent_t>(event), stream_at(stream).stream); });
}

int event_query(void* event, int* reached) {
  const cudaError_t error = cudaEventQuery(static_cast<cudaEvent_t>(event));
  *reached = error == cudaSuccess ? 1 : 0;
  return error == cudaErrorNotReady ? cudaSuccess : error;
}

int event_elapsed(void* from, void* to, float* milliseconds) {
  return cudaEventElapsedTime(milliseconds, static_cast<cudaEvent_t>(from), static_cast<cudaEvent_t>(to));
}

int stream_wait(void* stream, void* event) {
  return on(stream_at(stream).device, [&]() -> int { return cudaStreamWaitEvent(stream_at(stream).stream, static_cast<cudaEvent_t>(event), 0); });
}

int copy(void* stream, uint64_t to, uint64_t from, uint64_t bytes) {
  return on(stream_at(stream).device, [&]() -> int {
    return cudaMemcpyAsync(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes, cudaMemcpyDefault, stream_at(stream).stream);
  });
}

int fill(void* stream, uint64_t at, uint8_t value, uint64_t bytes) {
  return on(stream_at(stream).device, [&]() -> int { return cudaMemsetAsync(reinterpret_cast<void*>(at), value, bytes, stream_at(stream).stream); });
}

int capture_begin(void* stream) {
  // Thread-local: other threads go on allocating meanwhile.
  return on(stream_at(stream).device, [&]() -> int { return cudaStreamBeginCapture(stream_at(stream).stream, cudaStreamCaptureModeThreadLocal); });
}

int capture_end(void* stream, void** graph) {
  return on(stream_at(stream).device, [&]() -> int {
    cudaGraph_t captured = nullptr;
    if (const cudaError_t error = cudaStreamEndCapture(stream_at(stream).stream, &captured); error != cudaSuccess) return error;
    auto made = new graph_of_device{stream_at(stream).device, nullptr};
    const cudaError_t error = cudaGraphInstantiate(&made->graph, captured, 0);
    cudaGraphDestroy(captured);
    if (error != cudaSuccess) {
      delete made;
      return error;
    }
    *graph = made;
    return 0;
  });
}

int graph_launch(void* graph, void* stream) {
  return on(stream_at(stream).device, [&]() -> int { return cudaGraphLaunch(static_cast<graph_of_device*>(graph)->graph, stream_at(stream).stream); });
}

int graph_destroy(void* graph) {
  auto* made = static_cast<graph_of_device*>(graph);
  const int error = on(made->device, [&]() -> int { return cudaGraphExecDestroy(made->graph); });
  delete made;
  return error;
}

template <class... Arguments, class... Given> int launched(int (*launcher)(const ep_cuda_launch&, Arguments...), const ep_cuda_launch* how, const Given&... given) {
  ep_cuda_launch there = *how;
  there.stream = stream_at(how->stream).stream;
  return on(stream_at(how->stream).device, [&]() -> int { return launcher(there, given...); });
}

int resident(int device, uint32_t kernel, uint32_t lanes, uint32_t* blocks) {
  return on(device, [&]() -> int { return ep::cuda_resident(device, kernel, lanes, blocks); });
}
int begin_call(const ep_cuda_launch* how, const ep_call_counts* counts) { return launched(ep::cuda_begin_call, how, *counts); }
int dispatch(const ep_cuda_launch* how, const ep_device_call* call) { return launched(ep::cuda_dispatch, how, *call); }
int grant(const ep_cuda_launch* how, const ep_device_grant* what) { return launched(ep::cuda_grant, how, *what); }
int compat(const ep_cuda_launch* how, const ep_compat_args* args) { return launched(ep::cuda_compat, how, *args); }
int attention_forward(const ep_cuda_launch* how, const ep_attention_args* args) { return launched(ep::cuda_attention_forward, how, *args); }
int attention_backward(const ep_cuda_launch* how, const ep_attention_args* args) { return launched(ep::cuda_attention_backward, how, *args); }
int experts_forward(const ep_cuda_launch* how, const ep_expert_args* args) { return launched(ep::cuda_experts_forward, how, *args); }
int moe_dispatch(const ep_cuda_launch* how, const ep_moe_buffer* buffer, const ep_moe_dispatch_args* args, uint32_t halves) {
  return launched(ep::cuda_moe_dispatch, how, *buffer, *args, halves);
}
int moe_combine(const ep_cuda_launch* how, const ep_moe_buffer* buffer, const ep_moe_combine_args* args, uint32_t halves) {
  return launched(ep::cuda_moe_combine, how, *buffer, *args, halves);
}
int moe_release(const ep_cuda_launch* how, const ep_moe_buffer* buffer, const ep_moe_call* call) { return launched(ep::cuda_moe_release, how, *buffer, *call); }
int group_call(const ep_cuda_launch* how, const ep_group_args* args) { return launched(ep::cuda_group_call, how, *args); }

int moe_together(const ep_cuda_launch* how, const ep_cuda_moe_rank* ranks, uint32_t count, uint32_t halves) {
  return launched(ep::cuda_moe_together, how, ranks, count, halves);
}
int copy_pieces(void* stream, const ep_cuda_piece* pieces, uint32_t count) {
  const ep_cuda_launch how{stream, 0, 0, 0, 0, 0};
  return launched(ep::cuda_copy_pieces, &how, pieces, count);
}

int device_use(int device) { return cudaSetDevice(device); }
void* stream_handle(void* stream) { return stream_at(stream).stream; }

constexpr ep_cuda_table table = {EP_CUDA_TABLE_VERSION,
                                 sizeof(ep_cuda_table),
                                 EP_ABI_MAJOR,
                                 EP_ABI_MINOR,
                                 0,
                                 error_text,
                                 device_count,
                                 device_facts,
                                 memory_allocate,
                                 memory_free,
                                 memory_export,
                                 memory_import,
                                 memory_unmap,
                                 memory_find,
                                 pinned_allocate,
                                 pinned_free,
                                 stream_create,
                                 stream_destroy,
                                 stream_finish,
                                 event_create,
                                 event_destroy,
                                 event_record,
                                 event_query,
                                 event_elapsed,
                                 stream_wait,
                                 copy,
                                 fill,
                                 capture_begin,
                                 capture_end,
                                 graph_launch,
                                 graph_destroy,
                                 resident,
                                 begin_call,
                                 dispatch,
                                 grant,
                                 compat,
                                 attention_forward,
                                 attention_backward,
                                 experts_forward,
                                 moe_dispatch,
                                 moe_combine,
                                 moe_release,
                                 group_call,
                                 device_use,
                                 stream_handle,
                                 peer_access,
                                 moe_together,
                                 copy_pieces};

} // namespace

extern "C" __attribute__((visibility("default"))) const ep_cuda_table* ep_cuda_table_of(uint32_t version) {
  if (version != EP_CUDA_TABLE_VERSION) return nullptr;
  // HAZARD: kernels of ranks wait for each other. Streams beyond the number of hardware queues share one, where a rank's kernel would stand behind the one that
  // waits for it. The driver reads this when it makes the context; a user's own setting stays.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("CUDA_MODULE_LOADING", "EAGER", 0); // see cuda_load_kernels: the driver has kernels of its own, for fills
  return &table;
}
