#include "control_memory.hpp"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include <sys/mman.h>

namespace ep::ibgda {

const char* placement_name(placement where) {
  switch (where) {
    case placement::gpu_dmabuf: return "GPU memory by DMA-BUF";
    case placement::gpu_address: return "GPU memory by address";
    case placement::host: return "host memory";
  }
  return "unknown memory";
}

dl::mlx5_memory control_block::part(uint64_t offset, uint64_t bytes) const {
  return {address + offset, bytes, dmabuf_fd, dmabuf_fd < 0 ? 0 : dmabuf_offset + offset};
}

namespace {

class host_memory_source final : public control_memory {
 public:
  placement where() const override { return placement::host; }

  result<control_block> allocate(uint64_t bytes) override {
    // Hazard: a NIC pins these pages, and fork() would leave parent or child with a copy that the NIC does not see.
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (base == MAP_FAILED) return failure_errno("mmap", errno, "control memory of " + std::to_string(bytes) + " bytes");
    madvise(base, bytes, MADV_DONTFORK);
    control_block block;
    block.address = reinterpret_cast<uint64_t>(base);
    block.byte_length = bytes;
    block.keep = std::shared_ptr<void>(base, [bytes](void* at) { munmap(at, bytes); });
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
  result<uint64_t> map_doorbell(uint64_t register_address, uint64_t) override { return register_address; }
  void unmap_doorbell(uint64_t) override {}
};

} // namespace

void read_words(const void* from, void* into, uint64_t length) {
  for (uint64_t at = 0; at < length; at += sizeof(uint64_t)) {
    auto* word = reinterpret_cast<uint64_t*>(reinterpret_cast<uintptr_t>(from) + at);
    const uint64_t found = std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire);
    std::memcpy(static_cast<uint8_t*>(into) + at, &found, sizeof found);
  }
}

std::unique_ptr<control_memory> host_control_memory() { return std::make_unique<host_memory_source>(); }

} // namespace ep::ibgda
