#include "speed.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <sched.h>
#include <time.h>

#include "core/ibgda/queues.hpp"
#include "core/segment.hpp"
#include "core/waiting.hpp"
#include "ep/device/mlx5_post.h"
#include "soft_device.hpp"

namespace ep::nic {
namespace {

constexpr uint32_t depth = 1024;
constexpr uint32_t large = 64 << 10;
constexpr uint32_t large_batch = 32;
constexpr uint64_t write_bytes = 64;
constexpr int64_t most_ns = 20'000'000'000;

int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
// Of this thread: other processes may use the machine.
int64_t cpu_now_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

failure wrong(const std::string& what) { return {EP_STATUS_SYSTEM, EPROTO, "software NIC: " + what}; }

// Posters give the core away between looks: the NIC's thread may want it.
struct poster_context {
  const int64_t deadline = now_ns() + most_ns;
  void point() const {}
  template <class Look> bool wait_for(const Look& look, uint64_t, int32_t, uint32_t, ep_kernel_status*) const {
    uint64_t found = 0;
    for (uint32_t looks = 1; !look(&found); ++looks) {
      cpu_relax();
      if (looks % 64 != 0) continue;
      sched_yield();
      if (now_ns() > deadline) return false;
    }
    return true;
  }
  void fail(ep_kernel_status*, uint32_t, int32_t, uint32_t, uint64_t, uint64_t) const {}
  void wake(uint64_t word) const { wake_notify(reinterpret_cast<ep_wake_word*>(word)); }
};

// A rank connected to itself, with one memory.
struct lone_rank {
  std::unique_ptr<soft_driver> driver;
  std::unique_ptr<ibgda::control_memory> control = ibgda::host_control_memory();
  std::shared_ptr<segment> memory;
  std::unique_ptr<ibgda::rank_queues> queues;
  ibgda::registered_memory registered;
  soft_device* device = nullptr; // of the queues

  ep_ibgda_qp& qp(uint32_t index) const { return reinterpret_cast<ep_ibgda_qp*>(reinterpret_cast<const ep_ibgda_device*>(queues->device_address())->qps)[index]; }
  mlx5_place local(uint64_t offset) const { return {reinterpret_cast<uint64_t>(memory->data()) + offset, registered.mr.lkey}; }
  mlx5_place remote(uint64_t offset) const { return {reinterpret_cast<uint64_t>(memory->data()) + offset, registered.mr.rkey}; }

  static result<std::unique_ptr<lone_rank>> open(bool threaded, uint32_t pairs, uint64_t bytes) {
    auto made = std::make_unique<lone_rank>();
    soft_options options;
    options.threaded = threaded;
    made->driver = std::make_unique<soft_driver>(options);
    auto port = ibgda::device_open(*made->driver, {});
    if (!port.ok()) return port.why();
    made->device = dynamic_cast<soft_device*>(port.value().device.get());
    ibgda::queue_options queues;
    queues.qps_per_peer = pairs;
    queues.depth = depth;
    queues.nic_wake = threaded ? reinterpret_cast<uint64_t>(made->device->doorbell_wake()) : 0;
    ibgda::control_memory* const sources[] = {made->control.get()};
    auto created = ibgda::rank_queues::create(std::move(port.value()), queues, sources);
    if (!created.ok()) return created.why();
    made->queues = std::move(created.value());
    auto memory = segment::create(bytes);
    if (!memory.ok()) return memory.why();
    made->memory = memory.value();
    auto registered = made->queues->register_memory({reinterpret_cast<uint64_t>(made->memory->data()), bytes}, dl::MLX5_ACCESS_LOCAL_WRITE | dl::MLX5_ACCESS_REMOTE_WRITE);
    if (!registered.ok()) return registered.why();
    made->registered = registered.value();
    auto connected = made->queues->connect(std::vector<std::vector<uint8_t>>{made->queues->connection()});
    if (!connected.ok()) return connected.why();
    return made;
  }
};

using job = bool (*)(const poster_context&, const lone_rank&, ep_ibgda_qp&, uint32_t batch, uint64_t posts);

template <class Post, uint32_t Sharing> bool executed(const poster_context& ctx, const lone_rank& rank, ep_ibgda_qp& qp, uint32_t batch, uint64_t posts) {
  const lone_poster<const poster_context> group{ctx};
  const auto build = [&](uint32_t i, const mlx5_writer& writer) { writer.write(rank.remote(depth * write_bytes + i * write_bytes), rank.local(i * write_bytes), write_bytes); };
  for (uint64_t i = 0; i < posts; i += batch) {
    if (Post::template post<Sharing>(ctx, group, qp, batch, build, nullptr) == mlx5_refused) return false;
  }
  return true;
}

// In the order of post_ways().
constexpr job jobs[] = {executed<post_under_lock, EP_IBGDA_SHARE_DEVICE>, executed<post_in_turn, EP_IBGDA_SHARE_DEVICE>, executed<post_by_ringer, EP_IBGDA_SHARE_DEVICE>,
                        executed<post_in_turn, EP_IBGDA_SHARE_BLOCK>,     executed<post_in_turn, EP_IBGDA_SHARE_THREAD>};

// Posts on one queue pair by this thread.
template <class Build> bool post(const lone_rank& rank, uint32_t count, const Build& build) {
  const poster_context ctx;
  return post_in_turn::post<EP_IBGDA_SHARE_THREAD>(ctx, lone_poster<const poster_context>{ctx}, rank.qp(0), count, build, nullptr) != mlx5_refused;
}

// Lets the NIC do what it has been told, on this thread; adds to `spent` how long that took. False: not all of it has completed.
bool execute(const lone_rank& rank, int64_t& spent) {
  const int64_t first = cpu_now_ns();
  while (rank.device->poll(1)) {
  }
  spent += cpu_now_ns() - first;
  const poster_context ctx;
  return mlx5_poll<EP_IBGDA_SHARE_THREAD>(ctx, rank.qp(0)) == rank.qp(0).ready && rank.device->counts().violations == 0;
}

double per_second(uint64_t count, int64_t spent) { return static_cast<double>(count) / (static_cast<double>(std::max<int64_t>(spent, 1)) * 1e-9); }

result<double> inline_writes(uint32_t batch, uint64_t requests) {
  auto opened = lone_rank::open(false, 1, 4096);
  if (!opened.ok()) return opened.why();
  const lone_rank& rank = *opened.value();
  int64_t spent = 0;
  uint64_t sent = 0;
  for (; sent < requests; sent += batch) {
    const auto build = [&](uint32_t i, const mlx5_writer& writer) {
      const uint64_t value = sent + i;
      writer.write_inline(rank.remote(value % 512 * 8), &value, 8);
    };
    if (!post(rank, batch, build) || !execute(rank, spent)) return wrong("an inline write did not complete");
  }
  for (uint64_t value = sent - std::min<uint64_t>(sent, 512); value < sent; ++value) {
    if (reinterpret_cast<const uint64_t*>(rank.memory->data())[value % 512] != value) return wrong("an inline write left another value");
  }
  return per_second(sent, spent);
}

} // namespace

result<double> executed_posts_per_second(const ibgda::post_load& load) {
  const auto ways = ibgda::post_ways();
  if (load.way >= ways.size() || load.posters < 1 || load.batch < 1 || load.batch > depth / 2) return failure{EP_STATUS_INVALID, 0, "way, posters or batch are out of range"};
  const bool together = ways[load.way].shared;
  auto opened = lone_rank::open(true, together ? 1 : load.posters, 2 * depth * write_bytes);
  if (!opened.ok()) return opened.why();
  const lone_rank& rank = *opened.value();
  for (uint64_t i = 0; i < depth * write_bytes; ++i) rank.memory->data()[i] = static_cast<uint8_t>(i * 31 + 7);
  const uint64_t each = load.posts / load.posters / load.batch * load.batch;
  std::atomic<uint32_t> waiting{load.posters};
  std::atomic<int64_t> begin{INT64_MAX};
  std::atomic<bool> right{true};
  std::vector<std::thread> workers;
  for (uint32_t i = 0; i < load.posters; ++i) {
    workers.emplace_back([&, i] {
      waiting.fetch_sub(1);
      while (waiting.load() != 0) sched_yield();
      const int64_t first = now_ns();
      for (int64_t seen = begin.load(); first < seen && !begin.compare_exchange_weak(seen, first);) {}
      if (!jobs[load.way](poster_context{}, rank, rank.qp(together ? 0 : i), load.batch, each)) right.store(false);
    });
  }
  for (std::thread& worker : workers) worker.join();
  const poster_context ctx;
  for (uint32_t i = 0; i < (together ? 1 : load.posters) && right.load(); ++i) {
    if (!mlx5_wait_done<EP_IBGDA_SHARE_DEVICE>(ctx, rank.qp(i), rank.qp(i).taken, EP_STAGE_ROOM, nullptr)) right.store(false);
  }
  const int64_t last = now_ns();
  if (!right.load()) return wrong("a poster of " + std::string(ways[load.way].name) + " was refused, or waited in vain");
  const engine_counts counts = rank.device->counts();
  if (counts.requests != each * load.posters || counts.violations != 0) return wrong(std::to_string(counts.requests) + " requests executed of " + std::to_string(each * load.posters));
  if (each != 0 && std::memcmp(rank.memory->data(), rank.memory->data() + depth * write_bytes, load.batch * write_bytes) != 0) return wrong("what was written is not what was sent");
  return per_second(each * load.posters, last - begin.load());
}

result<nic_speed> software_nic_speed(uint32_t batch, uint64_t requests, uint64_t region) {
  if (batch < 1 || batch > depth / 2 || region == 0 || region % (uint64_t{large} * large_batch) != 0) return failure{EP_STATUS_INVALID, 0, "batch or region are out of range"};
  nic_speed speed;
  auto rate = inline_writes(batch, requests);
  if (!rate.ok()) return rate.why();
  speed.requests_per_second = rate.value();
  auto opened = lone_rank::open(false, 1, 2 * region);
  if (!opened.ok()) return opened.why();
  const lone_rank& rank = *opened.value();
  uint8_t* from = rank.memory->data();
  uint8_t* to = from + region;
  for (uint64_t i = 0; i < region / 8; ++i) reinterpret_cast<uint64_t*>(from)[i] = i * 0x9e3779b97f4a7c15;
  std::memset(to, 0, region);
  int64_t spent = 0;
  for (uint64_t at = 0; at < region; at += uint64_t{large} * large_batch) {
    const auto build = [&](uint32_t i, const mlx5_writer& writer) {
      const uint64_t offset = at + uint64_t{i} * large;
      writer.write(rank.remote(region + offset), rank.local(offset), large);
    };
    if (!post(rank, large_batch, build) || !execute(rank, spent)) return wrong("a large write did not complete");
  }
  if (std::memcmp(from, to, region) != 0) return wrong("large writes left other bytes");
  speed.bytes_per_second = per_second(region, spent);
  for (const int non_temporal : {0, 1}) {
    const int64_t first = cpu_now_ns();
    for (uint64_t at = 0; at < region; at += large) ep_copy(to + at, from + at, large, non_temporal);
    ep_copy_fence();
    speed.copy_per_second = std::max(speed.copy_per_second, per_second(region, cpu_now_ns() - first));
  }
  return speed;
}

} // namespace ep::nic
