// What a call of experts takes beside its bytes, whoever wrote it: the launch of its blocks, and one word from every rank to every other, told once all blocks of the sender have begun, awaited by all blocks of the
// receiver.
#pragma once

#include <cuda/atomic>

#include "../../cuda/launch.cuh"
#include "plan_world.cuh"

namespace ep::test {

struct exchange_words {
  uint32_t ranks;
  uint32_t* calls; // [ranks], that have been
  uint32_t* begun; // [ranks]: blocks, of the call that goes on
  uint32_t* told;  // [receivers][senders]: the sender's call
};

// A row of the grid for each rank, from `first` on. All blocks of all ranks must be able to run at once.
__global__ void exchange_kernel(exchange_words words, uint32_t first) {
  using system_word = cuda::atomic_ref<uint32_t, cuda::thread_scope_system>;
  using device_word = cuda::atomic_ref<uint32_t, cuda::thread_scope_device>;
  constexpr int64_t longest = 20'000'000'000; // cycles
  const uint32_t rank = first + blockIdx.y;
  __shared__ uint32_t call;
  __shared__ bool last;
  if (threadIdx.x == 0) {
    // HAZARD: read before this block counts as begun, since the last one to begin moves it on.
    call = device_word(words.calls[rank]).load(cuda::memory_order_relaxed) + 1;
    last = device_word(words.begun[rank]).fetch_add(1, cuda::memory_order_acq_rel) + 1 == gridDim.x;
    if (last) {
      device_word(words.begun[rank]).store(0, cuda::memory_order_relaxed);
      device_word(words.calls[rank]).store(call, cuda::memory_order_relaxed);
    }
  }
  __syncthreads();
  const int64_t began = clock64();
  for (uint32_t peer = threadIdx.x; peer < words.ranks; peer += blockDim.x) {
    if (last) system_word(words.told[peer * words.ranks + rank]).store(call, cuda::memory_order_release);
    while (static_cast<int32_t>(system_word(words.told[rank * words.ranks + peer]).load(cuda::memory_order_acquire) - call) < 0) {
      if (clock64() - began > longest) __trap();
    }
  }
}

// Exchanges among `ranks`, whose blocks begin as those of calls do.
class exchanges {
 public:
  explicit exchanges(uint32_t ranks) : words{ranks, gpu_array<uint32_t>(ranks), gpu_array<uint32_t>(ranks), gpu_array<uint32_t>(uint64_t{ranks} * ranks)} {}
  ~exchanges() {
    for (uint32_t* one : {words.calls, words.begun, words.told}) cudaFree(one);
  }
  exchanges(const exchanges&) = delete;

  // Of one rank, or of all of them by one launch.
  void launch(cudaStream_t stream, uint32_t first, uint32_t ranks, uint32_t blocks, uint32_t lanes) const {
    check(launch_rows({stream, blocks, lanes, 0, 0, 0}, ranks, {true, 0}, exchange_kernel, words, first), "exchange");
  }
  // Whether every rank has heard of every call of every other one.
  bool complete(uint32_t calls) const {
    std::vector<uint32_t> told(uint64_t{words.ranks} * words.ranks);
    check(cudaMemcpy(told.data(), words.told, told.size() * sizeof(uint32_t), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return std::all_of(told.begin(), told.end(), [&](uint32_t one) { return one == calls; });
  }

 private:
  exchange_words words;
};

} // namespace ep::test
