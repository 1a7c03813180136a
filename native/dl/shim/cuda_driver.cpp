// Stands in for libcuda.so.1 where there is no GPU: what dl/cuda_symbols.hpp asks of it, over memory of the host, of which each allocation is a file, as exported memory of a GPU
// is. For tests of where queues lie; no part of what is installed. Its GPU is the one of host_device.cpp.
//
// EP_CUDA_HOST_DRIVER=12040: the version that the driver says, 13000 unless it is set.
// EP_CUDA_HOST_FAILING=cuMemAlloc_v2,...: while it is set, these calls fail with CUDA_ERROR_NOT_SUPPORTED. The names gpudirect and dmabuf are of what the GPU says that it can.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

#include "dl/cuda_symbols.hpp"

#define EP_SHIM extern "C" __attribute__((visibility("default"))) int

namespace {

constexpr int ok = 0;
constexpr int invalid_value = 1;
constexpr int invalid_device = 101;
constexpr int not_supported = 801;
constexpr size_t page = 4096;
constexpr size_t gpu_page = 65536;

bool fails(const char* what) {
  const char* failing = std::getenv("EP_CUDA_HOST_FAILING");
  if (failing == nullptr) return false;
  const std::string all = "," + std::string(failing) + ",";
  return all.find("," + std::string(what) + ",") != std::string::npos;
}

struct allocation {
  size_t bytes;
  int file;
};
struct driver {
  std::mutex mutex;
  std::map<uint64_t, allocation> allocations;
  std::set<uint64_t> locked; // first pages of what was registered
};
driver& here() {
  static auto* made = new driver;
  return *made;
}

} // namespace

EP_SHIM cuInit(unsigned) { return fails("cuInit") ? not_supported : ok; }
EP_SHIM cuDriverGetVersion(int* version) {
  const char* wanted = std::getenv("EP_CUDA_HOST_DRIVER");
  *version = wanted == nullptr ? 13000 : std::atoi(wanted);
  return ok;
}
EP_SHIM cuGetErrorName(int error, const char** name) {
  *name = error == not_supported ? "CUDA_ERROR_NOT_SUPPORTED" : error == invalid_value ? "CUDA_ERROR_INVALID_VALUE" : error == invalid_device ? "CUDA_ERROR_INVALID_DEVICE" : nullptr;
  return *name == nullptr ? invalid_value : ok;
}
EP_SHIM cuDeviceGetCount(int* count) {
  *count = 1;
  return ok;
}
EP_SHIM cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? ok : invalid_device;
}
EP_SHIM cuDeviceGetAttribute(int* value, int attribute, int) {
  const bool asked = attribute == ep::dl::cuda_attribute_dmabuf || attribute == ep::dl::cuda_attribute_gpudirect;
  *value = asked && !fails(attribute == ep::dl::cuda_attribute_dmabuf ? "dmabuf" : "gpudirect") ? 1 : 0;
  return ok;
}
EP_SHIM cuDeviceGetPCIBusId(char* text, int bytes, int) {
  std::snprintf(text, static_cast<size_t>(bytes), "0000:00:00.0");
  return ok;
}
EP_SHIM cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &here();
  return fails("cuDevicePrimaryCtxRetain") ? not_supported : ok;
}
EP_SHIM cuDevicePrimaryCtxRelease_v2(int) { return ok; }
EP_SHIM cuCtxPushCurrent_v2(void*) { return ok; }
EP_SHIM cuCtxPopCurrent_v2(void**) { return ok; }
EP_SHIM cuStreamCreate(void** stream, unsigned) {
  *stream = &here();
  return fails("cuStreamCreate") ? not_supported : ok;
}
EP_SHIM cuStreamDestroy_v2(void*) { return ok; }
EP_SHIM cuStreamSynchronize(void*) { return fails("cuStreamSynchronize") ? not_supported : ok; }
EP_SHIM cuStreamWriteValue64_v2(void*, uint64_t address, uint64_t value, unsigned) {
  if (fails("cuStreamWriteValue64_v2")) return not_supported;
  __atomic_store_n(reinterpret_cast<uint64_t*>(address), value, __ATOMIC_RELEASE);
  return ok;
}
EP_SHIM cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  if (fails("cuMemAlloc_v2")) return not_supported;
  const size_t whole = (bytes + gpu_page - 1) / gpu_page * gpu_page;
  // Aligned as the GPU's pages are, so that what is exported begins with the file: room for both, then what is too much goes.
  auto* room = static_cast<char*>(mmap(nullptr, whole + gpu_page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  const int file = memfd_create("memory of a GPU", MFD_CLOEXEC);
  if (room == MAP_FAILED || file < 0 || ftruncate(file, static_cast<off_t>(whole)) != 0) std::abort();
  const size_t before = (gpu_page - reinterpret_cast<uint64_t>(room) % gpu_page) % gpu_page;
  void* made = mmap(room + before, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
  if (made == MAP_FAILED) std::abort(); // a test cannot go on
  if (before != 0) munmap(room, before);
  if (before != gpu_page) munmap(room + before + whole, gpu_page - before);
  std::memset(made, 0xcd, whole); // nobody may count on zeroes
  *address = reinterpret_cast<uint64_t>(made);
  const std::lock_guard lock(here().mutex);
  here().allocations[*address] = {whole, file};
  return ok;
}
EP_SHIM cuMemFree_v2(uint64_t address) {
  const std::lock_guard lock(here().mutex);
  const auto at = here().allocations.find(address);
  if (at == here().allocations.end()) return invalid_value;
  munmap(reinterpret_cast<void*>(address), at->second.bytes);
  close(at->second.file);
  here().allocations.erase(at);
  return ok;
}
EP_SHIM cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void*) {
  if (fails("cuMemcpyHtoDAsync_v2")) return not_supported;
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return ok;
}
EP_SHIM cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void*) {
  // Words in one piece, where they are words: posters change them meanwhile.
  for (size_t at = 0; at < bytes;) {
    const bool whole = (from + at) % sizeof(uint64_t) == 0 && bytes - at >= sizeof(uint64_t);
    const uint64_t word = whole ? __atomic_load_n(reinterpret_cast<const uint64_t*>(from + at), __ATOMIC_ACQUIRE) : __atomic_load_n(reinterpret_cast<const uint8_t*>(from + at), __ATOMIC_ACQUIRE);
    std::memcpy(static_cast<char*>(to) + at, &word, whole ? sizeof word : 1);
    at += whole ? sizeof word : 1;
  }
  return ok;
}
EP_SHIM cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void*) {
  std::memset(reinterpret_cast<void*>(address), value, bytes);
  return ok;
}
EP_SHIM cuPointerSetAttribute(const void*, int, uint64_t) { return ok; }
EP_SHIM cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
  const std::lock_guard lock(here().mutex);
  const auto after = here().allocations.upper_bound(address);
  if (after == here().allocations.begin()) return invalid_value;
  const auto& [begin, of] = *std::prev(after);
  if (address >= begin + of.bytes) return invalid_value;
  const unsigned found = attribute == ep::dl::cuda_pointer_memory_type ? ep::dl::cuda_memory_of_device : 0;
  std::memcpy(value, &found, sizeof found);
  return ok;
}
// The file of the allocation itself: whoever knows the file finds the memory. HAZARD: real ones are of the range only.
EP_SHIM cuMemGetHandleForAddressRange(void* handle, uint64_t address, size_t bytes, int, uint64_t) {
  if (fails("cuMemGetHandleForAddressRange")) return not_supported;
  const std::lock_guard lock(here().mutex);
  auto at = here().allocations.upper_bound(address);
  if (at == here().allocations.begin()) return invalid_value;
  --at;
  if (address != at->first || bytes > at->second.bytes) return invalid_value;
  *static_cast<int*>(handle) = dup(at->second.file);
  return ok;
}
EP_SHIM cuMemHostRegister_v2(void* address, size_t bytes, unsigned) {
  if (fails("cuMemHostRegister_v2")) return not_supported;
  const auto begin = reinterpret_cast<uint64_t>(address);
  const std::lock_guard lock(here().mutex);
  return begin % page == 0 && bytes % page == 0 && here().locked.insert(begin).second ? ok : invalid_value;
}
EP_SHIM cuMemHostUnregister(void* address) {
  const std::lock_guard lock(here().mutex);
  return here().locked.erase(reinterpret_cast<uint64_t>(address)) == 1 ? ok : invalid_value;
}
EP_SHIM cuMemHostGetDevicePointer_v2(uint64_t* device, void* host, unsigned) {
  *device = reinterpret_cast<uint64_t>(host);
  return fails("cuMemHostGetDevicePointer_v2") ? not_supported : ok;
}
