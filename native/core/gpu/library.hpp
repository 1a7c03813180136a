// libep_cuda.so, or what stands in for it: the table of cuda/table.h, opened by path. Nothing here or above it knows CUDA.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/table.h"
#include "dl/library.hpp"
#include "status.hpp"

namespace ep::gpu {

class library {
 public:
  // ELIBACC: not there; ELIBBAD: of another version. One path is opened once in a process.
  static result<std::shared_ptr<const library>> open(const std::string& path);

  const ep_cuda_table& table() const { return *table_; }
  const std::string& path() const { return file_->name(); }
  int device_count() const { return devices_; }
  // "cudaMalloc of 64 bytes on GPU 0: out of memory (CUDA error 2)"; a lack of memory is EP_STATUS_MEMORY_LIMIT.
  failure error(int number, const std::string& what) const;
  // Other devices whose memory kernels of this one reach. Makes no context.
  std::vector<int> peers(int device) const;
  // As peers(), of a device by its PCI address. True of one that this process does not see: what maps its memory will tell.
  bool reaches(int device, const std::string& pci) const;

 private:
  library() = default;
  std::shared_ptr<dl::library> file_;
  const ep_cuda_table* table_ = nullptr;
  int devices_ = 0;
  std::vector<std::string> pci_; // by device; empty where it could not be looked at
};

using library_ref = std::shared_ptr<const library>;

} // namespace ep::gpu
