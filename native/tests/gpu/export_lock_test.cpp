// Exported memory is not free while another process maps it, and no process can map what is: over real processes, which end in every way.
#include "core/gpu/export_lock.hpp"

#include <csignal>
#include <cstdlib>

#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"

namespace {

using namespace ep::gpu;

ep_gpu_memory_handle handle_of(const export_lock& lock) {
  ep_gpu_memory_handle handle{};
  lock.describe(handle);
  return handle;
}

struct pipe_pair {
  int ends[2] = {-1, -1};
  pipe_pair() { EP_CHECK_EQ(pipe(ends), 0); }
  ~pipe_pair() {
    close(ends[0]);
    close(ends[1]);
  }
  void say() const { EP_CHECK_EQ(write(ends[1], "x", 1), 1); }
  void hear() const {
    char word = 0;
    EP_CHECK_EQ(read(ends[0], &word, 1), 1);
  }
};

// A process that maps the memory, until it is told to unmap it; then it lives on until it is killed.
struct importer {
  pipe_pair mapped;
  pipe_pair unmap;
  pipe_pair unmapped;
  pid_t pid = -1;
  explicit importer(const ep_gpu_memory_handle& handle) {
    pid = fork();
    EP_CHECK(pid >= 0);
    if (pid != 0) return;
    auto lock = import_lock::take(handle, "rank 0");
    if (!lock.ok()) _exit(1);
    mapped.say();
    unmap.hear();
    lock = import_lock::take(handle, "rank 0"); // a second one, then none
    lock = ep::failure{EP_STATUS_CLOSED, 0, ""};
    unmapped.say();
    for (;;) pause();
  }
  ~importer() { end(); }
  void end() {
    if (pid <= 0) return;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    pid = -1;
  }
};

void memory_is_kept_until_it_is_unmapped() {
  auto made = export_lock::create();
  EP_CHECK(made.ok());
  const auto& lock = *made.value();
  importer one(handle_of(lock));
  importer two(handle_of(lock));
  one.mapped.hear();
  two.mapped.hear();
  EP_CHECK(!lock.retire());
  one.unmap.say();
  one.unmapped.hear();
  EP_CHECK(!lock.retire());
  two.unmap.say();
  two.unmapped.hear();
  EP_CHECK(lock.retire());
  EP_CHECK(lock.retire());
}

void a_process_that_dies_has_unmapped() {
  auto made = export_lock::create();
  EP_CHECK(made.ok());
  const auto& lock = *made.value();
  importer one(handle_of(lock));
  one.mapped.hear();
  EP_CHECK(!lock.retire());
  one.end();
  EP_CHECK(lock.retire());
}

void free_memory_cannot_be_mapped() {
  ep_gpu_memory_handle handle{};
  {
    auto made = export_lock::create();
    EP_CHECK(made.ok());
    handle = handle_of(*made.value());
    EP_CHECK(import_lock::take(handle, "rank 3").ok());
    ep_gpu_memory_handle other = handle;
    other.lock_inode += 1;
    EP_CHECK_EQ(import_lock::take(other, "rank 3").why().status, static_cast<uint32_t>(EP_STATUS_STALE_HANDLE));
    EP_CHECK(made.value()->retire());
    const auto late = import_lock::take(handle, "rank 3");
    EP_CHECK(!late.ok());
    EP_CHECK_EQ(late.why().status, static_cast<uint32_t>(EP_STATUS_STALE_HANDLE));
    EP_CHECK(late.why().message.find("rank 3") != std::string::npos);
  }
  EP_CHECK_EQ(import_lock::take(handle, "rank 3").why().status, static_cast<uint32_t>(EP_STATUS_STALE_HANDLE));
}

} // namespace

int main() {
  memory_is_kept_until_it_is_unmapped();
  a_process_that_dies_has_unmapped();
  free_memory_cannot_be_mapped();
  return ep::check::finish();
}
