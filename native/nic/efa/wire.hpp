// Between the requester's and the responder's half of a request. The shared-memory wire runs the responder's half at once, on the thread of the requester's device, in the
// peer's port segment.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "port.hpp"

namespace ep::nic::efa {

struct wire_reply {
  uint8_t status = EP_EFA_STATUS_OK;
  bool busy = false;         // another device is inside just now: try again
  const char* why = nullptr; // of every status but 0; static text
};

// Whom a request is for, and who sent it.
struct wire_target {
  port_visitor source;
  uint32_t qpn = 0;
  uint32_t qkey = 0;
};

// The memory that a request names, whole, and which part of it is meant now.
struct wire_range {
  uint32_t rkey = 0;
  uint64_t address = 0;
  uint64_t length = 0;
  uint64_t begin = 0; // of the part, in the range
  uint64_t bytes = 0; // 0 of a request without bytes: its key is checked all the same
};

// Brings what memory shows of a counter up to `value`, whatever was stored there: whoever resets it by a store finds that out here. Others may do the same at any time; `between` is
// called where they could come in.
// HAZARD: what is shown is loaded before the value, and replaced if it still is that. Otherwise an older value could follow a newer one, and a count that goes back is read as 2^31
// more.
template <class Between> void count_show(uint64_t& value, uint64_t& memory, const Between& between) {
  const std::atomic_ref<uint64_t> shown(memory);
  uint64_t before = shown.load(std::memory_order_seq_cst);
  for (;;) {
    between();
    const uint64_t now = load_ordered(value) & EP_EFA_COUNTER_MASK;
    between();
    if (before == now || shown.compare_exchange_strong(before, now, std::memory_order_seq_cst)) return;
  }
}

// A port, as its peers and its owner change it.
class wire_peer {
 public:
  explicit wire_peer(port_view view);

  // The peer's process is known to be dead or to have closed its device.
  bool gone() const;
  wire_reply write(const wire_target& target, const wire_range& range, const uint8_t* from);
  wire_reply read(const wire_target& target, const wire_range& range, uint8_t* to);
  // FI_REMOTE_WRITE. A queue pair that went since, or counts no arrivals, is none the worse for it.
  wire_reply tick(const wire_target& target);
  // A request of another kind: there is nobody who could take it.
  wire_reply refuse_send(const wire_target& target);
  // One more in a counter of the port.
  void count(uint32_t index);

 private:
  struct mapping {
    uint64_t generation = 0;
    uint8_t* base = nullptr;
    ep_wake_word* wake = nullptr;
    std::shared_ptr<segment> memory;
    std::shared_ptr<segment> wake_memory;
  };

  static bool enter(uint64_t& active, uint64_t mine);
  // Frees the word of a visitor whose device is gone, to be taken at the next try.
  static void free_if_gone(uint64_t& active);
  template <class Body> wire_reply inside(const wire_target& target, uint32_t key, const Body& body);
  const mapping& map(mapping& known, uint64_t generation, const port_place& place, bool has_wake, const port_place& wake);
  wire_reply find(const wire_range& range, uint32_t right, mapping*& found);

  port_view view_;
  std::vector<mapping> keys_;
  std::vector<mapping> counters_;
  uint32_t full_ = 0; // tries that found all places of a queue pair taken
};

// The ways to all ports of one machine, one object for each.
class fabric {
 public:
  // Null: nobody has this number (any more), or nothing that a device could talk to.
  std::shared_ptr<wire_peer> connect(uint32_t number);

 private:
  std::map<uint32_t, std::shared_ptr<wire_peer>> peers_; // by number
};

// Aligned words of 8 bytes arrive whole.
void copy_words(uint8_t* to, const uint8_t* from, uint64_t bytes);

} // namespace ep::nic::efa
