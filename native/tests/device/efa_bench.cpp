// efa_bench [thousands of puts of each row, 400]: how fast host threads put over EFA's GIN facade, where nobody executes what they post. The ways take turns, and the best of some
// rounds is shown, for a machine's speed changes from one moment to the next.
// efa_bench count WAY SHARING RUN PUTS: one poster and nothing else, for counting instructions (post_instructions.mjs).
#include "efa/post_bench.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

using namespace ep::efa;

constexpr uint32_t rounds = 15;

void table(uint64_t puts) {
  const auto ways = put_ways();
  std::printf("millions of puts each second; in brackets: times the lock\n");
  for (const uint32_t threads : {1u, 2u}) {
    for (const uint32_t run : {1u, 4u, 8u, 16u}) {
      std::vector<double> best(ways.size());
      for (uint32_t round = 0; round < rounds; ++round) {
        for (uint32_t i = 0; i < ways.size(); ++i) {
          auto measured = drained_puts_per_second({i, threads, run, puts});
          if (!measured.ok()) std::abort();
          best[i] = std::max(best[i], measured.value() * 1e-6);
        }
      }
      std::printf("%u poster%s, runs of %2u:", threads, threads == 1 ? " " : "s", run);
      for (size_t i = 0; i < ways.size(); ++i) std::printf("  %s/%s %.1f (%.2f)", ways[i].name, ways[i].sharing, best[i], best[i] / best[0]);
      std::printf("\n");
    }
  }
}

} // namespace

int main(int count, char** words) {
  if (count == 6 && std::strcmp(words[1], "count") == 0) {
    if (put_only(words[2], words[3], static_cast<uint32_t>(std::atoi(words[4])), static_cast<uint64_t>(std::atoll(words[5]))).ok()) return 0;
    count = 7;
  }
  if (count > 2) {
    std::fprintf(stderr, "usage: efa_bench [thousands of puts] | count lock|lock-free device|block|thread RUN PUTS\n");
    return 2;
  }
  table(1000 * (count == 2 ? static_cast<uint64_t>(std::atoll(words[1])) : 400));
  return 0;
}
