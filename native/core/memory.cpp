#include "memory.hpp"

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "ep/device/copy.h"

namespace ep {
namespace {

constexpr uint64_t page = 4096;
// Copies larger than this bypass the caches: the receiver would find most of it evicted anyway.
constexpr uint64_t non_temporal_bytes = 4u << 20;

uint64_t signal_bytes(uint64_t slots) { return (slots * sizeof(uint64_t) + page - 1) / page * page; }

// Leaked on purpose: worker threads may still drop memories while static destructors run.
struct memory_registry {
  std::mutex mutex;
  std::map<uint64_t, std::weak_ptr<symmetric_memory>> alive;
  uint64_t next = 1;
};
memory_registry& registry() {
  static auto* made = new memory_registry;
  return *made;
}

template <class Word> uint64_t atomic_typed(Word* address, atomic_op op, Word operand, Word expected) {
  std::atomic_ref<Word> word(*address);
  switch (op) {
    case atomic_op::fetch: return word.load(std::memory_order_seq_cst);
    case atomic_op::set:
    case atomic_op::swap: return word.exchange(operand, std::memory_order_seq_cst);
    case atomic_op::add: return word.fetch_add(operand, std::memory_order_seq_cst);
    case atomic_op::bit_and: return word.fetch_and(operand, std::memory_order_seq_cst);
    case atomic_op::bit_or: return word.fetch_or(operand, std::memory_order_seq_cst);
    case atomic_op::bit_xor: return word.fetch_xor(operand, std::memory_order_seq_cst);
    case atomic_op::compare_swap: {
      Word found = expected;
      word.compare_exchange_strong(found, operand, std::memory_order_seq_cst);
      return found;
    }
  }
  return 0;
}

// False where the place is not aligned for the word.
template <class Word> bool store_word(uint8_t* to, const void* from) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(Word) != 0) return false;
  Word word;
  std::memcpy(&word, from, sizeof word);
  std::atomic_ref<Word>(*reinterpret_cast<Word*>(to)).store(word, std::memory_order_relaxed);
  return true;
}

} // namespace

result<std::shared_ptr<symmetric_memory>> symmetric_memory::create(std::shared_ptr<rank_context> context, uint64_t byte_length, uint64_t signal_slots) {
  if (byte_length > (uint64_t{1} << 46) || signal_slots > (uint64_t{1} << 32)) {
    return failure{EP_STATUS_MEMORY_LIMIT, 0,
                   std::to_string(byte_length) + " bytes and " + std::to_string(signal_slots) + " signal slots exceed the address space"};
  }
  auto made = segment::create(signal_bytes(signal_slots) + byte_length);
  if (!made.ok()) return made.why();
  std::shared_ptr<symmetric_memory> memory(new symmetric_memory);
  memory->context_ = std::move(context);
  memory->own_ = made.value();
  memory->byte_length_ = byte_length;
  memory->signal_slots_ = signal_slots;
  return registered(std::move(memory));
}

result<std::shared_ptr<symmetric_memory>> symmetric_memory::over(std::shared_ptr<symmetric_memory> base, const std::vector<int32_t>& near) {
  for (const int32_t rank : near) {
    if (rank < 0 || rank >= base->context_->world_size() || !base->connected() || !base->mapped(rank)) {
      return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(rank) + " has no part that is mapped here"};
    }
  }
  std::shared_ptr<symmetric_memory> memory(new symmetric_memory);
  memory->context_ = base->context_;
  memory->own_ = base->own_;
  memory->byte_length_ = base->byte_length_;
  memory->signal_slots_ = base->signal_slots_;
  memory->near_ = near;
  memory->base_ = std::move(base);
  return registered(std::move(memory));
}

std::shared_ptr<symmetric_memory> symmetric_memory::registered(std::shared_ptr<symmetric_memory> made) {
  memory_registry& memories = registry();
  const std::lock_guard lock(memories.mutex);
  made->device_.memory_id = memories.next++;
  memories.alive[made->device_.memory_id] = made;
  return made;
}

std::shared_ptr<symmetric_memory> symmetric_memory::find(uint64_t memory_id) {
  memory_registry& memories = registry();
  const std::lock_guard lock(memories.mutex);
  const auto found = memories.alive.find(memory_id);
  return found == memories.alive.end() ? nullptr : found->second.lock();
}

symmetric_memory::~symmetric_memory() {
  if (own_ && !base_) own_->abandon();
  memory_registry& memories = registry();
  const std::lock_guard lock(memories.mutex);
  memories.alive.erase(device_.memory_id);
}

result<nothing> symmetric_memory::connect(const std::vector<ep_segment_handle>& handles) {
  std::string odd;
  for (size_t rank = 0; rank < handles.size(); ++rank) {
    if (handles[rank].header.magic != 0 && handles[rank].data_bytes != own_->data_bytes()) {
      odd += (odd.empty() ? "" : ", ") + ("rank " + std::to_string(rank) + " has " + std::to_string(handles[rank].data_bytes) + " bytes");
    }
  }
  if (handles.size() != static_cast<size_t>(context_->world_size()) || !odd.empty()) {
    return failure{EP_STATUS_MISMATCH, 0, "parts of a symmetric memory differ: this rank has " + std::to_string(own_->data_bytes()) + " bytes, " + odd};
  }
  std::vector<std::shared_ptr<segment>> peers;
  std::vector<ep_peer_view> views = context_->views();
  if (views.size() != handles.size()) return failure{EP_STATUS_INVALID, 0, "the rank is not connected to its peers yet"};
  for (size_t rank = 0; rank < handles.size(); ++rank) {
    if (context_->elsewhere(static_cast<int32_t>(rank))) {
      peers.push_back(nullptr);
      continue;
    }
    const bool absent = handles[rank].header.magic == 0;
    auto opened = static_cast<int32_t>(rank) == context_->rank() ? result<std::shared_ptr<segment>>(own_)
                  : absent                                      ? segment::stand_in(own_->data_bytes())
                                                                : segment::open(handles[rank]);
    if (!opened.ok()) {
      failure why = opened.why();
      why.message = "rank " + std::to_string(rank) + ": " + why.message;
      return why;
    }
    views[rank].signals = reinterpret_cast<uint64_t>(opened.value()->data());
    views[rank].data = views[rank].signals + signal_bytes(signal_slots_);
    peers.push_back(opened.value());
  }
  peers_ = std::move(peers);
  views_ = std::move(views);
  describe(EP_MEMORY_LOAD_STORE);
  return nothing{};
}

result<nothing> symmetric_memory::replace(int32_t rank, const ep_segment_handle& handle) {
  if (rank < 0 || static_cast<size_t>(rank) >= peers_.size() || rank == context_->rank() || peers_[static_cast<size_t>(rank)] == nullptr) {
    return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(rank) + " has no part that is mapped here"};
  }
  auto done = peers_[static_cast<size_t>(rank)]->replace(handle);
  if (done.ok()) return done;
  failure why = done.why();
  why.message = "rank " + std::to_string(rank) + ": " + why.message;
  return why;
}

uint8_t* symmetric_memory::own_data() const { return own_->data() + signal_bytes(signal_slots_); }
uint64_t* symmetric_memory::own_signals() const { return reinterpret_cast<uint64_t*>(own_->data()); }

result<nothing> symmetric_memory::connect_by_nic(std::shared_ptr<memory_route> route, uint32_t kind, uint64_t address) {
  std::vector<ep_peer_view> views = context_->views();
  if (views.size() != static_cast<size_t>(context_->world_size())) return failure{EP_STATUS_INVALID, 0, "the rank is not connected to its peers yet"};
  ep_peer_view& own = views[static_cast<size_t>(context_->rank())];
  own.signals = reinterpret_cast<uint64_t>(own_signals());
  own.data = reinterpret_cast<uint64_t>(own_data());
  if (base_) {
    switch (kind) {
      case EP_MEMORY_IBGDA: kind = EP_MEMORY_MIXED_IBGDA; break;
      case EP_MEMORY_EFA: kind = EP_MEMORY_MIXED_EFA; break;
      case EP_MEMORY_PROXY: kind = EP_MEMORY_MIXED_PROXY; break;
      default: return failure{EP_STATUS_INVALID, 0, "no kernel mixes stores with this way to reach peers"};
    }
    for (const int32_t rank : near_) views[static_cast<size_t>(rank)] = base_->views_[static_cast<size_t>(rank)];
  }
  views_ = std::move(views);
  route_ = std::move(route);
  describe(kind);
  device_.proxy = address;
  return nothing{};
}

void symmetric_memory::describe(uint32_t kind) {
  device_.header = {EP_MAGIC_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, kind, sizeof(ep_memory_handle)};
  device_.rank = context_->rank();
  device_.world_size = context_->world_size();
  device_.byte_length = byte_length_;
  device_.signal_slots = signal_slots_;
  device_.peers = reinterpret_cast<uint64_t>(views_.data());
}

void symmetric_memory::use_proxy(std::shared_ptr<ep_proxy_ring> ring) {
  proxy_ = std::move(ring);
  proxy_views_ = views_;
  for (size_t rank = 0; rank < proxy_views_.size(); ++rank) {
    if (static_cast<int32_t>(rank) == context_->rank()) continue;
    proxy_views_[rank].data = 0;
    proxy_views_[rank].signals = 0;
  }
  device_.header.kind = EP_MEMORY_PROXY;
  device_.peers = reinterpret_cast<uint64_t>(proxy_views_.data());
  device_.proxy = reinterpret_cast<uint64_t>(proxy_.get());
}

void symmetric_memory::write(int32_t peer, uint64_t offset, const void* src, uint64_t bytes) const {
  // Somebody may be looking at a word while it is put: it must change at once, not byte by byte.
  uint8_t* to = data(peer) + offset;
  if (bytes == 8 && store_word<uint64_t>(to, src)) return;
  if (bytes == 4 && store_word<uint32_t>(to, src)) return;
  if (bytes == 2 && store_word<uint16_t>(to, src)) return;
  const bool non_temporal = bytes >= non_temporal_bytes;
  ep_copy(to, src, bytes, non_temporal ? 1 : 0);
  if (non_temporal) ep_copy_fence();
}

void symmetric_memory::put(int32_t peer, uint64_t offset, const void* src, uint64_t bytes) const {
  write(peer, offset, src, bytes);
  // OpenSHMEM's wait-until watches ordinary symmetric words: the fence is the signaller's half of the eventcount, then whoever sleeps is woken.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  context_->wake_rank(peer);
}

void symmetric_memory::fence() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int32_t rank = 0; rank < context_->world_size(); ++rank) context_->wake_rank(rank);
}

void symmetric_memory::get(int32_t peer, uint64_t offset, void* dst, uint64_t bytes) const {
  std::atomic_thread_fence(std::memory_order_acquire);
  ep_copy(dst, data(peer) + offset, bytes, 0);
}

void symmetric_memory::signal_word(int32_t peer, uint64_t* address, signal_op op, uint64_t value) const {
  std::atomic_ref<uint64_t> word(*address);
  // Both are locked instructions: the signaller's half of the eventcount needs sequential consistency.
  if (op == signal_op::add) word.fetch_add(value, std::memory_order_seq_cst);
  if (op == signal_op::set) word.exchange(value, std::memory_order_seq_cst);
  if (op == signal_op::none) return;
  ep_wake_word* instead = peer == context_->rank() ? wakes_.load(std::memory_order_acquire) : nullptr;
  if (instead != nullptr) {
    wake_notify(instead);
  } else if (peer == context_->rank()) {
    context_->wake_own();
  } else {
    context_->wake_rank(peer);
  }
}

uint64_t symmetric_memory::atomic(int32_t peer, uint64_t offset, uint32_t width, atomic_op op, uint64_t operand, uint64_t expected) const {
  uint64_t before = 0;
  if (width == 4) {
    before = atomic_typed(reinterpret_cast<uint32_t*>(data(peer) + offset), op, static_cast<uint32_t>(operand), static_cast<uint32_t>(expected));
  } else {
    before = atomic_typed(reinterpret_cast<uint64_t*>(data(peer) + offset), op, operand, expected);
  }
  if (op != atomic_op::fetch) context_->wake_rank(peer);
  return before;
}

} // namespace ep
