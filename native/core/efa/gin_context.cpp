#include "gin_context.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace ep::efa {
namespace {

// What a rank says of its context, followed by dl::efa_address of its data queue pair and of those of its signals.
struct address_head {
  uint64_t scratch;
  uint32_t scratch_rkey;
  uint32_t signals;
  uint32_t counters;
  uint32_t made; // 1: zeros say that a rank has failed
};

failure invalid(const std::string& text) { return {EP_STATUS_INVALID, 0, text}; }

} // namespace

result<std::shared_ptr<gin_context>> gin_context::create(std::shared_ptr<rank_nic> nic, const gin_spec& spec) {
  std::shared_ptr<gin_context> made(new gin_context(std::move(nic), spec));
  if (auto checked = made->check(); !checked.ok()) return checked.why();
  if (auto built = made->build(); !built.ok()) return built.why(); // what there is goes with it
  return made;
}

gin_context::~gin_context() { close(); }

// Before anything is made: a device that runs out in the middle of it leaves ranks that wait for each other.
result<nothing> gin_context::check() const {
  const rank_endpoints& endpoints = nic_->endpoints();
  if (!endpoints.connected()) return invalid("the NIC does not know the addresses of the other ranks yet: connect() comes first");
  if (spec_.signals > gin_max_ids || spec_.counters > gin_max_ids) {
    return invalid(std::to_string(spec_.signals) + " signals and " + std::to_string(spec_.counters) + " counters: at most " + std::to_string(gin_max_ids) + " of each");
  }
  if (spec_.sharing > EP_EFA_SHARE_THREAD) return invalid("sharing " + std::to_string(spec_.sharing) + " is no EP_EFA_SHARE_*");
  const std::string& name = endpoints.nic().name();
  if (const uint32_t needed = spec_.signals + spec_.counters; needed > endpoints.counters_left()) {
    return failure{EP_STATUS_CAPACITY, 0, std::to_string(spec_.signals) + " signals and " + std::to_string(spec_.counters) + " counters need as many completion counters, and " + name + " has " +
                                          std::to_string(endpoints.counters_left()) + " left"};
  }
  if (pair_count() > endpoints.endpoints_left()) {
    return failure{EP_STATUS_CAPACITY, 0, "a context of " + std::to_string(spec_.signals) + " signals and " + std::to_string(spec_.counters) + " counters needs " + std::to_string(pair_count()) +
                                          " endpoints, and " + name + " has " + std::to_string(endpoints.endpoints_left()) + " left"};
  }
  return nothing{};
}

// The counter of words `index`. Whoever waits on this host is woken by it, where the NIC can.
result<dl::efa_counter> gin_context::count(uint64_t index) {
  auto& words = reinterpret_cast<counter_words*>(counts_->data())[index];
  auto made = nic_->endpoints().nic().open_counter({{reinterpret_cast<uint64_t>(&words.completed), 8}, {reinterpret_cast<uint64_t>(&words.failed), 8}});
  if (!made.ok()) return made.why();
  counters_.push_back(made.value());
  nic_->endpoints().counters_taken(-1);
  if (const auto& wake = nic_->endpoints().hooks().counter_wake) {
    if (auto woken = wake(made.value(), nic_->wake()); !woken.ok()) return woken.why();
  }
  return made.value();
}

result<nothing> gin_context::build() {
  rank_endpoints& endpoints = nic_->endpoints();
  auto counts = segment::create(std::max<uint64_t>(spec_.signals + spec_.counters, 1) * sizeof(counter_words));
  if (!counts.ok()) return counts.why();
  counts_ = counts.value();
  std::vector<queue_pair_spec> specs(pair_count());
  const auto describe = [&](uint32_t id, uint64_t index, std::vector<ep_efa_count>& all) {
    const auto* words = reinterpret_cast<const counter_words*>(counts_->data()) + index;
    ep_efa_count& one = all.emplace_back();
    one.count = reinterpret_cast<uint64_t>(&words->completed);
    one.failed = reinterpret_cast<uint64_t>(&words->failed);
    one.qp = 1 + id;
  };
  for (uint32_t id = 0; id < spec_.signals; ++id) {
    auto made = count(id);
    if (!made.ok()) return made.why();
    specs[1 + id].arrived = made.value();
    describe(id, id, signal_counts_);
  }
  for (uint32_t id = 0; id < spec_.counters; ++id) {
    auto made = count(spec_.signals + id);
    if (!made.ok()) return made.why();
    specs[1 + id].written = made.value();
    describe(id, spec_.signals + id, counter_counts_);
  }
  for (queue_pair_spec& one : specs) one.completion_wake = nic_->wake();
  const endpoint_options& of = endpoints.options();
  const queue_block_options wanted{of.rank, of.world_size, pair_count(), of.depth, of.inline_values, spec_.sharing};
  auto block = queue_block::create(endpoints.nic(), wanted, endpoints.hooks(), specs);
  if (!block.ok()) return block.why();
  block_ = std::move(block.value());
  endpoints_taken_ = pair_count();
  endpoints.endpoints_taken(-static_cast<int64_t>(endpoints_taken_));
  ep_efa_device& made = device();
  made.signals = reinterpret_cast<uint64_t>(signal_counts_.data());
  made.signal_count = spec_.signals;
  made.counters = reinterpret_cast<uint64_t>(counter_counts_.data());
  made.counter_count = spec_.counters;
  return nothing{};
}

uint64_t gin_context::address_bytes(const gin_spec& spec) { return sizeof(address_head) + (uint64_t{1} + spec.signals) * sizeof(dl::efa_address); }

std::vector<uint8_t> gin_context::address() const {
  const address_head head{block_->scratch(), block_->scratch_rkey(), spec_.signals, spec_.counters, 1};
  std::vector<uint8_t> bytes(address_bytes(spec_));
  std::memcpy(bytes.data(), &head, sizeof head);
  for (uint32_t slot = 0; slot <= spec_.signals; ++slot) {
    std::memcpy(bytes.data() + sizeof head + slot * sizeof(dl::efa_address), &block_->endpoint(slot).address, sizeof(dl::efa_address));
  }
  return bytes;
}

result<nothing> gin_context::connect(std::span<const std::vector<uint8_t>> of_ranks) {
  if (!targets_.empty()) return invalid("the context was connected before");
  const auto world = static_cast<size_t>(nic_->endpoints().options().world_size);
  if (of_ranks.size() != world) return invalid("addresses of " + std::to_string(of_ranks.size()) + " ranks were given, the world has " + std::to_string(world));
  dl::efa_device& nic = nic_->endpoints().nic();
  std::vector<ep_efa_target> targets((uint64_t{1} + spec_.signals) * world);
  std::vector<ep_efa_remote> scratch;
  std::vector<dl::efa_peer> peers;
  const auto forget = [&](failure why) {
    for (const dl::efa_peer& peer : peers) (void)nic.remove_address(peer);
    return why;
  };
  for (size_t rank = 0; rank < world; ++rank) {
    address_head head{};
    if (of_ranks[rank].size() == address_bytes(spec_)) std::memcpy(&head, of_ranks[rank].data(), sizeof head);
    if (head.made != 1 || head.signals != spec_.signals || head.counters != spec_.counters) {
      return forget({EP_STATUS_MISMATCH, 0, "rank " + std::to_string(rank) + " describes a context with other signals and counters"});
    }
    scratch.push_back({head.scratch, head.scratch_rkey, 0});
    for (size_t slot = 0; slot <= spec_.signals; ++slot) {
      dl::efa_address address;
      std::memcpy(&address, of_ranks[rank].data() + sizeof head + slot * sizeof address, sizeof address);
      auto peer = nic.insert_address(block_->endpoint(0), address);
      if (!peer.ok()) return forget(peer.why());
      peers.push_back(peer.value());
      targets[slot * world + rank] = {peer.value().ah, peer.value().qpn, peer.value().qkey};
    }
  }
  peers_ = std::move(peers);
  targets_ = std::move(targets);
  scratch_remotes_ = std::move(scratch);
  device().scratch_remotes = reinterpret_cast<uint64_t>(scratch_remotes_.data());
  block_->aim(targets_.data(), 1 + spec_.signals);
  return nothing{};
}

result<ep_efa_memory> gin_context::memory_of(const symmetric_memory& memory) const {
  if (!nic_->knows(memory)) return invalid("the memory belongs to another transport");
  ep_efa_memory made = *reinterpret_cast<const ep_efa_memory*>(memory.device_handle().proxy);
  made.device = reinterpret_cast<uint64_t>(&device());
  made.targets = 0; // of the memory's own signals, which are not the context's
  return made;
}

// Endpoints before the counters that they tick.
void gin_context::close() {
  rank_endpoints& endpoints = nic_->endpoints();
  if (block_) (void)block_->end_endpoints();
  endpoints.endpoints_taken(endpoints_taken_);
  endpoints_taken_ = 0;
  for (const dl::efa_peer& peer : peers_) (void)endpoints.nic().remove_address(peer);
  peers_.clear();
  if (block_) (void)block_->close();
  for (const dl::efa_counter& counter : counters_) {
    (void)endpoints.nic().close_counter(counter);
    endpoints.counters_taken(1);
  }
  counters_.clear();
}

} // namespace ep::efa
