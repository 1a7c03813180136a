// What the emulator itself costs: requests executed each second and bytes moved, by one NIC thread. Figures of the emulator, never of a network.
#include <algorithm>
#include <cstdio>

#include <time.h>

#include "nic/rig.hpp"

using namespace ep;
using namespace ep::test;

extern "C" {
void ep_copy(void* dst, const void* src, uint64_t bytes, int non_temporal);
void ep_copy_fence(void);
}

namespace {

constexpr uint64_t large = 64 << 10;
constexpr uint64_t region = 64 << 20; // beyond the caches

// Of this thread: other processes may use the machine.
int64_t cpu_now_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// Lets a's NIC do what it has been told, on this thread, and returns how long that took.
int64_t executed_ns(pair_of_nics& pair) {
  const int64_t first = cpu_now_ns();
  while (pair.a_node.device->poll(1)) {
  }
  const int64_t last = cpu_now_ns();
  if (pair.a.completed().opcode != EP_MLX5_CQE_REQ || pair.a.completed().counter != pair.a.last) std::abort();
  return last - first;
}

double requests_each_second(pair_of_nics& pair, uint64_t count, uint32_t batch) {
  int64_t spent = 0;
  for (uint64_t sent = 0; sent < count; sent += batch) {
    for (uint32_t i = 0; i < batch; ++i) {
      const uint64_t value = sent + i;
      wqe_bytes wqe = inline_wqe(pair.a, pair.remote(value % 512 * 8), pair.rkey(), &value, 8);
      if (i + 1 != batch) wqe[11] = 0;
      pair.a.put(wqe);
    }
    pair.a.ring();
    spent += executed_ns(pair);
  }
  for (uint64_t i = count - 512; i < count; ++i) {
    if (pair.b_node.word(i % 512 * 8).load() != i) std::abort();
  }
  return static_cast<double>(count) / (static_cast<double>(spent) * 1e-9);
}

double write_bytes_each_second(pair_of_nics& pair, uint64_t count) {
  int64_t spent = 0;
  for (uint64_t i = 0; i < count; i += 32) {
    for (uint64_t j = i; j < i + 32; ++j) {
      pair.a.put(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(j * large % region), pair.rkey(), {pair.local(j * large % region, large)}));
    }
    pair.a.ring();
    spent += executed_ns(pair);
  }
  if (std::memcmp(pair.a_node.data(), pair.b_node.data(), region) != 0) std::abort();
  return static_cast<double>(count * large) / (static_cast<double>(spent) * 1e-9);
}

double copy_bytes_each_second(pair_of_nics& pair, uint64_t count, bool non_temporal) {
  const int64_t first = cpu_now_ns();
  for (uint64_t i = 0; i < count; ++i) ep_copy(pair.b_node.data() + i * large % region, pair.a_node.data() + i * large % region, large, non_temporal ? 1 : 0);
  ep_copy_fence();
  return static_cast<double>(count * large) / (static_cast<double>(cpu_now_ns() - first) * 1e-9);
}

} // namespace

int main() {
  queue_options options;
  options.log_sq = 10;
  soft_options devices;
  devices.threaded = false;
  pair_of_nics small(1, options, devices);
  requests_each_second(small, 1 << 14, 32);
  for (const uint32_t batch : {1u, 8u, 512u}) std::printf("8-byte inline writes, %2u a doorbell: %.2f M/s\n", batch, requests_each_second(small, 1 << 20, batch) * 1e-6);

  node a(devices, region);
  node b(devices, region);
  pair_of_nics bulk(2, options, devices);
  bulk.a_node.memory = a.memory; // the rig's own segments are small
  bulk.b_node.memory = b.memory;
  bulk.a_node.mr = must(bulk.a_node.device->reg_mr(bulk.a_node.pd, {bulk.a_node.address(), region}, node::all_rights));
  bulk.b_node.mr = must(bulk.b_node.device->reg_mr(bulk.b_node.pd, {bulk.b_node.address(), region}, node::all_rights));
  for (uint64_t i = 0; i < region; i += 8) bulk.a_node.word(i) = i * 0x9e3779b97f4a7c15;
  const uint64_t count = 3 * region / large;
  write_bytes_each_second(bulk, region / large);
  const double cached = copy_bytes_each_second(bulk, count, false);
  const double streamed = copy_bytes_each_second(bulk, count, true);
  const double written = write_bytes_each_second(bulk, count);
  std::printf("64 KiB writes: %.2f GB/s; a thread copies %.2f GB/s through the caches, %.2f past them; ratio to the better %.2f\n", written * 1e-9, cached * 1e-9,
              streamed * 1e-9, written / std::max(cached, streamed));
  return 0;
}
