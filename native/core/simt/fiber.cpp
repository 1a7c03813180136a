#include "fiber.hpp"

#include <cerrno>
#include <new>
#include <system_error>

#include <sys/mman.h>
#include <unistd.h>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define EP_FIBER_ASAN 1
#elif defined(__SANITIZE_THREAD__)
#define EP_FIBER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EP_FIBER_ASAN 1
#elif __has_feature(thread_sanitizer)
#define EP_FIBER_TSAN 1
#endif
#endif

#if defined(EP_FIBER_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(EP_FIBER_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace ep {

namespace {

#if defined(__x86_64__)

// Saves what the System V ABI makes the callee keep, and swaps stacks. glibc's swapcontext would make a system call per switch, and
// AddressSanitizer's interceptor of it wipes the shadow of the whole target stack, which hides the overflows we look for.
extern "C" void ep_fiber_swap(void** save, void* load);
asm(R"(
.text
.p2align 4
.type ep_fiber_swap, @function
ep_fiber_swap:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size ep_fiber_swap, .-ep_fiber_swap
)");

void machine_prepare(fiber& self, void (*entry)()) {
  auto* top = reinterpret_cast<uint64_t*>(static_cast<uint8_t*>(self.stack_bottom) + self.stack_bytes);
  // From the top: the return address that `entry` never uses, `entry` itself, six registers. The return into `entry` leaves the stack pointer
  // at 16 n + 8, as a call would.
  uint64_t* at = top - 1;
  *at = 0;
  *--at = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < 6; ++i) *--at = 0;
  self.saved = at;
}

void machine_switch(fiber& from, fiber& to) { ep_fiber_swap(&from.saved, to.saved); }

#else

// The context lies at the top of the fiber's own stack, the scheduler's on the stack of its current switch.
void machine_prepare(fiber& self, void (*entry)()) {
  self.stack_bytes -= (sizeof(ucontext_t) + 63) & ~size_t{63};
  auto* context = new (static_cast<uint8_t*>(self.stack_bottom) + self.stack_bytes) ucontext_t{};
  getcontext(context);
  context->uc_stack.ss_sp = self.stack_bottom;
  context->uc_stack.ss_size = self.stack_bytes;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  self.saved = context;
}

void machine_switch(fiber& from, fiber& to) {
  ucontext_t here;
  from.saved = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to.saved));
}

#endif

} // namespace

void fiber_prepare(fiber& self, void* stack_bottom, size_t stack_bytes, void (*entry)()) {
  self = fiber{};
  self.stack_bottom = stack_bottom;
  self.stack_bytes = stack_bytes;
#if defined(EP_FIBER_TSAN)
  self.tracked = __tsan_create_fiber(0);
#endif
  machine_prepare(self, entry);
}

void fiber_adopt_thread([[maybe_unused]] fiber& self) {
#if defined(EP_FIBER_TSAN)
  self.tracked = __tsan_get_current_fiber();
#endif
}

void fiber_release([[maybe_unused]] fiber& self) {
#if defined(EP_FIBER_TSAN)
  __tsan_destroy_fiber(self.tracked);
#endif
}

void fiber_entered([[maybe_unused]] fiber& from) {
#if defined(EP_FIBER_ASAN)
  const void* bottom = nullptr;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &from.stack_bytes);
  from.stack_bottom = const_cast<void*>(bottom);
#endif
}

void fiber_switch(fiber& from, fiber& to, [[maybe_unused]] bool ends) {
#if defined(EP_FIBER_ASAN)
  __sanitizer_start_switch_fiber(ends ? nullptr : &from.fake_stack, to.stack_bottom, to.stack_bytes);
#elif defined(EP_FIBER_TSAN)
  // The switch orders the two fibers: lanes of one thread do not race. What other threads do is still checked.
  __tsan_switch_to_fiber(to.tracked, 0);
#endif
  machine_switch(from, to);
#if defined(EP_FIBER_ASAN)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

fiber_stacks::fiber_stacks(size_t count, size_t stack_bytes) : page(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
  pitch = (stack_bytes + page - 1) / page * page + page;
  length = pitch * (count > 0 ? count : 1);
  void* mapped = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (mapped == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "stacks of the simt executor: mmap");
  base = static_cast<uint8_t*>(mapped);
  for (size_t i = 0; i < count; ++i) {
    if (mprotect(base + i * pitch, page, PROT_NONE) == 0) continue;
    const int why = errno;
    munmap(base, length);
    throw std::system_error(why, std::generic_category(), "guard pages of the simt executor: mprotect");
  }
}

fiber_stacks::~fiber_stacks() {
#if defined(EP_FIBER_ASAN)
  // What is mapped here next must not inherit the red zones of dead frames.
  __asan_unpoison_memory_region(base, length);
#endif
  munmap(base, length);
}

} // namespace ep
