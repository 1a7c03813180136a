// Shared segments: who may open what, and what a refusal leaves behind.
#include "segment.hpp"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"
#include "huge_pages.hpp"

namespace {

using ep::segment;

long descriptors() {
  long count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

long mappings() {
  std::ifstream maps("/proc/self/maps");
  long count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("ep-segment") != std::string::npos ? 1 : 0;
  return count;
}


// A process without any segment of this one: forked before the first is made. It answers each handle with the status of opening it, and writes its pid
// into what it could open.
struct other_process {
  int to = -1;
  int from = -1;
  pid_t pid = -1;

  other_process() {
    int there[2];
    int back[2];
    EP_CHECK(pipe(there) == 0 && pipe(back) == 0);
    pid = fork();
    if (pid == 0) {
      close(there[1]);
      close(back[0]);
      serve(there[0], back[1]);
    }
    close(there[0]);
    close(back[1]);
    to = there[1];
    from = back[0];
  }
  ~other_process() {
    close(to);
    close(from);
    waitpid(pid, nullptr, 0);
  }

  [[noreturn]] static void serve(int requests, int answers) {
    auto own = segment::create(64);
    ep_segment_handle handle = own.value()->handle();
    if (write(answers, &handle, sizeof handle) < 0) _exit(1);
    while (read(requests, &handle, sizeof handle) == static_cast<ssize_t>(sizeof handle)) {
      auto opened = segment::open(handle);
      const uint32_t status = opened.ok() ? 0u : opened.why().status;
      if (opened.ok()) *reinterpret_cast<int32_t*>(opened.value()->data()) = getpid();
      if (write(answers, &status, sizeof status) < 0) _exit(1);
    }
    _exit(0);
  }

  ep_segment_handle own_segment() const {
    ep_segment_handle handle{};
    EP_CHECK(read(from, &handle, sizeof handle) == static_cast<ssize_t>(sizeof handle));
    return handle;
  }

  uint32_t open(const ep_segment_handle& handle) const {
    EP_CHECK(write(to, &handle, sizeof handle) == static_cast<ssize_t>(sizeof handle));
    uint32_t status = 0xffffffffu;
    EP_CHECK(read(from, &status, sizeof status) == static_cast<ssize_t>(sizeof status));
    return status;
  }
};

void shares_bytes(const other_process& other) {
  auto made = segment::create(100'000);
  EP_CHECK(made.ok());
  const auto own = made.value();
  EP_CHECK_EQ(own->data_bytes(), 100'000u);
  for (uint64_t i = 0; i < own->data_bytes(); i += 997) EP_CHECK_EQ(own->data()[i], 0);
  EP_CHECK_EQ(other.open(own->handle()), 0u);
  EP_CHECK_EQ(*reinterpret_cast<int32_t*>(own->data()), other.pid);
  // Ranks of one process share one mapping.
  auto again = segment::open(own->handle());
  EP_CHECK(again.ok() && again.value() == own);
  EP_CHECK_EQ(mappings(), 1);
}

void opens_what_another_process_made(const ep_segment_handle& theirs) {
  auto opened = segment::open(theirs);
  EP_CHECK(opened.ok());
  EP_CHECK_EQ(opened.value()->data_bytes(), 64u);
  auto twice = segment::open(theirs);
  EP_CHECK(twice.ok() && twice.value() == opened.value());
}

void is_sealed_and_private_to_exec() {
  const auto own = segment::create(8192).value();
  const int fd = own->handle().fd;
  EP_CHECK_EQ(fcntl(fd, F_GET_SEALS) & (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  EP_CHECK(ftruncate(fd, 4096) != 0 && errno == EPERM);
  EP_CHECK(ftruncate(fd, 1 << 20) != 0 && errno == EPERM);
  EP_CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
}

void refuses_stale_handles(const other_process& other) {
  const auto status = [](const ep_segment_handle& handle) {
    auto opened = segment::open(handle);
    return opened.ok() ? 0u : opened.why().status;
  };
  const long before = descriptors();
  ep_segment_handle old{};
  {
    const auto own = segment::create(4096).value();
    old = own->handle();
    ep_segment_handle bad = old;
    bad.nonce ^= 1;
    EP_CHECK_EQ(status(bad), unsigned{EP_STATUS_STALE_HANDLE});
    EP_CHECK_EQ(other.open(bad), unsigned{EP_STATUS_STALE_HANDLE});
    bad = old;
    bad.header.magic ^= 1;
    EP_CHECK_EQ(status(bad), unsigned{EP_STATUS_INVALID});
    bad = old;
    bad.header.abi_major += 1;
    EP_CHECK_EQ(status(bad), unsigned{EP_STATUS_ABI_MISMATCH});
    bad = old;
    bad.data_bytes += 4096;
    EP_CHECK_EQ(status(bad), unsigned{EP_STATUS_STALE_HANDLE});
    bad.nonce ^= 1; // past the registry
    EP_CHECK_EQ(status(bad), unsigned{EP_STATUS_STALE_HANDLE});
    bad = old;
    int pipe_ends[2];
    EP_CHECK(pipe(pipe_ends) == 0);
    bad.fd = pipe_ends[0];
    bad.nonce ^= 1;
    EP_CHECK_EQ(status(bad), unsigned{EP_STATUS_STALE_HANDLE}); // and does not wait for somebody to write
    close(pipe_ends[0]);
    close(pipe_ends[1]);
    bad = old;
    bad.inode += 1;
    EP_CHECK_EQ(status(bad), unsigned{EP_STATUS_STALE_HANDLE});
    EP_CHECK_EQ(status(old), 0u);
    EP_CHECK_EQ(mappings(), 1);
  }
  EP_CHECK_EQ(status(old), unsigned{EP_STATUS_STALE_HANDLE});
  EP_CHECK_EQ(other.open(old), unsigned{EP_STATUS_STALE_HANDLE});
  // The next segment gets the same number, and the same size: it is another one nevertheless.
  const auto next = segment::create(4096).value();
  EP_CHECK_EQ(next->handle().fd, old.fd);
  EP_CHECK_EQ(status(old), unsigned{EP_STATUS_STALE_HANDLE});
  EP_CHECK_EQ(other.open(old), unsigned{EP_STATUS_STALE_HANDLE});
  EP_CHECK_EQ(descriptors(), before + 1);
  EP_CHECK_EQ(mappings(), 1);
}

void refuses_what_does_not_fit() {
  const long before = descriptors();
  const auto refused = [](uint64_t bytes) {
    auto made = segment::create(bytes);
    return !made.ok() && made.why().status == EP_STATUS_MEMORY_LIMIT;
  };
  EP_CHECK(refused(UINT64_MAX));
  EP_CHECK(refused(uint64_t{1} << 46));
  EP_CHECK(refused((uint64_t{1} << 46) + 1));
  const auto made = segment::create(uint64_t{1} << 45);
  EP_CHECK(!made.ok() && made.why().message.find("leaves") != std::string::npos);
  EP_CHECK_EQ(descriptors(), before);
  EP_CHECK_EQ(mappings(), 0);
  EP_CHECK_EQ(ep::segment_count(), 0u);

  // Limits of the process, in one of its own. SIGXFSZ would end it if the check came after the allocation.
  const pid_t child = fork();
  if (child == 0) {
    const rlimit file{1 << 20, 1 << 20};
    if (setrlimit(RLIMIT_FSIZE, &file) != 0) _exit(2);
    auto large = segment::create(4 << 20);
    if (large.ok() || large.why().status != EP_STATUS_MEMORY_LIMIT || large.why().message.find("RLIMIT_FSIZE") == std::string::npos) _exit(3);
    const auto open_now = static_cast<rlim_t>(descriptors());
    const rlimit files{open_now - 1, open_now - 1}; // the listing had one open itself
    if (setrlimit(RLIMIT_NOFILE, &files) != 0) _exit(4);
    const rlimit unlimited{1 << 20, 1 << 20};
    setrlimit(RLIMIT_FSIZE, &unlimited);
    _exit(segment::create(64).ok() ? 5 : 0);
  }
  int ended = -1;
  waitpid(child, &ended, 0);
  EP_CHECK(WIFEXITED(ended));
  EP_CHECK_EQ(WEXITSTATUS(ended), 0);
}

// The sum of one line of /proc/self/smaps over the mappings that begin at `base`.
uint64_t smaps_bytes(const uint8_t* base, const std::string& name) {
  char from[32];
  std::snprintf(from, sizeof from, "%zx-", reinterpret_cast<size_t>(base));
  std::ifstream smaps("/proc/self/smaps");
  bool inside = false;
  uint64_t bytes = 0;
  for (std::string line; std::getline(smaps, line);) {
    const size_t dash = line.find('-');
    if (dash != std::string::npos && dash < line.find(' ')) inside = line.starts_with(from);
    if (inside && line.starts_with(name)) bytes += 1024 * std::stoull(line.substr(name.size()));
  }
  return bytes;
}

// Every byte exists and is zero, the count of huge pages is the kernel's own, and the tail that fills no huge page is small pages.
void takes_huge_pages() {
  constexpr uint64_t bytes = 3 * ep::huge_page_bytes + 12'345;
  for (const bool shared : {true, false}) {
    const int fd = shared ? memfd_create("ep-segment", MFD_CLOEXEC) : -1;
    if (shared) EP_CHECK(ftruncate(fd, bytes) == 0);
    uint8_t* base = ep::map_for_huge_pages(fd, bytes);
    EP_CHECK(base != nullptr && reinterpret_cast<uintptr_t>(base) % ep::huge_page_bytes == 0);
    const uint64_t filled = ep::huge_pages_fill(base, bytes);
    EP_CHECK_EQ(filled, smaps_bytes(base, shared ? "ShmemPmdMapped:" : "AnonHugePages:"));
    std::printf("  %s memory: %llu of %llu bytes in huge pages\n", shared ? "shared" : "private", static_cast<unsigned long long>(filled),
                static_cast<unsigned long long>(bytes));
    for (uint64_t i = 0; i < bytes; ++i) {
      if (base[i] != 0) EP_CHECK_EQ(static_cast<int>(base[i]), 0);
      base[i] = static_cast<uint8_t>(i);
    }
    munmap(base, bytes);
    if (shared) close(fd);
  }
  errno = 0;
  EP_CHECK(ep::map_for_huge_pages(-1, uint64_t{1} << 60) == nullptr && errno == ENOMEM);
}

} // namespace

int main() {
  ep_segment_handle theirs{};
  {
    const other_process other;
    theirs = other.own_segment();
    shares_bytes(other);
    opens_what_another_process_made(theirs);
    is_sealed_and_private_to_exec();
    refuses_stale_handles(other);
    refuses_what_does_not_fit();
    takes_huge_pages();
  }
  // Its process has ended.
  auto gone = segment::open(theirs);
  EP_CHECK(!gone.ok() && gone.why().status == EP_STATUS_STALE_HANDLE);
  EP_CHECK_EQ(ep::segment_count(), 0u);
  return ep::check::finish();
}
