#include "export_lock.hpp"

#include <cerrno>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace ep::gpu {

result<std::shared_ptr<const export_lock>> export_lock::create() {
  const int fd = memfd_create("ep-gpu-export", MFD_CLOEXEC);
  if (fd < 0) return failure_errno("memfd_create", errno, "the lock of exported device memory");
  return std::shared_ptr<const export_lock>(new export_lock(fd));
}

export_lock::~export_lock() { close(fd_); }

void export_lock::describe(ep_gpu_memory_handle& handle) const {
  struct stat facts {};
  fstat(fd_, &facts); // of one's own open file: cannot fail
  handle.lock_pid = static_cast<int32_t>(getpid());
  handle.lock_fd = fd_;
  handle.lock_device = facts.st_dev;
  handle.lock_inode = facts.st_ino;
}

bool export_lock::retire() const {
  int taken = 0;
  do taken = flock(fd_, LOCK_EX | LOCK_NB);
  while (taken != 0 && errno == EINTR);
  return taken == 0;
}

result<std::shared_ptr<const import_lock>> import_lock::take(const ep_gpu_memory_handle& handle, const std::string& whose) {
  const std::string what = "the device memory of " + whose + " (process " + std::to_string(handle.lock_pid) + ")";
  const std::string path = "/proc/" + std::to_string(handle.lock_pid) + "/fd/" + std::to_string(handle.lock_fd);
  // HAZARD: a descriptor of its own, not one that shares the exporter's open file: locks belong to open files.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) {
    failure why = failure_errno("open", errno, what + " (is the process alive, in the same pid namespace, and of the same user?)");
    why.status = EP_STATUS_STALE_HANDLE;
    return why;
  }
  std::shared_ptr<const import_lock> made(new import_lock(fd));
  // Numbers of processes and descriptors are used again.
  struct stat facts {};
  const bool same = fstat(fd, &facts) == 0 && facts.st_ino == handle.lock_inode && facts.st_dev == handle.lock_device;
  int taken = -1;
  if (same) {
    do taken = flock(fd, LOCK_SH | LOCK_NB);
    while (taken != 0 && errno == EINTR);
  }
  if (taken != 0) return failure{EP_STATUS_STALE_HANDLE, 0, what + " was freed before this process mapped it"};
  return made;
}

import_lock::~import_lock() { close(fd_); }

} // namespace ep::gpu
