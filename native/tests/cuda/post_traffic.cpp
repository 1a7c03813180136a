// Blocks of a GPU put over the software EFA: its rings, doorbells and completions lie in pinned memory, and a thread of the host steps it.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "../check.hpp"
#include "../device/efa_world.hpp"
#include "ep/device/gin_putvalue.h"
#include "post_kernels.hpp"
#include "post_script.h"
#include "post_traffic.hpp"

using namespace ep::test;

namespace {

uint64_t address_of(const void* at) { return reinterpret_cast<uint64_t>(at); }

// All that is a NIC's, and what it reads and writes, reachable from the device.
class pinned_world {
 public:
  explicit pinned_world(const efa_world_options& wanted) : world(wanted) {
    for (int32_t rank = 0; rank < wanted.size; ++rank) {
      efa_world::rank_state& own = world.at(rank);
      pin(address_of(own.memory->data()), own.memory->data_bytes());
      for (const ep_efa_qp& qp : own.qps) {
        pin(qp.sq, uint64_t{qp.depth} * qp.wqe_bytes);
        pin(qp.doorbell, 4);
        pin(qp.cq, uint64_t{qp.cq_depth} * qp.cq_entry_bytes);
      }
    }
    nic = std::thread([this] {
      while (stop.load(std::memory_order_relaxed) == 0) {
        if (!world.steps.step()) std::this_thread::yield();
      }
    });
  }
  ~pinned_world() {
    finish();
    for (void* each : pinned) gpu_unpin(each);
  }
  pinned_world(const pinned_world&) = delete;
  pinned_world& operator=(const pinned_world&) = delete;

  // The NICs carry out what is left.
  void finish() {
    if (!nic.joinable()) return;
    stop.store(1);
    nic.join();
    EP_CHECK(world.steps.run_all());
  }

  efa_world world;

 private:
  void pin(uint64_t address, uint64_t bytes) {
    constexpr uint64_t page = 4096;
    const uint64_t begin = address / page * page;
    auto* at = reinterpret_cast<void*>(begin);
    const bool ok = gpu_pin(at, (address + bytes - begin + page - 1) / page * page);
    EP_CHECK(ok);
    if (ok) pinned.push_back(at);
  }
  std::vector<void*> pinned;
  std::atomic<uint32_t> stop{0};
  std::thread nic;
};

void await(std::initializer_list<void*> streams) {
  for (void* each : streams) {
    int error = 0;
    while (!gpu_over(each, &error)) std::this_thread::yield();
    EP_CHECK_EQ(error, 0);
  }
}

struct one_range {
  ep_ibgda_range_table head;
  ep_ibgda_range range;
};

} // namespace

void ep::test::traffic(traffic_way way, uint64_t seed, void* stream, void* other) {
  const bool pr = way == traffic_way::pr || way == traffic_way::pr_lanes;
  const bool together = way == traffic_way::gin_lanes || way == traffic_way::pr_lanes;
  traffic_arguments of{};
  of.blocks = 1 + static_cast<uint32_t>(seed % 6);
  of.lanes = together ? 1 + static_cast<uint32_t>(seed * 7 % 32) : 1 + static_cast<uint32_t>(seed % 4);
  of.rounds = together ? 6 : 16;
  of.signals = 1 + static_cast<uint32_t>(seed % 2);
  of.counters = pr ? 0 : static_cast<uint32_t>(seed % 3);
  of.run = 1 + static_cast<uint32_t>(seed % 4);
  of.rows = 1 + seed % 4;
  of.bytes = of.rows * (8 + seed * 13 % 48);
  of.stride = of.bytes / of.rows + (seed % 2 == 0 ? 0 : 8);
  const uint64_t messages = uint64_t{traffic_senders(way, of)} * of.rounds;
  const uint64_t reach = messages * std::max(of.bytes, of.rows * of.stride);

  efa_world_options wanted;
  wanted.seed = seed + 1;
  wanted.watched = false;
  wanted.signals = of.signals;
  wanted.counters = of.counters;
  wanted.bytes = 2 * ((reach + 63) / 64 * 64);
  wanted.depth = (pr ? 8u : 4u) << seed % 4;
  wanted.max_batch = seed % 2 == 0 ? 4 : 2;
  wanted.inline_write = !pr && seed % 2 == 0;
  wanted.wide_ids = !pr && seed % 3 == 0;
  wanted.fragment_bytes = 16;
  wanted.max_message = way == traffic_way::endpoint && seed % 2 == 0 ? 32 : uint64_t{1} << 30;
  pinned_world pinned(wanted);
  efa_world& world = pinned.world;
  efa_world::rank_state& sender = world.at(0);
  efa_world::rank_state& receiver = world.at(1);
  of.half = wanted.bytes / 2;
  const uint64_t step = way == traffic_way::endpoint ? of.rows * of.stride : of.bytes;
  const uint64_t row = of.bytes / of.rows;
  for (uint64_t message = 0; message < messages; ++message) {
    for (uint64_t i = 0; i < of.bytes; ++i) {
      const uint64_t at = way == traffic_way::endpoint ? i / row * of.stride + i % row : i;
      world.data(0)[of.half + message * step + at] = ep::traffic_byte_of(message, i);
    }
  }
  const auto table = std::make_unique<one_range>(one_range{{1, 0}, {sender.part.address, sender.part.address + wanted.bytes, sender.mr.lkey, 0}});
  sender.device.ranges = address_of(table.get());
  sender.part.targets = address_of(sender.targets.data());
  std::vector<ep_peer_view> views(2);
  of.memory.header = {EP_MAGIC_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, EP_MEMORY_EFA, sizeof of.memory};
  of.memory.world_size = 2;
  of.memory.byte_length = wanted.bytes;
  of.memory.signal_slots = wanted.signals;
  of.memory.peers = address_of(views.data());
  of.memory.proxy = address_of(&sender.part);
  std::vector<uint64_t> wrong(33, UINT64_MAX);
  of.wrong = wrong.data();

  traffic_arguments to = of;
  of.device = &sender.device;
  of.part = &sender.part;
  of.pr = &sender.pr;
  of.pr_part = &world.pr_part(0);
  of.status = &sender.status;
  to.device = &receiver.device;
  to.part = &receiver.part;
  to.pr = &receiver.pr;
  to.pr_part = &world.pr_part(1);
  to.status = &receiver.status;
  EP_CHECK_EQ(gpu_receive(other, way, to), 0);
  EP_CHECK_EQ(gpu_send(stream, way, of), 0);
  await({stream, other});
  pinned.finish();

  bool right = sender.status.status == EP_STATUS_OK && receiver.status.status == EP_STATUS_OK && world.clean();
  EP_CHECK_EQ(sender.status.status, static_cast<uint32_t>(EP_STATUS_OK));
  EP_CHECK_EQ(receiver.status.status, static_cast<uint32_t>(EP_STATUS_OK));
  EP_CHECK(world.clean());
  EP_CHECK_EQ(wrong[32], 1u);
  for (uint32_t lane = 0; lane < 32; ++lane) EP_CHECK_EQ(wrong[lane], 0u);
  uint64_t different = 0;
  for (uint64_t i = 0; i < messages * of.bytes; ++i) different += world.data(1)[i] != ep::traffic_byte_of(i / of.bytes, i % of.bytes) ? 1 : 0;
  EP_CHECK_EQ(different, 0u);
  for (uint64_t i = messages * of.bytes; i < of.half; ++i) different += world.data(1)[i] != 0 ? 1 : 0;
  EP_CHECK_EQ(different, 0u);
  uint64_t arrived = 0;
  for (uint32_t signal = 0; signal < of.signals; ++signal) arrived += world.counted(1, 1 + signal).arrived;
  EP_CHECK_EQ(arrived, messages);
  uint64_t written = 0;
  uint64_t posted = 0;
  for (uint32_t i = 0; i < world.qp_count(); ++i) {
    const ep_efa_qp& qp = world.qp(0, i);
    written += world.counted(0, i).written;
    EP_CHECK_EQ(world.counted(0, i).written_failed + world.counted(1, i).arrived_failed, 0u);
    EP_CHECK_EQ(qp.broken, static_cast<uint64_t>(EP_EFA_SOUND));
    if (pr) continue;
    posted += qp.taken;
    EP_CHECK_EQ(qp.rung, qp.taken);
    EP_CHECK_EQ(qp.prefix, qp.taken);
    EP_CHECK_EQ(qp.ringer, 0u);
    EP_CHECK_EQ(qp.poller, 0u);
  }
  if (pr) {
    posted = sender.pr.data.submitted_count;
    for (const ep_efa_pr_counter& one : sender.pr_signals) posted += one.base.submitted_count;
  }
  EP_CHECK_EQ(written, posted);
  if (way != traffic_way::endpoint) EP_CHECK_EQ(posted, messages);
  EP_CHECK(posted >= messages);
  EP_CHECK(world.doorbells() != 0 && world.doorbells() <= posted);
  if (!right || different != 0) std::fprintf(stderr, "traffic %u, seed %llu\n", static_cast<uint32_t>(way), static_cast<unsigned long long>(seed));
}

void ep::test::values(uint64_t seed, void* stream) {
  efa_world_options wanted;
  wanted.seed = seed + 1;
  wanted.watched = false;
  wanted.inline_write = seed % 2 == 0;
  wanted.depth = 4u << seed % 3;
  wanted.max_batch = 4;
  pinned_world pinned(wanted);
  efa_world& world = pinned.world;
  std::vector<uint64_t> behind(1);
  putvalue_arguments of{};
  of.rounds = 10;
  of.behind = behind.data();
  for (int32_t rank = 0; rank < 2; ++rank) {
    of.devices[rank] = &world.at(rank).device;
    of.parts[rank] = &world.part(rank);
    of.status[rank] = &world.at(rank).status;
  }
  EP_CHECK_EQ(gpu_putvalue(stream, of), 0);
  await({stream});
  pinned.finish();
  for (int32_t rank = 0; rank < 2; ++rank) EP_CHECK_EQ(world.at(rank).status.status, static_cast<uint32_t>(EP_STATUS_OK));
  EP_CHECK(world.clean());
  EP_CHECK_EQ(world.counted(1, 1).arrived, of.rounds);
  EP_CHECK_EQ(world.counted(0, 1).arrived, of.rounds);
  for (uint64_t i = 0; i < ep::gin_putvalue_burst; ++i) {
    uint64_t found = 0;
    std::memcpy(&found, world.data(1) + 16 + i * 8, 8);
    EP_CHECK_EQ(found, ep::gin_putvalue_of(of.rounds, ep::gin_putvalue_sentinel + i));
  }
}
