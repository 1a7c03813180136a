// Two hubs on the loopback interface, of which one says goodbye with much under way both ways: its end is told behind its answers. Who is silent is dead, but for those that have
// not come yet, and but for what was not heard because nobody listened.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <memory>
#include <thread>
#include <vector>

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"
#include "nic/net/hub.hpp"
#include "until.hpp"

using namespace ep;
using ep::test::until;
using nic::net::hub;
using namespace std::chrono_literals;

namespace {

nic::net::link_keys keys(uint8_t out, uint8_t in) {
  nic::net::link_keys made;
  made.out.fill(out);
  made.in.fill(in);
  return made;
}

std::unique_ptr<hub> opened(uint32_t number, std::chrono::nanoseconds heartbeat = {}, std::chrono::nanoseconds silence = {}) {
  auto made = hub::open({"127.0.0.1", heartbeat.count(), silence.count()}, number);
  EP_CHECK(made.ok());
  EP_CHECK(made.value()->start(
                            [](uint32_t, std::span<const uint8_t> request, std::vector<uint8_t>& reply) {
                              reply.assign(request.begin(), request.end());
                              return true;
                            },
                            nullptr)
               .ok());
  return std::move(made.value());
}

// Returns whether the goodbye came.
bool says_goodbye(size_t calls) {
  const std::unique_ptr<hub> here = opened(1);
  const std::unique_ptr<hub> there = opened(2);
  std::vector<nic::net::peer_life> told;
  here->on_life([&told, &there](const nic::gid_bytes& gid, nic::net::peer_life life) {
    EP_CHECK(gid == there->gid());
    told.push_back(life);
  });
  const uint32_t number = here->know(there->gid(), keys(1, 2));
  const uint32_t back = there->know(here->gid(), keys(2, 1));
  EP_CHECK(number != 0 && back != 0);
  std::vector<std::shared_ptr<nic::net::call>> asked;
  // It asks, too: its own stream is the one on which a goodbye could overtake.
  auto first = there->ask(back, std::vector<uint8_t>(8));
  EP_CHECK(first && until([&] { return first->answered.load(std::memory_order_acquire); }) && !first->lost);
  for (size_t i = 0; i < calls; ++i) {
    if (auto one = here->ask(number, std::vector<uint8_t>(2048, static_cast<uint8_t>(i)))) asked.push_back(std::move(one));
  }
  EP_CHECK(until([&] { return there->counts().answers > calls / 8; }));
  there->stop();
  const uint64_t answers = there->counts().answers;
  (void)until([&] { return here->untold_lives() != 0 || std::ranges::all_of(asked, [](const auto& one) { return one->answered.load(std::memory_order_acquire); }); });
  const size_t lives = here->untold_lives();
  EP_CHECK(told.empty()); // not before whoever takes answers says so
  if (lives != 0) {
    const auto arrived = std::ranges::count_if(asked, [](const auto& one) { return one->answered.load(std::memory_order_acquire) && !one->lost; });
    EP_CHECK_EQ(static_cast<uint64_t>(arrived), answers);
    EP_CHECK_EQ(lives, size_t{1});
    here->tell_lives(lives);
    EP_CHECK(told == std::vector{nic::net::peer_life::closed});
    EP_CHECK_EQ(here->untold_lives(), size_t{0});
  }
  EP_CHECK(until([&] { return std::ranges::all_of(asked, [](const auto& one) { return one->answered.load(std::memory_order_acquire); }); }));
  return lives != 0;
}

// What was asked on a stream that was opened before the peer knew this one is lost with it; one that is dead is never asked again.
bool is_answered(hub& by, uint32_t number) {
  return until([&] {
    const auto asked = by.ask(number, std::vector<uint8_t>(8));
    return asked && until([&] { return asked->answered.load(std::memory_order_acquire); }) && !asked->lost;
  });
}

// A peer that opens for longer than ranks may be silent refuses the others meanwhile, and lives. Once it has been heard, its silence counts.
void comes_late() {
  const std::unique_ptr<hub> here = opened(1, 50ms, 1s);
  const std::unique_ptr<hub> there = opened(2, 50ms, 60s);
  std::vector<nic::net::peer_life> told;
  here->on_life([&told](const nic::gid_bytes&, nic::net::peer_life life) { told.push_back(life); });
  const uint32_t number = here->know(there->gid(), keys(1, 2));
  std::this_thread::sleep_for(1500ms);
  EP_CHECK_EQ(here->untold_lives(), size_t{0});
  EP_CHECK(there->know(here->gid(), keys(2, 1)) != 0);
  EP_CHECK(is_answered(*here, number));
  there->die();
  there->stop();
  EP_CHECK(until([&] { return here->untold_lives() != 0; }));
  here->tell_lives(1);
  EP_CHECK(told == std::vector{nic::net::peer_life::dead});
}

nic::gid_bytes swapped(int socket, const nic::gid_bytes& own) {
  nic::gid_bytes theirs{};
  EP_CHECK_EQ(send(socket, own.data(), own.size(), 0), static_cast<ssize_t>(own.size()));
  EP_CHECK_EQ(recv(socket, theirs.data(), theirs.size(), MSG_WAITALL), static_cast<ssize_t>(theirs.size()));
  return theirs;
}

// A process that was stopped for longer than ranks may be silent has heard nobody meanwhile, and takes nobody for dead.
// HAZARD: before this process has threads: a fork takes none of them along.
void was_stopped() {
  int sockets[2];
  EP_CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
  const pid_t child = fork();
  const int socket = sockets[child == 0 ? 1 : 0];
  close(sockets[child == 0 ? 0 : 1]);
  const std::unique_ptr<hub> own = opened(child == 0 ? 1 : 2, 50ms, child == 0 ? std::chrono::nanoseconds(1s) : 60s);
  const uint32_t number = own->know(swapped(socket, own->gid()), child == 0 ? keys(1, 2) : keys(2, 1));
  EP_CHECK(is_answered(*own, number));
  (void)swapped(socket, {});
  if (child == 0) {
    (void)swapped(socket, {}); // it has been stopped
    EP_CHECK_EQ(own->untold_lives(), size_t{0});
    EP_CHECK(is_answered(*own, number));
    own->stop();
    _exit(check::finish());
  }
  EP_CHECK_EQ(kill(child, SIGSTOP), 0);
  int status = 0;
  EP_CHECK_EQ(waitpid(child, &status, WUNTRACED), child);
  std::this_thread::sleep_for(1500ms);
  EP_CHECK_EQ(kill(child, SIGCONT), 0);
  std::this_thread::sleep_for(200ms); // its hub looks
  (void)swapped(socket, {});
  EP_CHECK_EQ(waitpid(child, &status, 0), child);
  EP_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  close(socket);
}

} // namespace

int main() {
  was_stopped();
  comes_late();
  int goodbyes = 0;
  for (size_t round = 0; round < 60; ++round) goodbyes += says_goodbye(40 + 7 * (round % 10)) ? 1 : 0;
  // A stream that is reset takes its goodbye along.
  EP_CHECK(goodbyes > 20);
  std::printf("%d of 60 goodbyes came\n", goodbyes);
  return ep::check::finish();
}
