// Memory of a device, and host memory that a device reaches. Freed after the last reference has gone.
#pragma once

#include "export_lock.hpp"
#include "library.hpp"

namespace ep::gpu {

// While anybody holds the token, kernels may be waiting for peers: nothing is freed meanwhile, see blocks.cpp. Taken before such a kernel is launched, dropped when it
// has ended. May wait for what is being freed, which takes no longer than the device's copies.
std::shared_ptr<const void> kernels_wait();

// Allocations and mappings of device memory of this process that are not free again: dropped ones count until they are.
uint64_t blocks_held();

// Zeroed memory of the device; or what another process shares, as it is.
class device_block {
 public:
  // `exported`: its handle goes to other processes; after the last reference has gone it stays allocated until none of them maps it any more. `beside`: let go with it, when the
  // device is through with all that was put on it until then.
  static result<std::shared_ptr<const device_block>> allocate(library_ref of, int device, uint64_t bytes, std::shared_ptr<const export_lock> exported = nullptr,
                                                              std::shared_ptr<const void> beside = nullptr);
  // Memory of a process that is none of ours, by its handle for CUDA IPC: from there to the end of the allocation. Nobody but that process knows when it frees it. EP_STATUS_INVALID: the handle is of this
  // process, of nothing that lives, or of memory of another GPU.
  static result<std::shared_ptr<const device_block>> open(library_ref of, int device, const uint8_t handle[EP_CUDA_IPC_BYTES]);
  ~device_block();
  device_block(const device_block&) = delete;
  int device() const { return device_; }
  uint64_t address() const { return address_; }
  uint64_t byte_length() const { return bytes_; }
  // Of what was opened: expires when this process has unmapped it, some time after the last reference has gone.
  std::weak_ptr<const void> mapping() const { return mapping_; }

 private:
  device_block(library_ref of, int device) : of_(std::move(of)), device_(device) {}
  library_ref of_;
  int device_;
  uint64_t address_ = 0;
  uint64_t bytes_ = 0;
  std::shared_ptr<const export_lock> exported_;
  std::shared_ptr<const void> beside_;
  std::shared_ptr<const void> mapping_; // of another process's memory
};

// A part of another process's memory, mapped here.
class imported_block {
 public:
  static result<std::shared_ptr<const imported_block>> import(library_ref of, int device, const ep_gpu_memory_handle& handle, const std::string& whose);
  ~imported_block();
  imported_block(const imported_block&) = delete;
  uint64_t address() const { return address_; }

 private:
  imported_block(library_ref of, int device) : of_(std::move(of)), device_(device) {}
  library_ref of_;
  int device_;
  uint64_t address_ = 0;
  std::shared_ptr<const import_lock> lock_;
};

// Zeroed, page-locked; one address for the host and for kernels.
class pinned_block {
 public:
  static result<std::shared_ptr<const pinned_block>> allocate(library_ref of, int device, uint64_t bytes);
  ~pinned_block();
  pinned_block(const pinned_block&) = delete;
  uint64_t address() const { return address_; }
  uint64_t byte_length() const { return bytes_; }
  uint8_t* data() const { return reinterpret_cast<uint8_t*>(address_); }

 private:
  pinned_block(library_ref of, int device) : of_(std::move(of)), device_(device) {}
  library_ref of_;
  int device_;
  uint64_t address_ = 0;
  uint64_t bytes_ = 0;
};

} // namespace ep::gpu
