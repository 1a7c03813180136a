// The per-token dispatch over NVIDIA's NVSHMEM, as the original has it, and our dispatch over the same plan and the same symmetric heap. One process for each PE:
//   nvshmem_baseline PE PES FOLDER [MiB of payload, 512] [repetitions, 9]
// PEs meet by a file in FOLDER, which is empty at first. Each checks every word that it receives. With one PE everything goes to itself, as the original has it, too; several PEs on one GPU (without MPS) take
// turns on it, so that their times say nothing.
//
// Accounting as in tests/cuda/dispatch_bench.cu: payload is counted once; time is of CUDA events around the launch on this PE; the median.
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <string>
#include <thread>

#include "endpoint.cuh"

#include "../cuda/launch.cuh"
#include "../tests/cuda/compat_plan.cuh"
#include "ep/device/compat_dispatch.h"

namespace {

using namespace ep::test;

__global__ void baseline_kernel(const __grid_constant__ ep::cuda_environment environment, const __grid_constant__ ep_compat_args args) {
  ep::cuda_context ctx{environment};
  const ep::nvshmem_endpoint endpoint{args.memory};
  ep::compat_dispatch(ctx, endpoint, args);
  __syncthreads();
  if (threadIdx.x == 0) nvshmem_quiet();
}

nvshmemx_uniqueid_t meet(int pe, const std::string& folder) {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  const std::string path = folder + "/id";
  if (pe == 0) {
    if (nvshmemx_get_uniqueid(&id) != 0) std::exit(1);
    std::ofstream(path + ".part", std::ios::binary).write(reinterpret_cast<const char*>(&id), sizeof id);
    if (std::rename((path + ".part").c_str(), path.c_str()) != 0) std::exit(1);
    return id;
  }
  for (int tries = 0; tries < 6000; ++tries) {
    std::ifstream file(path, std::ios::binary);
    if (file && file.read(reinterpret_cast<char*>(&id), sizeof id)) return id;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::fprintf(stderr, "PE 0 has not come within 60 s\n");
  std::exit(1);
}

// HAZARD: NVSHMEM waits for a PE that has died for ever. Whoever starts this ends it in time.
struct pe_world {
  plan_world& world;
  size_t self;
  uint32_t repetitions;
  cudaStream_t stream() const { return world.ranks[self].stream; }

  template <class Prepare, class Launch> double median(const Prepare& prepare, const Launch& launch) {
    std::vector<float> times;
    for (uint32_t i = 0; i < repetitions + 2; ++i) {
      prepare();
      cudaEvent_t begin = nullptr;
      cudaEvent_t end = nullptr;
      check(cudaEventCreate(&begin), "cudaEventCreate");
      check(cudaEventCreate(&end), "cudaEventCreate");
      check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      nvshmem_barrier_all();
      check(cudaEventRecord(begin, stream()), "cudaEventRecord");
      launch();
      check(cudaEventRecord(end, stream()), "cudaEventRecord");
      world.finish();
      float milliseconds = 0;
      check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
      cudaEventDestroy(begin);
      cudaEventDestroy(end);
      if (i >= 2) times.push_back(milliseconds);
    }
    std::sort(times.begin(), times.end());
    return static_cast<double>(times[times.size() / 2]);
  }
};

void* heap(uint64_t bytes) {
  void* made = nvshmem_malloc(bytes);
  if (made == nullptr) {
    std::fprintf(stderr, "NVSHMEM has no %llu bytes\n", static_cast<unsigned long long>(bytes));
    std::exit(1);
  }
  check(cudaMemset(made, 0, bytes), "cudaMemset");
  return made;
}

int measure(int pe, int pes, uint64_t mebibytes, uint32_t repetitions, uint64_t row_bytes) {
  plan_options wanted;
  wanted.ranks = pes;
  wanted.row_bytes[0] = wanted.row_bytes[1] = row_bytes;
  wanted.replicas = 2;
  wanted.shard = 2048;
  wanted.tokens = static_cast<uint32_t>((mebibytes << 20) * 2 / 5 / row_bytes / static_cast<uint64_t>(pes));
  plan_world world(wanted);
  const auto self = static_cast<size_t>(pe);
  world.fill(self);
  world.finish();
  const double gigabytes = static_cast<double>(world.payload_bytes()) / 1e9;
  pe_world here{world, self, repetitions};
  const uint64_t words = 2 * static_cast<uint64_t>(pes) * 8;
  auto* output = gpu_array<uint8_t>(world.lease_bytes());
  const auto told = [&](const char* what, uint32_t blocks, double milliseconds) {
    if (world.wrong_words() != 0) {
      std::fprintf(stderr, "PE %d: %s: %llu wrong words\n", pe, what, static_cast<unsigned long long>(world.wrong_words()));
      std::exit(1);
    }
    std::printf("PE %d of %d, rows of %llu bytes, %.2f GB of payload: %s, %u blocks: %.3f ms, %.0f GB/s, no wrong word\n", pe, pes, static_cast<unsigned long long>(row_bytes), gigabytes, what, blocks,
                milliseconds, gigabytes / milliseconds * 1e3);
    std::fflush(stdout);
  };

  // Ours, over the heap as NVSHMEM maps it.
  auto* lease_words = static_cast<uint64_t*>(heap(words));
  auto* lease = static_cast<uint8_t*>(heap(world.lease_bytes()));
  std::vector<ep_peer_view> views;
  bool mapped = true;
  for (int peer = 0; peer < pes; ++peer) {
    views.push_back({bits(nvshmem_ptr(lease, peer)), bits(nvshmem_ptr(lease_words, peer)), 0, 0});
    mapped = mapped && views.back().data != 0 && views.back().signals != 0;
  }
  uint32_t resident = 0;
  check(ep::cuda_resident(0, EP_CUDA_KERNEL_DISPATCH, 512, &resident), "resident");
  if (mapped) {
    plan_world::rank_state& rank = world.ranks[self];
    rank.call.args.memory.peers = rank.grant.memory.peers = bits(gpu_array(views));
    const double time = here.median([&] { world.begin(self); }, [&] {
      world.dispatch(self, resident, 512);
      world.grant(self);
    });
    world.verify(self, lease);
    world.finish();
    told("dispatch", resident, time);
  } else {
    std::printf("PE %d: NVSHMEM maps not all heaps here: our dispatch does not run over it\n", pe);
  }

  // The original's, by NVSHMEM; and by loads and stores over the same heap.
  const uint64_t bytes = compat_layout(world).bytes();
  auto* signals = static_cast<uint64_t*>(heap(words));
  auto* memory = static_cast<uint8_t*>(heap(bytes));
  ep_compat_args args = compat_args(world, self, output);
  for (int peer = 0; peer < pes; ++peer) views[static_cast<size_t>(peer)] = {bits(nvshmem_ptr(memory, peer)), bits(nvshmem_ptr(signals, peer)), 0, 0};
  views[self] = {bits(memory), bits(signals), 0, 0};
  args.memory.peers = bits(gpu_array(views));
  uint32_t fit = 0;
  check(ep::cuda_resident(0, EP_CUDA_KERNEL_COMPAT, ep::compat_block_lanes, &fit), "resident");
  int each = 0;
  int multiprocessors = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, baseline_kernel, ep::compat_block_lanes, 0), "occupancy");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
  const auto zeroed = [&] { check(cudaMemset(signals, 0, words), "cudaMemset"); };
  for (const bool by_nvshmem : {true, false}) {
    if (!by_nvshmem && !mapped) continue;
    for (const uint32_t most : {20u, by_nvshmem ? static_cast<uint32_t>(each * multiprocessors) : fit}) {
      const auto blocks = static_cast<uint32_t>(ep::compat_blocks(most, args.tokens));
      check(cudaMemset(output, 0xee, world.lease_bytes()), "cudaMemset");
      const double time = here.median(zeroed, [&] {
        const ep_cuda_launch how = world.how(self, blocks, ep::compat_block_lanes);
        check(by_nvshmem ? ep::launch_with(how, {true, 0}, baseline_kernel, args) : ep::cuda_compat(how, args), "per-token");
      });
      world.verify(self, output);
      world.finish();
      told(by_nvshmem ? "per-token by NVSHMEM" : "per-token by stores", blocks, time);
    }
  }
  nvshmem_barrier_all();
  for (void* one : {static_cast<void*>(lease_words), static_cast<void*>(lease), static_cast<void*>(signals), static_cast<void*>(memory)}) nvshmem_free(one);
  cudaFree(output);
  world.free_device();
  return 0;
}

} // namespace

int main(int count, char** words) {
  if (count < 4) {
    std::fprintf(stderr, "nvshmem_baseline PE PES FOLDER [MiB] [repetitions]\n");
    return 2;
  }
  const int pe = std::atoi(words[1]);
  const int pes = std::atoi(words[2]);
  const uint64_t mebibytes = count > 4 ? std::strtoull(words[4], nullptr, 10) : 512;
  const auto repetitions = static_cast<uint32_t>(count > 5 ? std::atoi(words[5]) : 9);
  use_all_queues();
  setenv("NVSHMEM_REMOTE_TRANSPORT", "none", 0);
  setenv("NVSHMEM_SYMMETRIC_SIZE", std::to_string((mebibytes << 20) * 4 + (uint64_t{256} << 20)).c_str(), 0);
  int devices = 0;
  // HAZARD: NVSHMEM ends a process that begins without a GPU.
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no GPU\n");
    return 2;
  }
  check(cudaSetDevice(pe % devices), "cudaSetDevice");
  check(cudaFree(nullptr), "a context");
  nvshmemx_uniqueid_t id = meet(pe, words[3]);
  nvshmemx_init_attr_t attr = NVSHMEMX_INIT_ATTR_INITIALIZER;
  nvshmemx_set_attr_uniqueid_args(pe, pes, &id, &attr);
  if (nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attr) != 0) return 1;
  if (pe == 0) {
    cudaDeviceProp facts{};
    check(cudaGetDeviceProperties(&facts, 0), "cudaGetDeviceProperties");
    std::printf("%s, %d GPUs, NVSHMEM state %d\n", facts.name, devices, nvshmemx_init_status());
  }
  for (const uint64_t row_bytes : {4096, 8192, 16384}) measure(pe, pes, mebibytes, repetitions, row_bytes);
  nvshmem_finalize();
  return 0;
}
