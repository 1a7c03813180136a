// The port segment of a software EFA: what it shares with those of its peers. They execute the responder's half of their requests in it, so that a stopped process is
// still written to, as by a real device; its life word says when nobody answers any more.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "ep/abi/efa_cqe.h"
#include "ep/abi/efa_wqe.h"
#include "ep/abi/rank.h"
#include "ep/abi/segment.h"
#include "nic/mlx5/directory.hpp"
#include "segment.hpp"
#include "status.hpp"

namespace ep::nic::efa {

// Raise it when a layout of this file changes: devices of two builds must not meet.
inline constexpr uint32_t port_version = 3;
inline constexpr uint32_t port_magic = 0x31414645; // "EFA1"
inline constexpr uint32_t port_max_qps = 1024;
inline constexpr uint32_t port_max_keys = 1024;
inline constexpr uint32_t port_max_counters = 1024;
inline constexpr uint32_t port_first_qpn = 0x100;
inline constexpr uint32_t port_insiders = 6;
// An rkey is no lkey: whoever mixes them up is refused.
inline constexpr uint32_t port_rkey_bits = 0x45000000;

// Bytes of the owner that peers reach: in a segment, which they map, or (pid 0) at an address, for peers of the same process only.
struct port_place {
  uint64_t offset; // in `memory`, or the address
  ep_segment_handle memory;
};

// One memory region. `key` is stored last and cleared first, so whoever finds it while it is announced (port_qp::active) may use the rest.
struct port_key {
  uint32_t key; // the lkey: index << 8 | variant; 0: free
  uint32_t access;       // dl::EFA_ACCESS_*
  uint64_t address;    // by which requests name the first byte
  uint64_t bytes;
  uint64_t generation; // another one for each registration: readers keep mappings by it
  port_place place;
  port_place wake;     // an ep_wake_word, told of landed writes; has_wake 0: none. Emulator only
  uint32_t has_wake;
  uint32_t reserved[3];
};
static_assert(sizeof(port_key) == 176, "indexed by key >> 8");

// A completion counter. Senders count in it at the same time, and none of them can hold the others up, wherever it stops: see shm_peer::count.
struct port_counter {
  uint64_t reserved0;
  uint64_t value;      // EP_EFA_COUNTER_MASK of it is what memory shows, or will; atomic
  uint64_t generation; // 0: free
  port_place place;
  port_place wake;
  uint32_t has_wake;
  uint32_t reserved[5];
};
static_assert(sizeof(port_counter) == 176, "indexed by counter");

// The responder's half of one queue pair.
struct port_qp {
  uint32_t qpn;     // 0: none; set last, cleared first; atomic
  uint32_t qkey;
  uint32_t counter; // 1 + index of the counter of arrivals; 0: none
  uint32_t reserved0;
  // Each announces that somebody is inside (active_of). Set by compare-exchange from 0 before the tables are read, cleared after the last access. Whoever takes a key or a queue
  // pair away clears it, then waits for these. Several, because a queue pair has many senders, and one that was stopped inside must not keep all others out.
  uint64_t active[port_insiders];
};
static_assert(sizeof(port_qp) == 64, "two queue pairs share no cache line");

// Who is inside, and with which lkey: the number of a port alone could be another device's by now, so 15 bits of its segment's nonce go with it.
struct port_visitor {
  uint32_t number = 0;
  uint64_t nonce = 0;
};
constexpr uint64_t active_of(const port_visitor& who, uint32_t lkey) {
  return uint64_t{1} << 63 | (who.nonce & 0x7fff) << 48 | uint64_t{who.number & 0xffff} << 32 | lkey;
}
// The visitor's device is gone, so it does nothing there any more.
bool visitor_gone(uint64_t active);

struct port_header {
  ep_handle_header header; // port_magic, kind = port_version
  uint32_t number;         // the port's place in the directory: its GID is made of it
  uint32_t pid;
  uint32_t link_up; // atomic
  uint32_t reserved0;
  uint64_t process_nonce; // equal for the ports of one process: pids are reused
  uint64_t reserved1[3];
  ep_life_word life;
  ep_wake_word doorbell; // the device's thread sleeps on it
  uint64_t reserved2[7];
  uint64_t known[65536 / 64]; // a bit for each number, also of devices on a network, that this device has an address handle for; atomic
};

class port_view {
 public:
  // Makes one's own port; the life word is begun by whoever runs the device.
  static result<port_view> create();
  static result<port_view> open(const ep_segment_handle& handle);

  const std::shared_ptr<segment>& mapping() const { return mapping_; }
  port_header& header() const { return *reinterpret_cast<port_header*>(mapping_->data()); }
  port_qp& qp(uint32_t index) const { return reinterpret_cast<port_qp*>(mapping_->data() + qps_at)[index]; }
  port_key& key(uint32_t index) const { return reinterpret_cast<port_key*>(mapping_->data() + keys_at)[index]; }
  port_counter& counter(uint32_t index) const { return reinterpret_cast<port_counter*>(mapping_->data() + counters_at)[index]; }
  bool same_process() const;
  // Where the owner's bytes are here. Null: they lie in no segment and the owner is another process, or the segment is gone. `held` keeps the mapping.
  uint8_t* map(const port_place& place, std::shared_ptr<segment>& held) const;

 private:
  static constexpr uint64_t qps_at = (sizeof(port_header) + 4095) / 4096 * 4096;
  static constexpr uint64_t keys_at = qps_at + uint64_t{port_max_qps} * sizeof(port_qp);
  static constexpr uint64_t counters_at = keys_at + uint64_t{port_max_keys} * sizeof(port_key);
  static constexpr uint64_t port_bytes = counters_at + uint64_t{port_max_counters} * sizeof(port_counter);

  std::shared_ptr<segment> mapping_;
};

port_place place_of(const void* address, uint64_t bytes, std::shared_ptr<segment>& held);

template <class Word> Word load_acquire(const Word& word) { return std::atomic_ref<Word>(const_cast<Word&>(word)).load(std::memory_order_acquire); }
template <class Word> Word load_ordered(const Word& word) { return std::atomic_ref<Word>(const_cast<Word&>(word)).load(std::memory_order_seq_cst); }
template <class Word> void store_release(Word& word, Word value) { std::atomic_ref<Word>(word).store(value, std::memory_order_release); }
template <class Word> void store_ordered(Word& word, Word value) { std::atomic_ref<Word>(word).store(value, std::memory_order_seq_cst); }

} // namespace ep::nic::efa
