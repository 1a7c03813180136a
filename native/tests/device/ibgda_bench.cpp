// ibgda_bench [thousands of posts of each row, 400]: how fast host threads post WQEs. The ways take turns, and the best of some rounds is shown, for a machine's speed
// changes from one moment to the next.
// ibgda_bench count WAY SHARING BATCH POSTS: one poster and nothing else, for counting instructions (post_instructions.mjs).
#include "ibgda/post_bench.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

using namespace ep::ibgda;

constexpr uint32_t rounds = 25;

void table(uint64_t posts) {
  const auto ways = post_ways();
  std::printf("millions of WQEs posted each second; in brackets: times the lock\n");
  for (const uint32_t threads : {1u, 2u}) {
    for (const uint32_t batch : {1u, 2u, 4u, 16u}) {
      std::vector<double> best(ways.size());
      for (uint32_t round = 0; round < rounds; ++round) {
        for (uint32_t i = 0; i < ways.size(); ++i) {
          auto measured = drained_posts_per_second({i, threads, batch, posts});
          if (!measured.ok()) std::abort();
          best[i] = std::max(best[i], measured.value() * 1e-6);
        }
      }
      std::printf("%u poster%s, batch %2u:", threads, threads == 1 ? " " : "s", batch);
      for (size_t i = 0; i < ways.size(); ++i) std::printf("  %s/%s %.1f (%.2f)", ways[i].name, ways[i].sharing, best[i], best[i] / best[0]);
      std::printf("\n");
    }
  }
}

} // namespace

int main(int count, char** words) {
  if (count == 6 && std::strcmp(words[1], "count") == 0) {
    if (post_only(words[2], words[3], static_cast<uint32_t>(std::atoi(words[4])), static_cast<uint64_t>(std::atoll(words[5]))).ok()) return 0;
    count = 7;
  }
  if (count > 2) {
    std::fprintf(stderr, "usage: ibgda_bench [thousands of posts] | count lock|in-turn|ringer device|block|thread BATCH POSTS\n");
    return 2;
  }
  table(1000 * (count == 2 ? static_cast<uint64_t>(std::atoll(words[1])) : 400));
  return 0;
}
