// How fast the attention dispatch moves rows between ranks that are streams of one GPU, against the device's own copy and against the per-token kernel of the
// original (`compat`), on the same plans in the same run. dispatch_bench [MiB of payload, 2048] [repetitions, 15]
//
// Accounting: payload is counted once (every received byte); a copy of as many bytes reads and writes each of them once, too. Time is of CUDA events around the
// launches of all ranks; the median of the repetitions. Every timed variant is followed by a check of every received word.
#include <algorithm>

#include "compat_plan.cuh"

namespace {

using namespace ep::test;

uint32_t repetitions = 15;

double median(std::vector<float> times) {
  std::sort(times.begin(), times.end());
  return static_cast<double>(times[times.size() / 2]);
}

// Milliseconds from when every stream may begin until all have ended.
template <class Launch> double timed(plan_world& world, const Launch& launch) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<cudaEvent_t> done(world.ranks.size());
  for (cudaEvent_t& each : done) check(cudaEventCreateWithFlags(&each, cudaEventDisableTiming), "cudaEventCreate");
  const cudaStream_t first = world.ranks[0].stream;
  check(cudaEventRecord(begin, first), "cudaEventRecord");
  for (auto& rank : world.ranks) check(cudaStreamWaitEvent(rank.stream, begin, 0), "cudaStreamWaitEvent");
  launch();
  for (size_t rank = 0; rank < world.ranks.size(); ++rank) {
    check(cudaEventRecord(done[rank], world.ranks[rank].stream), "cudaEventRecord");
    check(cudaStreamWaitEvent(first, done[rank], 0), "cudaStreamWaitEvent");
  }
  check(cudaEventRecord(end, first), "cudaEventRecord");
  world.finish();
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  for (cudaEvent_t each : done) cudaEventDestroy(each);
  return static_cast<double>(milliseconds);
}

// The fastest of several pairs of buffers: where they lie in the memory's channels changes a copy by a tenth.
double copy_time(plan_world& world, uint64_t bytes) {
  constexpr uint64_t apart = 12 << 20;
  double best = 0;
  for (uint64_t pair = 0; pair < 4; ++pair) {
    void* from = nullptr;
    void* to = nullptr;
    check(cudaMalloc(&from, bytes + pair * apart), "cudaMalloc");
    check(cudaMalloc(&to, bytes), "cudaMalloc");
    check(cudaMemset(from, 0x5a, bytes), "cudaMemset");
    std::vector<float> times;
    for (uint32_t i = 0; i < repetitions + 3; ++i) {
      const double time = timed(world, [&] { check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, world.ranks[0].stream), "cudaMemcpyAsync"); });
      if (i >= 3) times.push_back(static_cast<float>(time));
    }
    check(cudaFree(from), "cudaFree");
    check(cudaFree(to), "cudaFree");
    best = pair == 0 ? median(times) : std::min(best, median(times));
  }
  return best;
}

double dispatch_time(plan_world& world, uint32_t blocks, uint32_t lanes) {
  std::vector<float> times;
  for (uint32_t i = 0; i < repetitions + 3; ++i) {
    const size_t count = world.ranks.size();
    for (size_t rank = 0; rank < count; ++rank) world.begin(rank);
    const double time = timed(world, [&] {
      for (size_t rank = 0; rank < count; ++rank) world.dispatch(rank, blocks, lanes);
    });
    for (size_t rank = 0; rank < count; ++rank) world.grant(rank);
    if (i >= 3) times.push_back(static_cast<float>(time));
  }
  for (size_t rank = 0; rank < world.ranks.size(); ++rank) {
    world.count(rank);
    world.fill(rank);
    world.poison(rank);
  }
  world.finish();
  for (size_t rank = 0; rank < world.ranks.size(); ++rank) world.begin(rank);
  for (size_t rank = 0; rank < world.ranks.size(); ++rank) world.dispatch(rank, blocks, lanes);
  for (size_t rank = 0; rank < world.ranks.size(); ++rank) {
    world.verify(rank);
    world.grant(rank);
  }
  world.finish();
  return median(times);
}

// The per-token kernel's buffers and metadata for the same plan.
class compat_world {
 public:
  explicit compat_world(plan_world& over) : world(over), count(over.ranks.size()) {
    const uint64_t bytes = compat_layout(world).bytes();
    std::vector<ep_peer_view> views;
    for (size_t rank = 0; rank < count; ++rank) {
      memories.push_back(gpu_array<uint8_t>(bytes));
      signals.push_back(gpu_array<uint64_t>(2 * count));
      outputs.push_back(gpu_array<uint8_t>(world.lease_bytes()));
      views.push_back({bits(memories.back()), bits(signals.back()), 0, 0});
    }
    ep_peer_view* everyone = gpu_array(views);
    for (size_t self = 0; self < count; ++self) {
      ep_compat_args made = compat_args(world, self, outputs[self]);
      made.memory.peers = bits(everyone);
      args.push_back(made);
    }
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  ~compat_world() {
    for (size_t rank = 0; rank < count; ++rank) {
      cudaFree(memories[rank]);
      cudaFree(signals[rank]);
      cudaFree(outputs[rank]);
    }
  }
  compat_world(const compat_world&) = delete;

  double time(uint32_t blocks) {
    std::vector<float> times;
    const uint32_t runs = std::max(3u, repetitions / 3);
    for (uint32_t i = 0; i < runs + 1; ++i) {
      // Its caller zeroes the counters, and all ranks pass a barrier, before each call.
      for (size_t rank = 0; rank < count; ++rank) check(cudaMemset(signals[rank], 0, 2 * count * 8), "cudaMemset");
      check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      const double time = timed(world, [&] {
        for (size_t rank = 0; rank < count; ++rank) {
          const auto few = static_cast<uint32_t>(ep::compat_blocks(blocks, args[rank].tokens));
          check(ep::cuda_compat(world.how(rank, few, ep::compat_block_lanes), args[rank]), "compat");
        }
      });
      if (i >= 1) times.push_back(static_cast<float>(time));
    }
    for (size_t rank = 0; rank < count; ++rank) world.verify(rank, outputs[rank]);
    world.finish();
    return median(times);
  }

 private:
  plan_world& world;
  size_t count;
  std::vector<uint8_t*> memories;
  std::vector<uint64_t*> signals;
  std::vector<uint8_t*> outputs;
  std::vector<ep_compat_args> args;
};

void measure(int32_t ranks, uint64_t row_bytes, uint64_t mebibytes, uint64_t gap, bool curve, bool baseline) {
  plan_options wanted;
  wanted.ranks = ranks;
  wanted.row_bytes[0] = row_bytes;
  wanted.row_bytes[1] = row_bytes;
  wanted.replicas = 2;
  wanted.shard = 2048;
  wanted.gap_bytes = gap;
  // Query once, key-value one and a half times on average.
  wanted.tokens = static_cast<uint32_t>((mebibytes << 20) * 2 / 5 / row_bytes / static_cast<uint64_t>(ranks));
  plan_world world(wanted);
  for (size_t rank = 0; rank < world.ranks.size(); ++rank) world.fill(rank);
  world.finish();
  const double gigabytes = static_cast<double>(world.payload_bytes()) / 1e9;
  const double copy = gigabytes / copy_time(world, world.payload_bytes()) * 1e3;
  uint32_t resident = 0;
  check(ep::cuda_resident(0, false, 512, &resident), "resident");
  uint32_t compat_resident = 0;
  check(ep::cuda_resident(0, true, ep::compat_block_lanes, &compat_resident), "resident");
  const uint32_t most = resident / static_cast<uint32_t>(ranks);
  std::printf("%d ranks, rows of %llu bytes (%llu apart), %.2f GB of payload; copy %.0f GB/s\n", ranks, static_cast<unsigned long long>(row_bytes),
              static_cast<unsigned long long>(row_bytes + gap), gigabytes, copy);
  double best = 0;
  for (const uint32_t share : curve ? std::vector<uint32_t>{16, 8, 4, 2, 1} : std::vector<uint32_t>{1}) {
    for (const uint32_t lanes : curve ? std::vector<uint32_t>{256, 512, 1024} : std::vector<uint32_t>{512}) {
      const uint32_t blocks = std::max(1u, most * 512 / lanes / share);
      const double rate = gigabytes / dispatch_time(world, blocks, lanes) * 1e3;
      best = std::max(best, rate);
      std::printf("  dispatch, %3u blocks of %4u lanes for each rank: %6.0f GB/s, %.3f of the copy\n", blocks, lanes, rate, rate / copy);
    }
  }
  if (baseline) {
    compat_world original(world);
    double fastest = 0;
    for (const uint32_t blocks : {20u, compat_resident / static_cast<uint32_t>(ranks)}) {
      const double rate = gigabytes / original.time(blocks) * 1e3;
      fastest = std::max(fastest, rate);
      std::printf("  per-token, %3u blocks for each rank: %6.0f GB/s, %.3f of the copy\n", blocks, rate, rate / copy);
    }
    std::printf("  dispatch over per-token: %.2f\n", best / fastest);
  }
  if (world.wrong_words() != 0) {
    std::fprintf(stderr, "%llu wrong words\n", static_cast<unsigned long long>(world.wrong_words()));
    std::exit(1);
  }
  std::fflush(stdout);
  world.free_device();
}

} // namespace

int main(int count, char** words) {
  const uint64_t mebibytes = count > 1 ? std::strtoull(words[1], nullptr, 10) : 2048;
  if (count > 2) repetitions = static_cast<uint32_t>(std::atoi(words[2]));
  use_all_queues();
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no GPU\n");
    return 2;
  }
  cudaDeviceProp facts{};
  check(cudaGetDeviceProperties(&facts, 0), "cudaGetDeviceProperties");
  std::printf("%s, %d multiprocessors\n", facts.name, facts.multiProcessorCount);
  for (const int32_t ranks : {4, 8}) {
    for (const uint64_t row_bytes : {4096, 8192, 16384}) measure(ranks, row_bytes, mebibytes, 0, row_bytes == 8192, true);
    measure(ranks, 8192, mebibytes, 8192, false, false);
  }
  return 0;
}
