// The port segment: what a software NIC shares with the NICs of its peers. They execute the responder's half of their requests in it, so that a stopped
// process is still written to, as by a real NIC; its life word says when nobody answers any more.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "ep/abi/rank.h"
#include "ep/abi/segment.h"
#include "segment.hpp"
#include "status.hpp"

namespace ep::nic {

// Raise it when a layout of this file changes: NICs of two builds must not meet.
inline constexpr uint32_t port_version = 2;
inline constexpr uint32_t port_magic = 0x314e4745; // "EGN1"
inline constexpr uint32_t port_max_qps = 1024;
inline constexpr uint32_t port_max_keys = 1024;
inline constexpr uint32_t port_first_qpn = 0x100;
inline constexpr uint32_t port_inbox_slots = 16;
inline constexpr uint32_t port_kept_atomics = 16; // what a requester may have under way: 1 << 4 of log_rra_max

// One memory region. `key` is stored last and cleared first, so whoever finds it while it is announced (port_qp::active) may use the rest.
struct port_key {
  uint32_t key; // index << 8 | variant; 0: free
  uint32_t access; // dl::MLX5_ACCESS_*
  uint32_t pdn;
  uint32_t reserved0;
  uint64_t iova; // the address by which requests name the first byte
  uint64_t bytes;
  uint64_t offset;      // of the first byte in `memory`; without one: its address in the owner's process
  uint64_t wake_offset; // of an ep_wake_word in `wake`, told of landed writes and atomics; UINT64_MAX: none. Emulator only
  uint64_t generation;  // another one for each registration: readers keep mappings by it
  uint64_t reserved1;
  ep_segment_handle memory; // pid 0: the bytes lie in no segment, and only peers of the same process reach them
  ep_segment_handle wake;
  uint64_t reserved2[2];
};
static_assert(sizeof(port_key) == 192, "indexed by key >> 8");

enum class qp_state : uint32_t { none = 0, reset = 1, init = 2, rtr = 3, rts = 4, error = 5 };

inline constexpr uint32_t qp_right_write = 1;
inline constexpr uint32_t qp_right_read = 2;
inline constexpr uint32_t qp_right_atomic = 4;

// What a write with immediate leaves for the responder's NIC, which makes a completion of it.
struct port_inbox {
  uint32_t immediate; // as in the request: big endian
  uint32_t byte_count;
};

// Result of an atomic, for a request that is sent again.
struct port_atomic {
  uint64_t old;
  uint32_t psn; // of 24 bits, so UINT32_MAX: none
  uint32_t reserved0;
};

// The responder's half of one queue pair.
struct port_qp {
  uint32_t state; // qp_state; atomic
  uint32_t remote_qpn;
  uint32_t remote_port;
  uint32_t pdn;
  uint32_t rights; // qp_right_*
  uint32_t mtu_bytes;
  uint32_t expected_psn; // 24 bits; atomic
  uint32_t has_receive_queue;
  // Announces which key is in use: active_mark | port of the requester << 32 | key. Set by compare-exchange from 0 before the tables are read, cleared
  // after the last access. Whoever takes a key or a queue pair away clears it, then waits for this.
  uint64_t active;
  uint64_t received_packets; // since the queue pair was connected
  uint32_t atomics_kept; // since then; the next one's place in the ring
  uint32_t rnr_timer; // min_rnr_nak of the context
  uint32_t receive_posted; // by the owner's NIC, as its doorbell record says; atomic
  uint32_t receive_taken;  // by requests; atomic
  uint32_t receive_done;   // completions written by the owner's NIC; atomic
  port_inbox inbox[port_inbox_slots];
  uint32_t reserved0;
  port_atomic atomics[port_kept_atomics];
  uint64_t reserved1[7];
};
static_assert(sizeof(port_qp) == 512, "two queue pairs share no cache line");

inline constexpr uint64_t active_mark = uint64_t{1} << 63;

struct port_header {
  ep_handle_header header; // port_magic, kind = port_version
  uint32_t number;         // the port's place in the directory; also its LID
  uint32_t pid;
  uint32_t link_up; // atomic
  uint32_t reserved0;
  uint64_t process_nonce; // equal for the ports of one process: pids are reused
  uint64_t reserved1[3];
  ep_life_word life;
  ep_wake_word doorbell; // the NIC's thread sleeps on it
  uint64_t reserved2[7];
};
static_assert(sizeof(port_header) == 192, "the tables follow");

inline constexpr uint64_t port_bytes =
    sizeof(port_header) + uint64_t{port_max_qps} * sizeof(port_qp) + uint64_t{port_max_keys} * sizeof(port_key);

// A view of one's own or a peer's port.
class port_view {
 public:
  // Makes one's own port; the life word is begun by whoever runs the NIC.
  static result<port_view> create();
  static result<port_view> open(const ep_segment_handle& handle);

  const std::shared_ptr<segment>& mapping() const { return mapping_; }
  port_header& header() const { return *reinterpret_cast<port_header*>(mapping_->data()); }
  port_qp& qp(uint32_t index) const { return reinterpret_cast<port_qp*>(mapping_->data() + sizeof(port_header))[index]; }
  port_key& key(uint32_t index) const {
    return reinterpret_cast<port_key*>(mapping_->data() + sizeof(port_header) + uint64_t{port_max_qps} * sizeof(port_qp))[index];
  }
  bool same_process() const;

 private:
  std::shared_ptr<segment> mapping_;
};

template <class Word> Word load_acquire(const Word& word) { return std::atomic_ref<Word>(const_cast<Word&>(word)).load(std::memory_order_acquire); }
template <class Word> Word load_ordered(const Word& word) { return std::atomic_ref<Word>(const_cast<Word&>(word)).load(std::memory_order_seq_cst); }
template <class Word> void store_release(Word& word, Word value) { std::atomic_ref<Word>(word).store(value, std::memory_order_release); }
template <class Word> void store_ordered(Word& word, Word value) { std::atomic_ref<Word>(word).store(value, std::memory_order_seq_cst); }

} // namespace ep::nic
