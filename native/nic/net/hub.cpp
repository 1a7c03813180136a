#include "hub.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "sockets.hpp"
#include "thread.hpp"
#include "waiting.hpp"

namespace ep::nic::net {
namespace {

// Until both ends of a stream are known.
constexpr int64_t handshake_ns = 3'000'000'000;
// After an attempt that failed at once: whoever asks again sooner does not make another one.
constexpr int64_t attempt_ns = 10'000'000;
// Streams of strangers at a time.
constexpr size_t most_strangers = 64;
// Asked of one peer and not on its way yet.
constexpr size_t most_queued_bytes = 16u << 20;
constexpr size_t receive_bytes = 256u << 10;
// How long a goodbye may take on its way.
constexpr int64_t farewell_ns = 100'000'000;
// Before a peer has been heard at all: it may be busy opening, and refuses whom it does not know yet.
constexpr int64_t patience_ns = 30'000'000'000;
constexpr uint32_t first_number = directory_ports + 1;
constexpr uint32_t most_peers = 0xffff - directory_ports;

talk::nonce draw() {
  talk::nonce drawn{};
  // HAZARD: a nonce that comes twice lets a recorded stream be said again. Without randomness there is no stream.
  if (getrandom(drawn.data(), drawn.size(), 0) != static_cast<ssize_t>(drawn.size())) std::abort();
  return drawn;
}

} // namespace

struct hub::peer {
  gid_bytes gid{};
  uint32_t number = 0;
  link_keys keys;
  std::deque<asked> queue;
  size_t queued_bytes = 0;
  std::map<uint64_t, std::shared_ptr<call>> sent;
  uint64_t next_id = 1;
  bool cut = false; // by give_up
  peer_life life = peer_life::alive;
  bool leaving = false; // said goodbye where it asks, not yet where it answers
  std::atomic<int64_t> moved_ns{0};
  // The thread's own.
  stream* out = nullptr;
  int64_t attempt_again_ns = 0;
  int64_t heard_ns = 0;
  int64_t ping_ns = 0;
};

struct hub::stream {
  stream(int fd, talk with) : fd(fd), with(std::move(with)) {}
  ~stream() { close(fd); }
  stream(const stream&) = delete;
  int fd;
  talk with;
  peer* to = nullptr;   // of a stream that was opened here
  peer* from = nullptr; // of one that came, once it is ready
  bool connecting = false;
  bool counted = false; // as ready
  bool left = false;    // its peer said goodbye
  bool over = false;
  int64_t deadline_ns = 0;
};

result<std::unique_ptr<hub>> hub::open(const hub_options& options, uint32_t number) {
  place own;
  auto listener = listen_at(options.address, own);
  if (!listener.ok()) return listener.why();
  std::unique_ptr<hub> made(new hub);
  made->options_ = options;
  made->listener_ = listener.value();
  made->event_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (made->event_ < 0) return failure_errno("eventfd", errno, "of a software NIC");
  own.number = static_cast<uint16_t>(number);
  made->gid_ = gid_of(own);
  return made;
}

result<nothing> hub::start(answerer answer, ep_wake_word* wake) {
  answer_ = std::move(answer);
  wake_ = wake;
  auto thread = thread_start("ep-nic-net", [this] { run(); }, "network thread of a software NIC; raise the limit on tasks");
  if (!thread.ok()) return thread.why();
  thread_ = std::move(thread.value());
  return nothing{};
}

void hub::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_release);
  poke();
  thread_.join();
}

hub::~hub() {
  stop();
  streams_.clear();
  if (listener_ >= 0) close(listener_);
  if (event_ >= 0) close(event_);
}

void hub::poke() {
  if (poked_.exchange(true, std::memory_order_acq_rel)) return;
  const uint64_t one = 1;
  (void)!write(event_, &one, sizeof one);
}

hub::peer* hub::find(uint32_t number) const {
  const uint32_t index = number - first_number;
  return index < peers_.size() ? peers_[index].get() : nullptr;
}

hub::peer* hub::find(const gid_bytes& gid) const {
  const auto at = std::find_if(peers_.begin(), peers_.end(), [&](const auto& one) { return one->gid == gid; });
  return at == peers_.end() ? nullptr : at->get();
}

uint32_t hub::know(const gid_bytes& gid, const link_keys& keys) {
  place at;
  if (!place_of(gid, at)) return 0;
  const std::lock_guard lock(mutex_);
  if (peer* known = find(gid)) return known->number;
  if (peers_.size() >= most_peers) return 0;
  auto made = std::make_unique<peer>();
  made->gid = gid;
  made->number = first_number + static_cast<uint32_t>(peers_.size());
  made->keys = keys;
  made->heard_ns = clock_now_ns() + std::max<int64_t>(0, patience_ns - options_.silence_ns);
  peers_.push_back(std::move(made));
  poke();
  return peers_.back()->number;
}

uint32_t hub::number_of(const gid_bytes& gid) const {
  const std::lock_guard lock(mutex_);
  const peer* known = find(gid);
  return known == nullptr ? 0 : known->number;
}

void hub::on_life(std::function<void(const gid_bytes&, peer_life)> tell) {
  const std::lock_guard lock(mutex_);
  tell_ = std::move(tell);
}

std::shared_ptr<call> hub::ask(uint32_t number, std::vector<uint8_t> request) {
  auto made = std::make_shared<call>();
  {
    const std::lock_guard lock(mutex_);
    peer* to = find(number);
    if (to == nullptr || to->life != peer_life::alive || stopping_.load(std::memory_order_relaxed)) {
      made->lost = true;
      made->answered.store(true, std::memory_order_release);
      return made;
    }
    if (to->queued_bytes > most_queued_bytes) return nullptr;
    ++counts_.requests;
    to->queued_bytes += request.size();
    to->queue.push_back({to->next_id++, made, std::move(request)});
  }
  poke();
  return made;
}

void hub::give_up(uint32_t number) {
  {
    const std::lock_guard lock(mutex_);
    peer* of = find(number);
    if (of == nullptr || (of->queue.empty() && of->sent.empty())) return;
    of->cut = true;
  }
  poke();
}

int64_t hub::moved_ns(uint32_t number) const {
  const std::lock_guard lock(mutex_);
  const peer* of = find(number);
  return of == nullptr ? 0 : of->moved_ns.load(std::memory_order_relaxed);
}

hub_counts hub::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

// All that is unanswered ends. Under the lock.
void hub::lose(peer& of) {
  const auto end = [this](call& one) {
    one.lost = true;
    one.answered.store(true, std::memory_order_release);
    answers_came_ = true;
  };
  for (asked& one : of.queue) end(*one.of);
  for (auto& [id, one] : of.sent) end(*one);
  of.queue.clear();
  of.sent.clear();
  of.queued_bytes = 0;
}

// Under the lock.
void hub::tell(peer& of, peer_life life) {
  if (of.life != peer_life::alive) return;
  of.life = life;
  lose(of);
  lives_.emplace_back(of.gid, life);
  untold_.store(lives_.size(), std::memory_order_release);
  answers_came_ = true;
}

void hub::tell_lives(size_t count) {
  std::vector<std::pair<gid_bytes, peer_life>> told;
  std::function<void(const gid_bytes&, peer_life)> tell;
  {
    const std::lock_guard lock(mutex_);
    const auto end = lives_.begin() + static_cast<std::ptrdiff_t>(std::min(count, lives_.size()));
    told.assign(lives_.begin(), end);
    lives_.erase(lives_.begin(), end);
    untold_.store(lives_.size(), std::memory_order_release);
    tell = tell_;
  }
  if (!tell) return;
  for (const auto& [gid, life] : told) tell(gid, life);
}

void hub::ended(stream& gone, bool refused) {
  if (gone.over) return;
  gone.over = true;
  const std::lock_guard lock(mutex_);
  if (refused) ++counts_.refused;
  if (gone.to == nullptr) return;
  gone.to->out = nullptr;
  lose(*gone.to);
  if (gone.to->leaving) tell(*gone.to, peer_life::closed);
}

void hub::open_stream(peer& to, int64_t now_ns) {
  if (now_ns < to.attempt_again_ns) return;
  to.attempt_again_ns = now_ns + attempt_ns;
  place own;
  place at;
  (void)place_of(gid_, own);
  (void)place_of(to.gid, at);
  const int fd = dial(own, at);
  if (fd < 0) {
    const bool refused = errno == ECONNREFUSED;
    const std::lock_guard lock(mutex_);
    lose(to);
    if (refused && options_.heartbeat_ns != 0) tell(to, to.leaving ? peer_life::closed : peer_life::dead);
    return;
  }
  auto made = std::make_unique<stream>(fd, talk(gid_, to.gid, to.keys, draw()));
  made->to = &to;
  made->connecting = true;
  made->deadline_ns = now_ns + handshake_ns;
  to.out = made.get();
  streams_.push_back(std::move(made));
}

void hub::accept_all(int64_t now_ns) {
  for (;;) {
    const int fd = accept_from(listener_);
    if (fd < 0) {
      // HAZARD: out of descriptors, the listener stays readable: looking at once again would burn a core.
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) accept_again_ns_ = now_ns + 100'000'000;
      return;
    }
    const auto strangers = std::count_if(streams_.begin(), streams_.end(), [](const auto& one) { return one->to == nullptr && one->from == nullptr && !one->over; });
    if (static_cast<size_t>(strangers) >= most_strangers) {
      close(fd);
      continue;
    }
    auto find_keys = [this](const gid_bytes& gid) -> std::optional<link_keys> {
      const std::lock_guard lock(mutex_);
      const peer* known = find(gid);
      if (known == nullptr || known->life != peer_life::alive) return std::nullopt;
      return known->keys;
    };
    auto made = std::make_unique<stream>(fd, talk(gid_, std::move(find_keys), draw()));
    made->deadline_ns = now_ns + handshake_ns;
    streams_.push_back(std::move(made));
  }
}

bool hub::heard(stream& from, const frame& what) {
  if (from.to != nullptr) {
    peer& to = *from.to;
    if (what.kind == frame_kind::pong) return true;
    const std::lock_guard lock(mutex_);
    if (what.kind == frame_kind::goodbye) {
      from.left = true;
      tell(to, peer_life::closed);
      return true;
    }
    const auto at = to.sent.find(what.id);
    if (what.kind != frame_kind::reply || at == to.sent.end()) return false;
    at->second->reply.assign(what.payload.begin(), what.payload.end());
    at->second->answered.store(true, std::memory_order_release);
    to.sent.erase(at);
    answers_came_ = true;
    return true;
  }
  switch (what.kind) {
    case frame_kind::ping: from.with.say(frame_kind::pong, what.id, {}); return true;
    case frame_kind::goodbye: {
      from.left = true;
      const std::lock_guard lock(mutex_);
      // HAZARD: its last answers come on the other stream, and so does another goodbye, behind them.
      if (from.from->out != nullptr) from.from->leaving = true;
      else tell(*from.from, peer_life::closed);
      return true;
    }
    case frame_kind::request: {
      std::vector<uint8_t> reply;
      if (!answer_(from.from->number, what.payload, reply)) return false;
      from.with.say(frame_kind::reply, what.id, reply);
      const std::lock_guard lock(mutex_);
      ++counts_.answers;
      return true;
    }
    default: return false;
  }
}

// False: the stream has ended.
bool hub::receive(stream& from, int64_t now_ns) {
  scratch_.resize(receive_bytes);
  // Once, so that nobody who sends for ever keeps the others out: poll() comes back here.
  const ssize_t got = recv(from.fd, scratch_.data(), scratch_.size(), 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (got <= 0) {
    ended(from, false);
    return false;
  }
  if (from.to != nullptr) {
    from.to->moved_ns.store(now_ns, std::memory_order_relaxed);
    from.to->heard_ns = std::max(from.to->heard_ns, now_ns);
  }
  {
    const std::lock_guard lock(mutex_);
    counts_.bytes_in += static_cast<uint64_t>(got);
  }
  return digest(from, {scratch_.data(), static_cast<size_t>(got)});
}

bool hub::digest(stream& from, std::span<const uint8_t> bytes) {
  const bool sound = from.with.take(bytes, [&](const frame& what) {
    begun(from);
    return heard(from, what);
  });
  if (!sound || from.left) {
    ended(from, !sound);
    return false;
  }
  if (from.with.ready()) begun(from);
  return true;
}

// Both ends of it are known now.
void hub::begun(stream& of) {
  if (of.counted) return;
  of.counted = true;
  if (of.to == nullptr) {
    // HAZARD: a NIC that comes again has given up what it said on its last stream, and asks again here. What of that is still to be read must not be carried out behind it.
    for (auto& one : streams_) {
      if (one.get() != &of && one->to == nullptr && one->counted && one->with.peer() == of.with.peer()) ended(*one, false);
    }
  }
  const std::lock_guard lock(mutex_);
  if (of.to == nullptr) of.from = find(of.with.peer());
  else of.to->heard_ns = clock_now_ns(); // from now on it has to speak
  ++counts_.streams;
}

bool hub::send(stream& to, int64_t now_ns) {
  if (to.connecting) {
    int error = 0;
    socklen_t length = sizeof error;
    (void)getsockopt(to.fd, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) {
      const bool nobody = error == ECONNREFUSED && options_.heartbeat_ns != 0;
      peer& of = *to.to;
      ended(to, false);
      if (nobody) {
        const std::lock_guard lock(mutex_);
        tell(of, peer_life::dead);
      }
      return false;
    }
    to.connecting = false;
  }
  while (!to.with.output().empty()) {
    const auto output = to.with.output();
    const ssize_t went = ::send(to.fd, output.data(), output.size(), MSG_NOSIGNAL);
    if (went < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (went < 0) {
      ended(to, false);
      return false;
    }
    to.with.sent(static_cast<size_t>(went));
    if (to.to != nullptr) to.to->moved_ns.store(now_ns, std::memory_order_relaxed);
    const std::lock_guard lock(mutex_);
    counts_.bytes_out += static_cast<uint64_t>(went);
  }
  return true;
}

// Opens, cuts and fills streams. Returns when to look again without being woken.
int64_t hub::plan(int64_t now_ns) {
  int64_t due = INT64_MAX;
  // HAZARD: a process that was stopped, or got no core for that long, has heard nobody and blames nobody. Between two looks without that there is one heartbeat at most.
  const bool away = now_ns - planned_ns_ > options_.silence_ns / 2;
  planned_ns_ = now_ns;
  if (options_.heartbeat_ns != 0) due = now_ns + options_.heartbeat_ns;
  for (size_t index = 0;; ++index) {
    bool wanted = false;
    peer* of = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (index >= peers_.size()) break;
      of = peers_[index].get();
      if (of->cut) {
        of->cut = false;
        if (of->out != nullptr) {
          // What the kernel still has of it is thrown away, too.
          const linger now{1, 0};
          (void)setsockopt(of->out->fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
          of->out->over = true;
          of->out = nullptr;
        }
        lose(*of);
      }
      const bool beats = options_.heartbeat_ns != 0 && of->life == peer_life::alive;
      if (away) of->heard_ns = std::max(of->heard_ns, now_ns);
      if (beats && now_ns - of->heard_ns > options_.silence_ns) tell(*of, peer_life::dead);
      wanted = of->out == nullptr && of->life == peer_life::alive && (!of->queue.empty() || beats);
      if (beats) due = std::min(due, of->heard_ns + options_.silence_ns + 1);
    }
    if (wanted) {
      open_stream(*of, now_ns);
      if (of->out == nullptr) due = std::min(due, of->attempt_again_ns);
    }
    stream* out = of->out;
    if (out == nullptr || !out->with.ready()) continue;
    if (options_.heartbeat_ns != 0) {
      if (now_ns >= of->ping_ns + options_.heartbeat_ns) {
        of->ping_ns = now_ns;
        out->with.say(frame_kind::ping, 0, {});
      }
      due = std::min(due, of->ping_ns + options_.heartbeat_ns);
    }
    while (out->with.output().size() < most_output_bytes) {
      asked next;
      {
        const std::lock_guard lock(mutex_);
        if (of->queue.empty()) break;
        next = std::move(of->queue.front());
        of->queue.pop_front();
        of->queued_bytes -= next.request.size();
        of->sent.emplace(next.id, next.of);
      }
      out->with.say(frame_kind::request, next.id, next.request);
    }
  }
  for (auto& one : streams_) {
    if (one->over || one->with.ready()) continue;
    if (now_ns >= one->deadline_ns) {
      ended(*one, true);
    } else {
      due = std::min(due, one->deadline_ns);
    }
  }
  std::erase_if(streams_, [](const auto& one) { return one->over; });
  return due;
}

void hub::run() {
  std::vector<pollfd> watched;
  while (!stopping_.load(std::memory_order_acquire)) {
    const int64_t now_ns = clock_now_ns();
    int64_t due = plan(now_ns);
    // Frames that plan() made go out at once; most streams need no poll() for that.
    for (auto& one : streams_) {
      if (!one->connecting && !one->over && !one->with.output().empty()) (void)send(*one, now_ns);
    }
    std::erase_if(streams_, [](const auto& one) { return one->over; });
    watched.clear();
    watched.push_back({event_, POLLIN, 0});
    const bool accepting = now_ns >= accept_again_ns_;
    watched.push_back({accepting ? listener_ : -1, POLLIN, 0});
    if (!accepting) due = std::min(due, accept_again_ns_);
    for (const auto& one : streams_) {
      short events = one->with.output().size() < most_output_bytes ? POLLIN : 0;
      if (one->connecting || !one->with.output().empty()) events |= POLLOUT;
      watched.push_back({one->fd, events, 0});
    }
    if (answers_came_) {
      answers_came_ = false;
      std::atomic_thread_fence(std::memory_order_seq_cst);
      if (wake_ != nullptr) wake_notify(wake_);
    }
    const int64_t wait_ns = due == INT64_MAX ? -1 : std::max<int64_t>(0, due - clock_now_ns());
    const timespec wait{wait_ns / 1'000'000'000, wait_ns % 1'000'000'000};
    if (ppoll(watched.data(), watched.size(), wait_ns < 0 ? nullptr : &wait, nullptr) < 0) continue;
    {
      const std::lock_guard lock(mutex_);
      ++counts_.wakes;
    }
    const int64_t then_ns = clock_now_ns();
    if ((watched[0].revents & POLLIN) != 0) {
      uint64_t many = 0;
      (void)!read(event_, &many, sizeof many);
      // HAZARD: cleared before plan() looks: what is asked behind that look pokes again.
      poked_.store(false, std::memory_order_seq_cst);
    }
    const size_t streams = watched.size() - 2;
    for (size_t i = 0; i < streams; ++i) {
      stream& one = *streams_[i];
      const short events = watched[i + 2].revents;
      if (one.over || events == 0) continue;
      if ((events & (POLLOUT | POLLERR | POLLHUP)) != 0 && (one.connecting || !one.with.output().empty())) {
        // Requests that had to wait for room go on where there is some again.
        if (!send(one, then_ns) || (one.with.ready() && !digest(one, {}))) continue;
      }
      if (!one.connecting && (events & (POLLIN | POLLERR | POLLHUP)) != 0) (void)receive(one, then_ns);
    }
    if ((watched[1].revents & POLLIN) != 0) accept_all(then_ns);
  }
  farewell();
}

// What can be said at once is said, and whoever hears it closes its end. HAZARD: a socket that is closed with bytes unread resets its stream, and the goodbye may be lost with it.
void hub::farewell() {
  const int64_t deadline_ns = clock_now_ns() + farewell_ns;
  for (auto& one : streams_) {
    if (one->over || one->connecting || !one->with.ready() || silent_.load(std::memory_order_relaxed)) {
      one->over = true;
      continue;
    }
    one->with.say(frame_kind::goodbye, 0, {});
    if (send(*one, clock_now_ns())) (void)shutdown(one->fd, SHUT_WR);
  }
  scratch_.resize(receive_bytes);
  for (auto& one : streams_) {
    while (!one->over) {
      pollfd watched{one->fd, POLLIN, 0};
      const int64_t left_ns = std::max<int64_t>(0, deadline_ns - clock_now_ns());
      const timespec wait{0, left_ns};
      if (left_ns == 0 || ppoll(&watched, 1, &wait, nullptr) <= 0 || recv(one->fd, scratch_.data(), scratch_.size(), 0) <= 0) one->over = true;
    }
  }
  {
    const std::lock_guard lock(mutex_);
    for (auto& of : peers_) {
      of->out = nullptr;
      lose(*of);
    }
  }
  streams_.clear();
  if (wake_ != nullptr) wake_notify(wake_);
}

} // namespace ep::nic::net
