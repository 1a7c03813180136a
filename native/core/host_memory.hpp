// Ordinary host memory that native code owns, so that kernels may use it while JS detaches or drops its buffers.
#pragma once

#include <cstdint>
#include <memory>

#include "status.hpp"

namespace ep {

class host_memory {
 public:
  // Zeroed pages, all present, aligned to the page size; refused before allocation where it would not fit.
  static result<std::shared_ptr<host_memory>> create(uint64_t byte_length);
  ~host_memory();
  host_memory(const host_memory&) = delete;
  host_memory& operator=(const host_memory&) = delete;

  uint8_t* data() const { return data_; }
  uint64_t byte_length() const { return byte_length_; }

 private:
  host_memory() = default;
  uint8_t* data_ = nullptr;
  uint64_t byte_length_ = 0;
};

} // namespace ep
