// Which way a copy goes into memory that other cores read, by costs that a test makes up.
#include "hand_over.hpp"

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"

namespace {

using namespace ep;

constexpr uint64_t bytes = 4096;

struct costs {
  uint64_t through; // ticks of a copy through the caches
  uint64_t past;
};

// Ticks of so many copies; one in `stalled`, whichever, loses its core, which is not counted.
uint64_t copies(faster_way& way, uint32_t count, const costs& cost, uint32_t stalled = 0) {
  std::mt19937 random(stalled);
  uint64_t all = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const bool past = way.choose();
    const uint64_t ticks = past ? cost.past : cost.through;
    way.took(past, stalled != 0 && random() % stalled == 0 ? ticks + 400'000 : ticks, bytes);
    all += ticks;
  }
  return all;
}

constexpr costs far{7'000, 600};
constexpr costs near{150, 500};
constexpr uint32_t many = 10'000;

// Within so many hundredths of the faster way alone.
void expect_within(uint64_t ticks, uint64_t best, uint64_t hundredths) {
  EP_CHECK(ticks >= best);
  EP_CHECK(ticks * 100 <= best * (100 + hundredths));
}

void finds_the_faster_way() {
  faster_way of_far, of_near;
  expect_within(copies(of_far, many, far), many * far.past, 6);
  expect_within(copies(of_near, many, near), many * near.through, 3);
}

void follows_cores_that_move() {
  faster_way way;
  copies(way, many, far);
  expect_within(copies(way, many, near), many * near.through, 10);
  expect_within(copies(way, many, far), many * far.past, 8);
}

void is_not_misled_by_stalls() {
  for (const uint32_t stalled : {2u, 3u, 7u, 50u, 256u}) {
    faster_way of_far, of_near;
    expect_within(copies(of_far, many, far, stalled), many * far.past, 60);
    expect_within(copies(of_near, many, near, stalled), many * near.through, 60);
  }
}

void copies_the_same_bytes() {
  std::vector<uint8_t> from(100'000), to(from.size() + 64);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 31 + i / 251);
  for (uint32_t i = 0; i < 600; ++i) {
    const size_t offset = i % 64, length = i * 167 % from.size();
    std::memset(to.data(), 0xee, to.size());
    hand_over(to.data() + offset, from.data(), length);
    EP_CHECK_EQ(std::memcmp(to.data() + offset, from.data(), length), 0);
    EP_CHECK(offset + length == to.size() || to[offset + length] == 0xee);
    EP_CHECK(offset == 0 || to[offset - 1] == 0xee);
  }
}

} // namespace

int main() {
  finds_the_faster_way();
  follows_cores_that_move();
  is_not_misled_by_stalls();
  copies_the_same_bytes();
  return ep::check::finish();
}
