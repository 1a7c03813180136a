#include <algorithm>
#include <cstring>

#include "engine.hpp"

// The part of the engine that knows which memories peers may reach, and for how long.
namespace ep::fabric {

// How kernels reach the memory: the ring lives as long as it does.
class engine::ring_route final : public memory_route {
 public:
  explicit ring_route(std::shared_ptr<ring_storage> ring) : ring_(std::move(ring)) {}
  // Providers register what requests read from by themselves.
  result<nothing> prepare_source(uint64_t, uint64_t, const std::shared_ptr<const void>&) override { return nothing{}; }

 private:
  std::shared_ptr<ring_storage> ring_;
};

result<std::shared_ptr<gpu_range>> engine::register_gpu(const dl::gpu_bytes& bytes, std::shared_ptr<const void> keep) {
  auto region = port_->register_gpu(bytes);
  if (!region.ok()) return region.why();
  auto made = std::make_shared<gpu_range>(port_.get(), region.value(), bytes, std::move(keep));
  const std::lock_guard lock(mutex_);
  std::erase_if(ranges_, [](const auto& one) { return one.expired(); });
  ranges_.push_back(made);
  return made;
}

uint64_t engine::byte_length(const symmetric_memory& memory) const {
  const std::lock_guard lock(mutex_);
  const auto known = memories_.find(memory.device_handle().memory_id);
  return known == memories_.end() ? 0 : known->second.byte_length;
}

result<std::vector<uint8_t>> engine::add_memory(const std::shared_ptr<symmetric_memory>& memory, std::shared_ptr<gpu_range> bytes_of_gpu) {
  routed_memory made;
  made.memory = memory;
  made.gpu = std::move(bytes_of_gpu);
  made.byte_length = made.gpu != nullptr ? made.gpu->byte_length() : memory->byte_length();
  if (made.gpu != nullptr) {
    made.region = made.gpu->region();
    count_.registered += made.byte_length;
  } else if (memory->byte_length() != 0) {
    auto region = port_->register_memory(memory->own_data(), memory->byte_length());
    if (!region.ok()) return region.why();
    made.region = region.value();
    count_.registered += memory->byte_length();
  }
  const remote_part own{memory->device_handle().memory_id, made.region.base, made.region.key, made.byte_length};
  std::vector<uint8_t> bytes(sizeof own);
  std::memcpy(bytes.data(), &own, sizeof own);
  const std::lock_guard lock(mutex_);
  memories_[own.memory] = std::move(made);
  return bytes;
}

result<nothing> engine::route(symmetric_memory& memory, std::span<const std::vector<uint8_t>> parts) {
  const auto world = static_cast<size_t>(world_size_);
  std::vector<remote_part> remotes(world);
  const uint64_t byte_length = this->byte_length(memory);
  for (size_t rank = 0; rank < world; ++rank) {
    if (parts.size() != world || parts[rank].size() != sizeof(remote_part)) return failure{EP_STATUS_INVALID, 0, "descriptions of a memory do not fit this world"};
    std::memcpy(&remotes[rank], parts[rank].data(), sizeof(remote_part));
    if (remotes[rank].byte_length != byte_length) {
      return failure{EP_STATUS_MISMATCH, 0, "rank " + std::to_string(rank) + " has " + std::to_string(remotes[rank].byte_length) + " bytes, this rank " + std::to_string(byte_length)};
    }
  }
  // Before anything can land there.
  if (memory.is_over()) share(memory.shared_context());
  if (auto done = memory.connect_by_nic(std::make_shared<ring_route>(ring_), EP_MEMORY_PROXY, reinterpret_cast<uint64_t>(&ring_->ring)); !done.ok()) {
    if (memory.is_over()) unshare(memory.context());
    return done;
  }
  const std::lock_guard lock(mutex_);
  routed_memory& known = memories_[memory.device_handle().memory_id];
  known.remotes = std::move(remotes);
  known.closed.resize(world);
  return nothing{};
}

void engine::give_back(const routed_memory& memory) {
  if (memory.region.handle == nullptr) return;
  if (memory.gpu == nullptr) port_->give_back(memory.region);
  count_.registered -= memory.byte_length;
}

void engine::share(const std::shared_ptr<rank_context>& other) {
  {
    const std::lock_guard turn(turn_);
    const auto known = std::find_if(sharers_.begin(), sharers_.end(), [&](const sharer& one) { return one.context == other; });
    if (known != sharers_.end()) {
      ++known->memories;
      return;
    }
    sharers_.push_back({other, 1});
  }
  other->progress().add(this, [this] { return assist(); }, [this] { rest(); });
}

void engine::unshare(const rank_context& other) {
  std::shared_ptr<rank_context> over;
  {
    const std::lock_guard turn(turn_);
    const auto known = std::find_if(sharers_.begin(), sharers_.end(), [&](const sharer& one) { return one.context.get() == &other; });
    if (known == sharers_.end() || --known->memories != 0) return;
    over = std::move(known->context);
    sharers_.erase(known);
  }
  over->progress().remove(this);
}

void engine::remove_memory(const symmetric_memory& memory) {
  bool shared = false;
  {
    const std::lock_guard lock(mutex_);
    const auto at = memories_.find(memory.device_handle().memory_id);
    if (at == memories_.end() || at->second.retired) return;
    at->second.retired = true;
    retiring_.fetch_add(1, std::memory_order_relaxed);
    shared = memory.is_over() && !at->second.remotes.empty();
    any_posted_.store(true, std::memory_order_seq_cst); // or the thread could go to sleep without having seen it
  }
  if (shared) unshare(memory.context());
  nudge();
}

// Asks the peers about memories that were given up here, and drops those that nothing can reach any more.
bool engine::retire_memories() {
  if (retiring_.load(std::memory_order_relaxed) == 0) return false; // whoever gave one up nudges, too
  bool any = false;
  const std::lock_guard lock(mutex_);
  for (auto at = memories_.begin(); at != memories_.end();) {
    routed_memory& known = at->second;
    if (!known.retired) {
      ++at;
      continue;
    }
    if (known.awaited.empty()) {
      known.awaited.assign(links_.size(), 0);
      for (int32_t rank = 0; rank < world_size_; ++rank) {
        // Where peers were never told of it, none can write there.
        if (rank == context_->rank() || known.remotes.empty()) continue;
        known.awaited[static_cast<size_t>(rank)] = 1;
        say(rank, message_kind::retire, 0, at->first);
      }
    }
    // By atomics of this rank, which may not have been taken yet.
    const auto& own = links_[static_cast<size_t>(context_->rank())]->out;
    const auto is_own = [&](const outgoing& one) { return one.memory == known.memory && one.wanted.peer == context_->rank(); };
    bool reachable = std::any_of(own.begin(), own.end(), is_own) || std::any_of(posted_.begin(), posted_.end(), is_own);
    for (size_t rank = 0; rank < links_.size(); ++rank) reachable = reachable || (known.awaited[rank] != 0 && links_[rank]->state == link_state::up);
    if (reachable) {
      ++at;
      continue;
    }
    give_back(known);
    if (reached_ == &known) reached_ = nullptr;
    retiring_.fetch_sub(1, std::memory_order_relaxed);
    at = memories_.erase(at);
    any = true;
  }
  return any;
}

// The thread has ended.
void engine::give_memories_up() {
  const std::lock_guard lock(mutex_);
  for (auto& [id, known] : memories_) {
    give_back(known);
  }
  reached_ = nullptr;
  memories_.clear();
  posted_.clear();
  for (const auto& one : ranges_) {
    if (const auto range = one.lock()) range->end();
  }
  ranges_.clear();
}

} // namespace ep::fabric
