#include "wake_descriptor.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <ctime>
#include <thread>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace ep {

result<std::unique_ptr<wake_descriptor>> wake_descriptor::create(ep_wake_word* word) {
  const int event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (event < 0) return failure_errno("eventfd", errno, "of a thread that sleeps on a descriptor; raise the limit on open files");
  return std::unique_ptr<wake_descriptor>(new wake_descriptor(word, event));
}

wake_descriptor::~wake_descriptor() {
  cancel();
  while (std::atomic_ref<uint32_t>(word_->epoch).load(std::memory_order_seq_cst) != 0) std::this_thread::yield();
  close(event_);
}

void wake_descriptor::prepare() {
  std::atomic_ref<uint32_t>(word_->waiters).store(EP_WAKE_BY_DESCRIPTOR | static_cast<uint32_t>(event_), std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst); // as wake_prepare()
}

void wake_descriptor::cancel() { std::atomic_ref<uint32_t>(word_->waiters).store(0, std::memory_order_seq_cst); }

bool wake_descriptor::sleep(int descriptor, int64_t at_most_ns) {
  const int64_t ns = std::max<int64_t>(at_most_ns, 0);
  const timespec most{ns / 1'000'000'000, ns % 1'000'000'000};
  pollfd of[2] = {{event_, POLLIN, 0}, {descriptor, POLLIN, 0}};
  const int found = ppoll(of, 2, &most, nullptr);
  cancel();
  if (found <= 0) return found != 0; // a signal
  uint64_t told = 0;
  if (of[0].revents != 0) (void)!read(event_, &told, sizeof told);
  return true;
}

} // namespace ep
