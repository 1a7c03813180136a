// Ranks inside of one process, each with a software EFA that a test steps, and kernels that post to it: by the simt executor, which interleaves them with the NICs'
// events under one seed.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/segment.hpp"
#include "core/simt/simt.hpp"
#include "device/world.hpp"
#include "ep/abi/efa_pr.h"
#include "ep/device/efa_gin.h"
#include "ep/device/efa_pr_gin.h"
#include "nic/efa/stepper.hpp"
#include "nic/efa/watched.hpp"

namespace ep::test {

using efa_context = nic::efa::watched_context<simt_context>;

struct efa_world_options {
  int32_t size = 2;
  uint64_t bytes = 4096; // of each rank's part
  uint32_t signals = 1;
  uint32_t counters = 1;
  uint32_t depth = 16;
  uint32_t max_batch = 16;   // of the queue, in WQEs of its size
  bool inline_write = true;  // values travel within WQEs of 128 bytes
  bool wide_ids = false;
  bool watched = true;       // stores go through a write-combining buffer of each lane
  uint32_t fragment_bytes = 16;
  uint64_t max_message = uint64_t{1} << 30;
  uint64_t seed = 1;
  uint32_t sharing = EP_EFA_SHARE_DEVICE;
  uint32_t cq_depth = 0;     // 0: that of the queue
  bool trace = false;
};

template <class T> T expect(result<T>&& made) {
  if (!made.ok()) throw std::runtime_error(made.why().message);
  return std::move(made.value());
}
inline void expect(result<nothing>&& made) {
  if (!made.ok()) throw std::runtime_error(made.why().message);
}

class efa_world {
 public:
  // Counters of one queue pair, as the NIC keeps them.
  struct counts {
    uint64_t written;
    uint64_t written_failed;
    uint64_t arrived;
    uint64_t arrived_failed;
  };

  struct rank_state {
    std::unique_ptr<nic::efa::soft_device> nic;
    std::shared_ptr<segment> memory;
    uint8_t* data = nullptr;
    uint64_t* scratch = nullptr;
    counts* counters = nullptr;  // by queue pair
    uint64_t* values = nullptr;  // depth of each queue pair
    dl::efa_mr mr;
    std::vector<dl::efa_cq> cqs;
    std::vector<dl::efa_counter> kept;
    std::vector<dl::efa_endpoint> endpoints;
    std::vector<dl::efa_peer> peers;
    std::vector<ep_efa_qp> qps;
    std::vector<std::vector<uint64_t>> finished;
    std::vector<std::vector<uint64_t>> marks;
    std::vector<std::vector<ep_efa_request>> requests;
    std::vector<ep_efa_target> targets;
    std::vector<ep_efa_count> signal_counts;
    std::vector<ep_efa_count> counter_counts;
    std::vector<ep_efa_remote> remotes;
    std::vector<ep_efa_remote> scratch_remotes;
    ep_efa_device device{};
    ep_efa_memory part{};
    kernel_environment environment{};
    ep_kernel_status status{};
    // The same as the pull request's plugin lays it out.
    std::vector<ep_efa_pr_qp> pr_qps;
    std::vector<uint16_t> pr_handles; // [queue pair][rank]
    std::vector<uint16_t> pr_qpns;
    std::vector<uint32_t> pr_qkeys;
    std::vector<ep_efa_pr_counter> pr_signals;
    std::vector<ep_efa_pr_counter> pr_counters;
    std::vector<uint64_t> pr_signal_views;
    std::vector<uint64_t> pr_counter_views;
    std::vector<uint64_t> pr_scratch_addresses;
    std::vector<uint32_t> pr_scratch_rkeys;
    std::vector<uint64_t> pr_part_words;
    ep_efa_pr_device pr{};
  };

  explicit efa_world(const efa_world_options& wanted) : options(wanted), steps(wanted.seed), ranks(static_cast<size_t>(wanted.size)) {
    for (rank_state& rank : ranks) open(rank);
    for (int32_t i = 0; i < options.size; ++i) connect(i);
  }
  ~efa_world() {
    for (rank_state& rank : ranks) steps.remove(*rank.nic);
    for (rank_state& rank : ranks) rank.nic.reset();
  }
  efa_world(const efa_world&) = delete;

  uint32_t qp_count() const { return 1 + std::max(options.signals, options.counters); }
  rank_state& at(int32_t rank) { return ranks[static_cast<size_t>(rank)]; }
  uint8_t* data(int32_t rank) { return at(rank).data; }
  ep_efa_memory& part(int32_t rank) { return at(rank).part; }
  ep_efa_qp& qp(int32_t rank, uint32_t index) { return at(rank).qps[index]; }
  counts& counted(int32_t rank, uint32_t index) { return at(rank).counters[index]; }
  const ep_efa_pr_mr& pr_part(int32_t rank) { return *reinterpret_cast<const ep_efa_pr_mr*>(at(rank).pr_part_words.data()); }
  gin_team team() const { return {nullptr, options.size}; }

  // Every count of a rank stands at `value`, by the verb.
  void set_counts(int32_t rank, uint64_t value) {
    for (const dl::efa_counter& one : at(rank).kept) expect(at(rank).nic->counter_set(one, value));
    for (std::vector<ep_efa_count>* all : {&at(rank).signal_counts, &at(rank).counter_counts}) {
      for (ep_efa_count& one : *all) one.widened = one.offset = value & EP_EFA_COUNTER_MASK;
    }
  }

  // kernel: bool(efa_context&, int32_t rank), of every rank, together with all NICs. Lanes are writers of their own.
  template <class Kernel> simt_result run(const simt_launch& shape, Kernel&& kernel, double switches = 0) {
    simt_schedule schedule = seeded(options.seed);
    if (switches != 0) schedule.switch_probability = switches;
    schedule.point_limit = 20'000'000;
    std::vector<simt_launch> launches;
    for (int32_t rank = 0; rank < options.size; ++rank) {
      simt_launch launch = shape;
      launch.environment = &at(rank).environment;
      launch.name = "rank " + std::to_string(rank);
      launch.kernel = [this, &kernel, rank](simt_context& base) {
        const uint64_t writer = 1 + ((static_cast<uint64_t>(rank) << 16 | base.block()) << 16 | base.lane());
        efa_context ctx = nic::efa::watched(base, steps, writer);
        return kernel(ctx, rank);
      };
      launches.push_back(launch);
    }
    kernel_environment serving;
    simt_launch serve = test::shape(1, 1, 1);
    serve.environment = &serving;
    serve.name = "nics";
    serve.serves = true;
    serve.kernel = [this](simt_context& ctx) {
      const auto busy = [this](uint64_t* found) {
        *found = 0;
        return !held && (!steps.pending().empty() || due());
      };
      while (ctx.wait_for(busy, 0, -1, 0, nullptr)) {
        steps.step();
        if (after_step) after_step();
        ctx.point();
      }
      return true;
    };
    launches.push_back(serve);
    simt_result outcome = simt_run_together(schedule, launches);
    steps.run_all();
    return outcome;
  }

  std::vector<std::string> violations() const {
    std::vector<std::string> all;
    for (const rank_state& rank : ranks) {
      for (const nic::efa::violation& one : rank.nic->violations()) all.push_back(nic::efa::violation_text(one));
    }
    return all;
  }
  bool clean() const {
    const std::vector<std::string> all = violations();
    for (const std::string& one : all) std::fprintf(stderr, "violation: %s\n", one.c_str());
    return all.empty();
  }
  uint64_t doorbells() const {
    uint64_t sum = 0;
    for (const rank_state& rank : ranks) sum += rank.nic->counts().doorbells;
    return sum;
  }

  bool held = false; // the NICs stand still
  std::function<void()> after_step;
  efa_world_options options;
  nic::efa::stepper steps;

 private:
  bool due() const {
    for (const rank_state& rank : ranks) {
      if (rank.nic->next_due_ns() != INT64_MAX) return true;
    }
    return false;
  }

  void open(rank_state& rank) {
    const uint32_t entries = options.inline_write ? 2 : 1; // of 64 bytes, of a WQE
    nic::efa::soft_options soft;
    soft.threaded = false;
    soft.engine.seed = options.seed;
    soft.engine.watch_stores = options.watched;
    soft.engine.fragment_bytes = options.fragment_bytes;
    soft.engine.max_batch = options.max_batch * entries;
    soft.engine.wide_ids = options.wide_ids;
    soft.engine.inline_write = options.inline_write;
    soft.engine.max_message = options.max_message;
    soft.engine.max_depth = std::max<uint32_t>(options.depth * entries, 4096);
    soft.engine.trace_events = options.trace ? 100'000 : 0;
    rank.nic = expect(nic::efa::soft_device::open(nic::efa::soft_device_name, soft));
    steps.add(*rank.nic);
    const uint32_t count = qp_count();
    const uint64_t data_bytes = (options.bytes + 63) / 64 * 64;
    const uint64_t counts_bytes = count * sizeof(counts);
    const uint64_t bytes = data_bytes + 64 + counts_bytes + static_cast<uint64_t>(count) * options.depth * 8;
    rank.memory = expect(segment::create(bytes));
    rank.data = rank.memory->data();
    rank.scratch = reinterpret_cast<uint64_t*>(rank.data + data_bytes);
    rank.counters = reinterpret_cast<counts*>(rank.data + data_bytes + 64);
    rank.values = reinterpret_cast<uint64_t*>(rank.data + data_bytes + 64 + counts_bytes);
    const auto address = [](const void* at) { return reinterpret_cast<uint64_t>(at); };
    rank.mr = expect(rank.nic->reg_mr({address(rank.data), bytes, -1, 0}, dl::EFA_ACCESS_LOCAL_WRITE | dl::EFA_ACCESS_REMOTE_WRITE | dl::EFA_ACCESS_REMOTE_READ));
    for (uint32_t i = 0; i < count; ++i) {
      counts& own = rank.counters[i];
      dl::efa_cq_spec ring;
      ring.depth = options.cq_depth != 0 ? options.cq_depth : options.depth;
      rank.cqs.push_back(expect(rank.nic->create_cq(ring)));
      dl::efa_endpoint_spec spec;
      spec.depth = options.depth;
      spec.inline_write = options.inline_write;
      spec.cq = rank.cqs.back();
      spec.written = expect(rank.nic->open_counter({{address(&own.written), 8, -1, 0}, {address(&own.written_failed), 8, -1, 0}}));
      spec.arrived = expect(rank.nic->open_counter({{address(&own.arrived), 8, -1, 0}, {address(&own.arrived_failed), 8, -1, 0}}));
      rank.kept.push_back(spec.written);
      rank.kept.push_back(spec.arrived);
      rank.endpoints.push_back(expect(rank.nic->create_endpoint(spec)));
    }
  }

  void connect(int32_t self) {
    rank_state& rank = at(self);
    const uint32_t count = qp_count();
    const auto address = [](const void* at) { return reinterpret_cast<uint64_t>(at); };
    for (uint32_t slot = 0; slot < count; ++slot) {
      for (int32_t peer = 0; peer < options.size; ++peer) {
        const dl::efa_peer found = expect(rank.nic->insert_address(rank.endpoints[0], at(peer).endpoints[slot].address));
        rank.peers.push_back(found);
        rank.targets.push_back({found.ah, found.qpn, found.qkey});
        rank.pr_handles.push_back(found.ah);
        rank.pr_qpns.push_back(found.qpn);
        rank.pr_qkeys.push_back(found.qkey);
      }
    }
    rank.finished.assign(count, std::vector<uint64_t>((options.depth + 63) / 64));
    rank.marks = rank.finished;
    rank.requests.assign(count, std::vector<ep_efa_request>(options.depth));
    rank.qps.resize(count);
    for (uint32_t i = 0; i < count; ++i) {
      const dl::efa_endpoint& made = rank.endpoints[i];
      ep_efa_qp& qp = rank.qps[i];
      qp.header = {EP_MAGIC_EFA_QP, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof qp};
      qp.sq = made.sq.buffer;
      qp.doorbell = made.sq.doorbell;
      qp.cq = rank.cqs[i].buffer;
      qp.written = address(&rank.counters[i].written);
      qp.failed = address(&rank.counters[i].written_failed);
      qp.finished = address(rank.finished[i].data());
      qp.requests = address(rank.requests[i].data());
      qp.marks = address(rank.marks[i].data());
      qp.targets = address(rank.targets.data());
      qp.values = options.inline_write ? 0 : address(rank.values + static_cast<uint64_t>(i) * options.depth);
      qp.values_lkey = rank.mr.lkey;
      qp.target_slots = count;
      qp.depth = made.sq.depth;
      qp.wqe_bytes = made.sq.wqe_bytes;
      qp.max_batch = made.sq.max_batch;
      qp.cq_depth = rank.cqs[i].depth;
      qp.cq_entry_bytes = rank.cqs[i].entry_bytes;
      qp.qpn = made.qpn;
      qp.index = i;
      qp.flags = made.sq.wide_ids ? EP_EFA_QP_WIDE_ID : 0;
    }
    for (uint32_t i = 0; i < options.signals; ++i) rank.signal_counts.push_back({address(&rank.counters[1 + i].arrived), address(&rank.counters[1 + i].arrived_failed), 0, 0, 1 + i, 0, {}});
    for (uint32_t i = 0; i < options.counters; ++i) rank.counter_counts.push_back({address(&rank.counters[1 + i].written), address(&rank.counters[1 + i].written_failed), 0, 0, 1 + i, 0, {}});
    for (int32_t peer = 0; peer < options.size; ++peer) {
      rank.remotes.push_back({address(at(peer).data), at(peer).mr.rkey, 0});
      rank.scratch_remotes.push_back({address(at(peer).scratch), at(peer).mr.rkey, 0});
    }
    ep_efa_device& device = rank.device;
    device.header = {EP_MAGIC_EFA, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof device};
    device.rank = self;
    device.world_size = options.size;
    device.qps = address(rank.qps.data());
    device.signals = address(rank.signal_counts.data());
    device.counters = address(rank.counter_counts.data());
    device.qp_count = count;
    device.signal_count = options.signals;
    device.counter_count = options.counters;
    device.sharing = options.sharing;
    device.max_message = options.max_message;
    device.scratch = address(rank.scratch);
    device.scratch_remotes = address(rank.scratch_remotes.data());
    device.scratch_lkey = rank.mr.lkey;
    rank.part.header = {EP_MAGIC_EFA_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof rank.part};
    rank.part.device = address(&device);
    rank.part.remotes = address(rank.remotes.data());
    rank.part.address = address(rank.data);
    rank.part.byte_length = options.bytes;
    rank.part.lkey = rank.mr.lkey;
    rank.environment.waits.world_size = options.size;
    rank.environment.waits.self = self;
    connect_pr(rank, self);
  }

  void connect_pr(rank_state& rank, int32_t self) {
    const uint32_t count = qp_count();
    const auto address = [](const void* at) { return reinterpret_cast<uint64_t>(at); };
    rank.pr_qps.resize(count);
    for (uint32_t i = 0; i < count; ++i) {
      const dl::efa_queue& sq = rank.endpoints[i].sq;
      ep_efa_pr_wq& wq = rank.pr_qps[i].sq.wq;
      wq.max_sge = 1;
      wq.max_wqes = sq.depth;
      wq.queue_mask = sq.depth - 1;
      wq.queue_size_shift = static_cast<uint32_t>(__builtin_ctz(sq.depth));
      wq.max_batch = sq.max_batch;
      wq.buf = sq.buffer;
      wq.db = sq.doorbell;
    }
    const auto endpoint = [&](uint32_t i) {
      ep_efa_pr_endpoint made{};
      made.qp = address(&rank.pr_qps[i]);
      made.address_handles = address(rank.pr_handles.data() + static_cast<size_t>(i) * static_cast<size_t>(options.size));
      made.remote_qpns = address(rank.pr_qpns.data() + static_cast<size_t>(i) * static_cast<size_t>(options.size));
      made.qkey = address(rank.pr_qkeys.data() + static_cast<size_t>(i) * static_cast<size_t>(options.size));
      made.local_cntr_value = address(&rank.counters[i].written);
      made.sq_size = rank.endpoints[i].sq.depth;
      made.putvalue_slice_base = address(rank.values + static_cast<uint64_t>(i) * options.depth);
      return made;
    };
    for (uint32_t i = 0; i < options.signals; ++i) rank.pr_signals.push_back({endpoint(1 + i), address(&rank.counters[1 + i].arrived)});
    for (uint32_t i = 0; i < options.counters; ++i) rank.pr_counters.push_back({endpoint(1 + i), address(&rank.counters[1 + i].written)});
    for (ep_efa_pr_counter& one : rank.pr_signals) rank.pr_signal_views.push_back(address(&one));
    for (ep_efa_pr_counter& one : rank.pr_counters) rank.pr_counter_views.push_back(address(&one));
    for (int32_t peer = 0; peer < options.size; ++peer) {
      rank.pr_scratch_addresses.push_back(address(at(peer).scratch));
      rank.pr_scratch_rkeys.push_back(at(peer).mr.rkey);
    }
    ep_efa_pr_device& pr = rank.pr;
    pr.data = endpoint(0);
    pr.signal_handles = address(rank.pr_signal_views.data());
    pr.counter_handles = address(rank.pr_counter_views.data());
    pr.signal_count = static_cast<int32_t>(options.signals);
    pr.counter_count = static_cast<int32_t>(options.counters);
    pr.nranks = options.size;
    pr.rank = self;
    pr.scratch_lkey = rank.mr.lkey;
    pr.scratch_local_addr = address(rank.scratch);
    pr.scratch_remote_addrs = address(rank.pr_scratch_addresses.data());
    pr.scratch_remote_rkeys = address(rank.pr_scratch_rkeys.data());
    pr.putvalue_lkey = rank.mr.lkey;
    pr.putvalue_slot_size = 8;
    const size_t words = (sizeof(ep_efa_pr_mr) + sizeof(ep_efa_pr_mr_peer) * static_cast<size_t>(options.size)) / 8;
    rank.pr_part_words.resize(words);
    auto* head = reinterpret_cast<ep_efa_pr_mr*>(rank.pr_part_words.data());
    *head = {rank.mr.lkey, options.size, address(rank.data)};
    for (int32_t peer = 0; peer < options.size; ++peer) reinterpret_cast<ep_efa_pr_mr_peer*>(head + 1)[peer] = {address(at(peer).data), at(peer).mr.rkey, 0};
  }

  std::vector<rank_state> ranks;
};

} // namespace ep::test
