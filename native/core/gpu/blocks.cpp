#include "blocks.hpp"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

#include "thread.hpp"

namespace ep::gpu {
namespace {

// HAZARD: freeing waits for every kernel of the device. A JS thread that did so, perhaps in a finalizer, would wait for a peer's kernel, which waits for this
// rank's next launch. So one thread of the process frees; it is never joined.
class reaper {
 public:
  void take(std::function<void()> release) {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(release));
    if (!started_) {
      auto thread = thread_start([this] { run(); }, "thread that frees memory of GPUs");
      if (!thread.ok()) return; // what waits is freed with the next that comes, or with the process
      thread.value().detach();
      started_ = true;
    }
    changed_.notify_all();
  }
  // False: there was nothing to wait for.
  bool drain() {
    std::unique_lock lock(mutex_);
    if (waiting_.empty() && !busy_) return false;
    return changed_.wait_for(lock, std::chrono::seconds(2), [this] { return waiting_.empty() && !busy_; });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !waiting_.empty(); });
      const std::function<void()> release = std::move(waiting_.front());
      waiting_.pop_front();
      busy_ = true;
      lock.unlock();
      release();
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  bool started_ = false;
  bool busy_ = false;
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
