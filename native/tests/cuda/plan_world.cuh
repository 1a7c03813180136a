// Ranks as streams of one device, with a random plan of query and key-value shards: memory, sources whose bytes say where they come from, and a check of every
// received row on the device. What the graph test and the benchmark run on.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../../core/device/compat.hpp"
#include "../../cuda/kernels.hpp"
#include "ep/device/cuda_context.h"

namespace ep::test {

// HAZARD: before the first call of CUDA. Ranks wait for each other, and of 8 hardware queues, the default, two streams may share one: then a rank stands behind the
// one that waits for it (seen with 8 ranks under compute-sanitizer).
inline void use_all_queues() { setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); }

inline void check(int error, const char* what) {
  if (error == 0) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(error)));
  std::exit(1);
}

template <class T> T* gpu_array(uint64_t count) {
  void* made = nullptr;
  check(cudaMalloc(&made, (count + 1) * sizeof(T)), "cudaMalloc");
  check(cudaMemset(made, 0, (count + 1) * sizeof(T)), "cudaMemset");
  return static_cast<T*>(made);
}
template <class T> T* gpu_array(const std::vector<T>& from) {
  T* made = gpu_array<T>(from.size());
  if (!from.empty()) check(cudaMemcpy(made, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return made;
}
template <class T> uint64_t bits(T* address) { return reinterpret_cast<uint64_t>(address); }

struct plan_options {
  int32_t ranks = 4;
  uint32_t tokens = 1024;          // of each rank
  uint32_t shard = 256;            // most tokens of one shard
  uint64_t row_bytes[2] = {4096, 4096}; // query, key-value; multiples of 16
  uint64_t gap_bytes = 0;          // between rows of a source
  uint32_t replicas = 2;           // of a key-value shard, at most
  uint64_t chunk_bytes = 256 << 10;
  uint64_t seed = 1;
};

// Rows of one source that arrive at one rank.
struct arriving_run {
  uint64_t src_row;
  uint64_t dst_row;
  uint64_t rows;
  int32_t src_rank;
  int32_t part;
};

__host__ __device__ inline uint32_t source_word(uint32_t epoch, uint32_t rank, uint32_t part, uint64_t row, uint32_t word) {
  uint32_t h = epoch * 0x9e3779b1u ^ (rank * 2 + part) * 0x85ebca77u ^ static_cast<uint32_t>(row) * 0xc2b2ae3du ^ word * 0x27d4eb2fu;
  h = (h ^ (h >> 15)) * 0x2c1b3c6du;
  return h ^ (h >> 13);
}

// The number of the step, which sources and checks of all ranks count alike, lies on the device: a graph can be replayed.
__global__ void fill_sources(const uint32_t* step, uint32_t rank, uint8_t* source, uint64_t rows, uint64_t row_bytes, uint64_t stride, uint32_t part) {
  const uint32_t words = static_cast<uint32_t>(row_bytes / 4);
  for (uint64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    auto* to = reinterpret_cast<uint32_t*>(source + row * stride);
    for (uint32_t word = threadIdx.x; word < words; word += blockDim.x) to[word] = source_word(*step, rank, part, row, word);
  }
}

__global__ void check_runs(const uint32_t* step, const arriving_run* runs, uint32_t run_count, const uint8_t* received, uint64_t part_offset1, uint64_t row0,
                           uint64_t row1, unsigned long long* wrong) {
  for (uint32_t i = blockIdx.x; i < run_count; i += gridDim.x) {
    const arriving_run run = runs[i];
    const uint64_t row_bytes = run.part == 0 ? row0 : row1;
    const uint8_t* tensor = received + (run.part == 0 ? 0 : part_offset1);
    const uint64_t words = row_bytes / 4 * run.rows;
    for (uint64_t at = threadIdx.x; at < words; at += blockDim.x) {
      const uint64_t row = at / (row_bytes / 4);
      const auto word = static_cast<uint32_t>(at % (row_bytes / 4));
      const uint32_t found = reinterpret_cast<const uint32_t*>(tensor + (run.dst_row + row) * row_bytes)[word];
      if (found != source_word(*step, static_cast<uint32_t>(run.src_rank), static_cast<uint32_t>(run.part), run.src_row + row, word)) atomicAdd(wrong, 1ull);
    }
  }
}

__global__ void count_step(uint32_t* step) { *step += 1; }

class plan_world {
 public:
  struct shard {
    uint32_t tokens;
    int32_t query_to;
    std::vector<int32_t> key_value_to;
  };

  explicit plan_world(const plan_options& wanted) : options(wanted), world(static_cast<size_t>(wanted.ranks)) {
    std::mt19937_64 random(wanted.seed);
    shards.resize(world);
    entries.resize(world, std::vector<std::vector<ep_dispatch_entry>>(2));
    arriving.resize(world);
    received_rows.assign(2, std::vector<uint64_t>(world));
    // Servers take turns, so that all get the same number of shards.
    uint64_t turn = 0;
    for (size_t home = 0; home < world; ++home) {
      for (uint32_t left = wanted.tokens; left != 0;) {
        const auto tokens = static_cast<uint32_t>(std::min<uint64_t>(left, 1 + random() % wanted.shard));
        shard made{tokens, static_cast<int32_t>(turn++ % world), {}};
        const uint64_t copies = 1 + random() % wanted.replicas;
        for (uint64_t i = 0; i < copies && i < world; ++i) made.key_value_to.push_back(static_cast<int32_t>((static_cast<uint64_t>(made.query_to) + i) % world));
        shards[home].push_back(made);
        left -= tokens;
      }
    }
    for (size_t home = 0; home < world; ++home) {
      uint64_t row = 0;
      for (const shard& each : shards[home]) {
        add(home, 0, row, each.tokens, each.query_to);
        for (const int32_t to : each.key_value_to) add(home, 1, row, each.tokens, to);
        row += each.tokens;
      }
    }
    for (int part = 0; part < 2; ++part) {
      chunk_rows[part] = static_cast<uint32_t>(std::max<uint64_t>(1, wanted.chunk_bytes / wanted.row_bytes[part]));
      for (const uint64_t rows : received_rows[static_cast<size_t>(part)]) capacity_rows[part] = std::max(capacity_rows[part], rows);
    }
    make_device();
  }

  // Everything large; the rest goes with the process.
  void free_device() {
    for (rank_state& rank : ranks) {
      cudaFree(rank.memory);
      for (uint8_t* source : rank.source) cudaFree(source);
      cudaStreamDestroy(rank.stream);
    }
    ranks.clear();
  }

  uint64_t payload_bytes() const { return payload; }
  uint64_t lease_bytes() const { return capacity_rows[0] * options.row_bytes[0] + capacity_rows[1] * options.row_bytes[1]; }

  struct rank_state {
    uint8_t* memory = nullptr;
    uint64_t* signals = nullptr;
    uint8_t* source[2] = {};
    arriving_run* runs = nullptr;
    ep_device_call call{};
    ep_call_counts counts{};
    ep_device_grant grant{};
    ep_lease_counts* lease = nullptr;
    uint64_t* arrived = nullptr;
    uint32_t* step = nullptr;
    ep_kernel_status* status = nullptr; // pinned
    cudaStream_t stream = nullptr;
  };
  std::vector<rank_state> ranks;

  void count(size_t rank) { count_step<<<1, 1, 0, ranks[rank].stream>>>(ranks[rank].step); }
  void fill(size_t rank) {
    for (uint32_t part = 0; part < 2; ++part) {
      fill_sources<<<64, 256, 0, ranks[rank].stream>>>(ranks[rank].step, static_cast<uint32_t>(rank), ranks[rank].source[part], options.tokens, options.row_bytes[part],
                                                       options.row_bytes[part] + options.gap_bytes, part);
    }
  }
  ep_cuda_launch how(size_t rank, uint32_t blocks, uint32_t lanes) const { return {ranks[rank].stream, blocks, lanes, 20'000'000'000, 0, 0}; }
  void begin(size_t rank) { check(cuda_begin_call(how(rank, 1, 32), ranks[rank].counts), "begin_call"); }
  void dispatch(size_t rank, uint32_t blocks, uint32_t lanes) { check(cuda_dispatch(how(rank, blocks, lanes), ranks[rank].call), "dispatch"); }
  void grant(size_t rank) { check(cuda_grant(how(rank, 1, 32), ranks[rank].grant), "grant"); }
  void verify(size_t rank, const uint8_t* received) {
    check_runs<<<64, 256, 0, ranks[rank].stream>>>(ranks[rank].step, ranks[rank].runs, static_cast<uint32_t>(arriving[rank].size()), received,
                                                   capacity_rows[0] * options.row_bytes[0], options.row_bytes[0], options.row_bytes[1], wrong);
  }
  void verify(size_t rank) { verify(rank, ranks[rank].memory); }
  void poison(size_t rank) { check(cudaMemsetAsync(ranks[rank].memory, 0xee, lease_bytes(), ranks[rank].stream), "cudaMemsetAsync"); }
  void finish() const {
    for (const rank_state& rank : ranks) check(cudaStreamSynchronize(rank.stream), "cudaStreamSynchronize");
    for (size_t rank = 0; rank < world; ++rank) {
      const ep_kernel_status& status = *ranks[rank].status;
      if (status.status == 0) continue;
      std::fprintf(stderr, "rank %zu: status %u, awaited rank %d at stage %u: expected %llu, found %llu\n", rank, status.status, status.rank, status.stage,
                   static_cast<unsigned long long>(status.expected), static_cast<unsigned long long>(status.found));
      std::exit(1);
    }
  }
  uint64_t wrong_words() const {
    unsigned long long found = 0;
    check(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return found;
  }

  const plan_options options;
  std::vector<std::vector<shard>> shards;
  std::vector<std::vector<std::vector<ep_dispatch_entry>>> entries; // [rank][part]
  std::vector<std::vector<arriving_run>> arriving;
  std::vector<std::vector<uint64_t>> received_rows; // [part][rank]
  uint64_t capacity_rows[2] = {};
  uint32_t chunk_rows[2] = {};
  unsigned long long* wrong = nullptr;

 private:
  void add(size_t home, int part, uint64_t row, uint32_t tokens, int32_t to) {
    uint64_t& at = received_rows[static_cast<size_t>(part)][static_cast<size_t>(to)];
    entries[home][static_cast<size_t>(part)].push_back({row, at, tokens, to, 0});
    arriving[static_cast<size_t>(to)].push_back({row, at, tokens, static_cast<int32_t>(home), part});
    at += tokens;
    payload += tokens * options.row_bytes[part];
  }

  void make_device() {
    wrong = gpu_array<unsigned long long>(1);
    ranks.resize(world);
    std::vector<ep_peer_view> views;
    for (rank_state& rank : ranks) {
      rank.memory = gpu_array<uint8_t>(lease_bytes());
      rank.signals = gpu_array<uint64_t>(2 * world);
      views.push_back({bits(rank.memory), bits(rank.signals), 0, 0});
    }
    ep_peer_view* everyone = gpu_array(views);
    for (size_t self = 0; self < world; ++self) {
      rank_state& rank = ranks[self];
      std::vector<uint64_t> chunks(world);
      ep_memory_handle memory{};
      memory.header = {EP_MAGIC_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, EP_MEMORY_LOAD_STORE, sizeof memory};
      memory.rank = static_cast<int32_t>(self);
      memory.world_size = options.ranks;
      memory.byte_length = lease_bytes();
      memory.signal_slots = 2 * world;
      memory.peers = bits(everyone);
      for (size_t from = 0; from < world; ++from) {
        for (size_t part = 0; part < 2; ++part) {
          for (const ep_dispatch_entry& entry : entries[from][part]) {
            if (entry.dst_rank == static_cast<int32_t>(self)) chunks[from] += (entry.rows + chunk_rows[part] - 1) / chunk_rows[part];
          }
        }
      }
      for (size_t part = 0; part < 2; ++part) {
        std::vector<ep_dispatch_entry>& own = entries[self][part];
        uint32_t first = 0;
        for (ep_dispatch_entry& entry : own) {
          entry.first_chunk = first;
          first += static_cast<uint32_t>((entry.rows + chunk_rows[part] - 1) / chunk_rows[part]);
        }
        const uint64_t stride = options.row_bytes[part] + options.gap_bytes;
        rank.source[part] = gpu_array<uint8_t>(options.tokens * stride);
        rank.call.parts[part] = {bits(rank.source[part]), stride, options.row_bytes[part], part == 0 ? 0 : capacity_rows[0] * options.row_bytes[0],
                                 bits(gpu_array(own)), static_cast<uint32_t>(own.size()), chunk_rows[part], first, 0};
      }
      rank.runs = gpu_array(arriving[self]);
      rank.step = gpu_array<uint32_t>(1);
      rank.arrived = gpu_array<uint64_t>(world);
      const ep_lease_counts lease{0, bits(rank.arrived), bits(gpu_array<uint64_t>(world))};
      rank.lease = gpu_array(std::vector<ep_lease_counts>{lease});
      rank.counts = {bits(rank.lease), bits(gpu_array(chunks)), bits(gpu_array<uint64_t>(world)), bits(gpu_array<uint64_t>(world)), options.ranks, 0};
      check(cudaHostAlloc(&rank.status, sizeof *rank.status, cudaHostAllocMapped), "cudaHostAlloc");
      std::memset(rank.status, 0, sizeof *rank.status);
      ep_dispatch_args& args = rank.call.args;
      args.header = {EP_MAGIC_DISPATCH, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof args};
      args.memory = memory;
      args.part_count = 2;
      args.credit_slot = world;
      args.arrivals = rank.counts.arrivals;
      args.credits = rank.counts.credits;
      args.status = bits(rank.status);
      rank.grant = {memory, world};
      check(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  size_t world;
  uint64_t payload = 0;
};

} // namespace ep::test
