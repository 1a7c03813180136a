// Ranks that take the places of dead ones: at the same addresses, while others look.
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "check.hpp"
#include "memory.hpp"
#include "rank.hpp"
#include "segment.hpp"

using namespace ep;

namespace {

constexpr uint64_t bytes = 1u << 16;

std::shared_ptr<segment> made(uint64_t word, uint64_t size = bytes) {
  auto one = segment::create(size);
  EP_CHECK(one.ok());
  std::memcpy(one.value()->data(), &word, sizeof word);
  return one.value();
}

std::atomic_ref<uint64_t> word_of(const segment& of) { return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(of.data())); }

void shows_another() {
  const uint64_t before = segment_count();
  {
    auto stand_in = segment::stand_in(bytes);
    EP_CHECK(stand_in.ok());
    segment& place = *stand_in.value();
    const uint8_t* const address = place.data();
    EP_CHECK_EQ(word_of(place).load(), 0u);
    const auto first = made(7);
    EP_CHECK(place.replace(first->handle()).ok());
    EP_CHECK(place.shows(first->handle()));
    EP_CHECK(place.data() == address);
    EP_CHECK_EQ(word_of(place).load(), 7u);
    word_of(place).store(8);
    EP_CHECK_EQ(word_of(*first).load(), 8u);
    // Again: another rank of the process had done it.
    EP_CHECK(place.replace(first->handle()).ok());
    const auto longer = made(9, 2 * bytes);
    EP_CHECK_EQ(place.replace(longer->handle()).why().status, static_cast<uint32_t>(EP_STATUS_MISMATCH));
    ep_segment_handle gone = made(9)->handle();
    EP_CHECK_EQ(place.replace(gone).why().status, static_cast<uint32_t>(EP_STATUS_STALE_HANDLE));
    EP_CHECK_EQ(place.replace({}).why().status, static_cast<uint32_t>(EP_STATUS_INVALID));
    EP_CHECK_EQ(word_of(place).load(), 8u);
    // One's own, while its maker is there and after.
    const auto second = made(10);
    EP_CHECK_EQ(first->replace(second->handle()).why().status, static_cast<uint32_t>(EP_STATUS_BUSY));
    first->abandon();
    EP_CHECK(first->replace(second->handle()).ok());
    EP_CHECK_EQ(word_of(*first).load(), 10u);
    EP_CHECK_EQ(word_of(place).load(), 8u); // it keeps what it shows
  }
  EP_CHECK_EQ(segment_count(), before);
}

// Nobody is there again: at the same addresses, and its maker keeps its own.
void shows_nobody() {
  const uint64_t before = segment_count();
  {
    auto place = segment::stand_in(bytes).value();
    const auto first = made(7);
    EP_CHECK(place->replace(first->handle()).ok());
    const uint8_t* const address = place->data();
    auto empty = segment::stand_in(bytes).value();
    word_of(*empty).store(3);
    EP_CHECK(place->vacate(*empty).ok());
    EP_CHECK(place->data() == address);
    EP_CHECK_EQ(word_of(*place).load(), 3u);
    EP_CHECK(!place->shows(first->handle()));
    EP_CHECK(!place->vacate(*empty).ok()); // used up
    EP_CHECK(!place->vacate(*segment::stand_in(2 * bytes).value()).ok());
    EP_CHECK(!place->vacate(*made(1)).ok());
    EP_CHECK_EQ(word_of(*first).load(), 7u);
    EP_CHECK(segment::open(first->handle()).value() == first);
    EP_CHECK_EQ(first->vacate(*segment::stand_in(bytes).value()).why().status, static_cast<uint32_t>(EP_STATUS_BUSY));
    const auto second = made(10);
    EP_CHECK(place->replace(second->handle()).ok());
    EP_CHECK_EQ(word_of(*place).load(), 10u);
  }
  EP_CHECK_EQ(segment_count(), before);
}

// Whoever looks meanwhile sees the one or the other, and never nothing.
void looks_meanwhile() {
  auto stand_in = segment::stand_in(bytes);
  EP_CHECK(stand_in.ok());
  segment& place = *stand_in.value();
  std::atomic<bool> over{false};
  std::atomic<uint32_t> wrong{0};
  std::thread looker([&] {
    uint64_t last = 0;
    while (!over.load()) {
      const uint64_t found = word_of(place).load();
      if (found < last) wrong.fetch_add(1);
      last = found;
    }
  });
  for (uint64_t i = 1; i <= 200; ++i) EP_CHECK(place.replace(made(i)->handle()).ok());
  over.store(true);
  looker.join();
  EP_CHECK_EQ(wrong.load(), 0u);
  EP_CHECK_EQ(word_of(place).load(), 200u);
}

std::shared_ptr<rank_context> rank_of(int32_t rank) {
  auto context = rank_context::create(rank, 3, 3);
  EP_CHECK(context.ok());
  return context.value();
}

// Rank 2 is not there at first, then comes, dies, and is replaced; memory of before has its part then.
void comes_later() {
  auto zero = rank_of(0);
  auto one = rank_of(1);
  EP_CHECK(zero->connect({zero->handle(), one->handle(), {}}).ok());
  EP_CHECK(one->connect({zero->handle(), one->handle(), {}}).ok());
  EP_CHECK_EQ(zero->life(2), EP_LIFE_ABSENT);
  EP_CHECK(zero->gone(2));
  auto memory = symmetric_memory::create(zero, 4096, 8).value();
  auto other = symmetric_memory::create(one, 4096, 8).value();
  EP_CHECK(memory->connect({memory->handle(), other->handle(), {}}).ok());
  memory->signal_update(2, 3, signal_op::add, 5); // lost
  const uint64_t* const word = memory->signal(2, 3);
  EP_CHECK_EQ(zero->replace(1, one->handle()).ok(), true); // it is there already
  for (uint64_t round = 0; round < 4; ++round) {
    auto two = rank_of(2);
    EP_CHECK_EQ(rank_context::life_behind(two->handle()), EP_LIFE_ALIVE);
    EP_CHECK_EQ(zero->replace(2, one->handle()).why().status, static_cast<uint32_t>(EP_STATUS_MISMATCH));
    EP_CHECK(zero->replace(2, two->handle()).ok());
    EP_CHECK(one->replace(2, two->handle()).ok());
    EP_CHECK_EQ(zero->life(2), EP_LIFE_ALIVE);
    EP_CHECK(two->connect({zero->handle(), one->handle(), two->handle()}).ok());
    auto third = rank_of(2);
    EP_CHECK_EQ(zero->replace(2, third->handle()).why().status, static_cast<uint32_t>(EP_STATUS_BUSY));
    third.reset();
    auto part = symmetric_memory::create(two, 4096, 8).value();
    EP_CHECK(part->connect({memory->handle(), other->handle(), part->handle()}).ok());
    EP_CHECK(memory->replace(2, part->handle()).ok());
    EP_CHECK(memory->signal(2, 3) == word);
    EP_CHECK_EQ(*word, 0u);
    memory->signal_update(2, 3, signal_op::add, round + 1);
    EP_CHECK_EQ(*part->own_signals(), 0u);
    EP_CHECK_EQ(part->own_signals()[3], round + 1);
    EP_CHECK(!memory->replace(0, part->handle()).ok());
    part.reset();
    two.reset();
    EP_CHECK(zero->life(2) != EP_LIFE_ALIVE);
    EP_CHECK(zero->gone(2) && one->gone(2));
    if (round % 2 == 1) continue;
    EP_CHECK(zero->vacate(2).ok() && one->vacate(2).ok());
    EP_CHECK(zero->vacate(2).ok());
    EP_CHECK_EQ(zero->life(2), EP_LIFE_ABSENT);
    EP_CHECK(zero->gone(2));
    EP_CHECK(!zero->vacate(0).ok() && !zero->vacate(3).ok());
  }
}

// Ranks 0 and 1 share a host; of rank 2, on another, a second context of rank 0 knows, which nothing but a network joins to the others.
void hears_of_other_hosts() {
  auto zero = rank_of(0);
  auto one = rank_of(1);
  EP_CHECK_EQ(zero->connect({zero->handle(), one->handle(), {}}, {0}).why().status, static_cast<uint32_t>(EP_STATUS_INVALID));
  EP_CHECK(zero->connect({zero->handle(), one->handle(), {}}, {2}).ok());
  EP_CHECK(one->connect({zero->handle(), one->handle(), {}}, {2}).ok());
  EP_CHECK(zero->elsewhere(2) && !zero->elsewhere(1) && !zero->elsewhere(0));
  EP_CHECK_EQ(zero->life(2), EP_LIFE_ABSENT);
  EP_CHECK(!zero->gone(2));
  EP_CHECK_EQ(zero->replace(2, one->handle()).why().status, static_cast<uint32_t>(EP_STATUS_INVALID));
  EP_CHECK_EQ(zero->vacate(2).why().status, static_cast<uint32_t>(EP_STATUS_INVALID));

  auto memory = symmetric_memory::create(zero, 4096, 8).value();
  auto other = symmetric_memory::create(one, 4096, 8).value();
  EP_CHECK(memory->connect({memory->handle(), other->handle(), {}}).ok());
  EP_CHECK(memory->mapped(0) && memory->mapped(1) && !memory->mapped(2));
  EP_CHECK(symmetric_memory::over(memory, {1}).ok());
  EP_CHECK_EQ(symmetric_memory::over(memory, {2}).why().status, static_cast<uint32_t>(EP_STATUS_INVALID));
  EP_CHECK_EQ(memory->replace(2, other->handle()).why().status, static_cast<uint32_t>(EP_STATUS_INVALID));

  auto apart = rank_of(0);
  EP_CHECK_EQ(apart->inform(zero).why().status, static_cast<uint32_t>(EP_STATUS_INVALID)); // it knows of nobody yet
  apart->connect_apart();
  EP_CHECK_EQ(apart->inform(one).why().status, static_cast<uint32_t>(EP_STATUS_INVALID)); // another rank
  EP_CHECK_EQ(one->inform(zero).why().status, static_cast<uint32_t>(EP_STATUS_INVALID));
  EP_CHECK(apart->inform(apart).ok()); // of nothing
  EP_CHECK(apart->inform(zero).ok());
  EP_CHECK(apart->inform(zero).ok());
  EP_CHECK_EQ(zero->life(2), EP_LIFE_ALIVE);
  apart->set_life(1, EP_LIFE_DEAD); // its own words say more
  EP_CHECK_EQ(zero->life(1), EP_LIFE_ALIVE);

  // A sleeper that has no deadline, woken by what the other context hears.
  std::thread hearer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    apart->set_life(2, EP_LIFE_DEAD);
  });
  wait_scope scope = zero->waits(nullptr, no_deadline);
  scope.policy = {0, 0, 60'000'000'000};
  const int64_t begin = clock_now_ns();
  const wait_result ended = wait_word(scope, memory->signal(0, 0), comparison::ge, 1, 2);
  EP_CHECK_EQ(ended.status, static_cast<uint32_t>(EP_STATUS_PEER_LOST));
  EP_CHECK_EQ(ended.rank, 2);
  EP_CHECK(clock_now_ns() - begin < 10'000'000'000);
  hearer.join();

  // Who knows later hears what has been; and who was lost stays so, whatever a second network says.
  auto second = rank_of(0);
  second->connect_apart();
  EP_CHECK(second->inform(zero).ok());
  EP_CHECK_EQ(zero->life(2), EP_LIFE_DEAD);
  auto late = rank_of(0);
  EP_CHECK(late->connect({late->handle(), one->handle(), {}}, {2}).ok());
  EP_CHECK(apart->inform(late).ok());
  EP_CHECK_EQ(late->life(2), EP_LIFE_DEAD);
  late.reset();
  apart->set_life(2, EP_LIFE_CLOSED); // nobody there any more
}

} // namespace

int main() {
  shows_another();
  shows_nobody();
  looks_meanwhile();
  comes_later();
  hears_of_other_hosts();
  return ep::check::finish();
}
