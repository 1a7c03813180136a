#include "queue_block.hpp"

#include <atomic>
#include <bit>
#include <cerrno>
#include <new>
#include <optional>
#include <string>

namespace ep::efa {
namespace {

constexpr uint64_t page = 4096;
constexpr uint64_t line = 64;

failure during(const std::string& step, failure why) {
  why.message = step + ": " + why.message;
  return why;
}

ep_handle_header header_of(uint32_t magic, uint64_t bytes) { return {magic, EP_ABI_MAJOR, EP_ABI_MINOR, 0, static_cast<uint32_t>(bytes)}; }

uint64_t whole_pages(uint64_t bytes) { return (bytes + page - 1) / page * page; }

// What the posters of one queue pair need besides its struct, in the block of structs: bits of `finished`, those of `marks`, then requests.
// HAZARD: its depth is that of the ring which the device gave. Posters go round by that one, and the device may give more than it was asked for.
struct pair_words {
  uint64_t marks;
  uint64_t requests;
  uint64_t total;
  explicit pair_words(uint32_t depth) {
    marks = ((uint64_t{depth} + 63) / 64 * 8 + line - 1) / line * line;
    requests = 2 * marks;
    total = requests + uint64_t{depth} * sizeof(ep_efa_request);
  }
};

// The registered block: scratch, then for each pair, where they are needed, its values.
constexpr uint64_t values_at = line;

} // namespace

result<std::unique_ptr<queue_block>> queue_block::create(dl::efa_device& device, const queue_block_options& options, const emulator_hooks& hooks,
                                                         std::span<const queue_pair_spec> specs) {
  std::unique_ptr<queue_block> made(new queue_block(device, options, hooks));
  if (auto built = made->build(specs); !built.ok()) return built.why();
  return made;
}

queue_block::~queue_block() { (void)close(); }

result<nothing> queue_block::build(std::span<const queue_pair_spec> specs) {
  pairs_.assign(specs.size(), {});
  for (size_t index = 0; index < specs.size(); ++index) {
    if (auto built = build_pair(pairs_[index], specs[index]); !built.ok()) return during("queue pair " + std::to_string(index), built.why());
  }
  if (auto found = build_memory(); !found.ok()) return found;
  if (hooks_.cq_consumer) {
    for (size_t index = 0; index < pairs_.size(); ++index) {
      if (auto told = hooks_.cq_consumer(pairs_[index].cq, &qps_[index].polled); !told.ok()) return told;
    }
  }
  ep_efa_device& device = *new (device_struct_) ep_efa_device{};
  device.header = header_of(EP_MAGIC_EFA, sizeof device);
  device.rank = options_.rank;
  device.world_size = options_.world_size;
  device.qps = structs_.address;
  device.qp_count = options_.of_kernels;
  device.sharing = options_.sharing;
  device.max_message = device_.capabilities().max_message;
  device.scratch = small_address_;
  device.scratch_lkey = small_mr_.lkey;
  return nothing{};
}

// The structs of all queue pairs, and what these point to.
result<nothing> queue_block::build_memory() {
  control_ = ibgda::host_control_memory();
  const uint64_t qps_bytes = uint64_t{count()} * sizeof(ep_efa_qp);
  const uint64_t device_at = (qps_bytes + line - 1) / line * line;
  uint64_t structs_bytes = device_at + sizeof(ep_efa_device);
  uint64_t small_bytes = values_at;
  for (const pair& made : pairs_) {
    structs_bytes += pair_words(made.endpoint.sq.depth).total;
    if (staged(made)) small_bytes += uint64_t{made.endpoint.sq.depth} * 8;
  }
  auto block = control_->allocate(whole_pages(structs_bytes));
  if (!block.ok()) return during("memory of the queue pairs' structs", block.why());
  structs_ = block.value();
  qps_ = reinterpret_cast<ep_efa_qp*>(structs_.address);
  device_struct_ = reinterpret_cast<ep_efa_device*>(structs_.address + device_at);

  auto small = segment::create(small_bytes);
  if (!small.ok()) return during("memory of values", small.why());
  small_ = small.value();
  small_address_ = reinterpret_cast<uint64_t>(small_->data());
  // Peers name the scratch in requests without bytes, gets among them.
  auto mr = device_.reg_mr({small_address_, small_bytes}, dl::EFA_ACCESS_LOCAL_WRITE | dl::EFA_ACCESS_REMOTE_WRITE | dl::EFA_ACCESS_REMOTE_READ);
  if (!mr.ok()) return during("registration of values", mr.why());
  small_mr_ = mr.value();

  uint64_t words_at = structs_.address + device_at + sizeof(ep_efa_device);
  uint64_t slots_at = small_address_ + values_at;
  for (uint32_t index = 0; index < count(); ++index) {
    const pair& from = pairs_[index];
    const dl::efa_queue& sq = from.endpoint.sq;
    const pair_words words(sq.depth);
    ep_efa_qp& qp = *new (&qps_[index]) ep_efa_qp{};
    qp.header = header_of(EP_MAGIC_EFA_QP, sizeof qp);
    qp.sq = sq.buffer;
    qp.doorbell = sq.doorbell;
    qp.cq = from.cq.buffer;
    qp.finished = words_at;
    qp.marks = words_at + words.marks;
    qp.requests = words_at + words.requests;
    words_at += words.total;
    if (staged(from)) {
      qp.values = slots_at;
      qp.values_lkey = small_mr_.lkey;
      slots_at += uint64_t{sq.depth} * 8;
    }
    qp.nic_wake = hooks_.doorbell_wake;
    qp.depth = sq.depth;
    qp.wqe_bytes = sq.wqe_bytes;
    qp.max_batch = sq.max_batch;
    qp.cq_depth = from.cq.depth;
    qp.cq_entry_bytes = from.cq.entry_bytes;
    qp.qpn = from.endpoint.qpn;
    qp.index = index;
    qp.flags = sq.wide_ids ? EP_EFA_QP_WIDE_ID : 0;
  }
  return nothing{};
}

bool queue_block::staged(const pair& made) const {
  return !asks_inline(device_, options_.inline_values) || made.endpoint.sq.wqe_bytes < 2 * EP_EFA_WQE_BYTES;
}

result<nothing> queue_block::build_pair(pair& made, const queue_pair_spec& wanted) {
  uint32_t completions = options_.depth;
  for (bool again = false;; again = true) {
    dl::efa_cq_spec ring;
    ring.depth = completions;
    auto cq = device_.create_cq(ring);
    if (!cq.ok()) return cq.why();
    made.cq = cq.value();
    dl::efa_endpoint_spec spec;
    spec.depth = options_.depth;
    spec.inline_write = asks_inline(device_, options_.inline_values);
    spec.cq = made.cq;
    spec.written = wanted.written;
    spec.arrived = wanted.arrived;
    auto endpoint = device_.create_endpoint(spec);
    if (!endpoint.ok()) return endpoint.why();
    made.endpoint = endpoint.value();
    const dl::efa_queue& sq = made.endpoint.sq;
    if (sq.depth > EP_EFA_MAX_DEPTH || !std::has_single_bit(sq.depth)) {
      return failure{EP_STATUS_SYSTEM, EOPNOTSUPP, device_.name() + " gave a ring of " + std::to_string(sq.depth) + " requests for the " + std::to_string(options_.depth) +
                                                       " that were asked for, expected a power of two, at most " + std::to_string(EP_EFA_MAX_DEPTH)};
    }
    // HAZARD: every WQE that may be under way has a place among the completions, or they overrun.
    if (made.cq.depth >= sq.depth) break;
    if (again) {
      return failure{EP_STATUS_SYSTEM, EOPNOTSUPP, device_.name() + " gave a ring of " + std::to_string(sq.depth) + " requests and one of " + std::to_string(made.cq.depth) + " completions, which would overrun"};
    }
    completions = sq.depth;
    if (auto ended = device_.destroy_endpoint(made.endpoint); !ended.ok()) return ended;
    made.endpoint = {};
    if (auto ended = device_.destroy_cq(made.cq); !ended.ok()) return ended;
    made.cq = {};
  }
  // Hardware has nobody to tell.
  if (wanted.completion_wake != nullptr && hooks_.cq_wake) return hooks_.cq_wake(made.cq, wanted.completion_wake);
  return nothing{};
}

void queue_block::aim(const ep_efa_target* targets, uint32_t slots) {
  for (uint32_t index = 0; index < count(); ++index) {
    qps_[index].targets = reinterpret_cast<uint64_t>(targets);
    qps_[index].target_slots = slots;
  }
}

void queue_block::end_endpoint(uint32_t index) {
  pair& made = pairs_[index];
  if (made.endpoint.handle == nullptr) return;
  (void)device_.destroy_endpoint(made.endpoint);
  made.endpoint = {};
}

void queue_block::break_all(uint32_t status) {
  for (uint32_t index = 0; index < count(); ++index) {
    ep_efa_qp& qp = qps_[index];
    uint64_t sound = EP_EFA_SOUND;
    if (!std::atomic_ref<uint64_t>(qp.broken).compare_exchange_strong(sound, EP_EFA_BREAKING)) continue;
    qp.status = status;
    std::atomic_ref<uint64_t>(qp.broken).store(EP_EFA_BROKEN, std::memory_order_release);
  }
}

// Goes on after a failure, as close() does: what can be given back is.
result<nothing> queue_block::end_endpoints() {
  std::optional<failure> first;
  for (pair& made : pairs_) {
    if (made.endpoint.handle == nullptr) continue;
    const auto done = device_.destroy_endpoint(made.endpoint);
    if (!done.ok() && !first.has_value()) first = during("destroying an endpoint", done.why());
    made.endpoint = {};
  }
  if (first.has_value()) return *first;
  return nothing{};
}

result<nothing> queue_block::close() {
  result<nothing> ended = end_endpoints();
  const auto keep = [&](const char* step, const result<nothing>& done) {
    if (ended.ok() && !done.ok()) ended = during(step, done.why());
  };
  for (pair& made : pairs_) {
    if (made.cq.handle != nullptr) keep("destroying a completion queue", device_.destroy_cq(made.cq));
    made.cq = {};
  }
  if (small_mr_.handle != nullptr) keep("deregistering values", device_.dereg_mr(small_mr_));
  small_mr_ = {};
  return ended;
}

} // namespace ep::efa
