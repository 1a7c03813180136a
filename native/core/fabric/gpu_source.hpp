// Memory of one GPU for an engine whose port was opened for it: of our making, or of somebody's.
#pragma once

#include <memory>
#include <string>

#include "dl/cuda_symbols.hpp"
#include "engine.hpp"
#include "ibgda/gpu_memory.hpp"

namespace ep::fabric {

class gpu_source {
 public:
  // `driver`: CUDA's, as dlopen takes it. ELIBACC: it is not there; ENODEV: nor is the GPU.
  static result<std::unique_ptr<gpu_source>> open(const std::string& driver, int ordinal);

  // Zeroed. EOPNOTSUPP: the port, or the GPU, cannot.
  result<std::shared_ptr<gpu_range>> allocate(engine& of, uint64_t byte_length);
  // Whether it is memory of this GPU.
  bool owns(uint64_t address) const;
  // HAZARD: whoever owns it frees it after the range is gone.
  result<std::shared_ptr<gpu_range>> adopt(engine& of, uint64_t address, uint64_t byte_length);
  // Between the host and a range. The calling thread waits for the copy: for set-up and tests.
  result<nothing> write(const gpu_range& into, uint64_t offset, const void* bytes, uint64_t length);
  result<nothing> read(const gpu_range& from, uint64_t offset, void* into, uint64_t length);

 private:
  gpu_source(std::shared_ptr<const dl::cuda_symbols> cuda, int ordinal) : cuda_(std::move(cuda)), ordinal_(ordinal) {}
  result<ibgda::control_memory*> memory();
  std::shared_ptr<const dl::cuda_symbols> cuda_;
  const int ordinal_;
  std::unique_ptr<ibgda::control_memory> memory_; // null until it is asked for
};

} // namespace ep::fabric
