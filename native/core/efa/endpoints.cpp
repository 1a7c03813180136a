#include "endpoints.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>

namespace ep::efa {
namespace {

failure invalid(const std::string& text) { return {EP_STATUS_INVALID, 0, text}; }

failure during(const std::string& step, failure why) {
  why.message = step + ": " + why.message;
  return why;
}

} // namespace

result<std::unique_ptr<rank_endpoints>> rank_endpoints::create(std::unique_ptr<dl::efa_device> device, const endpoint_options& options, emulator_hooks hooks,
                                                               ep_wake_word* completion_wake) {
  std::unique_ptr<rank_endpoints> made(new rank_endpoints(std::move(device), options, std::move(hooks)));
  if (auto checked = made->check(); !checked.ok()) return checked.why();
  made->completion_wake_ = completion_wake;
  auto built = made->build();
  if (!built.ok()) {
    (void)made->tear_down();
    return built.why();
  }
  made->block_ = std::move(built.value());
  made->publish_ranges();
  const dl::efa_capabilities& can = made->device_->capabilities();
  made->counters_left_ = can.max_counters == 0 ? INT32_MAX : can.max_counters;
  made->endpoints_left_ = can.max_endpoints == 0 ? INT32_MAX : can.max_endpoints - made->pair_count();
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
  if (options_.depth < 2 || options_.depth > EP_EFA_MAX_DEPTH || !std::has_single_bit(options_.depth)) {
    return invalid("depth " + std::to_string(options_.depth) + " is no power of two from 2 to " + std::to_string(EP_EFA_MAX_DEPTH));
  }
  const bool wide = queue_block::asks_inline(*device_, options_.inline_values);
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

result<std::unique_ptr<queue_block>> rank_endpoints::build() const {
  const queue_block_options wanted{options_.rank, options_.world_size, options_.queue_pairs, options_.depth, options_.inline_values, options_.sharing};
  std::vector<queue_pair_spec> specs(pair_count());
  for (size_t host = options_.queue_pairs; host < specs.size(); ++host) specs[host].completion_wake = completion_wake_;
  return queue_block::create(*device_, wanted, hooks_, specs);
}

result<nothing> rank_endpoints::renew() {
  // HAZARD: the memory of a ring goes away with its endpoint: whoever posts by mistake must find it broken.
  block_->break_all(EP_STATUS_CLOSED);
  if (auto ended = block_->end_endpoints(); !ended.ok()) return ended;
  if (auto ended = forget_peers(); !ended.ok()) return ended;
  auto fresh = build();
  if (!fresh.ok()) return fresh.why();
  auto ended = block_->close();
  block_ = std::move(fresh.value());
  publish_ranges();
  return ended;
}

result<nothing> rank_endpoints::forget_peers() {
  result<nothing> ended = nothing{};
  for (const dl::efa_peer& peer : peers_) {
    if (peer.handle == nullptr) continue;
    const auto removed = device_->remove_address(peer);
    if (ended.ok() && !removed.ok()) ended = during("removing an address", removed.why());
  }
  peers_.clear();
  data_targets_.clear();
  scratch_remotes_.clear();
  return ended;
}

rank_address rank_endpoints::address() const {
  rank_address own{};
  own.rank = options_.rank;
  own.world_size = options_.world_size;
  own.data = first().address;
  own.scratch = block_->scratch();
  own.scratch_rkey = block_->scratch_rkey();
  return own;
}

result<nothing> rank_endpoints::connect(std::span<const rank_address> of_ranks) {
  if (connected()) return invalid("the endpoints were connected before");
  if (of_ranks.size() != static_cast<size_t>(options_.world_size)) {
    return invalid("addresses of " + std::to_string(of_ranks.size()) + " ranks were given, the world has " + std::to_string(options_.world_size));
  }
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const rank_address& theirs = of_ranks[rank];
    if (theirs.rank == -1 && rank != static_cast<size_t>(options_.rank)) continue;
    if (theirs.rank != static_cast<int32_t>(rank) || theirs.world_size != options_.world_size) {
      return failure{EP_STATUS_MISMATCH, 0, "the address for rank " + std::to_string(rank) + " is of rank " + std::to_string(theirs.rank) + " of " + std::to_string(theirs.world_size)};
    }
  }
  // Whoever asks `connected` sees all ranks, or none: of a call that failed nothing is left.
  std::vector<dl::efa_peer> peers;
  for (const rank_address& theirs : of_ranks) {
    if (theirs.rank == -1) {
      peers.push_back({});
      continue;
    }
    auto peer = device_->insert_address(first(), theirs.data);
    if (!peer.ok()) {
      for (const dl::efa_peer& known : peers) {
        if (known.handle != nullptr) (void)device_->remove_address(known);
      }
      return during("the address of rank " + std::to_string(theirs.rank), peer.why());
    }
    peers.push_back(peer.value());
  }
  peers_ = std::move(peers);
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    data_targets_.push_back({peers_[rank].ah, peers_[rank].qpn, peers_[rank].qkey});
    scratch_remotes_.push_back({of_ranks[rank].scratch, of_ranks[rank].scratch_rkey, 0});
  }
  device().scratch_remotes = reinterpret_cast<uint64_t>(scratch_remotes_.data());
  block_->aim(data_targets_.data(), 1);
  return nothing{};
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
  std::atomic_ref<uint64_t>(device().ranges).store(reinterpret_cast<uint64_t>(range_tables_.back().data()), std::memory_order_release);
}

// Goes on after a failure: what can be given back is.
result<nothing> rank_endpoints::tear_down() {
  result<nothing> ended = nothing{};
  const auto keep = [&](const result<nothing>& done) {
    if (ended.ok() && !done.ok()) ended = done.why();
  };
  if (block_) keep(block_->end_endpoints());
  keep(forget_peers());
  if (block_) keep(block_->close());
  return ended;
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
