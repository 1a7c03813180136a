// A stream of a device as JS sees it: what is put on it runs on the device, in order; a thread of ours only watches it, and tells the sink how things ended.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "operation.hpp"
#include "peer_losses.hpp"

namespace ep::gpu {

// An event of the device; it stays where it was recorded last.
class event {
 public:
  static result<std::shared_ptr<event>> create(library_ref of, int device, bool timed);
  ~event() {
    if (native_ != nullptr) of_->table().event_destroy(native_);
  }
  event(const event&) = delete;
  void* native() const { return native_; }
  result<bool> reached() const;

 private:
  explicit event(library_ref of) : of_(std::move(of)) {}
  library_ref of_;
  void* native_ = nullptr;
};

// Pinned words of one launch: kernels write `status` if they fail, and end their waits when `cancel` is not 0.
struct launch_slot {
  ep_kernel_status status;
  uint32_t cancel;
  uint8_t pad[28];
};
static_assert(sizeof(launch_slot) == 64);

// One slot of pinned memory, in use until the last reference goes; then it is the stream's again.
using slot_ref = std::shared_ptr<launch_slot>;

struct launched_kernel {
  slot_ref slot;
  rank_list ranks; // whom it waits for, by the numbers that it knows them by; null: all ranks, by their own
};

class stream {
 public:
  // The sink must outlive the stream.
  static result<std::shared_ptr<stream>> create(library_ref of, int device, bool high_priority, completion_sink& sink);
  // Stops, and waits until the device is done with what was put on it.
  ~stream();
  // Ends the waits of what runs, and returns at once. Nothing may be followed afterwards.
  void stop();
  // What is on it never ends, since some library waits there for a peer that is gone: the device's stream, and what its operations keep, stay until the process ends.
  void abandon();

  int device() const { return device_; }
  const library_ref& of() const { return of_; }
  void* native() const { return native_; }
  // `lost`: peer_losses::address(), where the kernel goes on without those that are gone.
  ep_cuda_launch launch(uint32_t blocks, uint32_t lanes, uint64_t wait_cycles, const slot_ref& slot, uint64_t lost = 0) const;

  result<slot_ref> slot();

  // What ends an operation besides the device's reaching it.
  struct watch {
    std::vector<launched_kernel> kernels;   // how they ended; without any, a cancelled operation ends at once
    int64_t deadline_ns = no_deadline;
    std::shared_ptr<rank_context> context;  // where the deaths of those whom its kernels wait for end it; or none
    std::vector<std::shared_ptr<peer_losses>> losses; // kept up to date while it runs: what its kernels go on without
    std::vector<std::shared_ptr<const void>> keep; // what the device reads or writes
    std::string failed;                     // why it fails when the stream comes here, whatever the device says; empty: it need not
  };
  // The operation ends when all that was put on the stream so far has run. A failure: nobody can be told of that, and the stream keeps what `how` holds.
  result<nothing> follow(uint64_t operation, cancel_ref cancel, watch how);
  uint64_t depth() const;

 private:
  struct entry {
    uint64_t operation;
    cancel_ref cancel;
    watch how;
    std::shared_ptr<event> point;
    outcome ended; // why it was cancelled, where that was not the caller's wish
    bool cancelled = false;
    int64_t left_ns = no_deadline; // when the last of its peers was first seen to have closed
  };
  struct slots;
  stream(library_ref of, int device, completion_sink& sink) : of_(std::move(of)), device_(device), sink_(sink) {}
  void run();
  // Whether the operation is over already.
  bool give_up(entry& of, bool stopping);
  void complete(entry& of, int error);

  library_ref of_;
  int device_;
  completion_sink& sink_;
  void* native_ = nullptr;
  std::shared_ptr<slots> slots_;
  std::vector<std::shared_ptr<event>> spare_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<entry>> queue_;
  std::vector<watch> unfollowed_;
  bool stopping_ = false;
  std::atomic<bool> abandoned_{false};
  std::thread thread_;
};

} // namespace ep::gpu
