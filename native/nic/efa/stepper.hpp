// Runs several software EFAs one event at a time, in an order that a seed decides, or in every order there is. For tests: the same seed, the same run.
#pragma once

#include <cstdint>
#include <vector>

#include "hostile/random.hpp"
#include "soft_device.hpp"

namespace ep::nic::efa {

// An event of one of a stepper's devices.
struct device_event {
  soft_device* device = nullptr;
  event what;
};

class stepper {
 public:
  explicit stepper(uint64_t seed) : random_(seed) {}
  // A device that was opened without a thread; it must outlive the stepper or be removed.
  void add(soft_device& device) { devices_.push_back(&device); }
  void remove(soft_device& device) { std::erase(devices_, &device); }

  // All that may happen next, of all devices, in an order that depends on what was done and on nothing else.
  const std::vector<device_event>& pending() {
    pending_.clear();
    for (soft_device* device : devices_) {
      events_.clear();
      device->pending(events_, now_ns_);
      for (const event& one : events_) pending_.push_back({device, one});
    }
    return pending_;
  }
  // False: not just now, a device of another thread is in the way. (Never between devices of one thread.)
  bool run(const device_event& one) { return one.device->run(one.what, now_ns_); }

  // One event. Where none can happen now, the clock moves to the next delayed one. False: nothing is left to do.
  bool step() {
    const auto& all = pending();
    if (!all.empty()) {
      const device_event one = all[random_.below(all.size())];
      run(one);
      return true;
    }
    int64_t due = INT64_MAX;
    for (const soft_device* device : devices_) due = std::min(due, device->next_due_ns());
    if (due == INT64_MAX || due <= now_ns_) return false;
    now_ns_ = due;
    return true;
  }
  // False: there was still something to do after `at_most` steps.
  bool run_all(uint64_t at_most = 10'000'000) {
    while (at_most-- > 0) {
      if (!step()) return true;
    }
    return false;
  }

  // Stores and fences of posters, for contexts (watched.hpp). A store to no device's registers is a plain one.
  void store64(uint64_t writer, uint64_t address, uint64_t value) {
    for (soft_device* device : devices_) {
      if (device->store64(writer, address, value)) return;
    }
    store_release(*reinterpret_cast<uint64_t*>(address), value);
  }
  void store32(uint64_t writer, uint64_t address, uint32_t value) {
    for (soft_device* device : devices_) {
      if (device->store32(writer, address, value)) return;
    }
    store_release(*reinterpret_cast<uint32_t*>(address), value);
  }
  void fence(uint64_t writer) {
    for (soft_device* device : devices_) device->fence(writer);
  }

  int64_t now_ns() const { return now_ns_; }
  random_source& random() { return random_; }

 private:
  random_source random_;
  std::vector<soft_device*> devices_;
  std::vector<device_event> pending_;
  std::vector<event> events_;
  int64_t now_ns_ = 1;
};

// Every sequence of choices, depth first:
//
//   for (enumerator all(100'000); all.begin();) { make a world; all.run(steps); look at it }
//   EP_CHECK(all.complete());
//
// The world must depend on the choices alone.
class enumerator {
 public:
  explicit enumerator(uint64_t limit) : limit_(limit) {}

  // The next run. False: every one has been, or the limit is reached.
  bool begin() {
    if (runs_ != 0) {
      while (!choices_.empty() && choices_.back().taken + 1 == choices_.back().of) choices_.pop_back();
      if (choices_.empty()) {
        complete_ = true;
        return false;
      }
      ++choices_.back().taken;
    }
    if (runs_ == limit_) return false;
    ++runs_;
    at_ = 0;
    return true;
  }
  // One of 0 .. count - 1; count > 0.
  size_t choose(size_t count) {
    if (at_ == choices_.size()) choices_.push_back({0, count});
    return choices_[at_++].taken;
  }
  // Everything that is pending, in this run's order. What no program can see is done at once.
  void run(stepper& steps) {
    for (;;) {
      const auto& all = steps.pending();
      if (all.empty()) return;
      size_t silent = 0;
      while (silent < all.size() && !is_silent(all[silent].what.what)) ++silent;
      const device_event one = all[silent < all.size() ? silent : choose(all.size())];
      steps.run(one);
    }
  }
  bool complete() const { return complete_; }
  uint64_t runs() const { return runs_; }

 private:
  struct choice {
    size_t taken;
    size_t of;
  };
  uint64_t limit_;
  uint64_t runs_ = 0;
  size_t at_ = 0;
  bool complete_ = false;
  std::vector<choice> choices_;
};

} // namespace ep::nic::efa
