// group_bench [CORE CORE ...]: what a small call costs ranks that are bound to these cores (-1: to none; two unbound ones unless told), beside the least that any exchange between them costs, in
// turns; p50 in ns.
// group_bench count CALLS: so many all-reduces of 8 bytes by a rank alone, which waits for nobody: for counting instructions with callgrind.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "collective/group.hpp"
#include "ends.hpp"

namespace {

using namespace ep;

constexpr int turns = 15;
constexpr uint64_t rounds = 8000;

std::shared_ptr<collective_group> open(ends& sink, int32_t rank, int32_t size) {
  auto made = collective_group::create(sink, {.rank = rank, .size = size, .capacity = size, .nonce = 5, .ranks_on_host = size});
  if (!made.ok() || !made.value()->allocate(4096).ok()) std::exit(1);
  return made.value();
}

void count(uint64_t calls) {
  ends sink;
  const auto group = open(sink, 0, 1);
  std::vector<double> samples(calls);
  if (group->measure(measured::all_reduce, 1, calls, samples.data()) != calls) std::exit(1);
  group->close(true);
}

void pin(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  if (core >= 0 && pthread_setaffinity_np(pthread_self(), sizeof cores, &cores) != 0) std::fprintf(stderr, "core %d cannot be had\n", core);
}

void table(const std::vector<int>& cores) {
  const auto ranks = static_cast<int32_t>(cores.size());
  std::barrier<> meet(ranks);
  std::vector<ep_segment_handle> handles(cores.size());
  std::vector<double> all[3];
  const auto rank_of = [&](int32_t rank) {
    pin(cores[static_cast<size_t>(rank)]);
    ends sink;
    const auto group = open(sink, rank, ranks);
    handles[static_cast<size_t>(rank)] = group->handle();
    meet.arrive_and_wait();
    for (int32_t peer = 0; peer < ranks; ++peer) {
      if (peer != rank && !group->attach(peer, handles[static_cast<size_t>(peer)]).ok()) std::exit(1);
    }
    meet.arrive_and_wait();
    uint64_t sequence = 1;
    std::vector<double> samples(rounds);
    for (int turn = 0; turn < turns; ++turn) {
      for (const measured what : {measured::exchange, measured::barrier, measured::all_reduce}) {
        if (group->measure(what, sequence, rounds, samples.data()) != rounds) std::exit(1);
        if (what != measured::exchange) sequence += rounds;
        if (rank == 0 && turn > 0) all[static_cast<size_t>(what)].insert(all[static_cast<size_t>(what)].end(), samples.begin(), samples.end());
      }
    }
    meet.arrive_and_wait();
    group->close(true);
  };
  std::vector<std::thread> others;
  for (int32_t rank = 1; rank < ranks; ++rank) others.emplace_back(rank_of, rank);
  rank_of(0);
  for (std::thread& other : others) other.join();
  const char* names[3] = {"all-reduce of 8 bytes", "barrier", "bare exchange"};
  for (const measured what : {measured::exchange, measured::barrier, measured::all_reduce}) {
    auto& samples = all[static_cast<size_t>(what)];
    std::sort(samples.begin(), samples.end());
    std::printf("%-28s %8.1f (p10 %.1f, p99 %.1f)\n", names[static_cast<size_t>(what)], samples[samples.size() / 2], samples[samples.size() / 10], samples[samples.size() / 100 * 99]);
  }
}

} // namespace

int main(int argc, char** words) {
  if (argc == 3 && std::strcmp(words[1], "count") == 0) {
    count(static_cast<uint64_t>(std::atoll(words[2])));
    return 0;
  }
  if (argc == 2) {
    std::fprintf(stderr, "usage: group_bench [CORE CORE ...] | count CALLS\n");
    return 2;
  }
  std::vector<int> cores;
  for (int i = 1; i < argc; ++i) cores.push_back(std::atoi(words[i]));
  table(cores.empty() ? std::vector<int>{-1, -1} : cores);
  return 0;
}
