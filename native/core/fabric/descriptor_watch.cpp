#include "descriptor_watch.hpp"

#include <cerrno>
#include <cstdint>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "thread.hpp"
#include "waiting.hpp"

namespace ep::fabric {

result<std::unique_ptr<descriptor_watch>> descriptor_watch::start(int descriptor, ep_wake_word* wake) {
  const int control = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (control < 0) return failure_errno("eventfd", errno, "of a fabric engine");
  std::unique_ptr<descriptor_watch> made(new descriptor_watch(descriptor, control, wake));
  auto started = thread_start([watch = made.get()] { watch->run(); }, "thread of a fabric engine that sleeps on the network; raise the limit on tasks");
  if (!started.ok()) return started.why();
  made->thread_ = std::move(started.value());
  return made;
}

descriptor_watch::~descriptor_watch() {
  stopping_.store(true, std::memory_order_seq_cst);
  tell();
  if (thread_.joinable()) thread_.join();
  close(control_);
}

void descriptor_watch::arm() {
  if (!armed_.exchange(true, std::memory_order_seq_cst)) tell();
}

void descriptor_watch::tell() {
  const uint64_t one = 1;
  (void)!write(control_, &one, sizeof one); // fails only where it is readable already
}

void descriptor_watch::run() {
  while (!stopping_.load(std::memory_order_seq_cst)) {
    const bool armed = armed_.load(std::memory_order_seq_cst);
    pollfd of[2] = {{control_, POLLIN, 0}, {armed ? descriptor_ : -1, POLLIN, 0}};
    if (::poll(of, 2, -1) < 0) continue; // a signal
    uint64_t told = 0;
    if (of[0].revents != 0) (void)!read(control_, &told, sizeof told);
    if (of[1].revents == 0) continue;
    armed_.store(false, std::memory_order_seq_cst);
    wake_notify(wake_);
  }
}

} // namespace ep::fabric
