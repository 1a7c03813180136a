// Symmetric memory of a device: every rank's part, and where kernels find all of them.
#pragma once

#include "blocks.hpp"
#include "ep/abi/gpu.h"
#include "../memory.hpp"

namespace ep::gpu {

// Waits for the copy, which runs on a stream for such copies, one by one in a process: for set-up and resync, where no other is at hand. Either side may be the host's.
result<nothing> copy_now(const library_ref& of, int device, uint64_t to, uint64_t from, uint64_t bytes, const char* what);

// Likewise.
result<nothing> fill_now(const library_ref& of, int device, uint64_t at, uint8_t value, uint64_t bytes, const char* what);

class symmetric_memory {
 public:
  // Makes this rank's part, zeroed: signal words, then data.
  static result<std::shared_ptr<symmetric_memory>> create(std::shared_ptr<rank_context> context, library_ref of, int device, uint64_t byte_length, uint64_t signal_slots);
  // The same over memory of somebody's making, zeroed, which peers reach by a NIC, or as a library has it: `signals` is the address of the words, the bytes follow behind
  // signal_bytes(signal_slots). `keep` holds it.
  static result<std::shared_ptr<symmetric_memory>> create_for_nic(std::shared_ptr<rank_context> context, library_ref of, int device, uint64_t byte_length, uint64_t signal_slots,
                                                                  uint64_t signals, std::shared_ptr<const void> keep);
  static uint64_t signal_bytes(uint64_t signal_slots);
  // One of this process, by the id in its device handle; null once it is gone.
  static std::shared_ptr<symmetric_memory> find(uint64_t memory_id);
  ~symmetric_memory();

  const ep_gpu_memory_handle& handle() const { return handle_; }
  // Finds the parts of ranks of this process, and maps those of other processes. EP_STATUS_MISMATCH names ranks whose sizes or devices differ.
  result<nothing> connect(const std::vector<ep_gpu_memory_handle>& handles);
  // Of one that a NIC reaches: nobody's part is mapped. `kind` and `address` as of ep::symmetric_memory.
  result<nothing> connect_by_nic(const std::vector<ep_gpu_memory_handle>& handles, std::shared_ptr<memory_route> route, uint32_t kind, uint64_t address);
  // Of one over memory of somebody's making: a library has mapped the others' parts, `signals` of each rank here, 0 of those that it reaches by a network only.
  result<nothing> connect_by_library(const std::vector<ep_gpu_memory_handle>& handles, const std::vector<uint64_t>& signals);
  bool connected() const { return !parts_.empty(); }
  bool by_nic() const { return route_ != nullptr; }
  // What create_for_nic was given as `keep`; null of another.
  const std::shared_ptr<const void>& nic_part() const { return nic_part_; }
  // As of ep::symmetric_memory.
  result<nothing> prepare_source(uint64_t address, uint64_t bytes, const std::shared_ptr<const void>& keep) const;
  // EP_MEMORY_LOAD_STORE, or that of the NIC; its `peers` lie in device memory. Ids of device memories are marked, so that no kernel of the host takes one.
  const ep_memory_handle& device_handle() const { return device_handle_; }

  int device() const { return handle_.device; }
  const library_ref& of() const { return of_; }
  rank_context& context() const { return *context_; }
  const std::shared_ptr<rank_context>& shared_context() const { return context_; }
  uint64_t byte_length() const { return handle_.byte_length; }
  uint64_t signal_slots() const { return handle_.signal_slots; }
  uint64_t data(int32_t rank) const { return parts_[static_cast<size_t>(rank)].data; }
  uint64_t signals(int32_t rank) const { return parts_[static_cast<size_t>(rank)].signals; }
  // Ranks whose kernels share this device with this rank's, itself among them. Only those of this process run at the same time.
  uint32_t ranks_here() const { return ranks_here_; }
  // Values of this rank's own signal words. Waits for a copy.
  result<std::vector<uint64_t>> read_signals(uint64_t first, uint64_t count) const;

 private:
  symmetric_memory(std::shared_ptr<rank_context> context, library_ref of) : context_(std::move(context)), of_(std::move(of)) {}
  static result<std::shared_ptr<symmetric_memory>> described(std::shared_ptr<rank_context> context, library_ref of, int device, uint64_t byte_length, uint64_t signal_slots);
  result<nothing> check_handle(const ep_gpu_memory_handle& handle, const std::string& who) const;
  result<nothing> finish(std::vector<ep_peer_view> parts, uint32_t kind);
  std::shared_ptr<rank_context> context_;
  library_ref of_;
  std::shared_ptr<const void> own_;
  std::shared_ptr<const void> nic_part_;
  uint64_t address_ = 0;
  std::shared_ptr<memory_route> route_;
  std::shared_ptr<const device_block> views_;
  std::vector<ep_peer_view> parts_;
  std::vector<std::shared_ptr<const void>> keep_;
  ep_gpu_memory_handle handle_{};
  ep_memory_handle device_handle_{};
  uint32_t ranks_here_ = 0;
};

} // namespace ep::gpu
