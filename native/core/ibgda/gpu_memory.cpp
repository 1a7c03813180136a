#include "gpu_memory.hpp"

#include <algorithm>
#include <cctype>
#include <atomic>
#include <cerrno>
#include <cstring>

#include <unistd.h>

#include "segment.hpp"

namespace ep::ibgda {
namespace {

using dl::cuda_pointer;
using dl::cuda_result;
using dl::cuda_symbols;

// What a NIC maps of a GPU at least; allocations begin on such a boundary and own all of it, so that nothing else is exported with them.
constexpr uint64_t gpu_page = 65536;
constexpr uint64_t host_page = 4096;

failure cuda_failure(const cuda_symbols& cuda, const char* call, cuda_result error, int number, const std::string& about) {
  return {EP_STATUS_SYSTEM, number, std::string(call) + " failed: " + dl::cuda_error_text(cuda, error) + ", " + about};
}

// The device's primary context, and a stream in it that waits for no other: control words are written while kernels run.
class gpu_context {
 public:
  static result<std::shared_ptr<gpu_context>> open(std::shared_ptr<const cuda_symbols> cuda, int ordinal) {
    std::shared_ptr<gpu_context> made(new gpu_context(std::move(cuda)));
    const std::string about = "GPU " + std::to_string(ordinal);
    if (const cuda_result error = made->cuda_->cuDeviceGet(&made->device_, ordinal); error != 0) return cuda_failure(*made->cuda_, "cuDeviceGet", error, ENODEV, about);
    if (const cuda_result error = made->cuda_->cuDevicePrimaryCtxRetain(&made->context_, made->device_); error != 0) {
      return cuda_failure(*made->cuda_, "cuDevicePrimaryCtxRetain", error, ENODEV, about);
    }
    const scope here(*made);
    if (const cuda_result error = made->cuda_->cuStreamCreate(&made->stream_, dl::cuda_stream_non_blocking); error != 0) {
      return cuda_failure(*made->cuda_, "cuStreamCreate", error, ENOMEM, about);
    }
    return made;
  }
  ~gpu_context() {
    if (stream_ != nullptr) {
      const scope here(*this);
      cuda_->cuStreamDestroy_v2(stream_);
    }
    if (context_ != nullptr) cuda_->cuDevicePrimaryCtxRelease_v2(device_);
  }

  // The context is current on this thread while it lives; whatever was before comes back.
  class scope {
   public:
    explicit scope(const gpu_context& of) : of_(of) { of_.cuda_->cuCtxPushCurrent_v2(of_.context_); }
    ~scope() {
      dl::cuda_context ignored = nullptr;
      of_.cuda_->cuCtxPopCurrent_v2(&ignored);
    }
    scope(const scope&) = delete;

   private:
    const gpu_context& of_;
  };

  const cuda_symbols& cuda() const { return *cuda_; }
  dl::cuda_stream stream() const { return stream_; }

 private:
  explicit gpu_context(std::shared_ptr<const cuda_symbols> cuda) : cuda_(std::move(cuda)) {}
  std::shared_ptr<const cuda_symbols> cuda_;
  dl::cuda_device device_ = 0;
  dl::cuda_context context_ = nullptr;
  dl::cuda_stream stream_ = nullptr;
};

struct gpu_block {
  std::shared_ptr<gpu_context> context;
  cuda_pointer allocation = 0;
  int dmabuf_fd = -1;
  ~gpu_block() {
    if (dmabuf_fd >= 0) ::close(dmabuf_fd);
    const gpu_context::scope here(*context);
    if (allocation != 0) context->cuda().cuMemFree_v2(allocation);
  }
};

result<uint64_t> doorbell_for_gpu(const gpu_context& context, uint64_t register_address, uint64_t bytes, unsigned kind) {
  const cuda_symbols& cuda = context.cuda();
  const gpu_context::scope here(context);
  const uint64_t begin = register_address / host_page * host_page;
  const uint64_t length = (register_address + bytes - begin + host_page - 1) / host_page * host_page;
  void* page = reinterpret_cast<void*>(begin);
  const std::string about = "a doorbell page for the GPU";
  if (const cuda_result error = cuda.cuMemHostRegister_v2(page, length, dl::cuda_host_device_map | kind); error != 0) {
    const char* hint = kind == dl::cuda_host_io_memory ? "; does the driver allow it (PeerMappingOverride=1)?" : "";
    return cuda_failure(cuda, "cuMemHostRegister", error, EPERM, about + hint);
  }
  cuda_pointer device = 0;
  if (const cuda_result error = cuda.cuMemHostGetDevicePointer_v2(&device, page, 0); error != 0) {
    cuda.cuMemHostUnregister(page);
    return cuda_failure(cuda, "cuMemHostGetDevicePointer", error, EOPNOTSUPP, about);
  }
  return device + (register_address - begin);
}

void doorbell_forget(const gpu_context& context, uint64_t register_address) {
  const gpu_context::scope here(context);
  context.cuda().cuMemHostUnregister(reinterpret_cast<void*>(register_address / host_page * host_page));
}

// Of one segment, page-locked for the GPU.
struct pinned_pages {
  std::shared_ptr<gpu_context> context;
  std::shared_ptr<segment> pages;
  bool registered = false;
  ~pinned_pages() {
    if (!registered) return;
    const gpu_context::scope here(*context);
    context->cuda().cuMemHostUnregister(pages->data());
  }
};

class pinned_memory_source final : public control_memory {
 public:
  pinned_memory_source(std::shared_ptr<gpu_context> context, unsigned doorbells) : context_(std::move(context)), doorbells_(doorbells) {}
  placement where() const override { return placement::host; }

  // A shared segment: software NICs of other processes write to what lies here.
  result<control_block> allocate(uint64_t bytes) override {
    const std::string about = std::to_string(bytes) + " bytes of host memory for the GPU";
    auto made = segment::create((bytes + host_page - 1) / host_page * host_page);
    if (!made.ok()) return made.why();
    auto held = std::make_shared<pinned_pages>();
    held->context = context_;
    held->pages = made.value();
    void* base = held->pages->data();
    const cuda_symbols& cuda = context_->cuda();
    const gpu_context::scope here(*context_);
    if (const cuda_result error = cuda.cuMemHostRegister_v2(base, held->pages->data_bytes(), dl::cuda_host_device_map | dl::cuda_host_portable); error != 0) {
      return cuda_failure(cuda, "cuMemHostRegister", error, ENOMEM, about);
    }
    held->registered = true;
    cuda_pointer device = 0;
    if (const cuda_result error = cuda.cuMemHostGetDevicePointer_v2(&device, base, 0); error != 0) return cuda_failure(cuda, "cuMemHostGetDevicePointer", error, EOPNOTSUPP, about);
    // One address for kernels, for the NIC and for this process: the requests that kernels write carry it.
    if (device != reinterpret_cast<uint64_t>(base)) return failure{EP_STATUS_SYSTEM, EOPNOTSUPP, about + ": the GPU knows it by another address than the host"};
    control_block block;
    block.address = device;
    block.byte_length = bytes;
    block.keep = held;
    return block;
  }
  result<nothing> write(const control_block& block, uint64_t offset, const void* bytes, uint64_t length) override {
    std::memcpy(reinterpret_cast<void*>(block.address + offset), bytes, length);
    return nothing{};
  }
  result<nothing> fill(const control_block& block, uint64_t offset, uint8_t value, uint64_t length) override {
    std::memset(reinterpret_cast<void*>(block.address + offset), value, length);
    return nothing{};
  }
  result<nothing> publish(const control_block& block, uint64_t offset, uint64_t value) override {
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(block.address + offset)).store(value, std::memory_order_release);
    return nothing{};
  }
  result<nothing> read(const control_block& block, uint64_t offset, void* into, uint64_t length) override {
    read_words(reinterpret_cast<const void*>(block.address + offset), into, length);
    return nothing{};
  }
  result<uint64_t> map_doorbell(uint64_t register_address, uint64_t bytes) override { return doorbell_for_gpu(*context_, register_address, bytes, doorbells_); }
  void unmap_doorbell(uint64_t register_address) override { doorbell_forget(*context_, register_address); }

 private:
  std::shared_ptr<gpu_context> context_;
  unsigned doorbells_;
};

class gpu_memory_source final : public control_memory {
 public:
  gpu_memory_source(std::shared_ptr<gpu_context> context, placement where) : context_(std::move(context)), where_(where) {}
  placement where() const override { return where_; }

  result<control_block> allocate(uint64_t bytes) override {
    const cuda_symbols& cuda = context_->cuda();
    const gpu_context::scope here(*context_);
    const uint64_t whole = (bytes + gpu_page - 1) / gpu_page * gpu_page;
    const std::string about = std::to_string(whole) + " bytes of control memory";
    auto held = std::make_shared<gpu_block>();
    held->context = context_;
    // Alignment of small allocations is less than a page: one more page makes up for it.
    if (const cuda_result error = cuda.cuMemAlloc_v2(&held->allocation, whole + gpu_page); error != 0) return cuda_failure(cuda, "cuMemAlloc", error, ENOMEM, about);
    const cuda_pointer begin = (held->allocation + gpu_page - 1) / gpu_page * gpu_page;
    // HAZARD: without it a copy may return before its bytes are where a NIC sees them.
    const unsigned on = 1;
    if (const cuda_result error = cuda.cuPointerSetAttribute(&on, dl::cuda_pointer_sync_memops, held->allocation); error != 0) {
      return cuda_failure(cuda, "cuPointerSetAttribute", error, EOPNOTSUPP, about);
    }
    control_block block;
    block.address = begin;
    block.byte_length = bytes;
    if (where_ == placement::gpu_dmabuf) {
      if (const cuda_result error = cuda.cuMemGetHandleForAddressRange(&held->dmabuf_fd, begin, whole, dl::cuda_handle_dmabuf, 0); error != 0) {
        return cuda_failure(cuda, "cuMemGetHandleForAddressRange", error, EOPNOTSUPP, about + ": this GPU, or its driver, exports no DMA-BUFs");
      }
      block.dmabuf_fd = held->dmabuf_fd;
    }
    block.keep = held;
    if (auto zeroed = fill(block, 0, 0, bytes); !zeroed.ok()) return zeroed.why();
    return block;
  }

  result<nothing> write(const control_block& block, uint64_t offset, const void* bytes, uint64_t length) override {
    const gpu_context::scope here(*context_);
    return ended("cuMemcpyHtoDAsync", context_->cuda().cuMemcpyHtoDAsync_v2(block.address + offset, bytes, length, context_->stream()));
  }
  result<nothing> fill(const control_block& block, uint64_t offset, uint8_t value, uint64_t length) override {
    const gpu_context::scope here(*context_);
    return ended("cuMemsetD8Async", context_->cuda().cuMemsetD8Async(block.address + offset, value, length, context_->stream()));
  }
  result<nothing> publish(const control_block& block, uint64_t offset, uint64_t value) override {
    const gpu_context::scope here(*context_);
    // The default write is preceded by a fence of the whole system.
    return ended("cuStreamWriteValue64", context_->cuda().cuStreamWriteValue64_v2(context_->stream(), block.address + offset, value, 0));
  }

  result<nothing> read(const control_block& block, uint64_t offset, void* into, uint64_t length) override {
    const gpu_context::scope here(*context_);
    return ended("cuMemcpyDtoHAsync", context_->cuda().cuMemcpyDtoHAsync_v2(into, block.address + offset, length, context_->stream()));
  }

  // PCI space, not memory. Drivers let it be registered only where the administrator allows peer mappings (NVreg_RegistryDwords="PeerMappingOverride=1;").
  result<uint64_t> map_doorbell(uint64_t register_address, uint64_t bytes) override { return doorbell_for_gpu(*context_, register_address, bytes, dl::cuda_host_io_memory); }
  void unmap_doorbell(uint64_t register_address) override { doorbell_forget(*context_, register_address); }

 private:
  // Of something put on the stream: waits for it.
  result<nothing> ended(const char* call, cuda_result error) const {
    if (error == 0) error = context_->cuda().cuStreamSynchronize(context_->stream());
    if (error != 0) return cuda_failure(context_->cuda(), call, error, EIO, "control memory");
    return nothing{};
  }

  std::shared_ptr<gpu_context> context_;
  placement where_;
};

bool has(const cuda_symbols& cuda, int attribute, dl::cuda_device device) {
  int value = 0;
  return cuda.cuDeviceGetAttribute(&value, attribute, device) == 0 && value != 0;
}

struct exported_pages {
  int dmabuf_fd = -1;
  ~exported_pages() {
    if (dmabuf_fd >= 0) ::close(dmabuf_fd);
  }
};

} // namespace

result<gpu_facts> gpu_facts_read(const dl::cuda_symbols& cuda, int ordinal) {
  dl::cuda_device device = 0;
  if (const cuda_result error = cuda.cuDeviceGet(&device, ordinal); error != 0) return cuda_failure(cuda, "cuDeviceGet", error, ENODEV, "GPU " + std::to_string(ordinal));
  char text[32] = {};
  if (const cuda_result error = cuda.cuDeviceGetPCIBusId(text, sizeof text, device); error != 0) return cuda_failure(cuda, "cuDeviceGetPCIBusId", error, ENODEV, "GPU " + std::to_string(ordinal));
  gpu_facts facts;
  facts.address = text;
  std::transform(facts.address.begin(), facts.address.end(), facts.address.begin(), [](unsigned char c) { return std::tolower(c); });
  // CUDA may write the domain with 8 digits, sysfs with 4.
  if (facts.address.size() > 12) facts.address = facts.address.substr(facts.address.size() - 12);
  facts.gpudirect = has(cuda, dl::cuda_attribute_gpudirect, device);
  facts.dmabuf = has(cuda, dl::cuda_attribute_dmabuf, device);
  return facts;
}

result<control_block> gpu_export(std::shared_ptr<const dl::cuda_symbols> cuda, int ordinal, uint64_t address, uint64_t byte_length) {
  const std::string about = std::to_string(byte_length) + " bytes of GPU " + std::to_string(ordinal);
  auto facts = gpu_facts_read(*cuda, ordinal);
  if (!facts.ok()) return facts.why();
  if (!facts.value().dmabuf && !facts.value().gpudirect) return failure{EP_STATUS_SYSTEM, EOPNOTSUPP, "GPU " + facts.value().address + " exports no DMA-BUFs, and has no GPUDirect RDMA"};
  auto context = gpu_context::open(std::move(cuda), ordinal);
  if (!context.ok()) return context.why();
  const cuda_symbols& driver = context.value()->cuda();
  const gpu_context::scope here(*context.value());
  // HAZARD: without it a copy may return before its bytes are where a NIC sees them.
  const unsigned on = 1;
  if (const cuda_result error = driver.cuPointerSetAttribute(&on, dl::cuda_pointer_sync_memops, address); error != 0) return cuda_failure(driver, "cuPointerSetAttribute", error, EOPNOTSUPP, about);
  control_block block;
  block.address = address;
  block.byte_length = byte_length;
  if (!facts.value().dmabuf) return block;
  auto held = std::make_shared<exported_pages>();
  const uint64_t begin = address / host_page * host_page;
  const uint64_t whole = (address + byte_length - begin + host_page - 1) / host_page * host_page;
  if (const cuda_result error = driver.cuMemGetHandleForAddressRange(&held->dmabuf_fd, begin, whole, dl::cuda_handle_dmabuf, 0); error != 0) {
    held->dmabuf_fd = -1;
    if (!facts.value().gpudirect) return cuda_failure(driver, "cuMemGetHandleForAddressRange", error, EOPNOTSUPP, about);
    return block;
  }
  block.dmabuf_fd = held->dmabuf_fd;
  block.dmabuf_offset = address - begin;
  block.keep = held;
  return block;
}

result<std::unique_ptr<control_memory>> pinned_control_memory(std::shared_ptr<const dl::cuda_symbols> cuda, int ordinal, bool doorbells_are_memory) {
  auto context = gpu_context::open(std::move(cuda), ordinal);
  if (!context.ok()) return context.why();
  return std::unique_ptr<control_memory>(new pinned_memory_source(context.value(), doorbells_are_memory ? 0 : dl::cuda_host_io_memory));
}

result<std::unique_ptr<control_memory>> gpu_control_memory(std::shared_ptr<const dl::cuda_symbols> cuda, int ordinal, placement where) {
  if (where == placement::host) return failure{EP_STATUS_INVALID, 0, "host memory is no memory of a GPU"};
  auto facts = gpu_facts_read(*cuda, ordinal);
  if (!facts.ok()) return facts.why();
  const bool possible = where == placement::gpu_dmabuf ? facts.value().dmabuf : facts.value().gpudirect;
  if (!possible) {
    return failure{EP_STATUS_SYSTEM, EOPNOTSUPP, "GPU " + facts.value().address + (where == placement::gpu_dmabuf ? " exports no DMA-BUFs" : " has no GPUDirect RDMA")};
  }
  auto context = gpu_context::open(std::move(cuda), ordinal);
  if (!context.ok()) return context.why();
  return std::unique_ptr<control_memory>(new gpu_memory_source(context.value(), where));
}

} // namespace ep::ibgda
