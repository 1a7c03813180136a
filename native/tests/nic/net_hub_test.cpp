// Two hubs on the loopback interface, of which one says goodbye with much under way both ways: its end is told behind its answers.
#include <algorithm>
#include <memory>
#include <vector>

#include "check.hpp"
#include "nic/net/hub.hpp"
#include "until.hpp"

using namespace ep;
using ep::test::until;
using nic::net::hub;

namespace {

nic::net::link_keys keys(uint8_t out, uint8_t in) {
  nic::net::link_keys made;
  made.out.fill(out);
  made.in.fill(in);
  return made;
}

std::unique_ptr<hub> opened(uint32_t number) {
  auto made = hub::open({"127.0.0.1", 0, 0}, number);
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

} // namespace

int main() {
  int goodbyes = 0;
  for (size_t round = 0; round < 60; ++round) goodbyes += says_goodbye(40 + 7 * (round % 10)) ? 1 : 0;
  // A stream that is reset takes its goodbye along.
  EP_CHECK(goodbyes > 20);
  std::printf("%d of 60 goodbyes came\n", goodbyes);
  return ep::check::finish();
}
