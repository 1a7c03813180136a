#include "directory.hpp"

#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace ep::nic {
namespace {

// -1 with errno, EADDRINUSE where another process has the name.
int bind_abstract(const std::string& name) {
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0) return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

std::string prefix_of(uint32_t number) {
  char text[32];
  std::snprintf(text, sizeof text, "ep-mlx5-port-%04" PRIx32 "-", number);
  return text;
}

constexpr const char* handle_format = "%" PRIx32 "-%" PRIx32 "-%" PRIx64 "-%" PRIx64 "-%" PRIx64 "-%" PRIx64;

} // namespace

std::array<uint8_t, 6> mac_of(uint32_t number) {
  return {0x02, 0x65, 0x70, 0x00, static_cast<uint8_t>(number >> 8), static_cast<uint8_t>(number)};
}

gid_bytes gid_link_local(uint32_t number) {
  // The MAC as a modified EUI-64 (RFC 4291, appendix A).
  const auto mac = mac_of(number);
  return {0xfe, 0x80, 0, 0, 0, 0, 0, 0, static_cast<uint8_t>(mac[0] ^ 2), mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]};
}

gid_bytes gid_ipv4(uint32_t number) {
  return {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 109, static_cast<uint8_t>(number >> 8), static_cast<uint8_t>(number)};
}

uint32_t number_of_gid(const gid_bytes& gid) {
  const uint32_t number = static_cast<uint32_t>(gid[14]) << 8 | gid[15];
  if (number == 0 || number > directory_ports) return 0;
  return gid == gid_link_local(number) || gid == gid_ipv4(number) ? number : 0;
}

result<directory_entry> directory_entry::take(const ep_segment_handle& port) {
  // Where the search begins is arbitrary: a number that was just given back is not at once another port's, so that late traffic to it shows.
  static std::atomic<uint32_t> next{static_cast<uint32_t>(getpid()) * 31};
  directory_entry entry;
  for (uint32_t tries = 0; tries < directory_ports; ++tries) {
    const uint32_t number = next.fetch_add(1, std::memory_order_relaxed) % directory_ports + 1;
    char name[32];
    std::snprintf(name, sizeof name, "ep-mlx5-lid-%04" PRIx32, number);
    entry.number_fd_ = bind_abstract(name);
    if (entry.number_fd_ < 0 && errno == EADDRINUSE) continue;
    if (entry.number_fd_ < 0) return failure_errno("bind", errno, std::string("abstract socket @") + name + " of a software NIC's port");
    entry.number_ = number;
    break;
  }
  if (entry.number_ == 0) return failure{EP_STATUS_SYSTEM, EADDRINUSE, "all port numbers of the software NICs of this machine are taken"};
  char handle[96];
  std::snprintf(handle, sizeof handle, handle_format, static_cast<uint32_t>(port.pid), static_cast<uint32_t>(port.fd), port.inode, port.device, port.nonce,
                port.data_bytes);
  const std::string name = prefix_of(entry.number_) + handle;
  entry.handle_fd_ = bind_abstract(name);
  if (entry.handle_fd_ < 0) return failure_errno("bind", errno, "abstract socket @" + name + " of a software NIC's port");
  return entry;
}

directory_entry::directory_entry(directory_entry&& other) noexcept { *this = std::move(other); }

directory_entry& directory_entry::operator=(directory_entry&& other) noexcept {
  std::swap(number_, other.number_);
  std::swap(number_fd_, other.number_fd_);
  std::swap(handle_fd_, other.handle_fd_);
  return *this;
}

directory_entry::~directory_entry() {
  if (handle_fd_ >= 0) close(handle_fd_);
  if (number_fd_ >= 0) close(number_fd_);
}

result<ep_segment_handle> directory_find(uint32_t number) {
  std::ifstream list("/proc/net/unix");
  if (!list) return failure_errno("open", errno, "/proc/net/unix, the directory of software NICs");
  const std::string prefix = '@' + prefix_of(number);
  for (std::string line; std::getline(list, line);) {
    const size_t at = line.find(prefix);
    if (at == std::string::npos) continue;
    ep_segment_handle handle{};
    handle.header = {EP_MAGIC_SEGMENT, EP_ABI_MAJOR, EP_ABI_MINOR, 1, sizeof(ep_segment_handle)};
    uint32_t pid = 0;
    uint32_t fd = 0;
    if (std::sscanf(line.c_str() + at + prefix.size(), "%" SCNx32 "-%" SCNx32 "-%" SCNx64 "-%" SCNx64 "-%" SCNx64 "-%" SCNx64, &pid, &fd, &handle.inode,
                    &handle.device, &handle.nonce, &handle.data_bytes) != 6) {
      continue;
    }
    handle.pid = static_cast<int32_t>(pid);
    handle.fd = static_cast<int32_t>(fd);
    return handle;
  }
  return failure{EP_STATUS_STALE_HANDLE, EHOSTUNREACH,
                 "no software NIC of this machine has port number " + std::to_string(number) +
                     " (did its process end, or does it run in another network namespace?)"};
}

} // namespace ep::nic
