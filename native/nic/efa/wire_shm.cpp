#include <algorithm>
#include <cstring>

#include "dl/efa.hpp"
#include "ep/device/copy.h"
#include "waiting.hpp"
#include "wire.hpp"

namespace ep::nic::efa {
namespace {

// A piece of at least this goes past the caches, as a NIC's writes mostly do; below, the caches are faster than memory.
constexpr uint64_t stream_bytes = 64 * 1024;
// Up to this, words are stored one by one: they are what kernels poll.
constexpr uint64_t polled_bytes = 128;
// Looking up the device of a visitor who is in the way is slow, and mostly it is only being quick elsewhere.
constexpr uint32_t tries_to_look = 64;

template <class Word> void copy_one(uint8_t* to, const uint8_t* from) {
  Word word;
  std::memcpy(&word, from, sizeof word);
  store_release(*reinterpret_cast<Word*>(to), word);
}

} // namespace

void copy_words(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  if (bytes >= stream_bytes) {
    ep_copy(to, from, bytes, 1);
    ep_copy_fence();
    return;
  }
  if (bytes > polled_bytes) {
    std::memcpy(to, from, bytes);
    return;
  }
  while (bytes != 0) {
    const auto at = reinterpret_cast<uintptr_t>(to);
    uint64_t step = 1;
    if (at % 8 == 0 && bytes >= 8) {
      step = 8;
      copy_one<uint64_t>(to, from);
    } else if (at % 4 == 0 && bytes >= 4) {
      step = 4;
      copy_one<uint32_t>(to, from);
    } else {
      *to = *from;
    }
    to += step;
    from += step;
    bytes -= step;
  }
}

shm_peer::shm_peer(port_view view) : view_(std::move(view)), keys_(port_max_keys), counters_(port_max_counters) {}

bool shm_peer::gone() const {
  const uint32_t life = life_state(&view_.header().life);
  return life == EP_LIFE_DEAD || life == EP_LIFE_CLOSED;
}

bool shm_peer::enter(uint64_t& word, uint64_t mine) {
  uint64_t nobody = 0;
  return std::atomic_ref<uint64_t>(word).compare_exchange_strong(nobody, mine, std::memory_order_seq_cst);
}

void shm_peer::free_if_gone(uint64_t& word) {
  uint64_t visitor = load_ordered(word);
  if (visitor != 0 && visitor_gone(visitor)) std::atomic_ref<uint64_t>(word).compare_exchange_strong(visitor, 0, std::memory_order_seq_cst);
}

template <class Body> wire_reply shm_peer::inside(const wire_target& target, uint32_t key, const Body& body) {
  const port_header& header = view_.header();
  const uint32_t source = target.source.number;
  const uint32_t sender = target.sender;
  if (load_acquire(header.link_up) == 0) return {EP_EFA_STATUS_UNREACHABLE, false, "the peer's link is down"};
  if (life_state(&header.life) != EP_LIFE_ALIVE) return {EP_EFA_STATUS_UNRESPONSIVE, false, "the peer's device is gone"};
  if ((load_acquire(header.known[sender / 64]) >> sender % 64 & 1) == 0) {
    return {EP_EFA_STATUS_UNKNOWN_PEER, false, "the peer has no address handle for this device"};
  }
  port_qp& qp = view_.qp((target.qpn - port_first_qpn) % port_max_qps);
  // Announce first, then read the tables: whoever takes something away clears it, then looks here. Both in one order of all such operations.
  uint64_t* mine = nullptr;
  for (uint32_t i = 0; i < port_insiders && mine == nullptr; ++i) {
    uint64_t& place = qp.active[(source + i) % port_insiders];
    if (enter(place, active_of(target.source, key))) mine = &place;
  }
  if (mine == nullptr) {
    // Of all places at once: whoever takes turns looks at some of them only, by the parities of the counts.
    if (++full_ % tries_to_look == 0) std::for_each(std::begin(qp.active), std::end(qp.active), free_if_gone);
    return {EP_EFA_STATUS_OK, true, nullptr};
  }
  wire_reply reply;
  if (target.qpn == 0 || load_ordered(qp.qpn) != target.qpn) {
    reply = {EP_EFA_STATUS_REMOTE_BAD_DEST_QPN, false, "the peer has no such queue pair"};
  } else if (qp.qkey != target.qkey) {
    reply = {EP_EFA_STATUS_REMOTE_BAD_DEST_QPN, false, "the qkey is not that of the peer's queue pair"};
  } else {
    reply = body(qp);
  }
  store_release(*mine, uint64_t{0});
  return reply;
}

const shm_peer::mapping& shm_peer::map(mapping& known, uint64_t generation, const port_place& place, bool has_wake, const port_place& wake) {
  if (known.generation == generation) return known;
  forget_gone();
  known = mapping{};
  known.base = view_.map(place, known.memory);
  if (known.base == nullptr) return known; // generation 0: the next request tries again
  if (has_wake) known.wake = reinterpret_cast<ep_wake_word*>(view_.map(wake, known.wake_memory));
  known.generation = generation;
  return known;
}

void shm_peer::forget_gone() {
  for (uint32_t index = 0; index < port_max_keys; ++index) {
    // HAZARD: of a key nothing else may be read by whoever has not announced it.
    if (keys_[index].generation != 0 && load_ordered(view_.key(index).key) != keys_[index].number) keys_[index] = mapping{};
  }
  for (uint32_t index = 0; index < port_max_counters; ++index) {
    if (counters_[index].generation != 0 && load_ordered(view_.counter(index).generation) != counters_[index].generation) counters_[index] = mapping{};
  }
}

wire_reply shm_peer::find(const wire_range& range, uint32_t right, mapping*& found) {
  const wire_reply none{EP_EFA_STATUS_REMOTE_BAD_ADDRESS, false, "the peer has no such rkey"};
  if ((range.rkey & ~EP_EFA_LKEY_MASK) != port_rkey_bits) return none;
  const uint32_t number = range.rkey & EP_EFA_LKEY_MASK;
  const uint32_t index = number >> 8;
  if (number == 0 || index >= port_max_keys) return none;
  const port_key& key = view_.key(index);
  if (load_ordered(key.key) != number) return none;
  if ((key.access & right) == 0) return {EP_EFA_STATUS_REMOTE_BAD_ADDRESS, false, "the rkey does not give this right"};
  const uint64_t from = range.address - key.address;
  if (range.address < key.address || from > key.bytes || range.length > key.bytes - from) {
    return {EP_EFA_STATUS_REMOTE_BAD_ADDRESS, false, "the range ends outside of what the rkey covers"};
  }
  const mapping& mapped = map(keys_[index], key.generation, key.place, key.has_wake != 0, key.wake);
  if (mapped.base == nullptr) {
    return {EP_EFA_STATUS_REMOTE_ABORT, false, "the peer registered memory that lies in no segment (only devices of its own process reach it), or that is gone"};
  }
  keys_[index].number = number;
  found = &keys_[index];
  return {};
}

wire_reply shm_peer::write(const wire_target& target, const wire_range& range, const uint8_t* from) {
  return inside(target, range.rkey & EP_EFA_LKEY_MASK, [&](port_qp&) {
    mapping* to = nullptr;
    const wire_reply reply = find(range, dl::EFA_ACCESS_REMOTE_WRITE, to);
    if (reply.status != EP_EFA_STATUS_OK) return reply;
    if (range.bytes == 0) return reply;
    copy_words(to->base + (range.address - view_.key((range.rkey & EP_EFA_LKEY_MASK) >> 8).address) + range.begin, from, range.bytes);
    if (to->wake != nullptr) {
      std::atomic_thread_fence(std::memory_order_seq_cst);
      wake_notify(to->wake);
    }
    return reply;
  });
}

wire_reply shm_peer::read(const wire_target& target, const wire_range& range, uint8_t* to) {
  return inside(target, range.rkey & EP_EFA_LKEY_MASK, [&](port_qp&) {
    mapping* from = nullptr;
    const wire_reply reply = find(range, dl::EFA_ACCESS_REMOTE_READ, from);
    if (reply.status != EP_EFA_STATUS_OK || range.bytes == 0) return reply;
    copy_words(to, from->base + (range.address - view_.key((range.rkey & EP_EFA_LKEY_MASK) >> 8).address) + range.begin, range.bytes);
    return reply;
  });
}

wire_reply shm_peer::refuse_send(const wire_target& target) {
  return inside(target, 0, [](port_qp&) { return wire_reply{EP_EFA_STATUS_REMOTE_RNR, false, "the peer's queue pair has no receive buffers"}; });
}

wire_reply shm_peer::tick(const wire_target& target) {
  return inside(target, 0, [&](port_qp& qp) {
    if (qp.counter != 0) count(qp.counter - 1);
    return wire_reply{};
  });
}

// HAZARD: no lock. A sender may be stopped anywhere in here, and the signal is still everybody's: what it has counted and not shown yet, the next one shows.
void shm_peer::count(uint32_t index) {
  port_counter& counter = view_.counter(index);
  const uint64_t generation = load_ordered(counter.generation);
  if (generation == 0) return;
  std::atomic_ref<uint64_t>(counter.value).fetch_add(1, std::memory_order_seq_cst);
  const mapping& mapped = map(counters_[index], generation, counter.place, counter.has_wake != 0, counter.wake);
  if (mapped.base == nullptr) return;
  count_show(counter.value, *reinterpret_cast<uint64_t*>(mapped.base), [] {});
  if (mapped.wake != nullptr) wake_notify(mapped.wake);
}

uint32_t fabric::number_of(const gid_bytes& gid) const {
  if (hub_ == nullptr) return number_of_gid(gid);
  return gid == hub_->gid() ? own_ : hub_->number_of(gid);
}

std::shared_ptr<wire_peer> fabric::connect(uint32_t number) {
  // Whoever lives keeps its number, so the directory, which is a file that the kernel writes anew for each reader, is asked about strangers and those who have gone only.
  const auto known = peers_.find(number);
  if (known != peers_.end() && !known->second->gone()) return known->second;
  if (known != peers_.end()) peers_.erase(known);
  if (number > directory_ports) return hub_ == nullptr ? nullptr : peers_[number] = peer_of_network(*hub_, number);
  auto handle = directory_find(number);
  if (!handle.ok()) return nullptr;
  auto view = port_view::open(handle.value());
  if (!view.ok() || view.value().header().number != number) return nullptr;
  // Another one comes where some are gone, mostly: what is mapped of those is given back.
  std::erase_if(peers_, [](const auto& one) { return one.second->gone(); });
  return peers_[number] = std::make_shared<shm_peer>(std::move(view.value()));
}

} // namespace ep::nic::efa
