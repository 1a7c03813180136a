#include "lifelines.hpp"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "thread.hpp"
#include "waiting.hpp"

namespace ep::fabric {
namespace {

constexpr uint32_t hello_magic = 0x314c4645; // "EFL1"
constexpr int64_t second_ns = 1'000'000'000;
constexpr int64_t stand_by_ns = 5 * second_ns;
constexpr int64_t longest_pause_ns = 60 * second_ns;
// Strangers that may be connected at a time, beside all ranks.
constexpr size_t strangers = 64;
constexpr uint8_t goodbye = 'g';

// 0: not the address of a socket.
socklen_t length_of(const sockaddr_storage& at) { return at.ss_family == AF_INET ? sizeof(sockaddr_in) : at.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : 0; }

sockaddr_storage address_of(std::span<const uint8_t> bytes) {
  sockaddr_storage at{};
  if (!bytes.empty()) std::memcpy(&at, bytes.data(), std::min(bytes.size(), sizeof at));
  return at;
}

bool is_any(const sockaddr_storage& at) {
  if (at.ss_family == AF_INET) return reinterpret_cast<const sockaddr_in&>(at).sin_addr.s_addr == htonl(INADDR_ANY);
  return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6&>(at).sin6_addr);
}

void set_port(sockaddr_storage& at, uint16_t port) {
  if (at.ss_family == AF_INET) {
    reinterpret_cast<sockaddr_in&>(at).sin_port = port;
  } else {
    reinterpret_cast<sockaddr_in6&>(at).sin6_port = port;
  }
}

template <class Number> bool fill(Number& made) { return getrandom(made.data(), made.size(), 0) == static_cast<ssize_t>(made.size()); }

} // namespace

result<std::unique_ptr<lifelines>> lifelines::listen(std::span<const uint8_t> name, int32_t rank, int32_t world_size) {
  sockaddr_storage at = address_of(name);
  const socklen_t length = name.size() < sizeof at.ss_family ? 0 : length_of(at);
  if (length == 0 || name.size() != length || is_any(at)) return std::unique_ptr<lifelines>();
  static_assert(sizeof(sockaddr_in6) <= line_place_bytes);
  const int control = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (control < 0) return failure_errno("eventfd", errno, "of the lines between hosts");
  const int fd = socket(at.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  std::unique_ptr<lifelines> made(new lifelines(fd, control, rank, world_size));
  set_port(at, 0);
  socklen_t got = length;
  if (fd < 0 || bind(fd, reinterpret_cast<const sockaddr*>(&at), length) != 0 || ::listen(fd, 1024) != 0 || getsockname(fd, reinterpret_cast<sockaddr*>(&at), &got) != 0) {
    return failure_errno("bind", errno, "at the interface of the fabric, for the lines between hosts");
  }
  std::memcpy(made->place_.data(), &at, length);
  return made;
}

lifelines::~lifelines() { close(); }

result<nothing> lifelines::start(std::span<const line_place> places, std::span<const link_keys> keys, std::span<const uint8_t> far, ep_wake_word* wake) {
  const auto world = static_cast<size_t>(world_size_);
  if (places.size() != world || keys.size() != world || far.size() != world) return failure{EP_STATUS_INVALID, 0, "lines are started with a place, keys and a distance for each rank"};
  for (size_t rank = 0; rank < world; ++rank) {
    peer_state& peer = peers_[rank];
    peer.keys = keys[rank];
    peer.place = places[rank];
    peer.far = far[rank] != 0;
    peer.dialled = peer.far && rank < static_cast<size_t>(rank_) && length_of(address_of(places[rank])) != 0;
  }
  wake_ = wake;
  auto started = thread_start("ep-lines", [this] { run(); }, "thread of the lines between hosts; raise the limit on tasks");
  if (!started.ok()) return started.why();
  thread_ = std::move(started.value());
  return nothing{};
}

// Gives everything back, since the object may stay until JS collects its owner.
void lifelines::close() {
  stopping_.store(true, std::memory_order_seq_cst);
  const uint64_t one = 1;
  if (control_ >= 0) (void)!write(control_, &one, sizeof one);
  if (thread_.joinable()) thread_.join();
  for (int* fd : {&listener_, &control_}) {
    if (*fd >= 0) ::close(std::exchange(*fd, -1));
  }
}

void lifelines::run() {
  std::vector<pollfd> of;
  while (!stopping_.load(std::memory_order_seq_cst)) {
    int64_t now = clock_now_ns();
    dial_due(now);
    const size_t known = lines_.size();
    const bool listens = lines_.size() < static_cast<size_t>(world_size_) + strangers && now >= accept_ns_;
    of.assign({{control_, POLLIN, 0}, {listens ? listener_ : -1, POLLIN, 0}});
    int64_t due = accept_ns_ > now ? accept_ns_ : INT64_MAX;
    for (const auto& one : lines_) {
      of.push_back({one->fd, static_cast<short>(one->at == stage::dialling ? POLLOUT : POLLIN), 0});
      if (one->at != stage::standing) due = std::min(due, one->until_ns);
    }
    for (int32_t peer = 0; peer < rank_; ++peer) {
      const peer_state& at = peers_[static_cast<size_t>(peer)];
      if (at.dialled && !at.held && !at.ended.load(std::memory_order_relaxed)) due = std::min(due, at.dial_ns);
    }
    const int wait_ms = due == INT64_MAX ? -1 : static_cast<int>(std::clamp<int64_t>((due - now) / 1'000'000 + 1, 1, 60'000));
    if (::poll(of.data(), of.size(), wait_ms) < 0) continue; // a signal
    now = clock_now_ns();
    if (of[1].revents != 0) accept_all(now);
    for (size_t i = 0; i < known; ++i) {
      line& one = *lines_[i];
      const bool ends = of[2 + i].revents != 0 && !serve(one, of[2 + i].revents);
      // HAZARD: only now, since this side may have been stopped while the other's words came, and to the other side the line may stand.
      if (ends || (one.at != stage::standing && now >= one.until_ns)) end(one, false);
    }
    std::erase_if(lines_, [](const auto& one) { return one->fd < 0; });
  }
  for (const auto& one : lines_) end(*one, false);
  lines_.clear();
}

void lifelines::dial_due(int64_t now) {
  const sockaddr_storage own = address_of(place_);
  for (int32_t rank = 0; rank < rank_; ++rank) {
    peer_state& peer = peers_[static_cast<size_t>(rank)];
    if (!peer.dialled || peer.held || now < peer.dial_ns || peer.ended.load(std::memory_order_relaxed)) continue;
    peer.pause_ns = std::clamp(2 * peer.pause_ns, second_ns, longest_pause_ns);
    peer.dial_ns = now + peer.pause_ns;
    const sockaddr_storage to = address_of(peer.place);
    const int fd = socket(to.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) continue; // again in a second
    sockaddr_storage from = own;
    set_port(from, 0);
    // The way back is the same network.
    if (own.ss_family == to.ss_family) (void)bind(fd, reinterpret_cast<const sockaddr*>(&from), length_of(from));
    if (connect(fd, reinterpret_cast<const sockaddr*>(&to), length_of(to)) != 0 && errno != EINPROGRESS) {
      ::close(fd);
      continue;
    }
    auto made = std::make_unique<line>();
    made->fd = fd;
    made->peer = rank;
    made->until_ns = now + stand_by_ns;
    peer.held = true;
    lines_.push_back(std::move(made));
  }
}

void lifelines::accept_all(int64_t now) {
  while (lines_.size() < static_cast<size_t>(world_size_) + strangers) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      // Without a descriptor the connection stays in the queue, and a poll for it would return at once, for ever.
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) accept_ns_ = now + second_ns;
      return;
    }
    auto made = std::make_unique<line>();
    made->fd = fd;
    made->at = stage::asked;
    made->until_ns = now + stand_by_ns;
    if (fill(made->own) && tell(*made, made->own.data(), made->own.size())) {
      lines_.push_back(std::move(made));
    } else {
      ::close(fd);
    }
  }
}

bool lifelines::serve(line& one, short events) {
  if (one.at == stage::dialling) {
    int why = 0;
    socklen_t length = sizeof why;
    if ((events & POLLOUT) == 0 || getsockopt(one.fd, SOL_SOCKET, SO_ERROR, &why, &length) != 0 || why != 0 || !fill(one.own)) return false;
    one.at = stage::greeted;
    return true;
  }
  uint8_t bytes[256];
  const ssize_t got = recv(one.fd, bytes, sizeof bytes, 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (one.at == stage::standing) {
    if (got > 0) {
      one.left = one.left || bytes[0] == goodbye;
      return true;
    }
    // A network that fails says so by other errors, if it says anything.
    if (got == 0 || errno == ECONNRESET) end(one, true);
    return false;
  }
  if (got <= 0) return false;
  one.in.insert(one.in.end(), bytes, bytes + got);
  return advance(one);
}

// Of a line that does not stand yet.
bool lifelines::advance(line& one) {
  if (one.at == stage::asked) {
    hello said;
    if (one.in.size() < sizeof said) return true;
    if (one.in.size() > sizeof said) return false;
    std::memcpy(&said, one.in.data(), sizeof said);
    one.in.clear();
    return on_hello(one, said);
  }
  // Dialled: the other's number, then its proof.
  const peer_state& peer = peers_[static_cast<size_t>(one.peer)];
  hello said{hello_magic, rank_, one.peer, 0, one.own, 0};
  if (one.in.size() < sizeof(number)) return true;
  number other;
  std::memcpy(other.data(), one.in.data(), other.size());
  if (one.in.size() == sizeof(number)) {
    said.tag = tag_of(peer.keys.out, said, other);
    return tell(one, &said, sizeof said);
  }
  uint64_t proof = 0;
  if (one.in.size() < sizeof(number) + sizeof proof) return true;
  std::memcpy(&proof, one.in.data() + sizeof(number), sizeof proof);
  if (proof != tag_of(peer.keys.in, said, other)) return false;
  one.left = one.in.size() > sizeof(number) + sizeof proof && one.in.back() == goodbye;
  one.in.clear();
  one.at = stage::standing;
  peers_[static_cast<size_t>(one.peer)].pause_ns = 0;
  standing_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

bool lifelines::on_hello(line& one, const hello& said) {
  if (said.magic != hello_magic || said.zero != 0 || said.to != rank_ || said.from <= rank_ || said.from >= world_size_) return false;
  peer_state& peer = peers_[static_cast<size_t>(said.from)];
  if (!peer.far || said.tag != tag_of(peer.keys.in, said, one.own)) return false;
  // Who dials again has given up the one before, which ended on its side alone.
  for (const auto& other : lines_) {
    if (other.get() != &one && other->peer == said.from) end(*other, false);
  }
  const uint64_t proof = tag_of(peer.keys.out, said, one.own);
  if (!tell(one, &proof, sizeof proof)) return false;
  one.peer = said.from;
  one.at = stage::standing;
  peer.held = true;
  standing_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

// `by_peer`: the other side's kernel has closed it.
void lifelines::end(line& one, bool by_peer) {
  if (one.fd < 0) return;
  // HAZARD: before it is closed, or the other side takes this for the end of the process. There it may stand since the hello, though it does not here.
  if (!by_peer && (one.at == stage::greeted || one.at == stage::standing)) {
    (void)tell(one, &goodbye, 1);
    uint8_t rest[64];
    while (recv(one.fd, rest, sizeof rest, 0) > 0) continue; // what is left unread at close() would overtake the goodbye
  }
  ::close(one.fd);
  one.fd = -1;
  if (one.peer < 0) return;
  peer_state& peer = peers_[static_cast<size_t>(one.peer)];
  peer.held = by_peer && one.left; // nobody is dialled any more who has left
  if (one.at != stage::standing) return;
  standing_.fetch_sub(1, std::memory_order_relaxed);
  if (!by_peer || one.left) return;
  peer.ended.store(true, std::memory_order_release);
  news_.store(true, std::memory_order_seq_cst); // before whoever sleeps is looked for
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wake_notify(wake_);
}

// A new connection has room for the few bytes that are ever said.
bool lifelines::tell(const line& one, const void* bytes, size_t count) const { return send(one.fd, bytes, count, MSG_NOSIGNAL) == static_cast<ssize_t>(count); }

uint64_t lifelines::tag_of(const tag_key& key, const hello& said, const number& other) const {
  uint8_t bytes[offsetof(hello, tag) + sizeof(number)];
  std::memcpy(bytes, &said, offsetof(hello, tag));
  std::memcpy(bytes + offsetof(hello, tag), other.data(), other.size());
  return tagger(key)(bytes, sizeof bytes);
}

} // namespace ep::fabric
