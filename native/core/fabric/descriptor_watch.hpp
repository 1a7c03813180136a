// Wakes a thread that sleeps on a futex when a descriptor becomes readable. It takes a thread of its own, asleep but for those moments: nobody can sleep on both.
#pragma once

#include <atomic>
#include <memory>
#include <thread>

#include "ep/abi/rank.h"
#include "status.hpp"

namespace ep::fabric {

class descriptor_watch {
 public:
  // Both must outlive the watch.
  static result<std::unique_ptr<descriptor_watch>> start(int descriptor, ep_wake_word* wake);
  ~descriptor_watch();
  // The next time that the descriptor is readable, now included, the word is notified: once. HAZARD: between wake_prepare() and wake_commit().
  void arm();

 private:
  descriptor_watch(int descriptor, int control, ep_wake_word* wake) : descriptor_(descriptor), control_(control), wake_(wake) {}
  void run();
  void tell();

  const int descriptor_;
  const int control_; // an eventfd: something has changed below
  ep_wake_word* const wake_;
  std::atomic<bool> armed_{false};
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

} // namespace ep::fabric
