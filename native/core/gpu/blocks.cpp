#include "blocks.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <iterator>
#include <mutex>
#include <vector>

#include "thread.hpp"

namespace ep::gpu {
namespace {

// HAZARD: freeing waits for every kernel of the device, perhaps with the driver's locks held; and a kernel may wait for what a peer, another thread of this process,
// is about to launch. So memory is freed by one thread of the process, which is never joined, and only at moments when no kernel waits for peers.
class reaper {
 public:
  struct dropped {
    std::function<void()> release;
    std::shared_ptr<const export_lock> exported; // not before other processes have unmapped it, or null
  };
  void take(dropped what) {
    const std::lock_guard lock(mutex_);
    dropped_.push_back(std::move(what));
    if (!started_) {
      auto thread = thread_start("ep-gpu-free", [this] { run(); }, "thread that frees memory of GPUs");
      if (!thread.ok()) return; // what was dropped is freed with the next that comes, or with the process
      thread.value().detach();
      started_ = true;
    }
    changed_.notify_all();
  }
  // Waits a little until all that was dropped is free. False: nothing was freed meanwhile.
  bool drain() {
    std::unique_lock lock(mutex_);
    const uint64_t before = freed_;
    changed_.wait_for(lock, std::chrono::seconds(2), [this] { return dropped_.empty() && lent_.empty(); });
    return freed_ != before;
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
  // Between looks at whether other processes have unmapped what they borrowed: nothing tells this one.
  static constexpr std::chrono::milliseconds look{20};

  void run() {
    std::unique_lock lock(mutex_);
    const auto due = [this] { return !dropped_.empty() && waiting_kernels_ == 0; };
    for (;;) {
      if (lent_.empty()) changed_.wait(lock, due);
      else changed_.wait_for(lock, look, due);
      if (waiting_kernels_ != 0) continue;
      std::vector<dropped> tried = std::move(lent_);
      lent_.clear();
      tried.insert(tried.end(), std::make_move_iterator(dropped_.begin()), std::make_move_iterator(dropped_.end()));
      dropped_.clear();
      // With the lock held: whoever launches next waits for this, and finds it short, since nothing that runs now waits for anybody.
      for (dropped& each : tried) {
        if (each.exported && !each.exported->retire()) {
          lent_.push_back(std::move(each));
          continue;
        }
        each.release();
        ++freed_;
      }
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<dropped> dropped_;
  std::vector<dropped> lent_; // other processes map them
  uint64_t waiting_kernels_ = 0;
  uint64_t freed_ = 0;
  bool started_ = false;
};

reaper& freed() {
  static auto* made = new reaper; // leaked on purpose: blocks may go while static destructors run
  return *made;
}

constexpr int out_of_memory = 2; // cudaErrorMemoryAllocation

// What opening a handle ends with. The driver does not tell a handle that never was one from that of memory which is gone.
constexpr int of_this_process = 201;            // cudaErrorDeviceUninitialized
constexpr std::array no_handle = {1, 205, 400}; // cudaErrorInvalidValue, cudaErrorMapBufferObjectFailed, cudaErrorInvalidResourceHandle

std::atomic<uint64_t> held{0};

// HAZARD: the driver counts how often a process has mapped a handle, but two threads that map it at once, as ranks of one process do, fail (error 208, seen on H200s). So mapping and unmapping go one by one:
// neither waits for a kernel that waits for a peer.
std::mutex& mapping_lock() {
  static auto* made = new std::mutex; // leaked on purpose: blocks may go while static destructors run
  return *made;
}

std::string on_device(uint64_t bytes, const char* kind, int device) {
  return std::to_string(bytes) + " bytes of " + kind + " memory for GPU " + std::to_string(device);
}

} // namespace

std::shared_ptr<const void> kernels_wait() {
  freed().kernel_begins();
  static const char token = 0;
  return std::shared_ptr<const void>(&token, [](const void*) { freed().kernel_ended(); });
}

uint64_t blocks_held() { return held.load(std::memory_order_relaxed); }

device_block::~device_block() {
  if (address_ == 0) return;
  if (mapping_) {
    freed().take({[of = of_, device = device_, address = address_, mapping = std::move(mapping_)] {
                    held.fetch_sub(1, std::memory_order_relaxed);
                    const std::lock_guard one_by_one(mapping_lock());
                    if (of->table().memory_unmap(device, address) == 0) return;
                    // It may be mapped still, and nobody is to be told otherwise.
                    static auto* kept = new std::vector<std::shared_ptr<const void>>; // only the one thread that frees comes here
                    kept->push_back(mapping);
                  },
                  nullptr});
    return;
  }
  const auto release = [of = of_, device = device_, address = address_, beside = beside_] {
    of->table().memory_free(device, address);
    held.fetch_sub(1, std::memory_order_relaxed);
  };
  beside_.reset();
  // HAZARD: freeing memory that other processes map is undefined: their next access may fail, or hit whatever took its place.
  freed().take({release, exported_});
}

imported_block::~imported_block() {
  if (address_ == 0) return;
  const auto release = [of = of_, device = device_, address = address_, lock = lock_] {
    held.fetch_sub(1, std::memory_order_relaxed);
    const std::lock_guard one_by_one(mapping_lock());
    if (of->table().memory_unmap(device, address) == 0) return;
    // It may be mapped still: its owner must not free it while this process lives.
    static auto* kept = new std::vector<std::shared_ptr<const import_lock>>; // only the one thread that frees comes here
    kept->push_back(lock);
  };
  freed().take({release, nullptr});
}

pinned_block::~pinned_block() {
  if (address_ == 0) return;
  freed().take({[of = of_, device = device_, address = address_] { of->table().pinned_free(device, address); }, nullptr});
}

result<std::shared_ptr<const device_block>> device_block::allocate(library_ref of, int device, uint64_t bytes, std::shared_ptr<const export_lock> exported,
                                                                      std::shared_ptr<const void> beside) {
  std::shared_ptr<device_block> made(new device_block(std::move(of), device));
  // An allocation of no bytes has no address.
  const uint64_t asked = bytes == 0 ? 1 : bytes;
  int error = made->of_->table().memory_allocate(device, asked, &made->address_);
  if (error == out_of_memory && freed().drain()) error = made->of_->table().memory_allocate(device, asked, &made->address_);
  if (error != 0) return made->of_->error(error, on_device(bytes, "device", device));
  held.fetch_add(1, std::memory_order_relaxed);
  made->bytes_ = bytes;
  made->exported_ = std::move(exported);
  made->beside_ = std::move(beside);
  return std::shared_ptr<const device_block>(made);
}

result<std::shared_ptr<const device_block>> device_block::open(library_ref of, int device, const uint8_t handle[EP_CUDA_IPC_BYTES]) {
  const std::string what = "opening memory that another process shares (CUDA IPC)";
  std::shared_ptr<device_block> made(new device_block(std::move(of), device));
  const ep_cuda_table& table = made->of_->table();
  const std::lock_guard one_by_one(mapping_lock());
  if (const int error = table.memory_import(device, handle, &made->address_); error != 0) {
    made->address_ = 0;
    failure why = made->of_->error(error, what);
    const bool gone = std::find(no_handle.begin(), no_handle.end(), error) != no_handle.end();
    if (gone || error == of_this_process) why.status = EP_STATUS_INVALID;
    if (gone) why.message += ": there is no such memory on this host, or not any more";
    if (error == of_this_process) why.message += ": the handle is of this process, which has the address";
    return why;
  }
  uint64_t end = 0;
  if (const int error = table.memory_find(device, made->address_, &end); error != 0) {
    table.memory_unmap(device, made->address_);
    made->address_ = 0;
    failure why = made->of_->error(error, what + ", which lies not on GPU " + std::to_string(device));
    why.status = EP_STATUS_INVALID;
    return why;
  }
  held.fetch_add(1, std::memory_order_relaxed);
  made->bytes_ = end - made->address_;
  made->mapping_ = std::make_shared<char>();
  return std::shared_ptr<const device_block>(made);
}

result<std::shared_ptr<const imported_block>> imported_block::import(library_ref of, int device, const ep_gpu_memory_handle& handle, const std::string& whose) {
  std::shared_ptr<imported_block> made(new imported_block(std::move(of), device));
  auto lock = import_lock::take(handle, whose);
  if (!lock.ok()) return lock.why();
  const std::lock_guard one_by_one(mapping_lock());
  if (const int error = made->of_->table().memory_import(device, handle.ipc, &made->address_); error != 0) {
    made->address_ = 0;
    return made->of_->error(error, "mapping the device memory of " + whose + " (CUDA IPC)");
  }
  held.fetch_add(1, std::memory_order_relaxed);
  made->lock_ = lock.value();
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
