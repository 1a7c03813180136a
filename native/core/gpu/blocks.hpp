// Memory of a device, and host memory that a device reaches. Freed after the last reference has gone.
#pragma once

#include "library.hpp"

namespace ep::gpu {

// While anybody holds the token, kernels may be waiting for peers: nothing is freed meanwhile, see blocks.cpp. Taken before such a kernel is launched, dropped when it
// has ended. May wait for what is being freed, which takes no longer than the device's copies.
std::shared_ptr<const void> kernels_wait();

// Zeroed memory of the device.
class device_block {
 public:
  static result<std::shared_ptr<const device_block>> allocate(library_ref of, int device, uint64_t bytes);
  ~device_block();
  device_block(const device_block&) = delete;
  int device() const { return device_; }
  uint64_t address() const { return address_; }
  uint64_t byte_length() const { return bytes_; }

 private:
  device_block(library_ref of, int device) : of_(std::move(of)), device_(device) {}
  library_ref of_;
  int device_;
  uint64_t address_ = 0;
  uint64_t bytes_ = 0;
};

// A part of another process's memory, mapped here.
class imported_block {
 public:
  static result<std::shared_ptr<const imported_block>> import(library_ref of, int device, const uint8_t handle[EP_CUDA_IPC_BYTES], const std::string& whose);
  ~imported_block();
  imported_block(const imported_block&) = delete;
  uint64_t address() const { return address_; }

 private:
  imported_block(library_ref of, int device) : of_(std::move(of)), device_(device) {}
  library_ref of_;
  int device_;
  uint64_t address_ = 0;
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
