// A step of every rank as a CUDA graph: new sources, a call whose counts live on the device, a check of each received word, the release of the lease. Replayed a
// thousand times without a word from the host. graph_test [replays]
#include "plan_world.cuh"

namespace {

using namespace ep::test;

// Replays of the ranks' graphs; the number of wrong words.
uint64_t replay(const plan_options& wanted, uint32_t replays, uint32_t blocks, uint32_t lanes, bool grants) {
  plan_world world(wanted);
  std::vector<cudaGraphExec_t> graphs(world.ranks.size());
  for (size_t rank = 0; rank < world.ranks.size(); ++rank) {
    check(cudaStreamBeginCapture(world.ranks[rank].stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    world.count(rank);
    world.fill(rank);
    world.begin(rank);
    world.dispatch(rank, blocks, lanes);
    world.verify(rank);
    if (grants) world.grant(rank);
    cudaGraph_t captured = nullptr;
    check(cudaStreamEndCapture(world.ranks[rank].stream, &captured), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&graphs[rank], captured, 0), "cudaGraphInstantiate");
  }
  for (uint32_t i = 0; i < replays; ++i) {
    for (size_t rank = 0; rank < graphs.size(); ++rank) check(cudaGraphLaunch(graphs[rank], world.ranks[rank].stream), "cudaGraphLaunch");
  }
  world.finish();
  for (const auto& rank : world.ranks) {
    ep_lease_counts counts{};
    check(cudaMemcpy(&counts, rank.lease, sizeof counts, cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (counts.uses != replays) {
      std::fprintf(stderr, "%llu of %u replays were counted\n", static_cast<unsigned long long>(counts.uses), replays);
      std::exit(1);
    }
  }
  return world.wrong_words();
}

} // namespace

int main(int count, char** words) {
  const auto replays = static_cast<uint32_t>(count > 1 ? std::atoi(words[1]) : 1000);
  use_all_queues();
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no GPU\n");
    return 2;
  }
  int failures = 0;
  for (const int32_t ranks : {1, 2, 4, 8}) {
    for (const uint64_t gap : {0, 16, 4}) {
      plan_options wanted;
      wanted.ranks = ranks;
      wanted.tokens = 200;
      wanted.shard = 60;
      wanted.row_bytes[0] = 512;
      wanted.row_bytes[1] = 272;
      wanted.gap_bytes = gap;
      wanted.replicas = 3;
      wanted.chunk_bytes = 4096;
      wanted.seed = static_cast<uint64_t>(ranks) * 7 + gap;
      const uint64_t wrong = replay(wanted, replays, 8, 128, true);
      std::printf("%d ranks, %llu bytes between rows, %u replays: %llu wrong words\n", ranks, static_cast<unsigned long long>(gap), replays,
                  static_cast<unsigned long long>(wrong));
      if (wrong != 0) failures += 1;
    }
  }
  return failures == 0 ? 0 : 1;
}
