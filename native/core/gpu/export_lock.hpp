// Who still maps memory that was exported to other processes. A file without content, on which whoever maps the memory holds a shared lock: the kernel drops it with
// the process, however that ends, so it needs no word from anybody.
#pragma once

#include <memory>
#include <string>

#include "ep/abi/gpu.h"
#include "status.hpp"

namespace ep::gpu {

// The exporter's side.
class export_lock {
 public:
  static result<std::shared_ptr<const export_lock>> create();
  ~export_lock();
  export_lock(const export_lock&) = delete;
  // Says in the handle where the lock is.
  void describe(ep_gpu_memory_handle& handle) const;
  // True once no other process maps the memory; from then on none can begin to.
  bool retire() const;

 private:
  explicit export_lock(int fd) : fd_(fd) {}
  int fd_;
};

// Held while this process maps another's memory: to be taken before it is mapped, and dropped after it has been unmapped.
class import_lock {
 public:
  // EP_STATUS_STALE_HANDLE: the memory was freed, or its process is gone. `whose` is for the message.
  static result<std::shared_ptr<const import_lock>> take(const ep_gpu_memory_handle& handle, const std::string& whose);
  ~import_lock();
  import_lock(const import_lock&) = delete;

 private:
  explicit import_lock(int fd) : fd_(fd) {}
  int fd_;
};

} // namespace ep::gpu
