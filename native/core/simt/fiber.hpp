// Cooperative stacks for the simt executor: one per lane, switched by the scheduler of the thread that owns them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ep {

// One place that execution can be at: a lane on its own stack, or the scheduler on its thread's stack.
struct fiber {
  void* saved = nullptr;         // stack pointer, or the ucontext_t where there is no assembly for the machine
  void* stack_bottom = nullptr;  // of the scheduler: learned by the sanitizer at the first switch away from it
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;    // AddressSanitizer's, while the fiber is not running
  void* tracked = nullptr;       // ThreadSanitizer's record of it
};

// `entry` runs at the first switch to the fiber and must never return: its last act is fiber_switch(..., ends = true).
void fiber_prepare(fiber& self, void* stack_bottom, size_t stack_bytes, void (*entry)());

// First statement of `entry`. `from` is who switched here.
void fiber_entered(fiber& from);

// Comes back when somebody switches to `from`; never when it `ends`.
void fiber_switch(fiber& from, fiber& to, bool ends);

// For the thread's own place (before the first switch away from it), and for a prepared fiber that will not run again.
void fiber_adopt_thread(fiber& self);
void fiber_release(fiber& self);

// Equal stacks with an inaccessible page below each, so that an overflow faults at once instead of writing into the next lane.
class fiber_stacks {
 public:
  fiber_stacks(size_t count, size_t stack_bytes); // std::system_error when the memory cannot be mapped
  ~fiber_stacks();
  fiber_stacks(const fiber_stacks&) = delete;
  fiber_stacks& operator=(const fiber_stacks&) = delete;

  void* bottom(size_t index) const { return base + index * pitch + page; }
  size_t bytes() const { return pitch - page; }

 private:
  size_t page;
  size_t pitch;
  size_t length;
  uint8_t* base;
};

} // namespace ep
