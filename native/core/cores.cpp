#include "cores.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstddef>

#include <sched.h>

namespace ep {
namespace {

constexpr size_t words = sizeof(ep_core_set::words) / sizeof(uint64_t);

int count(const ep_core_set& set) {
  int found = 0;
  for (const uint64_t word : set.words) found += std::popcount(word);
  return found;
}

bool meets(const ep_core_set& one, const ep_core_set& other) {
  for (size_t i = 0; i < words; ++i) {
    if ((one.words[i] & other.words[i]) != 0) return true;
  }
  return false;
}

bool lies_within(const ep_core_set& one, const ep_core_set& other) {
  for (size_t i = 0; i < words; ++i) {
    if ((one.words[i] & ~other.words[i]) != 0) return false;
  }
  return true;
}

} // namespace

ep_core_set cores_of_thread() {
  // The kernel refuses a mask that is shorter than its own.
  for (int most = CPU_SETSIZE; most <= 1 << 16; most *= 2) {
    cpu_set_t* mask = CPU_ALLOC(most);
    if (mask == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(most);
    CPU_ZERO_S(bytes, mask);
    const bool read = sched_getaffinity(0, bytes, mask) == 0;
    const bool too_short = !read && errno == EINVAL;
    ep_core_set set{};
    for (int core = 0; read && core < most; ++core) {
      if (CPU_ISSET_S(core, bytes, mask)) set.words[core % EP_CORES / 64] |= uint64_t{1} << (core % EP_CORES % 64);
    }
    CPU_FREE(mask);
    if (!too_short) return set;
  }
  return {};
}

bool cores_suffice(const ep_core_set& own, const std::vector<ep_core_set>& others, int ranks_on_host, int quota) {
  if (quota > 0 && ranks_on_host > quota) return false;
  const int unknown = std::max(0, ranks_on_host - 1 - static_cast<int>(others.size()));
  ep_core_set all = own;
  int beside = 1 + unknown; // ranks that may want a core of this one
  int within = 1 + unknown; // those that can have no other
  for (const ep_core_set& said : others) {
    const ep_core_set& one = count(said) == 0 ? own : said;
    if (!meets(one, own)) continue;
    ++beside;
    if (lies_within(one, own)) ++within;
    for (size_t i = 0; i < words; ++i) all.words[i] |= one.words[i];
  }
  return within <= count(own) && beside <= count(all);
}

} // namespace ep
