// Runs several software NICs one piece of work at a time, in an order and at times that a seed decides. For tests: the same seed, the same run.
#pragma once

#include <cstdint>
#include <vector>

#include "hostile/random.hpp"
#include "soft_device.hpp"

namespace ep::nic {

class stepper {
 public:
  explicit stepper(uint64_t seed) : random_(seed) {}
  // A device that was opened without a thread; it must outlive the stepper or be removed.
  void add(soft_device& device) { devices_.push_back(&device); }
  void remove(soft_device& device) { std::erase(devices_, &device); }

  // One piece of work of one device. Where none can do anything now, the clock moves to the next delayed piece. False: nothing is left to do.
  bool step() {
    if (devices_.empty()) return false;
    const size_t first = random_.below(devices_.size());
    for (size_t i = 0; i < devices_.size(); ++i) {
      if (devices_[(first + i) % devices_.size()]->step(random_, now_ns_)) return true;
    }
    int64_t due = INT64_MAX;
    for (const soft_device* device : devices_) due = std::min(due, device->next_due_ns());
    if (due == INT64_MAX || due <= now_ns_) return false;
    now_ns_ = due;
    return true;
  }
  // False: there was still something to do after `at_most` steps.
  bool run(uint64_t at_most = 10'000'000) {
    while (at_most-- > 0) {
      if (!step()) return true;
    }
    return false;
  }
  int64_t now_ns() const { return now_ns_; }
  random_source& random() { return random_; }

 private:
  random_source random_;
  std::vector<soft_device*> devices_;
  int64_t now_ns_ = 1;
};

} // namespace ep::nic
