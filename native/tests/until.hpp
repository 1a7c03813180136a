// Looks until something has come.
#pragma once

#include <cstdint>

#include <sched.h>

#include "waiting.hpp"

namespace ep::test {

constexpr int64_t patience_ns = 60'000'000'000; // only a hang reaches it

template <class Ready> bool until(Ready&& ready) {
  const int64_t deadline = clock_now_ns() + patience_ns;
  while (!ready()) {
    if (clock_now_ns() >= deadline) return false;
    sched_yield();
  }
  return true;
}

} // namespace ep::test
