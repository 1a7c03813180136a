// The lines between hosts: ranks are processes, of which some are killed, stopped, or leave; strangers knock.
#include "fabric/lifelines.hpp"

#include <algorithm>
#include <csignal>
#include <cstdio>

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fabric_ranks.hpp"

namespace {

using namespace ep::test;
using ep::fabric::line_place;
using ep::fabric::lifelines;

constexpr int32_t world = 3;

std::vector<uint8_t> loopback() {
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const auto* bytes = reinterpret_cast<const uint8_t*>(&at);
  return {bytes, bytes + sizeof at};
}

struct rank_lines {
  ep_wake_word wake{};
  std::unique_ptr<lifelines> lines;
  explicit rank_lines(int32_t rank) : lines(must(lifelines::listen(loopback(), rank, world))) {}
  void start(const std::vector<line_place>& places, std::vector<ep::fabric::link_keys> keys, const std::vector<uint8_t>& far = {1, 1, 1}) { (void)must(lines->start(places, keys, far, &wake)); }
};

// A process that is a rank of its own and dials rank 0, until it is told to leave, or killed.
struct other_process {
  pid_t pid = -1;
  int ready = -1;
  int leave = -1;
  other_process(int32_t rank, const line_place& zero, bool knows_keys = true) {
    int told[2];
    int asked[2];
    EP_CHECK(pipe(told) == 0 && pipe(asked) == 0);
    pid = fork();
    if (pid == 0) {
      close(told[0]);
      close(asked[1]);
      rank_lines own(rank);
      std::vector<line_place> places(world);
      places[0] = zero;
      auto keys = keys_of(rank, world);
      if (!knows_keys) keys[0].out[3] ^= 1;
      own.start(places, keys);
      const bool stands = soon([&] { return own.lines->standing() == 1; }, knows_keys ? 20 : 1);
      const char how = stands ? 'y' : 'n';
      (void)!write(told[1], &how, 1);
      char word = 0;
      (void)!read(asked[0], &word, 1);
      own.lines->close();
      _exit(0);
    }
    close(told[1]);
    close(asked[0]);
    ready = told[0];
    leave = asked[1];
  }
  ~other_process() {
    close(ready);
    close(leave);
    if (pid > 0) {
      kill(pid, SIGKILL);
      (void)waitpid(pid, nullptr, 0);
    }
  }
  bool stands() const {
    char how = 0;
    return read(ready, &how, 1) == 1 && how == 'y';
  }
  void wait() {
    (void)waitpid(pid, nullptr, 0);
    pid = -1;
  }
};

int connected_to(const line_place& place) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at;
  std::memcpy(&at, place.data(), sizeof at);
  EP_CHECK(connect(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at) == 0);
  return fd;
}

bool ends(int fd, int seconds) {
  timeval limit{seconds, 0};
  (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  uint8_t bytes[64];
  for (;;) {
    const ssize_t got = recv(fd, bytes, sizeof bytes, 0);
    if (got == 0 || (got < 0 && errno == ECONNRESET)) return true;
    if (got < 0) return false;
  }
}

void test_killed() {
  constexpr int kills = 60;
  std::vector<double> ms;
  for (int i = 0; i < kills; ++i) {
    rank_lines own(0);
    // HAZARD: before the thread of this one begins: the other is a copy of this process.
    other_process other(1 + i % 2, own.lines->place());
    own.start({line_place{}, line_place{}, line_place{}}, keys_of(0, world));
    EP_CHECK(other.stands());
    EP_CHECK(soon([&] { return own.lines->standing() == 1; }));
    EP_CHECK(!own.lines->ended(1 + i % 2));
    const auto begin = std::chrono::steady_clock::now();
    kill(other.pid, SIGKILL);
    EP_CHECK(soon([&] { return own.lines->ended(1 + i % 2); }));
    ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
    EP_CHECK(!own.lines->ended(2 - i % 2));
    EP_CHECK_EQ(own.lines->standing(), 0u);
  }
  std::sort(ms.begin(), ms.end());
  std::printf("killed: told after %.2f ms (p50), %.2f ms (longest of %d)\n", ms[kills / 2], ms.back(), kills);
  EP_CHECK(ms.back() < 500);
}

void test_left_and_stopped() {
  rank_lines own(0);
  other_process leaves(1, own.lines->place());
  other_process stops(2, own.lines->place());
  own.start({line_place{}, line_place{}, line_place{}}, keys_of(0, world));
  EP_CHECK(leaves.stands());
  EP_CHECK(stops.stands());
  EP_CHECK(soon([&] { return own.lines->standing() == 2; }));
  (void)!write(leaves.leave, "x", 1);
  leaves.wait();
  kill(stops.pid, SIGSTOP);
  EP_CHECK(soon([&] { return own.lines->standing() == 1; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EP_CHECK(!own.lines->ended(1));
  EP_CHECK(!own.lines->ended(2));
  kill(stops.pid, SIGKILL);
  EP_CHECK(soon([&] { return own.lines->ended(2); }));
  EP_CHECK(!own.lines->ended(1));
}

// Whoever is no rank changes nothing, and is shut out; a rank that stands stays, and its end is told.
void test_strangers() {
  rank_lines own(0);
  const line_place place = own.lines->place();
  other_process rank(1, place);
  other_process forger(2, place, false);
  own.start({line_place{}, line_place{}, line_place{}}, keys_of(0, world));
  EP_CHECK(rank.stands());
  EP_CHECK(!forger.stands());
  std::vector<int> open;
  for (int i = 0; i < 100; ++i) { // more than it keeps at a time
    const int fd = connected_to(place);
    std::vector<uint8_t> bytes(static_cast<size_t>(i * 7 % 90));
    for (size_t at = 0; at < bytes.size(); ++at) bytes[at] = pattern(at, static_cast<uint64_t>(i));
    if (bytes.size() >= 16 && i % 2 == 0) { // the head of a hello of rank 1, by which it would be known
      const int32_t head[4] = {0x314c4645, 1, 0, 0};
      std::memcpy(bytes.data(), head, sizeof head);
    }
    (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (i % 3 == 0) {
      close(fd);
    } else {
      open.push_back(fd);
    }
  }
  for (const int fd : open) {
    EP_CHECK(ends(fd, 30));
    close(fd);
  }
  EP_CHECK_EQ(own.lines->standing(), 1u);
  for (int32_t peer = 0; peer < world; ++peer) EP_CHECK(!own.lines->ended(peer));
  kill(rank.pid, SIGKILL);
  EP_CHECK(soon([&] { return own.lines->ended(1); }));
}

// Who gives a line up that may stand on the other side, since it has said hello there, says goodbye: it lives.
void test_given_up() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const std::vector<uint8_t> at = loopback();
  line_place place{};
  socklen_t length = sizeof(sockaddr_in);
  EP_CHECK(bind(listener, reinterpret_cast<const sockaddr*>(at.data()), length) == 0 && listen(listener, 1) == 0);
  EP_CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(place.data()), &length) == 0);
  rank_lines own(1);
  own.start({place, line_place{}, line_place{}}, keys_of(1, world));
  const int fd = accept(listener, nullptr, nullptr);
  EP_CHECK(fd >= 0);
  timeval limit{20, 0};
  (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  const uint8_t number[16] = {7};
  EP_CHECK_EQ(send(fd, number, sizeof number, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof number));
  uint8_t hello[40];
  EP_CHECK_EQ(recv(fd, hello, sizeof hello, MSG_WAITALL), static_cast<ssize_t>(sizeof hello));
  uint8_t last[8] = {};
  EP_CHECK_EQ(recv(fd, last, sizeof last, MSG_WAITALL), 1);
  EP_CHECK_EQ(last[0], static_cast<uint8_t>('g'));
  EP_CHECK(!own.lines->ended(0));
  close(fd);
  close(listener);
}

// No line is made to who is near, and none where a network has no sockets' addresses.
void test_none() {
  rank_lines own(0);
  const line_place place = own.lines->place();
  other_process near(1, place);
  own.start({line_place{}, line_place{}, line_place{}}, keys_of(0, world), {0, 0, 1});
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EP_CHECK_EQ(own.lines->standing(), 0u);
  kill(near.pid, SIGKILL);
  near.wait();
  EP_CHECK(!own.lines->ended(1));
  const std::vector<uint8_t> efa(32, 0xfe);
  EP_CHECK(must(lifelines::listen(efa, 0, world)) == nullptr);
  EP_CHECK(must(lifelines::listen({}, 0, world)) == nullptr);
}

} // namespace

int main() {
  test_killed();
  test_left_and_stopped();
  test_strangers();
  test_given_up();
  test_none();
  return ep::check::finish();
}
