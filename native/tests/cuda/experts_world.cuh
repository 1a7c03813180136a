// Ranks as streams of one device with a buffer for experts each, tokens whose numbers say where they come from, and a check of every received row and of every sum on
// the device. What the benchmark of experts runs on.
#pragma once

#include <algorithm>
#include <numeric>

#include "ep/device/moe_sum.h"
#include "plan_world.cuh"

namespace ep::test {

struct experts_options {
  bool compact = false; // high throughput
  int32_t ranks = 8;
  uint32_t tokens = 128; // of each rank
  uint32_t hidden = 7168;
  uint32_t top_k = 8;
  uint32_t experts = 256; // by all ranks alike
  uint32_t payload = EP_MOE_BF16;
  bool pinned = false; // routing, counts and tables in memory of the host
  bool offered = false; // results stay where experts write them (EP_MOE_ZERO_COPY)
  bool repeated = false; // calls count on the device, and receive tensors have room for any routing
  uint64_t seed = 1;
};

// A channel of a token, or of what an expert makes of a choice of it: bf16, between 0.5 and 2 or their negatives.
__host__ __device__ inline uint16_t channel_of(uint32_t rank, uint32_t token, uint32_t choice, uint32_t channel) {
  return static_cast<uint16_t>(source_word(7, rank, choice, token, channel) & 0x80ffu) | 0x3f00u;
}
constexpr uint32_t as_given = 0xffff; // in place of a choice: the token itself

__global__ void fill_tokens(uint32_t rank, uint16_t* x, uint32_t tokens, uint32_t hidden) {
  for (uint32_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    for (uint32_t h = threadIdx.x; h < hidden; h += blockDim.x) x[uint64_t{token} * hidden + h] = channel_of(rank, token, as_given, h);
  }
}

// What the experts of a rank make of the rows that it has received.
__global__ void fill_results(ep_moe_routing routing, uint32_t experts, uint32_t world, uint16_t* y, uint32_t hidden) {
  const auto* starts = reinterpret_cast<const uint32_t*>(routing.block_start);
  const auto* ranges = reinterpret_cast<const uint64_t*>(routing.layout_range);
  const auto* tokens = reinterpret_cast<const int32_t*>(routing.src_token);
  const auto* choices = reinterpret_cast<const int32_t*>(routing.src_choice);
  for (uint32_t run = blockIdx.x; run < experts * world; run += gridDim.x) {
    const uint64_t range = ranges[run];
    for (uint32_t i = 0; i < static_cast<uint32_t>(range); ++i) {
      const uint64_t row = starts[run / world] + (range >> 32) + i;
      for (uint32_t h = threadIdx.x; h < hidden; h += blockDim.x) {
        y[row * hidden + h] = channel_of(run % world, static_cast<uint32_t>(tokens[row]), static_cast<uint32_t>(choices[row]), h);
      }
    }
  }
}

// Every row is of a choice of this expert, in the order of tokens, and holds that token's channels; a run has as many rows as its source chose the expert.
__global__ void check_rows(ep_moe_dispatch_args args, uint32_t payload, uint32_t first_expert, uint32_t experts, uint32_t world, uint32_t top_k, uint32_t hidden,
                           const int32_t* const* topk, const uint32_t* chosen, unsigned long long* wrong) {
  const ep_moe_routing& routing = args.call.routing;
  const auto* starts = reinterpret_cast<const uint32_t*>(routing.block_start);
  const auto* ranges = reinterpret_cast<const uint64_t*>(routing.layout_range);
  const auto* tokens = reinterpret_cast<const int32_t*>(routing.src_token);
  const auto* choices = reinterpret_cast<const int32_t*>(routing.src_choice);
  for (uint32_t run = blockIdx.x; run < experts * world; run += gridDim.x) {
    const uint32_t e = run / world;
    const uint32_t source = run % world;
    const uint64_t range = ranges[run];
    const auto rows = static_cast<uint32_t>(range);
    if (threadIdx.x == 0 && rows != chosen[source * (world * experts) + first_expert + e]) atomicAdd(wrong, 1ull);
    for (uint32_t i = 0; i < rows; ++i) {
      const uint64_t row = starts[e] + (range >> 32) + i;
      const auto token = static_cast<uint32_t>(tokens[row]);
      const auto choice = static_cast<uint32_t>(choices[row]);
      const bool known = token < routing.tokens && choice < top_k && topk[source][token * top_k + choice] == static_cast<int32_t>(first_expert + e);
      const bool ordered = i == 0 || tokens[row - 1] < tokens[row];
      if (threadIdx.x == 0 && (!known || !ordered)) atomicAdd(wrong, 1ull);
      if (!known) continue;
      const auto* codes = reinterpret_cast<const uint8_t*>(args.out) + row * args.out_stride_bytes;
      for (uint32_t h = threadIdx.x; h < hidden; h += blockDim.x) {
        const uint16_t sent = channel_of(source, token, as_given, h);
        if (payload == EP_MOE_BF16) {
          if (reinterpret_cast<const uint16_t*>(codes)[h] != sent) atomicAdd(wrong, 1ull);
          continue;
        }
        const float scale = reinterpret_cast<const float*>(args.out_scales)[h / EP_MOE_SCALED_CHANNELS * args.scale_block_stride + row];
        const float found = detail::product(number_e4m3::load(codes[h]), scale);
        const float wanted = number_bf16::load(sent);
        if (!(fabsf(found - wanted) <= fabsf(wanted) / 15.0f)) atomicAdd(wrong, 1ull); // half a step of 3 bits
      }
    }
  }
}

// The very bits of each sum.
__global__ void check_sums(uint32_t rank, const int32_t* topk, const float* weights, const uint16_t* sums, uint32_t tokens, uint32_t top_k, uint32_t hidden,
                           unsigned long long* wrong) {
  for (uint32_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    for (uint32_t h = threadIdx.x; h < hidden; h += blockDim.x) {
      float all = 0.0f;
      for (uint32_t k = 0; k < top_k; ++k) {
        if (topk[token * top_k + k] < 0) continue;
        all = detail::sum(all, detail::product(weights[token * top_k + k], number_bf16::load(channel_of(rank, token, k, h))));
      }
      if (sums[uint64_t{token} * hidden + h] != number_bf16::store(all)) atomicAdd(wrong, 1ull);
    }
  }
}

class experts_world {
 public:
  struct rank_state {
    ep_moe_buffer buffer{};
    ep_moe_dispatch_args dispatch{};
    ep_moe_combine_args combine{};
    uint16_t *x = nullptr, *y = nullptr, *sum = nullptr;
    int32_t* topk = nullptr;
    float* weights = nullptr;
    ep_kernel_status* status = nullptr; // on the device
    cudaStream_t stream = nullptr;
  };
  std::vector<rank_state> ranks;
  const experts_options options;

  explicit experts_world(const experts_options& wanted) : options(wanted), world(static_cast<size_t>(wanted.ranks)), local(wanted.experts / static_cast<uint32_t>(wanted.ranks)) {
    route();
    std::vector<ep_peer_view> views;
    ep_moe_buffer shape{};
    lay_out(shape);
    for (size_t r = 0; r < world; ++r) {
      views.push_back({bits(large<uint8_t>(shape.refusals.offset + world * 8)), bits(large<uint64_t>(EP_MOE_SIGNAL_KINDS * world)), 0, 0});
    }
    const uint64_t everyone = bits(gpu_array(views));
    wrong = gpu_array<unsigned long long>(1);
    std::vector<const int32_t*> routes;
    for (size_t r = 0; r < world; ++r) routes.push_back(gpu_array(choices[r]));
    all_topk = gpu_array(routes);
    chosen_by = gpu_array(chosen);
    ranks.resize(world);
    for (size_t r = 0; r < world; ++r) make_rank(r, shape, everyone, views[r].data);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  ~experts_world() {
    for (void* one : device) cudaFree(one);
    for (void* one : host) cudaFreeHost(one);
    for (const rank_state& rank : ranks) cudaStreamDestroy(rank.stream);
  }
  experts_world(const experts_world&) = delete;

  uint32_t local_experts() const { return local; }
  // Rows that travel in a dispatch of all ranks, own ones included, and so in a combine.
  uint64_t rows() const { return std::accumulate(chosen.begin(), chosen.end(), uint64_t{0}); }
  // Bytes of a dispatched row that its receiver needs, scales included.
  uint64_t payload() const { return casts() ? code_bytes() + scale_blocks() * sizeof(float) : code_bytes(); }

  ep_cuda_launch how(size_t rank, uint32_t blocks, uint32_t lanes) const { return {ranks[rank].stream, blocks, lanes, 20'000'000'000, 0, 0}; }
  void next_call() {
    ++epoch;
    for (rank_state& rank : ranks) rank.dispatch.call.epoch = rank.combine.call.epoch = epoch;
  }
  void dispatch(size_t rank, uint32_t blocks, uint32_t lanes) { check(cuda_moe_dispatch(how(rank, blocks, lanes), ranks[rank].buffer, ranks[rank].dispatch, 3), "dispatch"); }
  void combine(size_t rank, uint32_t blocks, uint32_t lanes) { check(cuda_moe_combine(how(rank, blocks, lanes), ranks[rank].buffer, ranks[rank].combine, 3), "combine"); }

  // All ranks by one launch, on the first one's stream.
  void dispatch_together(uint32_t blocks, uint32_t lanes, uint32_t halves = 3) { together(blocks, lanes, halves, true); }
  void combine_together(uint32_t blocks, uint32_t lanes, uint32_t halves = 3) { together(blocks, lanes, halves, false); }

  void fill(size_t r) {
    const rank_state& rank = ranks[r];
    fill_results<<<128, 256, 0, rank.stream>>>(rank.dispatch.call.routing, local, static_cast<uint32_t>(world), rank.y, options.hidden);
  }
  void check_dispatch(size_t r) {
    const rank_state& rank = ranks[r];
    check_rows<<<128, 256, 0, rank.stream>>>(rank.dispatch, options.payload, static_cast<uint32_t>(r) * local, local, static_cast<uint32_t>(world), options.top_k, options.hidden,
                                             all_topk, chosen_by, wrong);
  }
  void check_combine(size_t r) {
    const rank_state& rank = ranks[r];
    check_sums<<<128, 256, 0, rank.stream>>>(static_cast<uint32_t>(r), rank.topk, rank.weights, rank.sum, options.tokens, options.top_k, options.hidden, wrong);
  }
  // What a call is to write, and what travels.
  void poison() {
    for (const rank_state& rank : ranks) {
      const uint64_t row = options.compact ? rank.buffer.row_bytes : code_bytes();
      check(cudaMemsetAsync(reinterpret_cast<void*>(rank.dispatch.out), 0xee, rank.buffer.recv_rows * row, rank.stream), "cudaMemsetAsync");
      check(cudaMemsetAsync(rank.sum, 0xee, uint64_t{options.tokens} * options.hidden * 2, rank.stream), "cudaMemsetAsync");
    }
  }
  void finish() const {
    for (const rank_state& rank : ranks) check(cudaStreamSynchronize(rank.stream), "cudaStreamSynchronize");
    for (size_t r = 0; r < world; ++r) {
      ep_kernel_status status{};
      check(cudaMemcpy(&status, ranks[r].status, sizeof status, cudaMemcpyDefault), "cudaMemcpy");
      if (status.status == 0) continue;
      std::fprintf(stderr, "rank %zu: status %u, awaited rank %d at stage %u: expected %llu, found %llu\n", r, status.status, status.rank, status.stage,
                   static_cast<unsigned long long>(status.expected), static_cast<unsigned long long>(status.found));
      std::exit(1);
    }
  }
  uint64_t wrong_numbers() const {
    unsigned long long found = 0;
    check(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return found;
  }
  unsigned long long* wrong_counter() const { return wrong; } // on the device

 private:
  void together(uint32_t blocks, uint32_t lanes, uint32_t halves, bool dispatches) {
    const ep_cuda_launch launch = how(0, blocks, lanes);
    std::vector<ep_cuda_moe_rank> all;
    for (const rank_state& rank : ranks) all.push_back({&rank.buffer, dispatches ? &rank.dispatch : nullptr, dispatches ? nullptr : &rank.combine, launch.wait_cycles, 0, 0});
    check(cuda_moe_together(launch, all.data(), static_cast<uint32_t>(all.size()), halves), dispatches ? "dispatch together" : "combine together");
  }
  bool casts() const { return options.payload != EP_MOE_BF16; } // to e4m3 with f32 scales
  uint64_t code_bytes() const { return uint64_t{options.hidden} * (casts() ? 1 : 2); }
  uint64_t scale_blocks() const { return (options.hidden + EP_MOE_SCALED_CHANNELS - 1) / EP_MOE_SCALED_CHANNELS; }

  // Different experts for each token, all alike.
  void route() {
    std::mt19937_64 random(options.seed);
    std::vector<int32_t> all(options.experts);
    std::iota(all.begin(), all.end(), 0);
    chosen.assign(world * options.experts, 0);
    most_rows = 0;
    for (size_t r = 0; r < world; ++r) {
      std::vector<int32_t>& own = choices.emplace_back();
      for (uint32_t t = 0; t < options.tokens; ++t) {
        for (uint32_t k = 0; k < options.top_k; ++k) {
          std::swap(all[k], all[k + random() % (options.experts - k)]);
          own.push_back(all[k]);
          ++chosen[r * options.experts + static_cast<size_t>(all[k])];
        }
      }
    }
    for (size_t to = 0; to < world; ++to) {
      uint64_t rows_there = 0;
      for (size_t r = 0; r < world; ++r) {
        for (uint32_t e = 0; e < local; ++e) rows_there += chosen[r * options.experts + to * local + e];
      }
      most_rows = std::max(most_rows, rows_there);
    }
  }

  void lay_out(ep_moe_buffer& b) {
    b.header = {EP_MAGIC_MOE, EP_ABI_MAJOR, EP_ABI_MINOR, options.compact ? EP_MOE_HIGH_THROUGHPUT : EP_MOE_LOW_LATENCY, sizeof b};
    b.payload = options.payload;
    b.result_payload = EP_MOE_BF16;
    b.hidden = options.hidden;
    b.max_tokens = options.tokens;
    b.top_k = options.top_k;
    b.calls = 1;
    b.alignment = 1;
    b.payload_bytes = payload();
    b.row_bytes = (b.payload_bytes + EP_MOE_ROW_ALIGNMENT - 1) / EP_MOE_ROW_ALIGNMENT * EP_MOE_ROW_ALIGNMENT;
    b.result_bytes = b.result_row_bytes = uint64_t{b.hidden} * 2; // hidden is a multiple of 8
    const uint64_t any_routing = uint64_t{std::min(local, options.top_k)} * world * options.tokens;
    b.recv_rows = !options.compact ? uint64_t{local} * world * options.tokens : options.repeated ? any_routing : most_rows;
    b.flags = options.offered ? EP_MOE_ZERO_COPY : 0;
    uint64_t at = 0;
    const auto part = [&](uint64_t bytes) {
      const ep_moe_part made{at, bytes};
      at += (bytes + 255) / 256 * 256;
      return made;
    };
    b.received = part(b.recv_rows * (sizeof(ep_moe_header) + b.row_bytes));
    b.returned = part(EP_MOE_BANKS * uint64_t{options.tokens} * options.top_k * b.result_row_bytes);
    b.staged_tokens = part(options.tokens * b.row_bytes);
    if (options.offered) b.staged_results = part(b.recv_rows * b.result_row_bytes);
    b.counts = part(uint64_t{options.experts} * 8);
    b.starts = part(uint64_t{options.experts} * 8);
    b.refusals = part(world * 8);
  }

  void make_rank(size_t r, const ep_moe_buffer& shape, uint64_t everyone, uint64_t data) {
    rank_state& rank = ranks[r];
    check(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking), "cudaStreamCreate");
    rank.status = reinterpret_cast<ep_kernel_status*>(control(std::vector<ep_kernel_status>(1)));
    ep_moe_buffer& b = rank.buffer = shape;
    b.memory.header = {EP_MAGIC_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, EP_MEMORY_LOAD_STORE, sizeof b.memory};
    b.memory.rank = static_cast<int32_t>(r);
    b.memory.world_size = options.ranks;
    b.memory.byte_length = b.refusals.offset + world * 8;
    b.memory.signal_slots = EP_MOE_SIGNAL_KINDS * world;
    b.memory.peers = everyone;
    b.peers = bits(large<ep_moe_peer>(world));
    std::vector<int32_t> all(options.experts), owner;
    std::iota(all.begin(), all.end(), 0);
    std::vector<uint32_t> begins, one_each(options.experts + 1);
    std::iota(one_each.begin(), one_each.end(), 0);
    for (uint32_t e = 0; e < options.experts; ++e) owner.push_back(static_cast<int32_t>(e / local));
    for (uint32_t i = 0; i <= world; ++i) begins.push_back(i * local);
    b.experts = {control(owner), control(all), control(begins), control(one_each), control(one_each), options.experts, options.experts, local, 0};
    const uint64_t count = uint64_t{options.tokens} * options.top_k;
    std::vector<float> shares;
    for (uint64_t i = 0; i < count; ++i) shares.push_back(static_cast<float>(1 + i * 7919 % 997) / 1024.0f);
    rank.topk = reinterpret_cast<int32_t*>(control(choices[r]));
    rank.weights = reinterpret_cast<float*>(control(shares));
    ep_moe_call call{};
    call.header = {EP_MAGIC_MOE_CALL, EP_ABI_MAJOR, EP_ABI_MINOR, b.header.kind, sizeof call};
    call.routing.topk = bits(rank.topk);
    call.routing.choice_replica = control(std::vector<int32_t>(count));
    call.routing.choice_slot = control(std::vector<int32_t>(count));
    call.routing.send_words = control(std::vector<uint64_t>(options.experts));
    call.routing.send_headers = control(std::vector<ep_moe_header>(count));
    call.routing.send_first = control(std::vector<uint32_t>(options.experts + 1));
    call.routing.recv_count = control(std::vector<int32_t>(local));
    call.routing.block_start = control(std::vector<uint32_t>(local + 1));
    call.routing.layout_range = control(std::vector<uint64_t>(local * world));
    call.routing.src_token = control(std::vector<int32_t>(b.recv_rows));
    call.routing.src_choice = control(std::vector<int32_t>(b.recv_rows));
    call.routing.send_start = control(std::vector<uint32_t>(options.experts));
    call.routing.tokens = options.tokens;
    call.ranks = control(std::vector<uint64_t>(world));
    call.wait_ns = control(std::vector<uint64_t>(world));
    call.status = bits(rank.status);
    call.flags = options.repeated ? EP_MOE_DEVICE_EPOCH : 0;
    const uint64_t channels = uint64_t{options.tokens} * options.hidden;
    rank.x = large<uint16_t>(channels);
    rank.sum = large<uint16_t>(channels);
    rank.y = options.offered ? reinterpret_cast<uint16_t*>(data + b.staged_results.offset) : large<uint16_t>(b.recv_rows * options.hidden);
    fill_tokens<<<128, 256>>>(static_cast<uint32_t>(r), rank.x, options.tokens, options.hidden);
    const uint64_t row = uint64_t{options.hidden} * 2;
    const uint64_t out = options.compact ? data + b.received.offset : bits(large<uint8_t>(b.recv_rows * code_bytes()));
    const uint64_t scales = casts() ? bits(large<float>(b.recv_rows * scale_blocks())) : 0;
    rank.dispatch = {call, bits(rank.x), row, EP_MOE_BF16, 1, out, options.compact ? b.row_bytes : code_bytes(), scales, 1, b.recv_rows,
                     control(std::vector<uint64_t>(local))};
    rank.combine = {call, bits(rank.y), row, bits(rank.weights), {0, 0}, bits(rank.sum), row, EP_MOE_BF16, 0};
    if (options.offered) rank.combine.call.flags |= EP_MOE_OFFERED;
  }

  template <class T> T* large(uint64_t count) {
    T* made = gpu_array<T>(count);
    device.push_back(made);
    return made;
  }
  // Address of what JS fills in or reads: where it lies is what is compared.
  template <class T> uint64_t control(const std::vector<T>& from) {
    if (!options.pinned) {
      device.push_back(gpu_array(from));
      return reinterpret_cast<uint64_t>(device.back());
    }
    void* made = nullptr;
    check(cudaHostAlloc(&made, (from.size() + 1) * sizeof(T), cudaHostAllocMapped), "cudaHostAlloc");
    std::memcpy(made, from.data(), from.size() * sizeof(T));
    host.push_back(made);
    return reinterpret_cast<uint64_t>(made);
  }

  size_t world;
  uint32_t local;
  uint32_t epoch = 0;
  uint64_t most_rows = 0;
  std::vector<std::vector<int32_t>> choices; // of each rank
  std::vector<uint32_t> chosen;              // [rank][expert]
  const int32_t** all_topk = nullptr;
  uint32_t* chosen_by = nullptr;
  unsigned long long* wrong = nullptr;
  std::vector<void*> device, host;
};

} // namespace ep::test
