// A call of experts of every rank as a CUDA graph: new tokens and other choices, dispatch, a check of each received row, what experts make of it, combine, a check of the bits of each
// sum. Replayed a thousand times without a word from the host, which counts nothing: epochs and counts lie on the device. A graph of each rank; in low latency also one of all ranks, in which one launch makes the call
// of all of them. experts_graph_test [replays [as-taken]]: as-taken leaves out the launch that the driver itself refuses, which a sanitizer takes for a fault of the program.
#include "experts_world.cuh"

namespace {

using namespace ep::test;

// Numbers of a replay, which all ranks count alike. Experts of a token are different ones, and how many, and how many tokens have none, changes from replay to replay.
__device__ uint16_t number(uint32_t replay, uint32_t rank, uint32_t token, uint32_t choice, uint32_t channel) {
  return static_cast<uint16_t>(source_word(replay, rank, choice, token, channel) & 0x80ffu) | 0x3f00u;
}
__device__ int32_t chosen_expert(uint32_t replay, uint32_t rank, uint32_t token, uint32_t k, uint32_t experts) {
  const uint32_t first = source_word(replay, rank, 11, token, 3);
  if (source_word(replay, rank, 12, token, k) % 5 == 0) return -1;
  return static_cast<int32_t>((first + k * (2 * (first >> 16) + 1)) % experts); // experts are a power of two, so that odd strides meet none twice
}

__global__ void begin_replay(uint32_t* replay, uint32_t rank, uint16_t* x, int32_t* topk, uint32_t tokens, uint32_t top_k, uint32_t experts, uint32_t hidden) {
  const uint32_t now = *replay + 1; // written by the next kernel
  for (uint32_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    for (uint32_t h = threadIdx.x; h < hidden; h += blockDim.x) x[uint64_t{token} * hidden + h] = number(now, rank, token, as_given, h);
    for (uint32_t k = threadIdx.x; k < top_k; k += blockDim.x) topk[token * top_k + k] = chosen_expert(now, rank, token, k, experts);
  }
}
__global__ void count_replay(uint32_t* replay) { *replay += 1; }

// Each run has a row of each choice that its source made of the expert, in the order of tokens; and what the expert makes of it.
__global__ void check_and_compute(const uint32_t* replay, ep_moe_dispatch_args args, uint32_t first_expert, uint32_t local, uint32_t world, uint32_t top_k, uint32_t experts,
                                  uint32_t hidden, uint16_t* y, uint64_t y_stride, unsigned long long* wrong) {
  const ep_moe_routing& routing = args.call.routing;
  const auto* starts = reinterpret_cast<const uint32_t*>(routing.block_start);
  const auto* ranges = reinterpret_cast<const uint64_t*>(routing.layout_range);
  const auto* tokens = reinterpret_cast<const int32_t*>(routing.src_token);
  const auto* choices = reinterpret_cast<const int32_t*>(routing.src_choice);
  for (uint32_t run = blockIdx.x; run < local * world; run += gridDim.x) {
    const uint32_t source = run % world;
    uint64_t row = starts[run / world] + (ranges[run] >> 32);
    const uint64_t end = row + static_cast<uint32_t>(ranges[run]);
    for (uint32_t choice = 0; choice < routing.tokens * top_k; ++choice) {
      const uint32_t token = choice / top_k;
      const uint32_t k = choice % top_k;
      if (chosen_expert(*replay, source, token, k, experts) != static_cast<int32_t>(first_expert + run / world)) continue;
      const bool known = row < end && tokens[row] == static_cast<int32_t>(token) && choices[row] == static_cast<int32_t>(k);
      if (!known) {
        if (threadIdx.x == 0) atomicAdd(wrong, 1ull);
        break;
      }
      const auto* received = reinterpret_cast<const uint16_t*>(args.out + row * args.out_stride_bytes);
      for (uint32_t h = threadIdx.x; h < hidden; h += blockDim.x) {
        if (received[h] != number(*replay, source, token, as_given, h)) atomicAdd(wrong, 1ull);
        y[row * y_stride + h] = number(*replay, source, token, k, h);
      }
      ++row;
    }
    if (threadIdx.x == 0 && row != end) atomicAdd(wrong, 1ull);
  }
}

__global__ void check_replayed_sums(const uint32_t* replay, uint32_t rank, const float* weights, const uint16_t* sums, uint32_t tokens, uint32_t top_k, uint32_t experts, uint32_t hidden,
                                    unsigned long long* wrong) {
  for (uint32_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    for (uint32_t h = threadIdx.x; h < hidden; h += blockDim.x) {
      float all = 0.0f;
      for (uint32_t k = 0; k < top_k; ++k) {
        if (chosen_expert(*replay, rank, token, k, experts) < 0) continue;
        all = ep::detail::sum(all, ep::detail::product(weights[token * top_k + k], ep::number_bf16::load(number(*replay, rank, token, k, h))));
      }
      if (sums[uint64_t{token} * hidden + h] != ep::number_bf16::store(all)) atomicAdd(wrong, 1ull);
    }
  }
}

struct replay_shape {
  uint32_t blocks; // of a rank
  uint32_t lanes;
  bool halves;     // two launches of each call
  bool together;   // one launch for all ranks
};

cudaGraphExec_t end_capture(cudaStream_t stream) {
  cudaGraph_t captured = nullptr;
  cudaGraphExec_t made = nullptr;
  check(cudaStreamEndCapture(stream, &captured), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&made, captured, 0), "cudaGraphInstantiate");
  check(cudaGraphDestroy(captured), "cudaGraphDestroy");
  return made;
}

// The number of wrong numbers in all replays.
unsigned long long replay(const experts_options& wanted, uint32_t replays, const replay_shape& shape) {
  experts_world world(wanted);
  const auto count = static_cast<uint32_t>(wanted.ranks);
  const std::vector<uint32_t> halves = shape.halves ? std::vector<uint32_t>{1, 2} : std::vector<uint32_t>{3};
  std::vector<cudaGraphExec_t> graphs;
  std::vector<uint32_t*> counters;
  for (uint32_t rank = 0; rank < count; ++rank) counters.push_back(gpu_array<uint32_t>(1));
  const uint32_t local = world.local_experts();
  unsigned long long* wrong = world.wrong_counter();
  const auto begin = [&](uint32_t rank, cudaStream_t stream) {
    const auto& own = world.ranks[rank];
    begin_replay<<<4, 128, 0, stream>>>(counters[rank], rank, own.x, own.topk, wanted.tokens, wanted.top_k, wanted.experts, wanted.hidden);
    count_replay<<<1, 1, 0, stream>>>(counters[rank]);
  };
  const auto compute = [&](uint32_t rank, cudaStream_t stream) {
    const auto& own = world.ranks[rank];
    check_and_compute<<<4, 128, 0, stream>>>(counters[rank], own.dispatch, rank * local, local, count, wanted.top_k, wanted.experts, wanted.hidden, own.y, wanted.hidden, wrong);
  };
  const auto end = [&](uint32_t rank, cudaStream_t stream) {
    const auto& own = world.ranks[rank];
    check_replayed_sums<<<4, 128, 0, stream>>>(counters[rank], rank, own.weights, own.sum, wanted.tokens, wanted.top_k, wanted.experts, wanted.hidden, wrong);
  };
  const auto each_rank = [&](const auto& step, cudaStream_t stream) {
    for (uint32_t rank = 0; rank < count; ++rank) step(rank, stream);
  };
  if (shape.together) {
    const cudaStream_t stream = world.ranks[0].stream;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    each_rank(begin, stream);
    for (const uint32_t half : halves) world.dispatch_together(shape.blocks, shape.lanes, half);
    each_rank(compute, stream);
    for (const uint32_t half : halves) world.combine_together(shape.blocks, shape.lanes, half);
    each_rank(end, stream);
    graphs.push_back(end_capture(stream));
  } else {
    for (uint32_t rank = 0; rank < count; ++rank) {
      auto& own = world.ranks[rank];
      check(cudaStreamBeginCapture(own.stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
      begin(rank, own.stream);
      const ep_cuda_launch how = world.how(rank, shape.blocks, shape.lanes);
      for (const uint32_t half : halves) check(ep::cuda_moe_dispatch(how, own.buffer, own.dispatch, half), "dispatch");
      compute(rank, own.stream);
      for (const uint32_t half : halves) check(ep::cuda_moe_combine(how, own.buffer, own.combine, half), "combine");
      end(rank, own.stream);
      graphs.push_back(end_capture(own.stream));
    }
  }
  for (uint32_t i = 0; i < replays; ++i) {
    for (size_t graph = 0; graph < graphs.size(); ++graph) check(cudaGraphLaunch(graphs[graph], world.ranks[graph].stream), "cudaGraphLaunch");
  }
  world.finish();
  for (uint32_t rank = 0; rank < count; ++rank) {
    uint32_t counted = 0;
    ep_moe_peer own{};
    check(cudaMemcpy(&counted, counters[rank], sizeof counted, cudaMemcpyDeviceToHost), "cudaMemcpy");
    check(cudaMemcpy(&own, reinterpret_cast<const ep_moe_peer*>(world.ranks[rank].buffer.peers) + rank, sizeof own, cudaMemcpyDeviceToHost), "cudaMemcpy");
    cudaFree(counters[rank]);
    if (counted == replays && own.told == replays) continue;
    std::fprintf(stderr, "rank %u: %u replays ran and %u calls were counted, of %u\n", rank, counted, own.told, replays);
    std::exit(1);
  }
  for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
  return world.wrong_numbers();
}

// What a launch of several ranks does not take; nothing runs.
int wrong_refusals(bool by_driver) {
  experts_options wanted;
  wanted.ranks = 2;
  wanted.tokens = 24;
  wanted.top_k = 4;
  wanted.experts = 32;
  wanted.hidden = 512;
  experts_world world(wanted);
  wanted.compact = true;
  experts_world other(wanted);
  const auto of = [](const experts_world& from, size_t rank, bool dispatches) {
    const auto& own = from.ranks[rank];
    return ep_cuda_moe_rank{&own.buffer, dispatches ? &own.dispatch : nullptr, dispatches ? nullptr : &own.combine, 0, 0, 0};
  };
  int failures = 0;
  const auto refused = [&](const char* what, const std::vector<ep_cuda_moe_rank>& ranks, uint32_t blocks, uint32_t lanes, int wanted_error) {
    const int error = ep::cuda_moe_together(world.how(0, blocks, lanes), ranks.data(), static_cast<uint32_t>(ranks.size()), 3);
    cudaGetLastError();
    if (error == wanted_error) return;
    std::fprintf(stderr, "%s: error %d, not %d\n", what, error, wanted_error);
    failures += 1;
  };
  const ep_cuda_moe_rank first = of(world, 0, true);
  refused("no ranks", {}, 1, 128, cudaErrorInvalidValue);
  refused("a rank twice", {first, first}, 1, 128, cudaErrorInvalidValue);
  refused("more ranks than a launch takes", std::vector<ep_cuda_moe_rank>(EP_CUDA_MOST_MOE_RANKS + 1, first), 1, 128, cudaErrorInvalidValue);
  refused("both calls", {first, of(world, 1, false)}, 1, 128, cudaErrorInvalidValue);
  refused("no call", {{first.buffer, nullptr, nullptr, 0, 0, 0}}, 1, 128, cudaErrorInvalidValue);
  refused("high throughput", {first, of(other, 1, true)}, 1, 128, cudaErrorInvalidValue);
  refused("lanes that are no warps", {first, of(world, 1, true)}, 1, 100, cudaErrorInvalidConfiguration);
  uint32_t resident = 0;
  check(ep::cuda_resident(0, EP_CUDA_KERNEL_MOE, 256, &resident), "resident");
  if (by_driver) refused("more blocks than fit, of all ranks together", {first, of(world, 1, true)}, 3 * resident / 4 + 1, 256, cudaErrorCooperativeLaunchTooLarge);
  return failures;
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
  check(ep::cuda_load_moe(), "loading kernels");
  int failures = wrong_refusals(count <= 2);
  for (const int32_t ranks : {1, 2, 4, 8}) {
    for (uint32_t shape = 0; shape < 16; ++shape) {
      experts_options wanted;
      wanted.repeated = true;
      wanted.compact = shape % 2 != 0;
      wanted.offered = shape / 2 % 2 != 0;
      const bool halves = shape / 4 % 2 != 0;
      const bool together = shape / 8 != 0;
      if (wanted.compact && together) continue;
      wanted.ranks = ranks;
      wanted.tokens = 24;
      wanted.top_k = 4;
      wanted.experts = 32;
      wanted.hidden = 512;
      const auto checked = [&](uint32_t blocks, uint32_t lanes) {
        const unsigned long long wrong = replay(wanted, replays, {blocks, lanes, halves, together});
        std::printf("%d ranks, %s, results %s, %s%s, %u blocks of %u, %u replays: %llu wrong numbers\n", ranks, wanted.compact ? "high throughput" : "low latency", wanted.offered ? "in place" : "sent",
                    halves ? "in halves" : "whole calls", together ? ", one launch for all ranks" : "", blocks, lanes, replays, wrong);
        std::fflush(stdout);
        if (wrong != 0) failures += 1;
      };
      checked(4, 128);
      if (!together) continue;
      checked(1, 32);
      checked(7, 256); // no power of two: warps without a token of their own, and some with a part of one
      checked(16, 512);
    }
  }
  return failures == 0 ? 0 : 1;
}
