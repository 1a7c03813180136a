#include "endpoints.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <optional>

namespace ep::efa {
namespace {

constexpr uint64_t page = 4096;
constexpr uint64_t line = 64;
constexpr uint32_t max_depth = 32768; // half the range of a 16-bit request id

failure invalid(const std::string& text) { return {EP_STATUS_INVALID, 0, text}; }

failure during(const std::string& step, failure why) {
  why.message = step + ": " + why.message;
  return why;
}

ep_handle_header header_of(uint32_t magic, uint64_t bytes) { return {magic, EP_ABI_MAJOR, EP_ABI_MINOR, 0, static_cast<uint32_t>(bytes)}; }

uint64_t whole_pages(uint64_t bytes) { return (bytes + page - 1) / page * page; }

// What the posters of one queue pair need besides its struct, in the block of structs: bits of `finished`, then requests.
// HAZARD: its depth is that of the ring which the device gave. Posters go round by that one, and the device may give more than it was asked for.
struct pair_words {
  uint64_t requests;
  uint64_t total;
  explicit pair_words(uint32_t depth) {
    requests = (uint64_t{depth} + 63) / 64 * 8;
    requests = (requests + line - 1) / line * line;
    total = requests + uint64_t{depth} * sizeof(ep_efa_request);
  }
};

// The registered block: scratch, then for each pair, where they are needed, its values.
constexpr uint64_t values_at = line;

} // namespace

result<std::unique_ptr<rank_endpoints>> rank_endpoints::create(std::unique_ptr<dl::efa_device> device, const endpoint_options& options, emulator_hooks hooks,
                                                               ep_wake_word* completion_wake) {
  std::unique_ptr<rank_endpoints> made(new rank_endpoints(std::move(device), options, std::move(hooks)));
  if (auto checked = made->check(); !checked.ok()) return checked.why();
  if (auto built = made->build(completion_wake); !built.ok()) {
    (void)made->tear_down();
    return built.why();
  }
  return made;
}

// Before anything is made: a device that runs out in the middle of it leaves ranks that wait for each other.
result<nothing> rank_endpoints::check() const {
  const dl::efa_capabilities& can = device_->capabilities();
  const std::string& name = device_->name();
  if (options_.world_size < 1 || options_.rank < 0 || options_.rank >= options_.world_size) {
    return invalid("rank " + std::to_string(options_.rank) + " is not in a world of " + std::to_string(options_.world_size));
  }
  if (options_.queue_pairs < 1) return invalid("queue pairs must be 1 or more");
  if (options_.sharing > EP_EFA_SHARE_THREAD) return invalid("sharing " + std::to_string(options_.sharing) + " is no EP_EFA_SHARE_*");
  if (options_.depth < 2 || options_.depth > max_depth || !std::has_single_bit(options_.depth)) {
    return invalid("depth " + std::to_string(options_.depth) + " is no power of two from 2 to " + std::to_string(max_depth));
  }
  const bool wide = asks_inline();
  const uint32_t deepest = wide ? can.max_depth / 2 : can.max_depth;
  if (can.max_depth != 0 && options_.depth > deepest) {
    return invalid("depth " + std::to_string(options_.depth) + " exceeds what " + name + " can do: " + std::to_string(deepest) + " requests of " + (wide ? "128" : "64") + " bytes");
  }
  if (can.max_cq_depth != 0 && options_.depth > can.max_cq_depth) {
    return invalid("depth " + std::to_string(options_.depth) + " exceeds the completions that " + name + " can keep: " + std::to_string(can.max_cq_depth));
  }
  if (!can.counters) return failure{EP_STATUS_SYSTEM, EOPNOTSUPP, name + " has no completion counters in memory, by which signals arrive: its generation, its driver (efa.ko 3.3 has them) or libfabric (2.5 has them) is too old"};
  if (can.max_endpoints != 0 && pair_count() > can.max_endpoints) {
    return invalid(std::to_string(options_.queue_pairs) + " queue pairs of kernels and one for each of " + std::to_string(options_.world_size) + " ranks exceed what " + name + " has: " + std::to_string(can.max_endpoints));
  }
  if (can.max_addresses != 0 && static_cast<uint32_t>(options_.world_size) > can.max_addresses) {
    return invalid(std::to_string(options_.world_size) + " ranks exceed the addresses that " + name + " can keep: " + std::to_string(can.max_addresses));
  }
  return nothing{};
}

result<nothing> rank_endpoints::build(ep_wake_word* completion_wake) {
  const dl::efa_capabilities& can = device_->capabilities();
  pairs_.assign(pair_count(), {});
  for (uint32_t index = 0; index < pair_count(); ++index) {
    if (auto built = build_pair(index, completion_wake); !built.ok()) return during("queue pair " + std::to_string(index), built.why());
  }
  if (auto found = build_memory(); !found.ok()) return found;
  if (hooks_.cq_consumer) {
    for (uint32_t index = 0; index < pair_count(); ++index) {
      if (auto told = hooks_.cq_consumer(pairs_[index].cq, &qps_[index].polled); !told.ok()) return told;
    }
  }

  ep_efa_device& device = *new (device_struct_) ep_efa_device{};
  device.header = header_of(EP_MAGIC_EFA, sizeof device);
  device.rank = options_.rank;
  device.world_size = options_.world_size;
  device.qps = structs_.address;
  device.qp_count = options_.queue_pairs;
  device.sharing = options_.sharing;
  device.max_message = can.max_message;
  device.scratch = small_address_;
  device.scratch_lkey = small_mr_.lkey;
  publish_ranges();
  counters_left_ = can.max_counters == 0 ? INT32_MAX : can.max_counters;
  endpoints_left_ = can.max_endpoints == 0 ? INT32_MAX : can.max_endpoints - pair_count();
  return nothing{};
}

// The structs of all queue pairs, and what these point to.
result<nothing> rank_endpoints::build_memory() {
  control_ = ibgda::host_control_memory();
  const uint64_t qps_bytes = uint64_t{pair_count()} * sizeof(ep_efa_qp);
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
  auto mr = device_->reg_mr({small_address_, small_bytes}, dl::EFA_ACCESS_LOCAL_WRITE | dl::EFA_ACCESS_REMOTE_WRITE);
  if (!mr.ok()) return during("registration of values", mr.why());
  small_mr_ = mr.value();

  uint64_t words_at = structs_.address + device_at + sizeof(ep_efa_device);
  uint64_t slots_at = small_address_ + values_at;
  for (uint32_t index = 0; index < pair_count(); ++index) {
    const pair& from = pairs_[index];
    const dl::efa_queue& sq = from.endpoint.sq;
    const pair_words words(sq.depth);
    ep_efa_qp& qp = *new (&qps_[index]) ep_efa_qp{};
    qp.header = header_of(EP_MAGIC_EFA_QP, sizeof qp);
    qp.sq = sq.buffer;
    qp.doorbell = sq.doorbell;
    qp.cq = from.cq.buffer;
    qp.finished = words_at;
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

bool rank_endpoints::asks_inline() const { return options_.inline_values && device_->capabilities().max_inline_write >= 8; }

bool rank_endpoints::staged(const pair& made) const { return !asks_inline() || made.endpoint.sq.wqe_bytes < 2 * EP_EFA_WQE_BYTES; }

result<nothing> rank_endpoints::build_pair(uint32_t index, ep_wake_word* completion_wake) {
  pair& made = pairs_[index];
  uint32_t completions = options_.depth;
  for (bool again = false;; again = true) {
    dl::efa_cq_spec ring;
    ring.depth = completions;
    auto cq = device_->create_cq(ring);
    if (!cq.ok()) return cq.why();
    made.cq = cq.value();
    dl::efa_endpoint_spec spec;
    spec.depth = options_.depth;
    spec.inline_write = asks_inline();
    spec.cq = made.cq;
    auto endpoint = device_->create_endpoint(spec);
    if (!endpoint.ok()) return endpoint.why();
    made.endpoint = endpoint.value();
    const dl::efa_queue& sq = made.endpoint.sq;
    if (sq.depth > max_depth || !std::has_single_bit(sq.depth)) {
      return failure{EP_STATUS_SYSTEM, EOPNOTSUPP, device_->name() + " gave a ring of " + std::to_string(sq.depth) + " requests for the " + std::to_string(options_.depth) +
                                                       " that were asked for, expected a power of two, at most " + std::to_string(max_depth)};
    }
    // HAZARD: every WQE that may be under way has a place among the completions, or they overrun.
    if (made.cq.depth >= sq.depth) break;
    if (again) {
      return failure{EP_STATUS_SYSTEM, EOPNOTSUPP, device_->name() + " gave a ring of " + std::to_string(sq.depth) + " requests and one of " + std::to_string(made.cq.depth) + " completions, which would overrun"};
    }
    completions = sq.depth;
    if (auto ended = device_->destroy_endpoint(made.endpoint); !ended.ok()) return ended;
    made.endpoint = {};
    if (auto ended = device_->destroy_cq(made.cq); !ended.ok()) return ended;
    made.cq = {};
  }
  // Hardware has nobody to tell.
  if (index >= options_.queue_pairs && hooks_.cq_wake) return hooks_.cq_wake(made.cq, completion_wake);
  return nothing{};
}

rank_address rank_endpoints::address() const {
  rank_address own{};
  own.rank = options_.rank;
  own.world_size = options_.world_size;
  own.data = first().address;
  own.scratch = small_address_;
  own.scratch_rkey = small_mr_.rkey;
  return own;
}

result<nothing> rank_endpoints::connect(std::span<const rank_address> of_ranks) {
  if (connected()) return invalid("the endpoints were connected before");
  if (of_ranks.size() != static_cast<size_t>(options_.world_size)) {
    return invalid("addresses of " + std::to_string(of_ranks.size()) + " ranks were given, the world has " + std::to_string(options_.world_size));
  }
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const rank_address& theirs = of_ranks[rank];
    if (theirs.rank != static_cast<int32_t>(rank) || theirs.world_size != options_.world_size) {
      return failure{EP_STATUS_MISMATCH, 0, "the address for rank " + std::to_string(rank) + " is of rank " + std::to_string(theirs.rank) + " of " + std::to_string(theirs.world_size)};
    }
  }
  // Whoever asks `connected` sees all ranks, or none: of a call that failed nothing is left.
  std::vector<dl::efa_peer> peers;
  for (const rank_address& theirs : of_ranks) {
    auto peer = device_->insert_address(first(), theirs.data);
    if (!peer.ok()) {
      for (const dl::efa_peer& known : peers) (void)device_->remove_address(known);
      return during("the address of rank " + std::to_string(theirs.rank), peer.why());
    }
    peers.push_back(peer.value());
  }
  peers_ = std::move(peers);
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    data_targets_.push_back({peers_[rank].ah, peers_[rank].qpn, peers_[rank].qkey});
    scratch_remotes_.push_back({of_ranks[rank].scratch, of_ranks[rank].scratch_rkey, 0});
  }
  device_struct_->scratch_remotes = reinterpret_cast<uint64_t>(scratch_remotes_.data());
  for (uint32_t index = 0; index < pair_count(); ++index) {
    qps_[index].targets = reinterpret_cast<uint64_t>(data_targets_.data());
    qps_[index].target_slots = 1;
  }
  return nothing{};
}

void rank_endpoints::cut_host(int32_t peer) {
  pair& made = pairs_[options_.queue_pairs + static_cast<uint32_t>(peer)];
  if (made.endpoint.handle == nullptr) return;
  (void)device_->destroy_endpoint(made.endpoint);
  made.endpoint = {};
}

result<registered_memory> rank_endpoints::register_memory(const dl::efa_memory& memory, uint32_t access) {
  const uint64_t end = memory.address + memory.byte_length;
  if (memory.byte_length == 0 || end < memory.address) return invalid("memory of " + std::to_string(memory.byte_length) + " bytes cannot be registered");
  for (const registered_memory& other : memories_) {
    if (memory.address < other.memory.address + other.memory.byte_length && other.memory.address < end) {
      return invalid("memory of " + std::to_string(memory.byte_length) + " bytes overlaps a registered one of " + std::to_string(other.memory.byte_length) + ": a kernel could not tell which key to use");
    }
  }
  auto mr = device_->reg_mr(memory, access);
  if (!mr.ok()) return mr.why();
  memories_.push_back({mr.value(), memory});
  publish_ranges();
  return memories_.back();
}

result<nothing> rank_endpoints::release_memory(const registered_memory& memory) {
  const auto at = std::find_if(memories_.begin(), memories_.end(), [&](const registered_memory& one) { return one.mr.handle == memory.mr.handle; });
  if (at == memories_.end()) return invalid("memory is not registered here, or was released before");
  memories_.erase(at);
  // Kernels stop finding the range before its key dies.
  publish_ranges();
  return device_->dereg_mr(memory.mr);
}

void rank_endpoints::publish_ranges() {
  std::vector<ep_ibgda_range> ranges;
  for (const registered_memory& one : memories_) ranges.push_back({one.memory.address, one.memory.address + one.memory.byte_length, one.mr.lkey, 0});
  std::sort(ranges.begin(), ranges.end(), [](const ep_ibgda_range& a, const ep_ibgda_range& b) { return a.begin < b.begin; });
  const ep_ibgda_range_table head{ranges.size(), 0};
  std::vector<uint64_t> table((sizeof head + ranges.size() * sizeof(ep_ibgda_range)) / 8);
  std::memcpy(table.data(), &head, sizeof head);
  if (!ranges.empty()) std::memcpy(reinterpret_cast<uint8_t*>(table.data()) + sizeof head, ranges.data(), ranges.size() * sizeof(ep_ibgda_range));
  range_tables_.push_back(std::move(table));
  std::atomic_ref<uint64_t>(device_struct_->ranges).store(reinterpret_cast<uint64_t>(range_tables_.back().data()), std::memory_order_release);
}

// Goes on after a failure: what can be given back is.
result<nothing> rank_endpoints::tear_down() {
  std::optional<failure> first;
  const auto keep = [&](const char* step, const result<nothing>& done) {
    if (!done.ok() && !first.has_value()) first = during(step, done.why());
  };
  for (pair& made : pairs_) {
    if (made.endpoint.handle != nullptr) keep("destroying an endpoint", device_->destroy_endpoint(made.endpoint));
    made.endpoint = {};
  }
  for (const dl::efa_peer& peer : peers_) keep("removing an address", device_->remove_address(peer));
  peers_.clear();
  for (pair& made : pairs_) {
    if (made.cq.handle != nullptr) keep("destroying a completion queue", device_->destroy_cq(made.cq));
  }
  pairs_.clear();
  if (small_mr_.handle != nullptr) keep("deregistering values", device_->dereg_mr(small_mr_));
  small_mr_ = {};
  if (first.has_value()) return *first;
  return nothing{};
}

result<nothing> rank_endpoints::close() {
  if (closed_) return nothing{};
  closed_ = true;
  result<nothing> ended = tear_down();
  const auto keep = [&](const char* step, const result<nothing>& done) {
    if (ended.ok() && !done.ok()) ended = during(step, done.why());
  };
  for (const registered_memory& memory : memories_) keep("deregistering memory", device_->dereg_mr(memory.mr));
  memories_.clear();
  keep("closing the device", device_->close());
  return ended;
}

rank_endpoints::~rank_endpoints() { (void)close(); }

} // namespace ep::efa
