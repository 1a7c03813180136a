// Symmetric memory over shared segments: every rank's part is mapped here.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "ep/abi/memory.h"
#include "rank.hpp"

namespace ep {

enum class atomic_op : uint32_t { fetch = 0, set = 1, add = 2, bit_and = 3, bit_or = 4, bit_xor = 5, swap = 6, compare_swap = 7 };
enum class signal_op : uint32_t { none = 0, add = 1, set = 2 };

// How kernels reach peers where these are not mapped, and what that needs beforehand.
class memory_route {
 public:
  virtual ~memory_route() = default;
  // Before kernels send from these bytes. `keep` holds them; with it they may go away.
  virtual result<nothing> prepare_source(uint64_t address, uint64_t bytes, const std::shared_ptr<const void>& keep) = 0;
  // Whether kernels on this process's processors may use the way; they cannot read what lies in a GPU.
  virtual bool serves_host_kernels() const { return true; }
  // Ends the way by which a rank that is dead wrote here. True: nothing of it lands any more. For any thread.
  virtual bool end_way(int32_t) { return true; }
  // Whether a peer is not reached for a reason that lies here: one's own port is down, or the NIC has failed, or a request was at fault. `found`: EP_NIC_FOUND_* of a queue pair
  // that broke, 0: none did. For any thread.
  virtual bool own_fault(uint64_t) { return false; }
};

class symmetric_memory {
 public:
  // Makes this rank's part: signal words, zeroed, then data.
  static result<std::shared_ptr<symmetric_memory>> create(std::shared_ptr<rank_context> context, uint64_t byte_length, uint64_t signal_slots);
  // The bytes and words of `base` once more, for a NIC to reach too: to be connected by it. Waits are base's, and end with its rank; so does what wakes them. Kernels store
  // to the ranks of `near`, whose parts base maps, and to this one. EP_STATUS_INVALID names a rank that base does not map.
  static result<std::shared_ptr<symmetric_memory>> over(std::shared_ptr<symmetric_memory> base, const std::vector<int32_t>& near);
  // The memory that a device handle names; null once it is gone. Handles are bytes that JS could keep or forge: an id is looked up, never dereferenced.
  static std::shared_ptr<symmetric_memory> find(uint64_t memory_id);
  ~symmetric_memory();

  // Maps the peers' parts. EP_STATUS_MISMATCH names ranks whose sizes differ. A handle of zeroes: the rank is not here, and what is written to it is lost.
  result<nothing> connect(const std::vector<ep_segment_handle>& handles);
  // After that: the part of a rank that has come in the place of a dead one, at the addresses of the old part. Nothing here may be using those.
  result<nothing> replace(int32_t rank, const ep_segment_handle& handle);

  // Maps nothing: peers' parts are reached by a NIC only, and have no address here. `route` lives as long as this memory; `kind` says by which one
  // (EP_MEMORY_PROXY, EP_MEMORY_IBGDA, EP_MEMORY_EFA), `address` is of what kernels are given as ep_memory_handle.proxy. Of a memory over another: the kind becomes that of
  // mixed ways, and those that are near keep the addresses that the other has.
  result<nothing> connect_by_nic(std::shared_ptr<memory_route> route, uint32_t kind, uint64_t address);

  bool is_over() const { return base_ != nullptr; }
  bool connected() const { return !views_.empty(); }
  bool mapped(int32_t rank) const { return views_[static_cast<size_t>(rank)].data != 0; }
  result<nothing> prepare_source(uint64_t address, uint64_t bytes, const std::shared_ptr<const void>& keep) const {
    return route_ ? route_->prepare_source(address, bytes, keep) : result<nothing>(nothing{});
  }
  bool serves_host_kernels() const { return !route_ || route_->serves_host_kernels(); }
  // As memory_route::end_way. HAZARD: a NIC outlives its rank, and carries out what it had taken over: where that could land in what others write, a death alone ends nothing.
  bool end_way(int32_t rank) const { return !route_ || route_->end_way(rank); }
  bool own_fault(uint64_t found) const { return route_ && route_->own_fault(found); }
  // One's own part, also before it is connected.
  uint8_t* own_data() const;
  uint64_t* own_signals() const;

  // What lands in this rank's part, and is told by signals, wakes whoever sleeps on this word (null: on the rank's own, as ever), and nobody else. HAZARD: no wait of JS or of a kernel may then
  // be for a word of this memory.
  void wake_instead(ep_wake_word* word) { wakes_.store(word, std::memory_order_release); }
  bool wakes_rank() const { return wakes_.load(std::memory_order_acquire) == nullptr; }

  // From here on kernels reach peers only through the requests of this ring (EP_MEMORY_PROXY): their handle has no address of a peer.
  void use_proxy(std::shared_ptr<ep_proxy_ring> ring);

  const ep_segment_handle& handle() const { return own_->handle(); }
  const ep_memory_handle& device_handle() const { return device_; }
  uint64_t byte_length() const { return byte_length_; }
  uint64_t signal_slots() const { return signal_slots_; }
  rank_context& context() const { return *context_; }
  const std::shared_ptr<rank_context>& shared_context() const { return context_; }

  // Keeps the bytes of a mapped part where they are, and nothing else: no way to a peer.
  std::shared_ptr<const void> mapping(int32_t rank) const {
    if (base_) return base_->mapping(rank);
    return peers_.empty() ? own_ : peers_[static_cast<size_t>(rank)];
  }
  uint8_t* data(int32_t rank) const { return reinterpret_cast<uint8_t*>(views_[static_cast<size_t>(rank)].data); }
  uint64_t* signal(int32_t rank, uint64_t slot) const { return reinterpret_cast<uint64_t*>(views_[static_cast<size_t>(rank)].signals) + slot; }

  // Bounds are the caller's business (checked once, in JS, by SymmetricMemory.remote). Copies, then wakes the peer, which may wait for a word of these bytes.
  // Signals nothing: a signal that follows on this thread says that these bytes, and all of its earlier ones, have landed.
  void put(int32_t peer, uint64_t offset, const void* src, uint64_t bytes) const;
  // Wakes nobody: for bytes that a signal follows.
  void write(int32_t peer, uint64_t offset, const void* src, uint64_t bytes) const;
  // Orders this thread's earlier stores, also those made through windows, before its later ones, and wakes whoever may wait for them.
  void fence() const;
  void get(int32_t peer, uint64_t offset, void* dst, uint64_t bytes) const;
  void signal_update(int32_t peer, uint64_t slot, signal_op op, uint64_t value) const { signal_word(peer, signal(peer, slot), op, value); }
  // The same for a word of the data part, at an offset that is a multiple of 8.
  void signal_data(int32_t peer, uint64_t offset, signal_op op, uint64_t value) const {
    signal_word(peer, reinterpret_cast<uint64_t*>(data(peer) + offset), op, value);
  }
  // On a word of `width` 4 or 8 bytes at an offset that is a multiple of it. Returns the value before.
  uint64_t atomic(int32_t peer, uint64_t offset, uint32_t width, atomic_op op, uint64_t operand, uint64_t expected) const;

 private:
  symmetric_memory() = default;
  static std::shared_ptr<symmetric_memory> registered(std::shared_ptr<symmetric_memory> made);
  void describe(uint32_t kind);
  void signal_word(int32_t peer, uint64_t* word, signal_op op, uint64_t value) const;
  std::shared_ptr<rank_context> context_;
  std::shared_ptr<segment> own_;
  std::vector<std::shared_ptr<segment>> peers_;
  std::vector<ep_peer_view> views_;
  std::shared_ptr<symmetric_memory> base_; // none: the part is this one's own
  std::vector<int32_t> near_;
  std::shared_ptr<memory_route> route_;
  std::shared_ptr<ep_proxy_ring> proxy_;
  std::atomic<ep_wake_word*> wakes_{nullptr};
  std::vector<ep_peer_view> proxy_views_;
  ep_memory_handle device_{};
  uint64_t byte_length_ = 0;
  uint64_t signal_slots_ = 0;
};

} // namespace ep
