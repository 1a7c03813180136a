#include "gpu_source.hpp"

#include <cerrno>

namespace ep::fabric {
namespace {

dl::gpu_bytes bytes_of(const ibgda::control_block& block, uint64_t byte_length) { return {block.address, byte_length, block.dmabuf_fd, block.dmabuf_offset}; }

ibgda::control_block block_of(const gpu_range& range) {
  ibgda::control_block block;
  block.address = range.address();
  block.byte_length = range.byte_length();
  return block;
}

} // namespace

result<std::unique_ptr<gpu_source>> gpu_source::open(const std::string& driver, int ordinal) {
  auto cuda = dl::cuda_symbols_load(driver);
  if (!cuda.ok()) return cuda.why();
  if (auto facts = ibgda::gpu_facts_read(*cuda.value(), ordinal); !facts.ok()) return facts.why();
  return std::unique_ptr<gpu_source>(new gpu_source(cuda.value(), ordinal));
}

result<ibgda::control_memory*> gpu_source::memory() {
  if (memory_ == nullptr) {
    auto made = ibgda::gpu_control_memory(cuda_, ordinal_, ibgda::placement::gpu_dmabuf);
    if (!made.ok()) {
      auto other = ibgda::gpu_control_memory(cuda_, ordinal_, ibgda::placement::gpu_address);
      if (!other.ok()) return failure{EP_STATUS_SYSTEM, EOPNOTSUPP, made.why().message + "; " + other.why().message};
      memory_ = std::move(other.value());
    } else {
      memory_ = std::move(made.value());
    }
  }
  return memory_.get();
}

result<std::shared_ptr<gpu_range>> gpu_source::allocate(engine& of, uint64_t byte_length) {
  if (!of.offer().no_gpu.empty()) return failure{EP_STATUS_SYSTEM, EOPNOTSUPP, of.offer().no_gpu};
  auto from = memory();
  if (!from.ok()) return from.why();
  auto block = from.value()->allocate(byte_length);
  if (!block.ok()) return block.why();
  return of.register_gpu(bytes_of(block.value(), byte_length), block.value().keep);
}

bool gpu_source::owns(uint64_t address) const {
  unsigned type = 0;
  int ordinal = -1;
  return cuda_->cuPointerGetAttribute(&type, dl::cuda_pointer_memory_type, address) == 0 && type == dl::cuda_memory_of_device &&
         cuda_->cuPointerGetAttribute(&ordinal, dl::cuda_pointer_device_ordinal, address) == 0 && ordinal == ordinal_;
}

result<std::shared_ptr<gpu_range>> gpu_source::adopt(engine& of, uint64_t address, uint64_t byte_length) {
  if (!of.offer().no_gpu.empty()) return failure{EP_STATUS_SYSTEM, EOPNOTSUPP, of.offer().no_gpu};
  auto block = ibgda::gpu_export(cuda_, ordinal_, address, byte_length);
  if (!block.ok()) return block.why();
  return of.register_gpu(bytes_of(block.value(), byte_length), block.value().keep);
}

result<nothing> gpu_source::write(const gpu_range& into, uint64_t offset, const void* bytes, uint64_t length) {
  auto through = memory();
  if (!through.ok()) return through.why();
  return through.value()->write(block_of(into), offset, bytes, length);
}

result<nothing> gpu_source::read(const gpu_range& from, uint64_t offset, void* into, uint64_t length) {
  auto through = memory();
  if (!through.ok()) return through.why();
  return through.value()->read(block_of(from), offset, into, length);
}

} // namespace ep::fabric
