#include "blocks.hpp"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

#include "thread.hpp"

namespace ep::gpu {
namespace {

// HAZARD: freeing waits for every kernel of the device, perhaps with the driver's locks held; and a kernel may wait for what a peer, another thread of this process,
// is about to launch. So memory is freed by one thread of the process, which is never joined, and only at moments when no kernel waits for peers.
class reaper {
 public:
  void take(std::function<void()> release) {
    const std::lock_guard lock(mutex_);
    dropped_.push_back(std::move(release));
    if (!started_) {
      auto thread = thread_start([this] { run(); }, "thread that frees memory of GPUs");
      if (!thread.ok()) return; // what was dropped is freed with the next that comes, or with the process
      thread.value().detach();
      started_ = true;
    }
    changed_.notify_all();
  }
  // Waits a little until all that was dropped is free. False: there was nothing, or it is not.
  bool drain() {
    std::unique_lock lock(mutex_);
    if (dropped_.empty()) return false;
    return changed_.wait_for(lock, std::chrono::seconds(2), [this] { return dropped_.empty(); });
  }
  void kernel_begins() {
    const std::lock_guard lock(mutex_);
    ++waiting_kernels_;
  }
  void kernel_ended() {
    const std::lock_guard lock(mutex_);
    if (--waiting_kernels_ == 0) changed_.notify_all();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !dropped_.empty() && waiting_kernels_ == 0; });
      // With the lock held: whoever launches next waits for this, and finds it short, since nothing that runs now waits for anybody.
      for (const std::function<void()>& release : dropped_) release();
      dropped_.clear();
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> dropped_;
  uint64_t waiting_kernels_ = 0;
  bool started_ = false;
};

reaper& freed() {
  static auto* made = new reaper; // leaked on purpose: blocks may go while static destructors run
  return *made;
}

constexpr int out_of_memory = 2; // cudaErrorMemoryAllocation

std::string on_device(uint64_t bytes, const char* kind, int device) {
  return std::to_string(bytes) + " bytes of " + kind + " memory for GPU " + std::to_string(device);
}

} // namespace

std::shared_ptr<const void> kernels_wait() {
  freed().kernel_begins();
  static const char token = 0;
  return std::shared_ptr<const void>(&token, [](const void*) { freed().kernel_ended(); });
}

device_block::~device_block() {
  if (address_ == 0) return;
  freed().take([of = of_, device = device_, address = address_] { of->table().memory_free(device, address); });
}

imported_block::~imported_block() {
  if (address_ == 0) return;
  freed().take([of = of_, device = device_, address = address_] { of->table().memory_unmap(device, address); });
}

pinned_block::~pinned_block() {
  if (address_ == 0) return;
  freed().take([of = of_, device = device_, address = address_] { of->table().pinned_free(device, address); });
}

result<std::shared_ptr<const device_block>> device_block::allocate(library_ref of, int device, uint64_t bytes) {
  std::shared_ptr<device_block> made(new device_block(std::move(of), device));
  // An allocation of no bytes has no address.
  const uint64_t asked = bytes == 0 ? 1 : bytes;
  int error = made->of_->table().memory_allocate(device, asked, &made->address_);
  if (error == out_of_memory && freed().drain()) error = made->of_->table().memory_allocate(device, asked, &made->address_);
  if (error != 0) return made->of_->error(error, on_device(bytes, "device", device));
  made->bytes_ = bytes;
  return std::shared_ptr<const device_block>(made);
}

result<std::shared_ptr<const imported_block>> imported_block::import(library_ref of, int device, const uint8_t handle[EP_CUDA_IPC_BYTES], const std::string& whose) {
  std::shared_ptr<imported_block> made(new imported_block(std::move(of), device));
  if (const int error = made->of_->table().memory_import(device, handle, &made->address_); error != 0) {
    return made->of_->error(error, "mapping the device memory of " + whose + " (CUDA IPC)");
  }
  return std::shared_ptr<const imported_block>(made);
}

result<std::shared_ptr<const pinned_block>> pinned_block::allocate(library_ref of, int device, uint64_t bytes) {
  std::shared_ptr<pinned_block> made(new pinned_block(std::move(of), device));
  const uint64_t asked = bytes == 0 ? 1 : bytes;
  if (const int error = made->of_->table().pinned_allocate(device, asked, &made->address_); error != 0) return made->of_->error(error, on_device(bytes, "pinned", device));
  made->bytes_ = bytes;
  return std::shared_ptr<const pinned_block>(made);
}

} // namespace ep::gpu
