// How fast warps of a GPU post WQEs to one queue pair, or to one each: post_bench [WQEs of each row, 65536]. Rings, doorbell records and completions lie in GPU memory, or in host memory, where software NICs have
// them; counters and marks in GPU memory, the doorbell register in host memory, as a NIC's lies on the bus. Nobody executes the WQEs: one more block of the same kernel advances the completions. Every count
// is verified. Needs a GPU; built and run by run.mjs.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "ep/device/cuda_context.h"
#include "ep/device/mlx5_post.h"

namespace {

constexpr uint32_t depth = 1024;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

template <class T> T* gpu_array(size_t count, int fill) {
  void* made = nullptr;
  check(cudaMalloc(&made, count * sizeof(T)), "cudaMalloc");
  check(cudaMemset(made, fill, count * sizeof(T)), "cudaMemset");
  return static_cast<T*>(made);
}

// What a NIC reads and writes, too, in GPU memory or in the host's.
class rings {
 public:
  explicit rings(bool on_host) : host(on_host) {}
  ~rings() {
    for (void* memory : owned) host ? cudaFreeHost(memory) : cudaFree(memory);
  }
  rings(const rings&) = delete;
  uint64_t take(size_t bytes, int fill) {
    void* made = nullptr;
    if (host) {
      check(cudaHostAlloc(&made, bytes, cudaHostAllocMapped), "cudaHostAlloc");
      std::memset(made, fill, bytes);
    } else {
      made = gpu_array<uint8_t>(bytes, fill);
    }
    owned.push_back(made);
    return reinterpret_cast<uint64_t>(made);
  }

 private:
  bool host;
  std::vector<void*> owned;
};

struct shape {
  bool on_host;
  uint32_t posters; // blocks of one warp
  uint32_t queues;
  uint32_t batch;
  uint32_t posts; // batches of each poster
};

// Each lane of the last block completes what some of the queues' records tell of, as one CQE.
__device__ void drain(ep::cuda_context& ctx, ep_ibgda_qp* qps, const shape& how, uint64_t* finished) {
  while (ep::load_acquire(ctx, finished) < how.posters) {
    for (uint32_t q = ctx.lane(); q < how.queues; q += ctx.lanes()) {
      using half_ref = cuda::atomic_ref<uint32_t, cuda::thread_scope_system>;
      const uint32_t posted = ep::be32(half_ref(reinterpret_cast<uint32_t*>(qps[q].dbr)[1]).load(cuda::memory_order_acquire)) & 0xffff;
      const uint32_t counter = ep::be32(((posted - 1) & 0xffff) << 16);
      auto* tail = reinterpret_cast<uint64_t*>(qps[q].cq + 56);
      const uint64_t before = ep::load_relaxed(ctx, tail);
      const uint64_t now = static_cast<uint64_t>(counter) << 32;
      if (posted == 0 && before == UINT64_MAX) continue;
      if (now != before) ep::store_release(ctx, tail, now);
    }
  }
}

template <class Post, uint32_t Sharing>
__global__ void posting(ep::cuda_environment environment, ep_ibgda_qp* qps, shape how, uint64_t* finished, ep_kernel_status* status) {
  ep::cuda_context ctx{environment};
  if (ctx.block() == how.posters) return drain(ctx, qps, how, finished);
  ep_ibgda_qp& qp = qps[ctx.block() % how.queues];
  const auto build = [](uint32_t i, const ep::mlx5_writer& writer) { writer.write({0x1000 + i * 64u, 1}, {0x2000 + i * 64u, 2}, 64); };
  for (uint32_t i = 0; i < how.posts; ++i) {
    if (Post::template post<Sharing>(ctx, ep::warp_poster<ep::cuda_context>{ctx}, qp, how.batch, build, status) == ep::mlx5_refused) break;
  }
  if (ctx.lane() == 0) ep::fetch_add(ctx, finished, 1);
}

using kernel = void (*)(ep::cuda_environment, ep_ibgda_qp*, shape, uint64_t*, ep_kernel_status*);

// WQEs each second, in millions.
double rate(kernel run, const shape& how) {
  std::vector<ep_ibgda_qp> qps(how.queues);
  rings shared(how.on_host);
  rings registers(true);
  rings counters(false);
  for (ep_ibgda_qp& qp : qps) {
    qp.sq = shared.take(depth * 64, 0);
    qp.cq = shared.take(64, 0xff);
    qp.dbr = shared.take(64, 0);
    qp.bf = registers.take(512, 0);
    qp.marks = counters.take(depth / 8, 0);
    qp.qpn = 0x1234;
    qp.depth = depth;
    qp.cq_depth = 1;
    qp.flags = EP_IBGDA_CQ_COLLAPSED;
  }
  auto* device_qps = gpu_array<ep_ibgda_qp>(how.queues, 0);
  auto* finished = gpu_array<uint64_t>(1, 0);
  auto* status = gpu_array<ep_kernel_status>(1, 0);
  check(cudaMemcpy(device_qps, qps.data(), qps.size() * sizeof(ep_ibgda_qp), cudaMemcpyHostToDevice), "cudaMemcpy");
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  ep::cuda_environment environment{20'000'000'000, nullptr, 0, nullptr};
  shape argument = how;
  void* arguments[] = {&environment, &device_qps, &argument, &finished, &status};
  check(cudaEventRecord(begin), "cudaEventRecord");
  check(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(run), dim3(how.posters + 1), dim3(32), arguments), "launch");
  check(cudaEventRecord(end), "cudaEventRecord");
  check(cudaDeviceSynchronize(), "posting");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
  ep_kernel_status seen{};
  check(cudaMemcpy(&seen, status, sizeof seen, cudaMemcpyDeviceToHost), "cudaMemcpy");
  check(cudaMemcpy(qps.data(), device_qps, qps.size() * sizeof(ep_ibgda_qp), cudaMemcpyDeviceToHost), "cudaMemcpy");
  uint64_t taken = 0;
  for (const ep_ibgda_qp& qp : qps) {
    uint64_t record = 0;
    check(cudaMemcpy(&record, reinterpret_cast<const void*>(qp.dbr), 8, cudaMemcpyDefault), "cudaMemcpy");
    if (__builtin_bswap32(static_cast<uint32_t>(record >> 32)) != (qp.taken & 0xffff)) {
      std::fprintf(stderr, "a queue pair took %llu numbers, rang for others\n", static_cast<unsigned long long>(qp.taken));
      std::exit(1);
    }
    taken += qp.taken;
  }
  const uint64_t wqes = static_cast<uint64_t>(how.posters) * how.posts * how.batch;
  if (seen.status != 0 || taken != wqes) {
    std::fprintf(stderr, "status %u at stage %u, %llu of %llu WQEs\n", seen.status, seen.stage, static_cast<unsigned long long>(taken),
                 static_cast<unsigned long long>(wqes));
    std::exit(1);
  }
  cudaFree(device_qps);
  cudaFree(finished);
  cudaFree(status);
  return static_cast<double>(wqes) / (static_cast<double>(milliseconds) * 1e3);
}

struct way {
  const char* name;
  kernel run;
  bool own_queues;
};

const way ways[] = {
    {"lock", posting<ep::post_under_lock, EP_IBGDA_SHARE_DEVICE>, false},
    {"in-turn/device", posting<ep::post_in_turn, EP_IBGDA_SHARE_DEVICE>, false},
    {"ringer/device", posting<ep::post_by_ringer, EP_IBGDA_SHARE_DEVICE>, false},
    {"lock, own", posting<ep::post_under_lock, EP_IBGDA_SHARE_DEVICE>, true},
    {"in-turn/block, own", posting<ep::post_in_turn, EP_IBGDA_SHARE_BLOCK>, true},
    {"in-turn/thread, own", posting<ep::post_in_turn, EP_IBGDA_SHARE_THREAD>, true},
    {"ringer/block, own", posting<ep::post_by_ringer, EP_IBGDA_SHARE_BLOCK>, true},
};

} // namespace

int main(int count, char** words) {
  const uint64_t wqes = count > 1 ? std::strtoull(words[1], nullptr, 10) : 65536;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no GPU\n");
    return 2;
  }
  cudaDeviceProp facts{};
  check(cudaGetDeviceProperties(&facts, 0), "cudaGetDeviceProperties");
  std::printf("%s: millions of WQEs posted each second; in brackets: times the lock on the same queue pairs\n", facts.name);
  for (const bool on_host : {false, true}) {
    std::printf("rings in %s memory\n", on_host ? "host" : "GPU");
    for (const uint32_t posters : {1u, 2u, 8u, 16u, 32u, 64u, 128u}) {
      for (const uint32_t batch : {1u, 4u, 16u, 64u}) {
        std::printf("%2u posters, batch %2u:", posters, batch);
        double lock = 0;
        for (const way& how : ways) {
          const shape wanted{on_host, posters, how.own_queues ? posters : 1, batch, static_cast<uint32_t>(wqes / posters / batch)};
          double best = 0;
          for (int round = 0; round < 2; ++round) best = std::max(best, rate(how.run, wanted));
          if (std::strncmp(how.name, "lock", 4) == 0) lock = best;
          std::printf("  %s %.2f (%.1f)", how.name, best, best / lock);
        }
        std::printf("\n");
        std::fflush(stdout);
      }
    }
  }
  return 0;
}
