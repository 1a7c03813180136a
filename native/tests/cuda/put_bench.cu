// How fast blocks of a GPU put over EFA's GIN facade to one queue pair, or to one each, by the pull request's lock and by the lock-free protocol: put_bench [puts of each row, 32768]. What is
// a NIC's lies in host memory (rings and doorbells, written over the bus and never read back; completions there or in GPU memory), all else in GPU memory. Nobody executes the WQEs: one more block for each queue pair of the same kernel
// completes what the doorbell tells of. The ring, the doorbell and the counts are verified. Needs a GPU; built and run by run.mjs.
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "ep/device/cuda_context.h"
#include "ep/device/efa_gin.h"
#include "ep/device/efa_pr_gin.h"

namespace {

constexpr uint32_t depth = 1024;
constexpr uint32_t max_batch = 16;
constexpr uint32_t cqe_words = 2;
constexpr uint64_t put_bytes = 64;
constexpr uint64_t part_bytes = depth * put_bytes;
constexpr uint64_t remote_begin = 0x1000;
constexpr uint64_t local_begin = 0x2000;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// Of one queue pair, in both protocols' structs, in GPU memory. Rank 0 of two.
struct endpoint {
  uint64_t cq[depth * cqe_words];
  uint64_t finished[depth / 64];
  uint64_t marks[depth / 64];
  ep_efa_request requests[depth];
  ep_efa_target targets[2];
  ep_efa_remote remotes[2];
  uint16_t pr_handles[2];
  uint16_t pr_qpns[2];
  uint32_t pr_qkeys[2];
  struct {
    ep_efa_pr_mr head;
    ep_efa_pr_mr_peer peers[2];
  } pr_part;
  alignas(64) uint64_t written;
  alignas(64) ep_efa_qp qp;
  alignas(64) ep_efa_device device;
  alignas(64) ep_efa_memory memory;
  alignas(64) ep_efa_pr_device pr;
  alignas(64) ep_efa_pr_qp pr_qp;
};

// What lies in host memory, at the same address for the GPU.
struct registers {
  uint64_t sq[depth * EP_EFA_WQE_BYTES / 8];
  alignas(64) uint32_t doorbell;
  alignas(64) uint64_t cq[depth * cqe_words]; // where completions do, too
  alignas(64) uint64_t written;
};

void fill(endpoint& e, const endpoint* at, const registers* nic, bool on_host) {
  const auto address = [&](const auto& member) { return reinterpret_cast<uint64_t>(at) + static_cast<uint64_t>(reinterpret_cast<const char*>(&member) - reinterpret_cast<const char*>(&e)); };
  e.targets[0] = {1, 2, 3};
  e.targets[1] = {4, 5, 6};
  e.remotes[0] = {0x3000, 3, 0};
  e.remotes[1] = {remote_begin, 1, 0};
  ep_efa_qp& qp = e.qp;
  qp.sq = reinterpret_cast<uint64_t>(nic->sq);
  qp.doorbell = reinterpret_cast<uint64_t>(&nic->doorbell);
  qp.cq = on_host ? reinterpret_cast<uint64_t>(nic->cq) : address(e.cq);
  qp.written = on_host ? reinterpret_cast<uint64_t>(&nic->written) : address(e.written);
  qp.finished = address(e.finished);
  qp.marks = address(e.marks);
  qp.targets = address(e.targets);
  qp.target_slots = 1;
  qp.depth = depth;
  qp.wqe_bytes = EP_EFA_WQE_BYTES;
  qp.max_batch = max_batch;
  qp.cq_depth = depth;
  qp.cq_entry_bytes = cqe_words * 8;
  qp.qpn = 0x123;
  qp.requests = address(e.requests);
  e.device.world_size = 2;
  e.device.qps = address(e.qp);
  e.device.qp_count = 1;
  e.device.max_message = uint64_t{1} << 30;
  e.device.scratch_remotes = address(e.remotes);
  e.memory.remotes = address(e.remotes);
  e.memory.address = local_begin;
  e.memory.byte_length = part_bytes;
  e.memory.lkey = 2;
  const uint16_t handles[2] = {1, 4};
  const uint16_t qpns[2] = {2, 5};
  const uint32_t qkeys[2] = {3, 6};
  std::memcpy(e.pr_handles, handles, sizeof handles);
  std::memcpy(e.pr_qpns, qpns, sizeof qpns);
  std::memcpy(e.pr_qkeys, qkeys, sizeof qkeys);
  ep_efa_pr_wq& wq = e.pr_qp.sq.wq;
  wq.queue_mask = depth - 1;
  wq.queue_size_shift = static_cast<uint32_t>(__builtin_ctz(depth));
  wq.max_batch = max_batch;
  wq.buf = qp.sq;
  wq.db = qp.doorbell;
  e.pr.data.qp = address(e.pr_qp);
  e.pr.data.address_handles = address(e.pr_handles);
  e.pr.data.remote_qpns = address(e.pr_qpns);
  e.pr.data.qkey = address(e.pr_qkeys);
  e.pr.data.local_cntr_value = qp.written;
  e.pr.data.sq_size = depth;
  e.pr.nranks = 2;
  e.pr_part.head = {2, 2, local_begin};
  e.pr_part.peers[1] = {remote_begin, 1, 0};
}

struct shape {
  bool on_host; // completions
  uint32_t posters; // blocks of one warp
  uint32_t lanes;   // of it that put, together where there are several
  uint32_t queues;
  uint32_t run;  // puts, of which all but the last are aggregated
  uint32_t runs; // of each lane
};

// Completes all that the doorbell tells of, as a NIC does for either protocol: an entry of the CQ for each WQE, which only ours takes out, and a count. By one warp.
__device__ void drain(ep::cuda_context& ctx, endpoint& e, const shape& how, uint64_t* finished) {
  using told_ref = cuda::atomic_ref<uint32_t, cuda::thread_scope_system>;
  using word_ref = cuda::atomic_ref<uint64_t, cuda::thread_scope_system>;
  uint64_t done = 0;
  while (ep::load_acquire(ctx, finished) < how.posters) {
    const uint32_t told = told_ref(*reinterpret_cast<uint32_t*>(e.qp.doorbell)).load(cuda::memory_order_acquire);
    const uint64_t end = done + (ctx.shuffle(told, 0) - static_cast<uint32_t>(done));
    for (uint64_t number = done + ctx.lane(); number < end; number += ctx.lanes()) {
      const uint64_t flags = 0x22u | ((number & depth) == 0 ? 1u : 0u);
      word_ref(reinterpret_cast<uint64_t*>(e.qp.cq)[(number & (depth - 1)) * cqe_words]).store((number & 0xffffu) | flags << 24 | uint64_t{0x123} << 32, cuda::memory_order_release);
    }
    ctx.sync_warp();
    if (ctx.lane() == 0 && end != done) word_ref(*reinterpret_cast<uint64_t*>(e.qp.written)).store(end, cuda::memory_order_release);
    done = end;
  }
}

template <uint32_t Sharing> struct free_way {
  template <class Ctx> __device__ static bool put(Ctx& ctx, endpoint& e, uint32_t lanes, uint64_t at, bool aggregate, ep_kernel_status* status) {
    ep::gin_options options;
    options.aggregate = aggregate;
    const ep::efa_gin<Sharing> gin{e.device};
    if (lanes != 1) return gin.put_lanes(ctx, ctx.lane() < lanes, {nullptr, 2}, 1, e.memory, at, e.memory, at, put_bytes, ep::gin_no_action{}, ep::gin_no_action{}, options, status);
    return gin.put(ctx, ep::thread_coop<Ctx>{ctx}, {nullptr, 2}, 1, e.memory, at, e.memory, at, put_bytes, ep::gin_no_action{}, ep::gin_no_action{}, options, status);
  }
};

struct lock_way {
  template <class Ctx> __device__ static bool put(Ctx& ctx, endpoint& e, uint32_t lanes, uint64_t at, bool aggregate, ep_kernel_status* status) {
    ep::efa_pr_options options;
    options.aggregate = aggregate;
    const ep_efa_pr_mr& part = e.pr_part.head;
    const ep::efa_pr_gin gin{e.pr};
    if (lanes != 1) return gin.put_lanes(ctx, ctx.lane() < lanes, {nullptr, 2}, 1, part, at, part, at, put_bytes, ep::gin_no_action{}, ep::gin_no_action{}, options, status);
    return gin.put(ctx, ep::thread_coop<Ctx>{ctx}, {nullptr, 2}, 1, part, at, part, at, put_bytes, ep::gin_no_action{}, ep::gin_no_action{}, options, status);
  }
};

template <class Way> __global__ void putting(ep::cuda_environment environment, endpoint* endpoints, shape how, uint64_t* finished, ep_kernel_status* status) {
  ep::cuda_context ctx{environment};
  if (ctx.block() >= how.posters) return drain(ctx, endpoints[ctx.block() - how.posters], how, finished);
  if (how.lanes == 1 && ctx.lane() != 0) return;
  endpoint& e = endpoints[ctx.block() % how.queues];
  bool ok = true;
  for (uint64_t i = 0; ok && i < uint64_t{how.runs} * how.run; ++i) ok = Way::put(ctx, e, how.lanes, (i * 32 + ctx.lane()) % depth * put_bytes, (i + 1) % how.run != 0, status);
  if (ctx.lane() == 0) ep::fetch_add(ctx, finished, 1);
}

using kernel = void (*)(ep::cuda_environment, endpoint*, shape, uint64_t*, ep_kernel_status*);

struct way {
  const char* name;
  kernel run;
  bool locks;
  bool own_queues;
};

const way ways[] = {
    {"lock", putting<lock_way>, true, false},
    {"lock-free/device", putting<free_way<EP_EFA_SHARE_DEVICE>>, false, false},
    {"lock, own", putting<lock_way>, true, true},
    {"lock-free/block, own", putting<free_way<EP_EFA_SHARE_BLOCK>>, false, true},
    {"lock-free/thread, own", putting<free_way<EP_EFA_SHARE_THREAD>>, false, true},
};

// Whether the ring holds the last `puts` of them: each in its place with the phase of its round, whole.
bool holds(const way& by, const endpoint& e, const registers& nic, uint64_t puts) {
  if (nic.doorbell != static_cast<uint32_t>(puts)) return false;
  const ep_efa_qp& qp = e.qp;
  if (!by.locks && (qp.taken != puts || qp.rung != puts || qp.broken != EP_EFA_SOUND)) return false;
  if (by.locks && (e.pr.data.submitted_count != puts || e.pr_qp.sq.wq.wqes_pending != 0 || e.pr.data.sq_lock != 0)) return false;
  for (uint64_t number = puts > depth ? puts - depth : 0; number < puts; ++number) {
    const uint64_t* wqe = &nic.sq[(number & (depth - 1)) * (EP_EFA_WQE_BYTES / 8)];
    const uint64_t phase = (number & depth) != 0 ? 1 : 0;
    if ((wqe[0] >> 24 & 1) != phase || (wqe[4] & 0xffffffff) != put_bytes || (wqe[6] & 0xffffffff) != put_bytes) return false;
    if (wqe[5] - remote_begin != wqe[7] - local_begin || wqe[5] - remote_begin >= part_bytes) return false;
  }
  return true;
}

// Puts each second, in millions.
double rate(const way& by, const shape& how) {
  endpoint* endpoints = nullptr;
  registers* nics = nullptr;
  uint64_t* finished = nullptr;
  ep_kernel_status* status = nullptr;
  check(cudaMalloc(&endpoints, how.queues * sizeof(endpoint)), "cudaMalloc");
  check(cudaMalloc(&finished, sizeof *finished), "cudaMalloc");
  check(cudaMemset(finished, 0, sizeof *finished), "cudaMemset");
  check(cudaMalloc(&status, sizeof *status), "cudaMalloc");
  check(cudaMemset(status, 0, sizeof *status), "cudaMemset");
  check(cudaHostAlloc(&nics, how.queues * sizeof(registers), cudaHostAllocMapped), "cudaHostAlloc");
  std::memset(nics, 0, how.queues * sizeof(registers));
  std::vector<endpoint> images(how.queues);
  for (uint32_t q = 0; q < how.queues; ++q) fill(images[q], endpoints + q, nics + q, how.on_host);
  check(cudaMemcpy(endpoints, images.data(), images.size() * sizeof(endpoint), cudaMemcpyHostToDevice), "cudaMemcpy");
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  ep::cuda_environment environment{20'000'000'000, nullptr, 0, nullptr};
  shape argument = how;
  void* arguments[] = {&environment, &endpoints, &argument, &finished, &status};
  check(cudaEventRecord(begin), "cudaEventRecord");
  check(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(by.run), dim3(how.posters + how.queues), dim3(32), arguments), "launch");
  check(cudaEventRecord(end), "cudaEventRecord");
  check(cudaDeviceSynchronize(), "putting");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
  ep_kernel_status seen{};
  check(cudaMemcpy(&seen, status, sizeof seen, cudaMemcpyDeviceToHost), "cudaMemcpy");
  check(cudaMemcpy(images.data(), endpoints, images.size() * sizeof(endpoint), cudaMemcpyDeviceToHost), "cudaMemcpy");
  const uint64_t puts = uint64_t{how.posters} * how.lanes * how.runs * how.run;
  bool right = seen.status == 0;
  for (uint32_t q = 0; q < how.queues; ++q) right = right && holds(by, images[q], nics[q], puts / how.queues);
  if (!right) {
    std::fprintf(stderr, "%s: a queue pair does not hold what was put (status %u at stage %u)\n", by.name, seen.status, seen.stage);
    std::exit(1);
  }
  check(cudaEventDestroy(begin), "cudaEventDestroy");
  check(cudaEventDestroy(end), "cudaEventDestroy");
  cudaFree(endpoints);
  cudaFree(finished);
  cudaFree(status);
  cudaFreeHost(nics);
  return static_cast<double>(puts) / (static_cast<double>(milliseconds) * 1e3);
}

} // namespace

int main(int count, char** words) {
  const uint64_t puts = count > 1 ? std::strtoull(words[1], nullptr, 10) : 32768;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no GPU\n");
    return 2;
  }
  cudaDeviceProp facts{};
  check(cudaGetDeviceProperties(&facts, 0), "cudaGetDeviceProperties");
  std::printf("%s: millions of puts over EFA's facade each second; in brackets: times the lock on the same queue pairs\n", facts.name);
  for (const bool on_host : {false, true}) {
    std::printf("completions in %s memory\n", on_host ? "host" : "GPU");
    for (const uint32_t posters : {1u, 2u, 8u, 16u, 32u, 64u}) {
      for (const auto& [lanes, run] : {std::pair{1u, 1u}, {1u, 4u}, {1u, 16u}, {4u, 1u}, {16u, 1u}}) {
        std::printf(lanes == 1 ? "%2u posters, runs of %2u:" : "%2u posters, lanes   %2u:", posters, lanes == 1 ? run : lanes);
        double lock = 0;
        for (const way& by : ways) {
          const shape wanted{on_host, posters, lanes, by.own_queues ? posters : 1, run, static_cast<uint32_t>(puts / posters / lanes / run)};
          double best = 0;
          for (int round = 0; round < 2; ++round) best = std::max(best, rate(by, wanted));
          if (by.locks) lock = best;
          std::printf("  %s %.2f (%.1f)", by.name, best, best / lock);
        }
        std::printf("\n");
        std::fflush(stdout);
      }
    }
  }
  return 0;
}
