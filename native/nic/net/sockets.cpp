#include "sockets.hpp"

#include <cerrno>
#include <cstring>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

namespace ep::nic::net {
namespace {

// Bytes that nobody has acknowledged for so long end a stream.
constexpr unsigned unacknowledged_ms = 20'000;

void make_plain(int fd) {
  const int on = 1;
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged_ms, sizeof unacknowledged_ms);
}

sockaddr_in address_of(const place& at, uint16_t port) {
  sockaddr_in made{};
  made.sin_family = AF_INET;
  made.sin_port = htons(port);
  std::memcpy(&made.sin_addr, at.address.data(), at.address.size());
  return made;
}

failure closed(int fd, failure why) {
  close(fd);
  return why;
}

} // namespace

result<int> listen_at(const std::string& address, place& own) {
  sockaddr_in at{};
  at.sin_family = AF_INET;
  if (inet_pton(AF_INET, address.c_str(), &at.sin_addr) != 1 || at.sin_addr.s_addr == htonl(INADDR_ANY)) {
    return failure{EP_STATUS_INVALID, 0, "a software NIC on a network needs the IPv4 address of one interface, got '" + address + "'"};
  }
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return failure_errno("socket", errno, "of a software NIC");
  socklen_t length = sizeof at;
  if (bind(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at) != 0) return closed(fd, failure_errno("bind", errno, address + " for a software NIC: is it an address of this host?"));
  if (listen(fd, 128) != 0) return closed(fd, failure_errno("listen", errno, address + " for a software NIC"));
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&at), &length) != 0) return closed(fd, failure_errno("getsockname", errno, "of a software NIC"));
  std::memcpy(own.address.data(), &at.sin_addr, own.address.size());
  own.port = ntohs(at.sin_port);
  return fd;
}

int dial(const place& own, const place& to) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const sockaddr_in from = address_of(own, 0);
  const sockaddr_in address = address_of(to, to.port);
  const bool begun = bind(fd, reinterpret_cast<const sockaddr*>(&from), sizeof from) == 0 &&
                     (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 || errno == EINPROGRESS);
  if (begun) {
    make_plain(fd);
    return fd;
  }
  const int why = errno;
  close(fd);
  errno = why;
  return -1;
}

int accept_from(int listener) {
  const int fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd >= 0) make_plain(fd);
  return fd;
}

} // namespace ep::nic::net
