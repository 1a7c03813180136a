// Queue pairs, completion queues, counters and requests under way, as the device keeps them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "events.hpp"
#include "wire.hpp"
#include "wqe.hpp"

namespace ep::nic::efa {

struct free_memory {
  void operator()(uint8_t* at) const;
};
// Page-aligned and zeroed; null: there is none.
std::unique_ptr<uint8_t, free_memory> page_memory(uint64_t bytes);

struct completion_queue {
  uint32_t number = 0;
  uint32_t depth = 0;
  uint32_t entry_bytes = 0;
  std::unique_ptr<uint8_t, free_memory> memory;
  const uint64_t* polled = nullptr; // how many entries their consumer has taken; null: nobody says
  bool nobody_polls = false;        // the consumer stands at 0
  bool overrun = false;
  ep_wake_word* wake = nullptr;     // notified after an entry was written; null: nobody
  uint64_t produced = 0;
  uint32_t users = 0;

  // Entries that their consumer has not taken; 0 where nobody says.
  uint64_t backlog() const;
};

struct completion {
  uint64_t id = 0;
  uint8_t status = 0;
  uint8_t opcode = 0;
  uint32_t qpn = 0;
};

// False: there was no room, and the queue has overrun for good.
bool completion_write(completion_queue& cq, const completion& what);

struct counter {
  uint32_t index = 0;
  uint32_t users = 0;
  uint64_t failures = 0;
  uint64_t* failed = nullptr;
  std::shared_ptr<segment> memory;
  std::shared_ptr<segment> failed_memory;
  std::shared_ptr<segment> wake_memory;
};

struct queue_pair {
  uint32_t qpn = 0;
  uint32_t index = 0;
  uint32_t depth = 0;
  uint32_t shift = 0; // log2 of depth
  uint32_t max_batch = 0;
  wqe_limits limits;
  std::unique_ptr<uint8_t, free_memory> ring;
  std::unique_ptr<uint8_t, free_memory> bell; // a page; the first 4 bytes are the doorbell
  uint32_t seen = 0;                          // in the doorbell, where stores are not watched
  uint64_t rung = 0;                          // WQEs that doorbells told of
  uint64_t fetched = 0;
  uint64_t told = 0;  // WQEs whose end a poster may know of: by its completion or by a count
  bool failed = false;
  bool hold_fetch = false; // by a fault, until release
  bool hold_decided = false; // the next fetch has been looked up in the script
  uint32_t repeats = 0;    // doorbells that a fault makes come twice
  completion_queue* cq = nullptr;
  counter* written = nullptr;
  counter* read = nullptr;
  counter* arrived = nullptr;
  std::vector<uint64_t> writers; // by 64 bytes of the ring: who stored last, where stores are watched

  uint8_t* entry(uint64_t number) const { return ring.get() + (number & (depth - 1)) * limits.entry_bytes; }
};

struct fragment {
  uint64_t begin = 0;
  uint64_t bytes = 0;
  std::unique_ptr<uint8_t[]> data; // once read, where reading and landing are two events
  wire_ticket ticket;
};

// Fragments of one request in no order, but that those which were asked for over a network, and are not answered, stand first.
class fragment_list {
 public:
  size_t size() const { return all_.size(); }
  bool empty() const { return all_.empty(); }
  uint32_t asked() const { return asked_; }
  fragment& operator[](size_t at) { return all_[at]; }
  const fragment& operator[](size_t at) const { return all_[at]; }
  void add(fragment one) { all_.push_back(std::move(one)); }
  // By its ticket a fragment belongs to those that were asked for, or not; returns where it is now.
  size_t sort(size_t at) {
    const bool asked = all_[at].ticket != nullptr;
    if (asked == (at < asked_)) return at;
    const size_t to = asked ? asked_++ : --asked_;
    if (to != at) std::swap(all_[at], all_[to]);
    return to;
  }
  // Its ticket is null.
  fragment take(size_t at) {
    at = sort(at);
    fragment taken = std::move(all_[at]);
    if (at + 1 != all_.size()) all_[at] = std::move(all_.back());
    all_.pop_back();
    return taken;
  }
  void clear() {
    all_.clear();
    asked_ = 0;
  }

 private:
  std::vector<fragment> all_;
  uint32_t asked_ = 0;
};

// A request that was fetched and is not over.
struct request {
  queue_pair* qp = nullptr;
  uint64_t number = 0;
  work_request what;
  uint64_t serial = 0; // another one for each request of the device
  uint32_t peer_port = 0;
  std::shared_ptr<wire_peer> peer;
  uint8_t status = 0;
  const char* note = nullptr;
  fragment_list unread;
  fragment_list unlanded;
  bool moving = true; // fragments are left, or an error that its peer has to be asked for
  bool tick_due = false;
  bool ack_due = false;
  bool cqe_due = false;
  bool count_due = false;
  bool told = false; // counted in queue_pair::told
  uint32_t held = 0; // bits of stages
  std::array<int64_t, stages> due_ns{};
  int64_t begun_ns = 0;
  int64_t give_up_ns = 0; // when a peer that does not answer is given up; 0: it has not been asked
  wire_ticket tick_ticket;
  int64_t asked_ns = 0; // when anything was last asked over a network
  int64_t look_ns = 0;  // when to look whether its peer is silent
  alignas(8) std::array<uint8_t, EP_EFA_WIDE_WQE_BYTES> wqe{};

  bool reads() const { return what.opcode == EP_EFA_OPCODE_RDMA_READ; }
  bool over() const { return !moving && !tick_due && !ack_due && !cqe_due && !count_due; }
};

} // namespace ep::nic::efa
